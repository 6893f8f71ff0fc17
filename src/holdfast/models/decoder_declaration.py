"""DecoderDeclaration: weights, caches and scratch of the decoder; the only source for plan, load and run; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.cache.places import place_bytes
from holdfast.distributed.mesh import Mesh
from holdfast.families.state.spec import StateSpec
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import (
    Request,
    fused_decode_request,
    head_request,
    quantized_rows_request,
    room_elements,
    row_scaled_request,
    step_requests,
    takes_fused_decode,
)
from holdfast.models.declaration import CacheRows, HeadGeometry, StepShape, indivisible_experts, rank_experts, split
from holdfast.models.declared_weights import Weight, weight_of
from holdfast.models.parameters import CheckpointNames, Parameter, list_before_layers, list_behind_layers, list_layer
from holdfast.models.sharding import shard_parameters, vocabulary_rows
from holdfast.models.spec import LayerKind, ModelSpec
from holdfast.quant.formats import QUANTIZED_HEAD_DIM, KVFormat
from holdfast.quant.weight_schemes import MXFP4


class DecoderDeclaration(NamedTuple):
    """A decoder, with methods that answer for a rank."""

    decoder: ModelSpec
    names: CheckpointNames
    native: str | None = None
    """The scheme of the checkpoint's matrices."""
    expert_native: str | None = None
    """The scheme of experts, if it differs."""

    def rope_pairs(self, mesh: Mesh) -> int:
        spec = self.rank(mesh)
        return len(spec.rope_sets) * (spec.rope_dim // 2)

    def indivisible(self, mesh: Mesh) -> str | None:
        spec, num_ranks = self.decoder, mesh.tensor_size
        reason = split(spec.num_heads, num_ranks, "query heads")
        if reason is None and spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
            reason = (
                f"{spec.num_kv_heads} key heads neither divide into {num_ranks} parts nor are shared by them evenly"
            )
        if reason is None and spec.has_mlp:
            reason = split(spec.intermediate_size, num_ranks, "columns of the MLP")
        if reason is None and spec.state is not None:
            reason = split(spec.state.key_heads, num_ranks, "key heads of layers with a state")
            if spec.state.is_tiled and num_ranks > 1:
                reason = "a GGUF file of this model mixes the value heads of all ranks in its output projections"
            reason = reason or self._stage_without_tokens(mesh, spec.state)
        if reason is None and spec.experts is not None:
            reason = indivisible_experts(spec.experts, mesh)
        if reason is None and mesh.is_exact:
            reason = split(spec.hidden_size, num_ranks, "columns of the stream, which ranks gather,")
        if reason is None and num_ranks > 1 and spec.vocab_size <= -(-spec.vocab_size // num_ranks) * (num_ranks - 1):
            reason = f"a vocabulary of {spec.vocab_size} tokens leaves none for the last of {num_ranks} ranks"
        return reason

    def _stage_without_tokens(self, mesh: Mesh, state: StateSpec) -> str | None:
        """Return None, or why a pipeline stage cannot run: it needs a layer of either kind.

        Pages are planned by layers that attend to tokens, and all ranks cut prompts by one rule.
        """
        layers = mesh.layer_range(self.decoder.num_layers)
        num_states = sum(layer in state.layers for layer in layers)
        if mesh.layers is None or 0 < num_states < len(layers):
            return None
        all_do, one_does = (
            ("keep a state", "attends to tokens") if num_states else ("attend to tokens", "keeps a state")
        )
        return f"layers {layers.start} to {layers.stop - 1} all {all_do}, and a stage needs one that {one_does}"

    def weights(self, mesh: Mesh) -> tuple[Weight, ...]:
        spec = self.decoder
        weights = self._weights(list_before_layers(spec, self.names), mesh)
        first_of: dict[LayerKind, tuple[int, list[Weight]]] = {}
        layers = mesh.layer_range(spec.num_layers)
        for layer in layers:
            kind = spec.layer_kind(layer)
            if kind not in first_of:
                listed = list_layer(spec, self.names, layer, with_layouts=False)
                first_of[kind] = layer, self._weights(listed, mesh)
            weights += self._as_in(layer, layers.start, *first_of[kind])
        return (*weights, *self._weights(list_behind_layers(spec, self.names), mesh))

    def _weights(self, parameters: Sequence[Parameter], mesh: Mesh) -> list[Weight]:
        """Return a rank's share of the model's parameters."""
        linear = None if self.native == MXFP4.name else self.native
        natives: dict[str, str | None] = {"linear": linear, "expert": self.expert_native or self.native}
        shared = shard_parameters(parameters, mesh, *self.decoder.units)
        return [weight_of(parameter, natives.get(parameter.kind)) for parameter in shared]

    def _as_in(self, layer: int, first: int, other: int, weights: list[Weight]) -> list[Weight]:
        """Copy another layer's weights to this one: only names differ, and a layer may have hundreds of experts."""
        ours, theirs, whole = f"layers.{layer - first}.", self.names.layer.format(layer), f"layers.{layer}."
        our_start, their_start = len(f"layers.{other - first}."), len(self.names.layer.format(other))
        return [
            weight._replace(
                name=ours + weight.name[our_start:],
                tensors=tuple([theirs + tensor[their_start:] for tensor in weight.tensors]),
                whole_name=whole + weight.name[our_start:] if first else "",
            )
            for weight in weights
        ]

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        head_dim = self.decoder.head_dim
        if kv_format.is_quantized and head_dim % QUANTIZED_HEAD_DIM:
            return f"head_dim is {head_dim}, and heads of a multiple of {QUANTIZED_HEAD_DIM} elements can be quantized"
        return None

    def cache_rows(self, kv_format: KVFormat, mesh: Mesh) -> tuple[CacheRows, ...]:
        spec = self.rank(mesh)
        num_layers = spec.num_layers - (0 if spec.state is None else len(spec.state.layers))
        return (CacheRows("attention", num_layers, kv_format.bytes_per_token(spec.num_kv_heads, spec.head_dim)),)

    def sequence_bytes(self, kv_format: KVFormat, mesh: Mesh) -> int:
        """Return the bytes of a sequence's states, if activations have the checkpoint's type."""
        state = self.rank(mesh).state
        return 0 if state is None else place_bytes(state.parts(self.decoder.checkpoint_dtype))

    def heads(self, mesh: Mesh) -> HeadGeometry:
        spec = self.rank(mesh)
        windows = spec.sliding_windows or (None,) * spec.num_layers
        biases = spec.qkv_bias, spec.has_separable_key_bias
        scores = spec.score_scale, spec.attention_softcap, spec.has_sinks
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        geometry = HeadGeometry(*shape, windows, *biases, *scores, is_rotated=spec.rope is not None)
        return geometry._replace(has_output_gate=spec.has_output_gate, state=spec.state)

    def room_elements(self, mesh: Mesh, num_rows: int) -> int:
        return room_elements(self.rank(mesh), num_rows)

    def requests(self, step: StepShape, mesh: Mesh, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        spec = self.rank(mesh)
        own = step_requests(spec, step.num_rows, step.dtype, tuple(scratch), step.recipe)
        requests = [own.stream, own.chosen, own.embed, own.attention, own.state]
        requests += [own.mlp] if spec.has_mlp else []
        requests += [] if own.experts is None else [own.experts]
        requests.append(quantized_rows_request(spec, step.num_rows, step.num_logit_rows, step.recipe))
        requests.append(own.gathered)
        if step.device_kind == "cuda":
            requests.append(row_scaled_request(spec, step.recipe))
        if takes_fused_decode(spec, step.dtype, step.device_kind, step.recipe):
            requests.append(fused_decode_request(spec, step.recipe))
        requests.append(head_request(spec, step.num_logit_rows, step.dtype))
        return tuple(request for request in requests if request.specs)

    def rank(self, mesh: Mesh) -> ModelSpec:
        """Return one rank's decoder: its stage's layers, its heads and inner width; ranks share key heads if few."""
        spec, num_ranks = self.decoder, mesh.tensor_size
        if mesh.layers is not None:
            spec = spec.layer_slice(*mesh.layers)
        if num_ranks == 1:
            return spec
        start, end = vocabulary_rows(spec.vocab_size, mesh)
        return replace(
            spec,
            num_heads=spec.num_heads // num_ranks,
            num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
            intermediate_size=spec.intermediate_size // num_ranks if spec.has_mlp else spec.intermediate_size,
            vocab_size=end - start,
            num_ranks=num_ranks,
            gathers=mesh.is_exact,
            first_token=start,
            experts=None if spec.experts is None else rank_experts(spec.experts, mesh),
            state=None if spec.state is None else spec.state.share(num_ranks),
        )

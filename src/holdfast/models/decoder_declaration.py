"""DecoderDeclaration: what the decoder of models/decoder.py takes: weights, caches, scratch; the only source for plan, load and run; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import (
    Request,
    fused_decode_request,
    head_request,
    quantized_rows_request,
    row_scaled_request,
    step_requests,
    takes_fused_decode,
)
from holdfast.models.declaration import CacheRows, HeadGeometry, StepShape, indivisible_experts, split
from holdfast.models.declared_weights import Weight, weight_of
from holdfast.models.parameters import (
    CheckpointNames,
    Parameter,
    list_before_layers,
    list_behind_layers,
    list_layer,
)
from holdfast.models.spec import ExpertsSpec, LayerKind, ModelSpec
from holdfast.quant.formats import QUANTIZED_HEAD_DIM, KVFormat
from holdfast.quant.weight_schemes import MXFP4


class DecoderDeclaration(NamedTuple):
    """A decoder as ranks share it."""

    decoder: ModelSpec
    names: CheckpointNames
    native: str | None = None
    """The scheme in which the checkpoint stores matrices."""
    expert_native: str | None = None
    """That of experts, where it is another."""

    @property
    def rope_width(self) -> int:
        return 0 if self.decoder.rope is None else len(self.decoder.ropes) * self.decoder.rope_dim

    def indivisible(self, num_ranks: int) -> str | None:
        spec = self.decoder
        reason = split(spec.num_heads, num_ranks, "query heads")
        if reason is None and spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
            reason = (
                f"{spec.num_kv_heads} key heads neither divide into {num_ranks} parts nor are shared by them evenly"
            )
        if reason is None and spec.has_mlp:
            reason = split(spec.intermediate_size, num_ranks, "columns of the MLP")
        if reason is None and spec.experts is not None:
            reason = indivisible_experts(spec.experts.intermediate_size, spec.experts.shared_size, num_ranks)
        return reason

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        spec = self.rank(num_ranks)
        weights = self._weights(list_before_layers(spec, self.names))
        first_of: dict[LayerKind, tuple[int, list[Weight]]] = {}
        for layer in range(spec.num_layers):
            kind = spec.layer_kind(layer)
            if kind not in first_of:
                listed = list_layer(spec, self.names, layer, with_layouts=False)
                first_of[kind] = layer, self._weights(listed)
            weights += self._as_in(layer, *first_of[kind])
        return (*weights, *self._weights(list_behind_layers(spec, self.names)))

    def _weights(self, parameters: Sequence[Parameter]) -> list[Weight]:
        linear = None if self.native == MXFP4.name else self.native
        natives: dict[str, str | None] = {"linear": linear, "expert": self.expert_native or self.native}
        return [weight_of(parameter, natives.get(parameter.kind)) for parameter in parameters]

    def _as_in(self, layer: int, other: int, weights: list[Weight]) -> list[Weight]:
        """Weights of another layer as those of this one: only names differ, and hundreds of experts have many."""
        ours, theirs = f"layers.{layer}.", self.names.layer.format(layer)
        our_start, their_start = len(f"layers.{other}."), len(self.names.layer.format(other))
        return [
            weight._replace(
                name=ours + weight.name[our_start:],
                tensors=tuple([theirs + tensor[their_start:] for tensor in weight.tensors]),
            )
            for weight in weights
        ]

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        head_dim = self.decoder.head_dim
        if kv_format.is_quantized and head_dim % QUANTIZED_HEAD_DIM:
            return f"head_dim is {head_dim}, and heads of a multiple of {QUANTIZED_HEAD_DIM} elements can be quantized"
        return None

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        spec = self.rank(num_ranks)
        return (CacheRows("attention", spec.num_layers, kv_format.bytes_per_token(spec.num_kv_heads, spec.head_dim)),)

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        return 0

    def heads(self, num_ranks: int) -> HeadGeometry:
        spec = self.rank(num_ranks)
        windows = spec.sliding_windows or (None,) * spec.num_layers
        biases = spec.qkv_bias, spec.has_separable_key_bias
        scores = spec.score_scale, spec.attention_softcap, spec.has_sinks
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        return HeadGeometry(*shape, windows, *biases, *scores, is_rotated=spec.rope is not None)

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        spec = self.rank(num_ranks)
        own = step_requests(spec, step.num_rows, step.dtype, tuple(scratch), step.recipe)
        requests = [own.stream, own.chosen, own.embed, own.attention, *((own.mlp,) if spec.has_mlp else ())]
        requests += [] if own.experts is None else [own.experts]
        requests.append(quantized_rows_request(spec, step.num_rows, step.num_logit_rows, step.recipe))
        if step.device_kind == "cuda":
            requests.append(row_scaled_request(spec, step.recipe))
        if takes_fused_decode(spec, step.dtype, step.device_kind, step.recipe):
            requests.append(fused_decode_request(spec, step.recipe))
        requests = [request for request in requests if request.specs]
        # Logits are gathered from all ranks before one of them samples.
        return (*requests, head_request(self.decoder, step.num_logit_rows, step.dtype))

    def rank(self, num_ranks: int) -> ModelSpec:
        """The decoder as one rank has it: heads and inner width divided, key heads shared where there are too few."""
        if num_ranks == 1:
            return self.decoder
        spec = self.decoder
        return replace(
            spec,
            num_heads=spec.num_heads // num_ranks,
            num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
            intermediate_size=spec.intermediate_size // num_ranks if spec.has_mlp else spec.intermediate_size,
            vocab_size=-(-spec.vocab_size // num_ranks),
            experts=None if spec.experts is None else _rank_experts(spec.experts, num_ranks),
        )


def _rank_experts(experts: ExpertsSpec, num_ranks: int) -> ExpertsSpec:
    """Ranks share every expert, a slice of its inner width each."""
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // num_ranks,
        shared_size=experts.shared_size // num_ranks,
    )

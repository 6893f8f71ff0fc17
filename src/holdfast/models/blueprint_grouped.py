"""Models that keep keys and values by head: the families that run, and mixtures of experts with the same attention; no torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.activations import (
    Request,
    attention_request,
    embed_request,
    few_request,
    head_request,
    mlp_request,
    stream_request,
    takes_few,
)
from holdfast.models.blueprint_anatomy import CacheRows, HeadGeometry, StepShape, split
from holdfast.models.blueprint_experts import Experts
from holdfast.models.blueprint_weights import Kind, Weight
from holdfast.models.checkpoint_names import LLAMA_NAMES, CheckpointNames, list_parameters
from holdfast.models.parameters import Parameter
from holdfast.models.settings import Settings
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import CODED_HEAD_DIM, KVFormat

MAX_EXPERTS = 2**16
MAX_WIDTH = 2**20


class GroupedAnatomy(NamedTuple):
    """A decoder, in some of whose layers experts may take the place of the MLP."""

    decoder: ModelSpec
    names: CheckpointNames
    native: str | None = None
    """The scheme in which the checkpoint stores matrices."""
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep an MLP although there are experts."""

    @property
    def rope_width(self) -> int:
        return 0 if self.decoder.rope is None else self.decoder.head_dim

    @property
    def _has_mlp(self) -> bool:
        return self.experts is None or bool(self.dense_layers)

    def indivisible(self, num_ranks: int) -> str | None:
        spec = self.decoder
        reason = split(spec.num_heads, num_ranks, "query heads")
        if reason is None and spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
            reason = (
                f"{spec.num_kv_heads} key heads neither divide into {num_ranks} parts nor are shared by them evenly"
            )
        if reason is None and self._has_mlp:
            reason = split(spec.intermediate_size, num_ranks, "columns of the MLP")
        if reason is None and self.experts is not None:
            reason = self.experts.indivisible(num_ranks)
        return reason

    def weights(self, num_ranks: int) -> tuple[Weight, ...]:
        spec = self._rank(num_ranks)
        weights = [
            self._weight(parameter)
            for parameter in list_parameters(spec, self.names)
            if not self._is_replaced(parameter.name)
        ]
        if self.experts is not None:
            for layer in range(spec.num_layers):
                if layer not in self.dense_layers:
                    weights += self.experts.weights(f"layers.{layer}.", spec.hidden_size, num_ranks)
        return tuple(weights)

    def unsupported_format(self, kv_format: KVFormat) -> str | None:
        head_dim = self.decoder.head_dim
        if kv_format.is_coded and head_dim % CODED_HEAD_DIM:
            return f"head_dim is {head_dim}, and heads of a multiple of {CODED_HEAD_DIM} elements can be coded"
        return None

    def cache_rows(self, kv_format: KVFormat, num_ranks: int) -> tuple[CacheRows, ...]:
        spec = self._rank(num_ranks)
        return (CacheRows("attention", spec.num_layers, kv_format.bytes_per_token(spec.num_kv_heads, spec.head_dim)),)

    def sequence_bytes(self, kv_format: KVFormat, num_ranks: int) -> int:
        return 0

    def heads(self, num_ranks: int) -> HeadGeometry:
        spec = self._rank(num_ranks)
        windows = spec.sliding_windows or (None,) * spec.num_layers
        return HeadGeometry(spec.num_heads, spec.num_kv_heads, spec.head_dim, windows, spec.qkv_bias)

    def requests(self, step: StepShape, num_ranks: int, scratch: Sequence[TensorSpec]) -> tuple[Request, ...]:
        spec = self._rank(num_ranks)
        requests = [
            stream_request(spec, step.num_rows, step.dtype),
            embed_request(spec, step.num_rows, step.dtype),
            attention_request(spec, step.num_rows, step.dtype, tuple(scratch)),
        ]
        if self._has_mlp:
            requests.append(mlp_request(spec, step.num_rows, step.dtype))
        if self.experts is not None:
            requests.append(self.experts.request(step, spec.hidden_size, num_ranks))
        if takes_few(spec, step.dtype, step.device_kind):
            requests.append(few_request(spec))
        requests = [request for request in requests if request.specs]
        # Logits are gathered from all ranks before one of them samples.
        return (*requests, head_request(self.decoder, step.num_logit_rows, step.dtype))

    def _rank(self, num_ranks: int) -> ModelSpec:
        """The decoder as one rank has it: heads and inner width divided, key heads shared where there are too few."""
        if num_ranks == 1:
            return self.decoder
        spec = self.decoder
        return replace(
            spec,
            num_heads=spec.num_heads // num_ranks,
            num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
            intermediate_size=spec.intermediate_size // num_ranks if self._has_mlp else spec.intermediate_size,
            vocab_size=-(-spec.vocab_size // num_ranks),
        )

    def _weight(self, parameter: Parameter) -> Weight:
        kind = _kind(parameter)
        return Weight(parameter.name, parameter.shape, kind, self.native if kind == "linear" else None)

    def _is_replaced(self, name: str) -> bool:
        """A tensor of an MLP in whose place there are experts."""
        if self.experts is None or not name.startswith("layers."):
            return False
        _, layer, module, *_ = name.split(".")
        return module in ("gate_up", "up", "down") and int(layer) not in self.dense_layers


def _kind(parameter: Parameter) -> Kind:
    if parameter.name in ("embed.weight", "positions.weight"):
        return "embedding"
    if parameter.name == "lm_head.weight":
        return "head"
    if parameter.name.endswith(".bias"):
        return "bias"
    return "linear" if len(parameter.shape) == 2 else "norm"


def qwen_moe(settings: Settings, decoder: ModelSpec, native: str | None, has_shared: bool) -> GroupedAnatomy:
    """Qwen2-MoE, which has a gated shared expert, and Qwen3-MoE, which has none."""
    experts = Experts(
        num_experts=settings.count("num_experts", 60 if has_shared else 128, MAX_EXPERTS),
        top_k=settings.count("num_experts_per_tok", 4 if has_shared else 8, MAX_EXPERTS),
        intermediate_size=settings.count("moe_intermediate_size", 1408 if has_shared else 768, MAX_WIDTH),
        shared_size=settings.count("shared_expert_intermediate_size", 5632, MAX_WIDTH) if has_shared else 0,
        has_shared_gate=has_shared,
        expert_native=native,
        shared_native=native,
    )
    step = settings.count("decoder_sparse_step", 1, decoder.num_layers)
    dense = {layer for layer in range(decoder.num_layers) if (layer + 1) % step}
    value = settings.values.get("mlp_only_layers") or []
    if not isinstance(value, list) or not all(isinstance(layer, int) for layer in value):
        raise settings.refuse("mlp_only_layers", value, "a list of layers")
    return GroupedAnatomy(decoder, LLAMA_NAMES, native, experts, frozenset(dense | set(value)))

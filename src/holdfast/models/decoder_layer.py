"""Layers of decoders, put together from the spec's values and the weights' names: attention by head, or over latents."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from holdfast.attention.backend import GroupedAttention, LatentAttention, SparseLatentAttention
from holdfast.kernels.activation import GateForm
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.attention import AttentionLayer
from holdfast.layers.compressed_attention import CompressedAttentionLayer
from holdfast.layers.latent_attention import LatentAttentionLayer, LatentIndex, SparseLatentAttentionLayer
from holdfast.layers.mlp import GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from holdfast.layers.moe import ExpertBiases, ExpertLayer, SharedExpert
from holdfast.layers.shared_experts import ExpertSharing
from holdfast.layers.shared_linear import OutputSharing
from holdfast.models.spec import ExpertsSpec, IndexSpec, LatentSpec, ModelSpec
from holdfast.quant.quantized_weight import QuantizedWeight

Weights = Mapping[str, torch.Tensor | QuantizedWeight]
Norm = RMSNorm | LayerNorm
OUTPUT_NORMS = ("attn_out_norm", "mlp_out_norm")
FeedForward = GatedMLP | PlainMLP | ExpertLayer
AttentionT = TypeVar("AttentionT", AttentionLayer, LatentAttentionLayer)
AnyAttentionT = TypeVar("AnyAttentionT", AttentionLayer, LatentAttentionLayer, CompressedAttentionLayer)
"""Those around one residual stream, and those of streams too."""


class DecoderLayer(Generic[AnyAttentionT]):
    """Attention and MLP, or experts, around a residual stream."""

    def __init__(
        self,
        attn_norm: Norm,
        attention: AnyAttentionT,
        mlp_norm: Norm,
        mlp: FeedForward,
        attn_out_norm: Norm | None = None,
        mlp_out_norm: Norm | None = None,
    ) -> None:
        """The last two norm what each half gives before it joins the stream; None where nothing does."""
        self.attn_norm = attn_norm
        self.attention = attention
        self.attn_out_norm = attn_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm


class PartBuilder(ABC, Generic[AnyAttentionT]):
    """Parts of one model over its final weights; what attention is made of is left to those who know."""

    def __init__(self, spec: ModelSpec, weights: Weights, sharing: OutputSharing | None = None) -> None:
        """With `sharing` spec and weights are those of a rank."""
        self._spec = spec
        self._weights = weights
        self._sharing = sharing

    @abstractmethod
    def attention(self, index: int, prefix: str) -> AnyAttentionT:
        """The attention of a layer whose weights have names that begin so."""
        ...

    def layer(self, index: int) -> DecoderLayer[AnyAttentionT]:
        prefix = f"layers.{index}"
        experts = self._spec.layer_experts(index)
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm"),
            self.attention(index, prefix),
            self.norm(f"{prefix}.mlp_norm"),
            self._mlp(prefix) if experts is None else self._experts(experts, index, prefix),
            *((self.norm(f"{prefix}.{name}") for name in OUTPUT_NORMS) if self._spec.has_output_norms else ()),
        )

    def norm(self, name: str) -> Norm:
        weight_H, eps = self.plain(f"{name}.weight"), self._spec.norm_eps
        return (
            RMSNorm(weight_H, eps, self._spec.norm_offset)
            if self._spec.norm == "rms"
            else LayerNorm(weight_H, self.plain(f"{name}.bias"), eps)
        )

    def linear(self, name: str) -> Linear:
        return Linear(self._weights[f"{name}.weight"], self._bias(name))

    def output(self, name: str, keeps_share: bool = False) -> Linear:
        """A projection whose outputs all ranks need; with `keeps_share` it gives a rank's part of them."""
        if self._sharing is None:
            return self.linear(name)
        return self._sharing.linear(self._weights[f"{name}.weight"], self._bias(name), keeps_share)

    def _bias(self, name: str) -> torch.Tensor | None:
        return self.plain(f"{name}.bias") if f"{name}.bias" in self._weights else None

    def plain(self, name: str) -> torch.Tensor:
        """A weight that is never quantized."""
        weight = self._weights[name]
        assert isinstance(weight, torch.Tensor), f"{name} is quantized"
        return weight

    def _mlp(self, prefix: str) -> GatedMLP | PlainMLP:
        down = self.output(f"{prefix}.down")
        if self._spec.gated_mlp:
            return GatedMLP(self.linear(f"{prefix}.gate_up"), down, self._spec.activation)
        return PlainMLP(self.linear(f"{prefix}.up"), down, self._spec.activation)

    def _experts(self, experts: ExpertsSpec, index: int, prefix: str) -> ExpertLayer:
        shared, limit, sharing = None, experts.silu_limit, self._expert_sharing(experts)
        form = GateForm(experts.is_interleaved, experts.swiglu_limit)
        if limit is not None:
            form = GateForm(experts.is_interleaved, limit, is_silu=True)
        if experts.shared_size:
            keeps_share = sharing is not None and not sharing.sums_pairs
            gate_up, down = self.linear(f"{prefix}.shared.gate_up"), self.output(f"{prefix}.shared.down", keeps_share)
            gate_1H = self.plain(f"{prefix}.shared.gate.weight") if experts.has_shared_gate else None
            shared = SharedExpert(GatedMLP(gate_up, down, self._spec.activation, limit), gate_1H)
        has_table = index in experts.table_layers
        return ExpertLayer(
            self.plain(f"{prefix}.router.weight"),
            self._weights[f"{prefix}.experts.gate_up.weight"],
            self._weights[f"{prefix}.experts.down.weight"],
            _routing(experts),
            shared,
            self._expert_biases(experts.has_score_bias and not has_table, prefix),
            form,
            self.plain(f"{prefix}.router.table") if has_table else None,
            sharing,
        )

    def _expert_sharing(self, experts: ExpertsSpec) -> ExpertSharing | None:
        if self._sharing is None:
            return None
        return ExpertSharing(self._sharing, experts.first_local, experts.num_local)

    def _expert_biases(self, has_score_bias: bool, prefix: str) -> ExpertBiases:
        names = ("router", "experts.gate_up", "experts.down")
        router_E, gate_up_EX, down_EH = (self._bias(f"{prefix}.{name}") for name in names)
        score_E = self.plain(f"{prefix}.router.score_bias") if has_score_bias else None
        return ExpertBiases(router_E, gate_up_EX, down_EH, score_E)


class LayerBuilder(PartBuilder[AttentionLayer]):
    """Layers with keys and values by head."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: GroupedAttention[Any],
        rotaries: Sequence[Rotary | None],
        sharing: OutputSharing | None = None,
    ) -> None:
        super().__init__(spec, weights, sharing)
        self._backend = backend
        self._rotaries = rotaries

    def attention(self, index: int, prefix: str) -> AttentionLayer:
        spec, head_norm = self._spec, None
        if spec.qk_norm:
            q_weight_D, k_weight_D = (self.plain(f"{prefix}.{name}.weight") for name in ("q_norm", "k_norm"))
            head_norm = HeadNorm(q_weight_D, k_weight_D, spec.norm_eps, spec.norm_offset)
        qkv, o = self.linear(f"{prefix}.qkv"), self.output(f"{prefix}.o")
        return AttentionLayer(index, qkv, o, head_norm, self._rotaries[index], self._backend)


class LatentLayerBuilder(PartBuilder[LatentAttentionLayer]):
    """Layers with latents, which all rotate alike; with an index, too, where a layer has one."""

    def __init__(
        self,
        spec: ModelSpec,
        latent: LatentSpec,
        weights: Weights,
        backend: LatentAttention[Any],
        rotary: Rotary,
        sharing: OutputSharing | None = None,
    ) -> None:
        super().__init__(spec, weights, sharing)
        self._latent = latent
        self._backend = backend
        self._rotary = rotary

    def attention(self, index: int, prefix: str) -> LatentAttentionLayer:
        latent, q_norm = self._latent, None
        if latent.q_rank is not None:
            q_norm = RMSNorm(self.plain(f"{prefix}.q_a_norm.weight"), latent.norm_eps)
        qkv_a, q = (self.linear(f"{prefix}.{name}") for name in ("qkv_a", "q" if q_norm is None else "q_b"))
        o = self.output(f"{prefix}.o")
        norm = LatentNorm(self.plain(f"{prefix}.kv_a_norm.weight"), latent.norm_eps)
        kv_b_NXL = self.plain(f"{prefix}.kv_b.weight").view(-1, latent.expanded_dim, latent.kv_rank)
        if latent.index is not None:
            assert isinstance(self._backend, SparseLatentAttention), f"{self._backend.name} attends to all tokens"
        own_index = self._spec.layer_index(index)
        if own_index is None:
            return LatentAttentionLayer(index, qkv_a, q, o, q_norm, norm, kv_b_NXL, self._rotary, self._backend)
        assert q_norm is not None, "an index takes its queries from the queries' latent"
        assert isinstance(self._backend, SparseLatentAttention), f"{self._backend.name} attends to all tokens"
        return SparseLatentAttentionLayer(
            index, qkv_a, q, o, q_norm, norm, kv_b_NXL, self._rotary, self._backend, self._index(own_index, prefix)
        )

    def _index(self, index: IndexSpec, prefix: str) -> LatentIndex:
        weight_D, bias_D = (self.plain(f"{prefix}.index_k_norm.{end}") for end in ("weight", "bias"))
        return LatentIndex(
            self.linear(f"{prefix}.index_q"),
            self.linear(f"{prefix}.index_k"),
            self.plain(f"{prefix}.index_weights.weight"),
            IndexNorm(weight_D, bias_D, index.norm_eps),
        )


def _routing(experts: ExpertsSpec) -> Routing:
    return Routing(
        experts.normalizes,
        experts.scoring,
        experts.num_groups,
        experts.groups_taken,
        experts.group_score,
        experts.share_scale,
    )

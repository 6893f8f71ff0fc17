"""Layers of decoders, built from the spec and the names of weights, and the parts that decoders are built from."""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.attention.backend import AttentionBackend
from holdfast.distributed.exchange import Exchange
from holdfast.families.compressed.layer import CompressedAttentionLayer
from holdfast.families.grouped.layer import GroupedAttentionLayer
from holdfast.families.grouped.layer import build_layer as grouped_layer
from holdfast.families.latent.layer import LatentAttentionLayer, LatentWeights
from holdfast.families.sparse.layer import build_layer as sparse_layer
from holdfast.families.state.layer import StateLayer
from holdfast.families.state.layer import build_layer as state_layer
from holdfast.kernels.activation import GateForm
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.mlp import GatedMLP, LayerNorm, PlainMLP, RMSNorm
from holdfast.layers.moe import ExpertBiases, ExpertLayer, SharedExpert
from holdfast.layers.parts import LayerParts, Weights
from holdfast.layers.shared_experts import ExpertSharing
from holdfast.layers.shared_linear import Gathering, OutputSharing
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import GATHERED
from holdfast.models.rope import StepRope
from holdfast.models.spec import ExpertsSpec, ModelSpec
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe

Norm = RMSNorm | LayerNorm
OUTPUT_NORMS = ("attn_out_norm", "mlp_out_norm")
FeedForward = GatedMLP | PlainMLP | ExpertLayer
AnyAttention = GroupedAttentionLayer | LatentAttentionLayer | CompressedAttentionLayer | StateLayer
AttentionT = TypeVar("AttentionT", bound=AnyAttention)


class DecoderLayer(NamedTuple, Generic[AttentionT]):
    """Attention and MLP, or experts, around a residual stream."""

    attn_norm: Norm
    attention: AttentionT
    mlp_norm: Norm
    mlp: FeedForward
    attn_out_norm: Norm | None = None
    """The norm of the attention's output before it joins the stream."""
    mlp_out_norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """Inputs of a decoder: a spec, final weights, attention over pages, and a workspace."""

    spec: ModelSpec
    weights: Weights
    backend: AttentionBackend
    rope: StepRope
    workspace: Workspace
    scratch: tuple[TensorSpec, ...]
    """The backend's scratch, as its declaration lists it."""
    takes_fused_decode: bool = False
    dtype: str | None = None
    """The type of activations; None: that of norms."""
    recipe: WeightRecipe = AS_STORED
    """How the weights were quantized."""
    exchange: Exchange | None = None
    """If set, spec and weights are one rank's, and logits are of its share of the vocabulary."""
    is_exact: bool = False
    """Like `is_exact` of the rank's Mesh."""

    @property
    def sharing(self) -> OutputSharing | None:
        """How ranks that share layers make outputs whole; None if one rank has all of them."""
        exchange = self.exchange
        if exchange is None or exchange.size == 1:
            return None
        return OutputSharing(exchange, Gathering(exchange, self.workspace.lanes[GATHERED]) if self.is_exact else None)


class LayerBuilder(LayerParts):
    """Builds the layers of one model over its final weights."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__(parts.weights, parts.sharing)
        self._spec = parts.spec
        self._backend: Any = parts.backend  # of the spec's family
        self._rope = parts.rope

    def attention(self, index: int) -> GroupedAttentionLayer | LatentAttentionLayer | StateLayer:
        """Build the attention of a layer with one residual stream."""
        spec, rotary = self._spec, self._rope.rotaries[index]
        if spec.state is not None and spec.has_state(index):
            return state_layer(self, index, spec.state, spec.norm_eps, self._backend)
        if spec.latent is None:
            norm = (spec.norm_eps, spec.norm_offset) if spec.qk_norm else None
            place = None if spec.state is None else sum(not spec.has_state(layer) for layer in range(index))
            return grouped_layer(self, index, norm, rotary, self._backend, spec.has_output_gate, place)
        assert rotary is not None, f"{spec.architecture} rotates nothing"
        weights = LatentWeights.of(self, index, spec.latent)
        if spec.latent.index is None:
            return LatentAttentionLayer(index, weights, rotary, self._backend)
        return sparse_layer(self, index, weights, spec.layer_index(index), rotary, self._backend)

    def layer(self, index: int, attention: AttentionT) -> DecoderLayer[AttentionT]:
        """Build norms and MLP or experts of a layer around its attention."""
        prefix = f"layers.{index}"
        experts = self._spec.layer_experts(index)
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm"),
            attention,
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
            self.weights[f"{prefix}.experts.gate_up.weight"],
            self.weights[f"{prefix}.experts.down.weight"],
            Routing(
                experts.normalizes,
                experts.scoring,
                experts.num_groups,
                experts.groups_taken,
                experts.group_score,
                experts.share_scale,
            ),
            shared,
            self._expert_biases(experts.has_score_bias and not has_table, prefix),
            form,
            self.plain(f"{prefix}.router.table") if has_table else None,
            sharing,
        )

    def _expert_sharing(self, experts: ExpertsSpec) -> ExpertSharing | None:
        if self.sharing is None:
            return None
        return ExpertSharing(self.sharing, experts.first_local, experts.num_local)

    def _expert_biases(self, has_score_bias: bool, prefix: str) -> ExpertBiases:
        names = ("router", "experts.gate_up", "experts.down")
        router_E, gate_up_EX, down_EH = (self.bias(f"{prefix}.{name}") for name in names)
        score_E = self.plain(f"{prefix}.router.score_bias") if has_score_bias else None
        return ExpertBiases(router_E, gate_up_EX, down_EH, score_E)

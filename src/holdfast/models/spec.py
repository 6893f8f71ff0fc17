"""What a decoder is, as plain numbers: everything that planning, loading and running need to know; no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from holdfast.families.compressed.spec import CompressedSpec, CompressorSpec
from holdfast.families.grouped.spec import GroupedSpec
from holdfast.families.latent.spec import IndexSpec, LatentSpec

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["largest", "two_largest"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: half-split pairs (element i with element i + head_dim/2).

    `kind` decides which of the fields below it have a meaning, as in the Hugging Face config of the same name.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def uniform_experts(num_experts: int, top_k: int, num_rows: int) -> float:
    """Mean of the distinct experts that rows choose if each row draws `top_k` of `num_experts` at random.

    A row takes any one expert with a chance of top_k / num_experts. That holds for group-limited routing too.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows) if num_experts else 0.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in the place of a layer's MLP: a router sends every token through the `top_k` with the largest logits."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner width of one expert."""
    shared_size: int = 0
    """Inner width of the expert that every token takes; 0 for none."""
    has_shared_gate: bool = False
    """What the shared expert gives is multiplied by the sigmoid of one more logit."""
    normalizes: bool = False
    """The shares of the chosen experts are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep an MLP."""
    has_router_bias: bool = False
    """A bias on the router's logits, before the choice."""
    has_bias: bool = False
    """Biases on gate and up and on down, a row for each expert."""
    is_interleaved: bool = False
    """Rows of gate and up alternate: gate 0, up 0, gate 1, ...; else all gates come first."""
    scoring: Scoring = "softmax"
    """What makes a score of a logit: over all experts, or of each by itself."""
    num_groups: int = 1
    """Experts stand in so many equal groups, and a token takes its experts from the best `groups_taken` of them."""
    groups_taken: int = 1
    group_score: GroupScore = "largest"
    """How good a group is: its largest score, or the sum of its two largest."""
    has_score_bias: bool = False
    """A float32 bias on the scores by which experts and groups are chosen; shares are of the scores without it."""
    share_scale: float = 1.0
    """What the shares of the chosen experts are multiplied by in the end."""
    swiglu_limit: float | None = None
    """gate * sigmoid(1.702 * gate) * (up + 1), with gate at most, and up within plus and minus, this; None: silu(gate) * up."""
    silu_limit: float | None = None
    """silu(gate) * up, with gate at most, and up within plus and minus, this, in the shared expert too; None: without limits."""
    table_layers: frozenset[int] = frozenset()
    """Layers where a token's experts stand in a table by its id (hash routing); their shares are of the router's scores all the same."""
    table_size: int = 0
    """Token ids of such a table: the whole vocabulary, whatever a rank has of it."""
    first_local: int = 0
    """Expert parallelism: the first expert that this rank holds; routers know all `num_experts`."""
    num_local: int | None = None
    """How many it holds; None: all of them."""


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Hyper-connections (mHC): the residual is `num_streams` streams, mixed anew around attention and around the experts."""

    num_streams: int
    num_iterations: int
    """Iterations of Sinkhorn-Knopp, which makes rows and columns of a mix add up to one."""
    eps: float


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the weights of a layer follow from, beside what all layers have in common."""

    experts: ExpertsSpec | None
    index: IndexSpec | None
    compressor: CompressorSpec | None = None
    has_table: bool = False
    """Its experts are taken from a table."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder. Families differ in these values, not in code."""

    architecture: str
    """The name in config.json, such as LlamaForCausalLM."""
    family: str
    """The row in `models.grouped_readers` that read it, such as llama."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context the model was made for; the default of max_model_len."""
    checkpoint_dtype: str
    """torch's name of the type in which the checkpoint says it is stored."""
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    """`layer` has a bias beside every weight."""
    norm_first: bool = True
    """False: the norm follows the residual sum (OPT-350m)."""
    has_final_norm: bool = True
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of every query and key head, before the rotation."""
    rope: RopeSpec | None = None
    """None: positions are learned, one row each, starting at `position_offset`."""
    position_offset: int = 0
    embedding_size: int | None = None
    """Width of the token embedding where it differs from hidden_size and is projected (OPT-350m)."""
    tied_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many of the newest tokens, the current one included, a token sees; None for all. Empty: all, in every layer."""
    experts: ExpertsSpec | None = None
    """None: every layer has an MLP."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """cap * tanh(score / cap) in the place of every score; None: as they are."""
    logit_softcap: float | None = None
    """Like `attention_softcap`, for logits."""
    has_sinks: bool = False
    """One logit a query head that joins every softmax and has no value."""
    norm_offset: float = 0.0
    """Added to the weights of all rms norms, those of heads too, in float32: 1.0 where a checkpoint stores weight - 1."""
    float32_norms: bool = False
    """Norm weights are kept in float32 whatever the dtype of the engine."""
    has_output_norms: bool = False
    """Norms behind attention and behind the MLP too, before each is added to the stream."""
    embedding_scale: float | None = None
    """What token embeddings are multiplied by, rounded to the type of the weights; None: nothing."""
    local_rope: RopeSpec | None = None
    """The rotation of layers with a window, where it is another; None: `rope` in all layers."""
    latent: LatentSpec | None = None
    """Latent attention in every layer: `num_kv_heads` is 1, `head_dim` is what is kept of a token (`LatentSpec.row_dim`), and
    `qkv_bias` is of the projections to latents; None: keys and values by head."""
    compressed: CompressedSpec | None = None
    """Compressed attention in every layer: `num_kv_heads` is 1, `head_dim` is what is kept of a token and of an entry, `rope` is
    that of layers with entries and `local_rope` of those without; None: every other attention."""
    streams: StreamsSpec | None = None
    """None: the residual is one stream."""
    num_draft_layers: int = 0
    """Layers behind the last that checkpoints hold to draft tokens (multi-token prediction): they are neither planned nor loaded."""
    num_ranks: int = 1
    """Ranks that share every layer: heads, inner widths and the vocabulary are one rank's share."""
    gathers: bool = False
    """They gather inputs and outputs of output projections (`Mesh.is_exact`); else they add up parts of outputs."""
    first_token: int = 0
    """The first row of the vocabulary that this rank has."""
    first_layer: int = 0
    """Pipeline stage: the layer of the whole model that is layer 0 here."""
    is_first_stage: bool = True
    """Tokens are embedded here; else hidden rows come from the stage before."""
    is_last_stage: bool = True
    """The final norm and the head are here; else hidden rows go to the next stage."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def key_part(self) -> slice:
        """Columns of the fused QKV projection that are keys."""
        return slice(self.query_size, self.query_size + self.kv_size)

    @property
    def attention(self) -> GroupedSpec | LatentSpec | CompressedSpec:
        """The family of the model's attention, which answers what depends on it."""
        return self.latent or self.compressed or GroupedSpec(self.num_kv_heads)

    @property
    def attended_size(self) -> int:
        """Columns of the attention's output, before its output projection."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the weights around a layer's attention, in the order of computation, those of an index last."""
        return self.attention.products(self.hidden_size, self.num_heads, self.head_dim)

    @property
    def has_separable_key_bias(self) -> bool:
        """Keys are a sum of what depends on the token and of a bias: no norm stands between the projection and rope."""
        return self.qkv_bias and not self.qk_norm

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rope_dim(self) -> int:
        """Elements of a head, or beside a latent, that positions rotate."""
        attention = self.attention
        return self.head_dim if isinstance(attention, GroupedSpec) else attention.rope_dim

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """The rotation of a layer; None where positions are learned."""
        if self.compressed is not None:
            return self.local_rope if self.compressed.compressors[layer] is None else self.rope
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    @property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """Every rotation that some layer has, once."""
        return tuple(dict.fromkeys(self.layer_rope(layer) for layer in range(self.num_layers)))

    @property
    def rope_sets(self) -> tuple[tuple[RopeSpec, int], ...]:
        """Rows of cos and sin that a step has of each token: a rotation, and the ratio of entries that it is of, 1 for tokens."""
        entries = ((self.layer_rope(layer), self.entry_ratio(layer)) for layer in range(self.num_layers))
        sets = dict.fromkeys((*((rope, 1) for rope in self.ropes), *(own for own in entries if own[1])))
        return tuple((rope, ratio) for rope, ratio in sets if rope is not None)

    def entry_ratio(self, layer: int) -> int:
        """Tokens of an entry of a layer; 0 where it has none."""
        compressor = None if self.compressed is None else self.compressed.compressors[layer]
        return 0 if compressor is None else compressor.ratio

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def has_mlp(self) -> bool:
        """Whether any layer has an MLP."""
        return self.experts is None or bool(self.experts.dense_layers)

    def layer_index(self, layer: int) -> IndexSpec | None:
        """The index of a layer, or None where it takes what another chose, or attends to all tokens."""
        if self.compressed is not None:
            return self.compressed.layer_index(layer)
        index = None if self.latent is None else self.latent.index
        return None if index is None or layer in index.shared_layers else index

    @property
    def shares_choices(self) -> bool:
        """Whether some layer attends to tokens that a layer before it chose."""
        index = None if self.latent is None else self.latent.index
        return index is not None and bool(index.shared_layers)

    def layer_kind(self, layer: int) -> LayerKind:
        """Layers of the same kind have weights of the same shapes."""
        compressor = None if self.compressed is None else self.compressed.compressors[layer]
        experts = self.layer_experts(layer)
        has_table = experts is not None and layer in experts.table_layers
        return LayerKind(experts, self.layer_index(layer), compressor, has_table)

    def first_layers(self, num_layers: int) -> "ModelSpec":
        """Keep only the first layers."""
        return self._only_layers(0, num_layers)

    def layer_slice(self, first: int, last: int) -> "ModelSpec":
        """The pipeline stage that has the layers from `first` to before `last`, counted from 0 there."""
        assert 0 <= first < last <= self.num_layers, f"layers {first} to {last} of {self.num_layers}"
        spec = self._only_layers(first, last)
        return replace(
            spec,
            first_layer=self.first_layer + first,
            is_first_stage=self.is_first_stage and first == 0,
            is_last_stage=self.is_last_stage and last == self.num_layers,
        )

    def _only_layers(self, first: int, last: int) -> "ModelSpec":
        def own(layers: frozenset[int]) -> frozenset[int]:
            return frozenset(layer - first for layer in layers if first <= layer < last)

        spec = replace(self, num_layers=last - first, sliding_windows=self.sliding_windows[first:last])
        if spec.experts is not None:
            experts = spec.experts
            dense, tables = own(experts.dense_layers), own(experts.table_layers)
            # A stage of which every layer has an MLP has no router, and no room for one.
            is_dense = len(dense) == spec.num_layers
            kept = None if is_dense else replace(experts, dense_layers=dense, table_layers=tables)
            spec = replace(spec, experts=kept)
        if spec.latent is not None and spec.latent.index is not None:
            index = replace(spec.latent.index, shared_layers=own(spec.latent.index.shared_layers))
            spec = replace(spec, latent=replace(spec.latent, index=index))
        if spec.compressed is not None:
            compressors = spec.compressed.compressors[first:last]
            spec = replace(spec, compressed=replace(spec.compressed, compressors=compressors))
        return spec

    def layer_experts(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer, or None where it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

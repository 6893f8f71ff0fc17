"""What a decoder is, as plain numbers: all that planning, loading and running need; no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from holdfast.families.compressed.spec import CompressedSpec, CompressorSpec
from holdfast.families.grouped.spec import GroupedSpec, query_step
from holdfast.families.latent.spec import IndexSpec, LatentSpec
from holdfast.families.state.spec import StateSpec

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["largest", "two_largest"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: half-split pairs (element i with element i + rope_dim/2).

    `kind` decides which fields below it apply, as in the Hugging Face config of the same name.
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
    """Return the mean number of distinct experts chosen if each row draws `top_k` of `num_experts` at random.

    A row takes any one expert with a chance of top_k / num_experts. That holds for group-limited routing too.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows) if num_experts else 0.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts instead of an MLP: a router sends a token through the `top_k` with the largest logits."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Inner width of one expert."""
    shared_size: int = 0
    """Inner width of the expert that every token takes; 0 for none."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of one more logit."""
    normalizes: bool = False
    """The chosen experts' shares are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep an MLP."""
    has_router_bias: bool = False
    """A bias on the router's logits, before the choice."""
    has_bias: bool = False
    """Biases on gate and up and on down, one row per expert."""
    is_interleaved: bool = False
    """Rows of gate and up alternate: gate 0, up 0, gate 1, ...; else all gates come first."""
    scoring: Scoring = "softmax"
    """Function from logits to scores: over all experts, or of each by itself."""
    num_groups: int = 1
    """Experts form this many equal groups. A token takes its experts from the best `groups_taken` groups."""
    groups_taken: int = 1
    group_score: GroupScore = "largest"
    """Score of a group: its largest score, or the sum of its two largest."""
    has_score_bias: bool = False
    """A float32 bias added to scores for the choice of experts and groups; shares use the scores without it."""
    share_scale: float = 1.0
    """Final factor on the chosen experts' shares."""
    swiglu_limit: float | None = None
    """gate * sigmoid(1.702 * gate) * (up + 1), gate at most this, up within +- this; None: silu(gate) * up."""
    silu_limit: float | None = None
    """silu(gate) * up: gate at most this, up within plus and minus this, in the shared expert too; None: no clamp."""
    table_layers: frozenset[int] = frozenset()
    """Layers whose experts a table gives by token id (hash routing); shares still follow from the router's scores."""
    table_size: int = 0
    """Token ids of such a table: the whole vocabulary on every rank."""
    first_local: int = 0
    """Expert parallelism: first expert of this rank; routers know all `num_experts`."""
    num_local: int | None = None
    """Number of experts of this rank; None: all of them."""


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Hyper-connections (mHC): `num_streams` residual streams, mixed anew around attention and around experts."""

    num_streams: int
    num_iterations: int
    """Sinkhorn-Knopp iterations, which make rows and columns of a mix sum to one."""
    eps: float


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What determines a layer's weights, beside what all layers share."""

    experts: ExpertsSpec | None
    index: IndexSpec | None
    compressor: CompressorSpec | None = None
    has_table: bool = False
    """A table gives its experts."""
    has_state: bool = False
    """It keeps a state instead of tokens."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder. Families differ in these values, not in code."""

    architecture: str
    """The name in config.json, such as LlamaForCausalLM."""
    family: str
    """The row in `models.grouped_readers` that reads it, such as llama."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context of the model; the default of max_model_len."""
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
    has_output_gate: bool = False
    """q_proj has a gate after each query head; its sigmoid multiplies the head's output before o_proj."""
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of every query and key head, before RoPE."""
    rope: RopeSpec | None = None
    """None: learned positions, one row each, starting at `position_offset`."""
    rotary_dim: int | None = None
    """Elements of a head that RoPE rotates, the first ones; an even number. None: the whole head."""
    position_offset: int = 0
    embedding_size: int | None = None
    """Width of the token embedding if it differs from hidden_size and is projected (OPT-350m)."""
    tied_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many of the newest tokens a token sees, itself included; None: all. Empty: all, in every layer."""
    experts: ExpertsSpec | None = None
    """None: every layer has an MLP."""
    attention_scale: float | None = None
    """Factor on scores; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Replaces every score by cap * tanh(score / cap); None: no cap."""
    logit_softcap: float | None = None
    """Like `attention_softcap`, for logits."""
    has_sinks: bool = False
    """One logit per query head joins every softmax and has no value."""
    norm_offset: float = 0.0
    """Added in float32 to weights of all RMS norms, those of heads too: 1.0 if a checkpoint stores weight - 1."""
    float32_norms: bool = False
    """Norm weights stay float32 whatever the dtype of the engine."""
    has_output_norms: bool = False
    """Norms also follow attention and MLP, before each output is added to the stream."""
    embedding_scale: float | None = None
    """Factor on token embeddings, rounded to the type of the weights; None: no factor."""
    local_rope: RopeSpec | None = None
    """RoPE of layers with a window, if it differs; None: `rope` in all layers."""
    latent: LatentSpec | None = None
    """Latent attention in every layer: `num_kv_heads` is 1, `head_dim` the elements of a token (`LatentSpec.row_dim`),
    and `qkv_bias` applies to projections to latents; None: keys and values by head."""
    compressed: CompressedSpec | None = None
    """Compressed attention in every layer: `num_kv_heads` is 1, `head_dim` the elements of a token and of an entry,
    `rope` is for layers with entries and `local_rope` for those without; None: any other attention."""
    state: StateSpec | None = None
    """Layers that keep a state (gated delta nets), in a model whose other layers have keys and values by head; None: none."""
    streams: StreamsSpec | None = None
    """None: one residual stream."""
    num_draft_layers: int = 0
    """Layers after the last that checkpoints have for draft tokens; neither planned nor loaded."""
    num_ranks: int = 1
    """Ranks that share every layer: heads, inner widths and the vocabulary are one rank's share."""
    gathers: bool = False
    """Ranks gather inputs and outputs of output projections (`Mesh.is_exact`); else they all-reduce partial outputs."""
    first_token: int = 0
    """First row of the vocabulary on this rank."""
    first_layer: int = 0
    """Pipeline stage: the whole model's number of layer 0 here."""
    is_first_stage: bool = True
    """This stage embeds tokens; else hidden rows come from the stage before."""
    is_last_stage: bool = True
    """This stage has final norm and head; else hidden rows go to the next stage."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def key_part(self) -> slice:
        """Columns of the fused QKV projection that are keys."""
        return slice(self.query_rows, self.query_rows + self.kv_size)

    @property
    def query_rows(self) -> int:
        """Rows of q_proj: query heads, and their gates if they have any."""
        return query_step(self.has_output_gate) * self.query_size

    @property
    def units(self) -> tuple[int, int, int, StateSpec | None]:
        """Units that ranks must not cut: query heads, key heads, groups of heads, states (`shard_parameters`)."""
        groups = 1 if self.compressed is None else self.compressed.num_output_groups
        return self.num_heads, self.num_kv_heads, groups, self.state

    @property
    def attention(self) -> GroupedSpec | LatentSpec | CompressedSpec:
        """The spec of the model's attention family."""
        return self.latent or self.compressed or GroupedSpec(self.num_kv_heads, self.has_output_gate)

    @property
    def form_heads(self) -> int:
        """Query heads by which attention chooses tiles and splits: on exact ranks those of all, else those of this rank."""
        return self.num_heads * self.num_ranks if self.gathers else self.num_heads

    @property
    def attended_size(self) -> int:
        """Columns of the attention's output, before the last output projection."""
        if self.compressed is not None:
            return self.compressed.num_output_groups * self.compressed.output_rank
        return self.query_size if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the weights around attention, in order of computation; those of an index last."""
        return self.attention.products(self.hidden_size, self.num_heads, self.head_dim)

    @property
    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """Like `attention_products`, with those of layers that keep a state."""
        states = () if self.state is None else self.state.products(self.hidden_size)
        return (*self.attention_products, *states)

    def has_state(self, layer: int) -> bool:
        """Return True if a layer keeps a state instead of tokens."""
        return self.state is not None and layer in self.state.layers

    @property
    def has_separable_key_bias(self) -> bool:
        """True if keys are a token's part plus a bias: no norm stands between the projection and RoPE."""
        return self.qkv_bias and not self.qk_norm

    @property
    def score_scale(self) -> float:
        """Factor on scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rope_dim(self) -> int:
        """Elements of a head, or beside a latent, that RoPE rotates."""
        attention = self.attention
        return self.rotary_dim or self.head_dim if isinstance(attention, GroupedSpec) else attention.rope_dim

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """Return the RoPE of a layer; None if positions are learned."""
        if self.compressed is not None:
            return self.local_rope if self.compressed.compressors[layer] is None else self.rope
        return self.local_rope if self.local_rope is not None and self.window(layer) is not None else self.rope

    @property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """Distinct rotations of all layers."""
        return tuple(dict.fromkeys(self.layer_rope(layer) for layer in range(self.num_layers)))

    @property
    def rope_sets(self) -> tuple[tuple[RopeSpec, int], ...]:
        """A step's rows of cos and sin per token: a rotation, and its ratio of tokens per entry, 1 for tokens."""
        entries = ((self.layer_rope(layer), self.entry_ratio(layer)) for layer in range(self.num_layers))
        sets = dict.fromkeys((*((rope, 1) for rope in self.ropes), *(own for own in entries if own[1])))
        return tuple((rope, ratio) for rope, ratio in sets if rope is not None)

    def entry_ratio(self, layer: int) -> int:
        """Return the tokens per entry of a layer; 0 if it has none."""
        compressor = None if self.compressed is None else self.compressed.compressors[layer]
        return 0 if compressor is None else compressor.ratio

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def has_mlp(self) -> bool:
        """True if any layer has an MLP."""
        return self.experts is None or bool(self.experts.dense_layers)

    def layer_index(self, layer: int) -> IndexSpec | None:
        """Return the index of a layer; None if it reuses another's choice or attends to all tokens."""
        if self.compressed is not None:
            return self.compressed.layer_index(layer)
        index = None if self.latent is None else self.latent.index
        return None if index is None or layer in index.shared_layers else index

    @property
    def shares_choices(self) -> bool:
        """True if some layer attends to tokens that an earlier layer chose."""
        index = None if self.latent is None else self.latent.index
        return index is not None and bool(index.shared_layers)

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer. Layers of the same kind have weights of the same shapes."""
        compressor = None if self.compressed is None else self.compressed.compressors[layer]
        experts = self.layer_experts(layer)
        has_table = experts is not None and layer in experts.table_layers
        return LayerKind(experts, self.layer_index(layer), compressor, has_table, self.has_state(layer))

    def first_layers(self, num_layers: int) -> "ModelSpec":
        """Keep only the first layers."""
        return self._only_layers(0, num_layers)

    def layer_slice(self, first: int, last: int) -> "ModelSpec":
        """Return the pipeline stage with the layers from `first` to before `last`, counted from 0 there."""
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
            # A stage in which every layer has an MLP has no router, and no buffers for one.
            is_dense = len(dense) == spec.num_layers
            kept = None if is_dense else replace(experts, dense_layers=dense, table_layers=tables)
            spec = replace(spec, experts=kept)
        if spec.latent is not None and spec.latent.index is not None:
            index = replace(spec.latent.index, shared_layers=own(spec.latent.index.shared_layers))
            spec = replace(spec, latent=replace(spec.latent, index=index))
        if spec.state is not None:
            spec = replace(spec, state=spec.state.slice(first, last))
        if spec.compressed is not None:
            compressors = spec.compressed.compressors[first:last]
            has_index = any(one is not None and one.is_overlapped for one in compressors)
            index = spec.compressed.index if has_index else None
            spec = replace(spec, compressed=replace(spec.compressed, compressors=compressors, index=index))
        return spec

    def layer_experts(self, layer: int) -> ExpertsSpec | None:
        """Return the experts of a layer, or None if it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

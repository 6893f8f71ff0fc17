"""Names of checkpoint tensors by family, and the parameters that a spec makes of them; no torch.

A parameter is one final tensor, such as the fused layers.3.qkv.weight. A part is a checkpoint tensor, or some rows and
columns of one, that fills some of its rows. Rows count all leading dimensions: the experts [E, N, K] of a layer are E * N
rows of K columns, and expert e begins at row e * N; a vector has one column. Checkpoint tensors are named as Hugging Face
names them; a source with other names (GGUF) translates.

E experts, I inner width of one, H hidden

separate     every expert's gate, up and down are tensors of their own: [I, H], [I, H], [H, I]
fused        gate and up of all experts are one tensor, [E, 2 I, H], and down is another, [E, H, I]
transposed   the same as [E, H, 2 I] and [E, I, H]
by kind      gate, up and down of all experts are one tensor each: [E, I, H], [E, I, H], [E, H, I]
interleaved  transposed, and nothing else: columns of gate and up alternate; biases [E, 2 I] and [E, H] (gpt-oss)

Those from fused to by kind go by module names with and without ".weight". Parts are by expert and by gate and up in every layout, so
that ranks divide experts in the same order; interleaved, gate and up are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd, prod
from typing import Literal, NamedTuple

from holdfast.models.spec import CompressedSpec, CompressorSpec, ExpertsSpec, IndexSpec, LatentSpec, ModelSpec

Kind = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router", "absorbed"]
"""What a parameter is for; linear, expert and head are what quantization is for.

An absorbed one (kv_b of latent attention, o_a of compressed attention) is multiplied by heads, or by groups of them, each by its
own rows: it is small, and kept in the type of the engine whatever the checkpoint stores it in."""
Split = Literal["none", "rows", "columns", "outputs"]
"""How ranks share a parameter: all of it each, some rows of every part each, or some columns of all rows each.

Those that are split by columns are output projections: where ranks gather (`Mesh.is_exact`) they are split by rows as well.
Their biases are `outputs`: all of it each where ranks add up their products, their own elements where they gather."""


class Part(NamedTuple):
    """Rows of a parameter, from `row_start` on, and where in a checkpoint tensor they come from.

    A large mixture of experts has hundreds of thousands: a tuple is made in half the time of a dataclass.
    """

    tensor: str
    row_start: int
    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    rows: tuple[int, int] | None = None
    """The rows [start, end) of the checkpoint tensor that are taken, leading dimensions counted as rows; None: all.
    Of a transposed one they are rows after transposing."""
    columns: tuple[int, int] | None = None
    """The columns that are taken of them; None: all. A scale that is shared by a row still follows from all of it."""
    is_transposed: bool = False
    """The last two dimensions are stored the other way round: [E, K, N] instead of [E, N, K]."""
    repeats: int = 1
    """Rows of the parameter that each row fills: a stored scale that stands for several of ours."""
    whole_rows: tuple[int, int] | None = None
    """The rows of the checkpoint tensor of which `rows` are one rank's share; None: `rows` are all there are."""
    joined_rows: int = 1
    """Stored rows that are one row here: [E, N, K / 32, 16] stands for rows of K / 2, each of K / 32 stored ones."""

    @property
    def source_rows(self) -> int:
        """Rows of the whole checkpoint tensor, after transposing and joining."""
        return prod(self.shape) // self.source_columns

    @property
    def source_columns(self) -> int:
        """Columns of the whole checkpoint tensor, after transposing and joining; 1 of a vector or a single number."""
        return self.shape[-2 if self.is_transposed else -1] * self.joined_rows if len(self.shape) > 1 else 1

    @property
    def matrix_rows(self) -> int:
        """Rows of one of the matrices that the checkpoint tensor is a stack of."""
        if len(self.shape) < 2:
            return self.source_rows
        return self.shape[-1 if self.is_transposed else -2 if self.joined_rows == 1 else -3]

    @property
    def row_range(self) -> tuple[int, int]:
        return self.rows or (0, self.source_rows)

    @property
    def column_range(self) -> tuple[int, int]:
        return self.columns or (0, self.source_columns)

    @property
    def whole_range(self) -> tuple[int, int]:
        """The rows that a scale for the whole of them follows from, whichever of them are taken."""
        return self.whole_rows or self.row_range

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it fills."""
        start, end = self.row_range
        return (end - start) * self.repeats

    @property
    def num_columns(self) -> int:
        start, end = self.column_range
        return end - start

    def check(self) -> None:
        """What it takes lies inside the checkpoint tensor, and inside what it is a share of."""
        start, end = self.row_range
        assert 0 <= start < end <= self.source_rows, f"{self.tensor}: rows {start} to {end} of {self.source_rows}"
        first, last = self.whole_range
        assert first <= start < end <= last, f"{self.tensor}: rows {start} to {end} as a share of {first} to {last}"
        start, end = self.column_range
        assert 0 <= start < end <= self.source_columns, f"{self.tensor}: columns {start} to {end} of {self.shape}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One final tensor; its parts cover every row exactly once."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    kind: Kind = "linear"
    split: Split = "none"
    layouts: tuple[tuple[Part, ...], ...] = ()
    """Other ways in which checkpoints store the same: the first whose tensors are there with these shapes is taken."""
    dtype: str | None = None
    """Its own type, whatever the dtype of the engine; None: that one."""
    whole: "Parameter | None" = None
    """The parameter of the whole model of which this one is a rank's share; None: this one is."""
    limit: int = 0
    """Its numbers are whole ones from 0 to one less than this; 0: they are any."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """All leading dimensions; of a vector, its elements."""
        return prod(self.shape[:-1] if len(self.shape) > 1 else self.shape)

    @property
    def num_columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def seam_rows(self) -> int:
        """What divides every row at which two parts or two stacked matrices of the whole parameter meet; 0: none do."""
        if self.whole is not None:
            return self.whole.seam_rows
        stacked = self.shape[-2] if len(self.shape) > 2 else 0
        return gcd(stacked, *(part.row_start for part in self.parts))

    def check(self) -> None:
        """In every layout each row is filled once, in order, by parts of the right width."""
        for parts in (self.parts, *self.layouts):
            row = 0
            for part in parts:
                part.check()
                assert part.row_start == row, f"{self.name}: {part.tensor} starts at row {part.row_start}, not {row}"
                assert part.num_columns == self.num_columns, f"{self.name}: {part} beside {self.shape=}"
                row += part.num_rows
            assert row == self.num_rows, f"{self.name}: parts fill {row} rows of {self.num_rows}"


def stack_parts(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Part, ...]:
    """One part a tensor, given as name and shape; the rows of a tensor are its first dimension."""
    parts: list[Part] = []
    row = 0
    for tensor, shape in tensors:
        parts.append(Part(tensor, row, shape))
        row += shape[0]
    return tuple(parts)


def stacked(name: str, tensors: Sequence[tuple[str, tuple[int, ...]]], kind: Kind, split: Split) -> Parameter:
    """One parameter that holds all rows of all of them."""
    num_rows = sum(shape[0] for _, shape in tensors)
    return Parameter(name, (num_rows, *tensors[0][1][1:]), stack_parts(tensors), kind, split)


SUFFIXES = ("", ".weight")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the modules of a sparse layer; names of an expert follow `experts` and its number."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    score_bias: str = "e_score_correction_bias"
    """What follows the router's name in that of the bias on its scores."""
    bias: str = "_bias"
    """What follows the name of a stacked tensor in the name of its biases."""
    table: str = "tid2eid"
    """What follows the router's name in that of the experts by token."""


EXPERT_NAMES = ExpertNames()


def list_experts(
    experts: ExpertsSpec,
    names: ExpertNames,
    hidden: int,
    ours: str,
    theirs: str,
    with_layouts: bool = True,
    table_size: int = 0,
) -> list[Parameter]:
    """The router, the experts and what every token takes, of one layer; `ours` and `theirs` are prefixes of names.

    With `table_size` that many tokens have their experts in a table, and no bias is for choosing them."""
    router = [(f"{theirs}{names.router}.weight", (experts.num_experts, hidden))]
    parameters = [stacked(f"{ours}router.weight", router, "router", "none")]
    if experts.has_router_bias:
        bias = [(f"{theirs}{names.router}.bias", (experts.num_experts,))]
        parameters.append(stacked(f"{ours}router.bias", bias, "bias", "none"))
    if table_size:
        table = [(f"{theirs}{names.router}.{names.table}", (table_size, experts.top_k))]
        parameter = stacked(f"{ours}router.table", table, "router", "none")
        parameters.append(replace(parameter, dtype="int64", limit=experts.num_experts))
    elif experts.has_score_bias:
        bias = [(f"{theirs}{names.router}.{names.score_bias}", (experts.num_experts,))]
        parameters.append(replace(stacked(f"{ours}router.score_bias", bias, "bias", "none"), dtype="float32"))
    for make in (_gate_up, _down):
        parameter = make(experts, names, hidden, f"{ours}experts.", f"{theirs}{names.experts}.", with_layouts)
        parameters.append(parameter)
    if experts.has_bias:
        parameters += _expert_biases(experts, names, hidden, f"{ours}experts.", f"{theirs}{names.experts}.")
    if experts.shared_size:
        shared, inner = f"{theirs}{names.shared}.", experts.shared_size
        gate_up = [(f"{shared}{module}.weight", (inner, hidden)) for module in (names.gate, names.up)]
        down = [(f"{shared}{names.down}.weight", (hidden, inner))]
        parameters.append(stacked(f"{ours}shared.gate_up.weight", gate_up, "linear", "rows"))
        parameters.append(stacked(f"{ours}shared.down.weight", down, "linear", "columns"))
    if experts.has_shared_gate:
        gate = [(f"{theirs}{names.shared_gate}.weight", (1, hidden))]
        parameters.append(stacked(f"{ours}shared.gate.weight", gate, "router", "none"))
    return parameters


def _expert_biases(experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, prefix: str) -> list[Parameter]:
    """A row for each expert. Ranks share columns as they share rows of the weight; what is added last is of all of them."""
    gate_up = [(prefix + names.gate_up + names.bias, (experts.num_experts, 2 * experts.intermediate_size))]
    down = [(prefix + names.down + names.bias, (experts.num_experts, hidden))]
    return [
        stacked(f"{ours}gate_up.bias", gate_up, "bias", "columns"),
        stacked(f"{ours}down.bias", down, "bias", "outputs"),
    ]


def _gate_up(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, prefix: str, with_layouts: bool
) -> Parameter:
    count, inner = experts.num_experts, experts.intermediate_size
    if experts.is_interleaved:
        parts = _slices(prefix + names.gate_up, (count, hidden, 2 * inner), count, is_transposed=True)
        return Parameter(f"{ours}gate_up.weight", (count, 2 * inner, hidden), parts, "expert", "rows")
    halves = (names.gate, names.up)
    separate = [(f"{prefix}{expert}.{half}.weight", (inner, hidden)) for expert in range(count) for half in halves]
    layouts, suffixes = [], SUFFIXES if with_layouts else ()
    for suffix in suffixes:
        fused = prefix + names.gate_up + suffix
        layouts.append(_slices(fused, (count, 2 * inner, hidden), 2 * count))
        layouts.append(_slices(fused, (count, hidden, 2 * inner), 2 * count, is_transposed=True))
    for suffix in suffixes:
        by_half = [_slices(prefix + half + suffix, (count, inner, hidden), count) for half in halves]
        layouts.append(_in_turn(by_half, inner))
    shape = (count, 2 * inner, hidden)
    return Parameter(f"{ours}gate_up.weight", shape, stack_parts(separate), "expert", "rows", tuple(layouts))


def _down(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, prefix: str, with_layouts: bool
) -> Parameter:
    count, inner = experts.num_experts, experts.intermediate_size
    if experts.is_interleaved:
        parts = _slices(prefix + names.down, (count, inner, hidden), count, is_transposed=True)
        return Parameter(f"{ours}down.weight", (count, hidden, inner), parts, "expert", "columns")
    separate = [(f"{prefix}{expert}.{names.down}.weight", (hidden, inner)) for expert in range(count)]
    layouts, suffixes = [], SUFFIXES if with_layouts else ()
    for suffix in suffixes:
        tensor = prefix + names.down + suffix
        layouts.append(_slices(tensor, (count, hidden, inner), count))
        layouts.append(_slices(tensor, (count, inner, hidden), count, is_transposed=True))
    shape = (count, hidden, inner)
    return Parameter(f"{ours}down.weight", shape, stack_parts(separate), "expert", "columns", tuple(layouts))


def _slices(tensor: str, shape: tuple[int, int, int], num_parts: int, is_transposed: bool = False) -> tuple[Part, ...]:
    """All rows of a stacked tensor, in so many equal parts."""
    num_rows = shape[0] * shape[2 if is_transposed else 1] // num_parts
    return tuple(
        Part(tensor, start, shape, (start, start + num_rows), is_transposed=is_transposed)
        for start in range(0, num_parts * num_rows, num_rows)
    )


def _in_turn(tensors: list[tuple[Part, ...]], num_rows: int) -> tuple[Part, ...]:
    """The first part of each tensor, then the second of each, and so on; each fills `num_rows`."""
    parts = [part for same in zip(*tensors, strict=True) for part in same]
    return tuple(Part(part.tensor, place * num_rows, part.shape, part.rows) for place, part in enumerate(parts))


@dataclass(frozen=True, slots=True)
class LatentNames:
    """What a family calls the modules of latent attention."""

    q: str = "self_attn.q_proj"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    k_b: str = "self_attn.k_b_proj"
    """Keys of kv_b by themselves and transposed, [heads, kv_rank, nope_dim], where a checkpoint (GGUF) has split it."""
    v_b: str = "self_attn.v_b_proj"
    """Values of kv_b by themselves: [heads, value_dim, kv_rank]."""
    index_q: str = "self_attn.indexer.wq_b"
    index_k: str = "self_attn.indexer.wk"
    index_k_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"


LATENT_NAMES = LatentNames()


@dataclass(frozen=True, slots=True)
class CompressedNames:
    """What a family calls the modules of compressed attention, and those of streams."""

    q_a: str = "attn.wq_a"
    q_a_norm: str = "attn.q_norm"
    q_b: str = "attn.wq_b"
    kv: str = "attn.wkv"
    kv_norm: str = "attn.kv_norm"
    o_a: str = "attn.wo_a"
    o_b: str = "attn.wo_b"
    compressor: str = "attn.compressor."
    index: str = "attn.indexer.compressor."
    index_q: str = "attn.indexer.wq_b"
    index_weights: str = "attn.indexer.weights_proj"
    positions: str = "ape"
    attn_streams: str = "hc_attn_"
    mlp_streams: str = "hc_ffn_"
    head_streams: str = "hc_head_"
    """What precedes fn, base and scale in the names of their tensors."""


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """What a family calls its modules; names in a layer follow `layer` with the layer's number filled in."""

    embed: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    o: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    positions: str = ""
    embed_in: str = ""
    embed_out: str = ""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    lm_head: str = "lm_head"
    attn_out_norm: str = ""
    mlp_out_norm: str = ""
    sinks: str = "self_attn.sinks"
    experts: ExpertNames = EXPERT_NAMES
    latent: LatentNames = LATENT_NAMES
    compressed: CompressedNames = CompressedNames()


LLAMA_NAMES = CheckpointNames(
    embed="model.embed_tokens",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
)
GEMMA3_NAMES = replace(
    LLAMA_NAMES,
    attn_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
GPT_OSS_NAMES = replace(LLAMA_NAMES, experts=ExpertNames(router="mlp.router"))
DEEPSEEK_NAMES = replace(LLAMA_NAMES, experts=ExpertNames(shared="mlp.shared_experts"))
COMPRESSED_NAMES = CheckpointNames(
    embed="embed",
    layer="layers.{}.",
    attn_norm="attn_norm",
    q="",
    k="",
    v="",
    o="",
    mlp_norm="ffn_norm",
    gate="",
    up="",
    down="",
    final_norm="norm",
    sinks="attn.attn_sink",
    experts=ExpertNames("ffn.gate", "ffn.experts", "ffn.shared_experts", "", "w1", "w3", "w2", score_bias="bias"),
)
OPT_NAMES = CheckpointNames(
    embed="model.decoder.embed_tokens",
    layer="model.decoder.layers.{}.",
    attn_norm="self_attn_layer_norm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate="",
    up="fc1",
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    embed_in="model.decoder.project_in",
    embed_out="model.decoder.project_out",
)


def list_parameters(spec: ModelSpec, names: CheckpointNames, with_layouts: bool = True) -> tuple[Parameter, ...]:
    """Every parameter of the decoder, in the order of computation; a plan of memory does without other layouts."""
    layers = [list_layer(spec, names, layer, with_layouts) for layer in range(spec.num_layers)]
    return (*list_before_layers(spec, names), *chain.from_iterable(layers), *list_behind_layers(spec, names))


def list_before_layers(spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
    if not spec.is_first_stage:
        return []
    hidden, embedding = spec.hidden_size, spec.embedding_size or spec.hidden_size
    parameters = [_embedding(spec, names)]
    if spec.rope is None:
        num_positions = spec.max_position + spec.position_offset
        parameters.append(_matrix("positions", [(names.positions, num_positions)], hidden, "embedding", "none"))
    if embedding != hidden:
        parameters.append(_matrix("embed_in", [(names.embed_in, hidden)], embedding, "linear", "none"))
    return parameters


def _embedding(spec: ModelSpec, names: CheckpointNames) -> Parameter:
    kind: Kind = "head" if spec.tied_embeddings else "embedding"
    return _matrix("embed", [(names.embed, spec.vocab_size)], spec.embedding_size or spec.hidden_size, kind, "rows")


def list_behind_layers(spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
    if not spec.is_last_stage:
        return []
    hidden, embedding = spec.hidden_size, spec.embedding_size or spec.hidden_size
    parameters = [] if spec.streams is None else _list_head_streams(spec.streams.num_streams, hidden, names.compressed)
    parameters += _norm(spec, "final_norm", names.final_norm) if spec.has_final_norm else []
    if embedding != hidden:
        parameters.append(_matrix("embed_out", [(names.embed_out, embedding)], hidden, "linear", "none"))
    if spec.tied_embeddings:
        parameters += [] if spec.is_first_stage else [_embedding(spec, names)]
    else:
        parameters.append(_matrix("lm_head", [(names.lm_head, spec.vocab_size)], embedding, "head", "rows"))
    return parameters


def list_layer(spec: ModelSpec, names: CheckpointNames, layer: int, with_layouts: bool = True) -> list[Parameter]:
    ours, theirs, hidden = f"layers.{layer}.", names.layer.format(spec.first_layer + layer), spec.hidden_size
    if spec.latent is not None:
        return _list_latent_layer(spec, spec.latent, names, layer, with_layouts)
    if spec.compressed is not None:
        return _list_compressed_layer(spec, spec.compressed, names, layer, with_layouts)
    qkv = [(theirs + names.q, spec.query_size), (theirs + names.k, spec.kv_size), (theirs + names.v, spec.kv_size)]
    parameters = [
        *_norm(spec, f"{ours}attn_norm", theirs + names.attn_norm),
        *_linear(f"{ours}qkv", qkv, hidden, "rows", spec.qkv_bias),
    ]
    if spec.qk_norm:
        for name, module in (("q_norm", names.q_norm), ("k_norm", names.k_norm)):
            norm = _vector(f"{ours}{name}.weight", [(f"{theirs}{module}.weight", spec.head_dim)], "norm", "none")
            parameters.append(_typed_norm(spec, norm))
    parameters += _linear(f"{ours}o", [(theirs + names.o, hidden)], spec.query_size, "columns", spec.o_bias)
    if spec.has_sinks:
        parameters.append(_vector(f"{ours}sinks", [(theirs + names.sinks, spec.num_heads)], "bias", "rows"))
    if spec.has_output_norms:
        parameters += _norm(spec, f"{ours}attn_out_norm", theirs + names.attn_out_norm)
    parameters += _norm(spec, f"{ours}mlp_norm", theirs + names.mlp_norm)
    experts = spec.layer_experts(layer)
    if experts is not None:
        parameters += list_experts(experts, names.experts, hidden, ours, theirs, with_layouts)
    else:
        parameters += _list_mlp(spec, names, ours, theirs)
    if spec.has_output_norms:
        parameters += _norm(spec, f"{ours}mlp_out_norm", theirs + names.mlp_out_norm)
    return parameters


def _list_latent_layer(
    spec: ModelSpec, latent: LatentSpec, names: CheckpointNames, layer: int, with_layouts: bool
) -> list[Parameter]:
    """Latent attention, and what follows it. Ranks share query heads; latents are the same on all of them."""
    ours, theirs, hidden, own = (
        f"layers.{layer}.",
        names.layer.format(spec.first_layer + layer),
        spec.hidden_size,
        names.latent,
    )
    parameters = [*_norm(spec, f"{ours}attn_norm", theirs + names.attn_norm)]
    kv_a = (theirs + own.kv_a, latent.row_dim)
    q_rows = spec.num_heads * latent.query_dim
    if latent.q_rank is None:
        parameters += _linear(f"{ours}q", [(theirs + own.q, q_rows)], hidden, "rows", has_bias=False)
        parameters += _linear(f"{ours}qkv_a", [kv_a], hidden, "none", spec.qkv_bias)
    else:
        q_a = (theirs + own.q_a, latent.q_rank)
        norm = [(f"{theirs}{own.q_a_norm}.weight", latent.q_rank)]
        parameters += _linear(f"{ours}qkv_a", [q_a, kv_a], hidden, "none", spec.qkv_bias)
        parameters.append(_typed_norm(spec, _vector(f"{ours}q_a_norm.weight", norm, "norm", "none")))
        parameters += _linear(f"{ours}q_b", [(theirs + own.q_b, q_rows)], latent.q_rank, "rows", has_bias=False)
    norm = [(f"{theirs}{own.kv_a_norm}.weight", latent.kv_rank)]
    parameters.append(_typed_norm(spec, _vector(f"{ours}kv_a_norm.weight", norm, "norm", "none")))
    parameters.append(_kv_b(spec.num_heads, latent, own, ours, theirs, with_layouts))
    index = spec.layer_index(layer)
    if index is not None and latent.q_rank is not None:
        parameters += _list_index(index, latent.q_rank, hidden, own, ours, theirs)
    value_size = spec.num_heads * latent.value_dim
    parameters += _linear(f"{ours}o", [(theirs + names.o, hidden)], value_size, "columns", spec.o_bias)
    parameters += _norm(spec, f"{ours}mlp_norm", theirs + names.mlp_norm)
    experts = spec.layer_experts(layer)
    if experts is None:
        return [*parameters, *_list_mlp(spec, names, ours, theirs)]
    return [*parameters, *list_experts(experts, names.experts, hidden, ours, theirs, with_layouts)]


def _list_index(
    index: IndexSpec, q_rank: int, hidden: int, names: LatentNames, ours: str, theirs: str
) -> list[Parameter]:
    """Every rank has all of it: its heads are summed up before tokens are chosen."""
    q = [(theirs + names.index_q, index.num_heads * index.head_dim)]
    kinds: dict[str, Kind] = {"weight": "norm", "bias": "bias"}
    norm = [
        _vector(f"{ours}index_k_norm.{end}", [(f"{theirs}{names.index_k_norm}.{end}", index.head_dim)], kind, "none")
        for end, kind in kinds.items()
    ]
    weights = [(f"{theirs}{names.index_weights}.weight", (index.num_heads, hidden))]
    return [
        *_linear(f"{ours}index_q", q, q_rank, "none", has_bias=False),
        *_linear(f"{ours}index_k", [(theirs + names.index_k, index.head_dim)], hidden, "none", has_bias=False),
        *norm,
        stacked(f"{ours}index_weights.weight", weights, "router", "none"),
    ]


def _list_compressed_layer(
    spec: ModelSpec, compressed: CompressedSpec, names: CheckpointNames, layer: int, with_layouts: bool
) -> list[Parameter]:
    """Compressed attention and experts, each with its streams. Ranks share query heads and groups of them; the rest each has whole."""
    ours, theirs, hidden, own = (
        f"layers.{layer}.",
        names.layer.format(spec.first_layer + layer),
        spec.hidden_size,
        names.compressed,
    )
    kind, groups = spec.layer_kind(layer), compressed.num_output_groups * compressed.output_rank
    qkv_a = [(theirs + own.q_a, compressed.q_rank), (theirs + own.kv, spec.head_dim)]
    norms = {"q_a_norm": (own.q_a_norm, compressed.q_rank), "kv_norm": (own.kv_norm, spec.head_dim)}
    q_a_norm, kv_norm = (
        _typed_norm(spec, _vector(f"{ours}{name}.weight", [(f"{theirs}{module}.weight", size)], "norm", "none"))
        for name, (module, size) in norms.items()
    )
    group_size = spec.query_size // compressed.num_output_groups
    sinks = _vector(f"{ours}sinks", [(theirs + names.sinks, spec.num_heads)], "bias", "rows")
    parameters = [
        *_list_streams(f"{ours}attn_streams", theirs + own.attn_streams, spec),
        *_norm(spec, f"{ours}attn_norm", theirs + names.attn_norm),
        *_linear(f"{ours}qkv_a", qkv_a, hidden, "none", has_bias=False),
        q_a_norm,
        *_linear(f"{ours}q_b", [(theirs + own.q_b, spec.query_size)], compressed.q_rank, "rows", has_bias=False),
        kv_norm,
        replace(sinks, dtype="float32"),
        *([] if kind.compressor is None else _list_compressor(spec, kind.compressor, layer, names)),
        _matrix(f"{ours}o_a", [(theirs + own.o_a, groups)], group_size, "absorbed", "rows"),
        *_linear(f"{ours}o_b", [(theirs + own.o_b, hidden)], groups, "columns", has_bias=False),
        *_list_streams(f"{ours}mlp_streams", theirs + own.mlp_streams, spec),
        *_norm(spec, f"{ours}mlp_norm", theirs + names.mlp_norm),
    ]
    assert kind.experts is not None, f"{spec.architecture}: layer {layer} has no experts"
    num_tokens = kind.experts.table_size if kind.has_table else 0
    return [*parameters, *list_experts(kind.experts, names.experts, hidden, ours, theirs, with_layouts, num_tokens)]


def _list_compressor(
    spec: ModelSpec, compressor: CompressorSpec, layer: int, names: CheckpointNames
) -> list[Parameter]:
    """What pools tokens into entries, and into those of an index. One product gives all that they are pooled from."""
    ours, theirs, own = f"layers.{layer}.", names.layer.format(spec.first_layer + layer), names.compressed
    index, ratio, columns = spec.layer_index(layer), compressor.ratio, 2 if compressor.is_overlapped else 1
    pooled = [(theirs + own.compressor + end, columns * spec.head_dim) for end in ("wkv", "wgate")]
    made = [("compressor", own.compressor, spec.head_dim)]
    if index is not None:
        pooled += [(theirs + own.index + end, columns * index.head_dim) for end in ("wkv", "wgate")]
        pooled.append((theirs + own.index_weights, index.num_heads))
        made.append(("index", own.index, index.head_dim))
    parameters = [_matrix(f"{ours}pool", pooled, spec.hidden_size, "router", "none")]
    for name, module, dim in made:
        positions = [(f"{theirs}{module}{own.positions}", (ratio, columns * dim))]
        norm = [(f"{theirs}{module}norm.weight", dim)]
        parameters.append(replace(stacked(f"{ours}{name}.positions", positions, "router", "none"), dtype="float32"))
        parameters.append(_typed_norm(spec, _vector(f"{ours}{name}.norm.weight", norm, "norm", "none")))
    if index is not None and spec.compressed is not None:
        q = [(theirs + own.index_q, index.num_heads * index.head_dim)]
        parameters += _linear(f"{ours}index_q", q, spec.compressed.q_rank, "none", has_bias=False)
    return parameters


def _list_streams(name: str, prefix: str, spec: ModelSpec) -> list[Parameter]:
    """How streams are mixed around one half of a layer: what each gives, what each takes, and which goes where."""
    assert spec.streams is not None, f"{spec.architecture} has one stream"
    count = spec.streams.num_streams
    return _mix(name, prefix, (2 + count) * count, count * spec.hidden_size, 3)


def _list_head_streams(num_streams: int, hidden: int, names: CompressedNames) -> list[Parameter]:
    return _mix("head_streams", names.head_streams, num_streams, num_streams * hidden, 1)


def _mix(name: str, prefix: str, num_rows: int, num_columns: int, num_scales: int) -> list[Parameter]:
    weight = stacked(f"{name}.weight", [(f"{prefix}fn", (num_rows, num_columns))], "router", "none")
    bias = _vector(f"{name}.bias", [(f"{prefix}base", num_rows)], "bias", "none")
    scale = _vector(f"{name}.scale", [(f"{prefix}scale", num_scales)], "bias", "none")
    return [replace(parameter, dtype="float32") for parameter in (weight, bias, scale)]


def _kv_b(
    num_heads: int, latent: LatentSpec, names: LatentNames, ours: str, theirs: str, with_layouts: bool
) -> Parameter:
    """[heads * (nope_dim + value_dim), kv_rank], head by head, keys before values: whole, or from two tensors."""
    nope, value, rank = latent.nope_dim, latent.value_dim, latent.kv_rank
    whole = [(f"{theirs}{names.kv_b}.weight", (num_heads * latent.expanded_dim, rank))]
    parameter = stacked(f"{ours}kv_b.weight", whole, "absorbed", "rows")
    if not with_layouts:
        return parameter
    keys, values = f"{theirs}{names.k_b}.weight", f"{theirs}{names.v_b}.weight"
    split: list[Part] = []
    for head in range(num_heads):
        first, k_first, v_first = head * latent.expanded_dim, head * nope, head * value
        k_rows, v_rows = (k_first, k_first + nope), (v_first, v_first + value)
        split.append(Part(keys, first, (num_heads, rank, nope), k_rows, is_transposed=True))
        split.append(Part(values, first + nope, (num_heads, value, rank), v_rows))
    return replace(parameter, layouts=(tuple(split),))


def _list_mlp(spec: ModelSpec, names: CheckpointNames, ours: str, theirs: str) -> list[Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up_name, up = f"{ours}up", [(theirs + names.up, inner)]
    if spec.gated_mlp:
        up_name, up = f"{ours}gate_up", [(theirs + names.gate, inner), *up]
    return [
        *_linear(up_name, up, hidden, "rows", spec.mlp_bias),
        *_linear(f"{ours}down", [(theirs + names.down, hidden)], inner, "columns", spec.mlp_bias),
    ]


def _linear(
    name: str, modules: list[tuple[str, int]], num_columns: int, split: Split, has_bias: bool
) -> list[Parameter]:
    weight = _matrix(name, modules, num_columns, "linear", split)
    if not has_bias:
        return [weight]
    bias_split: Split = "outputs" if split == "columns" else split
    biases = [(f"{module}.bias", num_rows) for module, num_rows in modules]
    return [weight, _vector(f"{name}.bias", biases, "bias", bias_split)]


def _norm(spec: ModelSpec, name: str, module: str) -> list[Parameter]:
    kinds: dict[str, Kind] = {"weight": "norm", "bias": "bias"} if spec.norm == "layer" else {"weight": "norm"}
    vectors = (
        _vector(f"{name}.{end}", [(f"{module}.{end}", spec.hidden_size)], kind, "none") for end, kind in kinds.items()
    )
    return [_typed_norm(spec, vector) for vector in vectors]


def _typed_norm(spec: ModelSpec, norm: Parameter) -> Parameter:
    return replace(norm, dtype="float32") if spec.float32_norms else norm


def _matrix(name: str, modules: list[tuple[str, int]], num_columns: int, kind: Kind, split: Split) -> Parameter:
    tensors = [(f"{module}.weight", (rows, num_columns)) for module, rows in modules]
    return stacked(f"{name}.weight", tensors, kind, split)


def _vector(name: str, tensors: list[tuple[str, int]], kind: Kind, split: Split) -> Parameter:
    return stacked(name, [(tensor, (num_rows,)) for tensor, num_rows in tensors], kind, split)

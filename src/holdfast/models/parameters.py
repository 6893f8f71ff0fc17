"""Names of checkpoint tensors by family, and the parameters that a spec needs; no torch.

A parameter is one final tensor, such as the fused layers.3.qkv.weight. A part is a checkpoint tensor, or some rows and
columns of one, that fills some of its rows. Rows count all leading dimensions: the experts [E, N, K] of a layer are
E * N rows of K columns, and expert e begins at row e * N; a vector has one column. Checkpoint tensors are named as
Hugging Face names them; a source with other names (GGUF) translates.

E experts, I inner width of one, H hidden

separate     every expert's gate, up and down are tensors of their own: [I, H], [I, H], [H, I]
fused        gate and up of all experts are one tensor, [E, 2 I, H], and down is another, [E, H, I]
transposed   like fused, as [E, H, 2 I] and [E, I, H]
by kind      gate, up and down of all experts are one tensor each: [E, I, H], [E, I, H], [E, H, I]
interleaved  like transposed, but columns of gate and up alternate; biases [E, 2 I] and [E, H] (gpt-oss)

Layouts from fused to by kind match module names with and without ".weight". Parts are by expert and by gate and up in
every layout, so that ranks divide experts in the same order; if interleaved, gate and up are one part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd, prod
from types import SimpleNamespace
from typing import Literal, NamedTuple

from holdfast.families.state.spec import StateSpec
from holdfast.memory.devices import read_data
from holdfast.models.spec import CompressedSpec, CompressorSpec, ExpertsSpec, IndexSpec, LatentSpec, ModelSpec

Kind = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router", "absorbed"]
"""Use of a parameter; quantization applies to linear, expert and head.

An absorbed one (kv_b of latent attention, o_a of compressed attention) is multiplied by heads, or by groups of them,
each by its own rows. It is small, and keeps the engine's type whatever the checkpoint's."""
Split = Literal["none", "rows", "columns", "outputs"]
"""How ranks share a parameter: each has all of it, some rows of every part, or some columns of all rows.

Those split by columns are output projections; if ranks gather (`Mesh.is_exact`), they are split by rows.
Their biases are `outputs`: each rank has all of it if it adds up products, its own elements if it gathers."""


class Part(NamedTuple):
    """Rows of a parameter, from `row_start` on, and their source in a checkpoint tensor.

    A large mixture of experts has hundreds of thousands: a tuple is built in half the time of a dataclass.
    """

    tensor: str
    row_start: int
    shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    rows: tuple[int, int] | None = None
    """The taken rows [start, end) of the checkpoint tensor, leading dimensions counted as rows; None: all.
    For a transposed tensor, rows after transposing."""
    columns: tuple[int, int] | None = None
    """The taken columns of these rows; None: all. A row's shared scale still follows from the whole row."""
    is_transposed: bool = False
    """True if the last two dimensions are stored swapped: [E, K, N] instead of [E, N, K]."""
    repeats: int = 1
    """Rows of the parameter that each row fills: one stored scale may stand for several of ours."""
    whole_rows: tuple[int, int] | None = None
    """The checkpoint rows of which `rows` are a rank's share; None: `rows` are all."""
    joined_rows: int = 1
    """Stored rows per row here: [E, N, K / 32, 16] stands for rows of K / 2, each of K / 32 stored ones."""

    @property
    def source_rows(self) -> int:
        """Rows of the whole checkpoint tensor, after transposing and joining."""
        return prod(self.shape) // self.source_columns

    @property
    def source_columns(self) -> int:
        """Columns of the whole checkpoint tensor, after transposing and joining; 1 for a vector or a scalar."""
        return self.shape[-2 if self.is_transposed else -1] * self.joined_rows if len(self.shape) > 1 else 1

    @property
    def matrix_rows(self) -> int:
        """Rows of one matrix in the stack that the checkpoint tensor is."""
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
        """The rows that a shared scale follows from, whichever of them are taken."""
        return self.whole_rows or self.row_range

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that the part fills."""
        start, end = self.row_range
        return (end - start) * self.repeats

    @property
    def num_columns(self) -> int:
        start, end = self.column_range
        return end - start

    def check(self) -> None:
        """Check that the part lies inside the checkpoint tensor, and inside the range that it is a share of."""
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
    """Other layouts in checkpoints. The first one whose tensors exist with these shapes is taken."""
    dtype: str | None = None
    """Its own type; None: the dtype of the engine."""
    whole: "Parameter | None" = None
    """The whole model's parameter, of which this one is a rank's share; None: this one is whole."""
    limit: int = 0
    """If set, its values are integers from 0 to `limit` - 1; 0: any numbers."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Product of all leading dimensions; for a vector, its elements."""
        return prod(self.shape[:-1] if len(self.shape) > 1 else self.shape)

    @property
    def num_columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def seam_rows(self) -> int:
        """A divisor of every row at which two parts or two stacked matrices of the whole parameter meet; 0: none do."""
        if self.whole is not None:
            return self.whole.seam_rows
        stacked = self.shape[-2] if len(self.shape) > 2 else 0
        return gcd(stacked, *(part.row_start for part in self.parts))

    def check(self) -> None:
        """Check that parts of the right width fill each row once, in order, in every layout."""
        for parts in (self.parts, *self.layouts):
            row = 0
            for part in parts:
                part.check()
                assert part.row_start == row, f"{self.name}: {part.tensor} starts at row {part.row_start}, not {row}"
                assert part.num_columns == self.num_columns, f"{self.name}: {part} beside {self.shape=}"
                row += part.num_rows
            assert row == self.num_rows, f"{self.name}: parts fill {row} rows of {self.num_rows}"


def stack_parts(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Part, ...]:
    """Make one part per tensor, given as name and shape. The rows of a tensor are its first dimension."""
    parts: list[Part] = []
    row = 0
    for tensor, shape in tensors:
        parts.append(Part(tensor, row, shape))
        row += shape[0]
    return tuple(parts)


def stacked(name: str, tensors: Sequence[tuple[str, tuple[int, ...]]], kind: Kind, split: Split) -> Parameter:
    """Make one parameter that stacks all rows of these tensors."""
    num_rows = sum(shape[0] for _, shape in tensors)
    return Parameter(name, (num_rows, *tensors[0][1][1:]), stack_parts(tensors), kind, split)


SUFFIXES = ("", ".weight")
Modules = Sequence[tuple[str, int]]
"""Names of modules, each with the rows of its weight."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A family's names of a sparse layer's modules; names of an expert follow `experts` and its number."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    score_bias: str = "e_score_correction_bias"
    """Suffix of the router's name for the bias on its scores."""
    bias: str = "_bias"
    """Suffix of a stacked tensor's name for its biases."""
    table: str = "tid2eid"
    """Suffix of the router's name for the table of experts by token."""


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """A family's module names; names in a layer follow `layer` with the layer's number filled in."""

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
    experts: ExpertNames = ExpertNames()


def _read_names() -> dict[str, CheckpointNames]:
    """Read the names by family. A row holds what differs from the row in `like`."""
    found: dict[str, CheckpointNames] = {}
    for name, row in read_data("tensor_names.json").items():
        if "experts" in row:
            row["experts"] = ExpertNames(**row["experts"])
        like = row.pop("like", None)
        found[name] = CheckpointNames(**row) if like is None else replace(found[like], **row)
    return found


NAMES: Mapping[str, CheckpointNames] = _read_names()
LLAMA_NAMES = NAMES["llama"]
LATENT_NAMES, COMPRESSED_NAMES, STATE_NAMES = (
    SimpleNamespace(**names) for names in read_data("attention_names.json").values()
)
"""Module names of latent and of compressed attention, and of layers with a state, which all families share.

`k_b` (keys, transposed) and `v_b` (values) are the halves of kv_b in checkpoints that split it (GGUF). `positions` ends
a tensor's name; names of streams come before fn, base and scale.
"""


def _slices(tensor: str, shape: tuple[int, int, int], num_parts: int, is_transposed: bool = False) -> tuple[Part, ...]:
    """Cut all rows of a stacked tensor into `num_parts` equal parts."""
    num_rows = shape[0] * shape[2 if is_transposed else 1] // num_parts
    return tuple(
        Part(tensor, start, shape, (start, start + num_rows), is_transposed=is_transposed)
        for start in range(0, num_parts * num_rows, num_rows)
    )


def _in_turn(tensors: list[tuple[Part, ...]], num_rows: int) -> tuple[Part, ...]:
    """Interleave: the first part of each tensor, then the second of each, and so on; each fills `num_rows`."""
    parts = [part for same in zip(*tensors, strict=True) for part in same]
    return tuple(Part(part.tensor, place * num_rows, part.shape, part.rows) for place, part in enumerate(parts))


@dataclass(frozen=True, slots=True)
class _Lister:
    """Lists parameters, whose names begin with one prefix here and with another in the checkpoint."""

    ours: str
    theirs: str
    hidden: int
    has_norm_bias: bool = False
    norm_dtype: str | None = None
    with_layouts: bool = True

    @classmethod
    def of(cls, spec: ModelSpec, names: CheckpointNames, layer: int | None, with_layouts: bool = True) -> "_Lister":
        """List one layer, or the ends of the model."""
        ours, theirs = ("", "") if layer is None else (f"layers.{layer}.", names.layer.format(spec.first_layer + layer))
        norm_dtype = "float32" if spec.float32_norms else None
        return cls(ours, theirs, spec.hidden_size, spec.norm == "layer", norm_dtype, with_layouts)

    def tensor(
        self,
        name: str,
        tensor: str,
        shape: tuple[int, ...],
        kind: Kind,
        split: Split = "none",
        dtype: str | None = None,
    ) -> Parameter:
        """List a parameter that is one tensor of the checkpoint."""
        return replace(stacked(self.ours + name, [(self.theirs + tensor, shape)], kind, split), dtype=dtype)

    def matrix(self, name: str, modules: Modules, num_columns: int, kind: Kind, split: Split = "none") -> Parameter:
        tensors = [(f"{self.theirs}{module}.weight", (num_rows, num_columns)) for module, num_rows in modules]
        return stacked(f"{self.ours}{name}.weight", tensors, kind, split)

    def linear(
        self, name: str, modules: Modules, num_columns: int, split: Split, has_bias: bool = False
    ) -> list[Parameter]:
        weight = self.matrix(name, modules, num_columns, "linear", split)
        if not has_bias:
            return [weight]
        biases = [(f"{self.theirs}{module}.bias", (num_rows,)) for module, num_rows in modules]
        bias_split: Split = "outputs" if split == "columns" else split
        return [weight, stacked(f"{self.ours}{name}.bias", biases, "bias", bias_split)]

    def norm(self, name: str, module: str, width: int | None = None, has_bias: bool = False) -> list[Parameter]:
        """List a norm of `width` elements; without a width, one of the residual stream."""
        if width is None:
            width, has_bias = self.hidden, self.has_norm_bias
        kinds: dict[str, Kind] = {"weight": "norm", "bias": "bias"} if has_bias else {"weight": "norm"}
        return [
            self.tensor(f"{name}.{end}", f"{module}.{end}", (width,), kind, dtype=self.norm_dtype)
            for end, kind in kinds.items()
        ]

    def mlp(self, spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
        inner, up = spec.intermediate_size, [(names.up, spec.intermediate_size)]
        wide = ("gate_up", [(names.gate, inner), *up]) if spec.gated_mlp else ("up", up)
        return [
            *self.linear(*wide, self.hidden, "rows", spec.mlp_bias),
            *self.linear("down", [(names.down, self.hidden)], inner, "columns", spec.mlp_bias),
        ]

    def streams(self, name: str, prefix: str, num_rows: int, num_streams: int, num_scales: int) -> list[Parameter]:
        """List the weight, bias and scales that mix residual streams, in float32."""
        return [
            self.tensor(
                f"{name}.weight", f"{prefix}fn", (num_rows, num_streams * self.hidden), "router", dtype="float32"
            ),
            self.tensor(f"{name}.bias", f"{prefix}base", (num_rows,), "bias", dtype="float32"),
            self.tensor(f"{name}.scale", f"{prefix}scale", (num_scales,), "bias", dtype="float32"),
        ]

    def experts(self, experts: ExpertsSpec, names: ExpertNames, table_size: int) -> list[Parameter]:
        """List the router, the experts and the shared expert.

        With `table_size`, a table gives the experts of that many tokens, and scores have no bias.
        """
        count, inner, hidden = experts.num_experts, experts.intermediate_size, self.hidden
        parameters = [self.tensor("router.weight", f"{names.router}.weight", (count, hidden), "router")]
        if experts.has_router_bias:
            parameters.append(self.tensor("router.bias", f"{names.router}.bias", (count,), "bias"))
        if table_size:
            theirs, shape = f"{names.router}.{names.table}", (table_size, experts.top_k)
            parameters.append(replace(self.tensor("router.table", theirs, shape, "router", dtype="int64"), limit=count))
        elif experts.has_score_bias:
            theirs = f"{names.router}.{names.score_bias}"
            parameters.append(self.tensor("router.score_bias", theirs, (count,), "bias", dtype="float32"))
        prefix, interleaved = f"{names.experts}.", experts.is_interleaved
        halves = (names.gate, names.up)
        parameters.append(self._of_experts("gate_up", halves, names, (count, inner, hidden), "rows", interleaved))
        parameters.append(
            self._of_experts("down", (names.down,), names, (count, hidden, inner), "columns", interleaved)
        )
        if experts.has_bias:
            # Ranks share columns as they share rows of the weight; each has the whole bias that is added last.
            gate_up, down = (prefix + name + names.bias for name in (names.gate_up, names.down))
            parameters.append(self.tensor("experts.gate_up.bias", gate_up, (count, 2 * inner), "bias", "columns"))
            parameters.append(self.tensor("experts.down.bias", down, (count, hidden), "bias", "outputs"))
        if shared := experts.shared_size:
            modules = [(f"{names.shared}.{module}", shared) for module in halves]
            parameters += self.linear("shared.gate_up", modules, hidden, "rows")
            parameters += self.linear("shared.down", [(f"{names.shared}.{names.down}", hidden)], shared, "columns")
        if experts.has_shared_gate:
            parameters.append(self.matrix("shared.gate", [(names.shared_gate, 1)], hidden, "router"))
        return parameters

    def _of_experts(
        self,
        name: str,
        modules: Sequence[str],
        names: ExpertNames,
        each: tuple[int, int, int],
        split: Split,
        is_interleaved: bool,
    ) -> Parameter:
        """List one stacked weight of all experts; `each`: the experts, then rows and columns of one expert's module."""
        (count, height, width), prefix, num_parts = each, f"{self.theirs}{names.experts}.", len(modules) * each[0]
        num_rows, fused = len(modules) * height, prefix + (names.gate_up if len(modules) > 1 else modules[0])
        ours, shape, stored = f"{self.ours}experts.{name}.weight", (count, num_rows, width), (count, width, num_rows)
        if is_interleaved:
            return Parameter(ours, shape, _slices(fused, stored, count, is_transposed=True), "expert", split)
        separate = [
            (f"{prefix}{expert}.{module}.weight", (height, width)) for expert in range(count) for module in modules
        ]
        layouts, suffixes = [], SUFFIXES if self.with_layouts else ()
        for suffix in suffixes:
            layouts.append(_slices(fused + suffix, shape, num_parts))
            layouts.append(_slices(fused + suffix, stored, num_parts, is_transposed=True))
        for suffix in suffixes if len(modules) > 1 else ():
            by_module = [_slices(prefix + module + suffix, (count, height, width), count) for module in modules]
            layouts.append(_in_turn(by_module, height))
        return Parameter(ours, shape, stack_parts(separate), "expert", split, tuple(layouts))


def list_experts(
    experts: ExpertsSpec, names: ExpertNames, hidden: int, ours: str, theirs: str, with_layouts: bool = True
) -> list[Parameter]:
    """List one layer's router, experts and shared expert; `ours` and `theirs` are prefixes of names."""
    return _Lister(ours, theirs, hidden, with_layouts=with_layouts).experts(experts, names, 0)


def list_parameters(spec: ModelSpec, names: CheckpointNames, with_layouts: bool = True) -> tuple[Parameter, ...]:
    """List every parameter of the decoder, in the order of computation; a memory plan omits other layouts."""
    layers = [list_layer(spec, names, layer, with_layouts) for layer in range(spec.num_layers)]
    return (*list_before_layers(spec, names), *chain.from_iterable(layers), *list_behind_layers(spec, names))


def list_before_layers(spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
    if not spec.is_first_stage:
        return []
    one, embedding = _Lister.of(spec, names, None), spec.embedding_size or spec.hidden_size
    parameters = [_embedding(spec, names)]
    if spec.rope is None:
        modules = [(names.positions, spec.max_position + spec.position_offset)]
        parameters.append(one.matrix("positions", modules, spec.hidden_size, "embedding"))
    if embedding != spec.hidden_size:
        parameters.append(one.matrix("embed_in", [(names.embed_in, spec.hidden_size)], embedding, "linear"))
    return parameters


def _embedding(spec: ModelSpec, names: CheckpointNames) -> Parameter:
    kind: Kind = "head" if spec.tied_embeddings else "embedding"
    width = spec.embedding_size or spec.hidden_size
    return _Lister.of(spec, names, None).matrix("embed", [(names.embed, spec.vocab_size)], width, kind, "rows")


def list_behind_layers(spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
    if not spec.is_last_stage:
        return []
    one, embedding = _Lister.of(spec, names, None), spec.embedding_size or spec.hidden_size
    parameters = []
    if spec.streams is not None:
        count = spec.streams.num_streams
        parameters += one.streams("head_streams", COMPRESSED_NAMES.head_streams, count, count, 1)
    parameters += one.norm("final_norm", names.final_norm) if spec.has_final_norm else []
    if embedding != spec.hidden_size:
        parameters.append(one.matrix("embed_out", [(names.embed_out, embedding)], spec.hidden_size, "linear"))
    if spec.tied_embeddings:
        parameters += [] if spec.is_first_stage else [_embedding(spec, names)]
    else:
        parameters.append(one.matrix("lm_head", [(names.lm_head, spec.vocab_size)], embedding, "head", "rows"))
    return parameters


def list_layer(spec: ModelSpec, names: CheckpointNames, layer: int, with_layouts: bool = True) -> list[Parameter]:
    """List a layer of any family: norms and attention, then an MLP or experts."""
    one, kind = _Lister.of(spec, names, layer, with_layouts), spec.layer_kind(layer)
    if spec.compressed is not None:
        parameters = _list_compressed(one, spec, spec.compressed, names, layer)
    else:
        parameters = one.norm("attn_norm", names.attn_norm)
        if spec.state is not None and kind.has_state:
            parameters += _list_state(one, spec.state)
        else:
            latent = spec.latent
            parameters += _list_grouped(one, spec, names) if latent is None else _list_latent(one, spec, latent, layer)
            parameters += one.linear("o", [(names.o, spec.hidden_size)], spec.attended_size, "columns", spec.o_bias)
        if spec.has_sinks:
            parameters.append(one.tensor("sinks", names.sinks, (spec.num_heads,), "bias", "rows"))
        parameters += one.norm("attn_out_norm", names.attn_out_norm) if spec.has_output_norms else []
    parameters += one.norm("mlp_norm", names.mlp_norm)
    if kind.experts is not None:
        parameters += one.experts(kind.experts, names.experts, kind.experts.table_size if kind.has_table else 0)
    else:
        parameters += one.mlp(spec, names)
    return parameters + (one.norm("mlp_out_norm", names.mlp_out_norm) if spec.has_output_norms else [])


def _list_grouped(one: _Lister, spec: ModelSpec, names: CheckpointNames) -> list[Parameter]:
    """List the fused projection, and the norms of query and key heads."""
    qkv = [(names.q, spec.query_rows), (names.k, spec.kv_size), (names.v, spec.kv_size)]
    parameters = one.linear("qkv", qkv, spec.hidden_size, "rows", spec.qkv_bias)
    if spec.qk_norm:
        parameters += one.norm("q_norm", names.q_norm, spec.head_dim)
        parameters += one.norm("k_norm", names.k_norm, spec.head_dim)
    return parameters


def _list_state(one: _Lister, state: StateSpec) -> list[Parameter]:
    """List a gated delta net. Ranks split key heads, each with its value heads."""
    own, hidden, parts = STATE_NAMES, one.hidden, state.part_sizes
    channels, width, heads = state.num_channels, state.conv_width, state.value_heads
    if state.is_joined:
        in_proj = _joined(one, "in_proj", own.in_proj_qkvz, parts, state.key_heads)
    else:
        modules = [(own.in_proj_qkv, channels), (own.in_proj_z, state.value_size)]
        in_proj = one.matrix("in_proj", modules, hidden, "linear", "rows")
    if state.joins_gates:
        in_gates = _joined(one, "in_gates", own.in_proj_ba, (heads, heads), state.key_heads, "router")
    else:
        in_gates = one.matrix("in_gates", [(own.in_proj_b, heads), (own.in_proj_a, heads)], hidden, "router", "rows")
    conv = Part(f"{one.theirs}{own.conv}.weight", 0, (channels, 1, width))
    return [
        in_proj,
        in_gates,
        Parameter(f"{one.ours}conv.weight", (channels, width), (conv,), "norm", "rows"),
        one.tensor("A_log", own.A_log, (heads,), "bias", "rows", dtype="float32"),
        one.tensor("dt_bias", own.dt_bias, (heads,), "bias", "rows", dtype="float32"),
        one.tensor("gated_norm.weight", f"{own.norm}.weight", (state.value_dim,), "norm"),
        *one.linear("o", [(own.o, hidden)], state.value_size, "columns"),
    ]


def _joined(
    one: _Lister, name: str, module: str, sizes: Sequence[int], num_heads: int, kind: Kind = "linear"
) -> Parameter:
    """List a matrix whose rows are joined by key head in the checkpoint, and by part here, of these sizes."""
    own = [size // num_heads for size in sizes]
    tensor, shape = f"{one.theirs}{module}.weight", (sum(sizes), one.hidden)
    starts = [(place, head) for place in range(len(own)) for head in range(num_heads)]
    parts, row = [], 0
    for place, head in starts:
        first = head * sum(own) + sum(own[:place])
        parts.append(Part(tensor, row, shape, (first, first + own[place])))
        row += own[place]
    return Parameter(f"{one.ours}{name}.weight", shape, tuple(parts), kind, "rows")


def _list_latent(one: _Lister, spec: ModelSpec, latent: LatentSpec, layer: int) -> list[Parameter]:
    """List latent attention up to its output. Ranks split query heads; all have the same latents."""
    hidden, q_rank, own = spec.hidden_size, latent.q_rank, LATENT_NAMES
    kv_a, q_rows = (own.kv_a, latent.row_dim), spec.num_heads * latent.query_dim
    if q_rank is None:
        parameters = one.linear("q", [(own.q, q_rows)], hidden, "rows")
        parameters += one.linear("qkv_a", [kv_a], hidden, "none", spec.qkv_bias)
    else:
        parameters = one.linear("qkv_a", [(own.q_a, q_rank), kv_a], hidden, "none", spec.qkv_bias)
        parameters += one.norm("q_a_norm", own.q_a_norm, q_rank)
        parameters += one.linear("q_b", [(own.q_b, q_rows)], q_rank, "rows")
    parameters += one.norm("kv_a_norm", own.kv_a_norm, latent.kv_rank)
    parameters.append(_kv_b(one, spec.num_heads, latent))
    index = spec.layer_index(layer)
    if index is not None and q_rank is not None:
        # Every rank has the whole index: the sum over its heads comes before the choice of tokens.
        parameters += one.linear("index_q", [(own.index_q, index.num_heads * index.head_dim)], q_rank, "none")
        parameters += one.linear("index_k", [(own.index_k, index.head_dim)], hidden, "none")
        parameters += one.norm("index_k_norm", own.index_k_norm, index.head_dim, has_bias=True)
        parameters.append(one.matrix("index_weights", [(own.index_weights, index.num_heads)], hidden, "router"))
    return parameters


def _list_compressed(
    one: _Lister, spec: ModelSpec, compressed: CompressedSpec, names: CheckpointNames, layer: int
) -> list[Parameter]:
    """List compressed attention and its streams. Ranks split query heads and groups; each has the rest whole."""
    own, hidden, q_rank = COMPRESSED_NAMES, spec.hidden_size, compressed.q_rank
    groups, compressor = compressed.num_output_groups * compressed.output_rank, spec.layer_kind(layer).compressor
    assert spec.streams is not None, f"{spec.architecture} has one stream"
    count = spec.streams.num_streams
    mixed = (2 + count) * count, count, 3
    return [
        *one.streams("attn_streams", own.attn_streams, *mixed),
        *one.norm("attn_norm", names.attn_norm),
        *one.linear("qkv_a", [(own.q_a, q_rank), (own.kv, spec.head_dim)], hidden, "none"),
        *one.norm("q_a_norm", own.q_a_norm, q_rank),
        *one.linear("q_b", [(own.q_b, spec.query_size)], q_rank, "rows"),
        *one.norm("kv_norm", own.kv_norm, spec.head_dim),
        one.tensor("sinks", names.sinks, (spec.num_heads,), "bias", "rows", dtype="float32"),
        *([] if compressor is None else _list_compressor(one, spec, q_rank, compressor, spec.layer_index(layer))),
        one.matrix("o_a", [(own.o_a, groups)], spec.query_size // compressed.num_output_groups, "absorbed", "rows"),
        *one.linear("o_b", [(own.o_b, hidden)], groups, "columns"),
        *one.streams("mlp_streams", own.mlp_streams, *mixed),
    ]


def _list_compressor(
    one: _Lister,
    spec: ModelSpec,
    q_rank: int,
    compressor: CompressorSpec,
    index: IndexSpec | None,
) -> list[Parameter]:
    """List the weights that pool tokens into entries, and into those of an index. One product gives all inputs."""
    own = COMPRESSED_NAMES
    columns, made = 2 if compressor.is_overlapped else 1, [("compressor", own.compressor, spec.head_dim)]
    if index is not None:
        made.append(("index", own.index, index.head_dim))
    pooled = [(module + end, columns * dim) for _, module, dim in made for end in ("wkv", "wgate")]
    pooled += [] if index is None else [(own.index_weights, index.num_heads)]
    parameters = [one.matrix("pool", pooled, spec.hidden_size, "router")]
    for name, module, dim in made:
        shape = compressor.ratio, columns * dim
        parameters.append(one.tensor(f"{name}.positions", f"{module}{own.positions}", shape, "router", dtype="float32"))
        parameters += one.norm(f"{name}.norm", f"{module}norm", dim)
    if index is not None:
        parameters += one.linear("index_q", [(own.index_q, index.num_heads * index.head_dim)], q_rank, "none")
    return parameters


def _kv_b(one: _Lister, num_heads: int, latent: LatentSpec) -> Parameter:
    """List kv_b [heads * (nope_dim + value_dim), kv_rank], by head, keys before values: whole, or from two tensors."""
    nope, value, rank = latent.nope_dim, latent.value_dim, latent.kv_rank
    parameter = one.matrix("kv_b", [(LATENT_NAMES.kv_b, num_heads * latent.expanded_dim)], rank, "absorbed", "rows")
    if not one.with_layouts:
        return parameter
    keys, values = f"{one.theirs}{LATENT_NAMES.k_b}.weight", f"{one.theirs}{LATENT_NAMES.v_b}.weight"
    split: list[Part] = []
    for head in range(num_heads):
        first, k_first, v_first = head * latent.expanded_dim, head * nope, head * value
        k_rows, v_rows = (k_first, k_first + nope), (v_first, v_first + value)
        split.append(Part(keys, first, (num_heads, rank, nope), k_rows, is_transposed=True))
        split.append(Part(values, first + nope, (num_heads, value, rank), v_rows))
    return replace(parameter, layouts=(tuple(split),))

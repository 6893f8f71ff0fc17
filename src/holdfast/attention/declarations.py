"""What attention computes and who takes it, as the planner sees it: layers, step bounds, backends (the fastest first) and what each will hold; no torch of its own."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.cache.spec import LayerCache
from holdfast.errors import UnsupportedModelError
from holdfast.kernels.geometry import (
    LARGE_TILE,
    LATENT_MULTIPLE,
    LATENT_ROPE_DIMS,
    MAX_LATENT_DIM,
    QUANTIZED_LARGE_TILE,
    TILE_FIELDS,
    key_bias_spec,
    key_turns_specs,
)
from holdfast.kernels.latent.latent_geometry import compressed_partials, head_blocks, latent_geometry, sparse_partials
from holdfast.kernels.latent.top_k_geometry import top_k_specs, unsupported_top_k
from holdfast.kernels.up_projection import LEAST_ROWS, UpProjection, expanded_specs
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import COMPRESSED_FORMATS, DTYPE_BYTES, bytes_for


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes, where, and what its cache keeps."""

    cache: LayerCache
    num_heads: int
    scale: float
    window: int | None
    """How many of the newest tokens, the current one included, a token sees; None for all."""
    max_model_len: int
    dtype: str
    """torch's name of the type of queries and outputs."""
    device_kind: str
    """cpu or cuda."""
    has_key_bias: bool = False
    """Quantized pages hold keys without the bias of their projection, and attention adds to a score what it is short of."""
    group: int = 0
    """Which of the cache's groups the layer belongs to: whose slots it writes, and whose page table it reads."""
    softcap: float | None = None
    """cap * tanh(score / cap) in the place of every score, after `scale`; None: as they are."""
    has_sinks: bool = False
    """One logit a query head joins every softmax, in the denominator alone."""
    nope_dim: int = 0
    """Of latent attention: elements of a query head that meet the latent through kv_b, beside the cache's rope_dim."""
    value_dim: int = 0
    """Of latent attention: elements of a head's output."""
    index_heads: int = 0
    """Of sparse latent attention: heads of the index; 0: every row attends to all tokens."""
    index_top_k: int = 0
    """Tokens that a row attends to at the most. A layer whose cache has no index takes what one before it chose."""
    index_turns_neighbours: bool = False
    """Rope turns neighbouring elements of the index, not halves."""
    entries: LayerCache | None = None
    """Of compressed attention: the entries that a row attends to beside its window, with their index; None: the window only."""
    entries_group: int = -1
    """Which of the cache's groups they belong to ..."""
    entries_index: int = -1
    """... and their place in its storage."""
    ratio: int = 0
    """Tokens that an entry stands for; 0: there are none."""
    is_overlapped: bool = False
    """An entry is made of as many tokens before its own too, and an index chooses those that a row attends to."""
    is_compressed: bool = False
    """Compressed attention, with or without entries: a token is one vector that is key and value of all heads."""

    @property
    def is_plain_softmax(self) -> bool:
        """Whether a number that is added to all scores of a row changes nothing: a sink or a cap would see it."""
        return self.softcap is None and not self.has_sinks


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The most that one step can hold."""

    max_num_seqs: int
    max_num_rows: int
    page_tokens: int


class BackendDeclaration(Protocol):
    """What is known of a backend without building it: whether it takes a layer, and every byte it will want."""

    name: str
    can_be_captured: bool
    """Whether a graph of its launches serves other steps than the one it was captured with."""

    can_be_invariant: bool
    """Whether it can give a row the same bits in any company."""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """None, or why this layer cannot run here, in words."""
        ...

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Workspace that `attend` needs beside queries and outputs, one set for all layers."""
        ...

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        """What it holds from start to end: work lists, mask templates."""
        ...


MAX_PARTIALS = 1024
"""Most split-KV partials that are kept at once, one for each row of each split: long contexts take longer splits, never more memory."""
MIN_SPLIT_TOKENS = 256
QUANTIZED_HEADS = 16
"""Quantized heads are multiples of this."""
CODE_TABLE_BYTES = {8: 0, 4: 256 * 8, 3: 4096 * 16}
"""Tables of plain torch by bits: two coordinates for every byte, or four for every 12 bits, in float32."""
MAX_MASK_ROWS = 128
BY_HEAD = "it attends to keys and values by head, and this model keeps latents (MLA)"
BY_LATENT = "it attends to latents (MLA), and this model keeps keys and values by head"
WITHOUT_INDEX = "it attends to the tokens that an index chooses (DSA), and this model has none"
WITH_INDEX = "it attends to all tokens, and an index of this model chooses them (DSA)"
WITHOUT_ENTRIES = "it attends to windows and entries (DeepSeek-V4), and this model keeps something else"
BY_ENTRY = "it attends to tokens, and this model keeps windows and entries (DeepSeek-V4)"
LATENT_ROWS = 1024
"""Rows of a step whose queries are in the latent space at once: a larger step goes in parts, each with tiles of its own."""
LATENT_HEAD_ROWS = 2**16
"""Rows times heads of them: where there are more, heads go in groups ..."""
LATENT_HEADS = 64
"""... of so many, which is what a tile has side by side at the most."""
PARTIAL_HEAD_ROWS = 2 * 2 * 132 * 64
"""Rows times heads of latent split-KV partials: two waves over 132 multiprocessors, two tiles of 64 heads in each."""
SELECTED = "selected"
"""The scratch that holds what every row has chosen, from a layer that chooses to the next one."""
INDEX_SCORE_BYTES = 128 * 2**20
"""Scores of an index (DSA) that a GPU holds at once, whatever the rows and the context."""
SCORE_ALIGNMENT = 64
"""Columns that a row of them is a multiple of."""
LATENT_BLOCK_ROWS, LATENT_BLOCK_TOKENS = 1024, 1024
"""Rows times heads, and tokens, that plain torch has scores of at once."""
INDEX_SCORES = 2**20
"""Rows times tokens that plain torch has scores of an index of at once, where a row does not have more."""
MASK_ELEMENTS = 2**22
"""The mask template of plain torch holds block rows x context; longer contexts take lower blocks, not more memory."""


class NativePagedDeclaration:
    """C kernels over float32 pages on a CPU."""

    name = "native_paged"
    can_be_captured = False
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.cache.is_latent:
            return BY_ENTRY if spec.is_compressed else BY_HEAD
        if spec.device_kind != "cpu":
            return f"it runs on CPU only, not on {spec.device_kind}"
        planes = {plane.name: plane.dtype for plane in spec.cache.planes}
        if planes.keys() != {"k", "v"}:
            return f"the format {spec.cache.format.name} is not plain keys and values"
        if {spec.dtype, *planes.values()} != {"float32"}:
            return "it computes in float32 over float32 pages only"
        return None if _has_native() else "it needs a C compiler"

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        return ()


class TritonPagedDeclaration:
    """Triton kernels over half-precision and quantized pages on a GPU."""

    name = "triton_paged"
    can_be_captured = True
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.cache.is_latent:
            return BY_ENTRY if spec.is_compressed else BY_HEAD
        if spec.device_kind != "cuda":
            return f"it runs on GPUs, not on {spec.device_kind}"
        if half_quantized := _half_quantized(spec):
            return half_quantized
        if not spec.cache.format.is_quantized and {plane.dtype for plane in spec.cache.planes} != {spec.dtype}:
            return f"pages must be {spec.dtype}, the type of the queries"
        if spec.dtype not in ("float16", "bfloat16"):
            return f"it computes in half precision, not in {spec.dtype}"
        unit = QUANTIZED_HEADS if spec.cache.format.is_quantized else 8
        if spec.cache.head_dim > 256 or spec.cache.head_dim % unit:
            return f"head_dim is {spec.cache.head_dim}, and a multiple of {unit} up to 256 is computed"
        if spec.num_heads % spec.cache.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.cache.num_kv_heads} key heads"
        if spec.num_heads // spec.cache.num_kv_heads > LARGE_TILE:
            return f"{spec.num_heads // spec.cache.num_kv_heads} query heads share a key head, {LARGE_TILE} may"
        return None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        num_partials = max_partials(specs[0].max_model_len, bounds)
        if num_partials == 0:
            return ()
        num_heads = max(spec.num_heads for spec in specs)
        width = max(spec.num_heads * spec.cache.head_dim for spec in specs)
        return (
            TensorSpec("partial_out", (num_partials, width), "float32"),
            TensorSpec("partial_lse", (num_partials, num_heads), "float32"),
        )

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        kinds, windows = tile_kinds(specs), {spec.window for spec in specs}
        num_tiles = sum(max_tiles(kind, specs[0].max_model_len, bounds) for kind in kinds)
        num_lists, num_list_tiles = len(kinds) * len(windows), len(windows) * num_tiles
        list_bytes = bytes_for("int32", (num_list_tiles + num_lists, len(TILE_FIELDS)))
        row_bytes = bytes_for("int32", (num_lists, bounds.max_num_rows, 2))
        return (
            Term("attention/tiles", list_bytes, f"{num_list_tiles} tiles of a step's work, in {num_lists} lists"),
            Term("attention/rows", row_bytes, "where each row's partial results lie"),
            *rotation_terms(specs),
        )


class TorchPagedDeclaration:
    """Plain torch over any pages, anywhere."""

    name = "torch_paged"
    can_be_captured = False
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.cache.is_latent:
            return BY_ENTRY if spec.is_compressed else BY_HEAD
        if spec.num_heads % spec.cache.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.cache.num_kv_heads} key heads"
        if spec.cache.format.is_quantized and spec.cache.head_dim % QUANTIZED_HEADS:
            return f"head_dim is {spec.cache.head_dim}, and quantized heads are multiples of {QUANTIZED_HEADS}"
        return _half_quantized(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        rows, max_model_len = mask_rows(specs[0].max_model_len), specs[0].max_model_len
        num_windows = len({spec.window for spec in specs})
        mask_bytes = num_windows * rows * (max_model_len + rows) * DTYPE_BYTES[specs[0].dtype]
        masks = Term("attention/masks", mask_bytes, f"{num_windows} templates of {rows} rows")
        codes = {
            (spec.cache.format.key_bits, spec.cache.format.value_bits, spec.cache.head_dim)
            for spec in specs
            if spec.cache.format.is_quantized
        }
        if not codes:
            return (masks,)
        table_bytes = sum(code_table_bytes(key_bits or 8, value_bits or 8, dim) for key_bits, value_bits, dim in codes)
        tables = Term("attention/dequantize", table_bytes, "what every code stands for, and where its coordinates lie")
        return (masks, tables, *rotation_terms(specs))


class TritonLatentDeclaration:
    """Triton kernels over pages of latents (MLA) on a GPU."""

    name = "triton_latent"
    can_be_captured = True
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if not spec.cache.is_latent or spec.is_compressed:
            return BY_ENTRY if spec.is_compressed else BY_LATENT
        if spec.device_kind != "cuda":
            return f"it runs on GPUs, not on {spec.device_kind}"
        return WITH_INDEX if spec.index_heads else self._declined(spec)

    @staticmethod
    def _declined(spec: AttentionSpec) -> str | None:
        """Types and sizes that kernels do not take, with an index or without."""
        cache = spec.cache
        if spec.dtype not in ("float16", "bfloat16"):
            return f"it computes in half precision, not in {spec.dtype}"
        if not cache.format.is_quantized and cache.format.key_dtype != spec.dtype:
            return f"pages must be {spec.dtype}, the type of the queries"
        if spec.value_dim > spec.nope_dim + cache.rope_dim:
            return f"values of {spec.value_dim} elements are wider than queries of {spec.nope_dim + cache.rope_dim}"
        return _unsupported_latent(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Queries and outputs in the latent space, as vectors of which a step takes what it needs; and partials."""
        spec = specs[0]
        head_rows = latent_head_rows(spec.num_heads, bounds)
        num_partials = latent_partials(spec, bounds)
        partials: tuple[TensorSpec, ...] = ()
        if num_partials:
            partials = (
                TensorSpec("partial_out", (num_partials, spec.num_heads * spec.cache.latent_dim), "float32"),
                TensorSpec("partial_lse", (num_partials, spec.num_heads), "float32"),
            )
        return (
            TensorSpec("absorbed", (head_rows * spec.cache.head_dim,), spec.dtype),
            TensorSpec("attended_latent", (head_rows * spec.cache.latent_dim,), spec.dtype),
            *partials,
            *up_projection_specs(spec, bounds),
        )

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        parts = latent_parts(bounds)
        kind = latent_tile_kind(specs[0])
        num_tiles = sum(max_latent_tiles(specs[0], kind, part) for part in parts)
        list_bytes = bytes_for("int32", (num_tiles + len(parts), len(TILE_FIELDS)))
        row_bytes = sum(bytes_for("int32", (part.max_num_rows, 2)) for part in parts)
        return (
            Term("attention/tiles", list_bytes, f"{num_tiles} tiles of a step's work, in {len(parts)} lists"),
            Term("attention/rows", row_bytes, "where each row's partial results lie"),
        )


class TritonSparseDeclaration(TritonLatentDeclaration):
    """Triton kernels over pages of latents with an index (DSA) on a GPU."""

    name = "triton_sparse"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if not spec.cache.is_latent or spec.is_compressed:
            return BY_ENTRY if spec.is_compressed else BY_LATENT
        if spec.device_kind != "cuda":
            return f"it runs on GPUs, not on {spec.device_kind}"
        if not spec.index_heads:
            return WITHOUT_INDEX
        return self._declined(spec) or unsupported_top_k(spec.index_top_k, spec.max_model_len)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Beside that of all latents: scores of some rows against the whole context, what the selection works in, and its lists."""
        spec = specs[0]
        dense = super().scratch(specs, bounds)
        if spec.index_top_k >= spec.max_model_len:
            return dense
        rows = index_score_rows(spec, bounds)
        queries, heads = (rows, spec.index_heads, spec.cache.index_dim), spec.num_heads
        num_partials = max(latent_partials(spec, bounds), sparse_partials(latent_parts(bounds)[0].max_num_rows, heads))
        others = (one for one in dense if not one.name.startswith("partial_"))
        return (
            *others,
            TensorSpec("partial_out", (num_partials, heads * spec.cache.latent_dim), "float32"),
            TensorSpec("partial_lse", (num_partials, heads), "float32"),
            TensorSpec(SELECTED, (bounds.max_num_rows * spec.index_top_k,), "int32"),
            TensorSpec("index_scores", (rows * score_columns(spec.max_model_len),), "float32"),
            TensorSpec("index_codes", queries, "float8_e4m3fn"),
            TensorSpec("index_factors", queries[:2], "float32"),
            *top_k_specs(rows, score_columns(spec.max_model_len), spec.index_top_k),
        )

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        num_bytes = bytes_for("int32", (2, bounds.max_num_rows))
        rows = Term("attention/index_rows", num_bytes, "which rows choose their tokens, and from how many")
        return (*super().terms(specs, bounds), rows)


class TorchLatentDeclaration:
    """Plain torch over pages of latents (MLA), anywhere."""

    name = "torch_latent"
    can_be_captured = False
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if not spec.cache.is_latent or spec.is_compressed:
            return BY_ENTRY if spec.is_compressed else BY_LATENT
        return WITH_INDEX if spec.index_heads else _unsupported_latent(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        return ()

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        cache, rows, tokens = specs[0].cache, latent_block_rows(specs[0].num_heads), LATENT_BLOCK_TOKENS
        head_rows = rows * specs[0].num_heads
        num_elements = 3 * head_rows * tokens + 5 * head_rows * cache.head_dim + 3 * tokens * cache.head_dim
        words = f"scores of {rows} rows against {tokens} tokens at a time, and what they are made of"
        return (Term("attention/blocks", bytes_for("float32", (num_elements,)), words),)


class TorchSparseDeclaration(TorchLatentDeclaration):
    """Plain torch over pages of latents with an index (DSA), anywhere."""

    name = "torch_sparse"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if not spec.cache.is_latent or spec.is_compressed:
            return BY_ENTRY if spec.is_compressed else BY_LATENT
        if not spec.index_heads:
            return WITHOUT_INDEX
        # A GPU without kernels for the choice would be slow, and without graphs, for no reason that a user sees.
        declined = unsupported_top_k(spec.index_top_k, spec.max_model_len) if spec.device_kind == "cuda" else None
        return declined or _unsupported_latent(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """What every row has chosen; nothing where no context is long enough."""
        top_k = specs[0].index_top_k
        if top_k >= specs[0].max_model_len:
            return ()
        return (TensorSpec(SELECTED, (bounds.max_num_rows * top_k,), "int32"),)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        spec = specs[0]
        rows = index_block_rows(spec.index_heads, 1)
        scores = max(INDEX_SCORES, spec.max_model_len)
        num_elements = 8 * scores + 2 * rows * spec.index_heads * LATENT_BLOCK_TOKENS
        num_elements += 2 * (LATENT_BLOCK_TOKENS + rows * spec.index_heads) * spec.cache.index_dim
        words = (
            f"scores of an index of {rows} rows against {LATENT_BLOCK_TOKENS} tokens at a time, and the largest of all"
        )
        index = Term("attention/index", bytes_for("float32", (num_elements,)), words)
        return (*super().terms(specs, bounds), index)


class TritonCompressedDeclaration:
    """Triton kernels over windows and entries (DeepSeek-V4) on a GPU."""

    name = "triton_compressed"
    can_be_captured = True
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if not spec.is_compressed:
            return WITHOUT_ENTRIES
        if spec.device_kind != "cuda":
            return f"it runs on GPUs, not on {spec.device_kind}"
        if spec.dtype not in ("float16", "bfloat16"):
            return f"it computes in half precision, not in {spec.dtype}"
        cache = spec.cache
        if not cache.format.is_quantized and cache.format.key_dtype != spec.dtype:
            return f"pages must be {spec.dtype}, the type of the queries"
        if cache.format.is_quantized and cache.format.name not in COMPRESSED_FORMATS:
            return f"the format {cache.format.name} is not one of windows and entries"
        if cache.head_dim > MAX_LATENT_DIM or cache.head_dim % 2:
            return f"head_dim is {cache.head_dim}, and an even number up to {MAX_LATENT_DIM} is computed"
        return unsupported_top_k(spec.index_top_k, most_entries(spec)) if spec.is_overlapped else None

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """Partials of few rows; and, where rows choose, scores of some of them against all entries, what the selection works in, lists."""
        heads, dim = specs[0].num_heads, specs[0].cache.head_dim
        num_partials = compressed_partials(bounds.max_num_rows, heads)
        partial_dtype = "float32" if specs[0].dtype == "float32" else "float16"
        partials = (
            TensorSpec("partial_out", (num_partials, heads * dim), partial_dtype),
            TensorSpec("partial_lse", (num_partials, heads), "float32"),
        )
        if (spec := choosing_spec(specs)) is None or spec.entries is None:
            return partials
        rows, columns = entry_score_rows(spec, bounds), score_columns(most_entries(spec))
        queries = rows, spec.index_heads, spec.entries.index_dim
        return (
            *partials,
            TensorSpec(SELECTED, (bounds.max_num_rows * spec.index_top_k,), "int32"),
            TensorSpec("index_scores", (rows * columns,), "float32"),
            TensorSpec("index_codes", queries, "float8_e4m3fn"),
            TensorSpec("index_factors", queries[:2], "float32"),
            *top_k_specs(rows, columns, spec.index_top_k),
        )

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        num_bytes = bytes_for("int32", (3, bounds.max_num_rows))
        return (
            Term("attention/rows", num_bytes, "of each row its sequence, its position, and among how many it chooses"),
        )


def choosing_spec(specs: Sequence[AttentionSpec]) -> AttentionSpec | None:
    """A layer whose rows choose entries; None where no context has more of them than are attended to."""
    return next((spec for spec in specs if spec.is_overlapped and most_entries(spec) > spec.index_top_k), None)


def entry_score_rows(spec: AttentionSpec, bounds: StepBounds) -> int:
    """Rows whose scores against all entries are held at once, as `index_score_rows` has it for tokens."""
    most = INDEX_SCORE_BYTES // bytes_for("float32", (score_columns(most_entries(spec)),))
    return max(1, min(most, LATENT_ROWS, bounds.max_num_rows))


class TorchCompressedDeclaration:
    """Plain torch over windows and entries (DeepSeek-V4), anywhere."""

    name = "torch_compressed"
    can_be_captured = False
    can_be_invariant = False

    def unsupported(self, spec: AttentionSpec) -> str | None:
        return None if spec.is_compressed else WITHOUT_ENTRIES

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        """What every row has chosen; nothing where no context is long enough."""
        choosing = [spec for spec in specs if most_entries(spec) > spec.index_top_k > 0]
        if not choosing:
            return ()
        return (TensorSpec(SELECTED, (bounds.max_num_rows * choosing[0].index_top_k,), "int32"),)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        spec, rows, tokens = specs[0], latent_block_rows(specs[0].num_heads), LATENT_BLOCK_TOKENS
        head_rows, dim = rows * spec.num_heads, spec.cache.head_dim
        num_elements = 5 * head_rows * tokens + 6 * head_rows * dim + 3 * tokens * dim
        words = f"scores of {rows} rows against {tokens} vectors at a time, and what they are made of"
        blocks = Term("attention/blocks", bytes_for("float32", (num_elements,)), words)
        indexed = next((own for own in specs if own.entries is not None and own.index_heads), None)
        return (blocks,) if indexed is None else (blocks, _entry_index_term(indexed))


def _entry_index_term(spec: AttentionSpec) -> Term:
    assert spec.entries is not None, "no entries to choose from"
    rows = index_block_rows(spec.index_heads, 1)
    head_rows = rows * spec.index_heads
    num_elements = 8 * max(INDEX_SCORES, most_entries(spec)) + 2 * head_rows * LATENT_BLOCK_TOKENS
    num_elements += 2 * (LATENT_BLOCK_TOKENS + head_rows) * spec.entries.index_dim
    words = f"scores of an index of {rows} rows against {LATENT_BLOCK_TOKENS} entries at a time, and the largest of all"
    return Term("attention/index", bytes_for("float32", (num_elements,)), words)


def most_entries(spec: AttentionSpec) -> int:
    """Entries that the longest context has."""
    return spec.max_model_len // spec.ratio if spec.ratio else 0


GROUPED_DECLARATIONS: tuple[BackendDeclaration, ...] = (
    NativePagedDeclaration(),
    TritonPagedDeclaration(),
    TorchPagedDeclaration(),
)
"""Of keys and values by head."""
LATENT_DECLARATIONS: tuple[BackendDeclaration, ...] = (
    TritonLatentDeclaration(),
    TorchLatentDeclaration(),
    TritonSparseDeclaration(),
    TorchSparseDeclaration(),
)
"""Of latents (MLA), and with an index (DSA)."""
COMPRESSED_DECLARATIONS: tuple[BackendDeclaration, ...] = (TritonCompressedDeclaration(), TorchCompressedDeclaration())
"""Of windows and entries (DeepSeek-V4)."""
DECLARATIONS: tuple[BackendDeclaration, ...] = (*GROUPED_DECLARATIONS, *LATENT_DECLARATIONS, *COMPRESSED_DECLARATIONS)


def choose_declaration(specs: Sequence[AttentionSpec]) -> BackendDeclaration:
    """The first that declines no layer, or an error with everybody's reason."""
    declined = []
    for declaration in DECLARATIONS:
        reasons = {reason: None for spec in specs if (reason := declaration.unsupported(spec)) is not None}
        if not reasons:
            return declaration
        declined.append(f"{declaration.name}: {', '.join(reasons)}")
    raise UnsupportedModelError(
        "attention for this model was asked",
        f"no backend fits ({'; '.join(declined)})",
        "choose another kv_cache_dtype, or a shorter max_model_len",
    )


def _has_native() -> bool:
    """Whether the C kernels run here: known where torch is loaded, and else as good as a compiler in sight."""
    if "torch" in sys.modules:
        from holdfast.kernels.native_library import native_library

        return native_library() is not None
    return os.environ.get("HOLDFAST_NATIVE") != "0" and any(map(shutil.which, ("cc", "gcc", "clang")))


def mask_rows(max_model_len: int) -> int:
    """Rows of a block in plain torch, so that the mask template keeps to its size."""
    return max(16, min(MAX_MASK_ROWS, MASK_ELEMENTS // max_model_len))


def max_partials(max_model_len: int, bounds: StepBounds) -> int:
    """Split-KV partials that there is room for: none where no context is long enough to be split."""
    if max_model_len <= MIN_SPLIT_TOKENS:
        return 0
    return min(MAX_PARTIALS, bounds.max_num_rows * -(-max_model_len // MIN_SPLIT_TOKENS))


class TileKind(NamedTuple):
    """What decides how a kernel wants its tiles."""

    num_heads: int
    num_kv_heads: int
    key_bits: int | None
    """None: plain pages."""
    value_bits: int | None

    @classmethod
    def of(cls, spec: AttentionSpec) -> "TileKind":
        """The kind of a layer."""
        kv_format = spec.cache.format
        return cls(spec.num_heads, spec.cache.num_kv_heads, kv_format.key_bits, kv_format.value_bits)


def tile_kinds(specs: Sequence[AttentionSpec]) -> tuple[TileKind, ...]:
    """The distinct kinds. Each has lists for every window of the model, whichever layers have it: formats may change places."""
    return tuple(dict.fromkeys(TileKind.of(spec) for spec in specs))


def max_tiles(kind: TileKind, max_model_len: int, bounds: StepBounds) -> int:
    """Tiles of the largest step: whole ones, the last one of each sequence, and one for each split."""
    rows_per_tile = least_tile_rows(kind)
    tiles = -(-bounds.max_num_rows // rows_per_tile) + min(bounds.max_num_seqs, bounds.max_num_rows)
    return tiles + max_partials(max_model_len, bounds)


def least_tile_rows(kind: TileKind) -> int:
    """Rows that a large tile takes at least."""
    height = LARGE_TILE if kind.key_bits is None else QUANTIZED_LARGE_TILE
    return max(1, height // (kind.num_heads // kind.num_kv_heads))


def rotation_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """The tables that quantized layers rotate by (quant/kv_quantize.py), one for each head dim among them."""
    head_dims = rotated_head_dims(specs)
    if not head_dims:
        return ()
    num_bytes = sum(bytes_for(specs[0].dtype, (head_dim + 1, head_dim)) for head_dim in head_dims)
    return (Term("attention/rotation", num_bytes, f"heads of {', '.join(map(str, head_dims))} are quantized rotated"),)


def key_bias_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """Key biases that attention adds to scores, and the tables that turn them (kernels/attention/key_bias.py).

    A term of every backend that reads quantized pages, beside its own: these grow with the number of layers, so all are given.
    """
    biased = [spec for spec in specs if spec.has_key_bias]
    if not biased:
        return ()
    caches = [spec.cache for spec in biased]
    bias_bytes = sum(key_bias_spec(cache.num_kv_heads, cache.head_dim).num_bytes for cache in caches)
    turn_bytes = sum(
        spec.num_bytes
        for head_dim in dict.fromkeys(cache.head_dim for cache in caches)
        for spec in key_turns_specs(head_dim, specs[0].max_model_len, specs[0].dtype)
    )
    words = f"biases of {len(biased)} layers, and cos and sin of blocks of tokens"
    return (Term("attention/key_bias", bias_bytes + turn_bytes, words),)


def sink_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """Sinks in float32, whatever the checkpoint has; a term of every backend, for all layers as key biases are."""
    num_bytes = sum(bytes_for("float32", (spec.num_heads,)) for spec in specs if spec.has_sinks)
    if not num_bytes:
        return ()
    num_layers = sum(spec.has_sinks for spec in specs)
    return (Term("attention/sinks", num_bytes, f"a logit of each query head in {num_layers} layers"),)


def rotated_head_dims(specs: Sequence[AttentionSpec]) -> tuple[int, ...]:
    """Head dims of the layers whose keys or values are quantized rotated: all codes but those of 8 bits are."""
    return tuple(
        dict.fromkeys(
            spec.cache.head_dim
            for spec in specs
            if min(spec.cache.format.key_bits or 8, spec.cache.format.value_bits or 8) < 8
        )
    )


def code_table_bytes(key_bits: int, value_bits: int, head_dim: int) -> int:
    """Of the tables of both, and two orders of coordinates."""
    return CODE_TABLE_BYTES[key_bits] + CODE_TABLE_BYTES[value_bits] + 2 * bytes_for("int64", (head_dim,))


def unsupported_latent_dims(latent_dim: int, rope_dim: int) -> str | None:
    """None, or why no kernel takes latents of these sizes, in words."""
    if latent_dim % LATENT_MULTIPLE or not 0 < latent_dim <= MAX_LATENT_DIM:
        return f"latents have {latent_dim} elements, and a multiple of {LATENT_MULTIPLE} up to {MAX_LATENT_DIM} is computed"
    if rope_dim not in LATENT_ROPE_DIMS:
        return f"{rope_dim} elements are rotated, and {', '.join(map(str, LATENT_ROPE_DIMS))} can be"
    return None


def _unsupported_latent(spec: AttentionSpec) -> str | None:
    cache = spec.cache
    if cache.format.is_quantized and not cache.format.is_latent:
        return f"the format {cache.format.name} keeps keys and values by head"
    if spec.window is not None or not spec.is_plain_softmax:
        return "it knows neither windows, nor sinks, nor soft-capping"
    return unsupported_latent_dims(cache.latent_dim, cache.rope_dim)


def score_columns(max_model_len: int) -> int:
    """Of a row of scores of an index: rows begin aligned."""
    return -(-max_model_len // SCORE_ALIGNMENT) * SCORE_ALIGNMENT


def index_score_rows(spec: AttentionSpec, bounds: StepBounds) -> int:
    """Rows whose scores against the whole context are held at once: long contexts take fewer, not more memory."""
    most = INDEX_SCORE_BYTES // bytes_for("float32", (score_columns(spec.max_model_len),))
    return max(1, min(most, LATENT_ROWS, bounds.max_num_rows))


def up_projection(spec: AttentionSpec) -> UpProjection:
    """The sizes of a layer whose keys and values are made of latents."""
    cache = spec.cache
    return UpProjection(spec.num_heads, cache.latent_dim, cache.rope_dim, spec.nope_dim, spec.value_dim)


def up_projection_specs(spec: AttentionSpec, bounds: StepBounds) -> tuple[TensorSpec, ...]:
    """Room for prompts with keys and values of every head; none where no step has enough rows for it."""
    if bounds.max_num_rows < LEAST_ROWS:
        return ()
    return expanded_specs(up_projection(spec), spec.dtype, bounds.max_num_rows, spec.max_model_len)


def latent_head_rows(num_heads: int, bounds: StepBounds) -> int:
    """Rows times heads that are in the latent space at once, at the most."""
    rows = min(LATENT_ROWS, bounds.max_num_rows)
    return min(rows * num_heads, max(LATENT_HEAD_ROWS, rows * min(num_heads, LATENT_HEADS)))


def latent_heads_at_once(num_heads: int, num_rows: int) -> int:
    """Heads of a group, for a part of a step of so many rows."""
    return num_heads if num_rows * num_heads <= LATENT_HEAD_ROWS else min(num_heads, LATENT_HEADS)


def latent_parts(bounds: StepBounds) -> tuple[StepBounds, ...]:
    """The largest step in parts of LATENT_ROWS rows; a decode step has one."""
    starts = range(0, bounds.max_num_rows, LATENT_ROWS)
    rows = (min(LATENT_ROWS, bounds.max_num_rows - start) for start in starts)
    return tuple(StepBounds(min(bounds.max_num_seqs, count), count, bounds.page_tokens) for count in rows)


def latent_partials(spec: AttentionSpec, bounds: StepBounds) -> int:
    """Split-KV partials of a part of a step: capped by rows and by rows times heads, whatever the context."""
    return min(max_partials(spec.max_model_len, latent_parts(bounds)[0]), PARTIAL_HEAD_ROWS // spec.num_heads)


def latent_tile_kind(spec: AttentionSpec) -> TileKind:
    """Heads stand in blocks, each of which reads the same latents."""
    num_blocks, _ = head_blocks(spec.num_heads)
    return TileKind(spec.num_heads, num_blocks, None, None)


def max_latent_tiles(spec: AttentionSpec, kind: TileKind, part: StepBounds) -> int:
    """Tiles of the largest part of a step, as `max_tiles` counts them."""
    rows_per_tile = latent_geometry(kind.num_heads).large_rows
    tiles = -(-part.max_num_rows // rows_per_tile) + min(part.max_num_seqs, part.max_num_rows)
    return tiles + latent_partials(spec, part)


def latent_block_rows(num_heads: int) -> int:
    """Rows that plain torch attends with at once."""
    return max(1, LATENT_BLOCK_ROWS // num_heads)


def index_block_rows(num_heads: int, num_tokens: int) -> int:
    """Rows that plain torch has scores of an index of so many heads, against so many tokens, of at once."""
    return max(1, min(LATENT_BLOCK_ROWS // max(1, num_heads), INDEX_SCORES // num_tokens))


def _half_quantized(spec: AttentionSpec) -> str | None:
    kv_format = spec.cache.format
    if (kv_format.key_bits is None) == (kv_format.value_bits is None):
        return None
    return f"the format {kv_format.name} codes only one of keys and values"

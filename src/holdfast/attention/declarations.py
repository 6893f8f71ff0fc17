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
    QUANTIZED_LARGE_TILE,
    TILE_FIELDS,
    key_bias_spec,
    key_turns_specs,
)
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES, bytes_for


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
MASK_ELEMENTS = 2**22
"""The mask template of plain torch holds block rows x context; longer contexts take lower blocks, not more memory."""


class NativePagedDeclaration:
    """C kernels over float32 pages on a CPU."""

    name = "native_paged"
    can_be_captured = False
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
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


DECLARATIONS: tuple[BackendDeclaration, ...] = (
    NativePagedDeclaration(),
    TritonPagedDeclaration(),
    TorchPagedDeclaration(),
)


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
        "choose another kv_cache_dtype",
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


def _half_quantized(spec: AttentionSpec) -> str | None:
    kv_format = spec.cache.format
    if (kv_format.key_bits is None) == (kv_format.value_bits is None):
        return None
    return f"the format {kv_format.name} codes only one of keys and values"

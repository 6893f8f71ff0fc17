"""Backends of grouped attention, as the planner sees them: C, Triton and plain torch, the fastest first; no torch of its own."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.attention.declarations import (
    HALF_PRECISION,
    AttentionSpec,
    BackendDeclaration,
    StepBounds,
    max_partials,
    partial_specs,
    unsupported_device,
    unsupported_pages,
)
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.geometry import (
    BLOCK_TOKENS,
    LANE_TILE,
    LARGE_TILE,
    QUANTIZED_LARGE_TILE,
    TILE_FIELDS,
    LaneGeometry,
    key_bias_spec,
    key_turns_specs,
    lane_block_bytes,
    lane_geometry,
    lane_list_numbers,
)
from holdfast.memory.planner import Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES, bytes_for

QUANTIZED_HEADS = 16
"""Quantized heads are multiples of this."""
CODE_TABLE_BYTES = {8: 0, 5: 1024 * 8, 4: 256 * 8, 3: 4096 * 16}
"""Tables of plain torch by bits: two coordinates for every 8 or 10 bits, or four for every 12 bits, in float32."""
LANE_CAPABILITY, LANE_HEAD_DIMS = 9, (64, 256)
"""Compute capability and head dims of the kernel that reads the lane: Hopper's warpgroups."""
MAX_MASK_ROWS = 128
MASK_ELEMENTS = 2**22
"""Most elements of plain torch's mask template: block rows x context. Longer contexts take lower blocks."""


class NativePagedDeclaration(BackendDeclaration):
    """C kernels over float32 pages on a CPU."""

    name = "native_paged"
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.device_kind != "cpu":
            return f"it runs on CPU only, not on {spec.device_kind}"
        planes = {plane.name: plane.dtype for plane in spec.cache.planes}
        if planes.keys() != {"k", "v"}:
            return f"the format {spec.cache.format.name} is not plain keys and values"
        if {spec.dtype, *planes.values()} != {"float32"}:
            return "it computes in float32 over float32 pages only"
        return None if has_native() else "it needs a C compiler"


class TritonPagedDeclaration(BackendDeclaration):
    """Triton kernels over half-precision and quantized pages on a GPU."""

    name = "triton_paged"
    can_be_captured = True
    can_be_invariant = True

    def unsupported(self, spec: AttentionSpec) -> str | None:
        cache, num_groups = spec.cache, spec.num_heads // spec.cache.num_kv_heads
        if declined := unsupported_device(spec) or _half_quantized(spec) or unsupported_pages(spec):
            return declined
        unit = QUANTIZED_HEADS if cache.format.is_quantized else 8
        if cache.head_dim > 256 or cache.head_dim % unit:
            return f"head_dim is {cache.head_dim}, and a multiple of {unit} up to 256 is computed"
        if num_groups > LARGE_TILE:
            return f"{num_groups} query heads share a key head, {LARGE_TILE} may"
        return _indivisible_heads(spec)

    def scratch(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[TensorSpec, ...]:
        num_heads = max(spec.num_heads for spec in specs)
        width = max(spec.num_heads * spec.cache.head_dim for spec in specs)
        return partial_specs(max_partials(specs[0].max_model_len, bounds), num_heads, width)

    def terms(self, specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
        kinds, windows, near = tile_kinds(specs), {spec.window for spec in specs}, near_block(specs)
        num_tiles = sum(max_tiles(kind, specs[0].max_model_len, bounds, near) for kind in kinds)
        num_lists, num_list_tiles = len(kinds) * len(windows), len(windows) * num_tiles
        list_bytes = bytes_for("int32", (num_list_tiles + num_lists, len(TILE_FIELDS)))
        row_bytes = bytes_for("int32", (num_lists, bounds.max_num_rows, 2))
        return (
            Term("attention/tiles", list_bytes, f"{num_list_tiles} tiles of a step's work, in {num_lists} lists"),
            Term("attention/rows", row_bytes, "where each row's partial results lie"),
            *lane_terms(specs, bounds),
            *rotation_terms(specs),
        )


class TorchPagedDeclaration(BackendDeclaration):
    """Plain torch over any pages, anywhere."""

    name = "torch_paged"

    def unsupported(self, spec: AttentionSpec) -> str | None:
        if spec.cache.format.is_quantized and spec.cache.head_dim % QUANTIZED_HEADS:
            return f"head_dim is {spec.cache.head_dim}, and quantized heads are multiples of {QUANTIZED_HEADS}"
        return _indivisible_heads(spec) or _half_quantized(spec)

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


DECLARATIONS = NativePagedDeclaration(), TritonPagedDeclaration(), TorchPagedDeclaration()


class TileKind(NamedTuple):
    """The properties that decide a kernel's tile sizes."""

    num_heads: int
    num_kv_heads: int
    key_bits: int | None
    """None: plain pages."""
    value_bits: int | None
    lane_dim: int = 0
    """Head dim of layers whose prompts may read the lane; 0: they do not."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> "TileKind":
        kv_format = spec.cache.format
        lane_dim = spec.cache.head_dim if isinstance(spec, GroupedAttentionSpec) and spec.has_lane else 0
        return cls(spec.num_heads, spec.cache.num_kv_heads, kv_format.key_bits, kv_format.value_bits, lane_dim)


def tile_kinds(specs: Sequence[AttentionSpec]) -> tuple[TileKind, ...]:
    """List the distinct kinds. Each has lists for every window of the model: layers may swap formats."""
    return tuple(dict.fromkeys(TileKind.of(spec) for spec in specs))


def max_tiles(kind: TileKind, max_model_len: int, bounds: StepBounds, near: int = 0) -> int:
    """Count the tiles of the largest step: whole ones, the last one of each sequence, and one per split.

    Over quantized pages beside near ones, tiles also end where a block of `near` tokens does.
    """
    num_seqs = min(bounds.max_num_seqs, bounds.max_num_rows)
    # n rows are cut at each of the multiples of `near` among them: at most n // near + 1.
    num_cuts = bounds.max_num_rows // near + num_seqs if near and kind.key_bits is not None else 0
    tiles = -(-bounds.max_num_rows // least_tile_rows(kind)) + num_seqs + num_cuts
    return tiles + max_partials(max_model_len, bounds)


def near_block(specs: Sequence[AttentionSpec]) -> int:
    """Return the tokens of a block that rows see exact beside quantized pages; 0: all are read as stored."""
    near = {
        spec.near.block_tokens for spec in specs if isinstance(spec, GroupedAttentionSpec) and spec.near is not None
    }
    assert len(near) <= 1, f"{near=}: the layers of a model share one block"
    return max(near, default=0)


def near_first_tokens(specs: Sequence[AttentionSpec], window: int | None) -> int:
    """Return the tokens at the start that rows of layers with this window see exact too; 0: none."""
    first_tokens = {
        spec.near.first_tokens
        for spec in specs
        if isinstance(spec, GroupedAttentionSpec) and spec.near is not None and spec.window == window
    }
    assert len(first_tokens) <= 1, f"{first_tokens=}: layers of one window share lists"
    return max(first_tokens, default=0)


def least_tile_rows(kind: TileKind) -> int:
    """Return the fewest rows that a large tile takes."""
    height = LARGE_TILE if kind.key_bits is None else QUANTIZED_LARGE_TILE
    return max(1, height // (kind.num_heads // kind.num_kv_heads))


def declined_lane(spec: AttentionSpec, capability: tuple[int, int] | None, batch_invariant: bool) -> str | None:
    """Return why prompts do not read a layer's pages through the lane, or None: the layer, the GPU, the settings."""
    cache, group = spec.cache, spec.num_heads // spec.cache.num_kv_heads
    if not cache.format.is_quantized:
        return "its pages are plain"
    if batch_invariant:
        return "graphs do without the lane, and a row may not depend on its step"
    if capability is None or capability[0] != LANE_CAPABILITY or spec.dtype not in HALF_PRECISION:
        return f"it runs in half precision on GPUs of compute capability {LANE_CAPABILITY}, not on {capability}"
    if not LANE_HEAD_DIMS[0] <= cache.head_dim <= LANE_HEAD_DIMS[1] or cache.head_dim % QUANTIZED_HEADS:
        low, high = LANE_HEAD_DIMS
        return f"head_dim is {cache.head_dim}, and a multiple of {QUANTIZED_HEADS} from {low} to {high} is computed"
    if group > LANE_TILE:
        return f"{group} query heads share a key head, {LANE_TILE} may"
    if spec.has_key_bias:
        return "its pages hold keys without their bias"
    return None if spec.scale > 0 else f"the scale of scores is {spec.scale}, and maxima are taken before it"


def lane_of_kind(kind: TileKind, max_model_len: int, bounds: StepBounds, near: int = 0) -> LaneGeometry | None:
    """Return the lane of layers of a kind; no larger than the largest step can need."""
    if not kind.lane_dim:
        return None
    num_seqs = min(bounds.max_num_seqs, bounds.max_num_rows)
    num_blocks, num_near = -(-max_model_len // BLOCK_TOKENS) + 1, bounds.max_num_rows // BLOCK_TOKENS if near else 0
    if near:
        num_blocks += 2
    most_blocks, longest_blocks = num_seqs * num_blocks + num_near, num_blocks + num_near
    return lane_geometry(kind.num_heads, kind.num_kv_heads, kind.lane_dim, most_blocks, longest_blocks)


def lane_bytes(specs: Sequence[AttentionSpec], bounds: StepBounds) -> int:
    """Count the rows of the lane, one for all layers; 0: no prompt reads it."""
    near, num_bytes = near_block(specs), 0
    for kind in tile_kinds(specs):
        lane = lane_of_kind(kind, specs[0].max_model_len, bounds, near)
        if lane is not None:
            num_bytes = max(num_bytes, lane.num_blocks * lane_block_bytes(kind.lane_dim))
    return num_bytes


def lane_terms(specs: Sequence[AttentionSpec], bounds: StepBounds) -> tuple[Term, ...]:
    """Declare the lane that prompts read quantized pages through, and the lists of what lies there."""
    num_lists = sum(kind.lane_dim > 0 for kind in tile_kinds(specs)) * len({spec.window for spec in specs})
    if not num_lists:
        return ()
    list_bytes = num_lists * bytes_for("int32", (lane_list_numbers(bounds.max_num_seqs),))
    reason = "tokens that prompts read from quantized pages, some heads at a time"
    return (Term("attention/lane", lane_bytes(specs, bounds) + list_bytes, reason),)


def mask_rows(max_model_len: int) -> int:
    """Return the rows of a block in plain torch that keep the mask template within MASK_ELEMENTS."""
    return max(16, min(MAX_MASK_ROWS, MASK_ELEMENTS // max_model_len))


def rotated_head_dims(specs: Sequence[AttentionSpec]) -> tuple[int, ...]:
    """List the head dims that some layer rotates before it is quantized, each once."""
    caches = [spec.cache for spec in specs]
    rotated = [one for one in caches if min(one.format.key_bits or 8, one.format.value_bits or 8) < 8]
    return tuple(dict.fromkeys(cache.head_dim for cache in rotated))


def rotation_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """Declare the tables that quantized layers rotate by (quant/kv_quantize.py), one for each head dim."""
    head_dims = rotated_head_dims(specs)
    if not head_dims:
        return ()
    num_bytes = sum(bytes_for(specs[0].dtype, (head_dim + 1, head_dim)) for head_dim in head_dims)
    return (Term("attention/rotation", num_bytes, f"heads of {', '.join(map(str, head_dims))} are quantized rotated"),)


def key_bias_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """Declare key biases that attention adds to scores, and the tables that turn them (kernels/attention/key_bias.py).

    Every backend over quantized pages has this term beside its own. It grows with the number of layers, so `specs` has all.
    """
    caches = [spec.cache for spec in specs if spec.has_key_bias]
    if not caches:
        return ()
    bias_bytes = sum(key_bias_spec(cache.num_kv_heads, cache.head_dim).num_bytes for cache in caches)
    turn_bytes = sum(
        spec.num_bytes
        for head_dim in dict.fromkeys(cache.head_dim for cache in caches)
        for spec in key_turns_specs(head_dim, specs[0].max_model_len, specs[0].dtype)
    )
    reason = f"biases of {len(caches)} layers, and cos and sin of blocks of tokens"
    return (Term("attention/key_bias", bias_bytes + turn_bytes, reason),)


def sink_terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]:
    """Declare float32 copies of the sinks. Other families read theirs from the weights."""
    heads = [spec.num_heads for spec in specs if isinstance(spec, GroupedAttentionSpec) and spec.has_sinks]
    if not heads:
        return ()
    reason = f"a logit of each query head in {len(heads)} layers"
    return (Term("attention/sinks", bytes_for("float32", (sum(heads),)), reason),)


def code_table_bytes(key_bits: int, value_bits: int, head_dim: int) -> int:
    """Count the tables of keys and values, and two orders of coordinates."""
    return CODE_TABLE_BYTES[key_bits] + CODE_TABLE_BYTES[value_bits] + 2 * bytes_for("int64", (head_dim,))


def has_native() -> bool:
    """True if the C kernels run here: known once torch is loaded, before that guessed from a compiler in PATH."""
    if "torch" in sys.modules:
        from holdfast.kernels.native_library import native_library

        return native_library() is not None
    return os.environ.get("HOLDFAST_NATIVE") != "0" and any(map(shutil.which, ("cc", "gcc", "clang")))


def _half_quantized(spec: AttentionSpec) -> str | None:
    kv_format = spec.cache.format
    if (kv_format.key_bits is None) == (kv_format.value_bits is None):
        return None
    return f"the format {kv_format.name} codes only one of keys and values"


def _indivisible_heads(spec: AttentionSpec) -> str | None:
    if spec.num_heads % spec.cache.num_kv_heads == 0:
        return None
    return f"{spec.num_heads} query heads do not divide into {spec.cache.num_kv_heads} key heads"

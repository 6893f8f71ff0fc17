"""Scopes of compressed attention (DeepSeek-V4): what a row sees, splits, operands, the merge of partials with sinks.

T rows, N query heads, D head dim, R rotated elements, K entries of a list, C split-KV partials

A row at position p sees the newest tokens of a window, its own included, and the compressed entries that end at or before its
token. These are all (p + 1) // ratio of them, or those of a list if there are more than K. Both scopes form one row of places,
entries first, and a split is a range of places. All of it follows from the position, so the host plans nothing. The number of
splits depends on the number of rows, so one graph serves rows of any length.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.attention.split_kv import LOG2_E, add_sinks, finite_max, merge_head
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.latent.latent_geometry import compressed_splits, head_blocks
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_tiles import MERGED_COLUMNS, row_form
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, kernel_constant, next_power_of_two, tl

# Triton cannot unpack into a tuple, but adds tuples.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

SPREAD_SPLITS, MERGED_SPLITS, MERGED_HEADS = 32, 4, 4
"""Loads in flight of a merge program: splits of one head for few rows; splits and heads for many."""
SPLIT_UNIT = kernel_constant(BLOCK_TOKENS)
"""Divisor of the places of a split: one block of the Hopper kernel."""


class CompressedRows(NamedTuple):
    """Rows of a step on the device, at fixed addresses."""

    table_rows_T: Tensor
    """int32 page table row of each row's sequence."""
    positions_T: Tensor
    """int32 position of each row; -1: padding, whose output is zeros."""


class Scopes(NamedTuple):
    """Window and entries that rows of one layer attend to."""

    window_size: int
    window: LatentPlanes
    window_table_NP: Tensor
    ratio: int = 0
    """Tokens of an entry; 0: the layer has no entries."""
    entries: LatentPlanes | None = None
    entries_table_NP: Tensor | None = None
    selected_TK: Tensor | None = None
    """int32: entries of every row that sees more than K of them, -1 for none; None: rows attend to all."""

    @property
    def list_length(self) -> int:
        """K; 0 if rows attend to all entries."""
        return 0 if self.selected_TK is None else self.selected_TK.shape[1]


class CompressedCall(NamedTuple):
    """Operands of one launch of compressed attention."""

    q_TND: Tensor
    scopes: Scopes
    rows: CompressedRows
    sinks_N: Tensor
    """float32."""
    rotary: Rotary
    scale: float
    partial_out_CX: Tensor
    """float16, or float32 if queries are."""
    partial_lse_CH: Tensor
    out_TND: Tensor
    num_sms: int
    form_heads: int = 0
    """Heads by which tiles and splits are chosen: all ranks', if a share must round like them; 0: those of `q_TND`."""

    @property
    def tiled_heads(self) -> int:
        return self.form_heads or self.q_TND.shape[1]

    @property
    def entries(self) -> LatentPlanes:
        """Planes of entries, or of the window if the layer has no entries."""
        return self.scopes.window if self.scopes.entries is None else self.scopes.entries

    def arguments(self) -> tuple[Tensor | float, ...]:
        """Return the arguments that follow the planes in every kernel; other tensors stand in for unused ones."""
        scopes, rotary = self.scopes, self.rotary
        table_NP = scopes.window_table_NP
        entries_NP = table_NP if scopes.entries_table_NP is None else scopes.entries_table_NP
        selected_TK = entries_NP if scopes.selected_TK is None else scopes.selected_TK
        tensors = (table_NP, entries_NP, selected_TK, *self.rows, self.sinks_N, rotary.cos_TP, rotary.sin_TP)
        strides = (table_NP.stride(0), entries_NP.stride(0), selected_TK.stride(0), rotary.cos_TP.stride(0))
        results = (self.out_TND, self.partial_out_CX, self.partial_lse_CH)
        return *tensors, *results, *strides, scopes.list_length, self.scale * LOG2_E

    def constants(self) -> dict[str, int]:
        """Return the constants that all kernels share."""
        scopes, num_heads = self.scopes, self.q_TND.shape[1]
        group = head_blocks(self.tiled_heads)[1]
        return {
            "WINDOW": scopes.window_size, "RATIO": scopes.ratio, "LISTED": scopes.selected_TK is not None,
            "NUM_HEADS": num_heads, "NUM_BLOCKS": -(-num_heads // group), "GROUP": group, "WINDOW_PAGE": scopes.window.page_tokens,
            "ENTRIES_PAGE": self.entries.page_tokens,
        }  # fmt: skip


def choose_splits(call: CompressedCall) -> int:
    """Return `compressed_splits` of these queries; the partials must hold them."""
    num_rows, num_heads, _ = call.q_TND.shape
    num_splits = compressed_splits(num_rows, call.tiled_heads, call.num_sms)
    needed, held = num_rows * num_heads * num_splits, call.partial_lse_CH.numel()
    assert num_splits == 1 or needed <= held, f"{needed} partials of rows and heads, room for {held}"
    return num_splits


def merge_scopes(call: CompressedCall, num_splits: int) -> None:
    """Merge every row from the partials of its splits and the sinks; zeros in padded rows."""
    (num_rows, num_heads, head_dim), scopes = call.out_TND.shape, call.scopes
    is_spread = row_form(num_rows).merges_side_by_side
    # Few rows have many splits: a program takes some columns of one head. Else several heads, a few splits at once.
    heads = 1 if is_spread else min(MERGED_HEADS, next_power_of_two(call.tiled_heads))
    columns = min(head_dim & -head_dim, MERGED_COLUMNS) if is_spread else head_dim
    _merge_kernel[(num_rows, -(-num_heads // heads), head_dim // columns)](
        call.out_TND, call.partial_out_CX, call.partial_lse_CH, call.sinks_N, call.rows.positions_T, scopes.list_length,
        num_splits, WINDOW=scopes.window_size, RATIO=scopes.ratio, LISTED=scopes.selected_TK is not None,
        NUM_HEADS=num_heads, HEADS=heads, HEAD_DIM=head_dim, SPREAD=is_spread,
        BLOCK_S=SPREAD_SPLITS if is_spread else MERGED_SPLITS, BLOCK_D=next_power_of_two(columns), num_warps=4,
        **pdl_flags(call.out_TND),
    )  # fmt: skip


@jit
def row_places(position, num_listed, WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr):
    """Return the numbers of window tokens, of entries and of places that a row sees; zeros for a padded row."""
    num_window = tl.maximum(tl.minimum(position + 1, WINDOW), 0)
    num_entries = num_window * 0
    num_places = num_window
    if RATIO > 0:
        num_entries = tl.maximum(position + 1, 0) // RATIO
        num_taken = num_entries
        if LISTED:
            num_taken = tl.minimum(num_entries, num_listed)
        num_places = num_window + num_taken
    return num_window, num_entries, num_places


@jit
def split_size(num_places, num_splits):
    """Return the places of each split, except the last one in use."""
    return ((num_places + num_splits - 1) // num_splits + SPLIT_UNIT - 1) // SPLIT_UNIT * SPLIT_UNIT


@jit_counting("num_splits", "num_listed")
def _merge_kernel(
    p_out, p_partial_out, p_partial_lse, p_sinks, p_positions, num_listed, num_splits,
    WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr, NUM_HEADS: constexpr, HEADS: constexpr, HEAD_DIM: constexpr,
    SPREAD: constexpr, BLOCK_S: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first_column = tl.program_id(2) * BLOCK_D
    o_d = first_column + tl.arange(0, BLOCK_D)
    m_out = (o_head < NUM_HEADS)[:, None] & (o_d < HEAD_DIM)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _, _, num_places = row_places(tl.load(p_positions + i_row), num_listed, WINDOW, RATIO, LISTED)
    size = tl.maximum(split_size(num_places, num_splits), 1)
    num_used = (num_places + size - 1) // size  # later splits have written nothing
    if PDL:
        tl.extra.cuda.gdc_wait()
    if SPREAD:
        b_out = merge_head(
            p_partial_out + first_column, p_partial_lse, p_sinks, i_row * num_splits, num_used, tl.program_id(1),
            NUM_HEADS, HEAD_DIM, BLOCK_S, BLOCK_D,
        )[None, :]  # fmt: skip
    else:
        b_out = _merge_some(
            p_partial_out, p_partial_lse, p_sinks, i_row * num_splits, num_used, o_head, m_out, NUM_HEADS, HEAD_DIM,
            BLOCK_S, o_d,
        )  # fmt: skip
    p_y = p_out + ((i_row * NUM_HEADS + o_head) * HEAD_DIM)[:, None] + o_d[None, :]
    tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_out)


@jit
def _merge_some(
    p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, o_head, m_out, NUM_HEADS: constexpr,
    HEAD_DIM: constexpr, BLOCK_S: constexpr, o_d,
):  # fmt: skip
    """Like `merge_heads`, [heads, D], with a few splits in flight at once."""
    m_head = o_head < NUM_HEADS
    b_acc = tl.zeros(m_out.shape, dtype=tl.float32)
    b_m = tl.full(o_head.shape, -float("inf"), dtype=tl.float32)
    b_l = tl.zeros(o_head.shape, dtype=tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        b_lse = ()
        b_part = ()
        b_m_new = b_m
        for i in tl.static_range(BLOCK_S):
            is_used = first + i < num_splits
            o_partial = (first_partial + first + i) * NUM_HEADS + o_head
            b_one = tl.load(p_partial_lse + o_partial, mask=m_head & is_used, other=-float("inf"))
            p_part = p_partial_out + (o_partial * HEAD_DIM)[:, None] + o_d[None, :]
            b_part = b_part + (tl.load(p_part, mask=m_out & is_used, other=0.0).to(tl.float32),)
            b_lse = b_lse + (b_one,)
            b_m_new = tl.maximum(b_m_new, b_one)
        b_m_safe = finite_max(b_m_new)
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_acc = b_acc * b_alpha[:, None]
        b_l = b_l * b_alpha
        for i in tl.static_range(BLOCK_S):
            b_p = tl.exp2(b_lse[i] - b_m_safe)
            b_acc += b_part[i] * b_p[:, None]
            b_l += b_p
        b_m = b_m_new
    b_l = add_sinks(b_l, b_m, p_sinks, o_head, m_head)
    return b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]

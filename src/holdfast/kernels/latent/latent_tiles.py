"""Tiles of attention over paged latents (MLA): splits of token lists, lookup of slots, merges of split-KV partials.

T rows, N query heads, L latent, N tokens of a block, K places of a list, C split-KV partials

Over lists of selected tokens (DSA) a program takes one row, one block of heads and one split of the row's list. Splits cut
places of the list, not tokens, so no program needs a length before it reads: a split past the end of a short list is neutral.

Kernels read a list some blocks ahead of the latents. Triton's pipeliner skips loops that only pass a value on to the next
iteration. So a loop carries places and computes tokens from them.
"""

from typing import NamedTuple

from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS, MERGED_HEADS, MergeShape, merge_row, merge_tiles
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_geometry import MAX_SPLITS, sparse_splits
from holdfast.kernels.latent.latent_planes import LatentCall, SparseRows
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, next_power_of_two, tl

SPREAD_MERGE_ROWS = 64
"""Most rows of a step that has many splits per row and merges one head per program."""
MERGED_SPLITS, MERGED_COLUMNS = 64, 64
"""Splits and columns that a program merges at once in steps of few rows, where a row may have hundreds of splits."""


class RowForm(NamedTuple):
    """The part of a launch that depends on the number of rows, padding included."""

    merges_side_by_side: bool
    """True if a merge takes many splits of some columns of one head at once."""
    merges_by_head: bool
    """True if a merge takes one head per program, else several."""


def row_form(num_rows: int) -> RowForm:
    """Return the row-dependent part of a launch. Above 16 rows all of them give the same bits."""
    return RowForm(num_rows <= MERGE_BY_HEAD_ROWS, num_rows <= SPREAD_MERGE_ROWS)


def merge_shape(num_rows: int, num_heads: int, latent_dim: int) -> MergeShape:
    form = row_form(num_rows)
    heads = 1 if form.merges_by_head else next_power_of_two(min(num_heads, MERGED_HEADS))
    # Whole blocks of columns only: the largest power of two that divides the latent.
    columns = min(latent_dim & -latent_dim, MERGED_COLUMNS) if form.merges_side_by_side else latent_dim
    return MergeShape(heads, columns, form.merges_side_by_side)


def merge_latents(work: TileWork, call: LatentCall) -> None:
    """Merge rows that were split and write zeros to padded rows; the others stay as their tiles wrote them."""
    merge_tiles(work.rows_T2, call.partials, call.out_TNL, merge_shape(*call.out_TNL.shape), MERGED_SPLITS)


class ListSplits(NamedTuple):
    """Splits of a step's lists."""

    num_splits: int
    places: int
    """Places of each split but the last: whole blocks."""

    @classmethod
    def of(cls, call: LatentCall, num_places: int, block_tokens: int, wanted: int | None = None) -> "ListSplits":
        """Use at most `wanted` splits (default: `sparse_splits`), and none that would be empty for a full list."""
        num_rows, num_heads, _ = call.q_TNX.shape
        wanted = wanted or sparse_splits(num_rows, num_heads, call.num_sms)
        places = -(-num_places // (wanted * block_tokens)) * block_tokens
        splits = cls(-(-num_places // places), places)
        needed, held = num_rows * num_heads * splits.num_splits, call.partial_lse_CH.numel()
        assert splits.num_splits == 1 or needed <= held, f"{needed} partials of rows and heads, room for {held}"
        return splits


def merge_lists(call: LatentCall, rows: SparseRows, num_splits: int) -> None:
    """Merge the rows that select tokens from the partials of all their splits; others do not change."""
    num_rows, num_heads, latent_dim = call.out_TNL.shape
    shape = merge_shape(num_rows, num_heads, latent_dim)
    _merge_lists_kernel[(num_rows, -(-num_heads // shape.heads), latent_dim // shape.columns)](
        call.out_TNL, *call.partials, rows.num_tokens_T, num_splits,
        NUM_HEADS=num_heads, HEADS=shape.heads, LATENT_DIM=latent_dim, COLUMNS=shape.columns,
        SIDE_BY_SIDE=shape.is_side_by_side, BLOCK_S=MAX_SPLITS, BLOCK_D=next_power_of_two(shape.columns),
        num_warps=4, **pdl_flags(call.out_TNL),
    )  # fmt: skip


@jit_counting("num_splits")
def _merge_lists_kernel(
    p_out, p_partial_out, p_partial_lse, p_num_tokens, num_splits,
    NUM_HEADS: constexpr, HEADS: constexpr, LATENT_DIM: constexpr, COLUMNS: constexpr, SIDE_BY_SIDE: constexpr,
    BLOCK_S: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.load(p_num_tokens + i_row) <= 0:
        return
    merge_row(
        p_out, p_partial_out, p_partial_lse, None, None, None, i_row, i_row * num_splits, num_splits,
        NUM_HEADS, HEADS, LATENT_DIM, COLUMNS, SIDE_BY_SIDE, 0, BLOCK_S, BLOCK_D,
    )  # fmt: skip


@jit
def load_places(p_row_tokens, o_place, end):
    """Load these places of a list; -1 past its end."""
    return tl.load(p_row_tokens + o_place, mask=o_place < end, other=-1)


@jit
def seen_tokens(b_place, num_tokens):
    """Return places that are tokens of the sequence; -1 for any other number."""
    return tl.where((b_place >= 0) & (b_place < num_tokens), b_place, -1)


@jit
def load_pages(p_row_pages, b_token, PAGE_TOKENS: constexpr):
    """Load the pages of tokens; masked out for -1."""
    return tl.load(p_row_pages + tl.maximum(b_token, 0) // PAGE_TOKENS, mask=b_token >= 0, other=0)


@jit
def find_slots(b_page, b_token, PAGE_TOKENS: constexpr):
    """Return int64 slots; -1 without a token."""
    o_slot = b_page.to(tl.int64) * PAGE_TOKENS + b_token % PAGE_TOKENS
    return tl.where(b_token >= 0, o_slot, -1)

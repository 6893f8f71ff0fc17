"""What kernels over lists of chosen tokens (DSA) share, whatever pages hold: splits of lists, the way to a slot, the merge of partials.

T rows, N query heads, L latent, N tokens of a block, K places of a list, C split-KV partials

A program has one row, one block of heads and one split of the row's list. Places of a list are split, not tokens that are in it,
so that no program has to know a length before it reads: a split behind the end of a short list is neutral.

Kernels read a list some blocks ahead of the latents. What a loop carries from one block to the next has to be computed in the
loop, because Triton's pipeliner leaves loops alone that hand on what they were given: places are carried, tokens made of them.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.latent.latent_geometry import MAX_SPLITS, sparse_splits
from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.kernels.latent.latent_tiles import merge_row, merge_shape
from holdfast.kernels.triton_compat import (
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types


class ListSplits(NamedTuple):
    """How the lists of a step are split."""

    num_splits: int
    places: int
    """Of each split but the last: whole blocks."""

    @classmethod
    def of(
        cls,
        q_TNX: torch.Tensor,
        tokens_TK: torch.Tensor,
        partial_lse_CH: torch.Tensor,
        num_sms: int,
        block_tokens: int,
        wanted: int | None = None,
    ) -> "ListSplits":
        """No more than wanted, or else than `sparse_splits`, and none that would be empty however long a list is."""
        (num_rows, num_heads, _), num_places = q_TNX.shape, tokens_TK.shape[1]
        wanted = wanted or sparse_splits(num_rows, num_heads, num_sms)
        places = -(-num_places // (wanted * block_tokens)) * block_tokens
        splits = cls(-(-num_places // places), places)
        needed, there = num_rows * num_heads * splits.num_splits, partial_lse_CH.numel()
        assert splits.num_splits == 1 or needed <= there, f"{needed} partials of rows and heads, and room for {there}"
        return splits


def merge_lists(
    rows: SparseRows,
    num_splits: int,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
) -> None:
    """Rows that choose, from the partials of all of their splits; others stay as they are."""
    num_rows, num_heads, latent_dim = out_TNL.shape
    pdl, shape = supports_pdl(out_TNL), merge_shape(num_rows, num_heads, latent_dim)
    _merge_kernel[(num_rows, -(-num_heads // shape.heads), latent_dim // shape.columns)](
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        rows.num_tokens_T,
        num_splits,
        NUM_HEADS=num_heads,
        HEADS=shape.heads,
        LATENT_DIM=latent_dim,
        SIDE_BY_SIDE=shape.is_side_by_side,
        BLOCK_S=MAX_SPLITS,
        BLOCK_D=next_power_of_two(shape.columns),
        PDL=pdl,
        num_warps=4,
        **pdl_launch(pdl),
    )


@jit_counting("num_splits")
def _merge_kernel(
    p_out,
    p_partial_out,
    p_partial_lse,
    p_num_tokens,
    num_splits,
    NUM_HEADS: constexpr,
    HEADS: constexpr,
    LATENT_DIM: constexpr,
    SIDE_BY_SIDE: constexpr,
    BLOCK_S: constexpr,
    BLOCK_D: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.load(p_num_tokens + i_row) <= 0:
        return
    merge_row(
        p_out,
        p_partial_out,
        p_partial_lse,
        i_row,
        i_row * num_splits,
        num_splits,
        NUM_HEADS,
        HEADS,
        LATENT_DIM,
        SIDE_BY_SIDE,
        BLOCK_S,
        BLOCK_D,
    )


@jit
def load_places(p_row_tokens, o_place, end):
    """What stands at these places of a list; -1 behind its end."""
    return tl.load(p_row_tokens + o_place, mask=o_place < end, other=-1)


@jit
def seen_tokens(b_place, num_tokens):
    """Positions of tokens of the sequence; -1 where something else stands."""
    return tl.where((b_place >= 0) & (b_place < num_tokens), b_place, -1)


@jit
def load_pages(p_row_pages, b_token, PAGE_TOKENS: constexpr):
    """The pages of tokens; nothing is read where there is no token."""
    return tl.load(p_row_pages + tl.maximum(b_token, 0) // PAGE_TOKENS, mask=b_token >= 0, other=0)


@jit
def find_slots(b_page, b_token, PAGE_TOKENS: constexpr):
    """int64, -1 where there is no token."""
    o_slot = b_page.to(tl.int64) * PAGE_TOKENS + b_token % PAGE_TOKENS
    return tl.where(b_token >= 0, o_slot, -1)

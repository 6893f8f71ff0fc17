"""All-reduce of small batches onto the residual stream, with the next RMSNorm deferred, in one launch.

T rows, H columns, J blocks of H; S ranks

The kernel stores what kernels/gemm/deferred_rms_norm.py stores: x * norm_weight, the squares of x by block, and amax by
block if products quantize their rows. Sums have the bits of kernels/exchange/sum_rows.py. Rows are cut the same way for 2
to FUSED_DECODE_ROWS rows, so results are batch invariant.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.exchange.signals import begin_rendezvous, end_rendezvous
from holdfast.kernels.exchange.sum_rows import Ranks, Tiles, add_rooms, sum_rows_reference, tile_forms
from holdfast.kernels.geometry import FUSED_DECODE_ROWS
from holdfast.kernels.norm import load_norm_weight
from holdfast.kernels.triton_compat import (
    can_run,
    check_dense,
    constexpr,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)


class DeferredStream(NamedTuple):
    """The residual stream of a small batch, and the buffers of its deferred RMSNorm."""

    x_TH: Tensor
    norm_weight_H: Tensor
    scaled_TH: Tensor
    """x * norm_weight."""
    squares: Tensor
    """float32: the squares of x summed by block."""
    amax: Tensor | None = None
    """float32: the largest magnitude of `scaled_TH` by block, if products quantize their rows."""
    offset: float = 0.0
    """Added to the norm's weight."""


def row_form(num_rows: int) -> bool:
    """Return True for a single row: the specialization for the number of rows."""
    return num_rows == 1


def column_tiles(num_rows: int, size: int, max_blocks: int, pdl: bool = False) -> Tiles:
    """Return one-row tiles that give as many programs as allowed, for the largest small batch.

    If ranks share a GPU, few programs are allowed, so tiles are wide.
    """
    most_rows, forms = 1 if row_form(num_rows) else FUSED_DECODE_ROWS, (*tile_forms(pdl), Tiles(8192, 16, pdl=pdl))
    return next((tiles for tiles in forms if most_rows * -(-size // tiles.block) <= max_blocks), forms[-1])


def add_rows(parts: Sequence[Tensor], onto: DeferredStream) -> int:
    """x += the sum of complete parts, with the next RMSNorm deferred; return the blocks of a row."""
    if can_run(onto.x_TH):
        return add_rows_triton(parts, onto, Ranks(0, len(parts), None))
    return add_rows_reference(parts, onto)


def add_rows_reference(parts: Sequence[Tensor], onto: DeferredStream) -> int:
    """Like `add_rows`, in plain torch; a row is one block."""
    x_TH, norm_weight_H, scaled_TH, squares, amax, offset = onto
    num_rows = x_TH.shape[0]
    x_TH.add_(sum_rows_reference(parts, torch.empty_like(x_TH)))
    scaled_TH.copy_(x_TH.float() * (norm_weight_H.float() + offset))
    squares[:num_rows] = x_TH.float().square().sum(-1)
    if amax is not None:
        amax[:num_rows] = scaled_TH.float().abs().amax(-1)
    return 1


def add_rows_triton(
    rooms: Sequence[Tensor], onto: DeferredStream, ranks: Ranks, tiles: Tiles | None = None, begins_next: bool = True
) -> int:
    """Like `add_rows`, from the exchange buffers of all ranks. Each begins with the rank's dense part.

    If `begins_next`, release the next kernel after the rendezvous.
    """
    x_TH, norm_weight_H, scaled_TH, squares, amax, offset = onto
    num_rows, size = x_TH.shape
    check_dense(x_TH, scaled_TH)
    pdl = ranks.signals is not None and supports_pdl(x_TH)
    tiles = tiles or column_tiles(num_rows, size, ranks.max_blocks, pdl)
    num_blocks = -(-size // tiles.block)
    if not num_rows:
        return num_blocks
    _add_kernel[(min(num_rows * num_blocks, ranks.max_blocks),)](
        tuple(rooms), x_TH, norm_weight_H, scaled_TH, squares, squares if amax is None else amax, ranks.signals,
        ranks.peers, ranks.rank, num_rows, size,
        SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), HAS_AMAX=amax is not None, OFFSET=offset,
        BLOCK=tiles.block, FORM=tiles.form, PDL=tiles.pdl, BEGINS_NEXT=begins_next, num_warps=tiles.num_warps, **pdl_launch(tiles.pdl),
    )  # fmt: skip
    return num_blocks


@jit_counting("rank", "num_rows")
def _add_kernel(
    rooms, p_x, p_norm_weight, p_scaled, p_squares, p_amax, p_signals, p_peers, rank, num_rows, size,
    SIZE: constexpr, WIDE_SIZE: constexpr, HAS_AMAX: constexpr, OFFSET: constexpr, BLOCK: constexpr, FORM: constexpr,
    PDL: constexpr, BEGINS_NEXT: constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    if PDL and BEGINS_NEXT:
        # Release after the rendezvous: waiting programs could take the occupancy that a peer on this GPU needs to
        # arrive.
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = tl.cdiv(size, BLOCK)
    for i_tile in range(tl.program_id(0), num_rows * num_blocks, tl.num_programs(0)):
        i_row = i_tile // num_blocks
        o_h = (i_tile - i_row * num_blocks) * BLOCK + tl.arange(0, BLOCK)
        m_h = o_h < size
        o_n = i_row.to(tl.int64) * size + o_h
        b_sum = add_rooms(rooms, o_n, m_h, SIZE).to(p_x.dtype.element_ty).to(tl.float32)
        b_x = (tl.load(p_x + o_n, mask=m_h, other=0.0).to(tl.float32) + b_sum).to(p_x.dtype.element_ty)
        b_norm = load_norm_weight(p_norm_weight, o_h, m_h, OFFSET)
        tl.store(p_x + o_n, b_x, mask=m_h)
        b_x = b_x.to(tl.float32)
        b_scaled = (b_x * b_norm).to(p_scaled.dtype.element_ty)
        tl.store(p_scaled + o_n, b_scaled, mask=m_h)
        tl.store(p_squares + i_tile, tl.sum(b_x * b_x, axis=0))
        if HAS_AMAX:
            tl.store(p_amax + i_tile, tl.max(tl.abs(b_scaled.to(tl.float32)), axis=0))
    end_rendezvous(p_signals, epoch)

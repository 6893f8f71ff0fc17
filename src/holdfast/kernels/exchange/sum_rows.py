"""All-reduce over buffers that peers can read: adds the parts of all ranks in float32, in rank order, and rounds once.

T rows, H columns, N their product; S ranks

One pass (one-shot): every rank reads all parts. It needs one rendezvous and has the least latency. Two passes (two-shot): a
reduce-scatter into each rank's own buffer, then an all-gather. It needs two rendezvous, and moves 2 (S - 1) / S parts over
the link instead of S - 1. Both give the same bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.exchange.signals import ASSEMBLER, MAX_BLOCKS, begin_rendezvous, end_rendezvous, rendezvous
from holdfast.kernels.triton_compat import (
    can_run,
    check_dense,
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)

TWO_PASS_BYTES = 2**20
"""Least size that takes two passes with 3 or more ranks: traffic then costs more than a second rendezvous."""


class Ranks(NamedTuple):
    """Signals and addresses with which a kernel reaches its peers."""

    rank: int
    size: int
    signals: Tensor | None
    """int32 signals of this rank; None if all buffers are already complete, as in single-process tests."""
    peers: Tensor | None = None
    """int64 [S]: addresses of the signals of all ranks."""
    max_blocks: int = MAX_BLOCKS
    """Most blocks per launch; equal on every rank."""


class Tiles(NamedTuple):
    """Elements and warps of a program, how it signals, and if it uses PDL."""

    block: int
    num_warps: int
    form: int = ASSEMBLER
    pdl: bool = False
    """Programmatic dependent launch: the kernel waits before it signals its arrival."""


BLOCKS = (1024, 2048, 4096)


def tile_forms(pdl: bool) -> tuple[Tiles, ...]:
    """List the results of `choose_tiles`: each is a specialization."""
    return tuple(Tiles(block, block // 256, pdl=pdl) for block in BLOCKS)


def choose_tiles(num_elements: int, max_blocks: int, pdl: bool = False) -> Tiles:
    """Return tiles of eight elements a thread, with as many programs as allowed."""
    forms = tile_forms(pdl)
    return next((tiles for tiles in forms if num_elements <= tiles.block * max_blocks), forms[-1])


def takes_two_passes(dtype: torch.dtype, out: Tensor, size: int) -> bool:
    """Return True if parts of this type take two passes: the buffers must hold the rounded sums exactly."""
    return may_take_two_passes(dtype, out.dtype, size) and out.numel() * dtype.itemsize >= TWO_PASS_BYTES


def may_take_two_passes(dtype: torch.dtype, out_dtype: torch.dtype, size: int) -> bool:
    """Return True if any number of rows takes two passes."""
    return size > 2 and dtype in (out_dtype, torch.float32)


def add_parts(parts: Sequence[Tensor], out_TH: Tensor, scratch_F: Tensor) -> Tensor:
    """Add complete parts; a CPU accumulates in `scratch_F` (float32)."""
    if can_run(out_TH):
        return sum_rows_triton(parts, out_TH, Ranks(0, len(parts), None), tile_forms(pdl=False)[-1], two_passes=False)
    return sum_rows_reference(parts, out_TH, scratch_F)


def sum_rows_reference(rooms: Sequence[Tensor], out_TH: Tensor, scratch_F: Tensor | None = None) -> Tensor:
    """Compute rooms[0] + rooms[1] + ... in float32, rounded once to the dtype of `out_TH`. Runs on CPUs.

    It accumulates in `out_TH` if that is float32, else piece by piece in `scratch_F` (any length), else in new memory.
    """
    if out_TH.dtype == torch.float32:
        return _add(rooms, out_TH)
    if scratch_F is None:
        return out_TH.copy_(_add(rooms, torch.empty(out_TH.shape, dtype=torch.float32, device=out_TH.device)))
    flat, out_N = [part.view(-1) for part in rooms], out_TH.view(-1)
    for start in range(0, out_N.shape[0], scratch_F.shape[0]):
        piece = slice(start, start + scratch_F.shape[0])
        wide = scratch_F[: out_N[piece].shape[0]]
        out_N[piece].copy_(_add([part[piece] for part in flat], wide))
    return out_TH


def _add(parts: Sequence[Tensor], wide: Tensor) -> Tensor:
    wide.copy_(parts[0])
    for part in parts[1:]:
        wide.add_(part)
    return wide


def sum_rows_triton(
    rooms: Sequence[Tensor], out_TH: Tensor, ranks: Ranks, tiles: Tiles | None = None, two_passes: bool | None = None
) -> Tensor:
    """Launch one all-reduce; each buffer begins with its rank's dense part."""
    num_elements = out_TH.numel()
    if not num_elements:
        return out_TH
    check_dense(out_TH)
    tiles = tiles or choose_tiles(num_elements, ranks.max_blocks, ranks.signals is not None and supports_pdl(out_TH))
    if two_passes is None:
        two_passes = takes_two_passes(rooms[0].dtype, out_TH, ranks.size)
    share = -(-num_elements // (ranks.size * tiles.block)) * tiles.block if two_passes else num_elements
    kernel = _sum_in_two_passes_kernel if two_passes else _sum_kernel
    kernel[(min(-(-share // tiles.block), ranks.max_blocks),)](
        tuple(rooms), out_TH, ranks.signals, ranks.peers, ranks.rank, num_elements, share,
        SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), BLOCK=tiles.block, FORM=tiles.form, PDL=tiles.pdl,
        num_warps=tiles.num_warps, **pdl_launch(tiles.pdl),
    )  # fmt: skip
    return out_TH


@jit
def add_rooms(rooms, o_n, m_n, SIZE: constexpr):
    """Add the elements of all buffers in float32, in rank order."""
    b_sum = tl.load(rooms[0] + o_n, mask=m_n, other=0.0).to(tl.float32)
    for r in tl.static_range(1, SIZE):
        b_sum += tl.load(rooms[r] + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_sum


@jit_counting("rank")
def _sum_kernel(
    rooms, p_out, p_signals, p_peers, rank, num_elements, share,
    SIZE: constexpr, WIDE_SIZE: constexpr, BLOCK: constexpr, FORM: constexpr, PDL: constexpr,
):  # fmt: skip
    i_block = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    for i_start in range(i_block * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        o_n = i_start + tl.arange(0, BLOCK)
        m_n = o_n < num_elements
        b_sum = add_rooms(rooms, o_n, m_n, SIZE)
        tl.store(p_out + o_n, b_sum.to(p_out.dtype.element_ty), mask=m_n)
    end_rendezvous(p_signals, epoch)


@jit_counting("rank")
def _sum_in_two_passes_kernel(
    rooms, p_out, p_signals, p_peers, rank, num_elements, share,
    SIZE: constexpr, WIDE_SIZE: constexpr, BLOCK: constexpr, FORM: constexpr, PDL: constexpr,
):  # fmt: skip
    # In the first pass only rank r reads share r of any buffer, and writes it into its own: no input is overwritten early.
    # In the second pass a block reads what the same blocks of its peers wrote in the first.
    i_block = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    for i_start in range(i_block * BLOCK, share, step):
        o_n = rank * share + i_start + tl.arange(0, BLOCK)
        m_n = o_n < num_elements
        b_sum = add_rooms(rooms, o_n, m_n, SIZE)
        b_sum = b_sum.to(p_out.dtype.element_ty)
        for r in tl.static_range(SIZE):
            if r == rank:
                tl.store(rooms[r] + o_n, b_sum.to(rooms[r].dtype.element_ty), mask=m_n)
    if p_signals is not None:
        epoch += 1
        tl.debug_barrier()
        rendezvous(p_signals, p_peers, epoch, rank, SIZE, WIDE_SIZE, FORM)
    for r in tl.static_range(SIZE):
        for i_start in range(i_block * BLOCK, share, step):
            o_n = r * share + i_start + tl.arange(0, BLOCK)
            m_n = o_n < num_elements
            b_sum = tl.load(rooms[r] + o_n, mask=m_n, other=0.0)
            tl.store(p_out + o_n, b_sum.to(p_out.dtype.element_ty), mask=m_n)
    end_rendezvous(p_signals, epoch)

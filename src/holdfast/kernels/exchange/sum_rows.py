"""The parts of all ranks added up in float32, in the order of ranks, rounded once: all-reduce over rooms that peers read.

T rows, H columns, N their product; S ranks

In one pass (one-shot) every rank reads all parts: one meeting, the least latency. In two passes (two-shot) every rank adds up its
share of the elements in its own room and reads the other shares from theirs: two meetings, and 2 (S - 1) / S parts that
cross the link in place of S - 1. Bits are the same: each element is added up by the same additions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.exchange.signals import ASSEMBLER, MAX_BLOCKS, begin_meeting, end_meeting, meet_peers
from holdfast.kernels.triton_compat import (
    can_run,
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

TWO_PASS_BYTES = 2**20
"""From here on, and from 3 ranks on, what crosses the link counts for more than a second meeting."""


class Ranks(NamedTuple):
    """What a kernel needs to reach its peers."""

    rank: int
    size: int
    signals: Tensor | None
    """int32, this rank's own; None: all rooms are complete already, as in tests of one process."""
    peers: Tensor | None = None
    """int64 [S]: where the signals of all ranks are."""
    max_blocks: int = MAX_BLOCKS
    """Of a kernel, and the same on every rank."""


class Tiles(NamedTuple):
    """How a sum is cut among programs."""

    block: int
    num_warps: int
    form: int = ASSEMBLER
    pdl: bool = False
    """Programmatic dependent launch: the kernel waits by itself, before it says that it has come."""


BLOCKS = (1024, 2048, 4096)


def tile_forms(pdl: bool) -> tuple[Tiles, ...]:
    """All that `choose_tiles` may give: each is compiled by itself."""
    return tuple(Tiles(block, block // 256, pdl=pdl) for block in BLOCKS)


def choose_tiles(num_elements: int, max_blocks: int, pdl: bool = False) -> Tiles:
    """Eight elements a thread, and as many programs as may be: few rows leave most of the device free."""
    forms = tile_forms(pdl)
    return next((tiles for tiles in forms if num_elements <= tiles.block * max_blocks), forms[-1])


def takes_two_passes(dtype: torch.dtype, out: Tensor, size: int) -> bool:
    """Whether parts of this type are added up in shares; sums lie in rooms meanwhile, which must hold them as they are."""
    return may_take_two_passes(dtype, out.dtype, size) and out.numel() * dtype.itemsize >= TWO_PASS_BYTES


def may_take_two_passes(dtype: torch.dtype, out_dtype: torch.dtype, size: int) -> bool:
    """Whether any number of rows does."""
    return size > 2 and dtype in (out_dtype, torch.float32)


def add_parts(parts: Sequence[Tensor], out_TH: Tensor, scratch_F: Tensor) -> Tensor:
    """The sum of parts that are all here already; `scratch_F` (float32) is where a CPU's sum grows."""
    if can_run(out_TH):
        return sum_rows_triton(parts, out_TH, Ranks(0, len(parts), None), tile_forms(pdl=False)[-1], two_passes=False)
    return sum_rows_reference(parts, out_TH, scratch_F)


def sum_rows_reference(rooms: Sequence[Tensor], out_TH: Tensor, scratch_F: Tensor | None = None) -> Tensor:
    """The same in plain torch: rooms[0] + rooms[1] + ... in float32, rounded once to the dtype of `out_TH`. What CPUs run.

    The sum grows in `out_TH` where that is wide, else in `scratch_F` (float32, any length), piece by piece; without one in new memory.
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
    """The same as one Triton kernel. Each room begins with its rank's part, dense, as many elements as `out_TH` has."""
    num_elements = out_TH.numel()
    if not num_elements:
        return out_TH
    assert out_TH.is_contiguous(), f"{out_TH.stride()=}"
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
    """float32: the elements of all rooms, in the order of ranks."""
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
    epoch = begin_meeting(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    for i_start in range(i_block * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        o_n = i_start + tl.arange(0, BLOCK)
        m_n = o_n < num_elements
        b_sum = add_rooms(rooms, o_n, m_n, SIZE)
        tl.store(p_out + o_n, b_sum.to(p_out.dtype.element_ty), mask=m_n)
    end_meeting(p_signals, epoch)


@jit_counting("rank")
def _sum_in_two_passes_kernel(
    rooms, p_out, p_signals, p_peers, rank, num_elements, share,
    SIZE: constexpr, WIDE_SIZE: constexpr, BLOCK: constexpr, FORM: constexpr, PDL: constexpr,
):  # fmt: skip
    # Rank r alone reads share r of any room in the first pass, and writes it in its own: nobody's input is overwritten. A block
    # reads in the second pass what the same blocks of its peers wrote in the first.
    i_block = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = begin_meeting(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
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
        meet_peers(p_signals, p_peers, epoch, rank, SIZE, WIDE_SIZE, FORM)
    for r in tl.static_range(SIZE):
        for i_start in range(i_block * BLOCK, share, step):
            o_n = r * share + i_start + tl.arange(0, BLOCK)
            m_n = o_n < num_elements
            b_sum = tl.load(rooms[r] + o_n, mask=m_n, other=0.0)
            tl.store(p_out + o_n, b_sum.to(p_out.dtype.element_ty), mask=m_n)
    end_meeting(p_signals, epoch)

"""The parts of all ranks side by side (all-gather by columns), small parts rank by rank, tokens of rank 0, and a bare meeting.

T rows, X a rank's columns, Y all of them; N elements; S ranks
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.exchange.signals import ASSEMBLER, begin_meeting, end_meeting
from holdfast.kernels.exchange.sum_rows import Ranks
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

SMALL_BLOCK = 1024


def gather_columns_reference(rooms: Sequence[Tensor], out_TY: Tensor) -> Tensor:
    """out[:, r * X : r * X + X] = rooms[r]; the last may be narrower. What CPUs run."""
    assert sum(room.shape[1] for room in rooms) == out_TY.shape[1], (
        f"{out_TY.shape=} from {[room.shape for room in rooms]}"
    )
    start = 0
    for room_TX in rooms:
        out_TY[:, start : start + room_TX.shape[1]].copy_(room_TX)
        start += room_TX.shape[1]
    return out_TY


def gather_columns_triton(
    rooms: Sequence[Tensor], out_TY: Tensor | None, num_rows: int, num_columns: int, ranks: Ranks, form: int = ASSEMBLER
) -> None:
    """The same as one Triton kernel. Each room begins with its rank's part, dense; together they have `num_columns`.

    Who passes no output only lets the others read.
    """
    share = -(-num_columns // ranks.size)
    if not num_rows:
        return
    block = min(1024, next_power_of_two(share))
    num_tiles = num_rows * -(-share // block)
    _gather_columns_kernel[(min(num_tiles, ranks.max_blocks),)](
        tuple(rooms), out_TY, ranks.signals, ranks.peers, ranks.rank, num_rows, share, num_columns,
        0 if out_TY is None else out_TY.stride(0),
        SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), BLOCK=block, FORM=form, num_warps=4,
    )  # fmt: skip


@jit_counting("rank", "num_rows")
def _gather_columns_kernel(
    rooms, p_out, p_signals, p_peers, rank, num_rows, share, num_columns, out_stride,
    SIZE: constexpr, WIDE_SIZE: constexpr, BLOCK: constexpr, FORM: constexpr,
):  # fmt: skip
    epoch = begin_meeting(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    if p_out is not None:
        num_tiles = tl.cdiv(share, BLOCK)
        for i_tile in range(tl.program_id(0), num_rows * num_tiles, tl.num_programs(0)):
            i_row = (i_tile // num_tiles).to(tl.int64)
            o_x = (i_tile % num_tiles) * BLOCK + tl.arange(0, BLOCK)
            for r in tl.static_range(SIZE):
                width = tl.minimum(share, num_columns - r * share)  # a share at the end may be narrow, or empty
                m_x = o_x < width
                b_x = tl.load(rooms[r] + i_row * width + o_x, mask=m_x, other=0)
                tl.store(p_out + i_row * out_stride + r * share + o_x, b_x, mask=m_x)
    end_meeting(p_signals, epoch)


def gather_small_reference(parts: Sequence[Tensor], out_SN: Tensor) -> Tensor:
    """Part by part."""
    return torch.stack(tuple(parts), out=out_SN)


def gather_small_triton(part_N: Tensor, rooms: Sequence[Tensor], out_SN: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part goes into its room first, since it may lie anywhere."""
    _launch_small(part_N, rooms, out_SN, ranks, num_read=ranks.size)
    return out_SN


def share_first_triton(ids_N: Tensor, rooms: Sequence[Tensor], ranks: Ranks) -> None:
    """The numbers of rank 0 in place of every other rank's."""
    _launch_small(ids_N, rooms, ids_N, ranks, num_read=1)


def _launch_small(part_N: Tensor, rooms: Sequence[Tensor], out: Tensor, ranks: Ranks, num_read: int) -> None:
    num_elements = part_N.numel()
    if not num_elements:
        return
    assert part_N.is_contiguous(), f"{part_N.stride()=}"
    assert out.is_contiguous(), f"{out.stride()=}"
    _small_kernel[(min(-(-num_elements // SMALL_BLOCK), ranks.max_blocks),)](
        part_N, tuple(rooms), out, ranks.signals, ranks.peers, ranks.rank, num_elements,
        NUM_READ=num_read, SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), BLOCK=SMALL_BLOCK, FORM=ASSEMBLER,
        num_warps=4,
    )  # fmt: skip


@jit_counting("rank", "num_elements")
def _small_kernel(
    p_part, rooms, p_out, p_signals, p_peers, rank, num_elements,
    NUM_READ: constexpr, SIZE: constexpr, WIDE_SIZE: constexpr, BLOCK: constexpr, FORM: constexpr,
):  # fmt: skip
    # A block reads what the same blocks of its peers have put into their rooms.
    step = tl.num_programs(0) * BLOCK
    for i_start in range(tl.program_id(0) * BLOCK, num_elements, step):
        o_n = i_start + tl.arange(0, BLOCK)
        b_n = tl.load(p_part + o_n, mask=o_n < num_elements)
        for r in tl.static_range(SIZE):
            if r == rank:
                tl.store(rooms[r] + o_n, b_n, mask=o_n < num_elements)
    if p_signals is not None:
        tl.debug_barrier()
    epoch = begin_meeting(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    for r in tl.static_range(NUM_READ):
        for i_start in range(tl.program_id(0) * BLOCK, num_elements, step):
            o_n = i_start + tl.arange(0, BLOCK)
            b_n = tl.load(rooms[r] + o_n, mask=o_n < num_elements)
            tl.store(p_out + r * num_elements + o_n, b_n, mask=o_n < num_elements)
    end_meeting(p_signals, epoch)


def meet_triton(ranks: Ranks) -> None:
    """Returns, in the order of the stream, when every peer has ended all that came before."""
    _meet_kernel[(1,)](
        ranks.signals, ranks.peers, ranks.rank,
        SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), FORM=ASSEMBLER, num_warps=1,
    )  # fmt: skip


@jit_counting("rank")
def _meet_kernel(p_signals, p_peers, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    end_meeting(p_signals, begin_meeting(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM))

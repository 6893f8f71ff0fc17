"""All-gather by columns or of small parts, broadcast of rank 0's tokens, and a bare rendezvous (barrier).

T rows, X a rank's columns, Y all of them; N elements; S ranks
"""

from collections.abc import Sequence

from torch import Tensor

from holdfast.kernels.exchange.signals import ASSEMBLER, begin_rendezvous, end_rendezvous
from holdfast.kernels.exchange.sum_rows import Ranks
from holdfast.kernels.triton_compat import check_dense, constexpr, jit_counting, next_power_of_two, tl

SMALL_BLOCK = 1024


def gather_columns_reference(rooms: Sequence[Tensor], out_TY: Tensor) -> Tensor:
    """out[:, r * X : r * X + X] = rooms[r]; the last may be narrower. Runs on CPUs."""
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
    """Launch an all-gather of `num_columns` columns; each buffer begins with its rank's dense part.

    A rank without an output only takes part in the rendezvous, so that others can read its part.
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
    epoch = begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
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
    end_rendezvous(p_signals, epoch)


def gather_small_triton(part_N: Tensor, rooms: Sequence[Tensor], out_SN: Tensor, ranks: Ranks) -> Tensor:
    """All-gather small parts; the kernel copies this rank's part into its exchange buffer first."""
    _launch_small(part_N, rooms, out_SN, ranks, num_read=ranks.size)
    return out_SN


def share_first_triton(ids_N: Tensor, rooms: Sequence[Tensor], ranks: Ranks) -> None:
    """Broadcast the numbers of rank 0 in place."""
    _launch_small(ids_N, rooms, ids_N, ranks, num_read=1)


def _launch_small(part_N: Tensor, rooms: Sequence[Tensor], out: Tensor, ranks: Ranks, num_read: int) -> None:
    num_elements = part_N.numel()
    if not num_elements:
        return
    check_dense(part_N, out)
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
    # A block reads what the same blocks of its peers wrote into their buffers.
    step = tl.num_programs(0) * BLOCK
    for i_start in range(tl.program_id(0) * BLOCK, num_elements, step):
        o_n = i_start + tl.arange(0, BLOCK)
        b_n = tl.load(p_part + o_n, mask=o_n < num_elements)
        for r in tl.static_range(SIZE):
            if r == rank:
                tl.store(rooms[r] + o_n, b_n, mask=o_n < num_elements)
    if p_signals is not None:
        tl.debug_barrier()
    epoch = begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM)
    for r in tl.static_range(NUM_READ):
        for i_start in range(tl.program_id(0) * BLOCK, num_elements, step):
            o_n = i_start + tl.arange(0, BLOCK)
            b_n = tl.load(rooms[r] + o_n, mask=o_n < num_elements)
            tl.store(p_out + r * num_elements + o_n, b_n, mask=o_n < num_elements)
    end_rendezvous(p_signals, epoch)


def rendezvous_triton(ranks: Ranks) -> None:
    """Wait, in stream order, until every peer finished its earlier work."""
    _rendezvous_kernel[(1,)](
        ranks.signals, ranks.peers, ranks.rank,
        SIZE=ranks.size, WIDE_SIZE=next_power_of_two(ranks.size), FORM=ASSEMBLER, num_warps=1,
    )  # fmt: skip


@jit_counting("rank")
def _rendezvous_kernel(p_signals, p_peers, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    end_rendezvous(p_signals, begin_rendezvous(p_signals, p_peers, rank, SIZE, WIDE_SIZE, FORM))

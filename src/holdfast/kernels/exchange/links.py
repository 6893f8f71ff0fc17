"""Links: send and receive of rows between two ranks. The source offers rows in its own memory; the target fetches them.

T rows, H columns

Links connect stages, and the last stage with rank 0. The source has several slots, so several steps can be in flight.
Its kernel waits for a free slot, copies its rows there and signals the target. The target's kernel waits for that,
copies them out and signals that the slot is free. As in signals.py the same block on both sides handles the same
elements, so each pair of blocks has its own counts. There are always LINK_BLOCKS blocks, so all counts of a link are
equal. Counts live in device memory and only grow: graphs can replay them.

int32 counts of a rank, after those of signals.py:

    arrived   [1 + MAX_RANKS, LINK_BLOCKS]  for each source: offered; the source writes it
    fetched   [1 + MAX_RANKS, LINK_BLOCKS]  for each source: fetched by this rank
    acked     [NUM_LINKS, LINK_BLOCKS]      for each link: fetched by the target, which writes it
    offered   [NUM_LINKS, LINK_BLOCKS]      for each link: offered by this rank

Source 0 is the stage before, source 1 + r rank r of the last stage; link 0 goes to the next stage, link 1 to rank 0.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.exchange.signals import FAR_AHEAD, MAX_POLLS, MAX_RANKS, TABLES_WORD, TRAP_ASM
from holdfast.kernels.triton_compat import jit, jit_counting, kernel_constant, tl

LINK_BLOCKS = 16
NUM_LINKS = 2
ROWS_LINK, HEAD_LINK = range(NUM_LINKS)
TILE = kernel_constant(1024)
"""Elements of a row that a block copies at a time."""
ARRIVED_WORD = TABLES_WORD + 4 * MAX_RANKS
FETCHED_WORD = ARRIVED_WORD + (1 + MAX_RANKS) * LINK_BLOCKS
ACKED_WORD = FETCHED_WORD + (1 + MAX_RANKS) * LINK_BLOCKS
OFFERED_WORD = ACKED_WORD + NUM_LINKS * LINK_BLOCKS
END_WORD = OFFERED_WORD + NUM_LINKS * LINK_BLOCKS

ACQUIRE_ASM = kernel_constant("ld.acquire.sys.global.b32 $0, [$1];")
RELEASE_ASM = kernel_constant(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "@p st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }"
)


class LinkEnd(NamedTuple):
    """Counts that one side of a link reads and writes, LINK_BLOCKS each."""

    awaited: Tensor
    """Counts on this rank, written by the other side."""
    signaled: Tensor
    """Counts on the other side, written by this rank."""
    counted: Tensor
    """Private counts of this rank."""


def offer_end(signals: Tensor, target: Tensor, link: int, source: int) -> LinkEnd:
    """Return the source's end; `source` is its index at the target."""
    return LinkEnd(
        _words(signals, ACKED_WORD, link), _words(target, ARRIVED_WORD, source), _words(signals, OFFERED_WORD, link)
    )


def fetch_end(signals: Tensor, from_rank: Tensor, link: int, source: int) -> LinkEnd:
    """Return the target's end."""
    return LinkEnd(
        _words(signals, ARRIVED_WORD, source),
        _words(from_rank, ACKED_WORD, link),
        _words(signals, FETCHED_WORD, source),
    )


def _words(signals: Tensor, first: int, place: int) -> Tensor:
    start = first + place * LINK_BLOCKS
    return signals[start : start + LINK_BLOCKS]


def release_links(signals: Tensor) -> None:
    """Like `release_waits`, for links: make every count that this rank waits for look reached."""
    for awaited, counted, size in (
        (ARRIVED_WORD, FETCHED_WORD, FETCHED_WORD - ARRIVED_WORD),
        (ACKED_WORD, OFFERED_WORD, OFFERED_WORD - ACKED_WORD),
    ):
        signals[awaited : awaited + size].copy_(signals[counted : counted + size]).add_(FAR_AHEAD)


def offer_rows(x_TH: Tensor, slots_LN: Tensor, end: LinkEnd | None) -> None:
    """Copy rows into the next of `slots_LN` and signal. If `end` is None, use the first slot without a signal."""
    num_rows, width = x_TH.shape
    if not x_TH.numel():
        return
    _offer_kernel[(LINK_BLOCKS,)](
        x_TH, slots_LN, *(end or (None,) * 3), num_rows, width, x_TH.stride(0), *slots_LN.stride()[:1],
        slots_LN.shape[0],
        num_warps=4,
    )  # fmt: skip


def fetch_rows(slots_LN: Tensor, out_TH: Tensor, end: LinkEnd | None) -> Tensor:
    """Copy rows out of the source's next slot; rows of `out_TH` may lie apart."""
    num_rows, width = out_TH.shape
    if out_TH.numel():
        _fetch_kernel[(LINK_BLOCKS,)](
            slots_LN, out_TH, *(end or (None,) * 3), num_rows, width, out_TH.stride(0), *slots_LN.stride()[:1],
            slots_LN.shape[0],
            num_warps=4,
        )  # fmt: skip
    return out_TH


@jit
def _wait(p_awaited, count):
    """Wait until the other side's count reaches `count`."""
    p_word = (p_awaited + tl.program_id(0)).to(tl.int64)
    ahead = tl.inline_asm_elementwise(ACQUIRE_ASM, "=r,l", [p_word], tl.int32, is_pure=False, pack=1) - count
    num_polls = 0
    while (ahead < 0) & (num_polls < MAX_POLLS):
        ahead = tl.inline_asm_elementwise(ACQUIRE_ASM, "=r,l", [p_word], tl.int32, is_pure=False, pack=1) - count
        num_polls += 1
    if ahead < 0:
        tl.inline_asm_elementwise(TRAP_ASM, "=r", [], tl.int32, is_pure=False, pack=1)


@jit
def _signal(p_signaled, p_count, count):
    """Signal the other side after all threads are done, and store this side's count."""
    tl.debug_barrier()
    p_word = (p_signaled + tl.program_id(0)).to(tl.int64)
    tl.inline_asm_elementwise(RELEASE_ASM, "=r,l,r", [p_word, count], tl.int32, is_pure=False, pack=1)
    tl.store(p_count + tl.program_id(0), count)


@jit
def _copy_tiles(p_from, p_to, num_rows, width, from_stride, to_stride):
    """Copy this block's tiles, which are those of the same block on the other side."""
    num_tiles = tl.cdiv(width, TILE)
    for i_tile in range(tl.program_id(0), num_rows * num_tiles, tl.num_programs(0)):
        i_row = (i_tile // num_tiles).to(tl.int64)
        o_h = (i_tile % num_tiles) * TILE + tl.arange(0, TILE)
        b_h = tl.load(p_from + i_row * from_stride + o_h, mask=o_h < width)
        tl.store(p_to + i_row * to_stride + o_h, b_h, mask=o_h < width)


@jit_counting("num_rows")
def _offer_kernel(p_x, p_slots, p_awaited, p_signaled, p_count, num_rows, width, x_stride, slot_stride, num_slots):
    count = 0
    if p_count is not None:
        count = tl.load(p_count + tl.program_id(0))
        _wait(p_awaited, count + 1 - num_slots)
    p_slot = p_slots + (count % num_slots) * slot_stride
    _copy_tiles(p_x, p_slot, num_rows, width, x_stride, width)
    if p_count is not None:
        _signal(p_signaled, p_count, count + 1)


@jit_counting("num_rows")
def _fetch_kernel(p_slots, p_out, p_awaited, p_signaled, p_count, num_rows, width, out_stride, slot_stride, num_slots):
    count = 0
    if p_count is not None:
        count = tl.load(p_count + tl.program_id(0))
        _wait(p_awaited, count + 1)
    p_slot = p_slots + (count % num_slots) * slot_stride
    _copy_tiles(p_slot, p_out, num_rows, width, width, out_stride)
    if p_count is not None:
        _signal(p_signaled, p_count, count + 1)

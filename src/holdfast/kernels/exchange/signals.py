"""Signals between ranks: each block of a kernel tells the same block of every peer that it has come, and waits for theirs.

Each rank has SIGNAL words (int32, `exchange/signals`) that peers may write:

    flags    [MAX_BLOCKS, MAX_RANKS]  the last epoch that block b of rank r has come to; rank r writes it
    epochs   [MAX_BLOCKS]             the last epoch that block b of this rank has come to; only it reads and writes it

An epoch is how often a block has met its peers; all ranks make the same calls with as many blocks, so the same block has the same
epoch everywhere. It only grows, and in device memory, so that a replayed graph goes on where the last one stopped; numbers
may wrap, because only their difference is looked at: a peer is never more than one meeting ahead.

Why one meeting a call is enough, with two rooms in turn: a block meets its peers when all earlier kernels of its rank have ended. Call
k reads peers' room A. Who has met its peers in call k + 1 therefore knows that all of them have ended call k, and may write
room A again: that is where the part of call k + 2 goes. Kernels of a rank run one after the other in one stream.

What a kernel before this one has written is told by the release: stream order puts those writes before it. What this kernel itself has
written is told where all its threads stand at a barrier before the release. Peers read behind an acquire. Both are of
system scope: peers may be other GPUs.
"""

from torch import Tensor

from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

MAX_BLOCKS = 64
"""Of a kernel that waits: all of them must have a place beside those of peers on the same GPU, and leave some for what peers have to
do before they come."""
MAX_RANKS = 16
EPOCHS_WORD = MAX_BLOCKS * MAX_RANKS
TABLES_WORD = EPOCHS_WORD + MAX_BLOCKS
"""Behind the signals: int64 addresses, which only this rank reads; see distributed/symmetric.py."""

RANKS = kernel_constant(MAX_RANKS)
EPOCHS = kernel_constant(EPOCHS_WORD)
MAX_POLLS = kernel_constant(2**29)
"""Minutes: 22 on a GPU that others use too. Who waits longer has lost a peer that nobody else has missed, and must not go on with what lies in its room: a trap
ends every call of this process from here on."""
TRAP_ASM = kernel_constant("trap; mov.b32 $0, 0;")

ATOMIC, ASSEMBLER, RELAXED = range(3)
"""Ways to write a signal: an atomic exchange, a store with release, a store without.

Without is for measurements: a part that a kernel before this one wrote is in the L2 of its GPU by then, where peers read it, and others
rely on that; but nothing that PTX promises orders it at system scope, and no test on one GPU would find it late.
"""
IS_ATOMIC = kernel_constant(ATOMIC)
IS_RELAXED = kernel_constant(RELAXED)
# The block may be held several times over by the threads of a program: one warp stores.
RELEASE_ASM = kernel_constant(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; setp.ne.and.b32 p, $3, 0, p; "
    "@p st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }"
)
RELAXED_ASM = kernel_constant(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; setp.ne.and.b32 p, $3, 0, p; "
    "@p st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0; }"
)
ACQUIRE_ASM = kernel_constant("ld.acquire.sys.global.b32 $0, [$1];")


FAR_AHEAD = 2**30
"""Of calls: what an abandoned rank believes its peers to be."""


def release_waits(signals: Tensor) -> None:
    """Every block of this rank that waits, or will, finds its peers far ahead; in the current stream, without new memory."""
    flags = signals[:EPOCHS_WORD].view(MAX_BLOCKS, MAX_RANKS)
    flags.copy_(signals[EPOCHS_WORD : EPOCHS_WORD + MAX_BLOCKS].unsqueeze(1).expand_as(flags))
    flags.add_(FAR_AHEAD)


@jit
def begin_meeting(p_signals, p_peers, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    """Meet the same block of every peer once more; the epoch that this one has come to. 0 where there are no signals: nobody is met."""
    epoch = 0
    if p_signals is not None:
        epoch = tl.load(p_signals + EPOCHS + tl.program_id(0)) + 1
        meet_peers(p_signals, p_peers, epoch, rank, SIZE, WIDE_SIZE, FORM)
    return epoch


@jit
def end_meeting(p_signals, epoch):
    """Keep the epoch for the next kernel, once all threads have read the old one."""
    if p_signals is not None:
        tl.debug_barrier()
        tl.store(p_signals + EPOCHS + tl.program_id(0), epoch)


@jit
def meet_peers(p_signals, p_peers, epoch, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    """Tell this block of every peer that this one has come to `epoch`, and wait until they have; WIDE_SIZE: SIZE or more, a power of 2.

    `p_peers`: addresses of all ranks' signals.
    """
    i_block = tl.program_id(0)
    o_rank = tl.arange(0, WIDE_SIZE)
    m_peer = (o_rank < SIZE) & (o_rank != rank)
    b_theirs = tl.load(p_peers + o_rank, mask=m_peer, other=0) + (i_block * RANKS + rank).to(tl.int64) * 4
    b_epoch = tl.zeros([WIDE_SIZE], tl.int32) + epoch
    if FORM == IS_ATOMIC:
        p_theirs = b_theirs.to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(p_theirs, b_epoch, mask=m_peer, sem="release", scope="sys")
    elif FORM == IS_RELAXED:
        arguments = [b_theirs, b_epoch, m_peer.to(tl.int32)]
        tl.inline_asm_elementwise(RELAXED_ASM, "=r,l,r,r", arguments, tl.int32, is_pure=False, pack=1)
    else:
        arguments = [b_theirs, b_epoch, m_peer.to(tl.int32)]
        tl.inline_asm_elementwise(RELEASE_ASM, "=r,l,r,r", arguments, tl.int32, is_pure=False, pack=1)

    p_own = p_signals + i_block * RANKS + o_rank
    ahead = _least_ahead(p_own, epoch, m_peer, FORM)
    num_polls = 0
    while (ahead < 0) & (num_polls < MAX_POLLS):
        ahead = _least_ahead(p_own, epoch, m_peer, FORM)
        num_polls += 1
    if ahead < 0:
        tl.inline_asm_elementwise(TRAP_ASM, "=r", [], tl.int32, is_pure=False, pack=1)


@jit
def _least_ahead(p_own, epoch, m_peer, FORM: constexpr):
    """How far the last of all peers is ahead of this block; below 0: it has not come yet."""
    if FORM == IS_ATOMIC:
        b_flag = tl.atomic_add(p_own, 0, mask=m_peer, sem="acquire", scope="sys")
    else:
        b_flag = tl.inline_asm_elementwise(ACQUIRE_ASM, "=r,l", [p_own.to(tl.int64)], tl.int32, is_pure=False, pack=1)
    return tl.min(tl.where(m_peer, b_flag - epoch, 0), axis=0)

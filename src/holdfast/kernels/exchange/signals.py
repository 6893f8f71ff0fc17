"""Rendezvous of ranks: each block of a kernel signals the same block of every peer, and waits for theirs.

Each rank has SIGNAL words (int32, `exchange/signals`) that peers may write:

    flags    [MAX_BLOCKS, MAX_RANKS]  the last epoch that block b of rank r reached; rank r writes it
    epochs   [MAX_BLOCKS]             the last epoch that block b of this rank reached; private

An epoch counts the rendezvous of a block. All ranks make the same calls with as many blocks, so the same block has the same
epoch everywhere. It only grows and lives in device memory, so a replayed graph continues where the last one stopped. It may
wrap: only differences matter, and a peer is at most one rendezvous ahead.

One rendezvous per call is enough with two alternating buffers. A block arrives after all earlier kernels of its rank
ended. Call k reads the peers' buffer A. A rank that passed the rendezvous of call k + 1 knows that all peers ended call k,
so call k + 2 may write buffer A again. Kernels of a rank run one after the other in one stream.

The release publishes writes of earlier kernels, which stream order puts before it, and writes of this kernel before a
barrier of all its threads. Peers read after an acquire. Both have system scope: peers may be other GPUs.
"""

from torch import Tensor

from holdfast.kernels.triton_compat import constexpr, jit, kernel_constant, tl

MAX_BLOCKS = 64
"""Most blocks of a waiting kernel. They must be resident beside those of peers on the same GPU, with occupancy left for
the kernels that peers run before they arrive."""
MAX_RANKS = 16
EPOCHS_WORD = MAX_BLOCKS * MAX_RANKS
TABLES_WORD = EPOCHS_WORD + MAX_BLOCKS
"""First word after the signals: int64 addresses, which only this rank reads (distributed/symmetric.py)."""

RANKS = kernel_constant(MAX_RANKS)
EPOCHS = kernel_constant(EPOCHS_WORD)
MAX_POLLS = kernel_constant(2**29)
"""Most polls: about 22 minutes on a shared GPU. A longer wait means a lost peer, whose buffer must not be read, so the
kernel traps."""
TRAP_ASM = kernel_constant("trap; mov.b32 $0, 0;")

ATOMIC, ASSEMBLER, RELAXED = range(3)
"""Ways to write a signal: an atomic exchange, a store with release, a relaxed store.

The relaxed store is for measurements only: PTX does not order it at system scope, and no test on one GPU would notice.
"""
IS_ATOMIC = kernel_constant(ATOMIC)
IS_RELAXED = kernel_constant(RELAXED)
# Threads of a program may hold copies of the block: one warp stores.
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
"""Epochs that `release_waits` puts peers ahead, so that no block of an abandoned rank waits."""


def release_waits(signals: Tensor) -> None:
    """Set peers far ahead so that no block of this rank waits. Runs in the current stream, without new memory."""
    flags = signals[:EPOCHS_WORD].view(MAX_BLOCKS, MAX_RANKS)
    flags.copy_(signals[EPOCHS_WORD : EPOCHS_WORD + MAX_BLOCKS].unsqueeze(1).expand_as(flags))
    flags.add_(FAR_AHEAD)


@jit
def begin_rendezvous(p_signals, p_peers, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    """Wait for the same block of every peer, and return this block's epoch; without signals return 0."""
    epoch = 0
    if p_signals is not None:
        epoch = tl.load(p_signals + EPOCHS + tl.program_id(0)) + 1
        rendezvous(p_signals, p_peers, epoch, rank, SIZE, WIDE_SIZE, FORM)
    return epoch


@jit
def end_rendezvous(p_signals, epoch):
    """Store the epoch for the next kernel, after all threads have read the old one."""
    if p_signals is not None:
        tl.debug_barrier()
        tl.store(p_signals + EPOCHS + tl.program_id(0), epoch)


@jit
def rendezvous(p_signals, p_peers, epoch, rank, SIZE: constexpr, WIDE_SIZE: constexpr, FORM: constexpr):
    """Signal `epoch` to this block of every peer, and wait for theirs. WIDE_SIZE is SIZE rounded up to a power of two.

    `p_peers` holds addresses of all ranks' signals.
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
    """Return how many epochs the slowest peer is ahead of this block; negative until it arrives."""
    if FORM == IS_ATOMIC:
        b_flag = tl.atomic_add(p_own, 0, mask=m_peer, sem="acquire", scope="sys")
    else:
        b_flag = tl.inline_asm_elementwise(ACQUIRE_ASM, "=r,l", [p_own.to(tl.int64)], tl.int32, is_pure=False, pack=1)
    return tl.min(tl.where(m_peer, b_flag - epoch, 0), axis=0)

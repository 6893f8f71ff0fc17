"""Top-k tokens of each row by score (DSA): exact, batch invariant, on the device inside a graph.

T rows, C tokens of the longest context, K tokens that are taken, P chunks of a row, X items of a block

key        the bits of a score as an unsigned integer, smaller for larger scores; NaN is last, and -0 equals 0
near       tokens up to a limit key: at least K, at most a block

A program holds a block of keys in registers and finds the first K by radix selection: it counts keys by range in shared memory,
then the range with the K-th key by smaller ranges, until K are left. A row that fits a block takes one launch. For a longer
one, a program estimates a limit from a sample, and programs by chunk list the near tokens, which form the block. If the sample
was wrong, which the number of near tokens shows, a program goes through the whole row block by block, together with the tokens
selected so far. All ways give the same set.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.kernels.latent.top_k_geometry import MAX_CHUNKS, TOP_K_FORM, TopKForm, num_warps, top_k_specs
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.shared_words import (
    clear_words,
    count_words,
    gather,
    get_words,
    interpreter_buffer,
    put_words,
    scatter,
    shared_words,
)
from holdfast.kernels.triton_compat import (
    constexpr,
    is_interpreted,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    tl,
    wait_then_release,
)

NAN_KEY, NO_KEY = kernel_constant(0xFFFFFFFE), kernel_constant(0xFFFFFFFF)
BINS, LAST_BINS, WIDE_BINS = kernel_constant(0), kernel_constant(8192), kernel_constant(8448)
"""Words of two rounds with 4096 bins each, of a third with 256, and of sums of 64 bins: a warp finds a bin in two steps."""
NUM_BINS = kernel_constant(8704)
SHIFTS = kernel_constant(2048)
"""Words of chunks, after the bins are used."""


def top_k_tokens_reference(
    scores_TC: Tensor,
    rows: SparseRows,
    out_TK: Tensor,
    scratch: Mapping[str, Tensor] | None = None,
    form: TopKForm = TOP_K_FORM,
) -> Tensor:
    """Return int32 positions of each row's K largest scores among its first num_tokens_T, ascending, then -1.

    Ties go to the lower position. NaN counts as the lowest score, -0 as 0. Rows of at most K tokens take all of them,
    rows that select none have -1. `scratch`: the tensors of `top_k_specs` for at least these rows and tokens; plain
    torch needs none.
    """
    del scratch, form
    num_tokens_T1 = rows.num_tokens_T.unsqueeze(1)
    width, k = scores_TC.shape[1], out_TK.shape[1]
    position_C = torch.arange(width, device=scores_TC.device)
    m_unseen_TC = position_C >= num_tokens_T1
    # NaN, then tokens that a row does not see, rank below every number: all become -inf, and the rank orders them.
    rank_TC = scores_TC.isnan().to(torch.int8).masked_fill_(m_unseen_TC, 2)
    by_rank_TC = rank_TC.argsort(dim=1, stable=True)
    score_TC = scores_TC.masked_fill(rank_TC > 0, -torch.inf).gather(1, by_rank_TC)
    order_TC = by_rank_TC.gather(1, score_TC.argsort(dim=1, descending=True, stable=True))
    m_taken_K = torch.arange(min(k, width), device=scores_TC.device) < num_tokens_T1
    taken_TK = order_TC[:, :k].masked_fill(~m_taken_K, width).sort(dim=1).values
    out_TK.fill_(-1)
    out_TK[:, :width] = taken_TK.masked_fill_(taken_TK == width, -1)
    return out_TK


def top_k_tokens_triton(
    scores_TC: Tensor,
    rows: SparseRows,
    out_TK: Tensor,
    scratch: Mapping[str, Tensor] | None = None,
    form: TopKForm = TOP_K_FORM,
) -> Tensor:
    """Launch one Triton kernel if no row is long, else three."""
    assert scratch is not None, "top_k_tokens needs scratch on a GPU: pass the tensors of top_k_specs"
    _check(scores_TC, rows, out_TK, scratch, form)
    (num_rows, context), k = scores_TC.shape, out_TK.shape[1]
    if not num_rows:
        return out_TK
    block = form.block(k)
    is_long, num_chunks = context > block, -(-context // form.chunk_tokens)
    limits_T2, chunks_T2P, *near = (scratch[spec.name] for spec in top_k_specs(0, context, k, form))
    lengths = scores_TC, rows.num_tokens_T
    if is_long:
        sample = form.sample(context)
        _limit_kernel[(num_rows,)](
            *lengths, limits_T2, interpreter_buffer(num_rows, scores_TC), scores_TC.stride(0), context,
            WANTED=form.wanted(k), SAMPLE=sample, BLOCK=block, num_warps=num_warps(sample), **pdl_flags(scores_TC),
        )  # fmt: skip
        _filter_kernel[(num_rows, num_chunks)](
            *lengths, limits_T2, chunks_T2P, *near, scores_TC.stride(0), chunks_T2P.stride(0), chunks_T2P.stride(1),
            context,
            CHUNK=form.chunk_tokens, BLOCK=block, PLAIN=is_interpreted(),
            num_warps=num_warps(form.chunk_tokens), **pdl_flags(scores_TC),
        )  # fmt: skip
    held = block if is_long else max(256, next_power_of_two(context))
    _row_kernel[(num_rows,)](
        *lengths, limits_T2, chunks_T2P, *near, out_TK, interpreter_buffer(num_rows, scores_TC), scores_TC.stride(0),
        chunks_T2P.stride(0), chunks_T2P.stride(1), out_TK.stride(0), context,
        K=k, HAS_LONG=is_long, CHUNKS=max(32, next_power_of_two(num_chunks)), CHUNK=form.chunk_tokens, BLOCK=held,
        PLAIN=is_interpreted(), num_warps=num_warps(held), **pdl_flags(scores_TC),
    )  # fmt: skip
    return out_TK


top_k_tokens = operation(reference=top_k_tokens_reference, triton=top_k_tokens_triton)


def _check(scores_TC: Tensor, rows: SparseRows, out_TK: Tensor, scratch: Mapping[str, Tensor], form: TopKForm) -> None:
    (num_rows, context), k = scores_TC.shape, out_TK.shape[1]
    assert scores_TC.dtype == torch.float32, f"{scores_TC.dtype=}: scores must be float32"
    assert out_TK.dtype == torch.int32, f"{out_TK.dtype=}: positions must be int32"
    assert scores_TC.stride(1) == 1, f"{scores_TC.stride()=}: the scores of a row must lie side by side"
    assert out_TK.stride(1) == 1, f"{out_TK.stride()=}: the positions of a row must lie side by side"
    assert rows.num_tokens_T.shape == (num_rows,), f"{rows.num_tokens_T.shape=} must be a number a row"
    assert out_TK.shape[0] == num_rows, f"{out_TK.shape=} must have a row for each of {num_rows}"
    assert context <= MAX_CHUNKS * form.chunk_tokens, f"{context=}: a row has up to {MAX_CHUNKS} chunks"
    for name, (num_held, *shape), _ in top_k_specs(num_rows, context, k, form):
        held = scratch[name].shape
        assert num_held <= held[0], f"{num_rows=} exceeds the scratch for {held[0]} ({name})"
        # Tokens are listed without gaps between rows; kernels do not read the rest of a chunk.
        fits = held[-1] >= shape[-1] if name == "near chunks" else held[1:] == tuple(shape)
        assert fits or not num_held, f"{name}: scratch of {tuple(held)}, {context=} and {k=} need {(num_held, *shape)}"


@jit
def _keys(b_score, m_token):
    """Return uint32 keys, by integer operations only: a GPU may flush denormal numbers to zero."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_key = (tl.where(b_bits < 0, -b_size, b_bits) ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)
    b_key = tl.where(b_size > 0x7F800000, NAN_KEY, b_key)
    return tl.where(m_token, b_key, NO_KEY)


@jit
def _items(NUM_ITEMS: constexpr):
    """Return indices of items, 32 per row: a scan of a row stays within a warp."""
    return tl.arange(0, NUM_ITEMS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@jit
def _clear_bins(words):
    clear_words(words, tl.arange(0, LAST_BINS // 4))
    clear_words(words, tl.arange(0, (NUM_BINS - LAST_BINS) // 4) + LAST_BINS // 4)
    tl.debug_barrier()


@jit
def _find(words, first, num_before, needed):
    """Find which of 64 counts reaches `needed`; return it, the sum before it, and its own count."""
    o_pair = tl.arange(0, 32)
    b_left = get_words(words, 2 * o_pair + first)
    b_pair = b_left + get_words(words, 2 * o_pair + first + 1)
    m_before = num_before + tl.cumsum(b_pair, axis=0) < needed
    i_pair = tl.sum(m_before.to(tl.int32), axis=0)
    num_before += tl.sum(tl.where(m_before, b_pair, 0), axis=0)
    # Two counts in one integer: a block has fewer than 2**15 items.
    both = tl.sum(tl.where(o_pair == i_pair, b_left + (b_pair << 16), 0), axis=0)
    num_left, num_pair = both & 0xFFFF, both >> 16
    is_right = num_before + num_left < needed
    num_own = tl.where(is_right, num_pair - num_left, num_left)
    return 2 * i_pair + is_right.to(tl.int32), num_before + tl.where(is_right, num_left, 0), num_own


@jit
def _round(
    b_key, start, num_before, needed, words, BINS: constexpr, WIDE: constexpr, SHIFT: constexpr, BITS: constexpr
):
    """Find the bin from `start` on with the key of rank `needed`: its first key, and counts as in `_find`."""
    b_bin = (b_key - start) >> SHIFT
    m_bin = b_bin < 1 << BITS
    count_words(words, b_bin.to(tl.int32) + BINS, m_bin)
    count_words(words, (b_bin >> 6).to(tl.int32) + WIDE, m_bin)
    tl.debug_barrier()
    i_wide, num_before, _ = _find(words, WIDE, num_before, needed)
    i_bin, num_before, num_own = _find(words, 64 * i_wide + BINS, num_before, needed)
    return start + ((64 * i_wide + i_bin).to(tl.uint32) << SHIFT), num_before, num_own


@jit
def _narrow(b_key, needed, most, words):
    """Return (end, num_tied): `needed` to `most` keys are below `end`; or `needed` with the first `num_tied` ties.

    Bins must be clear.
    """
    start, num_before, num_own = _round(b_key, tl.full((), 0, tl.uint32), 0, needed, words, BINS, WIDE_BINS, 20, 12)
    end, num_tied = start + (1 << 20), 0
    if num_before + num_own > most:
        start, num_before, num_own = _round(b_key, start, num_before, needed, words, BINS + 4096, WIDE_BINS + 64, 8, 12)
        end = start + (1 << 8)
        if num_before + num_own > most:
            start, num_before, num_own = _round(
                b_key, start, num_before, needed, words, LAST_BINS, WIDE_BINS + 128, 0, 8
            )
            end = start + 1
            if num_before + num_own > most:
                end, num_tied = start, needed - num_before
    return end, num_tied


@jit
def _count(b_own):
    """Return counts up to and including each item, before each 32, and of all."""
    b_sum = tl.sum(b_own, axis=1)
    b_before = tl.cumsum(b_sum, axis=0) - b_sum
    return tl.cumsum(b_own, axis=1) + b_before[:, None], b_before, tl.sum(b_sum, axis=0)


@jit
def _bits(m_item):
    """Pack 32 items into a word."""
    b_bits = tl.sum(m_item.to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :], axis=1)
    return b_bits.to(tl.int32, bitcast=True)


@jit
def _num_bits(b_bits, o_bit):
    """Count the set bits below `o_bit`."""
    b_bits = b_bits.to(tl.uint32, bitcast=True)
    b_bits &= tl.where(o_bit < 32, (tl.full((), 1, tl.uint32) << (o_bit & 31).to(tl.uint32)) - 1, NO_KEY)
    b_bits -= (b_bits >> 1) & 0x55555555
    b_bits = (b_bits & 0x33333333) + ((b_bits >> 2) & 0x33333333)
    return ((((b_bits + (b_bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@jit
def _count_until(words, o_item, GROUPS: constexpr):
    """Count before an item, from the words of `_by_token`."""
    o_group = tl.minimum(o_item // 32, GROUPS - 1)
    o_bit = o_item - o_group * 32
    num_below = _num_bits(get_words(words, o_group + GROUPS), o_bit)
    num_equal = _num_bits(get_words(words, o_group + 2 * GROUPS), o_bit)
    return get_words(words, o_group) + num_below + (num_equal << 16)


@jit
def _by_token(
    m_below, m_equal, b_before, b_token, p_chunks, count_stride, num_chunks, words,
    CHUNKS: constexpr, CHUNK: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Return offsets that turn counts of a list into counts by token: chunks come in any order and ascend within."""
    o_group, o_chunk = tl.arange(0, BLOCK // 32), tl.arange(0, CHUNKS)
    tl.debug_barrier()
    put_words(words, o_group, b_before)
    put_words(words, o_group + BLOCK // 32, _bits(m_below))
    put_words(words, o_group + 2 * (BLOCK // 32), _bits(m_equal))
    tl.debug_barrier()
    b_first = tl.load(p_chunks + o_chunk, mask=o_chunk < num_chunks, other=0)
    b_num = tl.load(p_chunks + count_stride + o_chunk, mask=o_chunk < num_chunks, other=0)
    b_start = _count_until(words, b_first, BLOCK // 32)
    b_own = _count_until(words, b_first + b_num, BLOCK // 32) - b_start
    put_words(words, o_chunk + SHIFTS, tl.cumsum(b_own, axis=0) - b_own - b_start)
    tl.debug_barrier()
    return get_words(words, b_token // CHUNK + SHIFTS)


@jit_counting("p_num_tokens")
def _limit_kernel(
    p_scores, p_num_tokens, p_limits, p_words, score_stride, context,
    WANTED: constexpr, SAMPLE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    """Estimate the limit of a long row, a key with about WANTED tokens up to it; reset its near tokens."""
    i_row = tl.program_id(0).to(tl.int64)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    words = shared_words(p_words)
    wait_then_release(PDL)  # in this order: the next kernel may read the scores at once
    if num_tokens <= BLOCK:
        return
    # One random token of each SAMPLE-th of the row: a periodic pattern is neither missed nor always hit.
    o_part = tl.arange(0, SAMPLE).to(tl.uint32)
    o_any = (o_part * 2654435769) // SAMPLE
    o_token = tl.umulhi(o_part * (2**32 // SAMPLE) + o_any, num_tokens.to(tl.uint32)).to(tl.int32)
    b_key = _keys(tl.load(p_scores + i_row * score_stride + o_token), o_token >= 0)
    _clear_bins(words)
    needed = tl.maximum(WANTED * SAMPLE // num_tokens, 1)
    end, num_tied = _narrow(b_key, needed, needed + needed // 8, words)
    # The last near key; it wraps to 0 after the last of all.
    limit = tl.where(num_tied > 0, end, end - 1)
    tl.store(p_limits + i_row * 2, limit.to(tl.int32, bitcast=True))
    tl.store(p_limits + i_row * 2 + 1, 0)


@jit_counting("p_num_tokens")
def _filter_kernel(
    p_scores, p_num_tokens, p_limits, p_chunks, p_near_keys, p_near_tokens, score_stride, row_stride, count_stride,
    context,
    CHUNK: constexpr, BLOCK: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    """Append the near tokens of a chunk to the row's list and record where; chunks come in any order."""
    i_row = tl.program_id(0).to(tl.int64)
    # The last chunk first: programs in sequence, as in the interpreter, then list chunks out of order.
    i_chunk = tl.num_programs(1) - 1 - tl.program_id(1)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    is_seen = (num_tokens > BLOCK) & (i_chunk * CHUNK < num_tokens)
    o_token = i_chunk * CHUNK + _items(CHUNK)
    b_score = tl.load(p_scores + i_row * score_stride + o_token, mask=(o_token < context) & is_seen, other=0.0)
    wait_then_release(PDL)  # in this order: the next kernel may read the scores at once
    if not is_seen:
        return
    b_key = _keys(b_score, o_token < num_tokens)
    m_near = b_key <= tl.load(p_limits + i_row * 2).to(tl.uint32, bitcast=True)
    b_count, _, num_near = _count(m_near.to(tl.int32))
    first = tl.atomic_add(p_limits + i_row * 2 + 1, num_near, sem="relaxed")
    o_near = first + b_count - 1
    m_near = m_near & (o_near < BLOCK)
    scatter(p_near_keys + i_row * BLOCK, o_near, b_key.to(tl.int32, bitcast=True), m_near, PLAIN)
    scatter(p_near_tokens + i_row * BLOCK, o_near, o_token, m_near, PLAIN)
    p_chunk = p_chunks + i_row * row_stride + i_chunk
    tl.store(p_chunk, first)
    tl.store(p_chunk + count_stride, num_near)


@jit_counting("p_num_tokens", "p_out")
def _row_kernel(
    p_scores, p_num_tokens, p_limits, p_chunks, p_near_keys, p_near_tokens, p_out, p_words, score_stride, row_stride,
    count_stride, out_stride, context,
    K: constexpr, HAS_LONG: constexpr, CHUNKS: constexpr, CHUNK: constexpr, BLOCK: constexpr, PLAIN: constexpr,
    PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    words = shared_words(p_words)
    o_item = _items(BLOCK)
    p_scores += i_row * score_stride
    p_out += i_row * out_stride
    p_chunks += i_row * row_stride
    wait_then_release(PDL)  # in this order: the next kernel may read the scores at once
    if num_tokens <= K:
        for first in range(0, K, BLOCK):
            tl.store(
                p_out + first + o_item,
                tl.where(first + o_item < num_tokens, first + o_item, -1),
                mask=first + o_item < K,
            )
        return
    is_listed = False
    if HAS_LONG:
        num_near = 0
        if num_tokens > BLOCK:
            num_near = tl.load(p_limits + i_row * 2 + 1)
        is_listed = (num_near >= K) & (num_near <= BLOCK)
        if is_listed:
            m_item, m_load = o_item < num_near, o_item < (num_near + 31) // 32 * 32
            b_near = tl.load(p_near_keys + i_row * BLOCK + o_item, mask=m_load, other=0).to(tl.uint32, bitcast=True)
            b_token = tl.load(p_near_tokens + i_row * BLOCK + o_item, mask=m_load, other=0)
            b_key, b_token = tl.where(m_item, b_near, NO_KEY), tl.where(m_item, b_token, 0)
        else:
            b_key, b_token = _keys(tl.load(p_scores + o_item), o_item < num_tokens), o_item
    else:
        b_score = tl.load(p_scores + o_item, mask=o_item < context, other=0.0)
        b_key, b_token = _keys(b_score, o_item < num_tokens), o_item
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    first, is_open = BLOCK, num_tokens > K
    while is_open:
        _clear_bins(words)
        end, num_tied = _narrow(b_key, K, K, words)
        m_below, m_equal = b_key < end, b_key == end
        # Pack two counts in one integer.
        b_count, b_before, _ = _count(m_below.to(tl.int32) + (m_equal.to(tl.int32) << 16))
        if is_listed:
            b_count += _by_token(
                m_below, m_equal, b_before, b_token, p_chunks, count_stride, num_chunks, words, CHUNKS, CHUNK, BLOCK
            )
        num_equal = b_count >> 16
        b_place = (b_count & 0xFFFF) + tl.minimum(num_equal, num_tied) - 1
        scatter(p_out, b_place, b_token, m_below | (m_equal & (num_equal <= num_tied)), PLAIN)
        is_open = False
        if HAS_LONG:
            is_open = not is_listed
            if is_open:
                # Earlier positions come first, so a block ascends. Of equal keys the later one is not taken.
                tl.debug_barrier()
                is_better = 0
                while (first < num_tokens) & (is_better == 0):
                    b_token = tl.where(o_item < K, gather(p_out, o_item, o_item < K, PLAIN), first + o_item - K)
                    m_token = b_token < num_tokens
                    b_key = _keys(gather(p_scores, b_token, m_token, PLAIN).to(tl.float32, bitcast=True), m_token)
                    is_better = tl.max(tl.max(((b_key < end) & (o_item >= K)).to(tl.int32), axis=1), axis=0)
                    first += BLOCK - K
                is_open = is_better > 0
                tl.debug_barrier()

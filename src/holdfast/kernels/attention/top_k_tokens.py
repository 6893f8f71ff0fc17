"""The top-k tokens of each row by score (DSA), exact, the same set whatever the batch, on the device inside a graph.

T rows, C tokens of the longest context, K tokens that are taken, P chunks of a row, X room of a list

key        the bits of a score as an integer that sorts as scores do; NaN is the lowest, and -0 is 0
near       tokens from some key on, the limit: K of them or more, and not many more

A sample of a row tells a limit, which a program a row finds. Of a long row a program a chunk then lists the near tokens;
a short one is looked through by the program of the row. That finds the K among the near ones, by radix selection: keys are
counted by range, the range that holds the K-th again by smaller ones, until few enough are left. Where the sample has
misled, which the number of near tokens shows, the limit is found among all tokens of the row. Whatever way was taken, the
set is the same.
"""

from collections.abc import Mapping

import torch

from holdfast.kernels.attention.latent_planes import SparseRows
from holdfast.kernels.attention.top_k_geometry import (
    MAX_STRIDE,
    TOP_K_FORM,
    TopKForm,
    top_k_specs,
)
from holdfast.kernels.triton_compat import can_run, constexpr, jit, kernel_constant, next_power_of_two, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

LOWEST_KEY = kernel_constant(-(2**31))
LARGEST_STRIDE = kernel_constant(MAX_STRIDE)
BIN_BITS, NUM_BINS = kernel_constant(7), kernel_constant(2**7)
"""Of a round of counting: Triton counts by ballots, whose cost doubles with each bit more than this."""


def top_k_tokens(
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """int32 positions of the K largest scores of each row among its first num_tokens_T, rising; -1 behind them, and in rows that do not choose.

    Of equal scores the lower position is taken. A score that is NaN counts as the lowest, -0 as 0. Rows with up to K tokens take all.
    `scratch`: what `top_k_specs` lists, for as many rows and tokens or more; plain torch works without.
    """
    if can_run(scores_TC):
        assert scratch is not None, "top_k_tokens works in scratch on a GPU: pass the tensors that top_k_specs lists"
        return top_k_tokens_triton(scores_TC, rows, out_TK, scratch)
    return top_k_tokens_reference(scores_TC, rows, out_TK, scratch)


def top_k_tokens_reference(
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The same in plain torch, by stable sorts."""
    num_tokens_T1 = rows.num_tokens_T.unsqueeze(1)
    width, k = scores_TC.shape[1], out_TK.shape[1]
    position_C = torch.arange(width, device=scores_TC.device)
    m_unseen_TC = position_C >= num_tokens_T1
    # Below every number come NaN and then tokens that a row does not see, which are all taken for -inf and told apart by rank.
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
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
    form: TopKForm = TOP_K_FORM,
) -> torch.Tensor:
    """The same as one Triton kernel where no row is long, else as three."""
    _check(scores_TC, rows, out_TK, scratch, form)
    (num_rows, context), k = scores_TC.shape, out_TK.shape[1]
    limits_T4, chunks_T2P = scratch["near limits"], scratch["near chunks"]
    unsorted_TX, near_TX = scratch["unsorted tokens"], scratch["near tokens"]
    num_chunks, wanted, room = -(-context // form.chunk_tokens), form.wanted_tokens(k), form.room(k)
    if not num_rows:
        return out_TK
    lengths = scores_TC, rows.num_tokens_T
    if context > form.direct_tokens:
        _limit_kernel[(num_rows,)](
            *lengths,
            limits_T4,
            scores_TC.stride(0),
            context,
            WANTED=wanted,
            DIRECT=form.direct_tokens,
            SAMPLE=form.sample_tokens,
            BLOCK=form.block_items,
            num_warps=16,
        )
        _filter_kernel[(num_rows, num_chunks)](
            *lengths,
            limits_T4,
            chunks_T2P,
            unsorted_TX,
            scores_TC.stride(0),
            chunks_T2P.stride(0),
            chunks_T2P.stride(1),
            context,
            ROOM=room,
            DIRECT=form.direct_tokens,
            CHUNK=form.chunk_tokens,
            num_warps=8,
        )
    _row_kernel[(num_rows,)](
        *lengths,
        limits_T4,
        chunks_T2P,
        unsorted_TX,
        near_TX,
        out_TK,
        scores_TC.stride(0),
        chunks_T2P.stride(0),
        chunks_T2P.stride(1),
        out_TK.stride(0),
        context,
        K=k,
        WANTED=wanted,
        ROOM=room,
        HAS_LONG=context > form.direct_tokens,
        DIRECT=form.direct_tokens,
        SAMPLE=form.sample_tokens,
        CHUNK=form.chunk_tokens,
        CHUNKS=next_power_of_two(num_chunks),
        BLOCK=form.block_items,
        num_warps=16,
    )
    return out_TK


def _check(
    scores_TC: torch.Tensor,
    rows: SparseRows,
    out_TK: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
    form: TopKForm,
) -> None:
    (num_rows, context), k = scores_TC.shape, out_TK.shape[1]
    assert scores_TC.dtype == torch.float32, f"{scores_TC.dtype=}: scores must be float32"
    assert out_TK.dtype == torch.int32, f"{out_TK.dtype=}: positions must be int32"
    assert scores_TC.stride(1) == 1, f"{scores_TC.stride()=}: the scores of a row must lie side by side"
    assert out_TK.stride(1) == 1, f"{out_TK.stride()=}: the positions of a row must lie side by side"
    assert rows.num_tokens_T.shape == (num_rows,), f"{rows.num_tokens_T.shape=} must be a number a row"
    assert out_TK.shape[0] == num_rows, f"{out_TK.shape=} must have a row for each of {num_rows}"
    for name, (num_held, *shape), _ in top_k_specs(num_rows, context, k, form):
        held = scratch[name].shape
        assert num_held <= held[0], f"{num_rows=} exceeds the scratch for {held[0]} ({name})"
        # Tokens are listed without gaps between rows; what is left of chunks is not looked at.
        fits = held[-1] >= shape[-1] if name == "near chunks" else held[1:] == tuple(shape)
        assert fits or not num_held, f"{name}: scratch of {tuple(held)}, {context=} and {k=} need {(num_held, *shape)}"


@jit
def _keys(b_score):
    """uint32. In integers throughout, because a GPU may take denormal numbers for zero."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_key = tl.where(b_bits < 0, -b_size, b_bits)
    b_key = tl.where(b_size > 0x7F800000, LOWEST_KEY, b_key)
    return b_key.to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def _items(p_scores, p_list, o_item, num_items, IS_LISTED: constexpr):
    """Positions of items, whether there are such, and their keys. Items are the tokens of a row, or those of a list."""
    m_item = o_item < num_items
    b_position = tl.load(p_list + o_item, mask=m_item, other=0) if IS_LISTED else o_item
    return b_position, m_item, _keys(tl.load(p_scores + b_position, mask=m_item, other=0.0))


@jit
def _narrow(
    p_scores,
    p_list,
    num_items,
    stride,
    needed,
    most,
    IS_LISTED: constexpr,
    BLOCK: constexpr,
):
    """(start, num_tied): `needed` to `most` of the items have a key above `start`, or are among the first so many that have it.

    Of `num_items` every stride-th is looked at, and `needed` and `most` are of these.
    """
    num_looked = (num_items + stride - 1) // stride
    o_block = tl.arange(0, BLOCK)
    b_least = tl.full((BLOCK,), 0xFFFFFFFF, tl.uint32)
    b_largest = tl.zeros((BLOCK,), tl.uint32)
    for first in range(0, num_looked, BLOCK):
        _, m_item, b_key = _items(p_scores, p_list, (first + o_block) * stride, num_items, IS_LISTED)
        b_least = tl.where(m_item & (b_key < b_least), b_key, b_least)
        b_largest = tl.where(m_item & (b_key > b_largest), b_key, b_largest)
    start, end = tl.min(b_least, axis=0), tl.max(b_largest, axis=0)
    num_bits = tl.sum((((end - start) >> tl.arange(0, 32).to(tl.uint32)) != 0).to(tl.int32), axis=0)
    shift = tl.maximum(num_bits - BIN_BITS, 0)
    o_bin = tl.arange(0, NUM_BINS)
    num_above, num_reached = 0, num_looked
    is_open = num_looked > most
    while is_open:
        b_count = tl.zeros((NUM_BINS,), tl.int32)
        for first in range(0, num_looked, BLOCK):
            _, m_item, b_key = _items(p_scores, p_list, (first + o_block) * stride, num_items, IS_LISTED)
            m_item = m_item & (b_key >= start) & (b_key <= end)
            b_bin = tl.where(m_item, (b_key - start) >> shift.to(tl.uint32), 0).to(tl.int32)
            b_count += tl.histogram(b_bin, NUM_BINS, mask=m_item)
        b_reached = num_above + tl.cumsum(b_count, axis=0, reverse=True)
        # Bins from which on there are enough come first: the last of them is taken, and the first where there is none.
        m_enough = (b_reached >= needed) | (o_bin == 0)
        i_bin = tl.sum(m_enough.to(tl.int32), axis=0) - 1
        num_reached = tl.min(tl.where(m_enough, b_reached, num_looked), axis=0)
        num_above = tl.maximum(tl.max(tl.where(m_enough, 0, b_reached), axis=0), num_above)
        start += i_bin.to(tl.uint32) << shift.to(tl.uint32)
        end = start + tl.minimum(end - start, (tl.full((), 1, tl.uint32) << shift.to(tl.uint32)) - 1)
        is_open = (num_reached > most) & (shift > 0)
        shift = tl.maximum(shift - BIN_BITS, 0)
    return start, tl.where(num_reached > most, needed - num_above, num_items)


@jit
def _list(
    p_scores,
    p_list,
    num_items,
    start,
    num_tied,
    p_out,
    room,
    IS_LISTED: constexpr,
    BLOCK: constexpr,
):
    """How many items have a key above `start`, or are among the first `num_tied` that have it; their positions, as far as there is room."""
    num_above, num_equal = 0, 0
    for first in range(0, num_items, BLOCK):
        o_item = first + tl.arange(0, BLOCK)
        b_position, m_item, b_key = _items(p_scores, p_list, o_item, num_items, IS_LISTED)
        m_above, m_equal = m_item & (b_key > start), m_item & (b_key == start)
        # Two counts in one integer: a block has fewer than 2**15 items.
        b_both = m_above.to(tl.int32) + (m_equal.to(tl.int32) << 16)
        b_sum = tl.cumsum(b_both, axis=0)
        b_equal = num_equal + (b_sum >> 16)
        o_out = num_above + (b_sum & 0xFFFF) + tl.minimum(b_equal, num_tied) - 1
        m_out = (m_above | (m_equal & (b_equal <= num_tied))) & (o_out < room)
        tl.store(p_out + o_out, b_position, mask=m_out)
        both = tl.sum(b_both, axis=0)
        num_above += both & 0xFFFF
        num_equal += both >> 16
    # What other threads of the program wrote is read next.
    tl.debug_barrier()
    return num_above + tl.minimum(num_equal, num_tied)


@jit
def _sampled_limit(p_scores, num_tokens, WANTED: constexpr, SAMPLE: constexpr, BLOCK: constexpr):
    """A key from which on there are about WANTED tokens."""
    stride = tl.minimum(tl.maximum(num_tokens // SAMPLE, 1), LARGEST_STRIDE)
    needed = tl.minimum(WANTED // stride, num_tokens // stride)
    limit, _ = _narrow(p_scores, p_scores, num_tokens, stride, needed, needed + needed // 32, False, BLOCK)
    return limit


@jit
def _limit_kernel(
    p_scores,
    p_num_tokens,
    p_limits,
    score_stride,
    context,
    WANTED: constexpr,
    DIRECT: constexpr,
    SAMPLE: constexpr,
    BLOCK: constexpr,
):
    """The limit of a long row, and no near tokens as yet."""
    i_row = tl.program_id(0).to(tl.int64)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    if num_tokens <= DIRECT:
        return
    limit = _sampled_limit(p_scores + i_row * score_stride, num_tokens, WANTED, SAMPLE, BLOCK)
    p_limit = p_limits + i_row * 4
    tl.store(p_limit, limit.to(tl.int32, bitcast=True))
    tl.store(p_limit + 1, 0)
    tl.store(p_limit + 2, 0)


@jit
def _filter_kernel(
    p_scores,
    p_num_tokens,
    p_limits,
    p_chunks,
    p_unsorted,
    score_stride,
    row_stride,
    count_stride,
    context,
    ROOM: constexpr,
    DIRECT: constexpr,
    CHUNK: constexpr,
):
    """The near tokens of a chunk, in the next free places of the row, and which these are: chunks come in any order."""
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    if (num_tokens <= DIRECT) | (i_chunk * CHUNK >= num_tokens):
        return
    p_limit = p_limits + i_row * 4
    limit = tl.load(p_limit).to(tl.uint32, bitcast=True)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < num_tokens
    b_key = _keys(tl.load(p_scores + i_row * score_stride + o_token, mask=m_token, other=0.0))
    m_near = m_token & (b_key >= limit)
    o_near = tl.cumsum(m_near.to(tl.int32), axis=0) - 1
    num_near = tl.sum(m_near.to(tl.int32), axis=0)
    num_equal = tl.sum((m_token & (b_key == limit)).to(tl.int32), axis=0)
    first = 0
    if num_near > 0:
        first = tl.atomic_add(p_limit + 1, num_near, sem="relaxed")
        tl.atomic_add(p_limit + 2, num_equal, sem="relaxed")
    o_near += first
    tl.store(p_unsorted + i_row * ROOM + o_near, o_token, mask=m_near & (o_near < ROOM))
    p_chunk = p_chunks + i_row * row_stride + i_chunk
    tl.store(p_chunk, first)
    tl.store(p_chunk + count_stride, num_near)


@jit
def _sort(
    p_unsorted,
    p_chunks,
    count_stride,
    num_near,
    num_chunks,
    p_near,
    CHUNK: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
):
    """The near tokens of all chunks in rising order: within a chunk they are."""
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    b_first = tl.load(p_chunks + o_chunk, mask=m_chunk, other=0)
    b_count = tl.load(p_chunks + count_stride + o_chunk, mask=m_chunk, other=0)
    tl.debug_barrier()
    tl.store(p_chunks + o_chunk, tl.cumsum(b_count, axis=0) - b_count - b_first, mask=m_chunk)
    tl.debug_barrier()
    for first in range(0, num_near, BLOCK):
        o_near = first + tl.arange(0, BLOCK)
        m_near = o_near < num_near
        b_token = tl.load(p_unsorted + o_near, mask=m_near, other=0)
        b_shift = tl.load(p_chunks + b_token // CHUNK, mask=m_near, other=0)
        tl.store(p_near + o_near + b_shift, b_token, mask=m_near)
    tl.debug_barrier()


@jit
def _row_kernel(
    p_scores,
    p_num_tokens,
    p_limits,
    p_chunks,
    p_unsorted,
    p_near,
    p_out,
    score_stride,
    row_stride,
    count_stride,
    out_stride,
    context,
    K: constexpr,
    WANTED: constexpr,
    ROOM: constexpr,
    HAS_LONG: constexpr,
    DIRECT: constexpr,
    SAMPLE: constexpr,
    CHUNK: constexpr,
    CHUNKS: constexpr,
    BLOCK: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    p_scores += i_row * score_stride
    p_near += i_row * ROOM
    p_out += i_row * out_stride
    if num_tokens <= K:
        for first in range(0, K, BLOCK):
            o_out = first + tl.arange(0, BLOCK)
            tl.store(p_out + o_out, tl.where(o_out < num_tokens, o_out, -1), mask=o_out < K)
        return
    if HAS_LONG & (num_tokens > DIRECT):
        p_limit = p_limits + i_row * 4
        limit = tl.load(p_limit).to(tl.uint32, bitcast=True)
        num_near, num_equal = tl.load(p_limit + 1), tl.load(p_limit + 2)
        is_listed = (num_near >= K) & (num_near <= ROOM)
    else:
        limit = _sampled_limit(p_scores, num_tokens, WANTED, SAMPLE, BLOCK)
        num_near = _list(p_scores, p_scores, num_tokens, limit, num_tokens, p_near, ROOM, False, BLOCK)
        num_equal = 0
        is_listed = (num_near >= K) & (num_near <= ROOM)
    if is_listed:
        if HAS_LONG & (num_tokens > DIRECT):
            num_chunks = (num_tokens + CHUNK - 1) // CHUNK
            p_unsorted += i_row * ROOM
            p_chunks += i_row * row_stride
            _sort(p_unsorted, p_chunks, count_stride, num_near, num_chunks, p_near, CHUNK, CHUNKS, BLOCK)
    else:
        num_tied = K - (num_near - num_equal)
        # Where the limit itself is the key of the K-th, as with many equal scores, it need not be looked for.
        if (num_near < K) | (num_tied <= 0):
            limit, num_tied = _narrow(p_scores, p_scores, num_tokens, 1, K, ROOM, False, BLOCK)
        num_near = _list(p_scores, p_scores, num_tokens, limit, num_tied, p_near, ROOM, False, BLOCK)
    limit, num_tied = _narrow(p_scores, p_near, num_near, 1, K, K, True, BLOCK)
    _list(p_scores, p_near, num_near, limit, num_tied, p_out, K, True, BLOCK)

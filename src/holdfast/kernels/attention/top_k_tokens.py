"""The top-k tokens of each row by score (DSA), exact, the same set whatever the batch, on the device inside a graph.

T rows, C tokens of the longest context, K tokens that are taken, G groups of neighbouring tokens, X room of a list

key        the bits of a score as an integer that sorts as scores do; NaN is the lowest, and -0 is 0
near       tokens from some key on: K of them or more, and not many more

A program a chunk finds the largest key of each group (top_k_geometry.py). Then a program a row narrows the groups down to
the K with the largest keys, their tokens to the near ones, and these to the K. To narrow is to count keys by range (radix
selection), the range that holds the K-th again by smaller ones, until few enough are left. How many are too many differs:
groups and near tokens have room to spare, so that a sample tells a limit that mostly serves, and one pass over all of them
lists and counts; where it does not serve they are counted exactly. Whatever way was taken, the set is the same.
"""

from collections.abc import Mapping

import torch

from holdfast.kernels.attention.index_planes import SparseRows
from holdfast.kernels.attention.top_k_geometry import TopKForm, most_near_tokens, most_taken_groups, top_k_form
from holdfast.kernels.triton_compat import can_run, constexpr, jit, kernel_constant, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

LOWEST_KEY = kernel_constant(-(2**31))
"""As it is stored: an int32."""
BIN_BITS, NUM_BINS = kernel_constant(7), kernel_constant(2**7)
"""Of a round of counting: Triton counts by ballots, whose cost doubles with each bit more than this."""
SAMPLE_STRIDE = kernel_constant(8)
"""Every so manieth item is sampled."""


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
    form: TopKForm | None = None,
) -> torch.Tensor:
    """The same as one Triton kernel where rows are short, as two where they have groups."""
    (num_rows, context), k = scores_TC.shape, out_TK.shape[1]
    form = form or top_k_form(context, k)
    keys_TG, taken_TX, near_TX = scratch["group keys"], scratch["taken groups"], scratch["near tokens"]
    _check(scores_TC, rows, out_TK, scratch, form)
    if not num_rows:
        return out_TK
    if form.group_tokens > 1:
        _group_kernel[(num_rows, -(-context // form.chunk_tokens))](
            scores_TC,
            rows.num_tokens_T,
            keys_TG,
            scores_TC.stride(0),
            keys_TG.stride(0),
            context,
            K=k,
            GROUP=form.group_tokens,
            GROUPS=form.chunk_tokens // form.group_tokens,
            num_warps=4,
        )
    _row_kernel[(num_rows,)](
        scores_TC,
        rows.num_tokens_T,
        keys_TG,
        taken_TX,
        near_TX,
        out_TK,
        scores_TC.stride(0),
        keys_TG.stride(0),
        taken_TX.stride(0),
        near_TX.stride(0),
        out_TK.stride(0),
        context,
        K=k,
        MOST_GROUPS=most_taken_groups(k),
        MOST_NEAR=most_near_tokens(k),
        GROUP=form.group_tokens,
        BLOCK=form.block_items,
        SMALL_BLOCK=form.small_block_items,
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
    wanted = {"near tokens": most_near_tokens(k)}
    if form.group_tokens > 1:
        wanted |= {"group keys": -(-context // form.group_tokens), "taken groups": most_taken_groups(k)}
    for name, width in wanted.items():
        held = scratch[name].shape
        assert num_rows <= held[0], f"{num_rows=} exceeds the scratch for {held[0]} ({name})"
        assert width <= held[1], f"{width} {name} exceed the scratch for {held[1]}: declare {context=} and {k=}"


@jit
def _keys(b_score):
    """int32. In integers throughout, because a GPU may take denormal numbers for zero."""
    b_bits = b_score.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    b_key = tl.where(b_bits < 0, -b_size, b_bits)
    return tl.where(b_size > 0x7F800000, LOWEST_KEY, b_key)


@jit
def _group_kernel(
    p_scores,
    p_num_tokens,
    p_keys,
    score_stride,
    key_stride,
    context,
    K: constexpr,
    GROUP: constexpr,
    GROUPS: constexpr,
):
    """The largest key of each group of a chunk, in rows that have more than K groups."""
    i_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    num_groups = (num_tokens + GROUP - 1) // GROUP
    if (num_groups <= K) | (first >= num_groups):
        return
    o_group = first + tl.arange(0, GROUPS)
    o_token = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_score = tl.load(p_scores + i_row * score_stride + o_token, mask=o_token < num_tokens, other=float("nan"))
    b_largest = tl.max(_keys(b_score), axis=1)
    tl.store(p_keys + i_row * key_stride + o_group, b_largest, mask=o_group < num_groups)


@jit
def _items(
    p_values,
    p_list,
    o_item,
    num_items,
    num_values,
    ARE_KEYS: constexpr,
    IS_LISTED: constexpr,
    GROUP: constexpr,
):
    """Positions of items, whether there is something at them, and their keys as uint32.

    Items are values one after the other, or the values of groups that are listed.
    """
    m_item = o_item < num_items
    if IS_LISTED:
        b_group = tl.load(p_list + o_item // GROUP, mask=m_item, other=0)
        b_position = b_group * GROUP + o_item % GROUP
    else:
        b_position = o_item
    m_item = m_item & (b_position < num_values)
    if ARE_KEYS:
        b_key = tl.load(p_values + b_position, mask=m_item, other=LOWEST_KEY)
    else:
        b_key = _keys(tl.load(p_values + b_position, mask=m_item, other=0.0))
    return b_position, m_item, b_key.to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def _narrow(
    p_values,
    p_list,
    num_items,
    num_values,
    needed,
    most,
    ARE_KEYS: constexpr,
    IS_LISTED: constexpr,
    GROUP: constexpr,
    STRIDE: constexpr,
    BLOCK: constexpr,
):
    """(start, num_tied): `needed` to `most` of the items have a key above `start`, or are among the first so many that have it.

    Of `num_items` every STRIDE-th is looked at, and `needed` and `most` are of these.
    """
    num_looked = (num_items + STRIDE - 1) // STRIDE
    o_block = tl.arange(0, BLOCK)
    b_least = tl.full((BLOCK,), 0xFFFFFFFF, tl.uint32)
    b_largest = tl.zeros((BLOCK,), tl.uint32)
    for first in range(0, num_looked, BLOCK):
        _, m_item, b_key = _items(
            p_values, p_list, (first + o_block) * STRIDE, num_items, num_values, ARE_KEYS, IS_LISTED, GROUP
        )
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
            _, m_item, b_key = _items(
                p_values, p_list, (first + o_block) * STRIDE, num_items, num_values, ARE_KEYS, IS_LISTED, GROUP
            )
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
    p_values,
    p_list,
    num_items,
    num_values,
    start,
    num_tied,
    p_out,
    room,
    ARE_KEYS: constexpr,
    IS_LISTED: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
):
    """How many items have a key above `start`, or are among the first `num_tied` that have it; their positions, as far as there is room."""
    num_above, num_equal = 0, 0
    for first in range(0, num_items, BLOCK):
        o_item = first + tl.arange(0, BLOCK)
        b_position, m_item, b_key = _items(p_values, p_list, o_item, num_items, num_values, ARE_KEYS, IS_LISTED, GROUP)
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
def _near(
    p_values,
    p_list,
    num_items,
    num_values,
    p_out,
    NEEDED: constexpr,
    ROOM: constexpr,
    ARE_KEYS: constexpr,
    IS_LISTED: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
    SMALL_BLOCK: constexpr,
):
    """The positions of the NEEDED items with the largest keys among those of up to ROOM, by a sample or, where it misleads, by all."""
    needed = tl.minimum((NEEDED + ROOM) // 2 // SAMPLE_STRIDE + 1, num_items // SAMPLE_STRIDE)
    most = needed + needed // 32
    start, _ = _narrow(
        p_values, p_list, num_items, num_values, needed, most, ARE_KEYS, IS_LISTED, GROUP, SAMPLE_STRIDE, SMALL_BLOCK
    )
    count = _list(
        p_values, p_list, num_items, num_values, start, num_items, p_out, ROOM, ARE_KEYS, IS_LISTED, GROUP, BLOCK
    )
    if (count < NEEDED) | (count > ROOM):
        start, num_tied = _narrow(
            p_values, p_list, num_items, num_values, NEEDED, ROOM, ARE_KEYS, IS_LISTED, GROUP, 1, BLOCK
        )
        count = _list(
            p_values, p_list, num_items, num_values, start, num_tied, p_out, ROOM, ARE_KEYS, IS_LISTED, GROUP, BLOCK
        )
    return count


@jit
def _row_kernel(
    p_scores,
    p_num_tokens,
    p_keys,
    p_taken,
    p_near,
    p_out,
    score_stride,
    key_stride,
    taken_stride,
    near_stride,
    out_stride,
    context,
    K: constexpr,
    MOST_GROUPS: constexpr,
    MOST_NEAR: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
    SMALL_BLOCK: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    num_tokens = tl.minimum(tl.load(p_num_tokens + i_row), context)
    p_scores += i_row * score_stride
    p_near += i_row * near_stride
    p_out += i_row * out_stride
    if num_tokens <= K:
        for first in range(0, K, BLOCK):
            o_out = first + tl.arange(0, BLOCK)
            tl.store(p_out + o_out, tl.where(o_out < num_tokens, o_out, -1), mask=o_out < K)
        return
    num_groups = (num_tokens + GROUP - 1) // GROUP
    if (GROUP > 1) & (num_groups > K):
        p_keys += i_row * key_stride
        p_taken += i_row * taken_stride
        num_taken = _near(
            p_keys, p_keys, num_groups, num_groups, p_taken, K, MOST_GROUPS, True, False, 1, BLOCK, SMALL_BLOCK
        )
        num_items = num_taken * GROUP
        num_near = _near(
            p_scores, p_taken, num_items, num_tokens, p_near, K, MOST_NEAR, False, True, GROUP, BLOCK, SMALL_BLOCK
        )
    else:
        num_near = _near(
            p_scores, p_scores, num_tokens, num_tokens, p_near, K, MOST_NEAR, False, False, 1, BLOCK, SMALL_BLOCK
        )
    start, num_tied = _narrow(p_scores, p_near, num_near, num_tokens, K, K, False, True, 1, 1, SMALL_BLOCK)
    _list(p_scores, p_near, num_near, num_tokens, start, num_tied, p_out, K, False, True, 1, SMALL_BLOCK)

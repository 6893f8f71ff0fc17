"""Sampling: one random token per row by temperature, min_p, top_k and top_p.

X rows of logits, S rows of a step, R rows of a table, F fields, V vocabulary

Tokens are ordered by probability, and by id among equals. top_k keeps the first k; top_p keeps as many of those as reach
its share of their weight. The token is looked up among the kept weights in vocabulary order. All sums are of integers, so
a row gives the same token whatever else is in the batch.
"""

import torch
from torch import Tensor

from holdfast.kernels.geometry import NO_TOKEN, NUM_FIELDS, LogitRow, num_chunks
from holdfast.kernels.operation import operation
from holdfast.kernels.sampling.argmax import LogitScratch
from holdfast.kernels.sampling.candidates import (
    distances,
    keys,
    largest_logit,
    list_near_tokens,
    nucleus_weight,
    reference_distances,
    reference_weights,
    weights,
)
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl

ROW_TILE = 2048
"""Tokens read at a time from a row without a list."""
NUM_WAYS = 8
"""Factor by which each pass over such a row narrows the range of its cutoff."""


def sample_tokens_reference(
    logits_XV: Tensor, argmax_X: Tensor, rows_RF: Tensor, raw_argmax_S: Tensor, chosen_S: Tensor, scratch: LogitScratch
) -> None:
    """chosen[target] = a token of logits[source] for each row of the table; a temperature of 0 takes the argmax.

    The token is NO_TOKEN if the argmax, here or of the raw logits, is. Other elements of `chosen` do not change.
    """
    for fields in rows_RF.tolist():
        row = LogitRow(*fields)._replace(source=int(fields[0]), target=int(fields[1]), top_k=int(fields[5]))
        top_token = int(argmax_X[row.source])
        if top_token == NO_TOKEN or raw_argmax_S[row.target] == NO_TOKEN:
            chosen_S[row.target] = NO_TOKEN
        elif row.negative_temperature == 0.0:
            chosen_S[row.target] = top_token
        else:
            chosen_S[row.target] = _reference_choice(reference_distances(logits_XV[row.source], top_token), row)


def _reference_choice(distance_V: Tensor, row: LogitRow) -> int:
    weight_V = reference_weights(distance_V, row.negative_temperature, row.min_p)
    order_V = distance_V.argsort(stable=True)
    if row.top_k:
        weight_V[order_V[row.top_k :]] = 0
    if row.top_p < 1.0:
        total = int(weight_V.sum())
        needed = torch.tensor(float(total) * row.top_p, dtype=torch.float64).ceil().to(torch.int64).clamp(1, total)
        sorted_V = weight_V[order_V]
        weight_V[order_V[sorted_V.cumsum(0) - sorted_V >= needed.to(sorted_V.device)]] = 0
    running_V = weight_V.cumsum(0)
    total = int(running_V[-1])
    return int((running_V <= min(int(float(total) * row.uniform), total - 1)).sum())


def sample_tokens_triton(
    logits_XV: Tensor, argmax_X: Tensor, rows_RF: Tensor, raw_argmax_S: Tensor, chosen_S: Tensor, scratch: LogitScratch
) -> None:
    """Launch two passes over each row by many programs, then one program per row."""
    num_rows, vocab_size = rows_RF.shape[0], logits_XV.shape[1]
    if not num_rows:
        return
    list_near_tokens(logits_XV, argmax_X, rows_RF, None, scratch)
    chunks = num_chunks(vocab_size, scratch.chunk_tokens)
    max_listed = scratch.listed_ids_RC.shape[1]
    _choose_kernel[(num_rows,)](
        logits_XV, argmax_X, rows_RF, raw_argmax_S, chosen_S, scratch.chunk_weights_RP, scratch.num_listed_R,
        scratch.listed_logits_RC, scratch.listed_ids_RC, logits_XV.stride(0), vocab_size, chunks, max_listed,
        NO_TOKEN=NO_TOKEN, FIELDS=NUM_FIELDS, LISTED=next_power_of_two(max_listed), CHUNKS=next_power_of_two(chunks),
        CHUNK=scratch.chunk_tokens, TILE=ROW_TILE, WAYS=NUM_WAYS, num_warps=16,
    )  # fmt: skip


sample_tokens = operation(reference=sample_tokens_reference, triton=sample_tokens_triton)


@jit
def _choose_kernel(
    p_logits, p_argmax, p_rows, p_raw_argmax, p_chosen, p_weights, p_num_listed, p_listed_logits, p_listed_ids,
    row_stride, vocab_size, num_chunks, max_listed,
    NO_TOKEN: constexpr, FIELDS: constexpr, LISTED: constexpr, CHUNKS: constexpr, CHUNK: constexpr, TILE: constexpr,
    WAYS: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_rows + i_row * FIELDS
    source = tl.load(p_row).to(tl.int64)
    target = tl.load(p_row + 1).to(tl.int64)
    negative_temperature = tl.load(p_row + 2).to(tl.float32)
    min_p = tl.load(p_row + 3).to(tl.float32)
    top_p = tl.load(p_row + 4)
    top_k = tl.load(p_row + 5).to(tl.int32)
    uniform = tl.load(p_row + 6)
    top_token = tl.load(p_argmax + source)
    # An edit may hide the only NaN of a row, so check the raw logits too.
    top_token = tl.where(tl.load(p_raw_argmax + target) == NO_TOKEN, NO_TOKEN, top_token)
    if (top_token == NO_TOKEN) | (negative_temperature == 0.0):
        tl.store(p_chosen + target, top_token)
        return
    p_source = p_logits + source * row_stride
    largest = largest_logit(p_source, top_token)
    b_chunk_weight = _chunk_weights(p_weights + i_row * num_chunks, num_chunks, CHUNKS)
    total = tl.sum(b_chunk_weight, axis=0)
    token = -1
    if (top_p < 1.0) | (top_k > 0):
        num_listed = tl.load(p_num_listed + i_row)
        if num_listed >= 0:
            token = _choose_listed(
                p_listed_logits + i_row * max_listed, p_listed_ids + i_row * max_listed, num_listed, largest,
                negative_temperature, min_p, top_p, top_k, uniform, total, LISTED,
            )  # fmt: skip
        if token < 0:
            token = _choose_filtered(
                p_source, vocab_size, largest, negative_temperature, min_p, top_p, top_k, uniform, total, TILE, WAYS
            )
    else:
        looked_for = _looked_for(total, uniform)
        b_running = tl.cumsum(b_chunk_weight, axis=0)
        i_chunk = tl.sum((b_running <= looked_for).to(tl.int32), axis=0)
        looked_for -= tl.sum(tl.where(tl.arange(0, CHUNKS) < i_chunk, b_chunk_weight, 0), axis=0)
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        b_logits = tl.load(p_source + o_token, mask=o_token < vocab_size, other=float("-inf"))
        b_weight = weights(distances(b_logits, largest), negative_temperature, min_p)
        token = i_chunk * CHUNK + tl.sum((tl.cumsum(b_weight, axis=0) <= looked_for).to(tl.int32), axis=0)
    tl.store(p_chosen + target, tl.cast(token, tl.int64))


@jit
def _chunk_weights(p_weights, num_chunks, CHUNKS: constexpr):
    o_chunk = tl.arange(0, CHUNKS)
    return tl.load(p_weights + o_chunk, mask=o_chunk < num_chunks, other=0)


@jit
def _looked_for(total, uniform):
    """Return the weight to search for: the chosen token's running total is the first above it."""
    return tl.minimum((total.to(tl.float64) * uniform).to(tl.int64), total - 1)


@jit
def _choose_listed(
    p_logits, p_ids, num_listed, largest, negative_temperature, min_p, top_p, top_k, uniform, total, LISTED: constexpr
):
    """Choose from the list of a row; return -1 if the list is too short for top_p."""
    o_listed = tl.arange(0, LISTED)
    m_listed = o_listed < num_listed
    b_distance = distances(tl.load(p_logits + o_listed, mask=m_listed, other=float("-inf")), largest)
    b_key = tl.where(m_listed, keys(b_distance), 0x7FFFFFFF)
    b_weight = weights(b_distance, negative_temperature, min_p)
    if top_k > 0:
        b_one = m_listed.to(tl.int64)
        last_key = _last_key(b_key, b_one, top_k.to(tl.int64))
        num_ties = top_k - tl.sum((b_key < last_key).to(tl.int32), axis=0)
        m_tie = b_key == last_key
        m_kept = (b_key < last_key) | (m_tie & (tl.cumsum(m_tie.to(tl.int32), axis=0) <= num_ties))
        b_weight = tl.where(m_kept, b_weight, 0)
        total = tl.sum(b_weight, axis=0)
    needed = nucleus_weight(total, top_p)
    if top_p < 1.0:
        last_key = _last_key(b_key, b_weight, needed)
        before = tl.sum(tl.where(b_key < last_key, b_weight, 0), axis=0)
        b_tie_weight = tl.where(b_key == last_key, b_weight, 0)
        m_late = tl.cumsum(b_tie_weight, axis=0) - b_tie_weight >= needed - before
        b_kept = tl.where((b_key > last_key) | ((b_key == last_key) & m_late), 0, b_weight)
    else:
        b_kept = b_weight
    kept = tl.sum(b_kept, axis=0)
    i_listed = tl.sum((tl.cumsum(b_kept, axis=0) <= _looked_for(kept, uniform)).to(tl.int32), axis=0)
    token = tl.load(p_ids + tl.minimum(i_listed, num_listed - 1))
    return tl.where(kept >= needed, token, -1)


@jit
def _last_key(b_key, b_amount, needed):
    """Return the smallest key such that the amounts of all keys up to it reach `needed`."""
    low = 0
    high = 0x7F800000
    for _ in range(31):
        middle = low + (high - low) // 2
        is_reached = tl.sum(tl.where(b_key <= middle, b_amount, 0), axis=0) >= needed
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle + 1)
    return high


@jit
def _choose_filtered(
    p_row, vocab_size, largest, negative_temperature, min_p, top_p, top_k, uniform, total,
    TILE: constexpr, WAYS: constexpr,
):  # fmt: skip
    """Choose from a row without a list: find cutoffs by passes over the whole row."""
    kept = total
    last_key = 0x7F800000
    num_ties = vocab_size
    if top_k > 0:
        last_key, before = _last_key_of_row(
            p_row, vocab_size, largest, negative_temperature, min_p, top_k.to(tl.int64), False, TILE, WAYS
        )
        num_ties = top_k - before.to(tl.int32)
        weight_before = _weight_before(p_row, vocab_size, largest, negative_temperature, min_p, last_key, TILE)
        kept = weight_before + num_ties * _key_weight(last_key, negative_temperature, min_p)
    if top_p < 1.0:
        needed = nucleus_weight(kept, top_p)
        last_key, before = _last_key_of_row(
            p_row, vocab_size, largest, negative_temperature, min_p, needed, True, TILE, WAYS
        )
        tie_weight = _key_weight(last_key, negative_temperature, min_p)
        num_ties = ((needed - before + tie_weight - 1) // tie_weight).to(tl.int32)
        kept = before + num_ties * tie_weight
    looked_for = _looked_for(kept, uniform)
    token = 0
    for start in range(0, vocab_size, TILE):
        b_key, b_weight = _tile(p_row, start, vocab_size, largest, negative_temperature, min_p, TILE)
        m_tie = b_key == last_key
        b_tie = tl.cumsum(m_tie.to(tl.int32), axis=0)
        b_kept = tl.where((b_key < last_key) | (m_tie & (b_tie <= num_ties)), b_weight, 0)
        m_before = (tl.cumsum(b_kept, axis=0) <= looked_for) & (start + tl.arange(0, TILE) < vocab_size)
        token += tl.sum(m_before.to(tl.int32), axis=0)
        looked_for -= tl.sum(b_kept, axis=0)
        num_ties -= tl.sum(m_tie.to(tl.int32), axis=0)
    return token


@jit
def _tile(p_row, start, vocab_size, largest, negative_temperature, min_p, TILE: constexpr):
    """Return keys and weights of a tile of a row; a lane beyond the vocabulary sorts after every token."""
    o_token = start + tl.arange(0, TILE)
    m_token = o_token < vocab_size
    b_distance = distances(tl.load(p_row + o_token, mask=m_token, other=float("-inf")), largest)
    return tl.where(m_token, keys(b_distance), 0x7FFFFFFF), weights(b_distance, negative_temperature, min_p)


@jit
def _key_weight(key, negative_temperature, min_p):
    return weights(key.to(tl.float32, bitcast=True), negative_temperature, min_p)


@jit
def _weight_before(p_row, vocab_size, largest, negative_temperature, min_p, last_key, TILE: constexpr):
    b_sum = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        b_key, b_weight = _tile(p_row, start, vocab_size, largest, negative_temperature, min_p, TILE)
        b_sum += tl.where(b_key < last_key, b_weight, 0)
    return tl.sum(b_sum, axis=0)


@jit
def _last_key_of_row(
    p_row, vocab_size, largest, negative_temperature, min_p, needed,
    BY_WEIGHT: constexpr, TILE: constexpr, WAYS: constexpr,
):  # fmt: skip
    """Like `_last_key` over a whole row, by weight or by count; also return the amount before that key."""
    o_way = tl.arange(0, WAYS)
    low = 0
    high = 0x7F800000
    before = needed * 0
    while low < high:
        width = (high - low) // WAYS + 1
        b_end = low + width * (o_way + 1) - 1
        b_sum = tl.zeros([WAYS], tl.int64)
        for start in range(0, vocab_size, TILE):
            b_key, b_weight = _tile(p_row, start, vocab_size, largest, negative_temperature, min_p, TILE)
            b_amount = b_weight if BY_WEIGHT else (b_key < 0x7FFFFFFF).to(tl.int64)
            b_sum += tl.sum(tl.where(b_key[:, None] <= b_end[None, :], b_amount[:, None], 0), axis=0)
        num_short = tl.sum((b_sum < needed).to(tl.int32), axis=0)
        b_short = tl.where(o_way == num_short - 1, b_sum, 0)
        before = tl.where(num_short > 0, tl.sum(b_short, axis=0), before)
        low += width * num_short
        high = tl.minimum(high, low + width - 1)
    return low, before

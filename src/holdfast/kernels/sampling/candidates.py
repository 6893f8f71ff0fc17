"""Candidate lists: the most likely tokens of a row, at least all that top_k, top_p or log-probabilities can select.

X rows of logits, R rows of a table, F fields, V vocabulary

distance   the largest logit of the row minus this one: 0 or more, inf for a forbidden token
key        the bits of a distance as int32, which sort like distances
weight     exp(-distance / temperature) in units of 2**-40: an integer, so that sums are exact in any order
bucket     a range of keys, sixteen to an octave

The first pass over a row counts tokens by bucket and sums their weights. These give the last bucket that can
matter. The second pass lists the tokens up to it in vocabulary order. A row with too many has no list, and its readers
scan the row. A list may hold more tokens than needed, never fewer.
"""

import torch
from torch import Tensor

from holdfast.kernels.geometry import NUM_BUCKETS, NUM_FIELDS, num_chunks
from holdfast.kernels.sampling.argmax import LogitScratch
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, next_power_of_two, tl

WEIGHT_BITS = 40
LARGEST = torch.finfo(torch.float32).max


def reference_distances(logits_V: Tensor, token_id: int) -> Tensor:
    """Return the distances of one row."""
    return logits_V[token_id].clamp(max=LARGEST) + 0.0 - logits_V.clamp(max=LARGEST)


def reference_weights(distance_V: Tensor, negative_temperature: float, min_p: float) -> Tensor:
    """Return the weights of one row."""
    temperature, least = torch.tensor([negative_temperature, min_p], dtype=torch.float32, device=distance_V.device)
    share_V = torch.div(distance_V, temperature).exp_()
    return share_V.masked_fill_(share_V < least, 0).mul_(2.0**WEIGHT_BITS).to(torch.int64)


def list_near_tokens(
    logits_XV: Tensor, argmax_X: Tensor, rows_RF: Tensor, tokens_S: Tensor | None, scratch: LogitScratch
) -> None:
    """Fill the scratch for each row of the table: weights by chunk, and a list if the row has a top_k or a top_p.

    If `tokens_S` is given, also count the tokens of each chunk that are nearer than tokens[target].
    """
    num_rows, vocab_size = rows_RF.shape[0], logits_XV.shape[1]
    chunks = num_chunks(vocab_size, scratch.chunk_tokens)
    held = scratch.chunk_weights_RP.shape
    assert num_rows <= held[0], f"{num_rows=} exceeds the scratch for {held[0]}"
    assert chunks == held[1], f"{chunks=} of {vocab_size} tokens differ from the scratch for {held[1]}"
    assert logits_XV.stride(1) == 1, f"{logits_XV.stride()=}: the logits of a row must lie side by side"
    check_dense(rows_RF)
    grid = (num_rows, chunks)
    _count_kernel[grid](
        logits_XV, argmax_X, rows_RF, argmax_X if tokens_S is None else tokens_S, scratch.chunk_weights_RP,
        scratch.chunk_nearer_RP, scratch.chunk_counts_RPB, logits_XV.stride(0), vocab_size, chunks,
        HAS_TOKEN=tokens_S is not None, FIELDS=NUM_FIELDS, NUM_BUCKETS=NUM_BUCKETS, CHUNK=scratch.chunk_tokens,
        num_warps=8,
    )  # fmt: skip
    _list_kernel[grid](
        logits_XV, argmax_X, rows_RF, scratch.chunk_weights_RP, scratch.chunk_counts_RPB, scratch.num_listed_R,
        scratch.listed_logits_RC, scratch.listed_ids_RC, logits_XV.stride(0), vocab_size, chunks,
        scratch.listed_ids_RC.shape[1],
        FIELDS=NUM_FIELDS, NUM_BUCKETS=NUM_BUCKETS, CHUNKS=next_power_of_two(chunks), CHUNK=scratch.chunk_tokens,
        num_warps=16,
    )  # fmt: skip


@jit
def largest_logit(p_row, token):
    """Return the logit at distance 0; -0.0 becomes 0.0, because the bits of -0.0 - 0.0 sort before 0.0."""
    largest = tl.minimum(tl.load(p_row + token), 3.4028234663852886e38)
    return tl.where(largest == 0.0, 0.0, largest)


@jit
def distances(b_logits, largest):
    """Subtract from the largest; +inf counts as the largest finite number, so that its distance is 0 and not NaN."""
    return largest - tl.minimum(b_logits, 3.4028234663852886e38)


@jit
def keys(b_distance):
    return b_distance.to(tl.int32, bitcast=True)


@jit
def weights(b_distance, negative_temperature, min_p):
    b_share = tl.exp(tl.div_rn(b_distance, negative_temperature))
    return (tl.where(b_share < min_p, 0.0, b_share) * 1099511627776.0).to(tl.int64)


@jit
def nucleus_weight(total, top_p):
    """Return the weight that the kept tokens must reach: ceil(top_p * total), or the total if top_p is 1."""
    needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
    return tl.where(top_p < 1.0, tl.minimum(needed, total), total)


@jit
def buckets(b_key):
    """Map keys to buckets: the first holds distances below 1/4 (bits 0x3E800000), the last those from 61 on."""
    return tl.minimum(tl.maximum((b_key - 0x3E800000) >> 19, -1), 126) + 1


@jit
def bucket_starts(o_bucket):
    """Return the smallest distance of each bucket."""
    b_key = tl.where(o_bucket == 0, 0, 0x3E800000 + ((o_bucket - 1) << 19))
    return b_key.to(tl.float32, bitcast=True)


@jit
def _count_kernel(
    p_logits, p_argmax, p_rows, p_tokens, p_weights, p_nearer, p_counts, row_stride, vocab_size, num_chunks,
    HAS_TOKEN: constexpr, FIELDS: constexpr, NUM_BUCKETS: constexpr, CHUNK: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    p_row = p_rows + i_row * FIELDS
    source = tl.load(p_row).to(tl.int64)
    top_token = tl.load(p_argmax + source)
    negative_temperature = tl.load(p_row + 2).to(tl.float32)
    if (top_token < 0) | (negative_temperature == 0.0):
        return
    p_source = p_logits + source * row_stride
    largest = largest_logit(p_source, top_token)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    # A lane beyond the vocabulary has no weight and falls into the last bucket.
    b_logits = tl.load(p_source + o_token, mask=o_token < vocab_size, other=float("-inf"))
    b_distance = distances(b_logits, largest)
    b_weight = weights(b_distance, negative_temperature, tl.load(p_row + 3).to(tl.float32))
    place = i_row * num_chunks + i_chunk
    tl.store(p_weights + place, tl.sum(b_weight, axis=0))
    if HAS_TOKEN:
        token = tl.maximum(tl.load(p_tokens + tl.load(p_row + 1).to(tl.int64)), 0)
        distance = distances(tl.load(p_source + token), largest)
        tl.store(p_nearer + place, tl.sum((b_distance < distance).to(tl.int32), axis=0))
    if (tl.load(p_row + 4) < 1.0) | (tl.load(p_row + 5) > 0.0):
        o_bucket = tl.arange(0, NUM_BUCKETS)
        num_beyond = tl.maximum((i_chunk + 1) * CHUNK - vocab_size, 0)
        b_count = tl.histogram(buckets(keys(b_distance)), NUM_BUCKETS)
        b_count = b_count - tl.where(o_bucket == NUM_BUCKETS - 1, num_beyond, 0)
        tl.store(p_counts + place * NUM_BUCKETS + o_bucket, b_count)


@jit
def _list_kernel(
    p_logits, p_argmax, p_rows, p_weights, p_counts, p_num_listed, p_listed_logits, p_listed_ids,
    row_stride, vocab_size, num_chunks, max_listed,
    FIELDS: constexpr, NUM_BUCKETS: constexpr, CHUNKS: constexpr, CHUNK: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    p_row = p_rows + i_row * FIELDS
    source = tl.load(p_row).to(tl.int64)
    top_token = tl.load(p_argmax + source)
    negative_temperature = tl.load(p_row + 2).to(tl.float32)
    top_p = tl.load(p_row + 4)
    top_k = tl.load(p_row + 5).to(tl.int32)
    is_filtered = (top_p < 1.0) | (top_k > 0)
    if (top_token < 0) | (negative_temperature == 0.0) | (is_filtered == 0):
        return
    o_bucket = tl.arange(0, NUM_BUCKETS)
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    p_count = p_counts + (i_row * num_chunks + o_chunk[:, None]) * NUM_BUCKETS + o_bucket[None, :]
    b_count_PB = tl.load(p_count, mask=m_chunk[:, None], other=0)
    b_count = tl.sum(b_count_PB, axis=0)
    if top_k > 0:
        last = tl.sum((tl.cumsum(b_count, axis=0) < top_k).to(tl.int32), axis=0)
    else:
        # No token weighs more than the start of its bucket, so this bounds the dropped weight.
        total = tl.sum(tl.load(p_weights + i_row * num_chunks + o_chunk, mask=m_chunk, other=0), axis=0)
        b_start_weight = weights(bucket_starts(o_bucket), negative_temperature, tl.load(p_row + 3).to(tl.float32))
        b_most = b_start_weight * b_count.to(tl.int64)
        b_dropped = tl.sum(b_most, axis=0) - tl.cumsum(b_most, axis=0)
        last = tl.sum((b_dropped > total - nucleus_weight(total, top_p)).to(tl.int32), axis=0)
    m_bucket = o_bucket <= last
    num_listed = tl.sum(tl.where(m_bucket, b_count, 0), axis=0)
    if i_chunk == 0:
        tl.store(p_num_listed + i_row, tl.where(num_listed > max_listed, -1, num_listed))
    b_before_PB = tl.where(m_bucket[None, :] & (o_chunk < i_chunk)[:, None], b_count_PB, 0)
    b_own_PB = tl.where(m_bucket[None, :] & (o_chunk == i_chunk)[:, None], b_count_PB, 0)
    if (num_listed > max_listed) | (tl.sum(tl.sum(b_own_PB, axis=1), axis=0) == 0):
        return
    first = tl.sum(tl.sum(b_before_PB, axis=1), axis=0)
    p_source = p_logits + source * row_stride
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    b_logits = tl.load(p_source + o_token, mask=m_token, other=float("-inf"))
    m_listed = m_token & (buckets(keys(distances(b_logits, largest_logit(p_source, top_token)))) <= last)
    o_listed = first + tl.cumsum(m_listed.to(tl.int32), axis=0) - 1
    tl.store(p_listed_logits + i_row * max_listed + o_listed, b_logits, mask=m_listed)
    tl.store(p_listed_ids + i_row * max_listed + o_listed, o_token, mask=m_listed)

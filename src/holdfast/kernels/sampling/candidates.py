"""The tokens of a row that can matter, listed: the most likely ones, as far as top_k, top_p or log-probabilities may reach.

X rows of logits, R rows of a table, F fields, V vocabulary

distance   how far a logit lies below the largest one of its row: 0 or more, inf for a token that cannot be
key        the bits of a distance as int32: they sort as the distances do
weight     exp(-distance / temperature), the p of a softmax before it is divided by their sum, in units of 2**-40: whole numbers,
           whose sums are exact in any order
bucket     a range of keys, sixteen to an octave

One pass over a row counts its tokens by bucket and adds up their weights. From that a bucket follows which is surely far
enough, and a second pass lists the tokens up to it in the order of the vocabulary. Where they are too many the row has
no list, and whoever needs it reads the row. A list may hold more tokens than are needed, never fewer.
"""

import torch
from torch import Tensor

from holdfast.kernels.geometry import NUM_BUCKETS, NUM_FIELDS, num_chunks
from holdfast.kernels.sampling.argmax import LogitScratch
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, tl

# ruff: noqa: ANN001, ANN201, ANN202 the arguments of kernels have no types

WEIGHT_BITS = 40
LARGEST = torch.finfo(torch.float32).max


def reference_distances(logits_V: Tensor, token_id: int) -> Tensor:
    """Distances of one row below its most likely token, in plain torch."""
    return logits_V[token_id].clamp(max=LARGEST) + 0.0 - logits_V.clamp(max=LARGEST)


def reference_weights(distance_V: Tensor, negative_temperature: float, min_p: float) -> Tensor:
    """Weights of one row, in plain torch."""
    temperature, least = torch.tensor([negative_temperature, min_p], dtype=torch.float32, device=distance_V.device)
    share_V = torch.div(distance_V, temperature).exp_()
    return share_V.masked_fill_(share_V < least, 0).mul_(2.0**WEIGHT_BITS).to(torch.int64)


def list_near_tokens(
    logits_XV: Tensor, argmax_X: Tensor, rows_RF: Tensor, tokens_S: Tensor | None, scratch: LogitScratch
) -> None:
    """Fill the scratch for each row of the table: weights by chunk, and a list where the row has a top_k or a top_p.

    With tokens, also how many tokens of each chunk are nearer than tokens[target].
    """
    num_rows, vocab_size = rows_RF.shape[0], logits_XV.shape[1]
    chunks = num_chunks(vocab_size, scratch.chunk_tokens)
    held = scratch.chunk_weights_RP.shape
    assert num_rows <= held[0], f"{num_rows=} exceeds the scratch for {held[0]}"
    assert chunks == held[1], f"{chunks=} of {vocab_size} tokens differ from the scratch for {held[1]}"
    assert logits_XV.stride(1) == 1, f"{logits_XV.stride()=}: the logits of a row must lie side by side"
    assert rows_RF.is_contiguous(), f"{rows_RF.stride()=}: a table must be dense"
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
    """The logit that distances are measured from; -0.0 becomes 0.0, since -0.0 - 0.0 has bits that sort before 0.0."""
    largest = tl.minimum(tl.load(p_row + token), 3.4028234663852886e38)
    return tl.where(largest == 0.0, 0.0, largest)


@jit
def distances(b_logits, largest):
    """+inf is taken for the largest finite number, so that its distance is 0 and not NaN."""
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
    """The weight that the most likely tokens have to reach: ceil(top_p * total), and all of it where top_p is 1."""
    needed = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
    return tl.where(top_p < 1.0, tl.minimum(needed, total), total)


@jit
def buckets(b_key):
    """The first bucket holds everything below 1/4, whose bits are 0x3E800000; the last one everything from 61 on."""
    return tl.minimum(tl.maximum((b_key - 0x3E800000) >> 19, -1), 126) + 1


@jit
def bucket_starts(o_bucket):
    """The smallest distance of each bucket."""
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
    # A lane beyond the vocabulary is as far as can be: without weight, and in the last bucket.
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
        # No token weighs more than the start of its bucket, so what is dropped is surely little enough.
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

"""Log-probabilities: distance and rank of one token per row, the row's total weight, and its nearest tokens.

S rows of a step, R rows of a table, F fields, V vocabulary, C columns, K nearest tokens
"""

from torch import Tensor

from holdfast.kernels.geometry import NO_TOKEN, NUM_FIELDS, num_chunks
from holdfast.kernels.operation import operation
from holdfast.kernels.sampling.argmax import LogitScratch
from holdfast.kernels.sampling.candidates import (
    distances,
    keys,
    largest_logit,
    list_near_tokens,
    reference_distances,
    reference_weights,
)
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, next_power_of_two, tl

FIXED_COLUMNS = 4
"""Columns before K token ids and K distances: 1 if the row has a token, total weight, the token's distance, its
rank."""
ROW_TILE = 4096
"""Tokens read at a time from a row without a list."""


def logprob_rows_reference(
    logits_SV: Tensor, argmax_S: Tensor, tokens_S: Tensor, rows_RF: Tensor, columns_RC: Tensor, scratch: LogitScratch
) -> None:
    """columns[i] = numbers about tokens[target] in logits[source] for row i of the table, and its top_k nearest tokens.

    Rows have a temperature of 1 and no top_p. If the argmax is NO_TOKEN, only the first column is written, as 0. A target
    of NO_TOKEN reads token 0.
    """
    max_top = (columns_RC.shape[1] - FIXED_COLUMNS) // 2
    for (source, target, _, _, _, num_top, *_), column_C in zip(rows_RF.tolist(), columns_RC, strict=True):
        top_token = int(argmax_S[int(source)])
        if top_token == NO_TOKEN:
            column_C[0] = 0.0
            continue
        distance_V = reference_distances(logits_SV[int(source)], top_token)
        distance = distance_V[int(tokens_S[int(target)].clamp(min=0))]
        column_C[0] = 1.0
        column_C[1] = reference_weights(distance_V, -1.0, 0.0).sum()
        column_C[2] = distance
        column_C[3] = (distance_V < distance).sum() + 1
        ids_K = distance_V.argsort(stable=True)[: int(num_top)]
        column_C[FIXED_COLUMNS : FIXED_COLUMNS + len(ids_K)] = ids_K
        column_C[FIXED_COLUMNS + max_top : FIXED_COLUMNS + max_top + len(ids_K)] = distance_V[ids_K]


def logprob_rows_triton(
    logits_SV: Tensor, argmax_S: Tensor, tokens_S: Tensor, rows_RF: Tensor, columns_RC: Tensor, scratch: LogitScratch
) -> None:
    """Launch two passes over each row by many programs, then one program per row."""
    num_rows, vocab_size = rows_RF.shape[0], logits_SV.shape[1]
    assert columns_RC.shape[0] == num_rows, f"{columns_RC.shape=} must have a row for each of {num_rows}"
    check_dense(columns_RC)
    if not num_rows:
        return
    list_near_tokens(logits_SV, argmax_S, rows_RF, tokens_S, scratch)
    chunks = num_chunks(vocab_size, scratch.chunk_tokens)
    max_listed = scratch.listed_ids_RC.shape[1]
    _logprob_kernel[(num_rows,)](
        logits_SV, argmax_S, tokens_S, rows_RF, columns_RC, scratch.chunk_weights_RP, scratch.chunk_nearer_RP,
        scratch.num_listed_R, scratch.listed_logits_RC, scratch.listed_ids_RC, logits_SV.stride(0), vocab_size, chunks,
        max_listed,
        FIELDS=NUM_FIELDS, COLUMNS=columns_RC.shape[1], FIXED=FIXED_COLUMNS, LISTED=next_power_of_two(max_listed),
        CHUNKS=next_power_of_two(chunks), TILE=ROW_TILE, num_warps=8,
    )  # fmt: skip


logprob_rows = operation(reference=logprob_rows_reference, triton=logprob_rows_triton)


@jit
def _logprob_kernel(
    p_logits, p_argmax, p_tokens, p_rows, p_columns, p_weights, p_nearer, p_num_listed, p_listed_logits, p_listed_ids,
    row_stride, vocab_size, num_chunks, max_listed,
    FIELDS: constexpr, COLUMNS: constexpr, FIXED: constexpr, LISTED: constexpr, CHUNKS: constexpr, TILE: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_rows + i_row * FIELDS
    p_column = p_columns + i_row * COLUMNS
    source = tl.load(p_row).to(tl.int64)
    num_top = tl.load(p_row + 5).to(tl.int32)
    top_token = tl.load(p_argmax + source)
    tl.store(p_column, (top_token >= 0).to(tl.float64))
    if top_token < 0:
        return
    p_source = p_logits + source * row_stride
    largest = largest_logit(p_source, top_token)
    token = tl.maximum(tl.load(p_tokens + tl.load(p_row + 1).to(tl.int64)), 0)
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < num_chunks
    total = tl.sum(tl.load(p_weights + i_row * num_chunks + o_chunk, mask=m_chunk, other=0), axis=0)
    num_nearer = tl.sum(tl.load(p_nearer + i_row * num_chunks + o_chunk, mask=m_chunk, other=0), axis=0)
    tl.store(p_column + 1, total.to(tl.float64))
    tl.store(p_column + 2, distances(tl.load(p_source + token), largest).to(tl.float64))
    tl.store(p_column + 3, (num_nearer + 1).to(tl.float64))
    if num_top > 0:
        num_listed = tl.load(p_num_listed + i_row)
        p_top = p_column + FIXED
        if num_listed >= 0:
            o_listed = tl.arange(0, LISTED)
            m_listed = o_listed < num_listed
            b_logits = tl.load(p_listed_logits + i_row * max_listed + o_listed, mask=m_listed, other=float("-inf"))
            b_id = tl.load(p_listed_ids + i_row * max_listed + o_listed, mask=m_listed, other=0)
            b_place = _places(b_logits, b_id, largest, m_listed)
            for i_top in range(num_top):
                place = tl.min(b_place, axis=0)
                b_place = tl.where(b_place == place, 0x7FFFFFFFFFFFFFFF, b_place)
                _store_top(p_top + i_top, place, (COLUMNS - FIXED) // 2)
        else:
            place = top_token * 0 - 1
            for i_top in range(num_top):
                place = _next_place(p_source, vocab_size, largest, place, TILE)
                _store_top(p_top + i_top, place, (COLUMNS - FIXED) // 2)


@jit
def _places(b_logits, b_id, largest, m_token):
    """Return unique sort keys of tokens: by distance, then by id."""
    b_place = (keys(distances(b_logits, largest)).to(tl.int64) << 32) | b_id.to(tl.int64)
    return tl.where(m_token, b_place, 0x7FFFFFFFFFFFFFFF)


@jit
def _store_top(p_top, place, MAX_TOP: constexpr):
    tl.store(p_top, (place & 0xFFFFFFFF).to(tl.float64))
    tl.store(p_top + MAX_TOP, (place >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64))


@jit
def _next_place(p_row, vocab_size, largest, place, TILE: constexpr):
    """Find the smallest place after this one by a pass over the whole row."""
    b_next = tl.full([TILE], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, vocab_size, TILE):
        o_token = start + tl.arange(0, TILE)
        m_token = o_token < vocab_size
        b_logits = tl.load(p_row + o_token, mask=m_token, other=float("-inf"))
        b_place = _places(b_logits, o_token, largest, m_token)
        b_next = tl.minimum(b_next, tl.where(b_place > place, b_place, 0x7FFFFFFFFFFFFFFF))
    return tl.min(b_next, axis=0)

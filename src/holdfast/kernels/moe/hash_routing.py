"""Hash routing: a table gives a token's experts by its id; the router's scores give their shares.

T tokens, S experts of a token, E experts, V vocabulary
"""

import torch
from torch import Tensor

from holdfast.kernels.moe.routing import (
    Routing,
    check_routing,
    finished_shares,
    lone_scores,
    nan_lowest,
    scores_of,
    shares_of,
)
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, next_power_of_two, release_then_wait, tl


def route_by_table_reference(
    logits_TE: Tensor,
    table_VS: Tensor,
    token_ids_T: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None = None,
) -> None:
    """Like `route_tokens`, with the experts that the table has for each token.

    A repeated expert counts twice. Token ids outside the table (padding) are clamped to it.
    """
    _check(logits_TE, table_VS, token_ids_T, routing, expert_ids_TS, shares_TS, bias_E)
    if bias_E is not None:
        logits_TE = logits_TE + bias_E.float()
    ids_TS = table_VS[token_ids_T.long().clamp(0, len(table_VS) - 1)].long().clamp(0, logits_TE.shape[1] - 1)
    expert_ids_TS.copy_(ids_TS)
    shares_TS.copy_(shares_of(scores_of(logits_TE, routing.scoring).gather(1, ids_TS), routing))


def route_by_table_triton(
    logits_TE: Tensor,
    table_VS: Tensor,
    token_ids_T: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None = None,
) -> None:
    """Launch one program per token."""
    _check(logits_TE, table_VS, token_ids_T, routing, expert_ids_TS, shares_TS, bias_E)
    (num_rows, num_experts), top_k = logits_TE.shape, expert_ids_TS.shape[1]
    if not num_rows:
        return
    _route_by_table_kernel[(num_rows,)](
        logits_TE, logits_TE if bias_E is None else bias_E, table_VS, token_ids_T, expert_ids_TS, shares_TS,
        len(table_VS), num_experts,
        HAS_BIAS=bias_E is not None, NORMALIZE=routing.normalizes, SCORING=routing.scoring,
        SHARE_SCALE=routing.share_scale, TOP_K=top_k, BLOCK_E=next_power_of_two(num_experts),
        BLOCK_S=next_power_of_two(top_k), num_warps=1, **pdl_flags(logits_TE),
    )  # fmt: skip


route_by_table = operation(reference=route_by_table_reference, triton=route_by_table_triton)


def _check(
    logits_TE: Tensor,
    table_VS: Tensor,
    token_ids_T: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None,
) -> None:
    check_routing(logits_TE, routing, expert_ids_TS, shares_TS, bias_E, None)
    num_rows, top_k = expert_ids_TS.shape
    assert not routing.limits_groups, f"{routing}: a table has no groups"
    assert table_VS.shape[1:] == (top_k,), f"{table_VS.shape=}, and {top_k} experts of a token"
    assert len(table_VS), f"{table_VS.shape=}: no token has experts"
    assert table_VS.dtype in (torch.int32, torch.int64), f"{table_VS.dtype=}, not int32 or int64"
    assert token_ids_T.shape == (num_rows,), f"{token_ids_T.shape=} for {num_rows} tokens"
    assert token_ids_T.dtype in (torch.int32, torch.int64), f"{token_ids_T.dtype=}, not int32 or int64"
    check_dense(table_VS, token_ids_T)


@jit
def _route_by_table_kernel(
    p_logits, p_bias, p_table, p_tokens, p_ids, p_shares, vocab_size, num_experts,
    HAS_BIAS: constexpr, NORMALIZE: constexpr, SCORING: constexpr, SHARE_SCALE: constexpr, TOP_K: constexpr,
    BLOCK_E: constexpr, BLOCK_S: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < TOP_K
    release_then_wait(PDL)
    token = tl.load(p_tokens + i_row).to(tl.int64)
    token = tl.maximum(tl.minimum(token, vocab_size - 1), 0)
    b_ids = tl.load(p_table + token * TOP_K + o_s, mask=m_s, other=0).to(tl.int64)
    b_ids = tl.maximum(tl.minimum(b_ids, num_experts - 1), 0).to(tl.int32)
    p_row = p_logits + i_row * num_experts
    b_chosen = tl.load(p_row + b_ids, mask=m_s, other=float("-inf"))
    if HAS_BIAS:
        b_chosen += tl.load(p_bias + b_ids, mask=m_s, other=0.0).to(tl.float32)
    if SCORING == "softmax":
        o_e = tl.arange(0, BLOCK_E)
        m_e = o_e < num_experts
        b_logits = tl.load(p_row + o_e, mask=m_e, other=float("-inf"))
        if HAS_BIAS:
            b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
        largest = tl.max(nan_lowest(b_logits), axis=0)
        total = tl.sum(tl.where(m_e, tl.exp(b_logits - largest), 0.0), axis=0)
        b_chosen = tl.where(m_s, tl.exp(b_chosen - largest), 0.0) / total
    else:
        b_chosen = tl.where(m_s, lone_scores(b_chosen, SCORING), 0.0)
    b_chosen = finished_shares(b_chosen, NORMALIZE, SCORING, SHARE_SCALE)
    tl.store(p_ids + i_row * TOP_K + o_s, b_ids, mask=m_s)
    tl.store(p_shares + i_row * TOP_K + o_s, b_chosen, mask=m_s)

"""Routing: which experts a token goes to, and with what share each of them counts.

T tokens, E experts, S experts of a token
"""

# ruff: noqa: ANN001, ANN202 pointers of kernels have no types

import torch

from holdfast.kernels.triton_compat import (
    can_launch_early,
    can_run,
    constexpr,
    jit,
    launched_early,
    next_power_of_two,
    tl,
)


def route_tokens(
    logits_TE: torch.Tensor, normalize: bool, expert_ids_TS: torch.Tensor, shares_TS: torch.Tensor
) -> None:
    """The S experts with the largest logits, ties to the lower id, and their softmax over all experts, in float32.

    With `normalize` the shares of a token sum to one. A logit that is NaN counts as the lowest; it makes the shares of its
    token NaN, and the ids are still those of experts, each once.
    """
    if can_run(logits_TE):
        route_tokens_triton(logits_TE, normalize, expert_ids_TS, shares_TS)
    else:
        route_tokens_reference(logits_TE, normalize, expert_ids_TS, shares_TS)


def route_tokens_reference(
    logits_TE: torch.Tensor, normalize: bool, expert_ids_TS: torch.Tensor, shares_TS: torch.Tensor
) -> None:
    """The same in plain torch."""
    _check(logits_TE, expert_ids_TS, shares_TS)
    top_k = expert_ids_TS.shape[1]
    ranked_TE = logits_TE.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids_TS = ranked_TE.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen_TS = logits_TE.softmax(dim=1).gather(1, ids_TS)
    if normalize:
        chosen_TS = chosen_TS / chosen_TS.sum(dim=1, keepdim=True)
    expert_ids_TS.copy_(ids_TS)
    shares_TS.copy_(chosen_TS)


def _check(logits_TE: torch.Tensor, expert_ids_TS: torch.Tensor, shares_TS: torch.Tensor) -> None:
    num_rows, num_experts = logits_TE.shape
    top_k = expert_ids_TS.shape[1]
    assert top_k <= num_experts, f"{top_k} experts of a token, and there are {num_experts}"
    for tensor, dtype in ((logits_TE, torch.float32), (expert_ids_TS, torch.int32), (shares_TS, torch.float32)):
        assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
        assert tensor.shape[0] == num_rows, f"{tensor.shape=} for {num_rows} tokens"
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"
    assert shares_TS.shape == expert_ids_TS.shape, f"{shares_TS.shape=} {expert_ids_TS.shape=}"


def route_tokens_triton(
    logits_TE: torch.Tensor, normalize: bool, expert_ids_TS: torch.Tensor, shares_TS: torch.Tensor
) -> None:
    """The same as a Triton kernel, a program for each token."""
    _check(logits_TE, expert_ids_TS, shares_TS)
    (num_rows, num_experts), top_k = logits_TE.shape, expert_ids_TS.shape[1]
    if not num_rows:
        return
    early, block = can_launch_early(logits_TE), next_power_of_two(num_experts)
    _route_kernel[(num_rows,)](
        logits_TE,
        expert_ids_TS,
        shares_TS,
        num_experts,
        NORMALIZE=normalize,
        TOP_K=top_k,
        BLOCK_E=block,
        BLOCK_S=next_power_of_two(top_k),
        EARLY=early,
        num_warps=max(1, min(4, block // 256)),
        **launched_early(early),
    )


@jit
def _route_kernel(
    p_logits,
    p_ids,
    p_shares,
    num_experts,
    NORMALIZE: constexpr,
    TOP_K: constexpr,
    BLOCK_E: constexpr,
    BLOCK_S: constexpr,
    EARLY: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    o_s = tl.arange(0, BLOCK_S)
    m_e = o_e < num_experts
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_logits = tl.load(p_logits + i_row * num_experts + o_e, mask=m_e, other=float("-inf"))
    b_is_nan = b_logits != b_logits
    b_ranked = tl.where(b_is_nan, float("-inf"), b_logits) + 0.0  # -0 is as large as 0
    # Bits of a number that rank as the number does, and behind them the id, the lower the larger: one maximum gives both.
    b_bits = b_ranked.to(tl.int32, bitcast=True)
    b_order = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.int64)
    b_keys = tl.where(m_e, b_order * 4294967296 + (BLOCK_E - 1 - o_e), -9223372036854775807)
    largest = tl.max(b_ranked, axis=0)
    b_weights = tl.where(m_e, tl.exp(b_logits - largest), 0.0)
    total = tl.sum(b_weights, axis=0)
    b_ids = tl.zeros((BLOCK_S,), dtype=tl.int32)
    b_chosen = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for s in tl.static_range(TOP_K):
        key = tl.max(b_keys, axis=0)
        expert = BLOCK_E - 1 - (key & (BLOCK_E - 1)).to(tl.int32)
        weight = tl.sum(tl.where(o_e == expert, b_weights, 0.0), axis=0)
        b_keys = tl.where(o_e == expert, -9223372036854775807, b_keys)
        b_ids = tl.where(o_s == s, expert, b_ids)
        b_chosen = tl.where(o_s == s, weight, b_chosen)
    b_chosen = b_chosen / total
    if NORMALIZE:
        b_chosen = b_chosen / tl.sum(b_chosen, axis=0)
    m_s = o_s < TOP_K
    tl.store(p_ids + i_row * TOP_K + o_s, b_ids, mask=m_s)
    tl.store(p_shares + i_row * TOP_K + o_s, b_chosen, mask=m_s)

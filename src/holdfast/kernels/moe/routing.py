"""Routing: the experts of each token with their shares, and ExpertOrder, the pairs of token and expert sorted by expert.

T tokens, S experts of a token, E experts, P = T * S pairs (pair t * S + s), B blocks, R rows of a block, C cuts of the pairs

Pairs are sorted into blocks of rows that one expert multiplies. A small batch is not sorted: each pair finds its expert by
itself (kernels/moe/expert_gemv.py), or an expert its rows (kernels/moe/grouped_gemm.py). Sizes follow from the number of tokens alone, so that a graph can hold the launches
whatever experts are chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.kernels.geometry import CUT_PAIRS, expert_block_rows, expert_order_form, order_specs, sorts_pairs
from holdfast.kernels.triton_compat import (
    can_run,
    constexpr,
    jit,
    jit_counting,
    next_power_of_two,
    pdl_launch,
    supports_pdl,
    tl,
)

# ruff: noqa: ANN001, ANN201, ANN202 pointers of kernels have no types


def route_tokens(
    logits_TE: torch.Tensor,
    normalize: bool,
    expert_ids_TS: torch.Tensor,
    shares_TS: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    """The S experts with the largest logits, ties to the lower id, and their softmax over all experts, in float32.

    `bias_E` is added to the logits before anything else. With `normalize` the shares of a token sum to one: they are then the softmax
    over the chosen alone. A logit that is NaN counts as the lowest; it makes the shares of its
    token NaN, and the ids are still those of experts, each once.
    """
    if can_run(logits_TE):
        route_tokens_triton(logits_TE, normalize, expert_ids_TS, shares_TS, bias_E)
    else:
        route_tokens_reference(logits_TE, normalize, expert_ids_TS, shares_TS, bias_E)


def route_tokens_reference(
    logits_TE: torch.Tensor,
    normalize: bool,
    expert_ids_TS: torch.Tensor,
    shares_TS: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    """The same in plain torch."""
    _check(logits_TE, expert_ids_TS, shares_TS, bias_E)
    if bias_E is not None:
        logits_TE = logits_TE + bias_E.float()
    top_k = expert_ids_TS.shape[1]
    ranked_TE = logits_TE.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids_TS = ranked_TE.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen_TS = logits_TE.softmax(dim=1).gather(1, ids_TS)
    if normalize:
        chosen_TS = chosen_TS / chosen_TS.sum(dim=1, keepdim=True)
    expert_ids_TS.copy_(ids_TS)
    shares_TS.copy_(chosen_TS)


def _check(
    logits_TE: torch.Tensor, expert_ids_TS: torch.Tensor, shares_TS: torch.Tensor, bias_E: torch.Tensor | None
) -> None:
    num_rows, num_experts = logits_TE.shape
    top_k = expert_ids_TS.shape[1]
    assert top_k <= num_experts, f"{top_k} experts of a token, and there are {num_experts}"
    for tensor, dtype in ((logits_TE, torch.float32), (expert_ids_TS, torch.int32), (shares_TS, torch.float32)):
        assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
        assert tensor.shape[0] == num_rows, f"{tensor.shape=} for {num_rows} tokens"
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"
    assert shares_TS.shape == expert_ids_TS.shape, f"{shares_TS.shape=} {expert_ids_TS.shape=}"
    assert bias_E is None or bias_E.shape == (num_experts,), f"{bias_E.shape=} for {num_experts} experts"


def route_tokens_triton(
    logits_TE: torch.Tensor,
    normalize: bool,
    expert_ids_TS: torch.Tensor,
    shares_TS: torch.Tensor,
    bias_E: torch.Tensor | None = None,
) -> None:
    """The same as a Triton kernel, a program for each token."""
    _check(logits_TE, expert_ids_TS, shares_TS, bias_E)
    (num_rows, num_experts), top_k = logits_TE.shape, expert_ids_TS.shape[1]
    if not num_rows:
        return
    pdl, block = supports_pdl(logits_TE), next_power_of_two(num_experts)
    _route_kernel[(num_rows,)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        expert_ids_TS,
        shares_TS,
        num_experts,
        HAS_BIAS=bias_E is not None,
        NORMALIZE=normalize,
        TOP_K=top_k,
        BLOCK_E=block,
        BLOCK_S=next_power_of_two(top_k),
        PDL=pdl,
        num_warps=max(1, min(4, block // 256)),
        **pdl_launch(pdl),
    )


@jit
def _route_kernel(
    p_logits,
    p_bias,
    p_ids,
    p_shares,
    num_experts,
    HAS_BIAS: constexpr,
    NORMALIZE: constexpr,
    TOP_K: constexpr,
    BLOCK_E: constexpr,
    BLOCK_S: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_logits = tl.load(p_logits + i_row * num_experts + o_e, mask=m_e, other=float("-inf"))
    if HAS_BIAS:
        b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    choose_experts(b_logits, p_ids + i_row * TOP_K, p_shares + i_row * TOP_K, m_e, NORMALIZE, TOP_K, BLOCK_E, BLOCK_S)


@jit
def choose_experts(
    b_logits, p_ids, p_shares, m_e, NORMALIZE: constexpr, TOP_K: constexpr, BLOCK_E: constexpr, BLOCK_S: constexpr
):
    """Ids and shares of one token from its logits."""
    o_e = tl.arange(0, BLOCK_E)
    o_s = tl.arange(0, BLOCK_S)
    b_is_nan = b_logits != b_logits
    b_ranked = tl.where(b_is_nan, float("-inf"), b_logits) + 0.0  # -0 is as large as 0
    # Bits that rank as their numbers do: a maximum of whole numbers is one instruction of a warp.
    b_bits = b_ranked.to(tl.int32, bitcast=True)
    b_order = tl.where(m_e, tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits), -2147483648)
    largest = tl.max(b_ranked, axis=0)
    total = tl.sum(tl.where(m_e, tl.exp(b_logits - largest), 0.0), axis=0)
    b_ids = tl.zeros((BLOCK_S,), dtype=tl.int32)
    b_chosen_order = tl.zeros((BLOCK_S,), dtype=tl.int32)
    for s in tl.static_range(TOP_K):
        best = tl.max(b_order, axis=0)
        expert = tl.min(tl.where(b_order == best, o_e, BLOCK_E), axis=0)
        b_order = tl.where(o_e == expert, -2147483648, b_order)
        b_ids = tl.where(o_s == s, expert, b_ids)
        b_chosen_order = tl.where(o_s == s, best, b_chosen_order)
    # Where a logit is NaN, so are the total and all shares.
    b_bits = tl.where(b_chosen_order < 0, b_chosen_order ^ 0x7FFFFFFF, b_chosen_order)
    b_chosen = tl.where(o_s < TOP_K, tl.exp(b_bits.to(tl.float32, bitcast=True) - largest), 0.0) / total
    if NORMALIZE:
        b_chosen = b_chosen / tl.sum(b_chosen, axis=0)
    m_s = o_s < TOP_K
    tl.store(p_ids + o_s, b_ids, mask=m_s)
    tl.store(p_shares + o_s, b_chosen, mask=m_s)


PADDING = -1
"""In the place of a pair: a row that nobody writes. In the place of an expert: a block without rows."""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Which rows each expert multiplies."""

    expert_ids_TS: torch.Tensor
    num_experts: int
    block_rows: int
    """1: a GEMV for each pair, and the tensors below are empty."""
    pairs_BR: torch.Tensor
    """int32: pairs by expert, and in their own order for each; PADDING behind the last one of an expert. Blocks that have no
    expert hold anything."""
    block_experts_B: torch.Tensor
    """int32: the expert of a block; PADDING behind the last block."""

    @property
    def is_sorted(self) -> bool:
        """Else the tensors are empty: all tokens fit into one block, and an expert's are looked up."""
        return sorts_pairs(len(self.expert_ids_TS))

    @property
    def num_blocks(self) -> int:
        """Of a launch over blocks. Where nothing is sorted, one for each pair: the first pair of an expert works, others end."""
        return len(self.block_experts_B) if self.is_sorted else self.num_pairs

    @property
    def num_pairs(self) -> int:
        return self.expert_ids_TS.numel()

    @property
    def top_k(self) -> int:
        return self.expert_ids_TS.shape[1]


def order_experts(expert_ids_TS: torch.Tensor, num_experts: int, tensors: Sequence[torch.Tensor]) -> ExpertOrder:
    """Sort the pairs into `tensors`, which are shaped as `order_specs` says; the same ids give the same order to the bit."""
    order = _empty_order(expert_ids_TS, num_experts, tensors)
    if order.is_sorted:
        if can_run(expert_ids_TS):
            order_experts_triton(order, tensors[2])
        else:
            _fill_reference(order)
    return order


def order_experts_reference(
    expert_ids_TS: torch.Tensor, num_experts: int, tensors: Sequence[torch.Tensor]
) -> ExpertOrder:
    """The same in plain torch."""
    order = _empty_order(expert_ids_TS, num_experts, tensors)
    if order.is_sorted:
        _fill_reference(order)
    return order


def _empty_order(expert_ids_TS: torch.Tensor, num_experts: int, tensors: Sequence[torch.Tensor]) -> ExpertOrder:
    num_rows, top_k = expert_ids_TS.shape
    assert expert_ids_TS.dtype == torch.int32, f"{expert_ids_TS.dtype}, not int32"
    assert expert_ids_TS.is_contiguous(), f"{expert_ids_TS.shape} with strides {expert_ids_TS.stride()}"
    for spec, tensor in zip(order_specs(num_rows, top_k, num_experts), tensors, strict=True):
        assert tuple(tensor.shape) == spec.shape, f"{tensor.shape=}, not {spec}"
        assert tensor.dtype == torch.int32, f"{tensor.dtype=}, not {spec}"
    pairs_BR, block_experts_B, _ = tensors
    block_rows = expert_block_rows(num_rows, top_k, num_experts)
    return ExpertOrder(expert_ids_TS, num_experts, block_rows, pairs_BR, block_experts_B)


def _fill_reference(order: ExpertOrder) -> None:
    ids_P = order.expert_ids_TS.flatten().long()
    sorted_P = ids_P.sort(stable=True).indices
    counts_E = ids_P.bincount(minlength=order.num_experts)
    blocks_E = -(-counts_E // order.block_rows)
    first_row_E = (blocks_E.cumsum(0) - blocks_E) * order.block_rows
    first_pair_E = counts_E.cumsum(0) - counts_E
    experts_P = ids_P[sorted_P]
    rows_P = first_row_E[experts_P] + torch.arange(len(ids_P), device=ids_P.device) - first_pair_E[experts_P]
    order.pairs_BR.fill_(PADDING).view(-1)[rows_P] = sorted_P.to(torch.int32)
    order.block_experts_B.fill_(PADDING)
    experts_B = torch.arange(order.num_experts, device=ids_P.device).repeat_interleave(blocks_E)
    order.block_experts_B[: len(experts_B)] = experts_B.to(torch.int32)


def order_experts_triton(order: ExpertOrder, counts_CE: torch.Tensor, cut_pairs: int = CUT_PAIRS) -> None:
    """Fill the order by Triton kernels: a program for each expert and cut of the pairs, after a count where there are cuts."""
    num_pairs, num_experts = order.num_pairs, order.num_experts
    num_cuts = max(1, len(counts_CE))
    assert num_cuts == -(-num_pairs // cut_pairs), f"{num_pairs} pairs in {num_cuts} cuts of {cut_pairs}"
    form = expert_order_form(len(order.expert_ids_TS), order.top_k, num_experts, cut_pairs)
    block_e = next_power_of_two(num_experts)
    pdl = supports_pdl(order.expert_ids_TS)
    flags = {"BLOCK_E": block_e, "CUT_PAIRS": cut_pairs, "PDL": pdl, **pdl_launch(pdl)}
    if num_cuts > 1:
        _count_kernel[(num_cuts,)](order.expert_ids_TS, counts_CE, num_pairs, num_experts, num_warps=4, **flags)
    _order_kernel[(num_experts, num_cuts)](
        order.expert_ids_TS,
        counts_CE,
        order.pairs_BR,
        order.block_experts_B,
        num_pairs,
        num_experts,
        num_cuts,
        len(order.block_experts_B),
        COUNTED=num_cuts > 1,
        BLOCK_C=form.block_cuts,
        BLOCK_P=form.block_pairs,
        BLOCK_ROWS=form.block_rows,
        num_warps=4 if form.block_cuts * block_e <= 8192 else 8,
        **flags,
    )


@jit
def _count_kernel(p_ids, p_counts, num_pairs, num_experts, BLOCK_E: constexpr, CUT_PAIRS: constexpr, PDL: constexpr):
    i_cut = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    o_p = i_cut * CUT_PAIRS + tl.arange(0, CUT_PAIRS)
    m_p = o_p < num_pairs
    b_ids = tl.load(p_ids + o_p, mask=m_p, other=0)
    tl.store(p_counts + i_cut * num_experts + o_e, tl.histogram(b_ids, BLOCK_E, mask=m_p), mask=o_e < num_experts)


@jit_counting("num_cuts", "num_blocks")
def _order_kernel(
    p_ids,
    p_counts,
    p_pairs,
    p_block_experts,
    num_pairs,
    num_experts,
    num_cuts,
    num_blocks,
    COUNTED: constexpr,
    BLOCK_C: constexpr,
    BLOCK_P: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_E: constexpr,
    CUT_PAIRS: constexpr,
    PDL: constexpr,
):
    i_expert = tl.program_id(0)
    i_cut = tl.program_id(1)
    o_e = tl.arange(0, BLOCK_E)
    o_p = tl.arange(0, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Pairs of every expert, and of this one in the cuts before.
    before = 0
    if COUNTED:
        o_c = tl.arange(0, BLOCK_C)
        m_ce = (o_c < num_cuts)[:, None] & (o_e < num_experts)[None, :]
        b_parts = tl.load(p_counts + o_c[:, None] * num_experts + o_e[None, :], mask=m_ce, other=0)
        b_counts = tl.sum(b_parts, axis=0)
        b_before = tl.sum(tl.where((o_c < i_cut)[:, None], b_parts, 0), axis=0)
        before = tl.sum(tl.where(o_e == i_expert, b_before, 0), axis=0)
    else:
        b_counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for p in range(0, num_pairs, BLOCK_P):
            m_p = p + o_p < num_pairs
            b_counts += tl.histogram(tl.load(p_ids + p + o_p, mask=m_p, other=0), BLOCK_E, mask=m_p)
    b_blocks = (b_counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.sum(tl.where(o_e < i_expert, b_blocks, 0), axis=0)
    count = tl.sum(tl.where(o_e == i_expert, b_counts, 0), axis=0)
    p_mine = p_pairs + first_block.to(tl.int64) * BLOCK_ROWS
    end = min((i_cut + 1) * CUT_PAIRS, num_pairs)
    for p in range(i_cut * CUT_PAIRS, end, BLOCK_P):
        m_p = p + o_p < end
        m_mine = m_p & (tl.load(p_ids + p + o_p, mask=m_p, other=-1) == i_expert)
        b_mine = m_mine.to(tl.int32)
        tl.store(p_mine + before + tl.cumsum(b_mine, axis=0) - 1, p + o_p, mask=m_mine)
        before += tl.sum(b_mine, axis=0)
    if i_cut == 0:
        o_r = tl.arange(0, BLOCK_ROWS)
        mine = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
        tl.store(p_mine + count + o_r, tl.full((BLOCK_ROWS,), -1, tl.int32), mask=count + o_r < mine * BLOCK_ROWS)
        for b in range(0, mine, BLOCK_ROWS):
            tl.store(p_block_experts + first_block + b + o_r, i_expert + 0 * o_r, mask=b + o_r < mine)
        if i_expert == num_experts - 1:
            for b in range(first_block + mine, num_blocks, BLOCK_ROWS):
                m_b = b + o_r < num_blocks
                tl.store(p_block_experts + b + o_r, tl.full((BLOCK_ROWS,), -1, tl.int32), mask=m_b)

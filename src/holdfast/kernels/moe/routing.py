"""Routing: the experts of each token with their shares, and ExpertOrder, the pairs of token and expert sorted by expert.

T tokens, S experts of a token, E experts, P = T * S pairs (pair t * S + s), B blocks, R rows of a block, C cuts of the pairs

Pairs are sorted into blocks of rows that one expert multiplies. A small batch is not sorted: each pair reads its expert's
weight (kernels/moe/expert_gemv.py), or each expert finds its rows (kernels/moe/grouped_gemm.py). Shapes depend on the
number of tokens only, so a CUDA graph can hold the launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.geometry import (
    CUT_PAIRS,
    LARGE_BATCH_PAIRS,
    expert_block_rows,
    order_block_pairs,
    order_specs,
    sorts_pairs,
)
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import (
    check_dense,
    constexpr,
    jit,
    jit_counting,
    kernel_constant,
    next_power_of_two,
    release_then_wait,
    tl,
)
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight


class Routing(NamedTuple):
    """How experts are chosen from a token's logits, and how their shares are computed."""

    normalizes: bool = False
    """Divide the shares of a token by their sum."""
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Score function; sqrtsoftplus is sqrt(log(1 + exp(logit)))."""
    num_groups: int = 1
    """Equal groups of experts; a token takes its experts from the best `groups_taken`."""
    groups_taken: int = 1
    group_score: Literal["largest", "two_largest"] = "largest"
    """Rank groups by their largest score, or by the sum of their two largest."""
    share_scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """True for top-k of a softmax over all experts, which the fused decode path computes too."""
        return self.scoring == "softmax" and not self.limits_groups and self.share_scale == 1.0

    @property
    def limits_groups(self) -> bool:
        return self.groups_taken < self.num_groups

    def ranks_by_logits(self, has_score_bias: bool) -> bool:
        """True if logits rank experts and groups as scores do. Logits differ when scores round to one number."""
        sums_scores = self.limits_groups and self.group_score == "two_largest"
        return self.scoring == "softmax" and not has_score_bias and not sums_scores


LEAST_SUM = 1e-20
"""Added to the divisor of normalized shares unless the scoring is softmax: all scores may be zero."""
KERNEL_LEAST_SUM = kernel_constant(LEAST_SUM)


def route_tokens_reference(
    logits_TE: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None = None,
    score_bias_E: Tensor | None = None,
) -> None:
    """Find the S experts with the largest scores in the groups taken, ties to the lower id, and their float32 shares.

    `bias_E` is added to the logits. `score_bias_E` is added to the scores that rank experts and groups, not to those that
    shares come from. A NaN score ranks lowest and makes the token's shares NaN; ids stay valid and distinct.
    """
    check_routing(logits_TE, routing, expert_ids_TS, shares_TS, bias_E, score_bias_E)
    if bias_E is not None:
        logits_TE = logits_TE + bias_E.float()
    scores_TE = scores_of(logits_TE, routing.scoring)
    choice_TE = logits_TE if routing.ranks_by_logits(score_bias_E is not None) else scores_TE
    if score_bias_E is not None:
        choice_TE = choice_TE + score_bias_E
    ids_TS = _rank_experts(choice_TE, routing)[:, : expert_ids_TS.shape[1]]
    is_nan_T1 = choice_TE.isnan().any(dim=1, keepdim=True)
    expert_ids_TS.copy_(ids_TS)
    shares_TS.copy_(shares_of(scores_TE.gather(1, ids_TS), routing).masked_fill(is_nan_T1, torch.nan))


def scores_of(logits_TE: Tensor, scoring: str) -> Tensor:
    """Return the scores of logits."""
    if scoring == "softmax":
        return logits_TE.softmax(dim=1)
    return logits_TE.sigmoid() if scoring == "sigmoid" else F.softplus(logits_TE).sqrt()


def shares_of(chosen_TS: Tensor, routing: Routing) -> Tensor:
    """Return the shares of a token's experts from their scores."""
    if routing.normalizes:
        sum_T1 = chosen_TS.sum(dim=1, keepdim=True)
        chosen_TS = chosen_TS / (sum_T1 if routing.scoring == "softmax" else sum_T1 + LEAST_SUM)
    return chosen_TS * routing.share_scale


def _rank_experts(choice_TE: Tensor, routing: Routing) -> Tensor:
    """Sort experts by score, those of the groups taken first."""
    ranked_TE = _with_nan_lowest(choice_TE)
    order_TE = ranked_TE.sort(dim=1, descending=True, stable=True).indices
    if not routing.limits_groups:
        return order_TE
    ranked_TGM = ranked_TE.unflatten(1, (routing.num_groups, -1))
    if routing.group_score == "largest":
        groups_TG = ranked_TGM.amax(dim=2)
    else:
        groups_TG = _with_nan_lowest(ranked_TGM.topk(2, dim=2).values.sum(dim=2))
    best_TG = groups_TG.sort(dim=1, descending=True, stable=True).indices[:, : routing.groups_taken]
    is_left_TG = torch.ones_like(groups_TG, dtype=torch.int32).scatter_(1, best_TG, 0)
    is_left_TE = is_left_TG.repeat_interleave(ranked_TGM.shape[2], dim=1)
    return order_TE.gather(1, is_left_TE.gather(1, order_TE).sort(dim=1, stable=True).indices)


def _with_nan_lowest(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def check_routing(
    logits_TE: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None,
    score_bias_E: Tensor | None,
) -> None:
    """Assert that shapes match and rows are dense."""
    num_rows, num_experts = logits_TE.shape
    top_k = expert_ids_TS.shape[1]
    assert top_k <= num_experts, f"{top_k} experts of a token, and there are {num_experts}"
    for tensor, dtype in ((logits_TE, torch.float32), (expert_ids_TS, torch.int32), (shares_TS, torch.float32)):
        assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
        assert tensor.shape[0] == num_rows, f"{tensor.shape=} for {num_rows} tokens"
    check_dense(logits_TE, expert_ids_TS, shares_TS)
    assert shares_TS.shape == expert_ids_TS.shape, f"{shares_TS.shape=} {expert_ids_TS.shape=}"
    for bias in (bias_E, score_bias_E):
        assert bias is None or bias.shape == (num_experts,), f"{bias.shape=} for {num_experts} experts"
    assert score_bias_E is None or score_bias_E.dtype == torch.float32, f"{score_bias_E.dtype=}, not float32"
    group_size, rest = divmod(num_experts, routing.num_groups)
    assert not rest, f"{num_experts} experts in {routing.num_groups} groups: they are not equal"
    assert 1 <= routing.groups_taken <= routing.num_groups, f"{routing}: groups that are not there"
    if routing.limits_groups:
        seen = routing.groups_taken * group_size
        assert top_k <= seen, f"{top_k} experts of a token, and the {routing.groups_taken} groups taken have {seen}"
        assert routing.group_score == "largest" or group_size > 1, f"two scores of groups of {group_size}"


def route_tokens_triton(
    logits_TE: Tensor,
    routing: Routing,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    bias_E: Tensor | None = None,
    score_bias_E: Tensor | None = None,
) -> None:
    """Launch one program per token."""
    check_routing(logits_TE, routing, expert_ids_TS, shares_TS, bias_E, score_bias_E)
    (num_rows, num_experts), top_k = logits_TE.shape, expert_ids_TS.shape[1]
    if not num_rows:
        return
    num_groups = routing.num_groups if routing.limits_groups else 1
    group_size = num_experts // num_groups
    block_g, block_m = next_power_of_two(num_groups), next_power_of_two(group_size)
    _route_kernel[(num_rows,)](
        logits_TE, logits_TE if bias_E is None else bias_E, logits_TE if score_bias_E is None else score_bias_E,
        expert_ids_TS, shares_TS, num_experts,
        IS_PLAIN=routing.is_plain and score_bias_E is None, HAS_BIAS=bias_E is not None,
        HAS_SCORE_BIAS=score_bias_E is not None, NORMALIZE=routing.normalizes, SCORING=routing.scoring,
        BY_LOGITS=routing.ranks_by_logits(score_bias_E is not None), SUMS_TWO=routing.group_score == "two_largest",
        SHARE_SCALE=routing.share_scale, GROUP_SIZE=group_size,
        GROUPS_TAKEN=routing.groups_taken if routing.limits_groups else 0, TOP_K=top_k, BLOCK_G=block_g,
        BLOCK_M=block_m, BLOCK_S=next_power_of_two(top_k), num_warps=max(1, min(4, block_g * block_m // 256)),
        **pdl_flags(logits_TE),
    )  # fmt: skip


route_tokens = operation(reference=route_tokens_reference, triton=route_tokens_triton)


@jit
def _route_kernel(
    p_logits, p_bias, p_score_bias, p_ids, p_shares, num_experts,
    IS_PLAIN: constexpr, HAS_BIAS: constexpr, HAS_SCORE_BIAS: constexpr, NORMALIZE: constexpr, SCORING: constexpr,
    BY_LOGITS: constexpr, SUMS_TWO: constexpr, SHARE_SCALE: constexpr, GROUP_SIZE: constexpr, GROUPS_TAKEN: constexpr,
    TOP_K: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr, BLOCK_S: constexpr, PDL: constexpr,
):  # fmt: skip
    BLOCK_E: constexpr = BLOCK_G * BLOCK_M
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    if GROUPS_TAKEN:
        # Each group is padded to a power of two; ids still rise with positions.
        o_m = o_e % BLOCK_M
        o_e = o_e // BLOCK_M * GROUP_SIZE + o_m
        m_e = (o_m < GROUP_SIZE) & (o_e < num_experts)
    release_then_wait(PDL)
    b_logits = tl.load(p_logits + i_row * num_experts + o_e, mask=m_e, other=float("-inf"))
    if HAS_BIAS:
        b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    p_ids += i_row * TOP_K
    p_shares += i_row * TOP_K
    if IS_PLAIN:
        choose_experts(b_logits, p_ids, p_shares, m_e, NORMALIZE, TOP_K, BLOCK_E, BLOCK_S)
    else:
        b_bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
        if HAS_SCORE_BIAS:
            b_bias = tl.load(p_score_bias + o_e, mask=m_e, other=0.0)
        _choose_by_scores(
            b_logits, b_bias, p_ids, p_shares, m_e, NORMALIZE, SCORING, BY_LOGITS, SUMS_TWO, SHARE_SCALE, GROUP_SIZE,
            GROUPS_TAKEN, TOP_K, BLOCK_G, BLOCK_M, BLOCK_S,
        )  # fmt: skip


@jit
def _choose_by_scores(
    b_logits, b_bias, p_ids, p_shares, m_e,
    NORMALIZE: constexpr, SCORING: constexpr, BY_LOGITS: constexpr, SUMS_TWO: constexpr, SHARE_SCALE: constexpr,
    GROUP_SIZE: constexpr, GROUPS_TAKEN: constexpr, TOP_K: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr,
    BLOCK_S: constexpr,
):  # fmt: skip
    """Store ids and shares of one token, by scores and groups."""
    BLOCK_E: constexpr = BLOCK_G * BLOCK_M
    o_e = tl.arange(0, BLOCK_E)
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < TOP_K
    if SCORING == "softmax":
        largest = tl.max(nan_lowest(b_logits), axis=0)
        b_scores = tl.where(m_e, tl.exp(b_logits - largest), 0.0)
        b_scores = b_scores / tl.sum(b_scores, axis=0)
    else:
        b_scores = lone_scores(b_logits, SCORING)
    b_choice = b_logits
    if not BY_LOGITS:
        b_choice = b_scores + b_bias
    is_nan = tl.max((m_e & (b_choice != b_choice)).to(tl.int32), axis=0)
    # Padding sorts after everything, NaN experts included.
    b_order = tl.where(m_e, _order_of(nan_lowest(b_choice)), -2147483648)
    if GROUPS_TAKEN:
        m_taken = _best_groups(b_choice, b_order, SUMS_TWO, GROUPS_TAKEN, BLOCK_G, BLOCK_M)
        b_order = tl.where(m_taken, b_order, -2147483648)
    b_ids = tl.zeros((BLOCK_S,), dtype=tl.int32)
    b_chosen = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for s in tl.static_range(TOP_K):
        best = tl.max(b_order, axis=0)
        place = tl.min(tl.where(b_order == best, o_e, BLOCK_E), axis=0)
        score = tl.sum(tl.where(o_e == place, b_scores, 0.0), axis=0)
        b_order = tl.where(o_e == place, -2147483648, b_order)
        b_ids = tl.where(o_s == s, place, b_ids)
        b_chosen = tl.where(o_s == s, score, b_chosen)
    if GROUPS_TAKEN:
        b_ids = b_ids // BLOCK_M * GROUP_SIZE + b_ids % BLOCK_M
    b_chosen = finished_shares(b_chosen, NORMALIZE, SCORING, SHARE_SCALE)
    b_chosen = tl.where(is_nan != 0, float("nan"), b_chosen)
    tl.store(p_ids + o_s, b_ids, mask=m_s)
    tl.store(p_shares + o_s, b_chosen, mask=m_s)


@jit
def lone_scores(b_logits, SCORING: constexpr):
    """Return sigmoid or sqrtsoftplus scores; 0 for a logit of -inf."""
    if SCORING == "sigmoid":
        b_scores = tl.sigmoid(b_logits)
    else:
        # log1p(u): dividing by (1 + u) - 1 cancels the rounding of 1 + u.
        b_u = tl.exp(tl.where(b_logits > 20.0, 0.0, b_logits))
        b_w = 1.0 + b_u
        b_log = tl.where(b_w == 1.0, b_u, tl.log(b_w) * (b_u / tl.where(b_w == 1.0, 1.0, b_w - 1.0)))
        b_scores = tl.sqrt(tl.where(b_logits > 20.0, b_logits, b_log))
    return b_scores


@jit
def finished_shares(b_chosen, NORMALIZE: constexpr, SCORING: constexpr, SHARE_SCALE: constexpr):
    """Return the shares of a token's experts from their scores; padding is 0."""
    if NORMALIZE:
        total = tl.sum(b_chosen, axis=0)
        if SCORING != "softmax":
            total += KERNEL_LEAST_SUM
        b_chosen = b_chosen / total
    return b_chosen * SHARE_SCALE


@jit
def _best_groups(
    b_choice, b_order, SUMS_TWO: constexpr, GROUPS_TAKEN: constexpr, BLOCK_G: constexpr, BLOCK_M: constexpr
):
    """Mask the positions of the groups that a token takes."""
    o_g = tl.arange(0, BLOCK_G)
    b_order_gm = tl.reshape(b_order, (BLOCK_G, BLOCK_M))
    b_first = tl.max(b_order_gm, axis=1)
    if SUMS_TWO:
        o_m = tl.arange(0, BLOCK_M)[None, :]
        b_place = tl.min(tl.where(b_order_gm == b_first[:, None], o_m, BLOCK_M), axis=1)
        b_second = tl.max(tl.where(o_m == b_place[:, None], -2147483648, b_order_gm), axis=1)
        b_sums = _number_of(b_first) + _number_of(b_second)
        # A padding group holds only padding.
        b_groups = tl.where(b_first == -2147483648, -2147483648, _order_of(nan_lowest(b_sums)))
    else:
        b_groups = b_first
    b_taken = tl.zeros((BLOCK_G,), dtype=tl.int32)
    for _ in tl.static_range(GROUPS_TAKEN):
        best = tl.max(b_groups, axis=0)
        group = tl.min(tl.where(b_groups == best, o_g, BLOCK_G), axis=0)
        b_groups = tl.where(o_g == group, -2147483648, b_groups)
        b_taken = tl.where(o_g == group, 1, b_taken)
    b_taken_gm = tl.broadcast_to(b_taken[:, None], (BLOCK_G, BLOCK_M))
    return tl.reshape(b_taken_gm, (BLOCK_G * BLOCK_M,)) != 0


@jit
def nan_lowest(b_x):
    """Replace NaN by -inf, and -0 by 0."""
    return tl.where(b_x != b_x, float("-inf"), b_x) + 0.0


@jit
def _order_of(b_x):
    """Return int32 keys that sort like the numbers: an integer maximum is one instruction of a warp."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@jit
def _number_of(b_order):
    """Invert `_order_of`."""
    return tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order).to(tl.float32, bitcast=True)


@jit
def choose_experts(
    b_logits, p_ids, p_shares, m_e, NORMALIZE: constexpr, TOP_K: constexpr, BLOCK_E: constexpr, BLOCK_S: constexpr
):
    """Store ids and shares of one token by plain routing."""
    o_e = tl.arange(0, BLOCK_E)
    o_s = tl.arange(0, BLOCK_S)
    b_ranked = nan_lowest(b_logits)
    b_order = tl.where(m_e, _order_of(b_ranked), -2147483648)
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
    # A NaN logit makes the total and all shares NaN.
    b_chosen = tl.where(o_s < TOP_K, tl.exp(_number_of(b_chosen_order) - largest), 0.0) / total
    if NORMALIZE:
        b_chosen = b_chosen / tl.sum(b_chosen, axis=0)
    m_s = o_s < TOP_K
    tl.store(p_ids + o_s, b_ids, mask=m_s)
    tl.store(p_shares + o_s, b_chosen, mask=m_s)


CUT_COUNTS = 4096
"""Counts of cuts that a program adds up at once."""
PADDING = -1
"""As a pair: an unused row of a block. As an expert: an unused block, or an expert of another rank."""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Rows that each expert multiplies, as blocks of sorted pairs."""

    expert_ids_TS: Tensor
    """PADDING if another rank has the expert: the row of such a pair is not written."""
    num_experts: int
    """Experts of this rank."""
    block_rows: int
    """1: one GEMV a pair, and the tensors below are empty."""
    pairs_BR: Tensor
    """int32: pairs by expert, in order; PADDING after the last of an expert. Undefined in unused blocks."""
    block_experts_B: Tensor
    """int32: the expert of a block; PADDING after the last block."""

    @property
    def is_sorted(self) -> bool:
        """False if all tokens fit into one block: then the tensors are empty, and kernels search an expert's rows."""
        return sorts_pairs(len(self.expert_ids_TS))

    @property
    def num_blocks(self) -> int:
        """Blocks of a launch. If unsorted, one per pair: the first pair of an expert does the work."""
        return len(self.block_experts_B) if self.is_sorted else self.num_pairs

    @property
    def num_pairs(self) -> int:
        return self.expert_ids_TS.numel()

    @property
    def top_k(self) -> int:
        return self.expert_ids_TS.shape[1]


class ExpertProduct(NamedTuple):
    """Operands of a product of each pair's row and its expert's weight, with optional gate and bias."""

    x_XK: Tensor
    """One row per token [T, K] or per pair [P, K]."""
    weight: AnyWeight
    """[E, N, K], or [E, 2 N, K] if gated."""
    order: ExpertOrder
    out_PN: Tensor
    gated: bool
    quantized: QuantizedRows | None = None
    """Buffers for the quantized rows of x, filled or not, if the scheme needs them."""
    bias_EN: Tensor | None = None
    form: GateForm = SILU_HALVES

    def check(self) -> None:
        """Assert that shapes match and rows are dense."""
        x_XK, weight, order, out_PN, gated, quantized, bias_EN, _ = self
        num_experts, size_n, size_k = weight.shape
        num_pairs, width = order.num_pairs, size_n // 2 if gated else size_n
        assert num_experts == order.num_experts, f"{weight.shape=}, and pairs of {order.num_experts} experts"
        assert x_XK.shape[0] in (num_pairs, num_pairs // order.top_k), f"{x_XK.shape=} for {num_pairs} pairs"
        assert x_XK.shape[1] == size_k, f"{x_XK.shape=} {weight.shape=}"
        assert out_PN.shape == (num_pairs, width), f"{out_PN.shape=}, not {(num_pairs, width)}"
        assert not gated or size_n % 2 == 0, f"{size_n} rows are no gates and ups"
        assert bias_EN is None or bias_EN.shape == (num_experts, size_n), f"{bias_EN.shape=} beside {weight.shape=}"
        tensors: tuple[Tensor, ...] = (weight,) if isinstance(weight, Tensor) else ()
        if isinstance(weight, QuantizedWeight):
            tensors = weight.codes, weight.scales
        rows = () if quantized is None else (quantized.codes_TK, quantized.scales_TB)
        check_dense(x_XK, out_PN, *tensors, *rows, bias_EN)


def local_ids_reference(ids_TS: Tensor, first_expert: int, num_local: int, out_TS: Tensor) -> Tensor:
    """Subtract `first_expert` from expert ids; PADDING for ids outside this rank's `num_local` experts."""
    own_TS = ids_TS - first_expert
    return out_TS.copy_(own_TS.masked_fill((own_TS < 0) | (own_TS >= num_local), PADDING))


def local_ids_triton(ids_TS: Tensor, first_expert: int, num_local: int, out_TS: Tensor) -> Tensor:
    check_dense(ids_TS, out_TS)
    num_pairs = ids_TS.numel()
    if num_pairs:
        _local_ids_kernel[(-(-num_pairs // LARGE_BATCH_PAIRS),)](
            ids_TS, out_TS, num_pairs, FIRST=first_expert, COUNT=num_local, BLOCK=LARGE_BATCH_PAIRS, num_warps=4
        )
    return out_TS


local_ids = operation(reference=local_ids_reference, triton=local_ids_triton)


@jit_counting("num_pairs")
def _local_ids_kernel(p_ids, p_out, num_pairs, FIRST: constexpr, COUNT: constexpr, BLOCK: constexpr):
    o_p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_p = o_p < num_pairs
    b_own = tl.load(p_ids + o_p, mask=m_p, other=0) - FIRST
    tl.store(p_out + o_p, tl.where((b_own >= 0) & (b_own < COUNT), b_own, -1), mask=m_p)


def order_experts(
    expert_ids_TS: Tensor, num_experts: int, tensors: Sequence[Tensor], num_local: int | None = None
) -> ExpertOrder:
    """Sort the pairs into `tensors` of `order_specs`; the same ids always give the same order.

    If `num_local` is given, ids are those of `local_ids`, and this rank has `num_local` of the `num_experts`.
    """
    num_rows, top_k = expert_ids_TS.shape
    assert expert_ids_TS.dtype == torch.int32, f"{expert_ids_TS.dtype}, not int32"
    check_dense(expert_ids_TS)
    for spec, tensor in zip(order_specs(num_rows, top_k, num_experts, num_local), tensors, strict=True):
        assert tuple(tensor.shape) == spec.shape, f"{tensor.shape=}, not {spec}"
        assert tensor.dtype == torch.int32, f"{tensor.dtype=}, not {spec}"
    pairs_BR, block_experts_B, counts_CE = tensors
    block_rows = expert_block_rows(num_rows, top_k, num_experts)
    num_own = num_experts if num_local is None else num_local
    order = ExpertOrder(expert_ids_TS, num_own, block_rows, pairs_BR, block_experts_B)
    if order.is_sorted:
        fill_order(order, counts_CE)
    return order


def fill_order_reference(order: ExpertOrder, counts_CE: Tensor, cut_pairs: int = CUT_PAIRS) -> None:
    """Fill `pairs_BR` and `block_experts_B` from the ids of an order."""
    ids_P = order.expert_ids_TS.flatten().long()
    num_padding = int((ids_P == PADDING).sum())
    sorted_P = ids_P.sort(stable=True).indices[num_padding:]  # PADDING sorts first
    counts_E = ids_P[sorted_P].bincount(minlength=order.num_experts)
    blocks_E = -(-counts_E // order.block_rows)
    first_row_E = (blocks_E.cumsum(0) - blocks_E) * order.block_rows
    first_pair_E = counts_E.cumsum(0) - counts_E
    experts_P = ids_P[sorted_P]
    rows_P = first_row_E[experts_P] + torch.arange(len(sorted_P), device=ids_P.device) - first_pair_E[experts_P]
    order.pairs_BR.fill_(PADDING).view(-1)[rows_P] = sorted_P.to(torch.int32)
    order.block_experts_B.fill_(PADDING)
    experts_B = torch.arange(order.num_experts, device=ids_P.device).repeat_interleave(blocks_E)
    order.block_experts_B[: len(experts_B)] = experts_B.to(torch.int32)


def fill_order_triton(order: ExpertOrder, counts_CE: Tensor, cut_pairs: int = CUT_PAIRS) -> None:
    """Launch one program per expert; if there are counts, count the pairs of cuts first, and sort each cut alone."""
    num_pairs, num_experts, num_cuts = order.num_pairs, order.num_experts, len(counts_CE)
    assert num_cuts in (0, -(-num_pairs // cut_pairs)), f"{num_pairs} pairs in {num_cuts} cuts of {cut_pairs}"
    ids_TS, num_blocks = order.expert_ids_TS, len(order.block_experts_B)
    outputs = order.pairs_BR, order.block_experts_B, num_pairs, num_experts
    flags = {"BLOCK_E": next_power_of_two(num_experts), **pdl_flags(ids_TS)}
    if num_cuts:
        flags["CUT_PAIRS"] = cut_pairs
        _count_kernel[(num_cuts,)](ids_TS, counts_CE, num_pairs, num_experts, num_warps=4, **flags)
        _order_cuts_kernel[(num_cuts,)](
            ids_TS, counts_CE, *outputs, num_cuts, num_blocks,
            CUTS=max(1, CUT_COUNTS // flags["BLOCK_E"]), BLOCK_ROWS=order.block_rows, num_warps=8, **flags,
        )  # fmt: skip
        return
    block_pairs = order_block_pairs(num_pairs)
    assert block_pairs, f"{num_pairs} pairs, and no counts of cuts"
    _order_kernel[(num_experts,)](
        ids_TS, *outputs, num_blocks, BLOCK_P=block_pairs, BLOCK_ROWS=order.block_rows, num_warps=4, **flags
    )


fill_order = operation(
    reference=fill_order_reference,
    triton=fill_order_triton,
    place=lambda order, counts_CE, cut_pairs=CUT_PAIRS: order.expert_ids_TS,
)


@jit
def _count_kernel(p_ids, p_counts, num_pairs, num_experts, BLOCK_E: constexpr, CUT_PAIRS: constexpr, PDL: constexpr):
    i_cut = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    release_then_wait(PDL)
    o_p = i_cut * CUT_PAIRS + tl.arange(0, CUT_PAIRS)
    m_p = o_p < num_pairs
    b_ids = tl.load(p_ids + o_p, mask=m_p, other=-1)
    b_counts = tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
    tl.store(p_counts + i_cut * num_experts + o_e, b_counts, mask=o_e < num_experts)


@jit_counting("num_blocks")
def _order_kernel(
    p_ids, p_pairs, p_block_experts, num_pairs, num_experts, num_blocks,
    BLOCK_P: constexpr, BLOCK_ROWS: constexpr, BLOCK_E: constexpr, PDL: constexpr,
):  # fmt: skip
    i_expert = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    o_p = tl.arange(0, BLOCK_P)
    release_then_wait(PDL)
    b_counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for p in range(0, num_pairs, BLOCK_P):
        b_ids = tl.load(p_ids + p + o_p, mask=p + o_p < num_pairs, other=-1)
        b_counts += tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
    b_blocks = (b_counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.sum(tl.where(o_e < i_expert, b_blocks, 0), axis=0)
    count = tl.sum(tl.where(o_e == i_expert, b_counts, 0), axis=0)
    p_mine = p_pairs + first_block.to(tl.int64) * BLOCK_ROWS
    before = 0
    for p in range(0, num_pairs, BLOCK_P):
        m_mine = tl.load(p_ids + p + o_p, mask=p + o_p < num_pairs, other=-1) == i_expert
        b_mine = m_mine.to(tl.int32)
        tl.store(p_mine + before + tl.cumsum(b_mine, axis=0) - 1, p + o_p, mask=m_mine)
        before += tl.sum(b_mine, axis=0)
    _finish_expert(p_pairs, p_block_experts, i_expert, first_block, count, num_experts, num_blocks, BLOCK_ROWS)


@jit_counting("num_cuts", "num_blocks")
def _order_cuts_kernel(
    p_ids, p_counts, p_pairs, p_block_experts, num_pairs, num_experts, num_cuts, num_blocks,
    CUTS: constexpr, BLOCK_ROWS: constexpr, BLOCK_E: constexpr, CUT_PAIRS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Sort the pairs of a cut by expert. Each then has a place: where its expert's run begins, and its rank there."""
    i_cut = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    o_c = tl.arange(0, CUTS)
    o_p = tl.arange(0, CUT_PAIRS)
    release_then_wait(PDL)
    m_p = i_cut * CUT_PAIRS + o_p < num_pairs
    b_ids = tl.load(p_ids + i_cut * CUT_PAIRS + o_p, mask=m_p, other=-1)
    # Pairs without an expert come last. The place within the cut breaks ties, so the sort is stable.
    b_keys = tl.sort(tl.where(b_ids >= 0, b_ids, num_experts) * CUT_PAIRS + o_p)
    b_counts, b_before = tl.zeros((BLOCK_E,), tl.int32), tl.zeros((BLOCK_E,), tl.int32)
    for c in range(0, num_cuts, CUTS):
        m_ce = (c + o_c < num_cuts)[:, None] & (o_e < num_experts)[None, :]
        b_parts = tl.load(p_counts + (c + o_c)[:, None] * num_experts + o_e[None, :], mask=m_ce, other=0)
        b_counts += tl.sum(b_parts, axis=0)
        b_before += tl.sum(tl.where((c + o_c < i_cut)[:, None], b_parts, 0), axis=0)
    b_own = tl.load(p_counts + i_cut * num_experts + o_e, mask=o_e < num_experts, other=0)
    b_blocks = (b_counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    b_first_block = tl.cumsum(b_blocks, axis=0) - b_blocks
    b_start = b_first_block * BLOCK_ROWS + b_before - (tl.cumsum(b_own, axis=0) - b_own)
    b_experts = b_keys // CUT_PAIRS
    b_place = tl.gather(b_start, tl.minimum(b_experts, num_experts - 1), axis=0) + o_p
    tl.store(p_pairs + b_place, i_cut * CUT_PAIRS + b_keys % CUT_PAIRS, mask=b_experts < num_experts)
    for i_expert in range(i_cut, num_experts, num_cuts):
        first_block = tl.sum(tl.where(o_e == i_expert, b_first_block, 0), axis=0)
        count = tl.sum(tl.where(o_e == i_expert, b_counts, 0), axis=0)
        _finish_expert(p_pairs, p_block_experts, i_expert, first_block, count, num_experts, num_blocks, BLOCK_ROWS)


@jit
def _finish_expert(
    p_pairs, p_block_experts, i_expert, first_block, count, num_experts, num_blocks, BLOCK_ROWS: constexpr
):  # fmt: skip
    """Pad the last block of an expert and name its blocks; the last expert also names blocks without one."""
    o_r = tl.arange(0, BLOCK_ROWS)
    p_mine = p_pairs + first_block.to(tl.int64) * BLOCK_ROWS
    mine = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    tl.store(p_mine + count + o_r, tl.full((BLOCK_ROWS,), -1, tl.int32), mask=count + o_r < mine * BLOCK_ROWS)
    for b in range(0, mine, BLOCK_ROWS):
        tl.store(p_block_experts + first_block + b + o_r, i_expert + 0 * o_r, mask=b + o_r < mine)
    if i_expert == num_experts - 1:
        for b in range(first_block + mine, num_blocks, BLOCK_ROWS):
            m_b = b + o_r < num_blocks
            tl.store(p_block_experts + b + o_r, tl.full((BLOCK_ROWS,), -1, tl.int32), mask=m_b)

"""Routing on the fused decode path: the router's product over rows with a deferred RMSNorm, experts and shares, and finished rows.

T tokens, S experts of a token, E experts, K columns, J blocks of K

One token takes one launch: each program computes some experts' logits, and the last to finish chooses. More tokens take a
product and a launch with one program per token. Other programs of these launches finish the norm: as e4m3 codes if the
experts' weights are e4m3 with scales by row, else in the model's type. One more computes the logit of a shared expert's gate.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.fp8 import LEAST_SCALE, e4m3_code, kernel_codes, quantized_numbers
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.kernels.moe.routing import Routing, choose_experts, route_tokens_reference
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import (
    check_dense,
    constexpr,
    is_interpreted,
    jit,
    next_power_of_two,
    tl,
    wait_then_release,
)
from holdfast.quant.weight_quantize import E4M3_MAX, LEAST_E4M3_SCALE

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


ROUTER_BLOCK = 1
"""Experts per program for a single token: few, so that many SMs read the router."""
COLUMNS_PER_WARP = 2048
"""Columns per warp. Many, so few warps: the choice is a chain of maxima, which need no barrier within one warp."""


class SharedGate(NamedTuple):
    """Gate of the shared expert: one more logit of each row, which takes no part in the choice."""

    weight_1K: Tensor
    logit_T1: Tensor
    """float32, written."""


def route_normed_reference(
    rows: NormedRows,
    router_EK: Tensor,
    bias_E: Tensor | None,
    normalize: bool,
    logits_TE: Tensor,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    finished: QuantizedRows | Tensor,
    scratch: SmallBatchScratch,
    gate: SharedGate | None = None,
) -> None:
    """Choose experts and shares of each row by plain routing (`Routing.is_plain`), and finish the norm of the rows.

    `finished` takes codes with a scale per row, or plain numbers; it must not alias the rows. `logits_TE` receives the
    router's products without the bias.
    """
    num_rows, size_k = rows.scaled_MK.shape
    scaled_TK = rows.scaled_MK.float()
    squares_TJ = scratch.squares[: num_rows * rows.num_squares].view(num_rows, rows.num_squares)
    rms_T1 = (squares_TJ.sum(-1, keepdim=True) / size_k + rows.eps).rsqrt()
    logits_TE.copy_(scaled_TK @ router_EK.float().t() * rms_T1)
    route_tokens_reference(logits_TE, Routing(normalize), expert_ids_TS, shares_TS, bias_E)
    if gate is not None:
        gate.logit_T1.copy_(scaled_TK @ gate.weight_1K.float().t() * rms_T1)
    if isinstance(finished, Tensor):
        finished.copy_((scaled_TK * rms_T1).to(finished.dtype))
        return
    assert scratch.amax is not None, "rows that become codes need amax"
    amax_TJ = scratch.amax.normed[: num_rows * rows.num_squares].view(num_rows, rows.num_squares)
    scales_T1 = (amax_TJ.amax(-1, keepdim=True) / E4M3_MAX).clamp_min(LEAST_E4M3_SCALE)
    codes_TK = (scaled_TK * (1.0 / scales_T1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    finished.codes_TK.copy_(codes_TK)
    finished.scales_TB.copy_(scales_T1 * rms_T1)


def route_normed_triton(
    rows: NormedRows,
    router_EK: Tensor,
    bias_E: Tensor | None,
    normalize: bool,
    logits_TE: Tensor,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    finished: QuantizedRows | Tensor,
    scratch: SmallBatchScratch,
    gate: SharedGate | None = None,
) -> None:
    (num_rows, size_k), (num_experts, top_k) = rows.scaled_MK.shape, (len(router_EK), expert_ids_TS.shape[1])
    _check(rows, router_EK, logits_TE, expert_ids_TS, shares_TS, finished)
    if gate is not None:
        check_dense(*gate)
        shapes = gate.weight_1K.shape, gate.logit_T1.shape
        assert shapes == ((1, size_k), (num_rows, 1)), f"a gate of {shapes} for rows of {size_k}"
    is_coded = not isinstance(finished, Tensor)
    assert not is_coded or scratch.amax is not None, "rows that become codes need amax"
    arguments = (
        rows.scaled_MK, router_EK, logits_TE if bias_E is None else bias_E, logits_TE, expert_ids_TS, shares_TS,
        kernel_codes(finished.codes_TK) if isinstance(finished, QuantizedRows) else finished,
        finished.scales_TB if isinstance(finished, QuantizedRows) else logits_TE,
        scratch.squares, scratch.squares if scratch.amax is None else scratch.amax.normed, scratch.arrived,
        *((None, None) if gate is None else gate), num_experts, size_k, rows.num_squares, rows.eps,
    )  # fmt: skip
    flags = {
        "HAS_BIAS": bias_E is not None, "NORMALIZE": normalize, "IS_CODED": is_coded, "TOP_K": top_k,
        "BLOCK_S": next_power_of_two(top_k), "BLOCK_E": next_power_of_two(num_experts),
        "BLOCK_K": next_power_of_two(size_k), "BLOCK_J": next_power_of_two(rows.num_squares),
        "PLAIN": is_interpreted(), **pdl_flags(router_EK),
        "num_warps": max(1, next_power_of_two(size_k) // COLUMNS_PER_WARP),
    }  # fmt: skip
    if num_rows == 1:
        num_programs = -(-num_experts // ROUTER_BLOCK) + 1 + (gate is not None)
        _route_one_kernel[(num_programs,)](*arguments, BLOCK_R=ROUTER_BLOCK, **flags)
    else:
        normed_linear(rows, router_EK, None, False, logits_TE, scratch)
        _route_rows_kernel[(num_rows, 2 + (gate is not None))](*arguments, **flags)


route_normed = operation(reference=route_normed_reference, triton=route_normed_triton)


def _check(
    rows: NormedRows,
    router_EK: Tensor,
    logits_TE: Tensor,
    expert_ids_TS: Tensor,
    shares_TS: Tensor,
    finished: QuantizedRows | Tensor,
) -> None:
    num_rows, size_k = rows.scaled_MK.shape
    num_experts, top_k = len(router_EK), expert_ids_TS.shape[1]
    own = finished.codes_TK if isinstance(finished, QuantizedRows) else finished
    assert top_k <= num_experts, f"{top_k} experts of a token, and there are {num_experts}"
    assert own.shape == (num_rows, size_k), f"{own.shape=}, not {(num_rows, size_k)}"
    assert own.data_ptr() != rows.scaled_MK.data_ptr(), (
        "other programs still read the rows while their norm is finished"
    )
    assert router_EK.shape[1] == size_k, f"{router_EK.shape=} for rows of {size_k}"
    assert logits_TE.shape == (num_rows, num_experts), f"{logits_TE.shape=}, not {(num_rows, num_experts)}"
    assert expert_ids_TS.shape == shares_TS.shape == (num_rows, top_k), f"{expert_ids_TS.shape=} {shares_TS.shape=}"
    check_dense(rows.scaled_MK, router_EK, logits_TE, expert_ids_TS, shares_TS, own)


@jit
def _route_one_kernel(
    p_scaled, p_router, p_bias, p_logits, p_ids, p_shares, p_finished, p_finished_scales, p_squares, p_amax, p_arrived,
    p_gate, p_gate_logit, num_experts, size_k, num_squares, eps,
    HAS_BIAS: constexpr, NORMALIZE: constexpr, IS_CODED: constexpr, TOP_K: constexpr, BLOCK_S: constexpr,
    BLOCK_E: constexpr, BLOCK_K: constexpr, BLOCK_J: constexpr, BLOCK_R: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    # The first program finishes the row, the others compute logits: of experts, then of a gate.
    i_r = tl.program_id(0) - 1
    o_k = tl.arange(0, BLOCK_K)
    if i_r < 0:
        wait_then_release(PDL)
        _finish_row(
            p_scaled, p_squares, p_amax, p_finished, p_finished_scales, 0, size_k, num_squares, eps, IS_CODED, BLOCK_K,
            BLOCK_J, PLAIN,
        )  # fmt: skip
    elif p_gate is not None and i_r == tl.num_programs(0) - 2:
        wait_then_release(PDL)
        _store_gate_logit(p_scaled, p_gate, p_gate_logit, p_squares, 0, size_k, num_squares, eps, BLOCK_K, BLOCK_J)
    else:
        o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < num_experts
        m_k = o_k < size_k
        # Load the router before the wait: it is a constant.
        b_w = tl.load(p_router + o_r[:, None] * size_k + o_k[None, :], mask=m_r[:, None] & m_k[None, :], other=0.0)
        wait_then_release(PDL)
        b_x = tl.load(p_scaled + o_k, mask=m_k, other=0.0).to(tl.float32)
        rms = _row_rms(p_squares, 0, size_k, num_squares, eps, BLOCK_J)
        b_y = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1) * rms
        tl.store(p_logits + o_r, b_y, mask=m_r)
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrived, 1, sem="acq_rel")
        last = tl.num_programs(0) - 2
        if p_gate is not None:
            last -= 1
        if arrived == last:
            tl.store(p_arrived, 0)
            o_e = tl.arange(0, BLOCK_E)
            m_e = o_e < num_experts
            b_logits = tl.load(p_logits + o_e, mask=m_e, other=float("-inf"), cache_modifier=".cg")
            if HAS_BIAS:
                b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
            choose_experts(b_logits, p_ids, p_shares, m_e, NORMALIZE, TOP_K, BLOCK_E, BLOCK_S)


@jit
def _route_rows_kernel(
    p_scaled, p_router, p_bias, p_logits, p_ids, p_shares, p_finished, p_finished_scales, p_squares, p_amax, p_arrived,
    p_gate, p_gate_logit, num_experts, size_k, num_squares, eps,
    HAS_BIAS: constexpr, NORMALIZE: constexpr, IS_CODED: constexpr, TOP_K: constexpr, BLOCK_S: constexpr,
    BLOCK_E: constexpr, BLOCK_K: constexpr, BLOCK_J: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    wait_then_release(PDL)
    if tl.program_id(1) == 1:
        _finish_row(
            p_scaled, p_squares, p_amax, p_finished, p_finished_scales, i_row, size_k, num_squares, eps, IS_CODED,
            BLOCK_K, BLOCK_J, PLAIN,
        )  # fmt: skip
    elif p_gate is not None and tl.program_id(1) == 2:
        _store_gate_logit(p_scaled, p_gate, p_gate_logit, p_squares, i_row, size_k, num_squares, eps, BLOCK_K, BLOCK_J)
    else:
        o_e = tl.arange(0, BLOCK_E)
        m_e = o_e < num_experts
        b_logits = tl.load(p_logits + i_row * num_experts + o_e, mask=m_e, other=float("-inf"))
        if HAS_BIAS:
            b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
        first = i_row * TOP_K
        choose_experts(b_logits, p_ids + first, p_shares + first, m_e, NORMALIZE, TOP_K, BLOCK_E, BLOCK_S)


@jit
def _row_rms(p_squares, i_row, size_k, num_squares, eps, BLOCK_J: constexpr):
    """Return 1 / rms of a row."""
    o_j = tl.arange(0, BLOCK_J)
    b_squares = tl.load(p_squares + i_row * num_squares + o_j, mask=o_j < num_squares, other=0.0)
    return tl.rsqrt(tl.sum(b_squares, axis=0) / size_k + eps)


@jit
def _store_gate_logit(
    p_scaled, p_gate, p_gate_logit, p_squares, i_row, size_k, num_squares, eps, BLOCK_K: constexpr, BLOCK_J: constexpr
):
    """Store the logit of a row's gate."""
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < size_k
    b_w = tl.load(p_gate + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_x = tl.load(p_scaled + i_row * size_k + o_k, mask=m_k, other=0.0).to(tl.float32)
    rms = _row_rms(p_squares, i_row, size_k, num_squares, eps, BLOCK_J)
    tl.store(p_gate_logit + i_row, tl.sum(b_w * b_x, axis=0) * rms)


@jit
def _finish_row(
    p_scaled, p_squares, p_amax, p_finished, p_finished_scales, i_row, size_k, num_squares, eps,
    IS_CODED: constexpr, BLOCK_K: constexpr, BLOCK_J: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Store the norm of a row as codes and their scale, or in the model's type."""
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < size_k
    b_x = tl.load(p_scaled + i_row * size_k + o_k, mask=m_k, other=0.0).to(tl.float32)
    rms = _row_rms(p_squares, i_row, size_k, num_squares, eps, BLOCK_J)
    p_out = p_finished + i_row * size_k + o_k
    if IS_CODED:
        o_j = tl.arange(0, BLOCK_J)
        b_amax = tl.load(p_amax + i_row * num_squares + o_j, mask=o_j < num_squares, other=0.0)
        scale = tl.maximum(tl.max(b_amax, axis=0) / 448.0, LEAST_SCALE)
        b_x *= 1.0 / scale
        if PLAIN:
            tl.store(p_out, e4m3_code(b_x).to(tl.uint8), mask=m_k)
        else:
            tl.store(p_out, quantized_numbers(b_x, PLAIN), mask=m_k)
        tl.store(p_finished_scales + i_row, scale * rms)
    else:
        tl.store(p_out, (b_x * rms).to(p_finished.dtype.element_ty), mask=m_k)

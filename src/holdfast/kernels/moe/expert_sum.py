"""Sum of a token's expert outputs weighted by shares: into a tensor, or onto the residual with the next RMSNorm deferred.

T tokens, S experts of a token, P = T * S pairs, H columns, J blocks of H
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, defer_rms_norm_reference
from holdfast.kernels.norm import load_norm_weight
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, release_then_wait, tl

SMALL_BATCH_TOKENS = 16
SMALL_BATCH_COLUMNS, LARGE_BATCH_COLUMNS = 256, 1024
"""Columns per program. A small batch is spread over many SMs; in a large one each thread reads sixteen bytes."""


def row_form(num_rows: int) -> int:
    """Return the columns per program: the specialization for the number of tokens."""
    return SMALL_BATCH_COLUMNS if num_rows <= SMALL_BATCH_TOKENS else LARGE_BATCH_COLUMNS


class ExpertOutputs(NamedTuple):
    """Expert outputs of a layer, before the sum."""

    routed_PH: Tensor
    shares_TS: Tensor
    shared_TH: Tensor | None = None
    """Output of the expert that every token takes."""
    shared_logit_T1: Tensor | None = None
    """Logit whose sigmoid is the share of the shared expert; None: a share of 1."""


def sum_experts_reference(outputs: ExpertOutputs, out_TH: Tensor, local_ids_TS: Tensor | None = None) -> Tensor:
    """out = the sum of share * routed, expert by expert in float32, plus sigmoid(logit) * shared if these are given.

    If `local_ids_TS` (of `local_ids`) is given, the rows of other ranks' experts are ignored.
    """
    routed_PH, shares_TS, shared_TH, shared_logit_T1 = _checked(outputs, out_TH)
    num_rows, top_k = shares_TS.shape
    routed_TSH = routed_PH.view(num_rows, top_k, out_TH.shape[1])

    def given(s: int) -> Tensor:
        given_TH = routed_TSH[:, s].float() * shares_TS[:, s : s + 1]
        return given_TH if local_ids_TS is None else given_TH.masked_fill_(local_ids_TS[:, s : s + 1] < 0, 0.0)

    total_TH = given(0)
    for s in range(1, top_k):
        total_TH += given(s)
    if shared_TH is not None:
        gate_T1 = 1.0 if shared_logit_T1 is None else _sigmoid(shared_logit_T1.float())
        total_TH += shared_TH.float() * gate_T1
    return out_TH.copy_(total_TH)


def _sigmoid(x_T1: Tensor) -> Tensor:
    """Compute sigmoid as a softmax of two: torch's sigmoid rounds the last elements of a tensor differently."""
    return F.pad(x_T1, (0, 1)).softmax(dim=1)[:, :1]


def _checked(outputs: ExpertOutputs, out_TH: Tensor) -> ExpertOutputs:
    routed_PH, shares_TS, shared_TH, shared_logit_T1 = outputs
    num_rows, top_k = shares_TS.shape
    assert out_TH.shape[0] == num_rows, f"{out_TH.shape=} for {num_rows} tokens"
    assert routed_PH.shape == (num_rows * top_k, out_TH.shape[1]), (
        f"{routed_PH.shape=} {shares_TS.shape=} {out_TH.shape=}"
    )
    assert shared_TH is None or shared_TH.shape == out_TH.shape, f"{shared_TH.shape=} {out_TH.shape=}"
    assert shared_logit_T1 is None or shared_TH is not None, "a gate without a shared expert"
    assert shared_logit_T1 is None or shared_logit_T1.shape == (num_rows, 1), f"{shared_logit_T1.shape=}"
    check_dense(*outputs, out_TH)
    return outputs


def sum_experts_triton(outputs: ExpertOutputs, out_TH: Tensor, local_ids_TS: Tensor | None = None) -> Tensor:
    """Launch one program for some columns of a token."""
    routed_PH, shares_TS, shared_TH, shared_logit_T1 = _checked(outputs, out_TH)
    (num_rows, top_k), size = shares_TS.shape, out_TH.shape[1]
    if not out_TH.numel():
        return out_TH
    columns = row_form(num_rows)
    _sum_kernel[(num_rows, -(-size // columns))](
        routed_PH, shares_TS, shared_TH if shared_TH is not None else routed_PH,
        shared_logit_T1 if shared_logit_T1 is not None else shares_TS,
        local_ids_TS if local_ids_TS is not None else shares_TS, out_TH, size,
        TOP_K=top_k, HAS_IDS=local_ids_TS is not None, HAS_SHARED=shared_TH is not None,
        HAS_GATE=shared_logit_T1 is not None, BLOCK=columns, num_warps=columns // 256, **pdl_flags(routed_PH),
    )  # fmt: skip
    return out_TH


sum_experts = operation(reference=sum_experts_reference, triton=sum_experts_triton)


@jit
def _sum_kernel(
    p_routed, p_shares, p_shared, p_logit, p_ids, p_out, size,
    TOP_K: constexpr, HAS_IDS: constexpr, HAS_SHARED: constexpr, HAS_GATE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < size
    release_then_wait(PDL)
    b_sum = _summed(
        p_routed, p_shares, p_shared, p_logit, p_ids, size, i_row, o_h, m_h, TOP_K, HAS_IDS, HAS_SHARED, HAS_GATE
    )
    tl.store(p_out + i_row * size + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)


@jit
def _summed(
    p_routed, p_shares, p_shared, p_logit, p_ids, size, i_row, o_h, m_h,
    TOP_K: constexpr, HAS_IDS: constexpr, HAS_SHARED: constexpr, HAS_GATE: constexpr,
):  # fmt: skip
    """Return the float32 sum of some columns of a token."""
    p_first = p_routed + i_row * TOP_K * size + o_h
    b_sum = _given(p_first, p_shares, p_ids, i_row * TOP_K, m_h, HAS_IDS)
    for s in tl.static_range(1, TOP_K):
        b_sum += _given(p_first + s * size, p_shares, p_ids, i_row * TOP_K + s, m_h, HAS_IDS)
    if HAS_SHARED:
        b_shared = tl.load(p_shared + i_row * size + o_h, mask=m_h, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_shared *= tl.sigmoid(tl.load(p_logit + i_row).to(tl.float32))
        b_sum += b_shared
    return b_sum


@jit
def _given(p_pair, p_shares, p_ids, i_pair, m_h, HAS_IDS: constexpr):
    """Return a pair's contribution: 0 if its expert is on another rank, in which case its row is not read."""
    share = tl.load(p_shares + i_pair)
    if HAS_IDS:
        is_here = tl.load(p_ids + i_pair) >= 0
        b_x = tl.load(p_pair, mask=m_h & is_here, other=0.0).to(tl.float32)
        b_y = tl.where(is_here, b_x * share, 0.0)
    else:
        b_y = tl.load(p_pair, mask=m_h, other=0.0).to(tl.float32) * share
    return b_y


def add_experts_reference(outputs: ExpertOutputs, stream: ResidualStream) -> NormedRows:
    """x += the sum of `sum_experts`, in the type of x, with the next RMSNorm deferred."""
    return defer_rms_norm_reference(stream, sum_experts_reference(outputs, stream.scaled_MN).clone())


def add_experts_triton(outputs: ExpertOutputs, stream: ResidualStream) -> NormedRows:
    """Launch one program for some columns of a token; each stores a sum of squares."""
    x_TH, norm_weight_H, eps, scaled_TH, scratch, offset = stream
    routed_PH, shares_TS, shared_TH, shared_logit_T1 = _checked(outputs, x_TH)
    (num_rows, top_k), size = shares_TS.shape, x_TH.shape[1]
    num_blocks = -(-size // SMALL_BATCH_COLUMNS)
    _add_kernel[(num_rows, num_blocks)](
        routed_PH, shares_TS, shared_TH if shared_TH is not None else routed_PH,
        shared_logit_T1 if shared_logit_T1 is not None else shares_TS, x_TH, norm_weight_H, scaled_TH, scratch.squares,
        scratch.squares if scratch.amax is None else scratch.amax.normed, size,
        TOP_K=top_k, HAS_SHARED=shared_TH is not None, HAS_GATE=shared_logit_T1 is not None,
        HAS_AMAX=scratch.amax is not None, OFFSET=offset, BLOCK=SMALL_BATCH_COLUMNS, num_warps=1, **pdl_flags(routed_PH),
    )  # fmt: skip
    return NormedRows(scaled_TH, num_blocks, eps)


add_experts = operation(
    reference=add_experts_reference, triton=add_experts_triton, place=lambda outputs, stream: stream.x_MN
)


@jit
def _add_kernel(
    p_routed, p_shares, p_shared, p_logit, p_x, p_norm_weight, p_scaled, p_squares, p_amax, size,
    TOP_K: constexpr, HAS_SHARED: constexpr, HAS_GATE: constexpr, HAS_AMAX: constexpr, OFFSET: constexpr, BLOCK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_h = i_h * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < size
    b_norm = load_norm_weight(p_norm_weight, o_h, m_h, OFFSET)
    release_then_wait(PDL)
    b_sum = _summed(
        p_routed, p_shares, p_shared, p_logit, p_shares, size, i_row, o_h, m_h, TOP_K, False, HAS_SHARED, HAS_GATE
    )
    p_row = p_x + i_row * size + o_h
    b_x = tl.load(p_row, mask=m_h, other=0.0).to(tl.float32) + b_sum.to(p_x.dtype.element_ty).to(tl.float32)
    b_rounded = b_x.to(p_x.dtype.element_ty)
    tl.store(p_row, b_rounded, mask=m_h)
    b_x = b_rounded.to(tl.float32)
    b_scaled = (b_x * b_norm).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + i_row * size + o_h, b_scaled, mask=m_h)
    i_block = i_row * tl.num_programs(1) + i_h
    tl.store(p_squares + i_block, tl.sum(tl.where(m_h, b_x * b_x, 0.0), axis=0))
    if HAS_AMAX:
        tl.store(p_amax + i_block, tl.max(tl.where(m_h, tl.abs(b_scaled.to(tl.float32)), 0.0), axis=0))

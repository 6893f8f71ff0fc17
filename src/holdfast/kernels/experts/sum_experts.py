"""The end of a mixture of experts: what the experts of a token gave, by their shares, and what the shared expert gave.

T tokens, S experts of a token, P = T * S pairs, H columns
"""

# ruff: noqa: ANN001, ANN202 pointers of kernels have no types

import torch
import torch.nn.functional as F

from holdfast.kernels.triton_compat import can_launch_early, can_run, constexpr, jit, launched_early, tl

FEW_TOKENS = 16
FEW_COLUMNS, MANY_COLUMNS = 256, 1024
"""Of a program. Few tokens are spread over many processors; many tokens are read sixteen bytes a thread."""


def row_form(num_rows: int) -> int:
    """Columns of a program: what of a launch follows from the number of tokens."""
    return FEW_COLUMNS if num_rows <= FEW_TOKENS else MANY_COLUMNS


def sum_experts(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """out = the sum of share * routed, expert by expert in float32, plus sigmoid(logit) * shared where they are given."""
    if can_run(routed_PH):
        return sum_experts_triton(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    return sum_experts_reference(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)


def sum_experts_reference(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch."""
    _check(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    num_rows, top_k = shares_TS.shape
    routed_TSH = routed_PH.view(num_rows, top_k, out_TH.shape[1])
    total_TH = routed_TSH[:, 0].float() * shares_TS[:, :1]
    for s in range(1, top_k):
        total_TH += routed_TSH[:, s].float() * shares_TS[:, s : s + 1]
    if shared_TH is not None:
        gate_T1 = 1.0 if shared_logit_T1 is None else _sigmoid(shared_logit_T1.float())
        total_TH += shared_TH.float() * gate_T1
    return out_TH.copy_(total_TH)


def _sigmoid(x_T1: torch.Tensor) -> torch.Tensor:
    """As a softmax of two: each row is computed alone, where torch's sigmoid rounds the last rows of many differently."""
    return F.pad(x_T1, (0, 1)).softmax(dim=1)[:, :1]


def _check(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> None:
    num_rows, top_k = shares_TS.shape
    assert out_TH.shape[0] == num_rows, f"{out_TH.shape=} for {num_rows} tokens"
    assert routed_PH.shape == (num_rows * top_k, out_TH.shape[1]), (
        f"{routed_PH.shape=} {shares_TS.shape=} {out_TH.shape=}"
    )
    assert shared_TH is None or shared_TH.shape == out_TH.shape, f"{shared_TH.shape=} {out_TH.shape=}"
    assert shared_logit_T1 is None or shared_TH is not None, "a gate, and no shared expert behind it"
    assert shared_logit_T1 is None or shared_logit_T1.shape == (num_rows, 1), f"{shared_logit_T1.shape=}"
    for tensor in (routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH):
        assert tensor is None or tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def sum_experts_triton(
    routed_PH: torch.Tensor,
    shares_TS: torch.Tensor,
    shared_TH: torch.Tensor | None,
    shared_logit_T1: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """The same as a Triton kernel, a program for some columns of a token."""
    _check(routed_PH, shares_TS, shared_TH, shared_logit_T1, out_TH)
    (num_rows, top_k), size = shares_TS.shape, out_TH.shape[1]
    if not out_TH.numel():
        return out_TH
    columns = row_form(num_rows)
    early = can_launch_early(routed_PH)
    _sum_kernel[(num_rows, -(-size // columns))](
        routed_PH,
        shares_TS,
        shared_TH if shared_TH is not None else routed_PH,
        shared_logit_T1 if shared_logit_T1 is not None else shares_TS,
        out_TH,
        size,
        TOP_K=top_k,
        HAS_SHARED=shared_TH is not None,
        HAS_GATE=shared_logit_T1 is not None,
        BLOCK=columns,
        EARLY=early,
        num_warps=columns // 256,
        **launched_early(early),
    )
    return out_TH


@jit
def _sum_kernel(
    p_routed,
    p_shares,
    p_shared,
    p_logit,
    p_out,
    size,
    TOP_K: constexpr,
    HAS_SHARED: constexpr,
    HAS_GATE: constexpr,
    BLOCK: constexpr,
    EARLY: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < size
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p_first = p_routed + i_row * TOP_K * size + o_h
    b_sum = tl.load(p_first, mask=m_h, other=0.0).to(tl.float32) * tl.load(p_shares + i_row * TOP_K)
    for s in tl.static_range(1, TOP_K):
        b_sum += tl.load(p_first + s * size, mask=m_h, other=0.0).to(tl.float32) * tl.load(p_shares + i_row * TOP_K + s)
    if HAS_SHARED:
        b_shared = tl.load(p_shared + i_row * size + o_h, mask=m_h, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_shared *= tl.sigmoid(tl.load(p_logit + i_row).to(tl.float32))
        b_sum += b_shared
    tl.store(p_out + i_row * size + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)

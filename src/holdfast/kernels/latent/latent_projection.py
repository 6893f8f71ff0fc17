"""kv_b on both sides of latent attention (MLA): queries into the latent space and outputs out of it, without a copy of kv_b.

T rows, N query heads, D = P + R elements of a query head, L latent, V value elements of a head, kv_b [N, P + V, L]

Every head is its own product. With few rows the time to read kv_b dominates: a program has a few columns of a head, and loads
their weights before the kernel that makes the rows has ended.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 64, 512
"""Most rows for each of the smaller blocks."""
MANY_HEADS = 64
"""Fewest heads with which programs of few rows may be larger: enough programs remain."""


class ProjectionBlocks(NamedTuple):
    """Rows, columns and depth of a program."""

    rows: int
    columns: int
    """Columns of the latent, or of a head's output."""
    depth: int
    """Elements per loop iteration; 0: all at once, so their weights are loaded first."""
    num_warps: int


class ProjectionForm(NamedTuple):
    """The part of both launches that depends on the number of rows, and for few rows on the heads."""

    absorb: ProjectionBlocks
    value: ProjectionBlocks


def projection_form(num_rows: int, num_heads: int) -> ProjectionForm:
    """Return the fastest blocks on an H200."""
    has_many = num_heads >= MANY_HEADS
    if num_rows <= FEW_ROWS:
        return ProjectionForm(ProjectionBlocks(16, 64, 0, 4), ProjectionBlocks(16, 32 if has_many else 16, 0, 4))
    if num_rows <= SOME_ROWS and not has_many:
        return ProjectionForm(ProjectionBlocks(64, 64, 0, 4), ProjectionBlocks(64, 32, 0, 4))
    value = ProjectionBlocks(64, 64, 128, 4) if num_rows <= MANY_ROWS else ProjectionBlocks(128, 128, 64, 8)
    return ProjectionForm(ProjectionBlocks(64, 128, 0, 4), value)


def row_form(num_rows: int) -> tuple[ProjectionForm, ProjectionForm]:
    """Return the row-dependent part of a launch, of few heads and of many."""
    return projection_form(num_rows, 1), projection_form(num_rows, MANY_HEADS)


def absorb_queries_reference(q_TND: Tensor, kv_b_NXL: Tensor, out_TNX: Tensor) -> Tensor:
    """Return [T, N, L + R]: q[:P] @ W_UK of every head, then its rotated elements; rows and heads may be strided."""
    latent_dim = kv_b_NXL.shape[-1]
    nope_dim = q_TND.shape[-1] - (out_TNX.shape[-1] - latent_dim)
    absorbed_TNL = torch.einsum("tnp,npl->tnl", q_TND[..., :nope_dim].float(), kv_b_NXL[:, :nope_dim].float())
    out_TNX[..., :latent_dim] = absorbed_TNL.to(out_TNX.dtype)
    out_TNX[..., latent_dim:] = q_TND[..., nope_dim:]
    return out_TNX


def absorb_queries_triton(q_TND: Tensor, kv_b_NXL: Tensor, out_TNX: Tensor) -> Tensor:
    """Launch one program per block of rows and columns of a head."""
    (num_rows, num_heads, _), latent_dim = q_TND.shape, kv_b_NXL.shape[-1]
    rope_dim = out_TNX.shape[-1] - latent_dim
    nope_dim = q_TND.shape[-1] - rope_dim
    assert 0 < nope_dim <= kv_b_NXL.shape[1], f"{q_TND.shape=} {kv_b_NXL.shape=} {out_TNX.shape=}"
    _check(q_TND, kv_b_NXL, out_TNX)
    if not num_rows:
        return out_TNX
    blocks = projection_form(num_rows, num_heads).absorb
    grid = (-(-latent_dim // blocks.columns), num_heads, -(-num_rows // blocks.rows))
    _absorb_kernel[grid](
        q_TND, kv_b_NXL, out_TNX, num_rows, *q_TND.stride()[:2], kv_b_NXL.stride(0), *out_TNX.stride()[:2],
        NOPE=nope_dim, ROPE=rope_dim, LATENT=latent_dim, BLOCK_T=blocks.rows,
        BLOCK_P=max(16, next_power_of_two(nope_dim)), BLOCK_R=next_power_of_two(max(rope_dim, 1)),
        BLOCK_L=blocks.columns, num_warps=blocks.num_warps, **pdl_flags(q_TND),
    )  # fmt: skip
    return out_TNX


absorb_queries = operation(reference=absorb_queries_reference, triton=absorb_queries_triton)


def project_values_reference(latent_TNL: Tensor, kv_b_NXL: Tensor, out_TNV: Tensor) -> Tensor:
    """Return [T, N, V]: the attention output of every head times W_UV; rows and heads may be strided."""
    value_dim = out_TNV.shape[-1]
    w_NVL = kv_b_NXL[:, kv_b_NXL.shape[1] - value_dim :].float()
    return out_TNV.copy_(torch.einsum("tnl,nvl->tnv", latent_TNL.float(), w_NVL).to(out_TNV.dtype))


def project_values_triton(latent_TNL: Tensor, kv_b_NXL: Tensor, out_TNV: Tensor) -> Tensor:
    """Launch one program per block of rows and columns of a head."""
    (num_rows, num_heads, latent_dim), value_dim = latent_TNL.shape, out_TNV.shape[-1]
    assert kv_b_NXL.shape[-1] == latent_dim, f"{latent_TNL.shape=} {kv_b_NXL.shape=}"
    assert value_dim <= kv_b_NXL.shape[1], f"{kv_b_NXL.shape=} {out_TNV.shape=}"
    _check(latent_TNL, kv_b_NXL, out_TNV)
    if not num_rows:
        return out_TNV
    blocks = projection_form(num_rows, num_heads).value
    block_v = min(blocks.columns, max(16, next_power_of_two(value_dim)))
    _value_kernel[(-(-value_dim // block_v), num_heads, -(-num_rows // blocks.rows))](
        latent_TNL, kv_b_NXL, out_TNV, num_rows, *latent_TNL.stride()[:2], kv_b_NXL.stride(0), *out_TNV.stride()[:2],
        FIRST=kv_b_NXL.shape[1] - value_dim, LATENT=latent_dim, VALUE=value_dim, BLOCK_T=blocks.rows, BLOCK_V=block_v,
        BLOCK_L=blocks.depth or max(16, next_power_of_two(latent_dim)), IS_WHOLE=not blocks.depth,
        num_warps=blocks.num_warps, num_stages=3, **pdl_flags(latent_TNL),
    )  # fmt: skip
    return out_TNV


project_values = operation(reference=project_values_reference, triton=project_values_triton)


def _check(x_TNX: Tensor, kv_b_NXL: Tensor, out_TNX: Tensor) -> None:
    num_heads, _, latent_dim = kv_b_NXL.shape
    assert x_TNX.shape[:2] == out_TNX.shape[:2], f"{x_TNX.shape=} {out_TNX.shape=}"
    assert x_TNX.shape[1] == num_heads, f"{x_TNX.shape=} by the weights of {num_heads} heads"
    assert x_TNX.dtype == kv_b_NXL.dtype, f"{x_TNX.dtype=} {kv_b_NXL.dtype=}"
    assert kv_b_NXL.stride()[1:] == (latent_dim, 1), f"{kv_b_NXL.shape} with strides {kv_b_NXL.stride()}"
    for tensor in (x_TNX, out_TNX):
        assert tensor.stride(2) == 1, f"{tensor.shape} with strides {tensor.stride()}"


@jit_counting("num_rows")
def _absorb_kernel(
    p_q, p_w, p_out, num_rows, q_row, q_head, w_head, out_row, out_head,
    NOPE: constexpr, ROPE: constexpr, LATENT: constexpr, BLOCK_T: constexpr, BLOCK_P: constexpr, BLOCK_R: constexpr,
    BLOCK_L: constexpr, PDL: constexpr,
):  # fmt: skip
    i_l = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = (o_t < num_rows)[:, None]
    o_p = tl.arange(0, BLOCK_P)
    o_l = i_l * BLOCK_L + tl.arange(0, BLOCK_L)
    m_l = (o_l < LATENT)[None, :]
    p_head = p_w + i_head * w_head
    b_w = tl.load(p_head + o_p[:, None] * LATENT + o_l[None, :], mask=(o_p < NOPE)[:, None] & m_l, other=0.0)
    release_then_wait(PDL)
    p_rows = p_q + o_t.to(tl.int64)[:, None] * q_row + i_head * q_head
    b_q = tl.load(p_rows + o_p[None, :], mask=m_t & (o_p < NOPE)[None, :], other=0.0)
    b_y = tl.dot(b_q, b_w, input_precision="ieee")
    p_y = p_out + o_t.to(tl.int64)[:, None] * out_row + i_head * out_head
    tl.store(p_y + o_l[None, :], b_y.to(p_out.dtype.element_ty), mask=m_t & m_l)
    if i_l == 0:
        o_r = tl.arange(0, BLOCK_R)[None, :]
        m_r = m_t & (o_r < ROPE)
        b_r = tl.load(p_rows + NOPE + o_r, mask=m_r, other=0.0)
        tl.store(p_y + LATENT + o_r, b_r.to(p_out.dtype.element_ty), mask=m_r)


@jit_counting("num_rows")
def _value_kernel(
    p_x, p_w, p_out, num_rows, x_row, x_head, w_head, out_row, out_head,
    FIRST: constexpr, LATENT: constexpr, VALUE: constexpr, BLOCK_T: constexpr, BLOCK_V: constexpr, BLOCK_L: constexpr,
    IS_WHOLE: constexpr, PDL: constexpr,
):  # fmt: skip
    i_head = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = (o_t < num_rows)[:, None]
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = (o_v < VALUE)[None, :]
    o_l = tl.arange(0, BLOCK_L)
    # Loaded as [L, V], the operand: adjacent elements in memory belong to a column.
    p_columns = p_w + i_head * w_head + (FIRST + o_v)[None, :] * LATENT + o_l[:, None]
    p_rows = p_x + o_t.to(tl.int64)[:, None] * x_row + i_head * x_head + o_l[None, :]
    if IS_WHOLE:
        m_l = o_l < LATENT
        b_w = tl.load(p_columns, mask=m_l[:, None] & m_v, other=0.0)
        release_then_wait(PDL)
        b_x = tl.load(p_rows, mask=m_t & m_l[None, :], other=0.0)
        b_y = tl.dot(b_x, b_w, input_precision="ieee")
    else:
        release_then_wait(PDL)
        b_y = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
        for first in tl.range(0, LATENT, BLOCK_L):
            m_l = first + o_l < LATENT
            b_w = tl.load(p_columns + first, mask=m_l[:, None] & m_v, other=0.0)
            b_x = tl.load(p_rows + first, mask=m_t & m_l[None, :], other=0.0)
            b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
    p_y = p_out + o_t.to(tl.int64)[:, None] * out_row + i_head * out_head + o_v[None, :]
    tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_t & m_v)

"""RMSNorm of each value head of a gated delta net, times its output gate.

T rows, H value heads, V elements of a value
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.state.state_rows import by_whole_vectors
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, release_then_wait, tl

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
ELEMENTS_PER_PROGRAM = 1024


def gated_norm_reference(
    o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float, out_THV: Tensor, gate: str = "silu"
) -> Tensor:
    """out = o / sqrt(mean(o^2) + eps) * weight * gate(z) per head, rounded once; `out_THV` may be o itself."""
    o, z = o_THV.float(), z_THV.float()
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    return out_THV.copy_(normed * weight_V.float() * by_whole_vectors(GATES[gate], z))


def gated_norm_triton(
    o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float, out_THV: Tensor, gate: str = "silu"
) -> Tensor:
    """Launch programs of some heads each. Rows and heads of o, z and out may lie apart."""
    num_rows, num_heads, dim = o_THV.shape
    assert gate in GATES, f"{gate=}"
    assert z_THV.shape == out_THV.shape == o_THV.shape, f"{z_THV.shape=}, {out_THV.shape=} for {o_THV.shape=}"
    for x in (o_THV, z_THV, out_THV):
        assert x.stride(2) == 1 or dim == 1, f"{x.stride()=}: the elements of a head must lie side by side"
    block = next_power_of_two(dim)
    heads = max(1, ELEMENTS_PER_PROGRAM // block)
    if num_rows:
        _gated_norm_kernel[(-(-num_rows * num_heads // heads),)](
            o_THV, z_THV, weight_V, out_THV, eps, num_rows * num_heads,
            o_THV.stride(0), o_THV.stride(1), z_THV.stride(0), z_THV.stride(1), out_THV.stride(0), out_THV.stride(1),
            SILU=gate == "silu", NUM_HEADS=num_heads, DIM=dim, HEADS=heads, BLOCK_V=block, num_warps=4,
            **pdl_flags(o_THV),
        )  # fmt: skip
    return out_THV


gated_norm = operation(reference=gated_norm_reference, triton=gated_norm_triton)


@jit_counting("num_pairs")
def _gated_norm_kernel(
    p_o, p_z, p_weight, p_out, eps, num_pairs, o_stride, o_head, z_stride, z_head, out_stride, out_head,
    SILU: constexpr, NUM_HEADS: constexpr, DIM: constexpr, HEADS: constexpr, BLOCK_V: constexpr, PDL: constexpr,
):  # fmt: skip
    o_pair = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    o_v = tl.arange(0, BLOCK_V)
    m_pair = (o_pair < num_pairs)[:, None] & (o_v < DIM)[None, :]
    i_row, i_head = o_pair // NUM_HEADS, o_pair % NUM_HEADS
    b_weight = tl.load(p_weight + o_v, mask=o_v < DIM, other=0.0).to(tl.float32)
    release_then_wait(PDL)
    o_o = (i_row * o_stride + i_head * o_head)[:, None] + o_v[None, :]
    o_z = (i_row * z_stride + i_head * z_head)[:, None] + o_v[None, :]
    b_o = tl.load(p_o + o_o, mask=m_pair, other=0.0).to(tl.float32)
    b_z = tl.load(p_z + o_z, mask=m_pair, other=0.0).to(tl.float32)
    b_gate = 1.0 / (1.0 + tl.exp(-b_z))
    if SILU:
        b_gate = b_gate * b_z
    b_scale = tl.rsqrt(tl.sum(b_o * b_o, axis=1) / DIM + eps)
    b_y = b_o * b_scale[:, None] * b_weight[None, :] * b_gate
    o_out = (i_row * out_stride + i_head * out_head)[:, None] + o_v[None, :]
    tl.store(p_out + o_out, b_y.to(p_out.dtype.element_ty), mask=m_pair)

"""The gate of a gated MLP: silu(gate) * up, from one fused tensor."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for
from holdfast.kernels.triton_compat import can_run, constexpr, jit, tl

COLUMNS_PER_PROGRAM = 2048
"""With 8 warps each thread loads 16 bytes of gate and of up: a full processor has 64 KiB on their way, and one row of
25,600 columns still spreads over 13 processors."""
NUM_WARPS = 8


def silu_mul(gate_up_TX: torch.Tensor, out_TI: torch.Tensor | None = None) -> torch.Tensor:
    """silu of the left half times the right half: [T, 2 I] -> [T, I], into `out_TI` where it is given."""
    num_rows, width = gate_up_TX.shape
    y_TI = gate_up_TX.new_empty(num_rows, width // 2) if out_TI is None else out_TI
    if can_run(gate_up_TX):
        return silu_mul_triton(gate_up_TX, y_TI)
    library = native_for(gate_up_TX, y_TI)
    if library is None:
        return silu_mul_reference(gate_up_TX, y_TI)
    library.holdfast_silu_mul(gate_up_TX.data_ptr(), y_TI.data_ptr(), num_rows, width // 2)
    return y_TI


def silu_mul_reference(gate_up_TX: torch.Tensor, out_TI: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch."""
    gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
    return torch.mul(F.silu(gate_TI), up_TI, out=out_TI)


def silu_mul_triton(gate_up_TX: torch.Tensor, out_TI: torch.Tensor | None = None) -> torch.Tensor:
    """The same as a Triton kernel, a program for some columns of a row; rounded once, where torch rounds silu too."""
    num_rows, width = gate_up_TX.shape
    y_TI = gate_up_TX.new_empty(num_rows, width // 2) if out_TI is None else out_TI
    assert gate_up_TX.stride(1) == y_TI.stride(1) == 1, f"{gate_up_TX.stride()=} {y_TI.stride()=}: columns lie apart"
    if y_TI.numel():
        num_blocks = -(-width // 2 // COLUMNS_PER_PROGRAM)
        _silu_mul_kernel[(num_rows * num_blocks,)](
            gate_up_TX,
            y_TI,
            gate_up_TX.stride(0),
            y_TI.stride(0),
            width // 2,
            NUM_BLOCKS=num_blocks,
            BLOCK=COLUMNS_PER_PROGRAM,
            num_warps=NUM_WARPS,
        )
    return y_TI


@jit
def _silu_mul_kernel(p_gate_up, p_y, x_stride, y_stride, size, NUM_BLOCKS: constexpr, BLOCK: constexpr):  # noqa: ANN001, ANN202 pointers have no types
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    o_i = (i_program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    b_gate = tl.load(p_gate_up + i_row * x_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + i_row * x_stride + size + o_i, mask=m_i, other=0.0).to(tl.float32)
    tl.store(p_y + i_row * y_stride + o_i, (b_gate * tl.sigmoid(b_gate) * b_up).to(p_y.dtype.element_ty), mask=m_i)

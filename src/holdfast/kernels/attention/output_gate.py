"""Output gate of attention: outputs of each head times the sigmoid of the gates that its projection computed.

R rows of outputs, T rows of the step, H query heads, D head dim, X = H D
"""

import torch
from torch import Tensor

from holdfast.kernels.native_library import native_for
from holdfast.kernels.operation import DECLINED, operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, release_then_wait, tl

COLUMNS_PER_PROGRAM = 1024
NUM_WARPS = 4


def gates_of(qkv_TX: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """View the gates of a fused projection whose query heads each have their gate after them: [T, H, D]."""
    return qkv_TX[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))[:, :, 1]


def gate_outputs_reference(attended_RX: Tensor, gate_THD: Tensor, rows_R: Tensor | None = None) -> Tensor:
    """Multiply outputs by the sigmoid of their gates, in place. Row i has the gates of row `rows_R[i]`, or of row i.

    Zeros stay zeros whatever their gates: padded rows.
    """
    gate_RHD = gate_THD[: len(attended_RX)] if rows_R is None else gate_THD.index_select(0, rows_R)
    open_RX = gate_RHD.sigmoid().flatten(1)
    return attended_RX.copy_(torch.where(attended_RX == 0, 0, attended_RX * open_RX))


def gate_outputs_native(attended_RX: Tensor, gate_THD: Tensor, rows_R: Tensor | None = None) -> Tensor:
    library = native_for(attended_RX, gate_THD[:0])
    if library is None or gate_THD.stride(2) != 1:
        return DECLINED
    _check(attended_RX, gate_THD, rows_R)
    rows = 0 if rows_R is None else rows_R.data_ptr()
    library.holdfast_gate_heads(
        *(attended_RX.data_ptr(), gate_THD.data_ptr(), rows, len(attended_RX), *gate_THD.shape[1:]),
        *gate_THD.stride()[:2],
    )
    return attended_RX


def gate_outputs_triton(attended_RX: Tensor, gate_THD: Tensor, rows_R: Tensor | None = None) -> Tensor:
    """Launch one program for some columns of a row. It rounds once; torch rounds the sigmoid too."""
    _check(attended_RX, gate_THD, rows_R)
    assert gate_THD.stride(2) == 1, f"{gate_THD.stride()=}: the elements of a gate must lie side by side"
    num_rows, size = attended_RX.shape
    if attended_RX.numel():
        num_blocks = -(-size // COLUMNS_PER_PROGRAM)
        _gate_outputs_kernel[(num_rows * num_blocks,)](
            attended_RX, gate_THD, rows_R, attended_RX.stride(0), gate_THD.stride(0), gate_THD.stride(1), size,
            HEAD_DIM=gate_THD.shape[2], NUM_BLOCKS=num_blocks, BLOCK=COLUMNS_PER_PROGRAM, num_warps=NUM_WARPS,
            **pdl_flags(attended_RX),
        )  # fmt: skip
    return attended_RX


gate_outputs = operation(reference=gate_outputs_reference, triton=gate_outputs_triton, native=gate_outputs_native)


def _check(attended_RX: Tensor, gate_THD: Tensor, rows_R: Tensor | None) -> None:
    num_gates, num_heads, head_dim = gate_THD.shape
    assert attended_RX.shape[1] == num_heads * head_dim, f"{attended_RX.shape=} beside {gate_THD.shape=}"
    assert attended_RX.stride(1) == 1, f"{attended_RX.stride()=}: the elements of a row must lie side by side"
    if rows_R is None:
        assert len(attended_RX) <= num_gates, f"{len(attended_RX)} rows of outputs and {num_gates} of gates"
    else:
        assert rows_R.dtype == torch.int64, f"{rows_R.dtype=}"
        assert rows_R.is_contiguous(), f"{rows_R.stride()=}: rows must lie side by side"
        assert len(rows_R) == len(attended_RX), f"{len(rows_R)} rows for {len(attended_RX)} outputs"


@jit
def _gate_outputs_kernel(
    p_attended, p_gate, p_rows, attended_stride, gate_stride, head_stride, size,
    HEAD_DIM: constexpr, NUM_BLOCKS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    o_x = (i_program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < size
    i_gate = i_row
    if p_rows is not None:
        i_gate = tl.load(p_rows + i_row).to(tl.int64)
    p_x = p_attended + i_row * attended_stride + o_x
    o_gate = (o_x // HEAD_DIM) * head_stride + o_x % HEAD_DIM
    release_then_wait(PDL)
    b_gate = tl.load(p_gate + i_gate * gate_stride + o_gate, mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.where(b_x == 0.0, 0.0, b_x * tl.sigmoid(b_gate))
    tl.store(p_x, b_y.to(p_attended.dtype.element_ty), mask=m_x)

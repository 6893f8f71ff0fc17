"""The gate of a gated MLP: silu(gate) * up, from one fused tensor."""

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for


def silu_mul(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """silu of the left half times the right half: [T, 2 I] -> [T, I]."""
    library = native_for(gate_up_TX)
    if library is None:
        return silu_mul_reference(gate_up_TX)
    num_rows, width = gate_up_TX.shape
    y_TI = gate_up_TX.new_empty(num_rows, width // 2)
    library.holdfast_silu_mul(gate_up_TX.data_ptr(), y_TI.data_ptr(), num_rows, width // 2)
    return y_TI


def silu_mul_reference(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
    return F.silu(gate_TI).mul_(up_TI)

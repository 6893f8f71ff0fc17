"""Activations element by element: silu, relu and both gelus."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from holdfast.kernels.native_library import native_for

REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""By the names of models/spec.py."""
NATIVE_KINDS = ("silu", "gelu", "gelu_tanh")
"""As the C kernel counts them; relu has nothing to round."""


def activate(x_TI: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, I] to [T, I]. On CPU in float32 torch rounds the last elements of a tensor differently; the C kernel does not."""
    library = native_for(x_TI[:0]) if kind in NATIVE_KINDS else None  # rows may lie apart: they are copied first
    if library is None:
        return activate_reference(x_TI, kind)
    y_TI = x_TI.clone(memory_format=torch.contiguous_format)
    library.holdfast_activate(y_TI.data_ptr(), y_TI.numel(), NATIVE_KINDS.index(kind))
    return y_TI


def activate_reference(x_TI: torch.Tensor, kind: str) -> torch.Tensor:
    """The same in plain torch."""
    return REFERENCES[kind](x_TI)

"""Matrix product of float32 rows with a quantized weight on a CPU: to the bit that with the numbers its codes stand for.

T rows, K inputs, N outputs
"""

import ctypes

import torch

from holdfast.kernels.native_library import native_for
from holdfast.kernels.products.plain_linear import plain_linear
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_codes import dequantize

DEQUANTIZED_ELEMENTS = 2**20
"""Elements of a weight that plain torch turns back into numbers at a time."""
WIDE_ELEMENTS = 2**20
"""Elements of a result that are float32 for a while, where another type is asked for."""
KINDS = {"float8_e4m3fn": 0, "int8": 1, "uint8": 2}
"""Types of codes by the number that native/codes.h has for them."""


def coded_linear(
    x_TK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None, out_TN: torch.Tensor
) -> torch.Tensor:
    """float32 [T, K] by a weight [N, K] into `out_TN`, in its type. A row's result does not depend, to the bit, on the other rows."""
    _check(x_TK, weight, bias_N, out_TN)
    bias = None if bias_N is None else bias_N.float()
    library = native_for(x_TK, bias)
    if library is None:
        return coded_linear_reference(x_TK, weight, bias, out_TN)
    if out_TN.dtype is torch.float32 and out_TN.is_contiguous():
        _multiply(library, x_TK, weight, bias, out_TN)
        return out_TN
    step = max(1, WIDE_ELEMENTS // max(1, weight.shape[0]))
    for start in range(0, x_TK.shape[0], step):
        some = slice(start, start + step)
        y = x_TK.new_empty(out_TN[some].shape)
        _multiply(library, x_TK[some], weight, bias, y)
        out_TN[some] = y
    return out_TN


def coded_linear_reference(
    x_TK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None, out_TN: torch.Tensor
) -> torch.Tensor:
    """The same in plain torch, some rows of the weight at a time."""
    size_n, size_k = weight.shape
    step = max(1, DEQUANTIZED_ELEMENTS // max(1, size_k))
    for start in range(0, size_n, step):
        some = slice(start, min(start + step, size_n))
        bias = None if bias_N is None else bias_N[some].float()
        out_TN[:, some] = plain_linear(x_TK, dequantize(weight, (some.start, some.stop)), bias)
    return out_TN


def _check(x_TK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None, out_TN: torch.Tensor) -> None:
    """Sizes go together, and codes and scales are all there: C does not look."""
    size_n, size_k = weight.shape
    assert x_TK.shape[1] == size_k, f"{x_TK.shape=} {weight.shape=}"
    assert out_TN.shape == (x_TK.shape[0], size_n), f"{out_TN.shape=}, not {(x_TK.shape[0], size_n)}"
    assert bias_N is None or bias_N.shape == (size_n,), f"{bias_N.shape=}, not {(size_n,)}"
    num_codes = weight.codes.numel() * weight.scheme.codes_per_byte
    assert num_codes == size_n * size_k, f"{num_codes} codes of a weight of {weight.shape}"
    scale_shape = weight.scheme.scale_shape(weight.shape)
    assert weight.scales.shape == scale_shape, f"{weight.scales.shape=}, not {scale_shape}"
    for tensor in (weight.codes, weight.scales):
        assert tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()}"


def _multiply(
    library: ctypes.CDLL, x_TK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None, y_TN: torch.Tensor
) -> None:
    scheme, (size_n, size_k) = weight.scheme, weight.shape
    library.holdfast_coded_linear(
        x_TK.data_ptr(),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        0 if bias_N is None else bias_N.data_ptr(),
        y_TN.data_ptr(),
        x_TK.shape[0],
        size_n,
        size_k,
        KINDS[scheme.code_dtype],
        scheme.block_rows,
        scheme.block_columns or max(1, size_k),
    )

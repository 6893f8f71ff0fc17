"""x @ w.T + bias for any number of rows and any weight: plain, or quantized, where a scheme may take rows as codes too.

T rows, K inputs, N outputs, B blocks of K

On a GPU a plain weight goes to cuBLAS; one of e4m3 with scales by row to tiles of our own up to 64 rows, or 128
(kernels/gemm/row_scaled_tiles.py), and beyond to the scaled product of torch (cuBLAS too); a single row by e4m3 in blocks is a
GEMV that codes the row by itself (kernels/gemm/block_scaled_gemv.py); all else goes to tensor-core tiles that dequantize
(kernels/gemm/quantized_tiles.py). On a CPU both go to C, whose order of
summation neighbours cannot change. Small batches on the fused decode path do not come here (kernels/gemm/small_batch.py).
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.gemm import block_scaled_gemv
from holdfast.kernels.gemm.quantize_activations import (
    BLOCK_COLUMNS,
    QuantizedRows,
    quantize_rows,
    quantize_rows_by_amax,
)
from holdfast.kernels.gemm.quantized_tiles import tile_linear
from holdfast.kernels.gemm.row_scaled_tiles import row_scaled_gate, row_scaled_linear, takes, takes_gate
from holdfast.kernels.native_library import native_for
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize

WIDENED_ELEMENTS = 2**20
"""Elements of a weight, in half precision or quantized, that a CPU turns into float32 at a time."""
WIDE_RESULTS = 2**20
"""Elements of a result that are float32 for a while, where another type is asked for."""
KINDS = {"float8_e4m3fn": 0, "int8": 1, "uint8": 2}
"""Types of codes by the number that native/codes.h has for them."""
SCALED_PRODUCT_SIZES = 16
"""torch's scaled product takes inputs and outputs in multiples of this."""


def linear(
    x_TK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    out_TN: Tensor | None = None,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> Tensor:
    """[T, K] by [N, K] to [T, N], into `out_TN` where it is given; `quantized` is room for rows as codes, for weights that want them so.

    With `is_coded` whoever made the rows has left their codes there (`room_for_codes`). On CPU a row's result does not depend, to the bit, on the other rows.
    """
    if not isinstance(weight, QuantizedWeight):
        return plain_linear(x_TK, weight, bias_N, out_TN)
    y_TN = x_TK.new_empty(x_TK.shape[0], weight.shape[0]) if out_TN is None else out_TN
    return quantized_linear(x_TK, weight, bias_N, y_TN, quantized, is_coded)


def linear_float32(
    x_TK: Tensor, weight: Tensor | QuantizedWeight, out_TN: Tensor, quantized: QuantizedRows | None = None
) -> Tensor:
    """The same without a bias, in float32 whatever the inputs are: no conversion follows, and no digit is lost."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x_TK, weight, None, out_TN, quantized)
    return plain_linear_float32(x_TK, weight, out_TN)


def plain_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor | None = None) -> Tensor:
    """[T, K] by [N, K] to [T, N], into `out_TN` where it is given. On CPU a row's result does not depend, to the bit, on the other rows."""
    y_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]) if out_TN is None else out_TN
    library = native_for(x_TK, weight_NK, bias_N, y_TN)
    if library is not None:
        num_rows, k_size = x_TK.shape
        bias = 0 if bias_N is None else bias_N.data_ptr()
        library.holdfast_linear(
            x_TK.data_ptr(), weight_NK.data_ptr(), bias, y_TN.data_ptr(), num_rows, weight_NK.shape[0], k_size
        )
        return y_TN
    if x_TK.is_cpu and x_TK.dtype in (torch.float16, torch.bfloat16):
        return _widened(x_TK, weight_NK, bias_N, y_TN)
    return plain_linear_reference(x_TK, weight_NK, bias_N, y_TN)


def plain_linear_reference(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor | None = None
) -> Tensor:
    """The same in plain torch."""
    if out_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if bias_N is None:
        return torch.mm(x_TK, weight_NK.t(), out=out_TN)
    return torch.addmm(bias_N, x_TK, weight_NK.t(), out=out_TN)


def plain_linear_float32(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> Tensor:
    """The same without a bias, in float32 whatever the inputs are: no conversion follows, and no digit is lost."""
    if x_TK.dtype == torch.float32:
        return plain_linear(x_TK, weight_NK, None, out_TN)
    if x_TK.is_cpu:
        return _widened(x_TK, weight_NK, None, out_TN)
    return torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32, out=out_TN)


def plain_linear_float32_reference(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> Tensor:
    """The same in plain torch."""
    return torch.mm(x_TK.float(), weight_NK.float().t(), out=out_TN)


def _widened(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor) -> Tensor:
    """Half precision in float32, some rows of the weight at a time: a CPU without such instructions is 30 times slower in it."""
    x32_TK = x_TK.float()
    num_rows = max(1, WIDENED_ELEMENTS // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        bias32 = None if bias_N is None else bias_N[rows].float()
        y_TN[:, rows] = plain_linear(x32_TK, weight_NK[rows].float(), bias32)
    return y_TN


def quantized_view(quantized: QuantizedRows | None, weight: QuantizedWeight, num_rows: int) -> QuantizedRows | None:
    """As much of the room for codes as these rows take; None where the scheme takes rows as they are."""
    if not weight.scheme.quantizes_activations:
        return None
    assert quantized is not None, f"{weight.scheme.name} needs room for the codes of {num_rows} rows"
    size_k = weight.shape[-1]
    num_blocks = -(-size_k // weight.scheme.block_columns) if weight.scheme.block_columns else 1
    codes = quantized.codes_TK.view(-1)[: num_rows * size_k].view(num_rows, size_k)
    scales = quantized.scales_TB.view(-1)[: num_rows * num_blocks].view(num_rows, num_blocks)
    return QuantizedRows(codes, scales, quantized.scratch)


def room_for_codes(
    quantized: QuantizedRows | None, weight: Tensor | QuantizedWeight, num_rows: int
) -> QuantizedRows | None:
    """Where whoever makes rows for a product with this weight leaves their codes; None where it takes none, or several scales a row."""
    if not isinstance(weight, QuantizedWeight) or weight.scheme.block_columns:
        return None
    return quantized_view(quantized, weight, num_rows)


def coded_rows(
    x_TK: Tensor, weight: QuantizedWeight, quantized: QuantizedRows | None, is_coded: bool
) -> QuantizedRows | None:
    """Rows as the codes that the product takes, made now unless they are there; None where it takes rows as they are."""
    rows = quantized_view(quantized, weight, x_TK.shape[0])
    return rows if rows is None or is_coded else quantize_rows(x_TK, rows)


def quantized_linear(
    x_TK: Tensor,
    weight: QuantizedWeight,
    bias_N: Tensor | None,
    out_TN: Tensor,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> Tensor:
    """x @ weight.T + bias into `out_TN`, in its type; `quantized` is room for rows as codes where the scheme wants them so, or has them."""
    if x_TK.shape[0] == 0:
        return out_TN  # torch's scaled product does not promise to take no rows
    if not can_run(x_TK):
        return native_quantized_linear(_taken_rows(x_TK, weight, quantized, is_coded), weight, bias_N, out_TN)
    if not is_coded and block_scaled_gemv.takes(weight, x_TK.shape[0]):
        return block_scaled_gemv.block_scaled_gemv(x_TK, weight, bias_N, out_TN)
    rows = coded_rows(x_TK, weight, quantized, is_coded)
    if rows is None:
        return tile_linear(x_TK, weight, bias_N, out_TN, None)
    if takes(weight, x_TK.shape[0], rows.scratch):
        return row_scaled_linear(rows, weight, bias_N, out_TN)
    if takes_scaled_product(weight, out_TN):
        return torch._scaled_mm(  # type: ignore[attr-defined] the public form takes no `out`
            rows.codes_TK,
            weight.codes.t(),
            scale_a=rows.scales_TB,
            scale_b=weight.scales.view(1, -1),
            bias=bias_N,
            out_dtype=out_TN.dtype,
            out=out_TN,
        )
    return tile_linear(x_TK, weight, bias_N, out_TN, rows)


def fuses_gate(
    x_TK: Tensor, gate_up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, quantized: QuantizedRows | None
) -> bool:
    """Whether `gated_linear` takes these rows and weights."""
    return quantized is not None and can_run(x_TK) and takes_gate(gate_up, down, x_TK.shape[0], quantized.scratch)


def gated_linear(
    x_TK: Tensor,
    gate_up: Tensor | QuantizedWeight,
    bias_N: Tensor | None,
    kind: str,
    out_TI: Tensor,
    down: Tensor | QuantizedWeight,
    quantized: QuantizedRows | None,
    is_coded: bool = False,
) -> Tensor:
    """The activation of the gate times up into `out_TI`, in its type; its codes, for the product with `down`, into `quantized`."""
    assert isinstance(gate_up, QuantizedWeight), "gate and up are plain"
    assert isinstance(down, QuantizedWeight), "down is plain"
    rows = coded_rows(x_TK, gate_up, quantized, is_coded)
    assert rows is not None, f"{gate_up.scheme.name} takes rows as they are"
    amax = row_scaled_gate(rows, gate_up, bias_N, kind, out_TI)
    codes = quantized_view(quantized, down, x_TK.shape[0])
    assert codes is not None, f"{down.scheme.name} takes rows as they are"
    quantize_rows_by_amax(out_TI, amax, codes)
    return out_TI


def takes_scaled_product(weight: QuantizedWeight, out_TN: Tensor) -> bool:
    """Whether torch's scaled product takes it: scales by row, bfloat16 out, and sizes that suit cuBLAS."""
    sizes = weight.shape
    return (
        weight.scheme.block_columns == 0
        and out_TN.dtype == torch.bfloat16
        and all(size % SCALED_PRODUCT_SIZES == 0 for size in sizes)
    )


def quantized_linear_reference(
    x_TK: Tensor,
    weight: QuantizedWeight,
    bias_N: Tensor | None,
    out_TN: Tensor,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> Tensor:
    """The same in plain torch: rows and weight turned back into float32."""
    return native_quantized_linear_reference(_taken_rows(x_TK, weight, quantized, is_coded), weight, bias_N, out_TN)


def _taken_rows(x_TK: Tensor, weight: QuantizedWeight, quantized: QuantizedRows | None, is_coded: bool) -> Tensor:
    """float32 rows as the product takes them: as they are, or quantized and dequantized."""
    rows = coded_rows(x_TK, weight, quantized, is_coded)
    return x_TK.float() if rows is None else dequantize_rows(rows)


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """float32 numbers that the codes stand for."""
    num_rows, size_k = rows.codes_TK.shape
    num_blocks = rows.scales_TB.shape[1]
    if num_blocks == 1:
        return rows.codes_TK.float() * rows.scales_TB
    width = BLOCK_COLUMNS
    padded = F.pad(rows.codes_TK.float(), (0, num_blocks * width - size_k)).view(num_rows, num_blocks, width)
    return (padded * rows.scales_TB[..., None]).view(num_rows, -1)[:, :size_k].contiguous()


def native_quantized_linear(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor) -> Tensor:
    """float32 [T, K] by a weight [N, K] into `out_TN`, in its type. A row's result does not depend, to the bit, on the other rows."""
    _check(x_TK, weight, bias_N, out_TN)
    bias = None if bias_N is None else bias_N.float()
    library = native_for(x_TK, bias)
    if library is None:
        return native_quantized_linear_reference(x_TK, weight, bias, out_TN)
    if out_TN.dtype is torch.float32 and out_TN.is_contiguous():
        _multiply(library, x_TK, weight, bias, out_TN)
        return out_TN
    step = max(1, WIDE_RESULTS // max(1, weight.shape[0]))
    for start in range(0, x_TK.shape[0], step):
        some = slice(start, start + step)
        y = x_TK.new_empty(out_TN[some].shape)
        _multiply(library, x_TK[some], weight, bias, y)
        out_TN[some] = y
    return out_TN


def native_quantized_linear_reference(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor
) -> Tensor:
    """The same in plain torch, some rows of the weight at a time."""
    size_n, size_k = weight.shape
    step = max(1, WIDENED_ELEMENTS // max(1, size_k))
    for start in range(0, size_n, step):
        some = slice(start, min(start + step, size_n))
        bias = None if bias_N is None else bias_N[some].float()
        out_TN[:, some] = plain_linear(x_TK, dequantize(weight, (some.start, some.stop)), bias)
    return out_TN


def _check(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor) -> None:
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


def _multiply(library: ctypes.CDLL, x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, y_TN: Tensor) -> None:
    scheme, (size_n, size_k) = weight.scheme, weight.shape
    library.holdfast_quantized_linear(
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

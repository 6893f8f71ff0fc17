"""Linear layers: x @ w.T + bias for any number of rows and any weight, plain or quantized.

T rows, K inputs, N outputs, B blocks of K, G groups

On a GPU the weight and the number of rows choose the kernel:

    plain               cuBLAS; one row by a weight in groups: the GEMV of kernels/gemm/small_batch.py
    row-scaled e4m3     up to 64 or 128 rows kernels/gemm/row_scaled_tiles.py, then torch's scaled product (cuBLAS too)
    block-scaled e4m3   one row kernels/gemm/block_scaled_gemv.py, which quantizes the row itself; up to 64 rows
                        kernels/gemm/block_scaled_tiles.py
    codes of 4 bits     one row kernels/gemm/packed_gemv.py
    all else            kernels/gemm/quantized_tiles.py, which dequantizes

On a CPU plain and quantized weights go to C, whose order of summation is batch invariant. Small batches of the fused
decode path use kernels/gemm/small_batch.py instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.fp8 import BLOCK_COLUMNS
from holdfast.kernels.gemm import block_scaled_gemv, block_scaled_tiles, joint_row, packed_gemv, row_scaled_tiles
from holdfast.kernels.gemm.packed_linear import packed_gate, packed_linear, takes_packed_gate
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    quantize_rows,
    quantize_rows_by_amax,
)
from holdfast.kernels.gemm.quantized_tiles import tile_linear
from holdfast.kernels.gemm.small_batch import single_row_linear
from holdfast.kernels.native_library import NATIVE_CODES, native_for
from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import can_run, check_dense
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize

WIDENED_ELEMENTS = 2**20
"""Elements of a weight that a CPU converts to float32 at a time."""
WIDE_RESULTS = 2**20
"""Elements of a result that a CPU keeps in float32 at a time if the output has another type."""
SCALED_PRODUCT_SIZES = 16
"""Divisor of the inputs and outputs that torch's scaled product takes."""


def linear(
    x_TK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    out_TN: Tensor | None = None,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> Tensor:
    """Multiply [T, K] by [N, K] to [T, N], into `out_TN` if given. On CPU the result is batch invariant.

    `quantized` holds buffers for quantized rows, if the weight needs them. If `is_coded`, x is already quantized there.
    """
    if isinstance(weight, Tensor):
        return plain_linear(x_TK, weight, bias_N, out_TN)
    y_TN = x_TK.new_empty(x_TK.shape[0], weight.shape[0]) if out_TN is None else out_TN
    if isinstance(weight, PackedWeight):
        return packed_linear(x_TK, weight, bias_N, y_TN)
    return quantized_linear(x_TK, weight, bias_N, y_TN, quantized, is_coded)


def linear_float32(x_TK: Tensor, weight: AnyWeight, out_TN: Tensor, quantized: QuantizedRows | None = None) -> Tensor:
    """Like `linear`, without a bias and with a float32 result."""
    if isinstance(weight, PackedWeight):
        return packed_linear(x_TK, weight, None, out_TN)
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x_TK, weight, None, out_TN, quantized)
    return plain_linear_float32(x_TK, weight, out_TN)


def joint_linear(
    x_TK: Tensor,
    weight: AnyWeight,
    bias_N: Tensor | None,
    out_TN: Tensor,
    plain_PK: Tensor,
    out_TP: Tensor,
    quantized: QuantizedRows | None = None,
    is_coded: bool = False,
) -> None:
    """Call `linear_float32` of the plain weight and `linear` of the other, in one launch if possible."""
    if (
        can_run(x_TK)
        and not is_coded
        and isinstance(weight, QuantizedWeight)
        and joint_row.takes(x_TK, weight, plain_PK)
    ):
        joint_row.joint_row(x_TK, weight, bias_N, out_TN, plain_PK, out_TP)
        return
    linear_float32(x_TK, plain_PK, out_TP)
    linear(x_TK, weight, bias_N, out_TN, quantized, is_coded)


def plain_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_TN: Tensor | None = None) -> Tensor:
    """Like `linear`, for a plain weight."""
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
    """Like `plain_linear`, with torch's own product."""
    if out_TN is None:
        return F.linear(x_TK, weight_NK, bias_N)
    if bias_N is None:
        return torch.mm(x_TK, weight_NK.t(), out=out_TN)
    return torch.addmm(bias_N, x_TK, weight_NK.t(), out=out_TN)


def plain_linear_float32(x_TK: Tensor, weight_NK: Tensor, out_TN: Tensor) -> Tensor:
    """Like `plain_linear`, without a bias and with a float32 result."""
    if x_TK.dtype == torch.float32:
        return plain_linear(x_TK, weight_NK, None, out_TN)
    if x_TK.is_cpu:
        return _widened(x_TK, weight_NK, None, out_TN)
    return torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32, out=out_TN)


def _widened(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor) -> Tensor:
    """Multiply half precision in float32, piece by piece: without half instructions a CPU is 30 times slower in it."""
    x32_TK = x_TK.float()
    num_rows = max(1, WIDENED_ELEMENTS // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        bias32 = None if bias_N is None else bias_N[rows].float()
        y_TN[:, rows] = plain_linear(x32_TK, weight_NK[rows].float(), bias32)
    return y_TN


def quantized_view(quantized: QuantizedRows | None, weight: AnyWeight, num_rows: int) -> QuantizedRows | None:
    """View the buffers for the codes of these rows; None if the weight takes rows unquantized."""
    if not isinstance(weight, QuantizedWeight) or not weight.scheme.quantizes_activations:
        return None
    assert quantized is not None, f"{weight.scheme.name} needs buffers for the codes of {num_rows} rows"
    size_k = weight.shape[-1]
    num_blocks = -(-size_k // weight.scheme.block_columns) if weight.scheme.block_columns else 1
    codes = quantized.codes_TK.view(-1)[: num_rows * size_k].view(num_rows, size_k)
    scales = quantized.scales_TB.view(-1)[: num_rows * num_blocks].view(num_rows, num_blocks)
    return QuantizedRows(codes, scales, quantized.scratch)


def room_for_codes(quantized: QuantizedRows | None, weight: AnyWeight, num_rows: int) -> QuantizedRows | None:
    """View the buffers that the rows' producer fills with codes; None if the weight takes plain rows.

    A single row by a block-scaled weight is quantized by its product, and so are the rows of block-scaled experts.
    """
    if not isinstance(weight, QuantizedWeight) or (weight.scheme.block_columns and len(weight.shape) != 2):
        return None
    rows = quantized_view(quantized, weight, num_rows)
    is_gemv = rows is not None and can_run(rows.codes_TK) and block_scaled_gemv.takes(weight, num_rows)
    return None if is_gemv else rows


def coded_rows(
    x_TK: Tensor, weight: QuantizedWeight, quantized: QuantizedRows | None, is_coded: bool
) -> QuantizedRows | None:
    """Quantize rows unless `is_coded`; None if the scheme does not quantize activations."""
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
    """Like `linear`, for a quantized weight."""
    if x_TK.shape[0] == 0:
        return out_TN  # torch's scaled product does not promise to accept zero rows
    if not can_run(x_TK):
        return native_quantized_linear(dequantized_rows(x_TK, weight, quantized, is_coded), weight, bias_N, out_TN)
    if not is_coded and block_scaled_gemv.takes(weight, x_TK.shape[0]):
        return block_scaled_gemv.block_scaled_gemv(x_TK, weight, bias_N, out_TN)
    if packed_gemv.takes(weight, x_TK.shape[0]):
        return packed_gemv.packed_gemv(packed_gemv.PackedProduct(x_TK, weight, out_TN, bias_N))
    rows = coded_rows(x_TK, weight, quantized, is_coded)
    if rows is None:
        return tile_linear(x_TK, weight, bias_N, out_TN, None)
    if row_scaled_tiles.takes(weight, x_TK.shape[0], rows.scratch):
        return row_scaled_tiles.row_scaled_linear(rows, weight, bias_N, out_TN)
    if block_scaled_tiles.takes(weight, x_TK.shape[0], rows.scratch):
        return block_scaled_tiles.block_scaled_linear(rows, weight, bias_N, out_TN)
    if takes_scaled_product(weight, out_TN):
        return torch._scaled_mm(  # type: ignore[attr-defined] the public form takes no `out`
            *(rows.codes_TK, weight.codes.t(), rows.scales_TB, weight.scales.view(1, -1)),
            bias=bias_N,
            out_dtype=out_TN.dtype,
            out=out_TN,
        )
    return tile_linear(x_TK, weight, bias_N, out_TN, rows)


def fuses_gate(x_TK: Tensor, gate_up: AnyWeight, down: AnyWeight, quantized: QuantizedRows | None) -> bool:
    """Return True if `gated_linear` takes these rows and weights."""
    if isinstance(gate_up, PackedWeight):
        is_plain = not isinstance(down, QuantizedWeight) or not down.scheme.quantizes_activations
        return is_plain and takes_packed_gate(x_TK, gate_up)
    return (
        quantized is not None
        and can_run(x_TK)
        and row_scaled_tiles.takes_gate(gate_up, down, x_TK.shape[0], quantized.scratch)
    )


def gated_linear(
    x_TK: Tensor,
    gate_up: AnyWeight,
    bias_N: Tensor | None,
    kind: str,
    out_TI: Tensor,
    down: AnyWeight,
    quantized: QuantizedRows | None,
    is_coded: bool = False,
) -> Tensor:
    """Compute activation(gate) * up into `out_TI`, and its codes for the product with `down` into `quantized`."""
    if isinstance(gate_up, PackedWeight):
        assert kind == "silu", f"{kind}, and the tiles compute silu"
        return packed_gate(x_TK, gate_up, bias_N, out_TI)
    assert isinstance(gate_up, QuantizedWeight), "gate and up are not quantized"
    assert isinstance(down, QuantizedWeight), "down is not quantized"
    rows = coded_rows(x_TK, gate_up, quantized, is_coded)
    assert rows is not None, f"{gate_up.scheme.name} does not quantize activations"
    amax = row_scaled_tiles.row_scaled_gate(rows, gate_up, bias_N, kind, out_TI)
    codes = quantized_view(quantized, down, x_TK.shape[0])
    assert codes is not None, f"{down.scheme.name} does not quantize activations"
    quantize_rows_by_amax(out_TI, amax, codes)
    return out_TI


def takes_scaled_product(weight: QuantizedWeight, out_TN: Tensor) -> bool:
    """Return True if torch's scaled product takes this: row scales, bfloat16 output, and sizes that suit cuBLAS."""
    is_aligned = all(size % SCALED_PRODUCT_SIZES == 0 for size in weight.shape)
    return weight.scheme.block_columns == 0 and out_TN.dtype == torch.bfloat16 and is_aligned


def dequantized_rows(x_TK: Tensor, weight: QuantizedWeight, quantized: QuantizedRows | None, is_coded: bool) -> Tensor:
    """Return rows in float32, quantized and dequantized if the scheme quantizes activations."""
    rows = coded_rows(x_TK, weight, quantized, is_coded)
    return x_TK.float() if rows is None else dequantize_rows(rows)


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """Return the float32 values of codes."""
    num_rows, size_k = rows.codes_TK.shape
    num_blocks = rows.scales_TB.shape[1]
    if num_blocks == 1:
        return rows.codes_TK.float() * rows.scales_TB
    width = BLOCK_COLUMNS
    padded = F.pad(rows.codes_TK.float(), (0, num_blocks * width - size_k)).view(num_rows, num_blocks, width)
    return (padded * rows.scales_TB[..., None]).view(num_rows, -1)[:, :size_k].contiguous()


def native_quantized_linear(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor) -> Tensor:
    """Multiply float32 [T, K] by a weight [N, K] into `out_TN`, in its type. Batch invariant."""
    _check(x_TK, weight, bias_N, out_TN)
    bias = None if bias_N is None else bias_N.float()
    library = native_for(x_TK, bias)
    if library is None:
        return native_quantized_linear_reference(x_TK, weight, bias, out_TN)
    scheme, (size_n, size_k) = weight.scheme, weight.shape
    operands = weight.codes.data_ptr(), weight.scales.data_ptr(), 0 if bias is None else bias.data_ptr()
    cut = NATIVE_CODES[scheme.code_dtype], scheme.block_rows, scheme.block_columns or max(1, size_k)
    is_direct = out_TN.dtype is torch.float32 and out_TN.is_contiguous()
    step = len(x_TK) if is_direct else max(1, WIDE_RESULTS // max(1, size_n))
    for start in range(0, len(x_TK), max(1, step)):
        x, out = x_TK[start : start + step], out_TN[start : start + step]
        y = out if is_direct else x.new_empty(out.shape)
        library.holdfast_quantized_linear(x.data_ptr(), *operands, y.data_ptr(), len(x), size_n, size_k, *cut)
        if not is_direct:
            out.copy_(y)
    return out_TN


def native_quantized_linear_reference(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor
) -> Tensor:
    """Dequantize the weight piece by piece, and multiply."""
    size_n, size_k = weight.shape
    step = max(1, WIDENED_ELEMENTS // max(1, size_k))
    for start in range(0, size_n, step):
        some = slice(start, min(start + step, size_n))
        bias = None if bias_N is None else bias_N[some].float()
        out_TN[:, some] = plain_linear(x_TK, dequantize(weight, (some.start, some.stop)), bias)
    return out_TN


def _check(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """Assert that shapes match: the C function does not check."""
    size_n, size_k = weight.shape
    assert x_TK.shape[1] == size_k, f"{x_TK.shape=} {weight.shape=}"
    assert out_TN.shape == (x_TK.shape[0], size_n), f"{out_TN.shape=}, not {(x_TK.shape[0], size_n)}"
    assert bias_N is None or bias_N.shape == (size_n,), f"{bias_N.shape=}, not {(size_n,)}"
    num_codes = weight.codes.numel() * weight.scheme.codes_per_byte
    assert num_codes == size_n * size_k, f"{num_codes} codes of a weight of {weight.shape}"
    scale_shape = weight.scheme.scale_shape(weight.shape)
    assert weight.scales.shape == scale_shape, f"{weight.scales.shape=}, not {scale_shape}"
    check_dense(weight.codes, weight.scales)


def batched_linear(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """Like `grouped_linear`, as a GEMV for one row, else as one batched cuBLAS product over strided views."""
    num_groups = weight_GNK.shape[0]
    if x_TX.shape[0] == 1 and can_run(x_TX):
        return single_row_linear(x_TX, weight_GNK.flatten(0, 1), out_TX, num_groups)
    if x_TX.shape[0]:
        x_GTK, out_GTN = (rows_TX.unflatten(1, (num_groups, -1)).transpose(0, 1) for rows_TX in (x_TX, out_TX))
        torch.bmm(x_GTK, weight_GNK.transpose(1, 2), out=out_GTN)
    return out_TX


def grouped_linear_reference(x_TX: Tensor, weight_GNK: Tensor, out_TX: Tensor) -> Tensor:
    """Multiply each group of columns by its own weight: [T, G * K] by [G, N, K] to [T, G * N], into `out_TX`.

    The loop over groups keeps it batch invariant.
    """
    if x_TX.shape[0] == 0:
        return out_TX
    num_groups = weight_GNK.shape[0]
    x_TGK, out_TGN = (rows_TX.unflatten(1, (num_groups, -1)) for rows_TX in (x_TX, out_TX))
    for group, weight_NK in enumerate(weight_GNK):
        out_TGN[:, group] = plain_linear(x_TGK[:, group].contiguous(), weight_NK, None)
    return out_TX


grouped_linear = operation(reference=grouped_linear_reference, triton=batched_linear)

"""Products of rows with a quantized weight: which kernel multiplies, and rows as it takes them.

T rows, K inputs, N outputs, B blocks of K
"""

import torch
import torch.nn.functional as F

from holdfast.kernels.products.coded_linear import coded_linear, coded_linear_reference
from holdfast.kernels.products.quantize_rows import BLOCK_COLUMNS, CodedRows, quantize_rows
from holdfast.kernels.products.tile_linear import tile_linear
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.quantized_weight import QuantizedWeight

WHOLE_SIZES = 16
"""torch's scaled product takes inputs and outputs in multiples of this."""


def coded_view(coded: CodedRows | None, weight: QuantizedWeight, num_rows: int) -> CodedRows | None:
    """As much of the room for codes as these rows take; None where the scheme leaves rows as they are."""
    if not weight.scheme.codes_activations:
        return None
    assert coded is not None, f"{weight.scheme.name} needs room for the codes of {num_rows} rows"
    size_k = weight.shape[-1]
    num_blocks = -(-size_k // weight.scheme.block_columns) if weight.scheme.block_columns else 1
    codes = coded.codes_TK.view(-1)[: num_rows * size_k].view(num_rows, size_k)
    return CodedRows(codes, coded.scales_TB.view(-1)[: num_rows * num_blocks].view(num_rows, num_blocks))


def quantized_linear(
    x_TK: torch.Tensor,
    weight: QuantizedWeight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias into `out_TN`, in its type; `coded` is room for rows as codes where the scheme wants them so."""
    if x_TK.shape[0] == 0:
        return out_TN  # torch's scaled product does not promise to take no rows
    if not can_run(x_TK):
        return coded_linear(_taken_rows(x_TK, weight, coded), weight, bias_N, out_TN)
    rows = coded_view(coded, weight, x_TK.shape[0])
    if rows is None:
        return tile_linear(x_TK, weight, bias_N, out_TN, None)
    quantize_rows(x_TK, rows)
    if _torch_multiplies(weight, out_TN):
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


def _torch_multiplies(weight: QuantizedWeight, out_TN: torch.Tensor) -> bool:
    """Scales by row and bfloat16 out, in sizes that cuBLAS takes; block scales are a kernel of ours for every shape."""
    sizes = weight.shape
    return (
        weight.scheme.block_columns == 0
        and out_TN.dtype == torch.bfloat16
        and all(size % WHOLE_SIZES == 0 for size in sizes)
    )


def quantized_linear_reference(
    x_TK: torch.Tensor,
    weight: QuantizedWeight,
    bias_N: torch.Tensor | None,
    out_TN: torch.Tensor,
    coded: CodedRows | None = None,
) -> torch.Tensor:
    """The same in plain torch: rows and weight turned back into float32."""
    return coded_linear_reference(_taken_rows(x_TK, weight, coded), weight, bias_N, out_TN)


def _taken_rows(x_TK: torch.Tensor, weight: QuantizedWeight, coded: CodedRows | None) -> torch.Tensor:
    """float32 rows as the product takes them: as they are, or through codes and back."""
    rows = coded_view(coded, weight, x_TK.shape[0])
    return x_TK.float() if rows is None else decoded_rows(quantize_rows(x_TK, rows))


def decoded_rows(rows: CodedRows) -> torch.Tensor:
    """float32 numbers that the codes stand for."""
    num_rows, size_k = rows.codes_TK.shape
    num_blocks = rows.scales_TB.shape[1]
    if num_blocks == 1:
        return rows.codes_TK.float() * rows.scales_TB
    width = BLOCK_COLUMNS
    padded = F.pad(rows.codes_TK.float(), (0, num_blocks * width - size_k)).view(num_rows, num_blocks, width)
    return (padded * rows.scales_TB[..., None]).view(num_rows, -1)[:, :size_k].contiguous()

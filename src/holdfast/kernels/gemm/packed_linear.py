"""Products and lookups of packed weights: pieces of rows are dequantized into the workspace and multiplied.

T rows, K inputs, N outputs, R rows of a piece, V rows of a table

This is the reference of all schemes, on any device. Values are rounded to the type of activations first, so a product
equals that of the expanded weight. Kernels take a part (q, k, v; gate, up) as a whole.
"""

import torch
from torch import Tensor

from holdfast.kernels.native_library import native_for
from holdfast.kernels.packed_kernels import piece_rows
from holdfast.quant.packed_values import dequantize_rows, fill_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight

LOOKED_UP_ELEMENTS = 2**18
"""Elements of table rows that are dequantized at a time."""


def packed_linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None, out_TN: Tensor, matrix: int = 0) -> Tensor:
    """Multiply [T, K] by one matrix of a packed weight into `out_TN`, in its type; `matrix` counts stacked experts."""
    if x_TK.shape[0] == 0:
        return out_TN
    x_TK = x_TK.float() if x_TK.is_cpu else x_TK
    for part in weight.parts:
        rows = slice(part.row_start, part.row_start + part.num_rows)
        bias = None if bias_N is None else bias_N[rows]
        _multiply_part(x_TK, part, matrix, bias, out_TN[:, rows], weight.room)
    return out_TN


def _multiply_part(
    x_TK: Tensor, part: PackedPart, matrix: int, bias_N: Tensor | None, out_TN: Tensor, room: Tensor | None
) -> None:
    num_rows, num_columns = part.shape[-2:]
    step = piece_rows(num_rows, num_columns, x_TK.device.type)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        weight_RK = _rounded(part, matrix, (start, end), room, out_TN.dtype if x_TK.is_cpu else x_TK.dtype)
        bias = None if bias_N is None else bias_N[start:end]
        _multiply_piece(x_TK, weight_RK, bias, out_TN[:, start:end])


def _rounded(part: PackedPart, matrix: int, rows: tuple[int, int], room: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return rows of a part as an expanded weight has them, in `room`."""
    num_rows, num_columns = rows[1] - rows[0], part.shape[-1]
    num_elements = num_rows * num_columns
    device = part.planes[0].device
    room = torch.empty(8 * num_elements, dtype=torch.uint8, device=device) if room is None else room
    values_RK = room[: 4 * num_elements].view(torch.float32).view(num_rows, num_columns)
    dequantize_rows(part, matrix, rows, values_RK)
    if dtype == torch.float32:
        return values_RK
    first = -(-4 * num_elements // 256) * 256
    rounded = room[first : first + dtype.itemsize * num_elements].view(dtype).view(num_rows, num_columns)
    rounded.copy_(values_RK)
    return values_RK.copy_(rounded) if device.type == "cpu" else rounded


def _multiply_piece(x_TK: Tensor, weight_RK: Tensor, bias_R: Tensor | None, out_TR: Tensor) -> None:
    """Multiply by rows of a weight into some columns of the result."""
    if x_TK.is_cpu:
        bias = None if bias_R is None else bias_R.float()
        y_TR = torch.empty(x_TK.shape[0], weight_RK.shape[0])
        library = native_for(x_TK, weight_RK, bias, y_TR)
        if library is None:
            y_TR = torch.nn.functional.linear(x_TK, weight_RK, bias)
        else:
            pointers = x_TK.data_ptr(), weight_RK.data_ptr(), 0 if bias is None else bias.data_ptr(), y_TR.data_ptr()
            library.holdfast_linear(*pointers, len(x_TK), *weight_RK.shape)
        out_TR.copy_(y_TR)
    elif out_TR.dtype != x_TK.dtype:
        y_TR = torch.mm(x_TK, weight_RK.t(), out_dtype=out_TR.dtype)
        out_TR.copy_(y_TR if bias_R is None else y_TR.add_(bias_R))
    elif bias_R is None:
        out_TR.copy_(torch.mm(x_TK, weight_RK.t()))
    else:
        out_TR.copy_(torch.addmm(bias_R, x_TK, weight_RK.t()))


def lookup_packed(ids_T: Tensor, table: PackedWeight, out_TK: Tensor) -> Tensor:
    """Dequantize rows of a packed table by index into `out_TK`, rounded once to its type."""
    (part,) = table.parts
    group, num_columns = part.scheme.row_group, table.shape[-1]
    step = max(1, LOOKED_UP_ELEMENTS // (num_columns * group))
    for start in range(0, len(ids_T), step):
        ids = ids_T[start : start + step]
        rows = ids if group == 1 else ids // group
        planes = [
            tensor if plane.is_shared else tensor.index_select(0, rows)
            for plane, tensor in zip(part.scheme.planes, part.planes, strict=True)
        ]
        values = torch.empty(len(ids) * group, num_columns, device=out_TK.device)
        fill_rows(part.scheme, planes, values)
        if group > 1:
            values = values.view(len(ids), group, num_columns)[torch.arange(len(ids), device=ids.device), ids % group]
        out_TK[start : start + step].copy_(values)
    return out_TK

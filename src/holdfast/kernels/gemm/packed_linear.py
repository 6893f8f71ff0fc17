"""Products and lookups of packed weights: pieces of rows are dequantized into the workspace and multiplied.

T rows, K inputs, N outputs, R rows of a piece, V rows of a table

This is the reference of all schemes, on any device. Values are rounded to the type of activations first, so a product
equals that of the expanded weight. Kernels take a part (q, k, v; gate, up) as a whole: C over tiles on a CPU; on a GPU
kernels/gemm/packed_mma.py, or for many rows and other schemes a kernel that dequantizes pieces, and cuBLAS.
"""

import torch
from torch import Tensor

from holdfast.kernels.gemm import packed_dequantize, packed_mma
from holdfast.kernels.gemm.packed_block_linear import packed_block_linear, packed_block_rows
from holdfast.kernels.native_library import native_for
from holdfast.kernels.packed_kernels import ARRIVED_BYTES, PieceShape, piece_bytes, piece_rows
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.packed_tiles import TILE_SCHEMES
from holdfast.quant.packed_values import dequantize_rows, fill_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight

LOOKED_UP_ELEMENTS = 2**18
"""Elements of table rows that are dequantized at a time."""


def packed_linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None, out_TN: Tensor, matrix: int = 0) -> Tensor:
    """Multiply [T, K] by one matrix of a packed weight into `out_TN`, in its type; `matrix` counts stacked experts."""
    if x_TK.shape[0] == 0:
        return out_TN
    if can_run(x_TK) or not x_TK.is_cpu:
        for part in weight.parts:
            rows = slice(part.row_start, part.row_start + part.num_rows)
            _multiply_on_gpu(x_TK, part, matrix, None if bias_N is None else bias_N[rows], out_TN[:, rows], weight)
        return out_TN
    x_TK = x_TK.float()
    for part in weight.parts:
        rows = slice(part.row_start, part.row_start + part.num_rows)
        bias = None if bias_N is None else bias_N[rows]
        if part.scheme.title in TILE_SCHEMES and part.scheme.row_group > 1:
            _multiply_tiles(x_TK, part, matrix, bias, out_TN[:, rows], weight)
        else:
            _multiply_part(x_TK, part, matrix, bias, out_TN[:, rows], weight.room)
    return out_TN


def _multiply_on_gpu(
    x_TK: Tensor, part: PackedPart, matrix: int, bias_N: Tensor | None, out_TN: Tensor, weight: PackedWeight
) -> None:
    """Multiply by a part of one matrix: in tiles, or by pieces that a kernel or the reference dequantizes."""
    num_rows, num_columns = part.shape[-2:]
    if part.scheme.family == "plain" and part.planes[0].dtype == x_TK.dtype:
        values_XK = part.planes[0].view(-1, num_columns)
        return _multiply_by_cublas(x_TK, values_XK[matrix * num_rows : (matrix + 1) * num_rows], bias_N, out_TN)
    by_kernel = can_run(x_TK) and packed_dequantize.takes(part.scheme)
    room = weight.room if weight.room is not None else own_room(part, x_TK)
    if packed_mma.takes(x_TK, part.scheme, weight.is_invariant):
        packed_mma.packed_mma(x_TK, part, bias_N, out_TN, room, matrix)
        return None
    pieces, step = room[ARRIVED_BYTES:], piece_rows(num_rows, num_columns, "cuda", by_kernel=by_kernel)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        if by_kernel:
            size = (end - start) * num_columns * x_TK.element_size()
            weight_RK = pieces[:size].view(x_TK.dtype).view(end - start, num_columns)
            packed_dequantize.dequantize_piece(part, matrix, (start, end), weight_RK)
        else:
            _, weight_RK = _rounded(part, matrix, (start, end), pieces, x_TK.dtype)
        bias = None if bias_N is None else bias_N[start:end]
        _multiply_by_cublas(x_TK, weight_RK, bias, out_TN[:, start:end])
    return None


def _multiply_by_cublas(x_TK: Tensor, weight_RK: Tensor, bias_R: Tensor | None, out_TR: Tensor) -> None:
    """Multiply by rows of a weight into some columns of the result, without memory of its own."""
    if out_TR.dtype != x_TK.dtype:
        torch.mm(x_TK, weight_RK.t(), out_dtype=out_TR.dtype, out=out_TR)
        if bias_R is not None:
            out_TR.add_(bias_R)
    elif bias_R is None:
        torch.mm(x_TK, weight_RK.t(), out=out_TR)
    else:
        torch.addmm(bias_R, x_TK, weight_RK.t(), out=out_TR)


def takes_packed_gate(x_TK: Tensor, weight: PackedWeight) -> bool:
    """Return True if tiles multiply these rows by gate and up at once: both are packed alike."""
    part, *others = weight.parts
    return not others and packed_mma.takes(x_TK, part.scheme, weight.is_invariant)


def packed_gate(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None, out_TI: Tensor) -> Tensor:
    """Compute silu(gate) * up of rows that `takes_packed_gate` accepts; gates are the upper half of the weight."""
    (part,) = weight.parts
    room = weight.room if weight.room is not None else own_room(part, x_TK)
    return packed_mma.packed_mma(x_TK, part, bias_N, out_TI, room, gated=True)


def own_room(part: PackedPart, x_TK: Tensor) -> Tensor:
    """Return scratch for a product outside of an engine."""
    dtype = str(x_TK.dtype).removeprefix("torch.")
    shape = PieceShape(*part.shape[-2:], has_kernel=packed_dequantize.takes(part.scheme))
    room = torch.empty(ARRIVED_BYTES + piece_bytes(shape, dtype, "cuda"), dtype=torch.uint8, device=x_TK.device)
    room[:ARRIVED_BYTES].zero_()
    return room


def _multiply_tiles(
    x_TK: Tensor, part: PackedPart, matrix: int, bias_N: Tensor | None, out_TN: Tensor, weight: PackedWeight
) -> None:
    tiles_GX = part.planes[0] if part.planes[0].dim() == 2 else part.planes[0][matrix]
    is_float32 = out_TN.dtype == torch.float32
    y_TN = out_TN if is_float32 else torch.empty(out_TN.shape, dtype=torch.float32)
    bias = bias_N if bias_N is None or bias_N.dtype == torch.float32 else bias_N.float()
    packed_block_linear(x_TK, tiles_GX, part.scheme, bias, y_TN, weight.activations, weight.room)
    if not is_float32:
        out_TN.copy_(y_TN)


def _multiply_part(
    x_TK: Tensor, part: PackedPart, matrix: int, bias_N: Tensor | None, out_TN: Tensor, room: Tensor | None
) -> None:
    num_rows, num_columns = part.shape[-2:]
    step = piece_rows(num_rows, num_columns, "cpu", part.scheme.row_group)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        weight_RK, rounded_RK = _rounded(part, matrix, (start, end), room, out_TN.dtype)
        if rounded_RK is not weight_RK:
            weight_RK.copy_(rounded_RK)
        bias = None if bias_N is None else bias_N[start:end]
        _multiply_piece(x_TK, weight_RK, bias, out_TN[:, start:end])


def _rounded(
    part: PackedPart, matrix: int, rows: tuple[int, int], room: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows of a part in float32, and rounded as an expanded weight has them, in `room`."""
    num_rows, num_columns = rows[1] - rows[0], part.shape[-1]
    num_elements = num_rows * num_columns
    device = part.planes[0].device
    room = torch.empty(8 * num_elements, dtype=torch.uint8, device=device) if room is None else room
    values_RK = room[: 4 * num_elements].view(torch.float32).view(num_rows, num_columns)
    dequantize_rows(part, matrix, rows, values_RK)
    if dtype == torch.float32:
        return values_RK, values_RK
    first = -(-4 * num_elements // 256) * 256
    rounded = room[first : first + dtype.itemsize * num_elements].view(dtype).view(num_rows, num_columns)
    return values_RK, rounded.copy_(values_RK)


def _multiply_piece(x_TK: Tensor, weight_RK: Tensor, bias_R: Tensor | None, out_TR: Tensor) -> None:
    """Multiply by rows of a weight into some columns of the result."""
    bias = None if bias_R is None else bias_R.float()
    y_TR = torch.empty(x_TK.shape[0], weight_RK.shape[0])
    library = native_for(x_TK, weight_RK, bias, y_TR)
    if library is None:
        y_TR = torch.nn.functional.linear(x_TK, weight_RK, bias)
    else:
        pointers = x_TK.data_ptr(), weight_RK.data_ptr(), 0 if bias is None else bias.data_ptr(), y_TR.data_ptr()
        library.holdfast_linear(*pointers, len(x_TK), *weight_RK.shape)
    out_TR.copy_(y_TR)


def lookup_packed(ids_T: Tensor, table: PackedWeight, out_TK: Tensor) -> Tensor:
    """Dequantize rows of a packed table by index into `out_TK`, rounded once to its type."""
    (part,) = table.parts
    num_columns = table.shape[-1]
    if part.scheme.row_group > 1:
        if out_TK.dtype == torch.float32:
            return packed_block_rows(ids_T, part.planes[0], part.scheme, out_TK)
        return out_TK.copy_(packed_block_rows(ids_T, part.planes[0], part.scheme, torch.empty(out_TK.shape)))
    if can_run(ids_T) and packed_dequantize.takes(part.scheme):
        return packed_dequantize.dequantize_ids(ids_T, part, out_TK)
    step = max(1, LOOKED_UP_ELEMENTS // num_columns)
    for start in range(0, len(ids_T), step):
        ids = ids_T[start : start + step]
        planes = [
            tensor if plane.is_shared else tensor.index_select(0, ids)
            for plane, tensor in zip(part.scheme.planes, part.planes, strict=True)
        ]
        values = torch.empty(len(ids), num_columns, device=out_TK.device)
        fill_rows(part.scheme, planes, values)
        out_TK[start : start + step].copy_(values)
    return out_TK

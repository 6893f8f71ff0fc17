"""Products with tiles of GGUF blocks on a CPU, with 8-bit or full activations; and rows of an embedding.

T tokens, N rows of a weight, K columns, G groups of 16 rows
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.native_library import native_for
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_tiles import PART_COLUMNS, TILE_ROWS, TILE_TYPES, input_bytes
from holdfast.quant.tile_values import fill_tiles
from holdfast.quant.weight_schemes import PackedActivations

PIECE_ELEMENTS = 2**18
"""Elements of a weight that the reference dequantizes at a time."""
MOST_CODE = 127.0
LARGEST_FACTOR = 2.0**126
"""Smaller activations than 127 / this become zero: their codes would overflow."""


def quantize_parts(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [T, K] and float32 scales [T, K / 32]; the scale of a part that is not finite is NaN."""
    parts = x_TK.unflatten(1, (-1, PART_COLUMNS))
    amax = parts.abs().amax(2)
    factors = MOST_CODE / amax
    is_used = amax.isfinite() & (factors <= LARGEST_FACTOR)
    codes = torch.where(is_used[..., None], (parts * factors[..., None]).round(), 0.0)
    scales = torch.where(amax.isfinite(), torch.where(is_used, amax / MOST_CODE, 0.0), torch.nan)
    return codes.flatten(1).to(torch.int8), scales


def packed_block_linear_reference(
    x_TK: Tensor,
    tiles_GX: Tensor,
    scheme: PackedScheme,
    bias_N: Tensor | None,
    out_TN: Tensor,
    activations: PackedActivations,
    room: Tensor | None = None,
) -> Tensor:
    """Multiply float32 [T, K] by a weight in tiles to [T, N], into `out_TN`, whose rows may lie apart. Batch invariant.

    `room` are bytes for quantized activations; None: they are allocated.
    """
    _check(x_TK, tiles_GX, scheme, bias_N, out_TN)
    if activations == "int8":
        codes, scales = quantize_parts(x_TK)
        x_TK = (codes.unflatten(1, (-1, PART_COLUMNS)) * scales[..., None]).flatten(1)
    step = max(1, PIECE_ELEMENTS // (TILE_ROWS * x_TK.shape[1]))
    for start in range(0, len(tiles_GX), step):
        some = tiles_GX[start : start + step]
        values = torch.empty(len(some) * TILE_ROWS, x_TK.shape[1])
        fill_tiles(scheme, some, values)
        rows = slice(start * TILE_ROWS, start * TILE_ROWS + len(values))
        out_TN[:, rows] = F.linear(x_TK, values, None if bias_N is None else bias_N[rows])
    return out_TN


def packed_block_linear(
    x_TK: Tensor,
    tiles_GX: Tensor,
    scheme: PackedScheme,
    bias_N: Tensor | None,
    out_TN: Tensor,
    activations: PackedActivations,
    room: Tensor | None = None,
) -> Tensor:
    """Like the reference, in C if there is a compiler. With "int8" rows go in pieces that fit `room`."""
    library = native_for(x_TK, bias_N)
    if library is None:
        return packed_block_linear_reference(x_TK, tiles_GX, scheme, bias_N, out_TN, activations, room)
    _check(x_TK, tiles_GX, scheme, bias_N, out_TN)
    number, (num_rows, size_k) = TILE_TYPES[scheme.title], x_TK.shape
    bias, sizes = 0 if bias_N is None else bias_N.data_ptr(), (out_TN.shape[1], size_k, out_TN.stride(0))
    if activations == "full":
        library.holdfast_packed_linear_full(
            x_TK.data_ptr(), tiles_GX.data_ptr(), bias, out_TN.data_ptr(), number, num_rows, *sizes
        )
        return out_TN
    if room is None:
        room = torch.empty(input_bytes(num_rows, size_k), dtype=torch.uint8)
    step = room.numel() // max(1, input_bytes(1, size_k))
    assert step or not num_rows, f"{room.numel()} bytes hold no row of {size_k} columns"
    for start in range(0, num_rows, max(1, step)):
        x, out = x_TK[start : start + step], out_TN[start : start + step]
        library.holdfast_packed_linear(
            x.data_ptr(), tiles_GX.data_ptr(), bias, out.data_ptr(), room.data_ptr(), number, len(x), *sizes
        )
    return out_TN


def packed_block_rows_reference(ids_T: Tensor, tiles_GX: Tensor, scheme: PackedScheme, out_TK: Tensor) -> Tensor:
    """Copy row ids_T[t] of a weight in tiles to row t of `out_TK`, as float32. An id outside of the weight raises."""
    _check_rows(ids_T, tiles_GX, scheme, out_TK)
    values = torch.empty(TILE_ROWS, out_TK.shape[1])
    for row, index in enumerate(ids_T.tolist()):
        fill_tiles(scheme, tiles_GX[index // TILE_ROWS : index // TILE_ROWS + 1], values)
        out_TK[row] = values[index % TILE_ROWS]
    return out_TK


def packed_block_rows(ids_T: Tensor, tiles_GX: Tensor, scheme: PackedScheme, out_TK: Tensor) -> Tensor:
    """Like the reference, in C if there is a compiler."""
    library = native_for(out_TK)
    if library is None:
        return packed_block_rows_reference(ids_T, tiles_GX, scheme, out_TK)
    _check_rows(ids_T, tiles_GX, scheme, out_TK)
    ids = ids_T.to(torch.int64).contiguous()
    library.holdfast_packed_rows(
        ids.data_ptr(), tiles_GX.data_ptr(), out_TK.data_ptr(), TILE_TYPES[scheme.title], len(ids), out_TK.shape[1]
    )
    return out_TK


def _check(x_TK: Tensor, tiles_GX: Tensor, scheme: PackedScheme, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """Assert that shapes match: the C function does not check."""
    num_rows, size_k = x_TK.shape
    size_n = TILE_ROWS * len(tiles_GX)
    assert out_TN.dtype is torch.float32, f"{out_TN.dtype=}"
    assert out_TN.shape == (num_rows, size_n), f"{out_TN.shape=}, not {(num_rows, size_n)}"
    assert size_n <= 1 or out_TN.stride(1) == 1, f"{out_TN.stride()=}: columns lie apart"
    assert bias_N is None or bias_N.shape == (size_n,), f"{bias_N.shape=}, not {(size_n,)}"
    _check_tiles(tiles_GX, scheme, size_k)


def _check_rows(ids_T: Tensor, tiles_GX: Tensor, scheme: PackedScheme, out_TK: Tensor) -> None:
    assert out_TK.shape[0] == len(ids_T), f"{ids_T.shape=} {out_TK.shape=}"
    _check_tiles(tiles_GX, scheme, out_TK.shape[1])
    size_n = TILE_ROWS * len(tiles_GX)
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < size_n:
        raise IndexError(f"ids {int(ids_T.min())} to {int(ids_T.max())} of a table with {size_n} rows")


def _check_tiles(tiles_GX: Tensor, scheme: PackedScheme, size_k: int) -> None:
    assert size_k % scheme.unit_columns == 0, f"{size_k} columns in blocks of {scheme.unit_columns}"
    expected = scheme.planes[0].row_elements(size_k)
    assert tiles_GX.shape[1] == expected, f"{scheme.title}: {tiles_GX.shape=}, not {expected} bytes a group"
    assert tiles_GX.is_contiguous(), f"{tiles_GX.stride()=}"

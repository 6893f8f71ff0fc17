"""Placement of GGUF blocks as stored: into tiles in one pass with a check of their scales, or into planes.

R rows of a file, B bytes of a row, G groups of 16 rows
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.kernels.load.place_planes import wrong_scales
from holdfast.kernels.native_library import native_library
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme
from holdfast.quant.packed_tiles import TILE_ROWS, TILE_TYPES, stored_scheme
from holdfast.quant.stored_blocks import split
from holdfast.quant.tile_values import arrange_reference

SPLIT_TYPES = {**TILE_TYPES, "NVFP4": len(TILE_TYPES)}
"""Block types that the C function splits, by their number in native/packed_tiles.c."""


class StoredRows(NamedTuple):
    """Rows of blocks as a file stores them, and which of them are wanted."""

    bytes_RB: Tensor
    """uint8, rows adjacent in memory."""
    first_row: int
    """The first wanted row, in the order of the model."""
    num_rows: int
    first_byte: int
    """The first wanted byte of each row: that of a block."""
    num_blocks: int
    head_dim: int = 0
    """Size of interleaved heads, which the file stores with rows i and i + half of a head as rows 2i and 2i + 1. The first row
    here is then the first of a head. 0: rows have the order of the model."""

    def in_order(self, block_bytes: int) -> Tensor:
        """Return the wanted blocks as bytes [rows * blocks, bytes of a block]."""
        rows = torch.arange(self.first_row, self.first_row + self.num_rows)
        if self.head_dim:
            place, half = rows % self.head_dim, self.head_dim // 2
            rows = rows - place + place % half * 2 + place // half
        last = self.first_byte + self.num_blocks * block_bytes
        return self.bytes_RB[rows, self.first_byte : last].view(-1, block_bytes)

    def check(self, block_bytes: int) -> None:
        """Check that the rows hold what is wanted: C functions do not."""
        last_row, last_byte = self.first_row + self.num_rows, self.first_byte + self.num_blocks * block_bytes
        if self.head_dim:
            last_row = -(-last_row // self.head_dim) * self.head_dim
        assert last_row <= self.bytes_RB.shape[0], f"{self.bytes_RB.shape=} holds no row {last_row - 1}"
        assert last_byte <= self.bytes_RB.shape[1], f"{self.bytes_RB.shape=} holds no byte {last_byte - 1}"
        assert self.bytes_RB.is_contiguous(), f"{self.bytes_RB.stride()=}"
        assert self.head_dim % 2 == 0, f"{self.head_dim=}"


def place_tiles_reference(stored: StoredRows, block_bytes: int, tiles_GX: Tensor, scheme: PackedScheme) -> int:
    """Fill tiles from whole groups of rows; return the first row with a scale that is not finite, else UNSEEN.

    Rows count from the first wanted one.
    """
    blocks, base = stored.in_order(block_bytes), stored_scheme(scheme)
    planes = [plane.contiguous().view(stored.num_rows, -1) for plane in split(blocks, scheme.title)]
    arrange_reference(scheme, planes, tiles_GX)
    wrong = [wrong_scales(rows, plane) for rows, plane in zip(planes, base.planes, strict=True)]
    found = torch.stack([rows for rows in wrong if rows is not None]).any(dim=0).nonzero()
    return int(found[0]) if len(found) else UNSEEN


def place_tiles(stored: StoredRows, block_bytes: int, tiles_GX: Tensor, scheme: PackedScheme) -> int:
    """Like the reference, in C if there is a compiler."""
    stored.check(block_bytes)
    expected = len(tiles_GX) * TILE_ROWS, tiles_GX.shape[1] // scheme.planes[0].elements
    assert (stored.num_rows, stored.num_blocks) == expected, (
        f"{stored.num_rows=} {stored.num_blocks=} {tiles_GX.shape=}"
    )
    assert tiles_GX.is_contiguous(), f"{tiles_GX.stride()=}"
    library = native_library()
    if library is None:
        return place_tiles_reference(stored, block_bytes, tiles_GX, scheme)
    wrong = ctypes.c_int64(UNSEEN)
    library.holdfast_place_blocks(
        stored.bytes_RB.data_ptr() + stored.first_byte,
        tiles_GX.data_ptr(),
        TILE_TYPES[scheme.title],
        stored.first_row,
        stored.num_rows,
        stored.num_blocks,
        stored.bytes_RB.shape[1],
        stored.head_dim,
        ctypes.addressof(wrong),
    )
    return wrong.value


def split_rows_reference(stored: StoredRows, block_bytes: int, planes_RB: Sequence[Tensor], title: str) -> None:
    """Fill the bytes of each plane of a block type, [rows, bytes of a row]."""
    for plane, out_RB in zip(split(stored.in_order(block_bytes), title), planes_RB, strict=True):
        out_RB.copy_(plane.contiguous().view(torch.uint8).view(out_RB.shape))


def split_rows(stored: StoredRows, block_bytes: int, planes_RB: Sequence[Tensor], title: str) -> None:
    """Like the reference, in C if there is a compiler."""
    stored.check(block_bytes)
    library = native_library() if title in SPLIT_TYPES else None
    if library is None:
        split_rows_reference(stored, block_bytes, planes_RB, title)
        return
    scheme = BLOCK_SCHEMES[title]
    for plane, out_RB in zip(scheme.planes, planes_RB, strict=True):
        shape = stored.num_rows, plane.row_bytes(stored.num_blocks * scheme.unit_columns)
        assert tuple(out_RB.shape) == shape, f"{title} {plane.name}: {out_RB.shape=}, not {shape}"
        assert out_RB.is_contiguous(), f"{title} {plane.name}: {out_RB.stride()=}"
    addresses = (ctypes.c_void_p * len(planes_RB))(*(out.data_ptr() for out in planes_RB))
    library.holdfast_split_blocks(
        stored.bytes_RB.data_ptr() + stored.first_byte,
        ctypes.addressof(addresses),
        SPLIT_TYPES[title],
        stored.first_row,
        stored.num_rows,
        stored.num_blocks,
        stored.bytes_RB.shape[1],
        stored.head_dim,
    )

"""Planes of GGUF blocks to tiles and back, and the values of tiles, in plain torch.

G groups of 16 rows, B blocks in a row, U units of a field
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.quant.packed_blocks import BLOCK_FILLS
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme
from holdfast.quant.packed_tiles import TILE_ROWS, TileField, tile_fields


def spread_bits(words: Tensor) -> Tensor:
    """Move bit 4g + i of each word (4 bytes, last dimension) to bit g of byte i."""
    bits = words.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    moved = bits.view(*words.shape[:-1], 8, 4).transpose(-1, -2)
    return (moved << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def gather_bits(words: Tensor) -> Tensor:
    """Inverse of `spread_bits`."""
    bits = words.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    moved = bits.transpose(-1, -2).reshape(*words.shape[:-1], 4, 8)
    return (moved << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def field_of(blocks: Tensor, field: TileField) -> Tensor:
    """View a field of tile blocks [G, B, bytes] as units: [G, B, U, 16, bytes of a unit]."""
    end = field.offset + TILE_ROWS * field.num_bytes
    return blocks[..., field.offset : end].unflatten(-1, (-1, TILE_ROWS, field.unit_bytes))


def planes_of_tiles(scheme: PackedScheme, tiles_GX: Tensor) -> list[Tensor]:
    """Return the planes of the block type: [16 * G, elements of a row] each."""
    base, planes = BLOCK_SCHEMES[scheme.title], []
    blocks = tiles_GX.unflatten(1, (-1, scheme.planes[0].elements))
    for plane, field in zip(base.planes, tile_fields(scheme.title), strict=True):
        rows = field_of(blocks, field).permute(0, 3, 1, 2, 4)
        rows = gather_bits(rows) if field.spreads_bits else rows
        planes.append(rows.reshape(TILE_ROWS * len(blocks), -1).view(getattr(torch, plane.dtype)))
    return planes


def fill_tiles(scheme: PackedScheme, tiles_GX: Tensor, out_RK: Tensor) -> None:
    """Fill `out_RK` (float32, contiguous) with the values of whole groups of rows."""
    size = scheme.unit_columns
    base = BLOCK_SCHEMES[scheme.title]
    planes = planes_of_tiles(scheme, tiles_GX)
    blocks = [rows.reshape(-1, plane.row_elements(size)) for plane, rows in zip(base.planes, planes, strict=True)]
    BLOCK_FILLS[scheme.title](blocks, out_RK.view(-1, size))


def arrange_reference(scheme: PackedScheme, planes: Sequence[Tensor], tiles_GX: Tensor) -> Tensor:
    """Fill `tiles_GX` from planes of whole groups of rows, and return it."""
    blocks = tiles_GX.unflatten(1, (-1, scheme.planes[0].elements))
    for rows, field in zip(planes, tile_fields(scheme.title), strict=True):
        units = rows.view(torch.uint8).view(len(blocks), TILE_ROWS, blocks.shape[1], -1, field.unit_bytes)
        units = spread_bits(units) if field.spreads_bits else units
        field_of(blocks, field).copy_(units.permute(0, 2, 3, 1, 4))
    return tiles_GX

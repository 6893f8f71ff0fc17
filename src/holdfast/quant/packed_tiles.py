"""Tiles: GGUF blocks of 16 rows, interleaved for the dot products of a CPU; schemes and places of bytes; no torch.

Rows come in groups of 16. A group holds its blocks in order; a block holds its planes in the order of the base scheme, each
interleaved over the rows in units of 1, 2 or 4 bytes: unit 0 of rows 0 to 15, unit 1 of rows 0 to 15, and so on. So a vector
holds the same four columns of as many rows as it has lanes, and no product adds lanes. The bytes are those of the planes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedPlane, PackedScheme

TILE_ROWS = 16
SUFFIX = "_tiles"
TILE_TYPES: Mapping[str, int] = {
    name: number
    for number, name in enumerate(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
    )
}
"""Block types that tiles hold, by their number in native/packed_types.h."""
PART_COLUMNS = 32
"""Columns of x that share a scale, in products with 8-bit activations."""
PART_BYTES = 44
"""Bytes of so many quantized columns: codes, a scale and two sums."""
BYTE_UNITS = ("scales", "mins", "sub")
"""Planes of bytes that are read 16 rows at a time."""


class TileField(NamedTuple):
    """Place of a plane in a block of a tile."""

    offset: int
    """Bytes before it."""
    num_bytes: int
    """Bytes of one row's block in the plane."""
    unit_bytes: int
    spreads_bits: bool = False
    """A word of bits, one a column: bit 4g + i moves to bit g of byte i."""


def tile_scheme(scheme: PackedScheme) -> PackedScheme | None:
    """Return the scheme of the tiles of a block type; None if there are none."""
    if BLOCK_SCHEMES.get(scheme.title) != scheme or scheme.title not in TILE_TYPES:
        return None
    tiles = PackedPlane("tiles", "uint8", TILE_ROWS * scheme.row_bytes(scheme.unit_columns), scheme.unit_columns)
    return replace(scheme, family=scheme.family + SUFFIX, planes=(tiles,), row_group=TILE_ROWS)


def stored_scheme(scheme: PackedScheme) -> PackedScheme:
    """Return the scheme of the rows before they were arranged."""
    return scheme if scheme.row_group == 1 else BLOCK_SCHEMES[scheme.title]


TILE_SCHEMES: Mapping[str, PackedScheme] = {
    name: tiles for name, base in BLOCK_SCHEMES.items() if (tiles := tile_scheme(base)) is not None
}
"""By the name of the block type."""


@cache
def tile_fields(title: str) -> tuple[TileField, ...]:
    """Return the fields of a block of a tile, one for each plane of the block type."""
    base, fields, offset = BLOCK_SCHEMES[title], [], 0
    for plane in base.planes:
        num_bytes = plane.row_bytes(base.unit_columns)
        unit = 2 if plane.dtype == "float16" else 1 if plane.name in BYTE_UNITS else 4
        fields.append(TileField(offset, num_bytes, unit, spreads_bits=plane.name == "fifth" and num_bytes == 4))
        offset += TILE_ROWS * num_bytes
    return tuple(fields)


def input_bytes(num_rows: int, num_columns: int) -> int:
    """Return the scratch bytes of quantized activations."""
    return num_rows * (num_columns // PART_COLUMNS) * PART_BYTES

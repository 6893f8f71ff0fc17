"""Packed schemes as values: how a checkpoint's blocks of few bits lie in memory as planes, and their bytes; no torch.

A matrix of N rows and K columns keeps the bytes of its file, split into planes. A plane has a fixed number of elements
per row, so every row of every plane begins at an aligned multiple. Leading dimensions of stacked experts multiply rows.

family      codes                              other planes                                value
q4_0        4 bits, halves of 16               scales f16 by 32                            d * (q - 8)
q4_1        4 bits, halves of 16               scales f16, mins f16 by 32                  d * q + m
q5_0        4 bits, halves of 16; fifth bits   scales f16 by 32                            d * (q - 16)
q5_1        4 bits, halves of 16; fifth bits   scales f16, mins f16 by 32                  d * q + m
q8_0        8 bits, signed                     scales f16 by 32                            d * q
q2_k        2 bits, quarters of 32             sub u8 by 16 (scale low, min high half);    d * s * q - dmin * m
                                               d f16, dmin f16 by 256
q3_k        2 bits, quarters of 32; third      sub u8 [12] by 256 (6 bits); d f16 by 256   d * (s - 32) * (q - 4)
q4_k        4 bits, halves of 32               scales u8, mins u8 by 32; d, dmin by 256    d * s * q - dmin * m
q5_k        4 bits, halves of 32; fifth bits   scales u8, mins u8 by 32; d, dmin by 256    d * s * q - dmin * m
q6_k        4 bits, halves of 64; high 2 bits  scales i8 by 16; d f16 by 256               d * s * (q - 32)
iq4_nl      4 bits, halves of 16, by a table   scales f16 by 32                            d * T[q]
iq4_xs      4 bits, halves of 16, by a table   scales i8 by 32; d f16 by 256               d * s * T[q]
block_mxfp4 4 bits, halves of 16, e2m1         scales e8m0 by 32                           E[q] * 2^(s - 127)
block_nvfp4 4 bits, halves of 8, e2m1          scales ue4m3 by 16; second f32 by row       E[q] * s * second
iq2_*, iq3_* blocks as stored                                                              quant/packed_grids.py
int         4 or 8 bits, neighbours in a byte  scales by group; zeros u8 or i8 by group    (q - z) * s
int8        8 bits, signed                     scales f32 by row                           q * s
fp8         e4m3                               scales by group                             q * s
nvfp4       4 bits, e2m1                       scales e4m3 by 16; second f32 by row        E[q] * (s * second)
mxfp4       4 bits, e2m1                       scales e8m0 by 32                           E[q] * 2^(s - 127)
plain       one number a column                                                            itself

Halves of H: byte b of a run of H bytes holds element b in its low and element b + H in its high half; neighbours in a
byte are halves of 1. Quarters of 32: bits 2j, 2j + 1 of byte b of 32 belong to element 32j + b of 128.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, NamedTuple

from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import WeightPlane

Second = Literal["none", "scales_times", "scales_over", "values_times"]
"""What a row's second scale does: multiply or divide the scales of groups, or multiply the values last."""
GROUPS = "groups"
"""Name of the plane with the group of each column."""
SCALE_PLANES = ("scales", "mins", "d", "dmin", "second")
"""Names of planes that must be finite if their elements are floats."""
LARGEST_SCALE = 2.0**116
"""Largest magnitude of a scale: its product with any code, or with any e4m3 scale and e2m1 code, stays in float32's range."""


class PackedPlane(NamedTuple):
    """One plane of a packed matrix."""

    name: str
    dtype: str
    elements: int
    """Elements for every `columns` columns of a row."""
    columns: int
    """0: `elements` are those of a whole row."""
    is_shared: bool = False
    """One row for all rows of a matrix."""
    most_byte: int = 255
    """The largest byte of exponents whose values are finite; NaN and greater scales have larger ones."""
    has_scale_first: bool = False
    """Each block of the plane begins with a float16 scale."""

    def row_elements(self, num_columns: int) -> int:
        """Return the elements of a row."""
        return self.elements * (-(-num_columns // self.columns) if self.columns else 1)

    def row_bytes(self, num_columns: int) -> int:
        return self.row_elements(num_columns) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """How a matrix is packed. Equal schemes have equal planes and equal arithmetic."""

    family: str
    """Key of its functions (quant/packed_values.py)."""
    title: str
    """Its name in the checkpoint, for people: Q4_K, or AWQ of 4 bits in groups of 128."""
    bits: int
    planes: tuple[PackedPlane, ...]
    group_columns: int
    """Columns that share the finest scale; 0: the whole row."""
    unit_columns: int = 1
    """A cut between ranks falls on a multiple of this."""
    half_bytes: int = 1
    """Bytes of a run whose low halves come before its high halves."""
    middle: int = 0
    """The code that stands for 0 if there are no zero points."""
    second: Second = "none"
    order_groups: int = 0
    """Groups of the whole matrix if a plane names each column's group (act-order); 0: groups are runs of columns."""
    row_group: int = 1
    """Rows that lie interleaved; planes count elements of as many rows. Only arrangements for a device have more than 1."""

    def plane(self, name: str) -> PackedPlane:
        return next(plane for plane in self.planes if plane.name == name)

    def has(self, name: str) -> bool:
        return any(plane.name == name for plane in self.planes)

    def shaped(self, shape: tuple[int, ...]) -> tuple[WeightPlane, ...]:
        """Return the planes of a matrix, or of stacked matrices; suffixes are names after a dot."""
        *leading, num_rows, num_columns = shape
        assert num_rows % self.row_group == 0, f"{self.title}: {num_rows} rows in groups of {self.row_group}"
        return tuple(
            WeightPlane(
                f".{plane.name}",
                (*leading, 1 if plane.is_shared else num_rows // self.row_group, plane.row_elements(num_columns)),
                plane.dtype,
            )
            for plane in self.planes
        )

    def row_bytes(self, num_columns: int) -> int:
        """Return the bytes of a row in all planes, without what rows share; of `row_group` rows if they interleave."""
        return sum(plane.row_bytes(num_columns) for plane in self.planes if not plane.is_shared)

    def unsupported(self, num_columns: int) -> str | None:
        """Return why a rank's share of so many columns cuts a group; None if it does not."""
        if num_columns % self.unit_columns:
            return f"{num_columns} columns are not made of whole groups of {self.unit_columns}"
        return None

    def ordered(self, num_groups: int, index_dtype: str) -> "PackedScheme":
        """Return the scheme with a group by column (act-order): every row keeps the scales of all groups."""
        planes = tuple(
            plane._replace(elements=num_groups, columns=0) if plane.name in ("scales", "zeros") else plane
            for plane in self.planes
        )
        groups = PackedPlane(GROUPS, index_dtype, 1, 1, is_shared=True)
        return replace(self, planes=(*planes, groups), order_groups=num_groups, unit_columns=8 // min(8, self.bits))


def _codes(bits: int, name: str = "codes", dtype: str = "uint8") -> PackedPlane:
    return PackedPlane(name, dtype, 1, 8 // bits)


def _scales(columns: int, name: str = "scales", dtype: str = "float16") -> PackedPlane:
    return PackedPlane(name, dtype, 1, columns)


CODES_4, CODES_2 = _codes(4), _codes(2)
FIFTH, THIRD, HIGH = _codes(1, "fifth"), _codes(1, "third"), _codes(2, "high")
SCALES_32, MINS_32 = _scales(32), _scales(32, "mins")
D, DMIN = _scales(256, "d"), _scales(256, "dmin")
BYTE_SCALES_32, BYTE_MINS_32 = _scales(32, dtype="uint8"), _scales(32, "mins", "uint8")


def _block(title: str, bits: int, group: int, unit: int, half: int, *planes: PackedPlane) -> PackedScheme:
    return PackedScheme(title.lower(), title, bits, planes, group, unit, half)


Q4_0 = _block("Q4_0", 4, 32, 32, 16, CODES_4, SCALES_32)
Q4_1 = _block("Q4_1", 4, 32, 32, 16, CODES_4, SCALES_32, MINS_32)
Q5_0 = _block("Q5_0", 5, 32, 32, 16, CODES_4, FIFTH, SCALES_32)
Q5_1 = _block("Q5_1", 5, 32, 32, 16, CODES_4, FIFTH, SCALES_32, MINS_32)
Q8_0 = _block("Q8_0", 8, 32, 32, 1, _codes(8, dtype="int8"), SCALES_32)
Q2_K = _block("Q2_K", 2, 16, 256, 1, CODES_2, _scales(16, "sub", "uint8"), D, DMIN)
Q3_K = _block("Q3_K", 3, 16, 256, 1, CODES_2, THIRD, PackedPlane("sub", "uint8", 12, 256), D)
Q4_K = _block("Q4_K", 4, 32, 256, 32, CODES_4, BYTE_SCALES_32, BYTE_MINS_32, D, DMIN)
Q5_K = _block("Q5_K", 5, 32, 256, 32, CODES_4, FIFTH, BYTE_SCALES_32, BYTE_MINS_32, D, DMIN)
Q6_K = _block("Q6_K", 6, 16, 256, 64, CODES_4, HIGH, _scales(16, dtype="int8"), D)
IQ4_NL = _block("IQ4_NL", 4, 32, 32, 16, CODES_4, SCALES_32)
IQ4_XS = _block("IQ4_XS", 4, 32, 256, 16, CODES_4, _scales(32, dtype="int8"), D)
MOST_EXPONENT = 252
"""The largest byte of e8m0 that leaves 6, the largest number of e2m1, in float32's range."""
EXPONENTS = _scales(32, dtype="uint8")._replace(most_byte=MOST_EXPONENT)
BLOCK_MXFP4 = replace(_block("MXFP4", 4, 32, 32, 16, CODES_4, EXPONENTS), family="block_mxfp4")
BLOCK_NVFP4 = replace(_block("NVFP4", 4, 16, 64, 8, CODES_4, _scales(16, dtype="uint8")), family="block_nvfp4")
SECOND = PackedPlane("second", "float32", 1, 0)
GRID_BYTES: Mapping[str, int] = {"IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110}
"""Bytes of a block of 256 columns that stays as stored."""
GRIDS = tuple(
    _block(name, int(name[2]), 256, 256, 1, PackedPlane("blocks", "uint8", size, 256, has_scale_first=True))
    for name, size in GRID_BYTES.items()
)
BLOCK_SCHEMES: Mapping[str, PackedScheme] = {
    scheme.title: scheme
    for scheme in (
        *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BLOCK_MXFP4, BLOCK_NVFP4),
        *GRIDS,
    )
}
"""Schemes of GGUF blocks, by the name of their type."""


def with_second(scheme: PackedScheme, second: Second) -> PackedScheme:
    """Return the scheme with a second scale for each row."""
    return replace(scheme, planes=(*scheme.planes, SECOND), second=second)


def integer_scheme(
    title: str, bits: int, group_columns: int, scale_dtype: str, zero_dtype: str = "", is_signed: bool = False
) -> PackedScheme:
    """Return codes of 4 or 8 bits with a scale, and with `zero_dtype` a zero point, by group; 0: by row."""
    codes = _codes(bits, dtype="int8" if is_signed else "uint8")
    planes = [codes, PackedPlane("scales", scale_dtype, 1, group_columns)]
    if zero_dtype:
        planes.append(PackedPlane("zeros", zero_dtype, 1, group_columns))
    middle = 0 if zero_dtype or is_signed else 2 ** (bits - 1)
    unit = lcm(group_columns or 1, 8 // bits)
    if is_signed and not (group_columns or zero_dtype):
        # The planes of quantization=int8, so its kernels take them. The scales are exact in float32.
        scales = PackedPlane("scales", "float32", 1, 0)
        return PackedScheme("int8", title, bits, (codes, scales), 0)
    return PackedScheme("int", title, bits, tuple(planes), group_columns, unit, middle=middle)


def fp8_scheme(title: str, group_columns: int, scale_dtype: str) -> PackedScheme:
    """Return e4m3 numbers with a scale by group of columns; 0: by row."""
    planes = PackedPlane("codes", "float8_e4m3fn", 1, 1), PackedPlane("scales", scale_dtype, 1, group_columns)
    return PackedScheme("fp8", title, 8, planes, group_columns, group_columns or 1)


def nvfp4_scheme(title: str, divides: bool) -> PackedScheme:
    """Return e2m1 codes with e4m3 scales by 16, and a second scale that divides or multiplies them."""
    planes = CODES_4, _scales(16, dtype="float8_e4m3fn")
    return with_second(PackedScheme("nvfp4", title, 4, planes, 16, 16), "scales_over" if divides else "scales_times")


def mxfp4_scheme(title: str) -> PackedScheme:
    """Return e2m1 codes with exponents as scales by 32."""
    return PackedScheme("mxfp4", title, 4, (CODES_4, EXPONENTS), 32, 32)


def plain_scheme(dtype: str) -> PackedScheme:
    """Return numbers of a type: a part that is stored plain beside packed ones."""
    return PackedScheme("plain", dtype, 8 * DTYPE_BYTES[dtype], (PackedPlane("values", dtype, 1, 1),), 1)


class PackedRows(NamedTuple):
    """Some rows of a fused weight, packed alike: of each matrix the rows from `row_start` on."""

    row_start: int
    num_rows: int
    scheme: PackedScheme

    @property
    def row_end(self) -> int:
        return self.row_start + self.num_rows


def join_rows(rows: Iterable[tuple[int, PackedScheme]]) -> tuple[PackedRows, ...]:
    """Join neighbouring parts (q, k, v; gate, up) of one scheme. Parts with orders of their own stay apart."""
    joined: list[PackedRows] = []
    row = 0
    for num_rows, scheme in rows:
        last = joined[-1] if joined else None
        if last is not None and last.scheme == scheme and not scheme.order_groups:
            joined[-1] = last._replace(num_rows=last.num_rows + num_rows)
        else:
            joined.append(PackedRows(row, num_rows, scheme))
        row += num_rows
    return tuple(joined)

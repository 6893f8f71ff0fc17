"""Which packed schemes a device multiplies by kernels, how planes are arranged for them, and pieces without; no torch.

A kernel that lands adds its families here. A start without `packed_weights` keeps what has a kernel and expands the rest.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec, aligned
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_tiles import TILE_ROWS, TILE_SCHEMES, input_bytes, tile_scheme

DEQUANTIZED_FAMILIES = frozenset(
    {
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
        *("block_mxfp4", "block_nvfp4", "int", "int8", "fp8", "nvfp4", "mxfp4"),
    }
)
"""Families whose rows a kernel dequantizes on a GPU (kernels/gemm/packed_dequantize.py)."""

PACKED_KERNELS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"int8", *(scheme.family for scheme in TILE_SCHEMES.values())}),
    "cuda": DEQUANTIZED_FAMILIES,
}
"""Families of schemes with a kernel, by kind of device. Alone in a weight int8 and mxfp4 have those of `quantization`."""

MMA_ROWS = 128
"""Rows of a weight in a program of kernels/gemm/packed_mma.py."""
MOST_SPLIT_ROWS = 64
"""Most rows of a product whose parts along K run in programs of their own."""
SPLIT_PLACES = 396
"""Programs that run at once on an H200: three on each multiprocessor."""
MOST_SPLITS, LEAST_SPLIT_COLUMNS = 9, 1024
STEP_COLUMNS = 256
"""Columns of a step of a program."""
PARTIAL_BYTES = 16 * 2**20
"""Most bytes of partial sums that programs of a product exchange."""
ARRIVED_BYTES = 16384
"""Counters of split products, at the beginning of the lane; zero between products."""
CODED_FAMILIES = frozenset(
    {
        *("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "iq4_nl", "iq4_xs"),
        *("block_mxfp4", "nvfp4"),
    }
)
"""Families whose codes kernels/gemm/packed_mma.py multiplies as they are; so it does with "int" of 4 bits."""


def code_key(scheme: PackedScheme) -> str | None:
    """Return the name of a scheme's codes in kernels/gemm/packed_codes.py; None if tiles do not take them."""
    if scheme.order_groups or scheme.row_group > 1:
        return None
    if scheme.family == "int":
        is_regular = scheme.bits == 4 and scheme.group_columns % 32 == 0 and scheme.middle in (0, 8)
        has_zeros = scheme.has("zeros")
        is_regular &= not has_zeros or scheme.plane("zeros").dtype == "uint8"
        return None if not is_regular else "int4_zeros" if has_zeros else "int4"
    return scheme.family if scheme.family in CODED_FAMILIES else None


def has_tiles(scheme: PackedScheme, num_columns: int) -> bool:
    """Return True if tiles multiply codes of a scheme in rows of this width."""
    key = code_key(scheme)
    if key is None:
        return False
    return num_columns % (256 if scheme.unit_columns == 256 else 64 if key == "nvfp4" else 32) == 0


def packed_splits(num_rows: int, num_columns: int) -> int:
    """Return the parts along K of a product: those with the least time, counted in steps of all programs at once.

    The shape of the weight decides. A part begins with a step in which its programs only load.
    """
    num_blocks, num_steps = -(-num_rows // MMA_ROWS), -(-num_columns // STEP_COLUMNS)
    most = max(1, min(MOST_SPLITS, num_columns // LEAST_SPLIT_COLUMNS))
    return min(
        range(1, most + 1),
        key=lambda splits: -(-num_blocks * splits // SPLIT_PLACES) * (-(-num_steps // splits) + 1),
    )


def arranged(scheme: PackedScheme, num_rows: int, device_kind: str) -> PackedScheme:
    """Return the scheme in which a device holds so many rows of a part: tiles on a CPU, if they fill whole groups."""
    tiles = tile_scheme(scheme) if device_kind == "cpu" and num_rows % TILE_ROWS == 0 else None
    return scheme if tiles is None else tiles


def has_kernel(scheme: PackedScheme, device_kind: str) -> bool:
    """Return True if a kernel of the device takes the planes; else the reference dequantizes pieces of rows."""
    return scheme.family in PACKED_KERNELS[device_kind] and not (device_kind == "cuda" and scheme.order_groups)


PIECE_ELEMENTS: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**23}
"""Most elements of a piece of rows that the reference dequantizes, unless one row has more. It holds them in float32, and
in half precision too if that is the type of activations: at most 48 MiB."""
KERNEL_PIECE_ELEMENTS = 2**24
"""Most elements of a piece that a kernel dequantizes, in the type of activations alone: at most 64 MiB."""
PIECE_GROUP = 128
"""Rows of a GPU's piece come in groups of so many: cuBLAS needs columns of the result that begin at 16 bytes, and whole tiles
fill the GPU. Pieces of 3,276 rows took 3.3 times as long."""
INPUT_ROWS = 512
"""Most rows whose activations a product with tiles quantizes at once."""
LANE = "packed"
"""Lane of the workspace for such a piece."""


class PieceShape(NamedTuple):
    """A packed part of which rows are dequantized."""

    num_rows: int
    """Rows of one matrix."""
    num_columns: int
    row_group: int = 1
    """Rows that lie interleaved."""
    has_kernel: bool = False
    """A kernel of the device dequantizes them."""


def piece_rows(
    num_rows: int, num_columns: int, device_kind: str, row_group: int = 1, *, by_kernel: bool = False
) -> int:
    """Return the rows of a piece: whole groups of rows that lie interleaved, and on a GPU of PIECE_GROUP if they fit."""
    most = (KERNEL_PIECE_ELEMENTS if by_kernel else PIECE_ELEMENTS[device_kind]) // num_columns
    group = PIECE_GROUP if device_kind != "cpu" and most >= PIECE_GROUP else row_group
    return min(num_rows, max(1, most // group) * group)


def piece_specs(shapes: Iterable[PieceShape], dtype: str, device_kind: str) -> tuple[TensorSpec, ...]:
    """Return the scratch of packed products.

    On a CPU the largest piece of these parts: values, and values rounded to half precision. On a GPU counters of split
    products, and memory that a piece or partial sums take in turn.
    """
    shapes = tuple(shapes)
    if not shapes:
        return ()
    if device_kind != "cpu":
        counters = TensorSpec("arrived", (ARRIVED_BYTES // 4,), "int32")
        room = max(piece_bytes(shape, dtype, device_kind) for shape in shapes)
        return counters, TensorSpec("pieces", (room,), "uint8")
    values = TensorSpec("values", (max(map(_cpu_elements, shapes)),), "float32")
    return (values,) if dtype == "float32" else (values, TensorSpec("rounded", values.shape, dtype))


def _cpu_elements(shape: PieceShape) -> int:
    """Return the float32 elements of a piece on a CPU. Tiles need no piece, but 8-bit activations of some rows."""
    elements = piece_rows(shape.num_rows, shape.num_columns, "cpu", shape.row_group) * shape.num_columns
    if shape.row_group == 1:
        return elements
    return min(elements, -(-input_bytes(INPUT_ROWS, shape.num_columns) // DTYPE_BYTES["float32"]))


def piece_bytes(shape: PieceShape, dtype: str, device_kind: str) -> int:
    """Return the bytes of a GPU's scratch after the counters: those of a piece, or of the partial sums of a split product."""
    rows = piece_rows(shape.num_rows, shape.num_columns, device_kind, by_kernel=shape.has_kernel)
    elements = rows * shape.num_columns
    rounded = DTYPE_BYTES[dtype] * elements
    splits = packed_splits(shape.num_rows, shape.num_columns)
    width = -(-shape.num_rows // MMA_ROWS) * MMA_ROWS
    partials = min(PARTIAL_BYTES, 4 * splits * MOST_SPLIT_ROWS * width) if splits > 1 else 0
    if shape.has_kernel:
        return max(rounded, partials)
    return aligned(4 * elements) + (0 if dtype == "float32" else rounded)

"""Random weights in tiles, and the C kernels compiled for other instructions of this machine."""

import ctypes
import platform
from functools import cache

import torch

from holdfast.kernels import native_library
from holdfast.kernels.native_library import FLAGS, SIGNATURES, SOURCES
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedPlane, PackedScheme
from holdfast.quant.packed_tiles import TILE_ROWS, TILE_SCHEMES
from holdfast.quant.tile_values import arrange_reference
from kernels.exactness import MOAT, random
from kernels.kept_builds import kept_build

BYTE_RANGES = {
    ("MXFP4", "scales"): (110, 140),
    ("Q4_K", "scales"): (0, 64),
    ("Q4_K", "mins"): (0, 64),
    ("Q5_K", "scales"): (0, 64),
    ("Q5_K", "mins"): (0, 64),
    ("IQ4_XS", "scales"): (-32, 32),
}
"""Values that a file can hold, of planes that do not use a whole byte."""
VARIANTS = {
    "x86_64": {"AVX-512 without VNNI": "-mno-avx512vnni", "AVX2": "-mno-avx512f", "plain": "-DHOLDFAST_PLAIN"},
    "aarch64": {"plain": "-DHOLDFAST_PLAIN"},
}
"""Flags beside those of this machine, by name."""


def random_plane(plane: PackedPlane, title: str, num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    """Every code that a plane can hold, and scales of both signs."""
    shape = num_rows, plane.row_elements(num_columns)
    if plane.dtype == "float16":
        return random(*shape, seed=seed, scale=0.02).half()
    low, high = BYTE_RANGES.get((title, plane.name), (-128, 128) if plane.dtype == "int8" else (0, 256))
    values = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return values.to(getattr(torch, plane.dtype))


def random_planes(title: str, num_rows: int, num_columns: int, seed: int = 0) -> list[torch.Tensor]:
    """Planes of a block type, in the order of its scheme."""
    planes = BLOCK_SCHEMES[title].planes
    return [random_plane(plane, title, num_rows, num_columns, seed + 7 * i) for i, plane in enumerate(planes)]


def tiles_of(title: str, planes: list[torch.Tensor], num_columns: int) -> torch.Tensor:
    """Tiles amid bytes of 0xFF: scales read outside of them are NaN."""
    scheme = TILE_SCHEMES[title]
    shape = len(planes[0]) // TILE_ROWS, scheme.planes[0].row_elements(num_columns)
    buffer = torch.full((shape[0] * shape[1] + 2 * MOAT,), 0xFF, dtype=torch.uint8)
    return arrange_reference(scheme, planes, buffer[MOAT:-MOAT].view(shape))


def random_tiles(title: str, num_rows: int, num_columns: int, seed: int = 0) -> tuple[PackedScheme, torch.Tensor]:
    """A random weight and its scheme."""
    return TILE_SCHEMES[title], tiles_of(title, random_planes(title, num_rows, num_columns, seed), num_columns)


@cache
def compiled_with(flag: str) -> ctypes.CDLL:
    """The kernels for tiles, compiled for fewer instructions; without optimization of what only these tests run."""
    compiler, openmp = native_library.find_native_build().compiler, native_library._openmp_library()
    command = [compiler, *(one for one in FLAGS if one != "-O3"), "-O1", flag, "-shared"]
    libraries = [*([str(openmp)] if openmp else []), "-lm"]
    library = ctypes.CDLL(str(kept_build(command, sorted(SOURCES.glob("packed_*.c")), libraries)))
    for name in (
        "holdfast_packed_linear",
        "holdfast_packed_linear_full",
        "holdfast_packed_rows",
        "holdfast_place_blocks",
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = SIGNATURES[name], None
    return library


def variants() -> dict[str, str]:
    """Flags of the variants that this machine runs: without an instruction, a flag that forbids it changes nothing."""
    return VARIANTS.get(platform.machine(), {"plain": "-DHOLDFAST_PLAIN"})

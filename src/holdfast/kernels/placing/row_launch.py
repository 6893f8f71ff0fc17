"""RowLaunch: a kernel over rows with all that is alike from call to call, started over tensors or, for less, over addresses.

A launch over tensors finds out anew which program it needs. A load starts thousands over the same kind of rows: over
addresses it asks once and then starts that program, as long as all addresses are aligned as they were.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from holdfast.kernels.triton_compat import triton

UNSPECIALIZED = ("first_row", "num_rows", "p_scales", "p_peak", "p_nonfinite", "p_differing")
"""Arguments that differ from call to call and tell the compiler nothing that matters: what they point to is small."""
ALIGNMENT_BYTES = 16
"""What the compiler makes use of, where an address is a multiple of it."""


class Tile(NamedTuple):
    """What a program holds at a time."""

    rows: int
    columns: int
    num_warps: int


class Pointer:
    """A place in a GPU's memory; kernels take it like a tensor that begins there."""

    __slots__ = ("address", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.address = 0
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def jit_for_rows(function: Callable[..., Any]) -> Any:  # noqa: ANN401 a kernel is launched by subscript, which no type describes
    """triton.jit that does not compile anew for other numbers of rows, or other findings."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in UNSPECIALIZED if name in names])(function)


class RowLaunch:
    """Arguments of the kernel: leading ones, the number of rows, counts, and constants of the program."""

    __slots__ = ("_column_tiles", "_kernel", "_num_warps", "_program", "_rest", "_tile_rows")

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401 as above
        tile: Tile,
        column_tiles: int,
        counts: tuple[int, ...],
        constants: tuple[object, ...],
    ) -> None:
        self._kernel = kernel
        self._tile_rows = tile.rows
        self._num_warps = tile.num_warps
        self._column_tiles = column_tiles
        self._rest = (*counts, *constants)
        self._program: Any = None
        """The one that was compiled for aligned addresses."""

    def start(self, num_rows: int, *leading: object) -> Any:  # noqa: ANN401 Triton's program, or None in the interpreter
        """One launch, or none over no rows."""
        num_programs = -(-num_rows // self._tile_rows) * self._column_tiles
        if num_programs == 0:
            return None
        return self._kernel[(num_programs,)](*leading, num_rows, *self._rest, num_warps=self._num_warps)

    def start_at(self, num_rows: int, addresses: int, *leading: object) -> None:
        """The same where leading arguments are `Pointer`s. `addresses` are those of all that matter, their bits joined."""
        if addresses % ALIGNMENT_BYTES:
            self.start(num_rows, *leading)
        elif self._program is None:
            self._program = self.start(num_rows, *leading)
        else:
            num_programs = -(-num_rows // self._tile_rows) * self._column_tiles
            if num_programs:
                self._program[(num_programs, 1, 1)](*leading, num_rows, *self._rest)

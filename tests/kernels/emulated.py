"""The C kernels of another processor in its emulator: products of tiles, with the signatures of the library."""

import ctypes
import shutil
import struct
import subprocess
from functools import cache

import pytest

from holdfast.kernels.native_library import FLAGS, SOURCES
from holdfast.quant.packed_schemes import BLOCK_SCHEMES
from holdfast.quant.packed_tiles import TILE_ROWS, TILE_SCHEMES, TILE_TYPES, input_bytes
from kernels.kept_builds import kept_build

COMPILER, EMULATORS = "aarch64-linux-gnu-gcc", ("qemu-aarch64-static", "qemu-aarch64")
PROCESSORS = {"ARM with dotprod": "-march=armv8.2-a+dotprod+fp16", "ARM with i8mm": "-march=armv8.6-a+fp16"}
HARNESS = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include "kernels.h"

static void *take(long size) {
    char *bytes = malloc(size + 1);
    if (size && fread(bytes, 1, size, stdin) != (size_t)size) exit(2);
    return bytes;
}

int main(void) {
    int64_t *f = take(11 * 8);  // full, type, m, n, k, ldy, bytes of x, tiles, bias, y, scratch
    float *x = take(f[6]);
    uint8_t *tiles = take(f[7]);
    float *bias = take(f[8]), *y = take(f[9]);
    uint8_t *scratch = malloc(f[10] + 1);
    if (!f[8]) bias = 0;
    if (f[0]) holdfast_packed_linear_full(x, tiles, bias, y, f[1], f[2], f[3], f[4], f[5]);
    else holdfast_packed_linear(x, tiles, bias, y, scratch, f[1], f[2], f[3], f[4], f[5]);
    fwrite(y, 1, f[9], stdout);
    return 0;
}
"""


class EmulatedLibrary:
    """Runs each product in a process of the emulator."""

    def __init__(self, flag: str) -> None:
        compiler, emulator = shutil.which(COMPILER), next(filter(None, map(shutil.which, EMULATORS)), None)
        if compiler is None or emulator is None:
            pytest.skip(f"{COMPILER} and {EMULATORS[0]} are not installed")
        flags = [one for one in FLAGS if one not in ("-O3", "-march=native", "-fPIC")]
        command = [compiler, *flags, "-O1", flag, "-static", f"-I{SOURCES}"]
        program = str(kept_build(command, sorted(SOURCES.glob("packed_*.c")), ["-lm"], HARNESS))
        self._command = [emulator, "-cpu", "max", program]

    def holdfast_packed_linear(self, x, tiles, bias, y, scratch, *sizes) -> None:
        self._run(0, (x, tiles, bias, y), *sizes)

    def holdfast_packed_linear_full(self, x, tiles, bias, y, *sizes) -> None:
        self._run(1, (x, tiles, bias, y), *sizes)

    def _run(self, is_full: int, places: tuple[int, ...], kind: int, m: int, n: int, k: int, ldy: int) -> None:
        title = next(title for title, number in TILE_TYPES.items() if number == kind)
        assert k % BLOCK_SCHEMES[title].unit_columns == 0, f"{k} columns of {title}"
        tile_bytes = n // TILE_ROWS * TILE_SCHEMES[title].planes[0].row_elements(k)
        spans = 4 * m * k, tile_bytes, 4 * n if places[2] else 0, 4 * ((m - 1) * ldy + n) if m else 0
        head = struct.pack("11q", is_full, kind, m, n, k, ldy, *spans, input_bytes(m, k))
        blobs = [ctypes.string_at(place, size) if size else b"" for place, size in zip(places, spans, strict=True)]
        done = subprocess.run(self._command, input=head + b"".join(blobs), check=True, capture_output=True)
        assert len(done.stdout) == spans[3], f"{len(done.stdout)} bytes of a result"
        ctypes.memmove(places[3], done.stdout, spans[3])


@cache
def emulated(flag: str) -> EmulatedLibrary:
    """Return the kernels compiled with a flag for another processor; without its tools the test is skipped."""
    return EmulatedLibrary(flag)

"""DequantizedSource: dequantizes stored codes to float32 for matrices that stay plain in memory; no torch until a read.

kv_b of latent attention keeps the engine's dtype. An fp8 checkpoint stores it as e4m3 codes with scales by block, by
row or by matrix. The reading thread computes code * scale in float32, like GGUF blocks; placing rounds once. Blocks
count from the matrix's first row: heads may begin and end within them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from threading import local
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.planning.coverage import EXPONENT_DTYPE, FLOAT_DTYPES
from holdfast.loading.planning.stored_schemes import StoredSchemes, scale_parts
from holdfast.loading.sources.source import (
    Columns,
    RowRead,
    TensorEntry,
    TogetherSource,
    WeightSource,
    check_read,
    read_rows,
)
from holdfast.models.parameters import Kind, Parameter, Part

if TYPE_CHECKING:
    import torch

PLAIN_KINDS: tuple[Kind, ...] = ("absorbed",)
"""Kinds of parameters that no GEMM takes as codes."""
STEP_ELEMENTS = 2**18
READ_DTYPE = "float32"


class _Coded(NamedTuple):
    """A matrix of codes, the name of its scales, and the rows and columns per scale."""

    num_rows: int
    num_columns: int
    scales: str
    rows_each: int
    columns_each: int

    @property
    def step_rows(self) -> int:
        return min(self.num_rows, max(1, STEP_ELEMENTS // self.num_columns))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a step: codes; scales as stored, as numbers, and expanded by row."""
        num_columns = -(-self.num_columns // self.columns_each)
        return self.step_rows * (self.num_columns + (8 + 4 + 4) * num_columns)


def dequantize_plain_kinds(
    source: WeightSource,
    parameters: Iterable[Parameter],
    stored: StoredSchemes | None,
    kinds: tuple[Kind, ...] = PLAIN_KINDS,
) -> WeightSource:
    """Return a source that dequantizes matrices of these kinds; the source itself if none is stored as codes."""
    coded: dict[str, _Coded] = {}
    for parameter in parameters:
        whole = parameter.whole or parameter
        if stored is None or whole.kind not in kinds:
            continue
        for part in whole.parts:
            entry = source.entries.get(part.tensor)
            # The plan refuses a wrong shape and names the right one.
            if entry is not None and entry.dtype == stored.scheme.code_dtype and entry.shape == part.shape:
                coded[part.tensor] = _coded(part, entry, stored, source.entries)
    return DequantizedSource(source, coded) if coded else source


def _coded(part: Part, entry: TensorEntry, stored: StoredSchemes, entries: Mapping[str, TensorEntry]) -> _Coded:
    stored.refuse_left_alone(entry, (part.tensor,))
    scheme = stored.scheme
    scales = scale_parts((part,), scheme, scheme, stored.scale_endings, entries)[0]
    found = entries.get(scales.tensor)
    if found is None:
        raise ModelFormatError(
            "weights.missing_scales", file=entry.file, tensor=entry.name, dtype=entry.dtype, scales=scales.tensor
        )
    if found.shape != scales.shape:
        shape, expected = list(found.shape), f"{list(scales.shape)} beside {list(entry.shape)}"
        raise ModelFormatError(
            "weights.wrong_shape", file=found.file, tensor=found.name, shape=shape, expected=expected
        )
    if found.dtype not in (*FLOAT_DTYPES, EXPONENT_DTYPE):
        reason = f"scales are read from {', '.join((*FLOAT_DTYPES, EXPONENT_DTYPE))}"
        raise UnsupportedModelError(
            "weights.unsupported_dtype", file=found.file, tensor=found.name, dtype=found.dtype, reason=reason
        )
    num_rows, num_columns = part.source_rows, part.source_columns
    if scheme.block_columns:
        return _Coded(num_rows, num_columns, found.name, scheme.block_rows, scheme.block_columns)
    rows_each = num_rows if prod(found.shape) == 1 else 1
    return _Coded(num_rows, num_columns, found.name, rows_each, num_columns)


class DequantizedSource:
    """Implements WeightSource over another source. Each thread has its own buffer for the codes of a step."""

    def __init__(self, source: WeightSource, coded: Mapping[str, _Coded]) -> None:
        self._source = source
        self._coded = coded
        self._buffers = local()
        self.entries = {name: self._entry(entry) for name, entry in source.entries.items()}
        """Every tensor, scales included, so that the list of files is complete."""

    @property
    def ignorable(self) -> frozenset[str]:
        return self._source.ignorable | {coded.scales for coded in self._coded.values()}

    @property
    def scratch_bytes_per_reader(self) -> int:
        own_bytes = max(coded.scratch_bytes for coded in self._coded.values())
        return self._source.scratch_bytes_per_reader + own_bytes

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Read rows of codes as float32, in steps; read other tensors unchanged."""
        coded = self._coded.get(name)
        if coded is None:
            self._source.read_into(name, row_start, row_end, out, columns)
            return
        import torch

        first, last = check_read(self.entries[name], row_start, row_end, out, columns)
        if row_start == row_end:
            return
        values_RK = torch.frombuffer(out, dtype=torch.float32).view(row_end - row_start, last - first)
        for start in range(row_start, row_end, coded.step_rows):
            end = min(start + coded.step_rows, row_end)
            self._read_step(name, coded, start, end, (first, last), values_RK[start - row_start : end - row_start])

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """Read codes one by one, and the rest together if the inner source supports it."""
        others = [read for read in reads if read.name not in self._coded]
        if isinstance(self._source, TogetherSource):
            self._source.read_together(others)
        else:
            for read in others:
                self._source.read_into(*read)
        for read in reads:
            if read.name in self._coded:
                self.read_into(*read)

    def close(self) -> None:
        self._source.close()
        self._buffers = local()

    def _entry(self, entry: TensorEntry) -> TensorEntry:
        """Return a float32 entry for a matrix of codes, whose bytes include its scales."""
        coded = self._coded.get(entry.name)
        if coded is None:
            return entry
        num_bytes = entry.num_bytes + self._source.entries[coded.scales].num_bytes
        return replace(entry, dtype=READ_DTYPE, num_bytes=num_bytes)

    def _read_step(
        self, name: str, coded: _Coded, start: int, end: int, columns: tuple[int, int], out_RK: torch.Tensor
    ) -> None:
        import torch

        first, last = columns
        num_codes = (end - start) * (last - first)
        buffer: bytearray | None = getattr(self._buffers, "codes", None)
        if buffer is None or len(buffer) < num_codes:
            buffer = self._buffers.codes = bytearray(num_codes)
        is_whole = columns == (0, coded.num_columns)
        self._source.read_into(name, start, end, memoryview(buffer)[:num_codes], None if is_whole else columns)
        codes = torch.frombuffer(buffer, dtype=torch.uint8, count=num_codes).view(torch.float8_e4m3fn)
        out_RK.copy_(codes.view(out_RK.shape))
        scales_RJ = self._scales(coded, start, end)
        for block in range(first // coded.columns_each, -(-last // coded.columns_each)):
            left = max(first, block * coded.columns_each) - first
            right = min(last, (block + 1) * coded.columns_each) - first
            out_RK[:, left:right].mul_(scales_RJ[:, block : block + 1])

    def _scales(self, coded: _Coded, start: int, end: int) -> torch.Tensor:
        """Return scales by row and block of columns; a single row if all rows share it."""
        import torch

        from holdfast.quant.weight_quantize import e8m0_values

        first, last = start // coded.rows_each, -(-end // coded.rows_each)
        num_columns = -(-coded.num_columns // coded.columns_each)
        scales_IJ = read_rows(self._source, coded.scales, first, last).view(last - first, num_columns)
        scales_IJ = e8m0_values(scales_IJ) if scales_IJ.dtype == torch.uint8 else scales_IJ.to(torch.float32)
        if coded.rows_each == 1 or last - first == 1:
            return scales_IJ
        return scales_IJ.index_select(0, torch.arange(start, end) // coded.rows_each - first)

"""DequantizedSource: matrices that stay plain here and are stored as codes, read as float32, code * scale; no torch until a read.

kv_b of latent attention is kept in the type of the engine. A checkpoint in fp8 has it as e4m3 codes with scales by block, by row
or by matrix; its rows become float32 in the thread that reads them, as blocks of a GGUF file do, and are rounded once on their
way into their place. Blocks count from the matrix's first row: heads may begin and end within them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from threading import local
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.coverage import EXPONENT_DTYPE, FLOAT_DTYPES
from holdfast.loading.planning.stored_schemes import StoredSchemes, scale_parts
from holdfast.loading.sources.source import RowRead, TensorEntry, TogetherSource, WeightSource, read_rows
from holdfast.models.parameters import Kind, Parameter, Part
from holdfast.quant.formats import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

PLAIN_KINDS: tuple[Kind, ...] = ("absorbed",)
"""Parameters that no product takes as codes."""
STEP_ELEMENTS = 2**18
"""Elements that are read and multiplied at a time."""
READ_DTYPE = "float32"


class _Coded(NamedTuple):
    """A matrix of codes, and where its scales are."""

    num_rows: int
    num_columns: int
    scales: str
    rows_each: int
    """Rows that share a scale."""
    columns_each: int

    @property
    def step_rows(self) -> int:
        return min(self.num_rows, max(1, STEP_ELEMENTS // self.num_columns))

    @property
    def scratch_bytes(self) -> int:
        """Codes of a step; its scales as they are stored, as numbers, and once more by row."""
        num_columns = -(-self.num_columns // self.columns_each)
        return self.step_rows * (self.num_columns + (8 + 4 + 4) * num_columns)


def dequantize_plain_kinds(
    source: WeightSource, parameters: Iterable[Parameter], stored: StoredSchemes | None
) -> WeightSource:
    """The source with every matrix of such a parameter as numbers; itself where none of them is stored as codes."""
    coded: dict[str, _Coded] = {}
    for parameter in parameters:
        whole = parameter.whole or parameter
        if stored is None or whole.kind not in PLAIN_KINDS:
            continue
        for part in whole.parts:
            entry = source.entries.get(part.tensor)
            # A shape that does not fit is refused by the plan, which knows what it should be.
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
            f"{entry.file}: {shown(entry.name)} is stored as {entry.dtype}",
            f"its scales, {shown(scales.tensor)}, are missing",
            "download the model again",
        )
    if found.shape != scales.shape:
        raise ModelFormatError(
            f"{found.file}: {shown(found.name)} has the shape {list(found.shape)}",
            f"{shown(entry.name)} of shape {list(entry.shape)} needs {list(scales.shape)}",
            "use weights and settings of the same model",
        )
    if found.dtype not in (*FLOAT_DTYPES, EXPONENT_DTYPE):
        raise UnsupportedModelError(
            f"{found.file}: {shown(found.name)} is stored as {found.dtype}",
            f"scales are read from {', '.join((*FLOAT_DTYPES, EXPONENT_DTYPE))}",
            "use a checkpoint of one of these types",
        )
    num_rows, num_columns = part.source_rows, part.source_columns
    if scheme.block_columns:
        return _Coded(num_rows, num_columns, found.name, scheme.block_rows, scheme.block_columns)
    rows_each = num_rows if prod(found.shape) == 1 else 1
    return _Coded(num_rows, num_columns, found.name, rows_each, num_columns)


class DequantizedSource:
    """Implements WeightSource over another one. Every thread has a buffer of its own for the codes of a step."""

    def __init__(self, source: WeightSource, coded: Mapping[str, _Coded]) -> None:
        self._source = source
        self._coded = coded
        self._buffers = local()
        self._entries = {name: self._entry(entry) for name, entry in source.entries.items()}

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Scales stay listed, so that whoever asks which files the weights are in hears of theirs."""
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return self._source.ignorable | {coded.scales for coded in self._coded.values()}

    @property
    def scratch_bytes_per_reader(self) -> int:
        own_bytes = max(coded.scratch_bytes for coded in self._coded.values())
        return self._source.scratch_bytes_per_reader + own_bytes

    def read_into(
        self, name: str, row_start: int, row_end: int, out: memoryview, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows of codes as float32, some at a time; others as they are stored."""
        coded = self._coded.get(name)
        if coded is None:
            self._source.read_into(name, row_start, row_end, out, columns)
            return
        import torch

        assert 0 <= row_start <= row_end <= coded.num_rows, f"{name}: rows {row_start} to {row_end} of {coded}"
        first, last = columns or (0, coded.num_columns)
        num_bytes = (row_end - row_start) * (last - first) * DTYPE_BYTES[READ_DTYPE]
        assert len(out) == num_bytes, f"{name}: {len(out)=} for {num_bytes} bytes of rows {row_start} to {row_end}"
        if row_start == row_end:
            return
        values_RK = torch.frombuffer(out, dtype=torch.float32).view(row_end - row_start, last - first)
        for start in range(row_start, row_end, coded.step_rows):
            end = min(start + coded.step_rows, row_end)
            self._read_step(name, coded, start, end, (first, last), values_RK[start - row_start : end - row_start])

    def read_together(self, reads: Sequence[RowRead]) -> None:
        """Codes one after the other, the rest as the source below likes it best."""
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
        """What is read of a matrix of codes are its scales too."""
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
        """A row of scales for every row, one for each block of columns; or one row for all of them."""
        import torch

        from holdfast.quant.weight_quantize import e8m0_values

        first, last = start // coded.rows_each, -(-end // coded.rows_each)
        num_columns = -(-coded.num_columns // coded.columns_each)
        scales_IJ = read_rows(self._source, coded.scales, first, last).view(last - first, num_columns)
        scales_IJ = e8m0_values(scales_IJ) if scales_IJ.dtype == torch.uint8 else scales_IJ.to(torch.float32)
        if coded.rows_each == 1 or last - first == 1:
            return scales_IJ
        return scales_IJ.index_select(0, torch.arange(start, end) // coded.rows_each - first)

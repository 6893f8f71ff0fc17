"""Reads the rows of a Written tensor as float32, step by step; bytes of blocks that stay as they are.

R rows, K columns
"""

from collections.abc import Iterator

import torch

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.gguf.file import GGUFData, GGUFFile
from holdfast.loading.planning.moves import Move
from holdfast.loading.sources.source import WeightSource
from holdfast.loading.writing.written import Written
from holdfast.models.parameters import Part
from holdfast.quant.formats import DTYPE_BYTES

STEP_ELEMENTS = 2**20
"""Elements per step, if a row is no longer: 4 MiB in float32."""
COPY_BYTES = 8 * 2**20
LARGEST = 65504.0
"""The largest float16: scales of blocks are float16."""


class RowReader:
    """Reads rows of a checkpoint; every result is valid until the next read."""

    def __init__(self, source: WeightSource, gguf: GGUFFile | None = None) -> None:
        """`gguf` is the file of the source, whose blocks may be copied."""
        self._source = source
        self._gguf = gguf
        self._data = None if gguf is None else GGUFData(gguf)

    def close(self) -> None:
        self._source.close()
        if self._data is not None:
            self._data.close()

    def steps(self, written: Written) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first row and the values [R, K] of each step, in the order of the output."""
        row = 0
        for part in written.parts:
            for start, end in _ranges(part, written.head_dim):
                values_RK = self._values(part, start, end)
                if written.head_dim is not None:
                    values_RK = values_RK.index_select(0, _interleaved(end - start, written.head_dim))
                if written.added:
                    values_RK = values_RK + written.added
                yield row, values_RK.contiguous()
                row += end - start

    def amax(self, parts: tuple[Part, ...]) -> Iterator[tuple[int, float]]:
        """Yield the elements and the largest magnitude of each step."""
        for part in parts:
            for start, end in _ranges(part, None):
                values_RK = self._values(part, start, end)
                yield values_RK.numel(), float(values_RK.abs().max())

    def copied(self, written: Written) -> Iterator[tuple[int, memoryview]]:
        """Yield pieces of the stored bytes of a tensor, each with its first byte."""
        assert self._gguf is not None, f"{written.name}: only blocks of GGUF files are copied"
        assert self._data is not None, f"{written.name}: the file is closed"
        tensor = self._gguf.tensors[written.name]
        buffer = bytearray(min(COPY_BYTES, tensor.num_bytes))
        for start in range(0, tensor.num_bytes, COPY_BYTES):
            piece = memoryview(buffer)[: min(COPY_BYTES, tensor.num_bytes - start)]
            self._data.read_into(tensor, start, piece)
            yield start, piece

    def _values(self, part: Part, start: int, end: int) -> torch.Tensor:
        """Read rows [start, end) of a checkpoint tensor as float32; refuse NaN, infinities and larger than float16."""
        entry = self._source.entries[part.tensor]
        move = Move(part.tensor, entry.dtype, part.tensor, part, None, entry.num_bytes)
        read = move.read(start, end)
        num_elements = (end - start) * part.num_columns
        buffer = bytearray(num_elements * DTYPE_BYTES[entry.dtype])
        self._source.read_into(part.tensor, *read[:2], memoryview(buffer), read.columns)
        values = torch.frombuffer(buffer, dtype=getattr(torch, entry.dtype))
        shape = (part.num_columns, -1) if part.is_transposed else (-1, part.num_columns)
        values_RK = values.view(shape).t() if part.is_transposed else values.view(shape)
        values_RK = values_RK.to(torch.float32)
        self._check(part, start, values_RK)
        return values_RK

    def _check(self, part: Part, start: int, values_RK: torch.Tensor) -> None:
        low, high = (float(value) for value in values_RK.aminmax())
        if max(-low, high) <= LARGEST:
            return
        entry = self._source.entries[part.tensor]
        rows = (~values_RK.isfinite()).any(dim=1).nonzero()
        if len(rows):
            row, others = start + int(rows[0]), f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            raise ModelFormatError("weights.not_finite", file=entry.file, tensor=entry.name, row=row, others=others)
        raise UnsupportedModelError(
            "quantize.too_large", file=entry.file, tensor=entry.name, value=max(low, high, key=abs), maximum=LARGEST
        )


def _ranges(part: Part, head_dim: int | None) -> Iterator[tuple[int, int]]:
    """Split the rows of a part into steps; steps of permuted rows are whole heads, steps of turned ones in one matrix."""
    first, last = part.row_range
    step = max(1, STEP_ELEMENTS // part.num_columns)
    if head_dim is not None:
        step = max(1, step // head_dim) * head_dim
    while first < last:
        end = min(first + step, last)
        if part.is_transposed:
            end = min(end, (first // part.matrix_rows + 1) * part.matrix_rows)
        yield first, end
        first = end


def _interleaved(num_rows: int, head_dim: int) -> torch.Tensor:
    """Return for each row of interleaved heads its row in heads of halves: 2i is i, and 2i + 1 is i + half."""
    rows = torch.arange(num_rows)
    places = rows % head_dim
    return rows - places + places % 2 * (head_dim // 2) + places // 2

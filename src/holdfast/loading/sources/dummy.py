"""Dummy weights for load_format="dummy": values depend only on a tensor's name and an element's index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import log2, sqrt
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from holdfast.loading.sources.source import Columns, RowWriter, TensorEntry, check_read, table_shape
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.formats import bytes_for
from holdfast.quant.weight_schemes import WeightScheme

if TYPE_CHECKING:
    import torch

TABLE_VALUES = 1_048_573
"""A prime, so rows of any width begin at different table entries and no two rows of a matrix are equal."""
DRAW_VALUES = 2**16
"""Table values per draw, to bound temporary memory."""
READ_VALUES = 2**18
SPREAD = 0.1
"""Standard deviation of biases, and of norm weights around 1; relative one of scales."""
E4M3_SPREAD = 256.0
"""Standard deviation of dummy e4m3 codes: the largest is then 443, which becomes 448 and never NaN."""
E2M1_SPREAD = sqrt(68.5 / 8)
"""Standard deviation of e2m1 if all codes are equally common: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
EXPONENT_BIAS = 127
EMBEDDING_SPREAD = 16.0
"""Standard deviation of the embedding in a model with experts; layers add values of about 1 each.

Attention adds the same values to all rows of a sequence, so a router would send all of them to the same experts. A
large embedding keeps rows independent: B rows with k experts each choose E * (1 - (1 - k / E) ** B) distinct ones of
E, as if at random.
"""
UNBIASED = ("router.bias", "router.score_bias")
"""Parameters set to 0: a bias would make every row prefer the same experts."""


class DummyPlane(NamedTuple):
    """Codes or scales of a quantized matrix, made from values of the table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    factor: float
    summand: float
    column_step: int = 0
    """Offset of column c: c times this."""
    odd_rows: int = 0
    """Offset of odd rows."""

    @classmethod
    def codes(cls, name: str, shape: tuple[int, ...], scheme: WeightScheme) -> DummyPlane:
        """Make e4m3 numbers, or uniform bytes, so that both nibbles are uniform e2m1 codes."""
        if scheme.codes_per_byte == 1:
            assert scheme.code_dtype == "float8_e4m3fn", f"{name}: there are no dummy codes of {scheme.name}"
            return cls(name, scheme.code_dtype, shape, E4M3_SPREAD, 0.0)
        return cls(name, scheme.code_dtype, shape, 127.9 / sqrt(3), 128.0)

    @classmethod
    def scales(cls, name: str, shape: tuple[int, ...], scheme: WeightScheme, num_inputs: int) -> DummyPlane:
        """Make scales that give a matrix the spread of an unquantized one; exponents come close."""
        if not scheme.scale_is_power_of_two:
            scale = 1 / (E4M3_SPREAD * sqrt(num_inputs))
            return cls(name, scheme.scale_dtype, shape, SPREAD * scale, scale)
        exponent = EXPONENT_BIAS - log2(E2M1_SPREAD * sqrt(num_inputs))
        # Bytes are truncated. Adding uniform noise from 0 to 1 rounds stochastically.
        return cls(name, scheme.scale_dtype, shape, 0.5 / sqrt(3), exponent + 0.5)

    @classmethod
    def numbers(cls, name: str, shape: tuple[int, ...], dtype: str, limit: int) -> DummyPlane:
        """Make integers from 0 to `limit` - 1, truncated, not rounded, and distinct within a row.

        Column c of S is uniform over limit // S numbers from c * (limit // S): a token has S distinct experts. Odd rows
        add the remainder of limit / S, so that all numbers occur.
        """
        step, rest = divmod(limit, shape[-1])
        return cls(name, dtype, shape, 0.4999 * step / sqrt(3), step / 2, step, rest)


class DummySource:
    """A checkpoint with exactly the tensors of the parameters, and planes of the quantized ones.

    Element i of a tensor is entry (start(name) + i) mod TABLE_VALUES of one fixed table, scaled for the tensor's kind.
    It does not depend on chunking or device. Making a chunk costs about as much as copying it.
    """

    ignorable: frozenset[str] = frozenset()
    scratch_bytes_per_reader = 4 * READ_VALUES
    """Bytes of the values before rounding."""

    def __init__(self, parameters: Iterable[Parameter], dtype: str, planes: Iterable[DummyPlane] = ()) -> None:
        self._dtype = dtype
        self.entries: dict[str, TensorEntry] = {}
        self._scales: dict[str, tuple[float, float]] = {}
        """Scale and shift of every tensor except planes."""
        self._lock = Lock()
        self._table: torch.Tensor | None = None
        planes, parameters = list(planes), list(parameters)
        has_experts = any(parameter.name.endswith("router.weight") for parameter in parameters)
        for parameter in parameters:
            for part in (parameter.whole or parameter).parts:
                if parameter.limit and parameter.dtype is not None:
                    planes.append(DummyPlane.numbers(part.tensor, part.shape, parameter.dtype, parameter.limit))
                    continue
                num_bytes = bytes_for(dtype, part.shape)
                self.entries[part.tensor] = TensorEntry(part.tensor, dtype, part.shape, "dummy weights", num_bytes)
                self._scales[part.tensor] = _scale_and_shift(parameter, part, has_experts)
        # Similar planes are adjacent, so the writer rarely rescales its table.
        self._planes = {plane.name: plane for plane in sorted(planes, key=lambda plane: plane[3:])}
        for name, plane in self._planes.items():
            num_bytes = bytes_for(plane.dtype, plane.shape)
            self.entries[name] = TensorEntry(name, plane.dtype, plane.shape, "dummy weights", num_bytes)

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """The table, the scaled table, and the scaled table in the checkpoint's dtype."""
        dtypes = {"table": "float32", "scaled": "float32", "stored": self._dtype}
        return tuple(TensorSpec(name, (TABLE_VALUES,), dtype) for name, dtype in dtypes.items())

    def read_into(self, name: str, row_start: int, row_end: int, out: memoryview, columns: Columns = None) -> None:
        """Write the values of these rows, or of some columns; threads share the table."""
        import torch

        entry = self.entries[name]
        first, last = check_read(entry, row_start, row_end, out, columns)
        row_elements = table_shape(entry.shape)[1]
        stored = torch.frombuffer(out, dtype=getattr(torch, entry.dtype)) if len(out) else torch.empty(0)
        start = _start(name) + row_start * row_elements + first
        rows = stored.view(row_end - row_start, last - first)
        if last - first == row_elements:
            self._fill(name, start, stored)
        else:
            for row, values in enumerate(rows):
                self._fill(name, start + row * row_elements, values)
        self.shift_numbers(name, row_start, first, rows)

    def writer(self, tensors: Mapping[str, torch.Tensor]) -> RowWriter:
        """Return a writer that scales and rounds the table, not every element, and copies rows from it."""
        return _TableWriter(self, tensors).write

    def close(self) -> None:
        with self._lock:
            self._table = None

    def _fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Write scaled values of the table from `start`, rounded to the type of `out`."""
        import torch

        table = self._drawn_table()
        scale, shift = self.scale_and_shift(name)
        values = torch.empty(min(READ_VALUES, out.numel()), dtype=torch.float32)
        for begin in range(0, out.numel(), READ_VALUES):
            some = values[: min(READ_VALUES, out.numel() - begin)]
            _repeat(table, start + begin, some)
            out[begin : begin + some.numel()].copy_(some.mul_(scale).add_(shift))

    def _drawn_table(self) -> torch.Tensor:
        import torch

        with self._lock:
            if self._table is None:
                self._table = torch.empty(TABLE_VALUES)
                draw_table(self._table)
            return self._table

    def scale_and_shift(self, name: str) -> tuple[float, float]:
        """Return scale and shift of a tensor's values. They apply in two steps, so every device rounds alike."""
        if name in self._planes:
            return self._planes[name].factor, self._planes[name].summand
        return self._scales[name]

    def shift_numbers(self, name: str, row_start: int, first_column: int, values_RC: torch.Tensor) -> None:
        """Add column and row offsets to integers; leave other tensors unchanged."""
        plane = self._planes.get(name)
        if plane is None or not plane.column_step:
            return
        for column, values_R in enumerate(values_RC.unbind(1), first_column):
            values_R.add_(column * plane.column_step)
        values_RC[1 - row_start % 2 :: 2].add_(plane.odd_rows)


class _TableWriter:
    """Copies rows from a table that is scaled and rounded for each kind of tensor.

    A class, not a closure: an error's traceback would keep a closure's tensors alive.
    """

    def __init__(self, source: DummySource, tensors: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self._table, self._scaled, self._stored = tensors["table"], tensors["scaled"], tensors["stored"]
        self._at_hand: tuple[str, float, float] | None = None
        self._values = self._stored
        draw_table(self._table)

    def write(self, name: str, row_start: int, row_end: int, out: torch.Tensor, columns: Columns = None) -> None:
        import torch

        wanted = (self._source.entries[name].dtype, *self._source.scale_and_shift(name))
        if wanted != self._at_hand:
            self._at_hand, self._values = wanted, self._made(*wanted)
        row_elements = table_shape(self._source.entries[name].shape)[1]
        first, last = columns or (0, row_elements)
        values = out.view(-1).view(getattr(torch, wanted[0]))
        num_values = (row_end - row_start) * (last - first)
        assert values.numel() == num_values, f"{name}: {out.shape=} for {num_values} values from row {row_start} on"
        start = _start(name) + row_start * row_elements + first
        rows = values.view(row_end - row_start, last - first)
        if last - first == row_elements:
            _repeat(self._values, start, values)
        else:
            _repeat_runs(self._values, start, row_elements, rows)
        self._source.shift_numbers(name, row_start, first, rows)

    def _made(self, dtype: str, scale: float, shift: float) -> torch.Tensor:
        """Return the scaled table in a dtype. Scales and integers stay float32; the copy truncates integers."""
        import torch

        scaled = self._scaled.copy_(self._table).mul_(scale).add_(shift)
        wanted = getattr(torch, dtype)
        if wanted.itemsize > self._stored.element_size():
            is_copied = wanted == scaled.dtype or not wanted.is_floating_point
            assert is_copied, f"a table in {dtype} has no place beside one in {self._stored.dtype}"
            return scaled
        return self._stored.view(torch.uint8)[: scaled.numel() * wanted.itemsize].view(wanted).copy_(scaled)


def draw_table(table: torch.Tensor) -> None:
    """Fill the table with uniform values of variance 1, from raw PCG64 bits, which never vary."""
    import numpy as np
    import torch

    generator = np.random.PCG64(TABLE_VALUES)
    for piece in table.split(DRAW_VALUES):
        unit = (generator.random_raw(len(piece)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        piece.copy_(torch.from_numpy((unit * 2 - 1) * np.float32(sqrt(3))))


def _repeat(table: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill `out` with the table's values from `start`, cyclically: at most three copies for any length."""
    head = table[start % TABLE_VALUES :][: out.numel()]
    out[: head.numel()].copy_(head)
    rest = out[head.numel() :]
    num_rounds = rest.numel() // TABLE_VALUES
    rounds, tail = rest[: num_rounds * TABLE_VALUES], rest[num_rounds * TABLE_VALUES :]
    rounds.view(num_rounds, TABLE_VALUES).copy_(table.expand(num_rounds, TABLE_VALUES))
    tail.copy_(table[: tail.numel()])


def _repeat_runs(table: torch.Tensor, start: int, stride: int, out_RC: torch.Tensor) -> None:
    """Like `_repeat`, for runs that begin `stride` apart: one copy serves all runs before the table's end."""
    num_runs, width = out_RC.shape
    done = 0
    while done < num_runs:
        place = (start + done * stride) % TABLE_VALUES
        num_fitting = min((TABLE_VALUES - place - width) // stride + 1, num_runs - done)
        if num_fitting <= 0:  # it wraps
            _repeat(table, place, out_RC[done])
            done += 1
            continue
        runs = table.as_strided((num_fitting, width), (stride, 1), table.storage_offset() + place)
        out_RC[done : done + num_fitting].copy_(runs)
        done += num_fitting


def _scale_and_shift(parameter: Parameter, part: Part, has_experts: bool) -> tuple[float, float]:
    """Return scale and shift of a checkpoint tensor. A transposed matrix has its inputs as rows."""
    if parameter.name.endswith(UNBIASED):
        return 0.0, 0.0
    if has_experts and parameter.name == "embed.weight":
        return EMBEDDING_SPREAD, 0.0
    if len(part.shape) > 1:
        return 1 / sqrt(part.source_columns), 0.0
    return SPREAD, 1.0 if part.tensor.endswith(".weight") else 0.0


def _start(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % TABLE_VALUES

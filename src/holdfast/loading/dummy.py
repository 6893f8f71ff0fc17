"""Made-up weights for load_format="dummy": values that depend on a tensor's name and an element's place alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING

from holdfast.loading.source import RowWriter, TensorEntry
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.parameters import Parameter
from holdfast.quant.formats import bytes_for

if TYPE_CHECKING:
    import torch

TABLE_VALUES = 1_048_573
"""A prime, so that rows of any width begin at different places of the table and no two of a matrix are alike."""
DRAW_VALUES = 2**16
"""Values of the table that are drawn at a time, so that drawing takes little memory beside it."""
SPREAD = 0.1
"""Standard deviation of biases, and of norm weights around 1."""


class DummySource:
    """Stands for a checkpoint that has exactly the tensors the parameters need.

    Element i of a tensor is entry (start(name) + i) mod TABLE_VALUES of one fixed table, scaled for its kind of tensor.
    Chunking, device and neighbours do not enter, and a chunk costs about as much as copying it.
    """

    def __init__(self, parameters: Iterable[Parameter], dtype: str) -> None:
        self._dtype = dtype
        self._entries: dict[str, TensorEntry] = {}
        self._table: torch.Tensor | None = None
        for parameter in parameters:
            for part in parameter.parts:
                num_bytes = bytes_for(dtype, part.shape)
                self._entries[part.tensor] = TensorEntry(part.tensor, dtype, part.shape, "dummy weights", num_bytes)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def ignorable(self) -> frozenset[str]:
        return frozenset()

    @property
    def writer_specs(self) -> tuple[TensorSpec, ...]:
        """The table, the table scaled, and that in the checkpoint's type."""
        dtypes = {"table": "float32", "scaled": "float32", "stored": self._dtype}
        return tuple(TensorSpec(name, (TABLE_VALUES,), dtype) for name, dtype in dtypes.items())

    def read_rows(self, name: str, row_start: int, row_end: int) -> torch.Tensor:
        import torch

        entry = self._entries[name]
        if self._table is None:
            self._table = torch.empty(TABLE_VALUES)
            _draw(self._table)
        row_elements = prod(entry.shape[1:])
        values = torch.empty((row_end - row_start) * row_elements, dtype=torch.float32)
        _repeat(self._table, _start(name) + row_start * row_elements, values)
        scale, shift = _scale_and_shift(entry)
        values.mul_(scale).add_(shift)
        return values.view(row_end - row_start, *entry.shape[1:]).to(getattr(torch, entry.dtype))

    def writer(self, tensors: Mapping[str, torch.Tensor]) -> RowWriter:
        """The table is scaled and rounded, not every element, and rows are copies of it."""
        table, scaled, stored = tensors["table"], tensors["scaled"], tensors["stored"]
        _draw(table)
        at_hand: tuple[float, float] | None = None

        def write(name: str, row_start: int, out_rows: torch.Tensor) -> None:
            nonlocal at_hand
            entry = self._entries[name]
            wanted = _scale_and_shift(entry)
            if wanted != at_hand:
                scale, shift = at_hand = wanted
                stored.copy_(scaled.copy_(table).mul_(scale).add_(shift))
            _repeat(stored, _start(name) + row_start * prod(entry.shape[1:]), out_rows.view(-1))

        return write

    def close(self) -> None:
        self._table = None


def _draw(table: torch.Tensor) -> None:
    """Uniform values of variance 1; the raw bits of PCG64 are the same for every version and machine."""
    import numpy as np
    import torch

    generator = np.random.PCG64(TABLE_VALUES)
    for piece in table.split(DRAW_VALUES):
        unit = (generator.random_raw(len(piece)) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        piece.copy_(torch.from_numpy((unit * 2 - 1) * np.float32(sqrt(3))))


def _scale_and_shift(entry: TensorEntry) -> tuple[float, float]:
    """Factor and summand of a tensor's values. They are applied in two steps, so that every device rounds alike."""
    if len(entry.shape) > 1:
        return 1 / sqrt(entry.shape[-1]), 0.0
    return SPREAD, 1.0 if entry.name.endswith(".weight") else 0.0


def _repeat(table: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill `out` with the table's values from `start` on, round and round: at most three copies, whatever its length."""
    head = table[start % TABLE_VALUES :][: out.numel()]
    out[: head.numel()].copy_(head)
    rest = out[head.numel() :]
    num_rounds = rest.numel() // TABLE_VALUES
    rounds, tail = rest[: num_rounds * TABLE_VALUES], rest[num_rounds * TABLE_VALUES :]
    rounds.view(num_rounds, TABLE_VALUES).copy_(table.expand(num_rounds, TABLE_VALUES))
    tail.copy_(table[: tail.numel()])


def _start(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % TABLE_VALUES

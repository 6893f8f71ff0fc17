"""Made-up weights for load_format="dummy": values that depend on a tensor's name and an element's place alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING

from holdfast.loading.source import TensorEntry
from holdfast.models.parameters import Parameter
from holdfast.quant.formats import bytes_for

if TYPE_CHECKING:
    import torch

TABLE_VALUES = 1_048_573
"""A prime, so that rows of any width begin at different places of the table and no two of a matrix are alike."""
SPREAD = 0.1
"""Standard deviation of biases, and of norm weights around 1."""


class DummySource:
    """Stands for a checkpoint that has exactly the tensors the parameters need.

    Element i of a tensor is entry (start(name) + i) mod TABLE_VALUES of one fixed table, scaled for its kind of tensor.
    Chunking, device and neighbours do not enter, and a chunk costs about as much as copying it.
    """

    def __init__(self, parameters: Iterable[Parameter], dtype: str) -> None:
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

    def read_rows(self, name: str, row_start: int, row_end: int) -> torch.Tensor:
        import torch

        entry = self._entries[name]
        if self._table is None:
            self._table = _make_table()
        row_elements = prod(entry.shape[1:])
        values = _cut(self._table, _start(name) + row_start * row_elements, (row_end - row_start) * row_elements)
        if len(entry.shape) > 1:
            values.mul_(1 / sqrt(entry.shape[-1]))
        else:
            values.mul_(SPREAD).add_(1.0 if name.endswith(".weight") else 0.0)
        return values.view(row_end - row_start, *entry.shape[1:]).to(getattr(torch, entry.dtype))

    def close(self) -> None:
        self._table = None


def _make_table() -> torch.Tensor:
    """Uniform values of variance 1; the raw bits of PCG64 are the same for every version and machine."""
    import numpy as np
    import torch

    bits = np.random.PCG64(TABLE_VALUES).random_raw(TABLE_VALUES)
    unit = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    return torch.from_numpy((unit * 2 - 1) * np.float32(sqrt(3)))


def _cut(table: torch.Tensor, start: int, num_values: int) -> torch.Tensor:
    """A fresh tensor of the table's values from `start` on, round and round."""
    import torch

    values = torch.empty(num_values, dtype=torch.float32)
    done = 0
    while done < num_values:
        at = (start + done) % TABLE_VALUES
        count = min(TABLE_VALUES - at, num_values - done)
        values[done : done + count] = table[at : at + count]
        done += count
    return values


def _start(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % TABLE_VALUES

"""Rows of a source as a tensor of their own, for whoever wants some without a plan."""

from math import prod

import torch

from holdfast.loading.sources.source import WeightSource


def read_rows(
    source: WeightSource, name: str, row_start: int, row_end: int, columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows [row_start, row_end) in the type in which they are read; of a vector, elements. Leading dimensions are rows."""
    entry = source.entries[name]
    is_vector = len(entry.shape) < 2
    width = 1 if is_vector else entry.shape[-1]
    first, last = columns or (0, width)
    num_rows = prod(entry.shape[:-1]) if not is_vector else prod(entry.shape)
    assert 0 <= row_start <= row_end <= num_rows, f"{name}: rows {row_start} to {row_end} of {num_rows}"
    rows = torch.empty((row_end - row_start, last - first), dtype=getattr(torch, entry.dtype))
    if rows.numel():
        source.read_into(name, row_start, row_end, rows.view(-1).view(torch.uint8).numpy().data, columns)
    return rows.view(-1) if is_vector else rows

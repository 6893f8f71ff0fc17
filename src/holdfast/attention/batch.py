"""Batch: everything one step needs to know, as one argument; and how its rows lie.

rows        sequence 0: positions [start, start + n)  |  sequence 1: ...  |  ...  |  padding      one row a token, T in all
slot        page id * page_tokens + position % page_tokens: where a row's keys and values go; -1 for padding: nowhere
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class SequenceRows(NamedTuple):
    """One sequence's part of a step, on the host; made for every sequence of every step, so it must be cheap."""

    row_start: int
    num_rows: int
    start: int
    """Position of the first row; positions below it are in the cache already."""
    pages: list[int]
    """The sequence's pages in order; read, never changed."""
    table_row: int = -1
    """The row of the page table on the device that holds its pages; -1 where there is no such table."""

    @property
    def end(self) -> int:
        """Tokens in the cache once this step has written its own."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The rows whose logits are wanted, where they are not all: behind the last layer's keys nothing else is computed."""

    rows_R: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    """The same rows, each a sequence of one, numbered from 0; padding is not among them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. Tensors are views of buffers that live as long as the runner."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    logits: LogitRows | None
    """None: the logits of every row are wanted."""
    page_table_NP: torch.Tensor | None = None
    """int32, a row for each sequence that is on the device; None on a CPU, where kernels read the lists."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.token_ids_T.shape[0]

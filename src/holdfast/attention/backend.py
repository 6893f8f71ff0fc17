"""The attention contract: the Batch of a step, and the base class of backends; each family adds its own methods.

rows        sequence 0: positions [start, start + n)  |  sequence 1: ...  |  ...  |  padding      one row a token, T in all
slot        chunk number * page_tokens + position % page_tokens: where a row's keys and values go; -1 for padding

Layers belong to cache groups (cache/spec.py), G in all. Each group has its own slots, block table and page lists.
Their numbers are those of chunks of `page_tokens` tokens, which kernels call pages.

A layer hands over its fused projection. Norms, rotation, quantization and the write into pages belong to the backend,
because the formats and devices that matter do all of them in one pass. A backend's needs are declared without building
it (attention/declarations.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

PlannedT = TypeVar("PlannedT")
StepPlan = Any
"""A backend's plan of a batch, for all layers; each backend has its own type."""


class SequenceRows(NamedTuple):
    """One sequence's part of a step, on the host; made for every sequence of every step, so it must be cheap."""

    row_start: int
    num_rows: int
    start: int
    """Position of the first row; positions below it are in the cache already."""
    tables: tuple[Sequence[int], ...]
    """The sequence's chunks by group, in order, HOLE where a window released one; read-only."""
    table_row: int = -1
    """Its row of the block tables on the device; -1 if there are none."""
    is_prompt: bool = False
    """True for rows of the prompt; not set for single rows of LogitRows."""
    place: int = -1
    """Place of its state; -1 without one, and not set for single rows of LogitRows."""
    num_drafts: int = 0
    """Draft tokens among its rows, the last ones; not set for single rows of LogitRows."""

    @property
    def end(self) -> int:
        """Tokens in the cache after this step."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows whose logits are wanted, if not all. After the last layer's keys only these are computed."""

    rows_R: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    """The rows as sequences of one row each, numbered from 0, without padding."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. Tensors are views of buffers that live as long as the runner."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    """One row per cache group."""
    sequences: tuple[SequenceRows, ...]
    logits: LogitRows | None
    """None: the logits of every row are wanted."""
    page_tables: tuple[torch.Tensor, ...] | None = None
    """By group, int32 [N, P], a row per sequence on the device; None on a CPU, where kernels read the lists.

    Entries after the newest chunk, or before a window, name an arbitrary chunk."""
    states_T: torch.Tensor | None = None
    """int64: state index of each row's sequence (cache/storage.py), -1 for padding; None without states."""
    drafts_T: torch.Tensor | None = None
    """int64: which rows are draft tokens that states must not keep (kernels/state/state_rows.py); None without states or
    draft tokens."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.token_ids_T.shape[0]


class EagerStep(NamedTuple):
    """Some rows of a sequence after its stored tokens."""

    start: int
    num_rows: int


class LayerStep(NamedTuple):
    """One layer's part of a step."""

    layer: int
    plan: StepPlan
    scratch: Mapping[str, torch.Tensor]
    """Scratch buffers of the backend's declaration, by name."""


@dataclass(frozen=True, slots=True)
class RowsPlan(Generic[PlannedT]):
    """Plans of a backend that reads the step on the host: for all rows, and for wanted rows, if not all."""

    every: PlannedT
    wanted: PlannedT | None
    wanted_rows_R: torch.Tensor | None

    @classmethod
    def of(cls, batch: Batch, make: Callable[[Sequence[SequenceRows]], PlannedT]) -> "RowsPlan[PlannedT]":
        if batch.logits is None:
            return cls(make(batch.sequences), None, None)
        return cls(make(batch.sequences), make(batch.logits.sequences), batch.logits.rows_R)

    def rows(self, wanted_only: bool) -> tuple[PlannedT, torch.Tensor | None]:
        """Return all rows; or those that are wanted, and their numbers."""
        if wanted_only and self.wanted is not None and self.wanted_rows_R is not None:
            return self.wanted, self.wanted_rows_R
        return self.every, None


class AttentionBackend:
    """Base of all families' backends. Its memory is declared before it is built; a step is planned once for all layers.

    The host makes a plan of token ranges; the device makes lists of tokens that a layer chose, in buffers that `plan`
    only passes on. Both lie in fixed memory that the memory plan lists.
    """

    name: ClassVar[str]

    @property
    def paged(self) -> "AttentionBackend":
        """The backend of the layers whose tokens are on pages."""
        return self

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes it holds for life, by the owners that its declaration names."""
        return {}

    def plan(self, batch: Batch, captured: bool = False) -> StepPlan:
        """Plan this step for all layers.

        If `captured`, launches must not depend on the step's lengths: a graph repeats them for other steps.
        """
        raise NotImplementedError

    def eager_steps(self) -> Sequence[EagerStep]:
        """List steps of one sequence whose kernels no captured plan launches. Warm-up runs them to compile."""
        return ()


def wanted_rows(q_TND: torch.Tensor, out_TX: torch.Tensor, rows_R: torch.Tensor | None) -> torch.Tensor:
    """Return the output rows whose logits are wanted, in the memory of the queries, which are free by now."""
    if rows_R is None:
        return out_TX
    width = out_TX.shape[1]
    wanted_RX = q_TND.view(-1)[: len(rows_R) * width].view(-1, width)
    return torch.index_select(out_TX, 0, rows_R, out=wanted_RX)

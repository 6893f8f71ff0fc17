"""Probes inside a runner for benchmarks/gpu_steady.py: allocations of steps, fingerprints of logits, and NaN in unowned memory.

R rows, V vocabulary, N sequences, P pages
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gpu_engines import OpenEngine, moved, pointers

from holdfast.attention.backend import Batch
from holdfast.kernels.triton_compat import counting_compiles
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step

POISON_BYTE = 0xFF
"""Every float of these bytes is NaN."""
FINGERPRINT_WEIGHTS = 4093
"""A prime: weights repeat after so many columns. 32 bits x 12 bits x a vocabulary below 2**19 stay exact in 63 bits."""
POISONED_LANES = ("stream", "layers")
"""Lanes whose owners write before they read; what small-batch GEMMs share is zeros between launches, by contract."""


def replace(thing: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object."""
    setattr(thing, name, function)


def fingerprints(logits_RV: torch.Tensor) -> list[int]:
    """Return a number per row that changes with any bit of its logits."""
    bits_RV = logits_RV.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    weights_V = torch.arange(logits_RV.shape[1], device=logits_RV.device) % FINGERPRINT_WEIGHTS + 1
    return (bits_RV * weights_V).sum(dim=1).tolist()


def num_real_rows(batch: Batch) -> int:
    """Return the number of real rows of logits; padding follows."""
    if batch.logits is not None:
        return len(batch.logits.sequences)
    return sum(sequence.num_rows for sequence in batch.sequences)


class RerunGraphs:
    """Replaces captured graphs without a GPU: pads like them, and runs the step again."""

    def __init__(self, ears: "Ears", sizes: tuple[int, ...], num_logit_rows: int) -> None:
        self._ears, self._sizes, self._num_logit_rows = ears, sizes, num_logit_rows

    def size_for(self, num_rows: int, num_logit_rows: int, is_decode: bool) -> int | None:
        """Return the smallest size for this many rows."""
        size = next((size for size in self._sizes if size >= num_rows), None)
        return None if size is None or num_logit_rows > self.logit_rows(size, is_decode) else size

    def logit_rows(self, size: int, is_decode: bool) -> int:
        """Return the rows that have logits."""
        return size if is_decode else min(size, self._num_logit_rows)

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        """Run the last planned step."""
        logits_RV = self._ears.run_eager()
        self._ears.runner.sampler.find_argmax(logits_RV)
        return logits_RV

    def release(self) -> None:
        """Hold nothing, so free nothing."""


@dataclass
class Heard:
    """Fingerprints of the logits of a run of steps."""

    rows: list[list[int]] = field(default_factory=list)
    """Fingerprints of the real rows, step by step."""
    num_compared: int = 0
    num_mismatched: int = 0
    num_wild: int = 0
    """Steps with non-finite numbers in their padding."""


class Ears:
    """Keeps a runner's last batch and plan, and records fingerprints of its logits while enabled."""

    def __init__(self, opened: OpenEngine) -> None:
        self.runner: Any = opened.runner
        self.batch: Batch | None = None
        self.plan: object = None
        self.num_replays = 0
        self._heard: Heard | None = None
        self._is_compared = False
        runner = self.runner
        fill, plan, self._step_logits = runner.buffers.fill, runner.backend.plan, runner.model.step_logits

        def heard_fill(*arguments: Any, **named: Any) -> Batch:  # noqa: ANN401
            self.batch = batch = fill(*arguments, **named)
            return batch

        def heard_plan(*arguments: Any, **named: Any) -> object:  # noqa: ANN401
            self.plan = plan(*arguments, **named)
            return self.plan

        replace(runner.buffers, "fill", heard_fill)
        replace(runner.backend, "plan", heard_plan)
        replace(runner.model, "step_logits", self._heard_step_logits)
        if runner.graphs is None:
            limits = runner.limits
            sizes = tuple(2**power for power in range(limits.max_num_batched_tokens.bit_length()))
            runner.graphs = RerunGraphs(self, sizes, limits.max_num_seqs)
        self.graphs = runner.graphs
        self._pads = not isinstance(self.graphs, RerunGraphs)
        self.replay = self.graphs.replay
        replace(self.graphs, "replay", self._heard_replay)

    @contextmanager
    def listening(self, compare: bool = False) -> Iterator[Heard]:
        """Record fingerprints of every step inside; `compare` repeats each replayed step eagerly, in place."""
        self._heard, self._is_compared = Heard(), compare
        try:
            yield self._heard
        finally:
            self._heard = None

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Disable graphs inside."""
        self.runner.graphs = None
        try:
            yield
        finally:
            self.runner.graphs = self.graphs

    def run_eager(self) -> torch.Tensor:
        """Repeat the last planned step eagerly; it writes the same keys to the same slots."""
        assert self.batch is not None, "no step was planned"
        return self._step_logits(self.batch, self.plan)

    def _heard_step_logits(self, batch: Batch, plan: object) -> torch.Tensor:
        logits_RV = self._step_logits(batch, plan)
        self._listen(logits_RV, batch)
        return logits_RV

    def _heard_replay(self, size: int, is_decode: bool) -> torch.Tensor:
        self.num_replays += 1
        logits_RV = self.replay(size, is_decode)
        if self._heard is None or self.batch is None:
            return logits_RV
        rows = self._listen(logits_RV, self.batch)
        if self._is_compared:
            logits_RV = self.run_eager()
            again = fingerprints(logits_RV[: len(rows)])
            self._heard.num_compared += len(rows)
            self._heard.num_mismatched += sum(one != other for one, other in zip(rows, again, strict=True))
        return logits_RV

    def _listen(self, logits_RV: torch.Tensor, batch: Batch) -> list[int]:
        if self._heard is None:
            return []
        num_real = num_real_rows(batch)
        rows = fingerprints(logits_RV[:num_real])
        self._heard.rows.append(rows)
        if self._pads:  # CPU kernels never see padding, and do not write it
            self._heard.num_wild += not bool(torch.isfinite(logits_RV[num_real:]).all())
        return rows


@dataclass
class Stillness:
    """Forbidden allocations and waits of steps, with the steps."""

    num_steps: int = 0
    num_decode_steps: int = 0
    num_batch_changes: int = 0
    most_sequences: int = 0
    longest_context: int = 0
    num_allocations: int = 0
    num_segments: int = 0
    reserved_growth_bytes: int = 0
    num_syncs: int = 0
    num_compilations: int = 0
    """Kernels compiled or found in Triton's cache on disk: neither was warmed."""
    num_moved: int = 0
    first_moved: str = ""


CHECK_POINTERS_EVERY = 50
SYNC_WORDS = "called a synchronizing"
"""torch's warnings when the host waits for the device."""
COUNTERS = {
    "num_allocations": "allocation.all.allocated",
    "num_segments": "segment.all.allocated",
    "reserved_growth_bytes": "reserved_bytes.all.current",
}
"""Counts of torch's allocator; the first two only grow."""


class Watch:
    """Counts what happens inside Runner.launch and Runner.collect while it is on."""

    def __init__(self, opened: OpenEngine, device: torch.device) -> None:
        self._runner, self._device = opened.runner, device
        self._launch, self._collect = opened.runner.launch, opened.runner.collect
        self._last_size = 0

    @contextmanager
    def watching(self, sync_mode: str = "warn") -> Iterator[Stillness]:
        """Count inside the block. `sync_mode` is torch's: warn counts waits for the device, error raises at the first.

        torch does not count waits for an event, such as collect.
        """
        found, places = Stillness(), pointers(self._runner)
        self._last_size = 0

        def launch(step: Step) -> None:
            with self._counting(found, sync_mode):
                self._launch(step)
            self._note(step, found)

        def collect() -> StepResult:
            with self._counting(found, sync_mode):
                result = self._collect()
            if found.num_steps % CHECK_POINTERS_EVERY == 0:
                _note_moved(found, moved(places, pointers(self._runner)))
            return result

        replace(self._runner, "launch", launch)
        replace(self._runner, "collect", collect)
        with counting_compiles(lambda: None) as compiles:
            try:
                yield found
            finally:
                found.num_compilations = compiles.num_compiled + compiles.num_found
                replace(self._runner, "launch", self._launch)
                replace(self._runner, "collect", self._collect)
        _note_moved(found, moved(places, pointers(self._runner)))

    @contextmanager
    def _counting(self, found: Stillness, sync_mode: str) -> Iterator[None]:
        before = self._counters()
        with warnings.catch_warnings(record=True) as caught, self._sync_mode(sync_mode):
            warnings.simplefilter("always")
            yield
        found.num_syncs += sum(SYNC_WORDS in str(warning.message) for warning in caught)
        for name, value in self._counters().items():
            setattr(found, name, getattr(found, name) + value - before[name])

    def _note(self, step: Step, found: Stillness) -> None:
        size = len(step.items)
        found.num_steps += 1
        found.num_decode_steps += step.num_tokens == size
        found.num_batch_changes += size != self._last_size
        found.most_sequences = max(found.most_sequences, size)
        found.longest_context = max([found.longest_context, *(item.start + item.num_new_tokens for item in step.items)])
        self._last_size = size

    def _counters(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return dict.fromkeys(COUNTERS, 0)
        stats = torch.cuda.memory_stats(self._device)
        return {name: int(stats.get(key, 0)) for name, key in COUNTERS.items()}

    @contextmanager
    def _sync_mode(self, mode: str) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _note_moved(found: Stillness, paths: list[str]) -> None:
    found.num_moved = max(found.num_moved, len(paths))
    found.first_moved = found.first_moved or next(iter(paths), "")


class Poison:
    """Write NaN into every unowned page, into the workspace, and a poisoned page's number into unused places of the block table."""

    def __init__(self, opened: OpenEngine, device: torch.device) -> None:
        runner: Any = opened.runner
        page_tokens = runner.limits.page_tokens
        self._pool, self._device = opened.engine.scheduler.pool, device
        storage = opened.built.storage
        self._num_pages = storage.num_pages
        self._pages = [
            plane.view(-1, page_tokens, *plane.shape[1:])
            for layer in range(len(storage.spec.layers))
            for plane in storage.planes(layer).values()
        ]
        lanes = runner.model.workspace.lanes
        self._lanes = [lanes[lane] for lane in POISONED_LANES if lane in lanes]
        self._table = runner.buffers.page_table
        self.num_poisoned_pages = 0

    def spread(self) -> None:
        """Write poison between two steps."""
        self._synchronize()
        free = list(self._pool.free_runs)
        self.fill(free)
        for lane in self._lanes:
            lane.fill_(POISON_BYTE)
        if self._table is not None and free:
            for table_NP, num_chunks_by_row in zip(self._table.tables, self._table.num_chunks_by_row(), strict=True):
                is_unused_NP = np.ones(table_NP.shape, dtype=bool)
                for row, num_chunks in num_chunks_by_row.items():
                    is_unused_NP[row, :num_chunks] = False
                table_NP.masked_fill_(torch.from_numpy(is_unused_NP).to(self._device), free[0])
        self._synchronize()

    def fill(self, pages: list[int]) -> None:
        """Write NaN into all layers of these pages."""
        self.num_poisoned_pages += len(pages)
        ids = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for chunks in self._pages:  # if cache groups share pages, a page has several chunks of a layer
            for first in range(0, len(chunks), self._num_pages):
                chunks.index_fill_(0, first + ids, float("nan"))
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

"""CUDA graphs without CUDA for ranks in threads: a capture runs nothing, and a replay runs the captured part over what buffers hold then."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from holdfast.runner.graphs import StepGraphs
from holdfast.runner.runner import Runner
from runner.fake_graphs import FakeStream

_thread = threading.local()


class StandInGraph:
    """What one capture would hold."""

    def __init__(self) -> None:
        self.run: Callable[[], None] | None = None

    def replay(self) -> None:
        assert self.run is not None, "nothing was captured"
        self.run()


@contextmanager
def _capture(graph: StandInGraph, **_: object) -> Iterator[None]:
    _thread.graph = graph
    try:
        yield
    finally:
        _thread.graph = None


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on torch's graphs are these, in each thread its own."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


class SeenGraphs(StepGraphs):
    """The graphs, and which of them ran."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.replayed: list[tuple[int, bool]] = []

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        self.replayed.append((size, is_decode))
        return super().replay(size, is_decode)


def capture_all(
    runner: Any,
    graphs: SeenGraphs,
    rows: tuple[int, ...],
) -> None:
    """Warm and capture as on a GPU, together with all other ranks."""
    assert isinstance(runner, Runner)
    run_captured, plan = runner.run_captured, runner.backend.plan
    newest: list[Any] = []

    def plan_and_keep(batch: Any, captured: bool = False) -> Any:
        newest[:] = batch, plan(batch, captured)
        return newest[1]

    def run_or_capture(batch: Any, made: Any) -> torch.Tensor:
        graph = getattr(_thread, "graph", None)
        if graph is None:
            _thread.logits = run_captured(batch, made)
            return _thread.logits
        size, logits_RV = batch.num_rows, _thread.logits

        def run() -> None:
            assert newest[0].num_rows == size, f"{newest[0].num_rows} rows for a graph of {size}"
            found_RV = run_captured(*newest)
            places = found_RV.shape == logits_RV.shape, found_RV.data_ptr() == logits_RV.data_ptr()
            assert all(places), "logits are not where the graph leaves them"

        graph.run = run
        return logits_RV

    patched: Any = runner
    patched.backend.plan = plan_and_keep
    patched.run_captured = run_or_capture
    patched.on_stream = nullcontext
    patched.stream = FakeStream()
    try:
        runner.warm(rows, graphs, lambda done, total: None)
    finally:
        patched.stream = None

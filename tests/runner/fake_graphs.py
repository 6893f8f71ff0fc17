"""CUDA graphs without CUDA: a capture records the calls it sees with the values they had, and a replay repeats just these.

So whatever a step reads on the host is frozen, as it is in a graph, and only what lies in tensors can change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.drive import Rig

POOL = object()


class FakeGraph:
    """The calls that one capture saw."""

    recording: "FakeGraph | None" = None
    """The capture that is under way; a test has one at a time."""
    made: list["FakeGraph"]

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.pool: object = None
        self.num_replays = 0
        type(self).made.append(self)

    def replay(self) -> None:
        assert self.calls, "nothing was captured"
        self.num_replays += 1
        for call in self.calls:
            call()


class FakeStream:
    """Counts the waits."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@contextmanager
def fake_capture(graph: FakeGraph, pool: object = None, stream: object = None) -> Iterator[None]:
    assert FakeGraph.recording is None, "a capture inside a capture"
    graph.pool = pool
    FakeGraph.recording = graph
    try:
        yield
    finally:
        FakeGraph.recording = None


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Just the same function; a capture that sees a call keeps it with its arguments."""

    def call(*arguments: Any) -> Any:
        if FakeGraph.recording is not None:
            FakeGraph.recording.calls.append(lambda: function(*arguments))
        return function(*arguments)

    return call


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on torch's graphs are these."""
    monkeypatch.setattr(FakeGraph, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)


def pretend_to_have_a_stream(rig: Rig) -> FakeStream:
    """The rig's runner captures as on a GPU, and what its graphs would contain is recorded."""
    stream = FakeStream()
    runner: Any = rig.runner
    runner.stream = stream
    runner.on_stream = lambda: torch.inference_mode()
    model = runner.model
    runner.model = SimpleNamespace(step_logits=captured(model.step_logits), hidden=model.hidden, logits=model.logits)
    rig.sampler.find_argmax = captured(rig.sampler.find_argmax)  # type: ignore[method-assign]
    rig.sampler.resolve = captured(rig.sampler.resolve)  # type: ignore[method-assign]
    return stream

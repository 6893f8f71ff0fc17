"""Memory of a device that has failed: kept for as long as the process lives, and nothing else is."""

import gc
import weakref

import pytest
import torch

from holdfast.memory.failed_device import has_failed, keep_with_process

CUDA = torch.device("cuda")


class Held:
    """Something with a place that can be watched."""


class Stream:
    """Of a device in a given state."""

    def __init__(self, error: str | None) -> None:
        self._error = error

    def query(self) -> bool:
        if self._error is not None:
            raise RuntimeError(self._error)
        return False


def test_what_is_kept_outlives_everybody_who_holds_it() -> None:
    kept, dropped = Held(), Held()
    places = weakref.ref(kept), weakref.ref(dropped)
    keep_with_process(kept)
    del kept, dropped
    gc.collect()
    assert places[0]() is not None
    assert places[1]() is None


def test_a_cpu_and_a_gpu_that_nobody_has_used_have_not_failed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not has_failed(torch.device("cpu"))
    assert not has_failed(CUDA)


@pytest.mark.parametrize(
    ("error", "is_capturing", "expected"),
    [(None, False, False), ("CUDA error", False, True), ("CUDA error", True, False), (None, None, True)],
)
def test_a_gpu_is_asked_where_it_may_be(monkeypatch, error, is_capturing, expected) -> None:
    """One that is busy has not failed; while a graph is captured a question would be an error by itself."""

    def capturing() -> bool:
        if is_capturing is None:
            raise RuntimeError("CUDA error: not even this is told")
        return is_capturing

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(error))
    assert has_failed(CUDA) is expected

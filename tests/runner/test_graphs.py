"""Which graph takes a step, in which order they are captured, and what a replay gives back; without a GPU."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planning.terms import graph_sizes, mixed_sizes
from holdfast.runner.graphs import StepGraphs
from runner.fake_graphs import POOL, FakeGraph, FakeStream, captured, use_fake_graphs

DECODE, MIXED = (1, 2, 4, 8), (16, 64)


@pytest.fixture(autouse=True)
def _fake_graphs(monkeypatch):
    use_fake_graphs(monkeypatch)


class Tape:
    """Steps that only leave a number: their size, and how many times any of them has run."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, bool]] = []
        self.seen: list[tuple[int, int]] = []
        self.logits = {
            (size, is_decode): torch.zeros(size, 3) for size in (*DECODE, *MIXED) for is_decode in (True, False)
        }
        self._step = captured(self._run)

    def _run(self, size: int, is_decode: bool) -> torch.Tensor:
        self.ran.append((size, is_decode))
        return self.logits[size, is_decode].fill_(len(self.ran))

    def run(self, size: int, is_decode: bool) -> torch.Tensor:
        return self._step(size, is_decode)

    def progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))


@pytest.mark.parametrize(
    ("num_rows", "num_logit_rows", "is_decode", "size"),
    [
        (1, 1, True, 1),
        (2, 2, True, 2),
        (3, 3, True, 4),
        (5, 5, True, 8),
        (8, 8, True, 8),
        (9, 9, True, None),
        (1, 0, False, 16),
        (2, 1, False, 16),
        (16, 6, False, 16),
        (17, 6, False, 64),
        (64, 0, False, 64),
        (65, 1, False, None),
        (16, 7, False, None),
    ],
)
def test_step_graphs_size_for_is_smallest_that_fits(num_rows, num_logit_rows, is_decode, size):
    assert StepGraphs(DECODE, MIXED, 6).size_for(num_rows, num_logit_rows, is_decode) == size


def test_step_graphs_logit_rows_never_exceed_rows():
    graphs = StepGraphs(DECODE, MIXED, 20)
    assert [graphs.logit_rows(size, is_decode=False) for size in MIXED] == [16, 20]
    assert [graphs.logit_rows(size, is_decode=True) for size in DECODE] == list(DECODE)


def test_graphs_of_more_rows_take_forks_that_want_more_logits():
    graphs = StepGraphs(DECODE, MIXED, 20)
    assert [graphs.size_for(15, num_logits, False) for num_logits in (15, 16, 17, 20, 21)] == [16, 16, 64, 64, None]
    assert [graphs.size_for(3, num_logits, True) for num_logits in (3, 4, 5, 8, 9)] == [4, 4, 8, 8, None]


def test_step_graphs_without_sizes_take_no_step():
    graphs = StepGraphs((), (), 4)
    assert graphs.size_for(1, 1, is_decode=True) is None
    assert graphs.size_for(1, 1, is_decode=False) is None


@given(
    max_num_seqs=st.integers(1, 3000),
    max_num_batched_tokens=st.integers(1, 20_000),
    num_rows=st.integers(1, 3000),
    data=st.data(),
)
def test_step_graphs_size_for_is_next_in_ladder(max_num_seqs, max_num_batched_tokens, num_rows, data):
    decode = graph_sizes(min(max_num_seqs, max_num_batched_tokens))
    graphs = StepGraphs(decode, mixed_sizes(max_num_batched_tokens), max_num_seqs)
    is_decode = data.draw(st.booleans())
    num_logits = num_rows if is_decode else data.draw(st.integers(0, min(num_rows, max_num_seqs)))
    sizes = decode if is_decode else mixed_sizes(max_num_batched_tokens)
    size = graphs.size_for(num_rows, num_logits, is_decode)
    assert size == min((size for size in sizes if size >= num_rows), default=None)
    if size is not None:
        assert num_logits <= graphs.logit_rows(size, is_decode) <= size
        assert size <= max_num_batched_tokens, "more rows than the workspace has"


def test_step_graphs_capture_warms_each_size_largest_first():
    graphs, tape, stream = StepGraphs(DECODE, MIXED, 6), Tape(), FakeStream()
    graphs.capture(tape.run, stream, tape.progress)
    keys = [(8, True), (4, True), (2, True), (1, True), (64, False), (16, False)]
    assert tape.ran == [key for key in keys for _ in range(2)]
    assert tape.seen == [(done, 6) for done in range(1, 7)]
    assert stream.num_waits == 6, "a warm-up that still runs could be captured"
    assert [graph.pool for graph in FakeGraph.made] == [POOL] * 6, "all graphs share one pool"


def test_step_graphs_replay_runs_one_graph_and_gives_its_logits():
    graphs, tape = StepGraphs(DECODE, MIXED, 6), Tape()
    graphs.capture(tape.run, FakeStream(), tape.progress)
    tape.ran.clear()
    logits = graphs.replay(4, is_decode=True)
    assert tape.ran == [(4, True)]
    assert logits is tape.logits[4, True]
    assert graphs.replay(16, is_decode=False) is tape.logits[16, False]
    assert [graph.num_replays for graph in FakeGraph.made] == [0, 1, 0, 0, 0, 1]


def test_step_graphs_replay_of_uncaptured_size_raises():
    graphs, tape = StepGraphs(DECODE, MIXED, 6), Tape()
    graphs.capture(tape.run, FakeStream(), tape.progress)
    with pytest.raises(KeyError):
        graphs.replay(4, is_decode=False)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_enabled", [True, False])
def test_step_graphs_capture_disables_and_restores_gc(fails, was_enabled):
    states: list[bool] = []

    def run(size: int, is_decode: bool) -> torch.Tensor:
        states.append(gc.isenabled())
        if fails and len(states) == 3:
            raise RuntimeError("the device failed")
        return torch.zeros(size, 3)

    (gc.enable if was_enabled else gc.disable)()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="the device failed"):
                StepGraphs((1, 2), (), 2).capture(run, FakeStream(), lambda done, total: None)
        else:
            StepGraphs((1, 2), (), 2).capture(run, FakeStream(), lambda done, total: None)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
    assert states
    assert not any(states)


def test_step_graphs_release_frees_every_graph():
    graphs, tape = StepGraphs(DECODE, MIXED, 6), Tape()
    graphs.capture(tape.run, FakeStream(), tape.progress)
    held = [weakref.ref(graph) for graph in FakeGraph.made]
    FakeGraph.made.clear()
    assert len(held) == 6
    assert all(graph() is not None for graph in held)
    graphs.release()
    assert all(graph() is None for graph in held)

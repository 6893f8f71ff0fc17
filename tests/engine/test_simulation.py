"""One million random events against the scheduler, each step fully accounted for and read back; and proof that it bites."""

import pytest

from engine.mutants import MUTANTS
from engine.simulated_world import World, solo_run
from engine.simulation import Simulation
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler

NUM_BATCHES = 20
QUICK_BATCHES = 2
BATCHES = [pytest.param(batch, marks=[pytest.mark.slow] * (batch >= QUICK_BATCHES)) for batch in range(NUM_BATCHES)]
"""A hundred thousand events each time, where planted bugs show in a few thousand; the rest with the tests that take minutes."""
WORLDS_PER_BATCH = 10
EVENTS_PER_WORLD = 5_000
NEEDED = {"arrive", "finish", "abort", "preempt", "share", "reset", "queue full", "refuse", "step", "failed step"}


def run_worlds() -> None:
    """A few thousand events: enough for every planted bug to show."""
    for seed in range(16):
        Simulation(seed).run(400)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_million_events_leave_no_leak_and_no_wrong_read(batch: int) -> None:
    seen: set[str] = set()
    num_events = 0
    for seed in range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH):
        simulation = Simulation(seed)
        simulation.run(EVENTS_PER_WORLD)
        num_events += simulation.num_events
        seen |= {kind for kind, count in simulation.counts.items() if count}
    assert num_events >= 1_000_000 // NUM_BATCHES
    assert seen == NEEDED


@pytest.mark.parametrize("seed", range(2))
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    digests = []
    for _ in range(2):
        simulation = Simulation(seed)
        simulation.run(1_500)
        digests.append(simulation.digest)
    other = Simulation(seed + 1000)
    other.run(1_500)
    assert digests[0] == digests[1] != other.digest


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=MUTANTS[name].says):
        run_worlds()


def test_without_a_bug_the_same_runs_pass() -> None:
    run_worlds()


def test_every_preemption_makes_pages_available_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = []

    def preempt(self: Scheduler):
        before = self.pool.num_available
        sequence = real(self)
        gains.append(self.pool.num_available - before)
        return sequence

    real = Scheduler._preempt_youngest
    monkeypatch.setattr(Scheduler, "_preempt_youngest", preempt)
    for seed in range(0, 40, 2):
        Simulation(seed).run(1_000)
    assert len(gains) > 50
    assert min(gains) >= 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13, 64])
@pytest.mark.parametrize("caches_prefixes", [True, False], ids=["cached", "uncached"])
def test_tokens_do_not_depend_on_the_chunk_size(chunk: int, caches_prefixes: bool) -> None:
    # Each finished sequence is compared with its solo run inside; here every chunk size has a world of its own.
    world = World(Limits(5, chunk, 40, 4), num_pages=14, max_queue=6, caches_prefixes=caches_prefixes)
    simulation = Simulation(chunk, world)
    simulation.run(1_500)
    assert simulation.counts["finish"] > 10


def test_the_solo_run_is_what_it_says() -> None:
    tokens = solo_run([3, 4, 5], b"salt", 8)
    assert tokens[:3] == [3, 4, 5]
    assert len(tokens) == 8
    assert solo_run(tokens[:6], b"salt", 8) == tokens
    assert solo_run([3, 4, 5], b"pepper", 8) != tokens

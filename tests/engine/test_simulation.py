"""Millions of random events against the scheduler, each step fully accounted for and read back; and proof that it bites.

Three million with each step booked before the next is given, two million with up to three steps in flight.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from engine.entry_mutants import ENTRY_MUTANTS
from engine.late_mutants import LATE_MUTANTS
from engine.mutants import MUTANTS
from engine.near_mutants import NEAR_MUTANTS
from engine.simulated_world import World, solo_run
from engine.simulation import Simulation
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits

NUM_BATCHES = 30
NUM_LATE_BATCHES = 22
WORLDS_PER_BATCH = 10
EVENTS_PER_WORLD = 10_000
BUGGED_SEEDS = (0, 2, 12, 4, 3, 6, 10, 14, 15, 18, 47, 5, 8, 9, 1, 24, 28, 38, 86)
"""Plain worlds and worlds with groups of all kinds, which show all planted bugs; those that show most come first."""
BUGGED_LATE_SEEDS = (7, 4, 12, 2, 8, 17, 19, 36, 34, 5, 11, 40)
BUGGED_ENTRY_SEEDS = (*range(10), 20, 24, 54)
BUGGED_NEAR_SEEDS = (0, 1, 2, 3, 6, 7, 10, 111)
NUM_EVENTS, NUM_ENTRY_EVENTS, NUM_NEAR_EVENTS = 300, 400, 200
"""In each of these worlds: enough for every planted bug to show."""
NEEDED = {"arrive", "finish", "abort", "preempt", "share", "reset", "queue full", "refuse", "step", "failed step"}
GUESSES = {"proposals", "accepted"}
LATE = GUESSES | {"late stop", "drain", "quarantined sequences", "quarantined pages", "surplus tokens"}


def beginning_with(seeds: tuple[int, ...], first: int | None) -> list[int]:
    return sorted(seeds, key=lambda seed: seed != first)


def run_worlds(first: int | None = None) -> None:
    """A few thousand events: enough for every planted bug to show."""
    for seed in beginning_with(BUGGED_SEEDS, first):
        Simulation(seed).run(NUM_EVENTS)


def run_late_worlds(first: int | None = None) -> None:
    """Like the base, with steps in flight."""
    for seed in beginning_with(BUGGED_LATE_SEEDS, first):
        Simulation(seed, World.late(seed)).run(NUM_EVENTS)


def run_compressed_worlds(first: int | None = None) -> None:
    """Like the base, with compressed rows."""
    for seed in beginning_with(BUGGED_ENTRY_SEEDS, first):
        Simulation(seed, World.compressed(seed)).run(NUM_ENTRY_EVENTS)


def run_near_worlds(first: int | None = None) -> None:
    """Like the base, with near pages."""
    for seed in beginning_with(BUGGED_NEAR_SEEDS, first):
        Simulation(seed, World.near(seed)).run(NUM_NEAR_EVENTS)


def run_all(seeds: Iterable[int], num_events: int, world: Callable[[int], World] = World.from_seed) -> set[str]:
    """So many events in each world; what happened in them."""
    counts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed, world(seed))
        simulation.run(num_events)
        assert simulation.num_events >= num_events
        counts += simulation.counts
        seen += simulation.seen
    return set(counts) | set(seen)


def test_simulation_sample_is_sound() -> None:
    """The worlds of planted bugs, without one."""
    assert run_all(BUGGED_SEEDS, NUM_EVENTS) >= NEEDED


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_three_million_events_leave_no_leak_and_no_wrong_read(batch: int) -> None:
    assert NUM_BATCHES * WORLDS_PER_BATCH * EVENTS_PER_WORLD >= 3_000_000
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD) >= NEEDED


def test_sample_with_late_results_is_sound() -> None:
    assert run_all(BUGGED_LATE_SEEDS, NUM_EVENTS, World.late) >= NEEDED | LATE


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_LATE_BATCHES))
def test_simulation_of_two_million_late_events_is_sound(batch: int) -> None:
    assert NUM_LATE_BATCHES * WORLDS_PER_BATCH * EVENTS_PER_WORLD >= 2_000_000
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    # Pages run short in few worlds of this kind, and not in all of them can anybody guess.
    assert run_all(seeds, EVENTS_PER_WORLD, World.late) >= (NEEDED | LATE) - GUESSES - {"preempt"}


def test_sample_with_compressed_rows_is_sound() -> None:
    assert run_all(BUGGED_ENTRY_SEEDS, NUM_ENTRY_EVENTS, World.compressed) >= (NEEDED | LATE) - GUESSES


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_million_events_with_compressed_rows_are_sound(batch: int) -> None:
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD, World.compressed) >= NEEDED


def test_sample_with_near_pages_is_sound() -> None:
    assert run_all(BUGGED_NEAR_SEEDS, NUM_NEAR_EVENTS, World.near) >= NEEDED - {"queue full", "refuse"} | {
        "forks",
        "proposals",
    }


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_million_events_with_near_pages_are_sound(batch: int) -> None:
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD, World.near) >= NEEDED


def test_sample_of_invariant_worlds_is_sound() -> None:
    assert run_all(range(16), 300, World.invariant) >= NEEDED | {"rows again"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_simulation_of_million_invariant_events_is_sound(batch: int) -> None:
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD, World.invariant) >= NEEDED


def test_simulation_of_bursts_has_no_leak_and_no_wrong_read() -> None:
    assert run_all(range(24), 150, World.together) >= NEEDED - {"queue full"} | {"bursts", "forks"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_simulation_of_bursts_runs_a_million_events(batch: int) -> None:
    seeds = range(batch * 12, (batch + 1) * 12)
    assert run_all(seeds, EVENTS_PER_WORLD, World.together) >= NEEDED - {"preempt"} | {"bursts", "forks"}


def test_late_worlds_are_of_every_kind() -> None:
    worlds = [World.late(seed) for seed in range(NUM_LATE_BATCHES * WORLDS_PER_BATCH)]
    assert {world.run_ahead for world in worlds} == {0, 1, 2}
    assert all(world.is_late for world in worlds)
    assert {world.travels for world in worlds} == {True, False}
    guessing = [world for world in worlds if world.guess_share]
    assert len(guessing) > 40
    assert {world.run_ahead for world in guessing} == {0, 1, 2}
    assert not any(group.is_state for world in guessing for group in world.groups)
    assert any(group.window for world in guessing for group in world.groups)


def test_worlds_have_groups_of_every_kind() -> None:
    worlds = [World.from_seed(seed) for seed in range(NUM_BATCHES * WORLDS_PER_BATCH)]
    assert sum(world.groups == (CacheGroup("whole context", world.limits.page_tokens),) for world in worlds) >= 150
    every = [own for world in worlds for own in world.shadows]
    assert {own.ratio for own in every} == {1, 4, 128}
    windows = [(own.group.window, own.group.page_tokens) for own in every if own.group.window is not None]
    assert any(window == 1 for window, _ in windows)
    assert any(window < page_tokens for window, page_tokens in windows)
    assert any(window % page_tokens for window, page_tokens in windows)
    contexts = [(own.group.window or 0, world.limits.max_model_len) for world in worlds for own in world.shadows]
    assert any(window > context for window, context in contexts)
    assert {bool(own.group.state_period) for own in every if own.group.is_state} == {True, False}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_simulation_trace_depends_on_seed(seed: int) -> None:
    digests = []
    for _ in range(2):
        simulation = Simulation(seed)
        simulation.run(500)
        digests.append(simulation.digest)
    other = Simulation(seed + 1000)
    other.run(500)
    assert digests[0] == digests[1] != other.digest


@pytest.mark.parametrize("name", MUTANTS)
def test_simulation_catches_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=MUTANTS[name].says):
        run_worlds(MUTANTS[name].first_seed)


@pytest.mark.parametrize("name", LATE_MUTANTS)
def test_simulation_catches_planted_bug_of_steps_in_flight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LATE_MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=LATE_MUTANTS[name].says):
        run_late_worlds(LATE_MUTANTS[name].first_seed)


@pytest.mark.parametrize("name", ENTRY_MUTANTS)
def test_simulation_catches_planted_bug_of_compressed_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ENTRY_MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=ENTRY_MUTANTS[name].says):
        run_compressed_worlds(ENTRY_MUTANTS[name].first_seed)


@pytest.mark.parametrize("name", NEAR_MUTANTS)
def test_simulation_catches_planted_bug_of_near_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    NEAR_MUTANTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError, match=NEAR_MUTANTS[name].says):
        run_near_worlds(NEAR_MUTANTS[name].first_seed)


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13, 64])
@pytest.mark.parametrize("caches_prefixes", [True, False], ids=["cached", "uncached"])
def test_tokens_do_not_depend_on_the_chunk_size(chunk: int, caches_prefixes: bool) -> None:
    # Each finished sequence is compared with its solo run inside; here every chunk size has a world of its own.
    world = World(Limits(5, chunk, 40, 4), num_pages=14, max_queue=6, caches_prefixes=caches_prefixes)
    simulation = Simulation(chunk, world)
    simulation.run(800)
    assert simulation.counts["finish"] > 10


def test_solo_run_depends_on_prompt_and_salt() -> None:
    tokens = solo_run([3, 4, 5], b"salt", 8)
    assert tokens[:3] == [3, 4, 5]
    assert len(tokens) == 8
    assert solo_run(tokens[:6], b"salt", 8) == tokens
    assert solo_run([3, 4, 5], b"pepper", 8) != tokens

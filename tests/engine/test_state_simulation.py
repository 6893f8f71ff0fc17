"""Millions of random events against the scheduler with states outside the pages; each state is compared when a sequence goes on.

The planted bugs that it has to find are in mutants/states.toml, beside this folder.
"""

import pytest

from engine.simulated_world import World
from engine.test_simulation import EVENTS_PER_WORLD, NEEDED, WORLDS_PER_BATCH, run_all

NUM_BATCHES = 30
SEEDS = range(24)
"""Worlds that show all planted bugs."""
NUM_EVENTS = 300
STATES = {"snapshots read", "snapshots written", "lone rows", "rows again", "forks"}


def test_sample_of_worlds_with_states_is_sound() -> None:
    assert run_all(SEEDS, NUM_EVENTS, World.stateful) >= NEEDED | STATES


def test_sample_of_worlds_with_states_and_drafts_is_sound() -> None:
    seen = run_all(SEEDS, NUM_EVENTS, World.drafting)
    assert seen >= STATES | {"proposals", "accepted", "snapshots read", "preempt"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_simulation_of_three_million_events_with_drafts_is_sound(batch: int) -> None:
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD, World.drafting) >= STATES | {"proposals", "accepted"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_simulation_of_three_million_events_with_states_is_sound(batch: int) -> None:
    assert NUM_BATCHES * WORLDS_PER_BATCH * EVENTS_PER_WORLD >= 3_000_000
    seeds = range(batch * WORLDS_PER_BATCH, (batch + 1) * WORLDS_PER_BATCH)
    assert run_all(seeds, EVENTS_PER_WORLD, World.stateful) >= NEEDED | {"snapshots read", "snapshots written"}


def test_worlds_with_states_are_of_every_kind() -> None:
    worlds = [World.stateful(seed) for seed in range(120)]
    rules = [world.state_rule for world in worlds if world.state_rule is not None]
    assert len(rules) == len(worlds)
    assert {0, 1, 2} < {rule.num_snapshots for rule in rules}
    assert {world.run_ahead for world in worlds} >= {0, 1, 2, 3}
    assert {world.num_stages for world in worlds} == {1, 2, 3, 4}
    blocks = [(world.block, world.limits.page_tokens, world.grid) for world in worlds]
    assert any(page < block > grid for block, page, grid in blocks)
    for kind in ("is_late", "is_paced", "comes_together", "has_priorities", "travels"):
        assert {getattr(world, kind) for world in worlds} == {True, False}, kind
    assert any(group.window for world in worlds for group in world.groups)

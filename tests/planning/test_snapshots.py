"""Snapshots of states in plans: their share of the pool, the least number, what others leave."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.planning.plan import plan_runner
from holdfast.planning.snapshots import LEAST_SNAPSHOTS, MOST_SNAPSHOTS, POOL_SHARE, most_snapshots
from planning.plan_cases import plan_request


@given(st.integers(1, 2**28), st.integers(0, 2**40), st.integers(-(2**30), 2**40))
def test_most_snapshots_keeps_the_share_of_the_pool_that_is_left(place: int, pool: int, spare: int) -> None:
    count = most_snapshots(place, pool, spare)
    taken = (count - LEAST_SNAPSHOTS) * place
    assert LEAST_SNAPSHOTS <= count <= MOST_SNAPSHOTS
    assert count == LEAST_SNAPSHOTS or taken <= spare
    assert count == LEAST_SNAPSHOTS or count * place * POOL_SHARE <= pool - taken
    larger = count + 1
    may_grow = larger <= MOST_SNAPSHOTS and taken + place <= spare
    assert not may_grow or larger * place * POOL_SHARE > pool - taken - place


def test_plan_of_a_published_model_counts_its_snapshots() -> None:
    plan = plan_runner(plan_request("Qwen3.5-27B", max_model_len=65536))
    count, place_bytes = plan.resolved.num_snapshots, plan.kv_bytes_per_sequence
    assert place_bytes == 48 * 3_207_168
    assert count > LEAST_SNAPSHOTS
    assert count * place_bytes * POOL_SHARE <= plan.memory.kv_bytes < (count + 2) * place_bytes * (POOL_SHARE + 1)
    places = plan.resolved.limits.max_num_seqs + count
    states = sum(term.num_bytes for term in plan.memory.terms if term.owner.startswith("kv state/"))
    assert states == places * place_bytes


def test_plan_says_what_was_given() -> None:
    none = plan_runner(plan_request("Qwen3.5-27B", max_model_len=65536, state_snapshots=0))
    assert none.resolved.num_snapshots == 0
    other = plan_runner(plan_request("Qwen3-8B", state_snapshots=4))
    assert other.resolved.num_snapshots == 0
    (choice,) = (one for one in other.resolved.choices if one.name == "state_snapshots")
    assert choice.reason == "given, but no layer keeps a state"
    off = plan_runner(plan_request("Qwen3.5-27B", max_model_len=65536, enable_prefix_caching=False))
    assert off.resolved.num_snapshots == 0

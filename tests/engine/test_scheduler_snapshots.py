"""The scheduler with states: how prompts are cut, where snapshots are taken, and on which a sequence starts."""

import pytest

from engine.scheduling import PARAMS, has_work, run, sequence, shape
from holdfast.cache.states import NO_PLACE, StateRule
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sequence import LiveStep, Sequence

GRID = 4


def make(
    num_snapshots: int = 4,
    snapshot_tokens: int = 1000,
    budget: int = 64,
    num_pages: int = 64,
    page_tokens: int = 4,
    max_num_seqs: int = 8,
    num_drafts: int = 0,
) -> Scheduler:
    limits = Limits(max_num_seqs, budget, 128, page_tokens, max_sampled_rows=32)
    rule = StateRule(GRID, num_snapshots, snapshot_tokens, num_drafts)
    return Scheduler(limits, num_pages, True, 100, prefix_root=b"root", state_rule=rule)


def kept(step: LiveStep) -> dict[int, tuple[int, int]]:
    """By sequence: the snapshot that its slot starts with, and the one that gets its state."""
    starts = {one.slot: one.state_from for one in step.step.admitted}
    items = zip(step.scheduled, step.step.items, strict=True)
    return {own.sequence.sequence_id: (starts.get(item.slot, NO_PLACE), item.state_to) for own, item in items}


def shapes(scheduler: Scheduler) -> list[list[tuple[int, int, int]]]:
    found = []
    while has_work(scheduler):
        found.append(shape(run(scheduler)))
    return found


def test_prompt_is_cut_at_the_grid_and_at_its_last_block():
    scheduler = make(budget=10)
    scheduler.add(sequence(1, 23, max_tokens=2))
    assert shapes(scheduler) == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)], [(1, 20, 3)], [(1, 23, 1)]]


def test_last_row_alone_on_its_chunk_is_a_piece():
    scheduler = make(num_snapshots=0)
    scheduler.add(sequence(1, 21, max_tokens=1))
    scheduler.add(sequence(2, 5, max_tokens=1))
    scheduler.add(sequence(3, 1, max_tokens=1))
    assert shapes(scheduler) == [[(1, 0, 20), (2, 0, 4), (3, 0, 1)], [(1, 20, 1), (2, 4, 1)]]


def test_same_prompt_again_starts_on_the_snapshot_of_its_last_block():
    scheduler = make()
    scheduler.add(sequence(1, [*range(23)], max_tokens=1))
    first, second = run(scheduler), run(scheduler)
    assert (kept(first), kept(second)) == ({1: (NO_PLACE, 0)}, {1: (NO_PLACE, NO_PLACE)})
    again = sequence(2, [*range(23)], max_tokens=1)
    scheduler.add(again)
    step = run(scheduler)
    assert (shape(step), kept(step)) == ([(2, 20, 3)], {2: (0, NO_PLACE)})
    assert (again.num_cached_tokens, scheduler.num_snapshot_hits) == (20, 1)


def test_snapshots_every_interval_and_where_pages_end():
    scheduler = make(snapshot_tokens=8)
    scheduler.add(sequence(1, [*range(30)], max_tokens=1))
    assert [step[0][1:] for step in shapes(scheduler)] == [(0, 8), (8, 8), (16, 8), (24, 4), (28, 2)]
    scheduler.add(sequence(2, [*range(22), 7, 8, 9, 10], max_tokens=1))
    # Pages match up to 20, the deepest snapshot before is at 16; 24 is its last block.
    assert [step[0][1:] for step in shapes(scheduler)] == [(16, 4), (20, 4), (24, 2)]
    scheduler.add(sequence(3, [*range(22), 1, 1], max_tokens=1))
    assert [step[0][1:] for step in shapes(scheduler)] == [(20, 4)]


def test_pool_without_snapshots_hits_nothing_and_forks():
    scheduler = make(num_snapshots=0)
    scheduler.add(sequence(1, [*range(22)], max_tokens=3))
    scheduler.add(sequence(2, [*range(22)], max_tokens=3))
    step = run(scheduler)
    assert [item.source is None for item in step.scheduled] == [True, False]
    scheduler.add(sequence(3, [*range(22)], max_tokens=3))
    assert (3, 0, 22) in shape(run(scheduler))
    assert scheduler.num_prefix_hit_tokens == 21
    shapes(scheduler)


def test_followers_start_on_a_snapshot_at_their_common_block():
    scheduler = make()
    stem = [*range(18)]
    for number in range(4):
        scheduler.add(sequence(number, [*stem, *[50 + number] * 12], max_tokens=1))
    assert shape(run(scheduler)) == [(0, 0, 16)]
    step = run(scheduler)
    # Each start is cut where the next one differs: there is a snapshot already, so at the last block.
    assert shape(step) == [(0, 16, 12), (1, 16, 12), (2, 16, 12), (3, 16, 12)]
    assert [place for place, _ in kept(step).values()] == [NO_PLACE, 0, 0, 0]


def test_snapshot_of_a_step_is_read_in_the_next_one():
    scheduler = make()
    scheduler.add(sequence(1, [*range(23)], max_tokens=4))
    scheduler.add(sequence(2, [*range(20), 99, 98], max_tokens=4))
    first = scheduler.schedule()
    assert first is not None
    assert shape(first) == [(1, 0, 20)]
    second = scheduler.schedule()
    assert second is not None
    assert (shape(second), kept(second)[2]) == ([(1, 20, 3), (2, 20, 2)], (kept(first)[1][1], NO_PLACE))
    scheduler.check()


def test_place_in_use_by_a_step_in_flight_is_not_written():
    scheduler = make(num_snapshots=1)
    scheduler.add(sequence(1, [*range(23)], max_tokens=4))
    first = scheduler.schedule()
    scheduler.add(sequence(2, 10, max_tokens=4))
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (kept(first), kept(second)) == ({1: (NO_PLACE, 0)}, {1: (NO_PLACE, -1), 2: (NO_PLACE, NO_PLACE)})
    scheduler.check()


def test_sequence_overwrites_its_own_snapshot_in_flight():
    scheduler = make(num_snapshots=2, snapshot_tokens=8)
    scheduler.add(sequence(1, 21, max_tokens=1))
    shapes(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.add(sequence(2, 7, max_tokens=30))
    run(scheduler)
    scheduler.add(sequence(3, 30, max_tokens=4))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [kept(step)[3][1] for step in steps if step is not None] == [1, 1, 1, 1]
    scheduler.check()
    assert sorted(entry.index for entry in scheduler.prefix.by_snapshot.values()) == [0, 6]


def test_snapshot_goes_with_its_pages():
    scheduler = make(num_pages=8)
    scheduler.add(sequence(1, 16, max_tokens=1))
    shapes(scheduler)
    assert scheduler.snapshots is not None
    assert scheduler.snapshots.num_held == 1
    scheduler.add(sequence(2, 30, max_tokens=1))
    shapes(scheduler)
    assert [one.index for one in scheduler.prefix.by_snapshot.values()] == [6]
    assert scheduler.snapshots.num_held == 1


def test_conversation_with_two_snapshots_spares_the_other_one():
    scheduler = make(num_snapshots=2)
    talks = [[number, *range(20)] for number in range(2)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            one = Sequence(10 * turn + number, list(talk), len(talk), PARAMS, 0, 1)
            scheduler.add(one)
            shapes(scheduler)
            assert one.num_cached_tokens == (0 if turn == 0 else (len(talk) - 13 - 1) // 4 * 4), f"{turn=} {number=}"
            talk += [100 + turn] * 13


def test_dropped_steps_forget_their_snapshots():
    scheduler = make()
    one = sequence(1, [*range(23)], max_tokens=4)
    scheduler.add(one)
    step = scheduler.schedule()
    assert step is not None
    assert kept(step) == {1: (NO_PLACE, 0)}
    scheduler.forget_steps()
    scheduler.check()
    assert scheduler.snapshots is not None
    assert scheduler.snapshots.num_held == 0
    assert shape(run(scheduler)) == [(1, 0, 20)]


def test_reset_forgets_snapshots():
    scheduler = make()
    scheduler.add(sequence(1, [*range(23)], max_tokens=1))
    shapes(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check()
    scheduler.add(sequence(2, [*range(23)], max_tokens=1))
    assert shapes(scheduler)[0] == [(2, 0, 20)]


def test_preempted_sequence_recomputes_its_output_row_by_row():
    scheduler = make(num_pages=7)
    first, second = sequence(1, 9, max_tokens=18), sequence(2, 6, max_tokens=12)
    for one in (first, second):
        scheduler.add(one)
    while not scheduler.num_preemptions and has_work(scheduler):
        run(scheduler)
    assert second.num_tokens > 7
    found: list[tuple[int, int]] = []
    while has_work(scheduler):
        found += [(start, count) for number, start, count in shape(run(scheduler)) if number == 2]
    assert found[0] in ((0, 4), (4, 2))
    assert [one for one in found if one[0] >= 6] == [(place, 1) for place in range(6, 17)]


def test_budget_below_the_grid_is_refused():
    with pytest.raises(AssertionError, match="grid"):
        make(budget=3)


def test_limit_of_prompt_rows_leaves_a_piece():
    scheduler = make(num_snapshots=0)
    scheduler.add(sequence(1, 4, max_tokens=30))
    run(scheduler)
    scheduler.add(sequence(2, 20, max_tokens=1))
    # A limit of no rows is a look at a decode step.
    found = [shape(run(scheduler, max_prompt_rows=limit)) for limit in (0, 1, 3, 9)]
    assert found[0] == [(1, 4, 1)]
    assert [step[1] for step in found[1:]] == [(2, 0, 4), (2, 4, 4), (2, 8, 8)]


def test_short_prompts_share_what_is_left_of_a_step():
    scheduler = make(num_snapshots=0, budget=8)
    for number, length in enumerate((3, 4, 2, 6)):
        scheduler.add(sequence(number, length, max_tokens=1))
    # One row is left after the second, and the third needs both of its own.
    assert shapes(scheduler)[0] == [(0, 0, 3), (1, 0, 4)]


def test_fork_shares_blocks_without_a_snapshot():
    scheduler = make(num_snapshots=1)
    first, second = sequence(1, [*range(23)], max_tokens=3), sequence(2, [*range(23)], max_tokens=3)
    for one in (first, second):
        scheduler.add(one)
    run(scheduler)
    assert scheduler.snapshots is not None
    scheduler.snapshots.on_evict(0)
    step = run(scheduler)
    assert [item.source for item in step.scheduled] == [None, first]
    assert second.tables[0][:5] == first.tables[0][:5]
    assert step.step.admitted[0].state_from == NO_PLACE


def test_pool_without_snapshots_makes_no_prompt_wait():
    for num_snapshots, second in ((0, [(1, 0, 4)]), (1, [])):
        scheduler = make(num_snapshots=num_snapshots)
        for number in range(2):
            scheduler.add(sequence(number, [*range(32), *[50 + number] * 8], max_tokens=1))
        found = [shape(run(scheduler, max_prompt_rows=8)) for _ in range(2)]
        assert found == [[(0, 0, 8)], [(0, 8, 4), *second]]


def test_dropped_step_forgets_a_snapshot_of_cached_pages():
    scheduler = make(num_snapshots=1)
    scheduler.add(sequence(1, [*range(23)], max_tokens=1))
    shapes(scheduler)
    scheduler.add(sequence(2, 30, max_tokens=1))  # takes the only place
    shapes(scheduler)
    scheduler.add(sequence(3, [*range(23)], max_tokens=4))
    step = scheduler.schedule()
    assert step is not None
    assert (shape(step), kept(step)[3]) == ([(3, 0, 20)], (NO_PLACE, 0))
    scheduler.forget_steps()
    scheduler.check()
    assert scheduler.snapshots is not None
    assert (scheduler.snapshots.num_held, scheduler.snapshots.pending()) == (0, [])
    assert scheduler.prefix.by_snapshot == {}


def test_pages_of_outputs_are_not_cached():
    scheduler = make()
    talk = sequence(1, [*range(9)], max_tokens=12)
    scheduler.add(talk)
    shapes(scheduler)
    assert len(scheduler.prefix) == 2
    scheduler.add(sequence(2, [*talk.token_ids, 99], max_tokens=1))
    assert shape(run(scheduler)) == [(2, 8, 12)]


def test_preempted_sequence_starts_on_states_of_its_prompt_alone():
    """A prompt that holds its output was computed in chunks; its own rows come one by one."""
    scheduler = make(num_pages=20, snapshot_tokens=4, num_snapshots=16)
    stem = [*range(200, 208)]
    talk, second = sequence(1, [*stem, *[7] * 12, 99], max_tokens=40), sequence(2, stem, max_tokens=40)
    for one in (talk, second):
        scheduler.add(one)
        run(scheduler)
    while second.num_tokens < 16:
        run(scheduler)
    while not second.num_preemptions:
        scheduler.preempt_last()
    starts: list[tuple[int, int]] = []
    while not starts:
        starts = [(start, count) for number, start, count in shape(run(scheduler)) if number == 2]
    assert starts == [(8, 1)]


def test_block_has_one_snapshot():
    scheduler = make()
    one = sequence(1, [*range(23)], max_tokens=4)
    scheduler.add(one)
    run(scheduler)
    chain = scheduler._tracks[1].chain
    assert scheduler.prefix.take_snapshot(chain, 20, 2, is_between=False) == NO_PLACE
    assert scheduler.prefix.take_snapshot(chain, 16, 2, is_between=False) == NO_PLACE
    scheduler.check()


def four(sequence: Sequence) -> list[int]:
    return [1, 2, 3, 4]


def drafting(scheduler: Scheduler, chosen: tuple[int, ...] = (7,)) -> tuple[int, int, tuple[int, ...]]:
    """Run a step of one sequence; where it begins, its rows, and the draft tokens among them."""
    step = scheduler.schedule(four)
    assert step is not None
    (item,) = step.scheduled
    scheduler.complete(step, [chosen if item.samples else ()])
    scheduler.check()
    return item.start, item.num_new_tokens, item.proposals


@pytest.mark.parametrize("num_drafts", [0, 2, 4, 6])
def test_drafts_follow_single_rows_up_to_what_slots_keep(num_drafts: int):
    scheduler, drafts = make(num_drafts=num_drafts), (1, 2, 3, 4)[:num_drafts]
    one = sequence(1, 9, max_tokens=40)
    one.may_speculate = True
    scheduler.add(one)
    assert drafting(scheduler) == (0, 8, ())
    assert drafting(scheduler, (*drafts[:1], 7)) == (8, 1 + len(drafts), drafts), "a last row alone on its chunk"
    after = 9 + len(drafts[:1])
    assert drafting(scheduler) == (after, 1 + len(drafts), drafts)
    scheduler.preempt_last()
    assert drafting(scheduler) == (8, 1, ()), "from its snapshot"
    for start in range(9, after + 1):
        assert drafting(scheduler) == (start, 1, ()), "output is computed again row by row"
    assert drafting(scheduler) == (after + 1, 1 + len(drafts), drafts)

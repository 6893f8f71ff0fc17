"""Scheduler with several cache groups: what is given back, what is claimed, and what is refused."""

import pytest

from engine.scheduling import PARAMS, has_work, run, sequence, shape
from for_each import for_each
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import Limits
from holdfast.engine.page_needs import PageNeeds
from holdfast.engine.queues import SlotPool
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import RequestError
from holdfast.request.sequence import Sequence

WHOLE, WINDOW = CacheGroup("whole context", 4), CacheGroup("window of 8", 4, window=8)
STATE = CacheGroup("state", 0, state_pages=2)


def make(*groups: CacheGroup, num_pages: int = 32, budget: int = 16, caching: bool = True) -> Scheduler:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=128, page_tokens=4)
    return Scheduler(limits, num_pages, caching, 100, groups=groups, prefix_root=b"root")


def held(one: Sequence) -> list[int]:
    return [len(table) - table.count(HOLE) for table in one.tables]


def test_window_group_frees_pages_no_later_token_sees() -> None:
    scheduler = make(WHOLE, WINDOW)
    one = sequence(0, 30, max_tokens=40)
    scheduler.add(one)
    for _ in range(2):
        run(scheduler)
    assert one.num_computed == 30
    assert held(one) == [8, 3]
    assert one.tables[1][:5] == [HOLE] * 5
    assert scheduler.pages_by_group() == {"whole context": 8, "window of 8": 3}
    while has_work(scheduler):
        run(scheduler)
        if one.tables[0]:
            assert held(one)[1] <= WINDOW.most_held(1)
    assert scheduler.pool.num_available == 32


def test_window_alone_runs_sequences_longer_than_the_pool() -> None:
    scheduler = make(WINDOW, num_pages=8)
    one = sequence(0, 100, max_tokens=20)
    scheduler.add(one)
    while has_work(scheduler):
        run(scheduler)
    assert one.num_output_tokens == 20
    assert scheduler.num_preemptions == 0


def test_state_group_keeps_its_pages_until_end() -> None:
    scheduler = make(WHOLE, STATE)
    one = sequence(0, 20, max_tokens=3)
    scheduler.add(one)
    states = []
    while has_work(scheduler):
        run(scheduler)
        states.append(list(one.tables[1]))
    assert len(states[0]) == 2
    assert states[0] == states[1]
    assert scheduler.pool.num_available == 32


def test_state_restarts_after_a_dropped_step() -> None:
    scheduler = make(WHOLE, STATE)
    one = sequence(0, 30, max_tokens=3)
    scheduler.add(one)
    assert shape(run(scheduler)) == [(0, 0, 16)]
    assert shape(scheduler.schedule()) == [(0, 16, 14)]
    scheduler.forget_steps()
    assert shape(scheduler.schedule()) == [(0, 0, 16)], "what the state held is not known"
    scheduler.check()


@for_each(
    "groups, num_pages, words",
    [
        ((WHOLE,), 7, "the KV cache holds 28 tokens"),
        ((WINDOW,), 6, "the KV cache holds 6 pages, and such a sequence needs 7"),
        ((WHOLE, WINDOW), 14, "the KV cache holds 14 pages, and such a sequence needs 15"),
        ((WHOLE, STATE), 9, "the KV cache holds 9 pages, and such a sequence needs 10"),
    ],
)
def test_sequence_that_never_fits_names_the_capacity(groups, num_pages: int, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(*groups, num_pages=num_pages).add(sequence(0, 29, max_tokens=3))
    assert caught.value.values["capacity"] == words
    roomy = make(*groups, num_pages=num_pages + 1)
    roomy.add(sequence(0, 29, max_tokens=3))
    while has_work(roomy):
        run(roomy)


def test_claim_is_bounded_by_the_window_and_counts_shared_pages() -> None:
    needs = PageNeeds(Limits(8, 16, 128, 4), 64, (WINDOW,))

    def claim(num_tokens: int, num_computed: int, table: list[int], is_shared=lambda page: False) -> int:
        one = Sequence(0, [0] * num_tokens, num_tokens, PARAMS, 0, 50, tables=[table])
        return needs.claim(one, [table], num_computed, 120, is_shared)

    assert claim(100, 0, []) == WINDOW.most_held(16) == 7
    decoding = [*[HOLE] * 23, 1, 2, 3]
    assert claim(102, 101, decoding) == 0, "a page more, and one comes back"
    assert claim(102, 101, decoding, lambda page: page == 1) == 1, "it is shared"
    assert claim(102, 101, decoding, lambda page: page == 3) == 0, "it stays anyway"


def test_sequences_that_share_a_window_move_on_apart() -> None:
    scheduler = make(WINDOW, num_pages=24)
    prompt = list(range(24))
    first, second = sequence(0, prompt, max_tokens=30), sequence(1, [*prompt, 5, 5], max_tokens=30)
    scheduler.add(first)
    run(scheduler)
    run(scheduler)
    scheduler.add(second)
    assert shape(run(scheduler))[-1] == (1, 24, 2)
    assert set(first.tables[0]) & set(second.tables[0]) > {HOLE}
    while has_work(scheduler):
        run(scheduler)
    assert scheduler.num_preemptions == 0


def test_blocked_sequence_starts_once_its_hit_is_shared_less() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64, page_tokens=2)
    scheduler = Scheduler(limits, 7, True, 100, groups=[CacheGroup("window of 4", 2, window=4)], prefix_root=b"root")
    first, second = sequence(0, list(range(8)), max_tokens=10), sequence(1, list(range(11)), max_tokens=5)
    scheduler.add(first)
    for _ in range(2):
        run(scheduler)
    scheduler.add(second)
    # Free pages and claims stay as they are: the first takes a page for each that its window gives back.
    left = [(shape(run(scheduler)), scheduler.pool.num_available) for _ in range(3)]
    assert left == [([(0, position, 1)], 5) for position in (8, 9, 10)]
    assert shape(run(scheduler)) == [(0, 11, 1), (1, 8, 3)]
    while has_work(scheduler):
        run(scheduler)
    assert scheduler.num_preemptions == 0


def test_pages_of_groups_with_one_name_add_up() -> None:
    scheduler = make(WHOLE, CacheGroup("whole context", 8), WINDOW)
    scheduler.add(sequence(0, 14, max_tokens=4))
    run(scheduler)
    assert scheduler.pages_by_group() == {"whole context": 4 + 2, "window of 8": 3}
    assert scheduler.kv_usage == 9 / 32


def test_lowest_free_slot_is_taken_first() -> None:
    slots = SlotPool(6)
    assert [slots.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    for slot in (3, 0, 4, 1):
        slots.put(slot)
    assert slots.num_free == 5
    assert [slots.take() for _ in range(5)] == [0, 1, 3, 4, 5]
    slots.put(2)
    slots.check([0, 1, 3, 4, 5])


@for_each("num_filled", [0, 1])
def test_blocked_sequence_is_tried_again_once_a_hole_is_filled(num_filled: int) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64, page_tokens=2)
    scheduler = Scheduler(limits, 7, True, 100, groups=[CacheGroup("window of 4", 2, window=4)], prefix_root=b"root")
    for number, num_prompt, max_tokens in ((0, 8, 10), (1, 11, 5)):
        scheduler.add(sequence(number, list(range(num_prompt)), max_tokens=max_tokens))
        for _ in range(2):
            run(scheduler)
    tries: list[int] = []
    match = scheduler.prefix.match
    scheduler.prefix.match = lambda *values: (tries.append(1), match(*values))[1]  # type: ignore[method-assign]
    scheduler.prefix.num_filled += num_filled
    scheduler.schedule()
    assert len(tries) == num_filled, "without a change it is not tried"

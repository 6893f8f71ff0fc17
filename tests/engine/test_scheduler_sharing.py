"""Scheduler with prefix caching: which pages are shared, which must never be, and what is counted."""

import pytest

from engine.scheduling import make, run, sequence, shape


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    scheduler = make()
    prompt = list(range(10))
    scheduler.add(sequence(0, prompt, max_tokens=1))
    run(scheduler)
    again = sequence(1, prompt, max_tokens=1)
    scheduler.add(again)
    assert shape(run(scheduler)) == [(1, 8, 2)]
    assert again.num_cached_tokens == 8
    assert (scheduler.num_prefix_query_tokens, scheduler.num_prefix_hit_tokens) == (20, 8)


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    scheduler = make()
    prompt = list(range(length))
    for number in range(2):
        scheduler.add(sequence(number, prompt, max_tokens=1))
        step = run(scheduler)
    assert shape(step) == [(1, hit, length - hit)]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make()
    first = sequence(0, [1, 2, 3], max_tokens=6)
    scheduler.add(first)
    while scheduler.has_work:
        run(scheduler)
    scheduler.add(sequence(1, [*first.token_ids, 5, 6], max_tokens=1))
    assert shape(run(scheduler)) == [(1, 8, 3)]


def test_running_sequences_share_pages_and_the_last_owner_leaves_them_cached() -> None:
    scheduler = make()
    prompt = list(range(9))
    first, second = sequence(0, prompt), sequence(1, prompt)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    run(scheduler)
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert scheduler.kv_usage == 4 / 16
    scheduler.finish(first)
    scheduler.check()
    scheduler.finish(second)
    scheduler.check()
    assert scheduler.kv_usage == 0
    assert scheduler.pool.num_cached == 2


def test_pages_of_the_same_step_are_not_shared() -> None:
    scheduler = make()
    prompt = list(range(9))
    for number in range(2):
        scheduler.add(sequence(number, prompt))
    assert shape(run(scheduler)) == [(0, 0, 9), (1, 0, 9)]


@pytest.mark.parametrize("caching", [True, False], ids=["salt or opt-out", "no caching"])
def test_who_must_not_share_does_not(caching: bool) -> None:
    scheduler = make(caching=caching)
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=1))
    run(scheduler)
    others = {"cache_salt": b"other"} if caching else {}
    scheduler.add(sequence(1, prompt, max_tokens=1, **others))
    assert shape(run(scheduler)) == [(1, 0, 9)]
    opted_out = sequence(2, prompt, max_tokens=1, use_prefix_cache=False)
    scheduler.add(opted_out)
    assert shape(run(scheduler)) == [(2, 0, 9)]
    assert opted_out.num_cached_tokens == 0
    assert scheduler.pool.num_cached == (4 if caching else 0)


def test_one_that_takes_no_hits_still_leaves_its_pages() -> None:
    scheduler = make()
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=1, use_prefix_cache=False))
    run(scheduler)
    scheduler.add(sequence(1, prompt, max_tokens=1))
    assert shape(run(scheduler)) == [(1, 8, 1)]
    assert (scheduler.num_prefix_query_tokens, scheduler.num_prefix_hit_tokens) == (9, 8)


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    scheduler = make(num_pages=10, page_tokens=2, max_model_len=20)
    old, young = sequence(0, 4, max_tokens=14), sequence(1, 5, max_tokens=12)
    for one in (old, young):
        scheduler.add(one)
    while not young.num_preemptions:
        run(scheduler)
    scheduler.finish(old)
    step = run(scheduler)
    assert step.scheduled[0].sequence is young
    assert step.scheduled[0].start > 0
    assert young.num_cached_tokens == 0, "that is about the first admission"


def test_reset_forgets_and_later_requests_compute_again() -> None:
    scheduler = make()
    prompt = list(range(9))
    scheduler.add(sequence(0, prompt, max_tokens=8))
    run(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check()
    scheduler.add(sequence(1, prompt, max_tokens=1))
    assert shape(run(scheduler)) == [(0, 9, 1), (1, 0, 9)]
    scheduler.add(sequence(2, prompt, max_tokens=1))
    assert (2, 8, 1) in shape(run(scheduler)), "pages computed after the reset are found"


def test_a_blocked_prompt_is_admitted_once_its_prefix_is_there() -> None:
    scheduler = make(num_pages=10, page_tokens=2, max_model_len=20)
    prompt = list(range(12))
    first, second = sequence(0, prompt, max_tokens=6), sequence(1, prompt, max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert shape(run(scheduler)) == [(0, 0, 12)], "both whole prompts do not fit"
    assert shape(run(scheduler)) == [(0, 12, 1), (1, 10, 2)]
    assert second.pages[:5] == first.pages[:5]


def test_a_blocked_prompt_is_not_matched_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_pages=16, page_tokens=2, max_model_len=32)
    scheduler.add(sequence(0, 20, max_tokens=10))
    scheduler.add(sequence(1, 20, max_tokens=10))
    calls = []
    match = scheduler.prefix.match
    monkeypatch.setattr(scheduler.prefix, "match", lambda *arguments: calls.append(1) or match(*arguments))
    while scheduler.num_running != 1 or scheduler.num_waiting:
        run(scheduler)
    assert len(calls) == 3, "one admission, one try, and one more when somebody has left"

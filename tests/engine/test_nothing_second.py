"""Nothing second: what an engine does for a request, it does for the next one too, whatever the first one was."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from engine.fakes import EOS, assert_at_rest, make_engine, run_all, solo, tokens_of
from engine.scheduling import has_work, make, run, sequence
from for_each import for_each
from holdfast.engine.engine import Engine
from holdfast.errors import RequestError
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, SequenceResult

pytestmark = pytest.mark.usefixtures("run_ahead")
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=6)
BROKEN = "its numbers are not finite"


@dataclass(frozen=True)
class Case:
    """A request, and what happens to it."""

    prompt: str
    params: SamplingParams
    said: tuple[int, ...] = ()
    """Tokens of the model, if they are not its own choice."""
    num_steps: int | None = None
    """Steps before an abort."""


CASES = {
    "length": Case("a prompt of its own", SEEDED),
    "eos": Case("ends by itself", SEEDED, (*b"some", EOS)),
    "stop token": Case("ends by a token", replace(SEEDED, stop_token_ids=(ord("x"),)), tuple(b"abcx")),
    "stop string": Case("ends by a text", replace(SEEDED, stop=("cd",), logprobs=1), tuple(b"abcdef")),
    "three completions": Case("more than one answer", replace(SEEDED, n=3, logprobs=2)),
    "prompt logprobs": Case("a prompt that is measured", replace(SEEDED, prompt_logprobs=2, logprobs=0)),
    "error": Case(BROKEN, SEEDED, (*b"ab", NO_TOKEN)),
    "abort while it waits": Case("never starts", SEEDED, num_steps=0),
    "abort while it runs": Case("is cut off", replace(SEEDED, n=2), num_steps=3),
    "same prompt again": Case("a prompt of its own", replace(SEEDED, temperature=0.0)),
}
Outcome = list[tuple[object, ...]]


def fresh_engine(**options) -> Engine:
    engine = make_engine(max_num_batched_tokens=8, **options)
    for case in CASES.values():
        if case.said:
            engine.runner.script[case.prompt] = list(case.said)
    return engine


def outcome(engine: Engine, name: str, case: Case) -> Outcome:
    """Run one request to its end; give what a client reads of each completion."""
    engine.add_request(name, case.prompt, case.params)
    deltas: list[CompletionDelta] = []
    if case.num_steps is not None:
        for _ in range(case.num_steps):
            deltas += engine.step()
        deltas += engine.abort(name)
        assert engine.stats().num_running + engine.stats().num_waiting == 0
    deltas += [delta for found in run_all(engine).values() for delta in found]
    assert_at_rest(engine)
    found: Outcome = []
    for index in range(case.params.n):
        own = [delta for delta in deltas if delta.index == index]
        last = own[-1]
        found.append(
            (
                tokens_of(own),
                "".join(delta.text for delta in own),
                [place for delta in own for place in delta.logprobs or ()],
                [delta.prompt_logprobs for delta in own if delta.prompt_logprobs is not None],
                (last.finish_reason, last.stop_reason, last.error),
                last.num_cached_tokens,
            )
        )
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("second", CASES)
def test_second_request_answers_as_if_it_was_the_first(second: str) -> None:
    alone = outcome(fresh_engine(enable_prefix_caching=False), "one", CASES[second])
    engine = fresh_engine(enable_prefix_caching=False)
    for first in CASES.values():
        outcome(engine, "one", first)
        assert outcome(engine, "one", CASES[second]) == alone


@for_each("name", ["length", "three completions", "stop string"])
def test_prefix_hit_of_later_request_is_as_long_as_second(name: str) -> None:
    engine, case = fresh_engine(), CASES[name]
    num_tokens = len(case.prompt)
    first = outcome(engine, "one", case)
    # Completions after the first one fork: all but the last token of their prompt is there.
    forks = [num_tokens - 1] * (case.params.n - 1)
    assert [own[-1] for own in first] == [0, *forks]
    queried, hits = case.params.n * num_tokens, sum(forks)
    for name in ("two", "three"):
        again = outcome(engine, name, case)
        assert [own[:-1] for own in again] == [own[:-1] for own in first]
        assert [own[-1] for own in again] == [(num_tokens - 1) // 4 * 4, *forks]
        queried += case.params.n * num_tokens
        hits += sum(own[-1] for own in again)
        stats = engine.stats()
        assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (queried, hits)
    engine.reset_prefix_cache()
    engine.reset_prefix_cache()
    assert outcome(engine, "one", case) == first
    assert outcome(engine, "one", case) == again, "what was computed after a reset is found again"


def test_second_abort_of_a_name_changes_nothing() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add_request("one", "prompt", SEEDED)
    engine.step()
    assert [delta.finish_reason for delta in engine.abort("one")] == ["abort"]
    before = engine.stats()
    assert engine.abort("one") == []
    assert engine.stats() == before
    engine.add_request("one", "prompt", SEEDED)
    engine.step()
    assert [delta.finish_reason for delta in engine.abort("one")] == ["abort"]
    assert_at_rest(engine)


def test_second_refusal_leaves_seeds_and_queue_alone() -> None:
    engine, unseeded = make_engine(), replace(SEEDED, seed=None)
    for _ in range(2):
        with pytest.raises(RequestError):
            engine.add_request("refused", "Q" * 500, unseeded)
    engine.add_request("one", "prompt", unseeded)
    assert tokens_of(run_all(engine)["one", 0]) == solo("prompt", unseeded)[0]
    assert engine.stats().num_requests == 1


def test_second_preemption_of_a_request_changes_no_answer() -> None:
    params = replace(SEEDED, max_tokens=60)
    engine = make_engine(num_pages=20, max_num_seqs=4, max_model_len=80, enable_prefix_caching=False)
    for number in range(4):
        engine.add_request(f"{number}", f"prompt {number}", params)
    found, counts, num_prompt_tokens = {}, {}, 0
    while engine.has_unfinished():
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        for own in (*engine.scheduler.running, *engine.scheduler.waiting):
            counts[own.sequence_id] = own.num_preemptions
    assert max(counts.values()) >= 2, "none was preempted twice"
    for number in range(4):
        deltas = found[f"{number}"]
        assert tokens_of(deltas) == solo(f"prompt {number}", params, max_model_len=80)[0]
        assert deltas[-1].metrics.num_preemptions == counts[number]
    stats = engine.stats()
    assert stats.num_preemptions == sum(counts.values())
    # A preempted sequence computes its prompt again. Answers are no prompt, however often they are computed.
    num_prompt_tokens = len("prompt 0") * (4 + sum(counts.values()))
    assert stats.num_prompt_tokens == num_prompt_tokens


def test_second_sequence_without_numbers_resets_the_cache() -> None:
    engine = make_engine()
    engine.runner.answer = lambda item, result: (
        SequenceResult.of(NO_TOKEN) if item.sequence.params.seed == 99 and result.token_ids else result
    )
    for _ in range(2):
        engine.add_request("sound", "a prompt of several pages", SEEDED)
        run_all(engine)
        engine.add_request("broken", "a prompt of several pages", replace(SEEDED, seed=99))
        assert run_all(engine)["broken", 0][-1].finish_reason == "error"
        engine.add_request("after", "a prompt of several pages", SEEDED)
        assert run_all(engine)["after", 0][-1].num_cached_tokens == 0
    assert_at_rest(engine)


def finish_waiting(scheduler) -> None:
    scheduler.finish(scheduler.waiting[-1])


def finish_running(scheduler) -> None:
    scheduler.finish(scheduler.running[0])


def reset(scheduler) -> None:
    scheduler.reset_prefix_cache()


def drop_steps(scheduler) -> None:
    scheduler.schedule()
    scheduler.forget_steps()


@for_each("event", [finish_waiting, finish_running, reset, drop_steps])
def test_scheduler_event_twice_leaves_every_page(event: Callable) -> None:
    scheduler = make(num_pages=14, max_num_seqs=3, max_tokens_a_step=6)
    for number in range(12):
        scheduler.add(sequence(number, [1, 2, 3, 4, 5, 6, 7, 8, number], max_tokens=6))
    for _ in range(2):
        while scheduler.num_running < 2:
            run(scheduler)
        for _ in range(2):
            event(scheduler)
            scheduler.check()
    while has_work(scheduler):
        run(scheduler)
    assert scheduler.pool.num_available == 14

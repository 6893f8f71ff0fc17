"""EngineCore: token ids in and out, steps in flight, surplus that is dropped, waits that may be interrupted."""

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.fakes import EOS, HashRunner, make_engine
from error_codes import raises_code
from for_each import for_each
from holdfast.engine.core import EngineCore
from holdfast.engine.messages import CoreRequest, Ending
from holdfast.errors import MessageError, QueueFullError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import SequenceResult

GREEDY = SamplingParams(temperature=0.0)


def make_core(run_ahead: int = 0, **options) -> tuple[EngineCore, HashRunner]:
    engine = make_engine(run_ahead=run_ahead, **options)
    assert isinstance(engine.core, EngineCore)
    return engine.core, engine.runner


def request(sequence_id: int, prompt: bytes = b"Q", max_tokens: int = 8, params: SamplingParams = GREEDY, **others):
    return CoreRequest(sequence_id, tuple(prompt), params, sequence_id, max_tokens, **others)


def run(core: EngineCore, max_steps: int = 500) -> tuple[dict[int, list[int]], dict[int, Ending]]:
    """Tokens and endings of everybody, to the end."""
    tokens: dict[int, list[int]] = {}
    endings: dict[int, Ending] = {}
    for _ in range(max_steps):
        if not core.has_unfinished:
            return tokens, endings
        for output in core.step().outputs:
            assert output.sequence_id not in endings, "something came behind an end"
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
            if output.ending is not None:
                endings[output.sequence_id] = output.ending
        core.scheduler.check()
    raise AssertionError("it does not end")


def at_rest(core: EngineCore) -> None:
    core.scheduler.check()
    assert len(core.in_flight) == 0
    assert core.scheduler.pool.num_available == core.scheduler.pool.num_pages


@for_each("run_ahead", [0, 1, 3])
def test_steps_run_ahead_and_tokens_are_the_same(run_ahead):
    core, runner = make_core(run_ahead)
    core.submit([request(0, b"one"), request(1, b"two", 3)])
    core.submit([request(2, b"a longer prompt than one step takes, by far")])
    expected, _ = run(make_sequential())
    assert run(core)[0] == expected
    assert runner.most_in_flight == 1 + run_ahead
    at_rest(core)


def make_sequential() -> EngineCore:
    core, _ = make_core(0)
    core.submit([request(0, b"one"), request(1, b"two", 3)])
    core.submit([request(2, b"a longer prompt than one step takes, by far")])
    return core


@for_each("run_ahead", [0, 1])
@for_each(
    "params, tokens, ending",
    [
        ({}, [*b"ab", EOS], Ending("stop")),
        ({"ignore_eos": True}, [*b"ab", EOS, *b"cdef"], Ending("length")),
        ({"stop_token_ids": [98]}, [*b"ab"], Ending("stop", 98)),
        ({"stop_token_ids": [98], "min_tokens": 3}, [*b"ab", EOS], Ending("stop")),
        ({"min_tokens": 4}, [*b"ab", EOS, *b"cdef"], Ending("length")),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [*b"ab", EOS], Ending("stop", EOS)),
    ],
)
def test_core_sequence_ends_with_its_reason(run_ahead, params, tokens, ending):
    core, runner = make_core(run_ahead)
    runner.script["Q"] = [*b"ab", EOS, *b"cdef"]
    core.submit([request(0, max_tokens=7, params=replace(GREEDY, **params))])
    assert run(core) == ({0: tokens}, {0: ending})
    at_rest(core)


def test_surplus_is_empty_by_length_and_one_step_by_eos():
    core, runner = make_core(1)
    core.submit([request(0, max_tokens=5)])
    run(core)
    assert len(runner.steps) == core.stats().num_steps == 5
    core, runner = make_core(1)
    runner.script["Q"] = [*b"ab", EOS]
    core.submit([request(0, max_tokens=50)])
    assert run(core)[0] == {0: [*b"ab", EOS]}
    assert len(runner.steps) == 4
    assert core.stats().num_prompt_tokens == 1


@for_each("num_steps", range(6))
def test_core_abort_with_steps_in_flight_drops_surplus(num_steps):
    core, _ = make_core(1, num_pages=24, max_num_seqs=2)
    core.submit([request(0, b"one", 9), request(1, b"two", 9), request(2, b"three", 9)])
    heard: dict[int, list[int]] = {}
    for _ in range(num_steps):
        for output in core.step().outputs:
            heard.setdefault(output.sequence_id, []).extend(output.token_ids)
    core.abort([0])
    core.abort([0])
    core.scheduler.check()
    tokens, _ = run(core)
    assert 0 not in tokens, "surplus came out"
    alone, _ = make_core(0)
    alone.submit([request(1, b"two", 9), request(2, b"three", 9)])
    expected, _ = run(alone)
    assert {name: heard.get(name, []) + tokens.get(name, []) for name in (1, 2)} == expected
    at_rest(core)


@for_each("run_ahead", [1, 2, 3])
def test_settle_waits_for_steps_without_live_sequences(run_ahead):
    core, runner = make_core(run_ahead)
    core.submit([request(0)])
    core.step()
    core.abort([0])
    assert (len(core.in_flight), core.has_unfinished) == (run_ahead, True)
    core.settle()
    assert len(runner.steps) == 1 + run_ahead
    at_rest(core)
    assert not core.has_unfinished
    core.submit([request(1)])
    core.step()
    core.settle()
    assert len(core.in_flight) == run_ahead, "a request waits for it"


def test_several_tokens_of_a_step_are_cut_at_an_end():
    core, runner = make_core()
    core.submit([request(0, max_tokens=4), request(1, b"R", 3), request(2, b"S", 9)])
    brought = {0: [*b"a", EOS, *b"bc"], 1: [*b"abcd"], 2: [*b"ab", -1]}

    def guessed(item, result):
        # As if all but one had been proposed.
        return SequenceResult(tuple(brought[item.sequence.sequence_id]))

    def complete(step, token_ids):
        reported.append([tuple(one) for one in token_ids])
        return original(step, [one[:1] for one in token_ids])

    reported, original = [], core.scheduler.complete
    runner.answer, core.scheduler.complete = guessed, complete
    outputs = core.step().outputs
    assert [output.token_ids for output in outputs] == [(97, EOS), (97, 98, 99), (97, 98)]
    assert [output.ending.finish_reason for output in outputs] == ["stop", "length", "error"]
    assert "after 2 tokens" in outputs[2].ending.error
    assert reported == [[(97, EOS), (97, 98, 99), (97, 98)]]
    assert not core.has_unfinished


def test_core_submit_queues_all_or_none():
    core, _ = make_core(max_queue=3)
    with raises_code("request.queue_full", QueueFullError):
        core.submit([request(number) for number in range(4)])
    with pytest.raises(RequestError, match="tokens"):
        core.submit([request(0), request(1), request(2, b"x" * 500)])
    assert core.stats().num_waiting == 0
    assert not core.has_unfinished
    core.submit([request(0), request(1)])
    assert core.stats().num_waiting == 2
    run(core)
    at_rest(core)


@for_each("ids", [(), (0,), (1,), (3, 2), (3, 3), (2, 5, 1)])
def test_core_submit_refuses_used_or_unordered_sequence_ids(ids):
    core, _ = make_core()
    core.submit([request(0), request(1)])
    with raises_code("wire.wrong_sequences", MessageError):
        core.submit([request(number) for number in ids])
    assert core.stats().num_waiting == 2
    core.submit([request(2)])


def test_core_abort_of_unknown_sequence_changes_nothing():
    core, _ = make_core()
    core.submit([request(0)])
    with raises_code("wire.wrong_sequences", MessageError):
        core.abort([0, 1])
    assert core.stats().num_waiting == 1
    core.abort([0])
    assert core.stats().num_waiting == 0


class Interrupt(BaseException):
    """As Ctrl-C."""


@for_each("when", ["before", "after"])
@for_each("run_ahead", [0, 1])
@for_each("can_cancel", [True, False])
@for_each("k", range(7))
def test_core_interrupted_wait_loses_nothing(when, run_ahead, can_cancel, k):
    """Before: the step has not run. After: its result is there, and the wait is left by the interrupt."""
    core, runner = make_core(run_ahead, can_cancel=can_cancel)
    core.submit([request(0, b"one"), request(1, b"two", 5)])
    num_waits = num_interrupts = 0

    @contextmanager
    def waiting():
        nonlocal num_waits
        num_waits += 1
        if num_waits == k + 1 and when == "before":
            raise Interrupt
        yield
        if num_waits == k + 1:
            raise Interrupt

    tokens: dict[int, list[int]] = {}
    while core.has_unfinished:
        try:
            for output in core.step(waiting).outputs:
                tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
        except Interrupt:
            num_interrupts += 1
            core.scheduler.check()
    assert num_interrupts == 1
    sequential, _ = make_core()
    sequential.submit([request(0, b"one"), request(1, b"two", 5)])
    assert tokens == run(sequential)[0]
    assert len(runner.steps) == 8, "nothing ran twice"
    at_rest(core)


@for_each("seed", range(12))
def test_core_random_company_ends_and_aborts_as_alone(seed):
    """Ahead and in turn, with few pages: everybody gets what it gets alone, up to its own end or abort."""
    choose = random.Random(seed)
    core, runner = make_core(choose.choice([1, 2]), num_pages=30, max_num_seqs=4, max_model_len=60)
    runner.answer = ending_answer
    wanted: dict[int, CoreRequest] = {}
    tokens: dict[int, list[int]] = {}
    aborted: set[int] = set()
    next_id = 0
    while next_id < 30 or core.has_unfinished:
        if next_id < 30 and choose.random() < 0.4:
            prompt = bytes(choose.choices(b"ABCD", k=choose.randint(1, 20)))
            params = replace(GREEDY, temperature=choose.choice([0.0, 1.0]))
            wanted[next_id] = request(next_id, prompt, choose.randint(1, 30), params)
            core.submit([wanted[next_id]])
            next_id += 1
        for output in core.step().outputs:
            assert output.sequence_id not in aborted, "surplus came out"
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
        core.scheduler.check()
        if next_id and choose.random() < 0.1:
            victim = choose.randrange(next_id)
            aborted.add(victim)
            core.abort([victim])
    for name, one in wanted.items():
        alone, own = make_core(0, max_model_len=60)
        own.answer = ending_answer
        alone.submit([one])
        expected = run(alone)[0][name]
        found = tokens.get(name, [])
        assert found == (expected[: len(found)] if name in aborted else expected)
    at_rest(core)


def ending_answer(item, result: SequenceResult) -> SequenceResult:
    """Some letters end the answer."""
    return SequenceResult.of(EOS) if result.token_ids and result.token_ids[0] in b"qz" else result

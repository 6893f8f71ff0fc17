"""EngineCore with forms of answers: who waits for a form, what joins the queue, and what is left after an end; no llguidance."""

import pytest

from engine.fakes import EOS, HashRunner
from engine.test_core import GREEDY, at_rest, request, run
from error_codes import raises_code
from for_each import for_each
from holdfast.config import Limits
from holdfast.engine.core import EngineCore
from holdfast.engine.messages import Ending
from holdfast.engine.scheduler import Scheduler
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN
from holdfast.request.structured import StructuredOutputs
from holdfast.text.grammar import Grammars, Prepared, Vocabulary

FORM = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(regex="[a-z]+"))


class ByHand(Grammars):
    """Grammars whose forms are compiled when a test says so."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(lambda: None, 8, ()))  # type: ignore[arg-type, return-value]
        self.begun: list[tuple[int, ...]] = []
        self.done: list[Prepared] = []
        self.known: set[int] = set()
        self.complete: set[int] = set()
        self.failed: dict[int, str] = {}

    def begin(self, sequence_ids, form) -> None:
        self.begun.append(tuple(sequence_ids))
        self.known |= set(sequence_ids)

    def finish(self, *sequence_ids: int, error: str | None = None) -> None:
        self.done.append(Prepared(sequence_ids, error))

    def wait(self, seconds: float) -> None:
        pass

    def ready(self) -> list[Prepared]:
        done, self.done = self.done, []
        return done

    def is_complete(self, sequence_id: int) -> bool:
        return sequence_id in self.complete

    def failure(self, sequence_id: int) -> str | None:
        return self.failed.get(sequence_id)

    def forget(self, sequence_id: int) -> None:
        self.known.discard(sequence_id)


def make_core(max_queue: int = 8, max_num_seqs: int = 4) -> tuple[EngineCore, ByHand, HashRunner]:
    limits = Limits(max_num_seqs, 32, 64, 4)
    runner, grammars = HashRunner(limits, 64), ByHand()
    return EngineCore(runner, Scheduler(limits, 64, True, max_queue), grammars=grammars), grammars, runner


def test_held_sequences_wait_and_each_joins_once_compiled() -> None:
    core, grammars, _ = make_core()
    core.submit([request(0, params=FORM), request(1, params=FORM)])
    core.submit([request(2, params=FORM)])
    core.submit([request(3)])
    assert grammars.begun == [(0, 1), (2,)]
    assert core.stats().num_waiting == core.num_queued == core.counts.num_waiting == 4
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (1, 3), "another request runs meanwhile"
    grammars.finish(2)
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (2, 2)
    grammars.finish(0, 1)
    tokens, endings = run(core)
    assert {name: len(own) for name, own in tokens.items()} == {0: 8, 1: 8, 2: 7, 3: 6}, "two steps ran before"
    assert endings == dict.fromkeys(range(4), Ending("length"))
    assert grammars.known == set()
    at_rest(core)


def test_form_that_fails_ends_all_sequences_of_its_request_alone() -> None:
    core, grammars, _ = make_core()
    core.submit([request(0, params=FORM), request(1, params=FORM)])
    core.submit([request(2, params=FORM)])
    grammars.finish(0, 1, error="it is no form")
    outputs = core.step().outputs
    assert [output.sequence_id for output in outputs] == [0, 1]
    for output in outputs:
        assert output.ending is not None
        assert output.ending.error == "structured_outputs.regex could not be followed: it is no form"
    assert core.stats().num_waiting == 1
    grammars.finish(2)
    assert list(run(core)[0]) == [2]
    at_rest(core)


@for_each("is_compiled", [False, True])
def test_abort_of_a_held_sequence_leaves_the_others(is_compiled: bool) -> None:
    core, grammars, _ = make_core()
    core.submit([request(number, params=FORM) for number in range(3)])
    if is_compiled:
        grammars.finish(0, 1, 2)
    core.abort([0, 2])
    assert grammars.known == {1}
    assert core.stats().num_waiting == 1
    core.abort([0, 2])
    assert core.stats().num_waiting == 1
    if not is_compiled:
        grammars.finish(1)
    tokens, _ = run(core)
    assert list(tokens) == [1]
    assert grammars.known == set()
    at_rest(core)


def test_compiled_sequences_join_as_far_as_the_queue_has_room() -> None:
    core, grammars, _ = make_core(max_queue=4, max_num_seqs=1)
    core.submit([request(number, params=FORM) for number in range(3)])
    core.submit([request(3)])
    with raises_code("request.queue_full", QueueFullError):
        core.submit([request(4)])
    core.step()
    core.submit([request(4)])
    # As if preempted sequences had come back to the queue: it is full, and what is compiled stays held.
    core.scheduler.max_queue = 1
    grammars.finish(0, 1, 2)
    core.step()
    assert (core.scheduler.num_waiting, core.stats().num_waiting) == (1, 4)
    tokens, _ = run(core)
    assert sorted(tokens) == [0, 1, 2, 3, 4]
    at_rest(core)


def test_held_request_that_can_never_run_is_refused_whole() -> None:
    core, grammars, _ = make_core()
    with pytest.raises(RequestError):
        core.submit([request(0, params=FORM), request(1, b"Q" * 65, params=FORM)])
    assert grammars.begun == []
    assert (core.stats().num_waiting, core.stats().num_submitted) == (0, 0)
    core.submit([request(0, params=FORM)])


def test_core_without_grammars_refuses_a_form() -> None:
    limits = Limits(4, 32, 64, 4)
    core = EngineCore(HashRunner(limits, 64), Scheduler(limits, 64, True, 8))
    with raises_code("request.no_grammars", RequestError):
        core.submit([request(0, params=FORM)])
    assert not core.has_unfinished


@for_each(
    "options, said, num_tokens, reason",
    [
        ({"ignore_eos": True}, [*b"ab", EOS, *b"c"], 3, "stop"),
        ({"min_tokens": 6}, [*b"ab", EOS, *b"c"], 3, "stop"),
        ({}, list(b"abcdef"), 5, "length"),
    ],
)
def test_complete_grammar_ends_the_answer(options: dict, said: list[int], num_tokens: int, reason: str) -> None:
    core, grammars, runner = make_core()
    runner.script["Q"] = said
    params = SamplingParams(temperature=0.0, structured_outputs=FORM.structured_outputs, **options)
    core.submit([request(0, max_tokens=5 if reason == "length" else 20, params=params)])
    grammars.finish(0)
    tokens, endings = run(core)
    assert (len(tokens[0]), endings[0].finish_reason) == (num_tokens, reason)


@for_each("second", [False, True])
def test_end_without_a_token_names_the_grammar(second: bool) -> None:
    core, grammars, runner = make_core()
    runner.script["Q"] = [*b"ab", NO_TOKEN]
    names = (0, 1) if second else (0,)
    core.submit([request(name, params=FORM) for name in names])
    grammars.finish(*names)
    grammars.complete.add(names[-1])
    if second:
        grammars.failed[0] = "nothing may follow"
    tokens, endings = run(core)
    assert endings[names[-1]] == Ending("stop")
    assert tokens[names[-1]] == list(b"ab")
    if second:
        assert endings[0].error == ("after 2 tokens structured_outputs.regex could not be followed: nothing may follow")


def test_end_by_the_grammar_keeps_cached_prefixes() -> None:
    core, grammars, runner = make_core()
    runner.script["QQQQQQQQQ"] = [NO_TOKEN]
    core.submit([request(0, b"Q" * 9, params=FORM)])
    grammars.finish(0)
    grammars.failed[0] = "nothing may follow"
    run(core)
    assert len(core.scheduler.prefix) == 2
    runner.script["QQQQQQQQQ"] = [NO_TOKEN]
    core.submit([request(1, b"Q" * 9, params=GREEDY)])
    run(core)
    assert len(core.scheduler.prefix) == 0, "numbers that are not finite may lie in pages"

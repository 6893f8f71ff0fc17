"""What fails, and what does not: code that a request controls, the model's numbers, the model itself, Ctrl-C."""

import signal
from functools import cache

import pytest

from engine.fakes import (
    assert_at_rest,
    byte_tokenizer,
    make_engine,
    run_all,
    solo,
    text_of,
    tokens_of,
)
from error_codes import raises_code
from for_each import for_each
from holdfast.engine import outputs as completion
from holdfast.errors import EngineDeadError, PromptError, RequestError, TemplateError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, LiveStep, SequenceResult, StepResult
from holdfast.text.stop_strings import StopStrings
from holdfast.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("run_ahead")
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=10)
NEIGHBOURS = ("first neighbour", "second one")
BAD = ord("!")
"""A prompt that ends in this byte is the victim."""


class Fault(Exception):
    """Raised by the victim's own code."""


class Once:
    """Raises at its k-th call, counted from 0."""

    def __init__(self, k: int) -> None:
        self.num_left = k

    def __call__(self) -> None:
        self.num_left -= 1
        if self.num_left == -1:
            raise Fault("line one\nline two")


class FaultyStream:
    """A text stream that raises for the victim, in one of its methods."""

    def __init__(self, stream, method: str, fault: Once) -> None:
        self.stream, self.method, self.fault, self.is_victim = stream, method, fault, False

    def follow(self, token_ids):
        self.is_victim = token_ids[-1] == BAD
        self._meet("follow")
        self.stream.follow(token_ids)

    def push(self, token_ids):
        self._meet("push")
        return self.stream.push(token_ids)

    def finish(self):
        self._meet("finish")
        return self.stream.finish()

    def _meet(self, method: str) -> None:
        if self.is_victim and method == self.method:
            self.fault()


def faulty_tokenizer(method: str, k: int) -> Tokenizer:
    fault = Once(k)

    class Faulty(Tokenizer):
        def encode(self, text, add_special_tokens=True):
            if method == "encode" and text.endswith("!"):
                fault()
            return super().encode(text, add_special_tokens)

        def text_stream(self, skip_special_tokens, kept_token_ids=frozenset()):
            return FaultyStream(super().text_stream(skip_special_tokens, kept_token_ids), method, fault)

        def token_text(self, token_id):
            if method == "token_text":
                fault()
            return super().token_text(token_id)

    return byte_tokenizer(Faulty)


@cache
def undisturbed() -> dict[str, tuple[list[int], str]]:
    return {prompt: solo(prompt, PARAMS) for prompt in NEIGHBOURS}


def run_beside_neighbours(engine, victim_params: SamplingParams):
    """The victim's deltas; its neighbours must not have noticed, and the engine goes on."""
    engine.add_request(NEIGHBOURS[0], NEIGHBOURS[0], PARAMS)
    engine.add_request("victim", "victim!", victim_params)
    engine.add_request(NEIGHBOURS[1], NEIGHBOURS[1], PARAMS)
    found = run_all(engine)
    for prompt in NEIGHBOURS:
        deltas = found[prompt, 0]
        assert (tokens_of(deltas), text_of(deltas)) == undisturbed()[prompt]
    assert_at_rest(engine)
    engine.add_request("later", NEIGHBOURS[0], PARAMS)
    assert tokens_of(run_all(engine)["later", 0]) == undisturbed()[NEIGHBOURS[0]][0]
    return {key: deltas for key, deltas in found.items() if key[0] == "victim"}


@for_each("k", range(4))
@for_each("method", ["push", "finish", "token_text"])
def test_engine_detokenizer_fault_fails_one_request(method, k):
    engine = make_engine(tokenizer=faulty_tokenizer(method, k))
    victim = SamplingParams(n=4, seed=1, max_tokens=5, logprobs=1 if method == "token_text" else None)
    found = run_beside_neighbours(engine, victim)
    ends = [found["victim", index][-1] for index in range(4)]
    num_good = k if method == "finish" else 0
    assert [delta.finish_reason for delta in ends] == ["length"] * num_good + ["error"] * (4 - num_good)
    assert {delta.error for delta in ends[num_good:]} == {"its text could not be made: Fault: line one line two"}


@pytest.mark.parametrize("method", ["feed", "feed_unstoppable", "flush"])
def test_engine_stop_string_fault_fails_one_request(method, monkeypatch):
    class Faulty(StopStrings):
        pass

    setattr(Faulty, method, lambda self, *arguments: Once(0)())
    monkeypatch.setattr(completion, "StopStrings", Faulty)
    victim = SamplingParams(max_tokens=6, stop="#", min_tokens=3)
    (deltas,) = run_beside_neighbours(make_engine(), victim).values()
    assert deltas[-1].finish_reason == "error"
    assert len(tokens_of(deltas)) == {"feed_unstoppable": 0, "feed": 2, "flush": 5}[method]


def test_engine_prompt_logprobs_fault_fails_one_request():
    engine = make_engine(tokenizer=faulty_tokenizer("token_text", 3), max_num_batched_tokens=9)
    (deltas,) = run_beside_neighbours(engine, SamplingParams(max_tokens=6, prompt_logprobs=1)).values()
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert deltas[0].metrics is None


@for_each("method, error", [("encode", PromptError), ("follow", RequestError)])
def test_engine_tokenizer_fault_at_admission_is_refusal(method, error):
    engine = make_engine(tokenizer=faulty_tokenizer(method, 0))
    with pytest.raises(error):
        engine.add_request("victim", "victim!", PARAMS)
    assert_at_rest(engine)
    run_beside_neighbours(engine, PARAMS)


def test_engine_chat_template_fault_is_refusal():
    class Faulty:
        def render_chat(self, messages, control, **options):
            raise Fault("boom")

    engine = make_engine(chat_template=Faulty())
    with raises_code("request.template_failed", TemplateError):
        engine.prepare_chat([{"role": "user", "content": "Hi"}], PARAMS)
    run_beside_neighbours(engine, PARAMS)


@for_each("bad_token", [NO_TOKEN, 264, -7, 2**40])
@for_each("k", [0, 3])
def test_completion_without_a_token_fails_alone(bad_token, k):
    engine = make_engine()

    def without_token(item, result):
        sequence = item.sequence
        is_victim = sequence.params.n == 3 and sequence.sequence_id == 2 and sequence.num_output_tokens == k
        return SequenceResult.of(bad_token) if is_victim else result

    engine.runner.answer = without_token
    found = run_beside_neighbours(engine, SamplingParams(n=3, seed=1, max_tokens=5))
    reasons = [found["victim", index][-1].finish_reason for index in range(3)]
    assert reasons == ["length", "error", "length"]
    last = found["victim", 1][-1]
    assert len(tokens_of(found["victim", 1])) == k
    assert ("not finite" if bad_token == NO_TOKEN else "outside the vocabulary") in last.error
    assert f"after {k} tokens" in last.error


def test_prefixes_are_dropped_after_non_finite_logits():
    """Any page may hold them, so a cached prompt is computed again."""
    engine = make_engine()
    known = "a prompt of several pages"

    def cached_tokens() -> int:
        engine.add_request("known", known, SamplingParams(max_tokens=1, temperature=0.0))
        return run_all(engine)["known", 0][-1].num_cached_tokens

    assert cached_tokens() == 0
    assert cached_tokens() == len(known) // 4 * 4
    answer = engine.runner.answer
    engine.runner.answer = lambda item, result: SequenceResult.of(NO_TOKEN)
    engine.add_request("victim", "another", PARAMS)
    assert run_all(engine)["victim", 0][-1].finish_reason == "error"
    engine.settle()
    engine.runner.answer = answer
    assert cached_tokens() == 0


def test_request_that_bans_every_token_keeps_cached_prefixes():
    engine = make_engine()
    known = "a prompt of several pages"

    def cached_tokens() -> int:
        engine.add_request("known", known, SamplingParams(max_tokens=1, temperature=0.0))
        return run_all(engine)["known", 0][-1].num_cached_tokens

    assert cached_tokens() == 0
    answer = engine.runner.answer
    engine.runner.answer = lambda item, result: SequenceResult.of(NO_TOKEN)
    engine.add_request("hostile", "another", SamplingParams(max_tokens=5, allowed_token_ids=[5]))
    last = run_all(engine)["hostile", 0][-1]
    assert last.finish_reason == "error"
    assert "allowed_token_ids leaves none" in last.error
    engine.settle()
    engine.runner.answer = answer
    assert cached_tokens() == len(known) // 4 * 4


@for_each("k", [0, 1, 5])
def test_failing_model_ends_the_engine_and_every_request(k):
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, "Q", SamplingParams(n=2, max_tokens=9, temperature=0.0))
    fault = Once(k)
    engine.runner.on_step = lambda step: fault()
    for _ in range(k):
        engine.step()
    last = engine.step()
    assert {(delta.request_id, delta.index) for delta in last} == {(name, index) for name in "abc" for index in (0, 1)}
    assert all(delta.finish_reason == "error" and "Fault: line one line two" in delta.error for delta in last)
    assert engine.is_dead
    assert not engine.has_unfinished()
    for call in (
        engine.step,
        engine.abort_all,
        engine.reset_prefix_cache,
        lambda: engine.abort("a"),
        lambda: engine.add_request("d", "Q", PARAMS),
    ):
        with raises_code("engine.dead", EngineDeadError) as caught:
            call()
        assert isinstance(caught.value.__cause__, Fault)
    assert engine.stats().num_unfinished_requests == 0


@for_each("results", [0, 1, 3])
def test_model_with_a_wrong_number_of_results_ends_the_engine(results):
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, "Q", PARAMS)
    engine.runner.execute = lambda step: StepResult((SequenceResult.of(65),) * results)
    assert [delta.finish_reason for delta in engine.step()] == ["error", "error"]
    assert engine.is_dead


@for_each("method", ["schedule", "complete", "finish"])
def test_engine_dies_when_scheduler_fails(method):
    engine = make_engine()
    engine.add_request("a", "Q", SamplingParams(max_tokens=1))

    def fail(*arguments):
        raise Fault("broken")

    setattr(engine.scheduler, method, fail)
    last = engine.step()
    assert last[-1].finish_reason == "error"
    assert engine.is_dead


@pytest.mark.parametrize(
    ("cause", "has_frames"), [(Fault("broken"), True), (EngineDeadError("rank.dead", reason="b"), False)]
)
def test_log_has_a_traceback_of_faults_but_not_of_dead_ranks(cause, has_frames, caplog):
    engine = make_engine()
    engine.add_request("a", "Q", PARAMS)

    def fail(*_):
        raise cause

    engine.core.step = fail
    engine.step()
    (record,) = [record for record in caplog.records if record.getMessage().startswith("the engine stopped")]
    assert str(cause) in record.getMessage()
    assert bool(record.exc_info) == has_frames


def test_engine_death_in_abort_fails_other_requests():
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, "Q", PARAMS)
    engine.step()

    def fail(sequence_id):
        raise Fault("broken")

    engine.scheduler.finish = fail
    with raises_code("engine.dead", EngineDeadError):
        engine.abort("a")
    assert {(delta.request_id, delta.finish_reason) for delta in engine.step()} >= {("b", "error")}
    with pytest.raises(EngineDeadError):
        engine.step()


def test_scheduler_that_runs_nothing_does_not_hang_the_engine():
    engine = make_engine()
    engine.add_request("a", "Q", PARAMS)
    engine.scheduler.schedule = lambda propose: LiveStep(())
    assert engine.step()[0].finish_reason == "error"
    assert engine.is_dead


def test_engine_request_refused_by_scheduler_leaves_nothing():
    engine = make_engine()
    add = engine.scheduler.add
    calls = []

    def refuse_third(sequence):
        calls.append(sequence)
        if len(calls) == 3:
            raise RequestError("value.empty", name="x")
        add(sequence)

    engine.scheduler.add = refuse_third
    with pytest.raises(RequestError, match="must not be empty"):
        engine.add_request("a", "Q", SamplingParams(n=4, max_tokens=3))
    assert_at_rest(engine)
    engine.add_request("a", "Q", SamplingParams(n=4, max_tokens=3))
    assert len(run_all(engine)) == 4
    assert_at_rest(engine)


@for_each("k", range(12))
def test_ctrl_c_in_the_model_leaves_an_engine_that_goes_on(k):
    engine = make_engine(max_num_batched_tokens=6)
    for prompt in NEIGHBOURS:
        engine.add_request(prompt, prompt, PARAMS)
    calls = iter(range(1000))
    engine.runner.on_step = lambda step: signal.raise_signal(signal.SIGINT) if next(calls) == k else None
    found: dict[str, list] = {prompt: [] for prompt in NEIGHBOURS}
    num_interrupts = 0
    while engine.has_unfinished():
        try:
            for delta in engine.step():
                found[delta.request_id].append(delta)
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.scheduler.check()
    assert num_interrupts == 1
    assert {prompt: (tokens_of(deltas), text_of(deltas)) for prompt, deltas in found.items()} == undisturbed()
    assert_at_rest(engine)


@for_each("k", range(12))
def test_ctrl_c_in_the_model_then_abort_gives_everything_back(k):
    engine = make_engine(max_num_batched_tokens=6)
    for prompt in NEIGHBOURS:
        engine.add_request(prompt, prompt, PARAMS)
    calls = iter(range(1000))
    engine.runner.on_step = lambda step: signal.raise_signal(signal.SIGINT) if next(calls) == k else None

    def until_interrupted():
        while True:
            engine.step()

    with pytest.raises(KeyboardInterrupt):
        until_interrupted()
    engine.abort_all()
    assert_at_rest(engine)


@for_each("method", ["schedule", "complete", "finish", "add"])
def test_ctrl_c_while_tables_change_waits_and_loses_nothing(method):
    engine = make_engine()
    original = getattr(engine.scheduler, method)
    is_armed = [True]

    def interrupted(*arguments):
        if is_armed.pop() if is_armed else False:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    setattr(engine.scheduler, method, interrupted)
    num_interrupts = 0
    try:
        engine.add_request(NEIGHBOURS[0], NEIGHBOURS[0], PARAMS)
    except KeyboardInterrupt:
        num_interrupts += 1
    deltas = []
    while engine.has_unfinished():
        try:
            deltas += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.scheduler.check()
    assert num_interrupts == 1
    assert (tokens_of(deltas), text_of(deltas)) == undisturbed()[NEIGHBOURS[0]]
    assert_at_rest(engine)

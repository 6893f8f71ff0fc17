"""Numbers that clients read: usage of several completions, counts after aborts, drafts at the end of an answer, log-probabilities."""

from dataclasses import dataclass, replace
from itertools import permutations

import pytest

from engine.fakes import EOS, assert_at_rest, hidden_of, logprobs_at, make_engine, run_all, tokens_of
from engine.test_core_proposals import GuessRunner, answers, guessing_engine
from engine.test_hang_ups import with_layers
from for_each import for_each
from holdfast.engine.engine import Engine
from holdfast.engine.messages import CoreOutputs, SequenceOutput
from holdfast.engine.outputs import DeltaBuffer, OutputAssembler, position_logprobs
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, ScheduledSequence, SequenceResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def counted(engine: Engine) -> tuple[int, int, int, int]:
    """Running and waiting sequences, live requests, and pages that sequences hold."""
    stats = engine.stats()
    num_pages = engine.runner.num_pages
    return stats.num_running, stats.num_waiting, stats.num_unfinished_requests, round(stats.kv_usage * num_pages)


@for_each("order", list(permutations(range(3))))
def test_cached_tokens_of_a_request_are_its_first_completions(order: tuple[int, ...]) -> None:
    engine, params = make_engine(), replace(GREEDY, n=3, max_tokens=4)
    prompt = "a prompt that fills a few pages"
    engine.add_request("one", prompt, params)
    run_all(engine)
    engine.add_request("two", prompt, params)
    deltas = run_all(engine)
    assert [deltas["two", index][-1].num_cached_tokens for index in range(3)] == [28, 30, 30]
    whole, buffer = OutputAssembler(prompt, list(prompt.encode()), 3), DeltaBuffer()
    merged = OutputAssembler(prompt, list(prompt.encode()), 3)
    for index in order:
        for delta in deltas["two", index]:
            whole.add(delta)
            buffer.add(delta)
    for delta in buffer.take():
        merged.add(delta)
    for output in (whole.output(), merged.output()):
        assert output.num_cached_tokens == 28
        assert output.metrics is not None
        assert output.metrics.num_cached_tokens == 28
        assert [len(one.token_ids) for one in output.outputs] == [4, 4, 4]


@dataclass(frozen=True)
class Stage:
    """An engine with a request called "victim" in one state beside others, and what is left after it is aborted."""

    options: dict[str, int]
    num_steps: int
    n: int
    before: tuple[int, int, int]
    after: tuple[int, int, int]


STAGES = {
    "waiting": Stage({"max_num_seqs": 1}, 1, 1, (1, 1, 2), (1, 0, 1)),
    "waiting, second of two": Stage({"max_num_seqs": 1}, 1, 2, (1, 2, 2), (1, 0, 1)),
    "one runs and two wait": Stage({"max_num_seqs": 2}, 2, 3, (2, 2, 2), (1, 0, 1)),
    "reading its prompt": Stage({"max_num_batched_tokens": 6}, 3, 1, (2, 0, 2), (1, 0, 1)),
    "decoding": Stage({}, 5, 2, (3, 0, 2), (1, 0, 1)),
    "before its first step": Stage({}, 0, 2, (0, 3, 2), (0, 1, 1)),
}


@for_each("run_ahead", [0, 1, 2])
@for_each("name", STAGES)
def test_counts_after_an_abort_are_those_of_the_others(name: str, run_ahead: int) -> None:
    stage, params = STAGES[name], replace(GREEDY, max_tokens=20)
    engine = make_engine(run_ahead=run_ahead, enable_prefix_caching=False, **stage.options)
    engine.add_request("other", "other", params)
    engine.add_request("victim", "the victim's prompt", replace(params, n=stage.n))
    deltas: list[CompletionDelta] = []
    for _ in range(stage.num_steps):
        deltas += engine.step()
    assert counted(engine)[:3] == stage.before
    engine.abort("victim")
    assert counted(engine)[:3] == stage.after
    num_output_tokens = engine.stats().num_output_tokens
    assert num_output_tokens == len(tokens_of(deltas))
    # A second abort, and what steps in flight still bring, count nowhere.
    engine.abort("victim")
    assert counted(engine)[:3] == stage.after
    rest = run_all(engine)
    assert set(rest) <= {("other", 0)}
    assert engine.stats().num_output_tokens == num_output_tokens + len(tokens_of(rest["other", 0]))
    engine.settle()
    assert counted(engine) == (0, 0, 0, 0)
    assert_at_rest(engine)


def test_preempted_sequence_waits_and_its_abort_is_counted() -> None:
    engine = make_engine(num_pages=12, max_num_seqs=2, max_model_len=40, run_ahead=0, enable_prefix_caching=False)
    for name in ("first", "second"):
        engine.add_request(name, "prompt", replace(GREEDY, max_tokens=30))
    while engine.stats().num_preemptions == 0:
        engine.step()
    assert counted(engine)[:3] == (1, 1, 2)
    engine.abort("second")
    assert counted(engine)[:3] == (1, 0, 1)
    run_all(engine)
    assert engine.stats().num_preemptions == 1
    assert counted(engine) == (0, 0, 0, 0)


def test_queue_time_ends_with_the_first_step_for_good() -> None:
    """A sequence that is preempted waits again; the time to its first step stays what it was."""
    engine = make_engine(num_pages=12, max_num_seqs=2, max_model_len=40, run_ahead=0, enable_prefix_caching=False)
    for name in ("first", "second"):
        engine.add_request(name, "prompt", replace(GREEDY, max_tokens=30))
    for deltas in run_all(engine).values():
        metrics = deltas[-1].metrics
        assert metrics is not None
        assert metrics.queue_seconds < metrics.first_token_seconds
    assert engine.stats().num_preemptions >= 1


class CountingRunner(GuessRunner):
    """Notes for each step with drafts how many there were and how many the model chose, too."""

    def __init__(self, limits, num_pages: int) -> None:
        super().__init__(limits, num_pages)
        self.drafts: list[tuple[int, int]] = []

    def _run(self, item: ScheduledSequence) -> SequenceResult:
        result = super()._run(item)
        if item.proposals:
            self.drafts.append((len(item.proposals), len(result.token_ids) - 1))
        return result


ENDS = {
    "eos at the first draft": ([*b"ab", EOS] * 4, {"min_tokens": 6}, "stop", 4),
    "eos at the second": ([*b"abc", EOS] * 4, {"min_tokens": 8}, "stop", 3),
    "eos at the last": ([*b"ab", EOS] * 4, {"min_tokens": 8}, "stop", 1),
    "stop token at the third": (list(b"abcdX" * 4), {"min_tokens": 10, "stop_token_ids": [ord("X")]}, "stop", 2),
    "length in the middle": (list(b"abc" * 6), {"max_tokens": 10}, "length", 0),
    "length after one draft": (list(b"abc" * 6), {"max_tokens": 7}, "length", 0),
    "no end among the drafts": ([*b"abcabcabcx", EOS], {}, "stop", 0),
}
"""Tokens of the model, params, how the answer ends, and how many tokens of the last step come after the end."""


@pytest.mark.parametrize("name", ENDS)
def test_accepted_drafts_after_an_end_are_not_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, options, reason, num_cut = ENDS[name]
    monkeypatch.setattr("engine.test_core_proposals.GuessRunner", CountingRunner)
    engine = guessing_engine()
    deltas = answers(engine, said, SamplingParams(temperature=0.0, **({"max_tokens": 40} | options)))
    drafts = engine.runner.drafts
    num_tokens = len(tokens_of(deltas))
    assert deltas[-1].finish_reason == reason
    assert drafts, "nothing was drafted"
    stats = engine.stats()
    assert stats.num_proposed_tokens == sum(proposed for proposed, _ in drafts)
    # Every step brings one token that the model chose itself, unless the answer ended at a draft before it.
    num_chosen = sum(accepted for _, accepted in drafts)
    assert stats.num_steps + num_chosen - num_tokens == num_cut
    assert stats.num_accepted_tokens == num_chosen - max(num_cut - 1, 0)
    assert stats.num_output_tokens == num_tokens


@for_each("num_top", [0, 1, 2])
def test_logprobs_of_every_draft_are_those_of_its_place(num_top: int) -> None:
    said = list(b"abcabcabcabcabcabc")
    params = SamplingParams(temperature=0.0, max_tokens=len(said), logprobs=num_top)
    engine = guessing_engine()
    deltas = answers(engine, said, params)
    assert max(len(delta.token_ids) for delta in deltas) > 2, "no step brought several tokens"
    found = [place for delta in deltas for place in delta.logprobs or ()]
    expected = [
        position_logprobs(logprobs_at(token, 1 + place, num_top), num_top, engine.tokenizer)
        for place, token in enumerate(said)
    ]
    assert found == expected
    assert [len(place) for place in found] == [1 + num_top] * len(said)


@for_each("chunk", [1, 3, 5, 64])
@for_each("n", [1, 3])
def test_prompt_logprobs_come_once_with_the_first_completion(n: int, chunk: int) -> None:
    prompt = "seventeen tokens!"
    engine = make_engine(max_num_batched_tokens=chunk, run_ahead=0)
    for name in ("one", "two"):
        engine.add_request(name, prompt, replace(GREEDY, n=n, max_tokens=3, prompt_logprobs=2, logprobs=1))
        deltas = run_all(engine)
        reported = [(index, delta.prompt_logprobs) for (_, index), own in deltas.items() for delta in own]
        ((index, whole),) = [one for one in reported if one[1] is not None]
        assert index == 0
        expected = [
            position_logprobs(logprobs_at(token, place, 2), 2, engine.tokenizer)
            for place, token in enumerate(prompt.encode())
        ]
        assert whole == (None, *expected[1:])
        buffer = DeltaBuffer()
        for own in deltas.values():
            for delta in own:
                buffer.add(delta)
        merged = [delta.prompt_logprobs for delta in buffer.take()]
        assert merged == [whole] + [None] * (n - 1)
        buffer.add(deltas[name, 0][-1])
        assert buffer.take()[0].prompt_logprobs is None, "they were taken already"
        for completion in range(n):
            own = [entry for delta in deltas[name, completion] for entry in delta.logprobs or ()]
            tokens = tokens_of(deltas[name, completion])
            assert own == [
                position_logprobs(logprobs_at(token, 17 + place, 1), 1, engine.tokenizer)
                for place, token in enumerate(tokens)
            ]
        # Prompt logprobs compute the whole prompt.
        assert deltas[name, 0][-1].num_cached_tokens == 0


def test_step_sizes_and_tokens_add_up() -> None:
    engine = make_engine(max_num_batched_tokens=8, run_ahead=0, enable_prefix_caching=False)
    sizes: list[int] = []
    for prompt, num_tokens in (("x" * 8, 3), ("y" * 13, 4), ("z", 2)):
        engine.add_request(prompt, prompt, replace(GREEDY, max_tokens=num_tokens))
        run_all(engine)
    # Of each step the rows of prompts and the tokens that it chose: 8 + 1, 1, 1; 8, 5 + 1, 1, 1, 1; 1 + 1, 1.
    sizes = [9, 1, 1, 8, 6, 1, 1, 1, 2, 1]
    front = engine.front
    assert front.num_step_tokens == sum(sizes)
    assert front.steps_by_size[:5] == [6, 1, 0, 2, 1]
    assert sum(front.steps_by_size) == len(sizes) == engine.stats().num_steps
    assert engine.stats().num_prompt_tokens == 22


def test_pooled_request_that_fails_has_an_error_and_no_vector() -> None:
    engine = make_engine(run_ahead=0)
    engine.runner.answer = lambda item, result: result._replace(token_ids=(NO_TOKEN,)) if result.pooled else result
    engine.submit(engine.prepare_pooled("a text"), "one")
    (delta,) = run_all(engine)["one", 0]
    assert (delta.finish_reason, delta.pooled, delta.token_ids) == ("error", b"", ())
    engine.runner.answer = lambda item, result: result
    engine.submit(engine.prepare_pooled("a text"), "one")
    (delta,) = run_all(engine)["one", 0]
    assert (delta.finish_reason, delta.pooled) == ("length", hidden_of(list(b"a text")))
    assert (engine.stats().num_output_tokens, engine.stats().num_requests) == (0, 2)


def test_stopped_step_ends_every_sequence_that_was_in_it() -> None:
    engine = make_engine(run_ahead=0)
    with_layers(engine, {2: "a", 7: "b"})
    for name in "ab":
        engine.add_request(name, f"prompt of {name}", replace(GREEDY, n=2, max_tokens=3))
    engine.step()
    assert counted(engine) == (0, 0, 2, 0), "the core has none, and the front still has both requests"
    assert len(engine.abort_all()) == 4
    assert counted(engine) == (0, 0, 0, 0)


@for_each("min_tokens", [0, 1, 2, 3, 4, 5, 6, 7])
@for_each("kind", ["eos", "stop token", "stop string", "stop string of two"])
def test_min_tokens_holds_off_every_end_exactly_so_long(kind: str, min_tokens: int) -> None:
    end = EOS if kind == "eos" else ord("X")
    options = {"eos": {}, "stop token": {"stop_token_ids": [end]}, "stop string": {"stop": ["X"]}}
    own = options.get(kind, {"stop": ["bX"]})
    engine = make_engine(run_ahead=0)
    engine.runner.script["Q"] = [*b"ab", end] * 5
    for name in ("one", "two"):
        engine.add_request(name, "Q", replace(GREEDY, min_tokens=min_tokens, **own))
        deltas = run_all(engine)[name, 0]
        # Every third token is an end, and the first that may end is number min_tokens.
        num_tokens = max(-(-min_tokens // 3), 1) * 3
        assert len(tokens_of(deltas)) == num_tokens
        reason = {"eos": None, "stop token": end, "stop string": "X"}.get(kind, "bX")
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", reason)
        metrics = deltas[-1].metrics
        assert metrics is not None
        assert metrics.total_seconds > metrics.first_token_seconds > metrics.queue_seconds >= 0


def test_front_drops_surplus_and_takes_what_follows_it() -> None:
    engine = make_engine(run_ahead=0)
    engine.add_request("one", "Q", GREEDY)
    stats = engine.core.stats()
    outputs = [SequenceOutput(number, (97,)) for number in (5, 0, 9)]
    assert engine.front.take(CoreOutputs(tuple(outputs), stats)) == []
    assert [(delta.request_id, delta.token_ids) for delta in engine.front.deliver()] == [("one", (97,))]
    assert engine.front.num_output_tokens == 1


def test_abort_takes_undelivered_deltas_of_its_request_alone() -> None:
    engine = make_engine(run_ahead=0)
    for name in ("one", "two", "three"):
        engine.add_request(name, name, GREEDY)
    outputs = [SequenceOutput(number, (97 + number,)) for number in range(3)]
    engine.front.take(CoreOutputs(tuple(outputs), engine.core.stats()))
    reported = engine.abort("two")
    assert [(delta.token_ids, delta.finish_reason) for delta in reported] == [((98,), None), ((), "abort")]
    assert [(delta.request_id, delta.token_ids) for delta in engine.step()] == [("one", (97,)), ("three", (99,))]
    engine.abort_all()

"""From tokens to outputs: text and endings, log-probabilities by place, deltas that add up, merged or not."""

import pytest

from engine.fakes import EOS, logprobs_at, shared_tokenizer
from for_each import for_each
from holdfast.engine.messages import CoreRequest, Ending, SequenceOutput
from holdfast.engine.outputs import Completion, DeltaBuffer, OutputAssembler, PromptLogprobs, position_logprobs
from holdfast.request.outputs import CompletionDelta, Logprob, RequestMetrics
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import TokenLogprobs


def completion(max_tokens: int = 100, **params) -> Completion:
    request = CoreRequest(3, tuple(b"Q"), SamplingParams(**params), seed=0, max_tokens=max_tokens)
    return Completion("r", 2, request, shared_tokenizer(), arrived_at=10.0)


def output(*token_ids: int, ending: Ending | None = None, **others) -> SequenceOutput:
    """What a core brings: two tokens of log-probabilities each, and whatever else is said."""
    logprobs = tuple(logprobs_at(token, 0, 1) for token in token_ids)
    return SequenceOutput(3, token_ids, logprobs, ending, **others)


def say(subject: Completion, tokens: bytes | list[int], ending: Ending | None = None, at_once: int = 1):
    """Give it tokens, so many in a step; the core ends it with the last of them. The deltas, up to its end."""
    deltas = []
    for start in range(0, len(tokens), at_once):
        is_last = start + at_once >= len(tokens)
        delta = subject.advance(output(*tokens[start : start + at_once], ending=ending if is_last else None), 20.0)
        deltas.append(delta)
        if delta.finish_reason is not None:
            break
    return deltas


LENGTH, STOP = Ending("length"), Ending("stop")


@for_each("at_once", [1, 2, 5])
@for_each(
    "params, tokens, core, text, count, ending",
    [
        ({}, b"abc", None, "abc", 3, None),
        ({}, b"abc", LENGTH, "abc", 3, LENGTH),
        ({}, [*b"ab", EOS], STOP, "ab", 3, STOP),
        ({}, b"ab", Ending("stop", 98), "a", 2, Ending("stop", 98)),
        ({"stop": "bc"}, b"abc", None, "a", 3, Ending("stop", "bc")),
        ({"stop": "bc"}, b"abcdefg", LENGTH, "a", 3, Ending("stop", "bc")),
        ({"stop": ["c", "bc"]}, b"abc", None, "a", 3, Ending("stop", "bc")),
        ({"stop": "cd"}, b"abc", LENGTH, "abc", 3, LENGTH),
        ({"stop": "bc"}, b"abc", LENGTH, "a", 3, Ending("stop", "bc")),
        ({"stop": "é"}, "aé".encode(), None, "a", 3, Ending("stop", "é")),
        ({"stop": "\ufffd"}, "aé".encode()[:2], LENGTH, "a", 2, Ending("stop", "\ufffd")),
        ({"stop": "bc", "min_tokens": 2}, b"abc", None, "a", 3, Ending("stop", "bc")),
        ({"stop": "ab", "min_tokens": 3}, b"abc", None, "abc", 3, None),
        ({"stop": "ab", "min_tokens": 3}, b"abcabc", None, "abc", 5, Ending("stop", "ab")),
        ({}, "aé".encode()[:2], LENGTH, "a\ufffd", 2, LENGTH),
        ({}, b"ab", Ending("error", error="why"), "ab", 2, Ending("error", error="why")),
    ],
)
def test_completion_has_text_and_ending(params, tokens, core, text, count, ending, at_once):
    subject = completion(logprobs=1, **params)
    deltas = say(subject, tokens, core, at_once)
    assert "".join(delta.text for delta in deltas) == text
    last, ending = deltas[-1], ending or Ending(None)
    assert (last.finish_reason, last.stop_reason, last.error) == (
        ending.finish_reason,
        ending.stop_reason,
        ending.error,
    )
    said = [token for delta in deltas for token in delta.token_ids]
    assert said == list(tokens[:count]), "what follows a stop string is dropped"
    measured = [next(iter(position)) for delta in deltas for position in delta.logprobs]
    assert measured == said


def test_completion_delta_has_request_and_index():
    (delta,) = say(completion(), b"a")
    assert (delta.request_id, delta.index) == ("r", 2)


def test_completion_end_from_outside_keeps_its_counts():
    subject = completion()
    before = subject.end(Ending("abort"), 30.0)
    assert (before.finish_reason, before.token_ids, before.metrics) == ("abort", (), None)
    subject.advance(output(97, queue_seconds=2.0, num_cached_tokens=4, num_preemptions=1), 20.0)
    subject.advance(output(97, queue_seconds=2.0, num_cached_tokens=4, num_preemptions=2), 25.0)
    after = subject.end(Ending("error", error="why"), 30.0)
    assert (after.finish_reason, after.error, after.num_cached_tokens) == ("error", "why", 4)
    assert after.metrics == RequestMetrics(2, 10, 20, 4, 2)


def test_completion_may_end_without_token():
    subject = completion()
    assert subject.advance(output(), 20.0) is None
    last = subject.advance(output(ending=Ending("error", error="not finite")), 20.0)
    assert (last.finish_reason, last.error, last.token_ids, last.metrics) == ("error", "not finite", (), None)


def test_missing_logprobs_are_an_error_of_this_request():
    subject = completion(logprobs=1)
    with pytest.raises(AssertionError, match="no logprobs"):
        subject.advance(SequenceOutput(3, (97,)), 1.0)


TOP = ((98, -0.1), (97, -2.0), (99, -3.0))


def test_position_logprobs_adds_chosen_token_outside_top():
    found = position_logprobs(TokenLogprobs(122, -9.0, 40, TOP), 2, shared_tokenizer())
    assert found == {122: Logprob(-9.0, 40, "z"), 98: Logprob(-0.1, 1, "b"), 97: Logprob(-2.0, 2, "a")}
    assert list(found) == [122, 98, 97]


def test_position_logprobs_lists_chosen_token_in_top_once():
    found = position_logprobs(TokenLogprobs(97, -2.0, 2, TOP), 3, shared_tokenizer())
    assert list(found) == [97, 98, 99]
    assert found[97].rank == 2


def test_rank_of_the_chosen_token_among_equals():
    tied = TokenLogprobs(97, -0.1, 1, ((98, -0.1), (97, -0.1)))
    assert position_logprobs(tied, 2, None)[97].rank == 1


def test_zero_logprobs_have_no_top():
    assert list(position_logprobs(TokenLogprobs(97, -2.0, 2, TOP), 0, None)) == [97]


def entry(position: int) -> TokenLogprobs:
    return TokenLogprobs(97 + position, -float(position), 1, ())


@for_each("chunk", [1, 2, 3, 5, 6])
def test_chunks_add_up_and_repeats_are_passed_over(chunk):
    prompt = PromptLogprobs(6, 0)
    for _ in range(2):
        for start in range(0, 6, chunk):
            places = range(start + 1, min(start + chunk, 5) + 1)
            prompt.collect(start, tuple(map(entry, places)), shared_tokenizer())
    whole = prompt.whole()
    assert whole[0] is None
    assert [next(iter(position)) for position in whole[1:]] == [98, 99, 100, 101, 102]


def test_prompt_logprobs_longer_repeat_adds_new_positions():
    prompt = PromptLogprobs(6, 0)
    prompt.collect(0, (entry(1), entry(2)), None)
    prompt.collect(0, (entry(1), entry(2), entry(3)), None)
    prompt.collect(1, (entry(2),), None)
    prompt.collect(3, (entry(4), entry(5)), None)
    assert [next(iter(position)) for position in prompt.whole()[1:]] == [98, 99, 100, 101, 102]


def test_prompt_logprobs_gap_raises():
    prompt = PromptLogprobs(6, 0)
    prompt.collect(0, (entry(1),), None)
    with pytest.raises(AssertionError, match="without logprobs"):
        prompt.collect(2, (entry(3),), None)
    with pytest.raises(AssertionError, match="2 of 6 prompt positions"):
        prompt.whole()


def delta(index: int, text: str, *token_ids: int, logprob: float | None = None, **others) -> CompletionDelta:
    logprobs = None if logprob is None else tuple({token: Logprob(logprob, 1, "")} for token in token_ids)
    others = {"finish_reason": None, "stop_reason": None, **others}
    return CompletionDelta("r", index, text, token_ids, logprobs, **others)


def metrics(queue: float, first: float, total: float, cached: int, preemptions: int) -> RequestMetrics:
    return RequestMetrics(queue, first, total, cached, preemptions)


ANSWER = [
    delta(0, "a", 1, num_cached_tokens=8, prompt_logprobs=(None, {5: Logprob(-1.0, 1, "x")})),
    delta(1, "", 11),
    delta(0, "bc", 2),
    delta(1, "k", 12, finish_reason="stop", stop_reason="!", metrics=metrics(1, 3, 5, 16, 1)),
    delta(0, "", finish_reason="error", error="broken", num_cached_tokens=8, metrics=metrics(2, 2, 9, 8, 2)),
]


def assembled(deltas: list[CompletionDelta], n: int = 2) -> OutputAssembler:
    assembler = OutputAssembler("prompt", [5, 6], n)
    for item in deltas:
        assembler.add(item)
    return assembler


def test_assembler_output_is_sum_of_deltas():
    output = assembled(ANSWER).output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", [5, 6])
    first, second = output.outputs
    assert (first.index, first.text, first.token_ids) == (0, "abc", [1, 2])
    assert (first.finish_reason, first.stop_reason, first.logprobs, first.cumulative_logprob) == (
        "error",
        None,
        None,
        None,
    )
    assert (second.index, second.text, second.token_ids) == (1, "k", [11, 12])
    assert (second.finish_reason, second.stop_reason) == ("stop", "!")
    assert output.finished
    assert output.error == "broken"
    assert output.num_cached_tokens == 8
    assert output.prompt_logprobs == [None, {5: Logprob(-1.0, 1, "x")}]
    assert output.metrics == RequestMetrics(1, 2, 9, 8, 3)


def test_before_the_end_it_is_unfinished_and_has_no_metrics():
    for num_deltas in range(len(ANSWER)):
        output = assembled(ANSWER[:num_deltas]).output()
        assert not output.finished
        assert output.metrics is None
    assert [completion.finished for completion in assembled(ANSWER[:4]).output().outputs] == [False, True]


def test_assembler_output_does_not_change_later():
    assembler = assembled(ANSWER[:2])
    output = assembler.output()
    kept = repr(output)
    for item in ANSWER[2:]:
        assembler.add(item)
    assembler.output()
    assert repr(output) == kept


def test_assembler_adds_up_logprobs():
    assembler = assembled([delta(0, "", 1, logprob=-0.5), delta(0, "", 2, 3, logprob=-0.25)], n=1)
    completion = assembler.output().outputs[0]
    assert completion.cumulative_logprob == -1.0
    assert [list(position) for position in completion.logprobs] == [[1], [2], [3]]


def test_cumulative_logprob_does_not_depend_on_batching():
    first, others = delta(0, "", 9, logprob=-0.7), [delta(0, "", token, logprob=-0.1) for token in (1, 2, 3)]
    totals = {
        assembled(deltas, n=1).output().outputs[0].cumulative_logprob
        for deltas in ([first, *others], [first, delta(0, "", 1, 2, 3, logprob=-0.1)])
    }
    assert totals == {-0.7 - 0.1 - 0.1 - 0.1}


@for_each("every", [1, 2, 3, 5])
def test_merged_deltas_say_the_same(every):
    assembler, buffer = OutputAssembler("prompt", [5, 6], 2), DeltaBuffer()
    for number, item in enumerate(ANSWER):
        buffer.add(item)
        if number % every == every - 1 or number == len(ANSWER) - 1:
            taken = buffer.take()
            assert [item.index for item in taken] == sorted({item.index for item in taken})
            for merged in taken:
                assembler.add(merged)
            assert len(buffer) == 0
    assert assembler.output() == assembled(ANSWER).output()


def test_delta_buffer_merges_unread_deltas():
    buffer = DeltaBuffer()
    for token in range(10_000):
        buffer.add(delta(token % 2, "x", token, logprob=-1.0))
    assert len(buffer) == 2
    first, second = buffer.take()
    assert (len(first.token_ids), len(first.logprobs), first.text) == (5000, 5000, "x" * 5000)
    assert second.token_ids[:3] == (1, 3, 5)
    assert buffer.take() == []


def test_added_output_has_the_numbers_of_its_own_completion():
    deltas = [delta(0, "a", 1, logprob=-0.5), delta(1, "b", 2, logprob=-0.25), delta(1, "c", 3, logprob=-1.0)]
    assembler = assembled(deltas)
    found = assembler.added(deltas[1:]).outputs
    assert [(one.index, one.text, one.token_ids) for one in found] == [(1, "b", [2]), (1, "c", [3])]
    assert [one.cumulative_logprob for one in found] == [-1.25, -1.25]
    assert assembler.added(deltas[:1]).outputs[0].cumulative_logprob == -0.5


def test_tokens_per_second_are_counted_from_the_first_token():
    own = completion()
    assert own.tokens_per_second(11.0) == 0.0
    own.advance(output(97), 12.0)
    assert own.tokens_per_second(12.0) == own.tokens_per_second(13.0) == 0.0
    own.advance(output(98, 99), 13.0)
    own.advance(output(100), 14.0)
    assert own.tokens_per_second(14.0) == 1.5

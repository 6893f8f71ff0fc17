import pytest

from holdfast.engine.outputs import DeltaBuffer, OutputAssembler
from holdfast.request.outputs import CompletionDelta, Logprob, RequestMetrics


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


def test_an_answer_is_the_sum_of_its_deltas():
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


def test_an_output_does_not_change_later():
    assembler = assembled(ANSWER[:2])
    output = assembler.output()
    kept = repr(output)
    for item in ANSWER[2:]:
        assembler.add(item)
    assembler.output()
    assert repr(output) == kept


def test_logprobs_add_up():
    assembler = assembled([delta(0, "", 1, logprob=-0.5), delta(0, "", 2, 3, logprob=-0.25)], n=1)
    completion = assembler.output().outputs[0]
    assert completion.cumulative_logprob == -1.0
    assert [list(position) for position in completion.logprobs] == [[1], [2], [3]]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
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


def test_an_unread_answer_takes_no_more_room_than_the_answer():
    buffer = DeltaBuffer()
    for token in range(10_000):
        buffer.add(delta(token % 2, "x", token, logprob=-1.0))
    assert len(buffer) == 2
    first, second = buffer.take()
    assert (len(first.token_ids), len(first.logprobs), first.text) == (5000, 5000, "x" * 5000)
    assert second.token_ids[:3] == (1, 3, 5)
    assert buffer.take() == []

"""Outputs: a completion with a reason is finished, and two completions share no lists."""

from holdfast.request.outputs import CompletionOutput, RequestOutput


def test_completion_with_a_reason_is_finished() -> None:
    completion = CompletionOutput(index=0)
    assert not completion.finished
    completion.finish_reason = "stop"
    assert completion.finished


def test_completions_share_no_lists() -> None:
    first, second = CompletionOutput(index=0), CompletionOutput(index=1)
    first.token_ids.append(7)
    assert second.token_ids == []


def test_output_has_the_shape_that_callers_index() -> None:
    output = RequestOutput("r", "Hi", [1, 2], [CompletionOutput(0, text="Hello", finish_reason="stop")], finished=True)
    assert output.outputs[0].text == "Hello"
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt_logprobs is None

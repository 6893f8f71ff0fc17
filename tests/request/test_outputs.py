"""What callers read: a completion says whether it is done, and two completions share nothing."""

import pytest

from holdfast.request.outputs import CompletionOutput, RequestOutput


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_a_completion_is_done_when_it_has_a_reason(reason) -> None:
    completion = CompletionOutput(index=0)
    assert not completion.finished
    completion.finish_reason = reason
    assert completion.finished


def test_completions_share_no_lists() -> None:
    first, second = CompletionOutput(index=0), CompletionOutput(index=1)
    first.token_ids.append(7)
    assert second.token_ids == []


def test_the_shape_that_callers_index_into() -> None:
    output = RequestOutput("r", "Hi", [1, 2], [CompletionOutput(0, text="Hello", finish_reason="stop")], finished=True)
    assert output.outputs[0].text == "Hello"
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt_logprobs is None

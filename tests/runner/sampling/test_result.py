"""Results of a step: three answers that must never be confused, and no way to change them afterwards."""

import dataclasses

import pytest

from holdfast.runner.sampling.batch import NO_TOKEN, SequenceResult, StepResult, TokenLogprobs


def test_no_token_is_neither_a_token_nor_an_unfinished_chunk() -> None:
    assert NO_TOKEN < 0, "token ids start at 0"
    assert SequenceResult(token_id=None).token_id is None
    assert SequenceResult(token_id=0).token_id == 0
    assert len({SequenceResult(None), SequenceResult(NO_TOKEN), SequenceResult(0)}) == 3


def test_results_are_values() -> None:
    logprobs = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (7, -1.5)))
    result = StepResult((SequenceResult(5, logprobs), SequenceResult(None)))
    assert result == StepResult((SequenceResult(5, logprobs), SequenceResult(None)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.results[0].token_id = 6  # type: ignore[misc]

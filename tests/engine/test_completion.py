import pytest

from engine.fakes import EOS, logprobs_at, shared_tokenizer
from holdfast.engine.outputs import Completion, Ending
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.batch import SequenceResult


def completion(max_tokens: int = 100, **params) -> Completion:
    sequence = Sequence(3, list(b"Q"), 1, SamplingParams(**params), seed=0, max_tokens=max_tokens)
    return Completion("r", 2, sequence, shared_tokenizer(), arrived_at=10.0)


def say(subject: Completion, tokens: bytes | list[int], now: float = 20.0):
    """Give it tokens until it ends: the deltas, and the ending."""
    deltas, ending = [], None
    for token in tokens:
        assert ending is None, "it was asked to go on after its end"
        subject.sequence.token_ids.append(token)
        result = SequenceResult(token, logprobs_at(token, 0, 1))
        delta, ending = subject.advance(token, result, frozenset((EOS,)), now)
        deltas.append(delta)
    return deltas, ending


@pytest.mark.parametrize(
    ("params", "tokens", "text", "ending"),
    [
        ({}, b"abc", "abc", None),
        ({"max_tokens": 3}, b"abc", "abc", Ending("length")),
        ({}, [*b"ab", EOS], "ab", Ending("stop")),
        ({"stop_token_ids": [EOS]}, [*b"ab", EOS], "ab", Ending("stop")),
        ({"stop_token_ids": [98]}, b"ab", "a", Ending("stop", 98)),
        ({"stop": "bc"}, b"abc", "a", Ending("stop", "bc")),
        ({"stop": ["c", "bc"]}, b"abc", "a", Ending("stop", "bc")),
        ({"stop": "cd", "max_tokens": 3}, b"abc", "abc", Ending("length")),
        ({"stop": "é"}, "aé".encode(), "a", Ending("stop", "é")),
        ({"stop": "\ufffd", "max_tokens": 2}, "aé".encode()[:2], "a", Ending("stop", "\ufffd")),
        ({"stop": "bc", "min_tokens": 2}, b"abc", "a", Ending("stop", "bc")),
        ({"stop": "ab", "min_tokens": 3}, b"abc", "abc", None),
        ({"stop_token_ids": [98], "min_tokens": 3}, b"aba", "aba", None),
        ({"stop_token_ids": [98], "min_tokens": 3}, b"abb", "ab", Ending("stop", 98)),
        ({"min_tokens": 3}, [*b"a", EOS, *b"b"], "ab", None),
        ({"min_tokens": 3}, [*b"a", EOS, EOS], "a", Ending("stop")),
    ],
    ids=str,
)
def test_text_and_ending(params, tokens, text, ending):
    subject = completion(**{"max_tokens": 100, **params})
    deltas, found = say(subject, tokens)
    held = "" if subject._stop_strings is None else subject._stop_strings.flush()
    assert ("".join(delta.text for delta in deltas) + held, found) == (text, ending)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (
        (None, None) if ending is None else (ending.finish_reason, ending.stop_reason)
    )
    assert [delta.token_ids for delta in deltas] == [(token,) for token in tokens]


def test_deltas_say_whose_they_are():
    deltas, _ = say(completion(), b"a")
    assert (deltas[0].request_id, deltas[0].index) == ("r", 2)


def test_ending_from_outside():
    subject = completion()
    before = subject.end(Ending("abort"), 30.0)
    assert (before.finish_reason, before.token_ids, before.metrics) == ("abort", (), None)
    subject.scheduled_at = 12.0
    say(subject, b"a")
    subject.sequence.num_preemptions = 2
    after = subject.end(Ending("error", error="why"), 30.0)
    assert (after.finish_reason, after.error) == ("error", "why")
    assert (after.metrics.queue_seconds, after.metrics.first_token_seconds, after.metrics.total_seconds) == (2, 10, 20)
    assert after.metrics.num_preemptions == 2


def test_missing_logprobs_are_an_error_of_this_request():
    subject = completion(logprobs=1)
    subject.sequence.token_ids.append(97)
    with pytest.raises(AssertionError, match="no logprobs"):
        subject.advance(97, SequenceResult(97), frozenset(), 1.0)

import pytest

from engine.fakes import shared_tokenizer
from holdfast.engine.outputs import PromptLogprobs, position_logprobs
from holdfast.request.outputs import Logprob
from holdfast.runner.sampling.batch import TokenLogprobs

TOP = ((98, -0.1), (97, -2.0), (99, -3.0))


def test_a_chosen_token_outside_the_top_is_there_with_its_rank():
    found = position_logprobs(TokenLogprobs(122, -9.0, 40, TOP), 2, shared_tokenizer())
    assert found == {122: Logprob(-9.0, 40, "z"), 98: Logprob(-0.1, 1, "b"), 97: Logprob(-2.0, 2, "a")}
    assert list(found) == [122, 98, 97]


def test_a_chosen_token_in_the_top_is_there_once():
    found = position_logprobs(TokenLogprobs(97, -2.0, 2, TOP), 3, shared_tokenizer())
    assert list(found) == [97, 98, 99]
    assert found[97].rank == 2


def test_the_rank_of_a_chosen_token_is_the_measured_one_among_equals():
    tied = TokenLogprobs(97, -0.1, 1, ((98, -0.1), (97, -0.1)))
    assert position_logprobs(tied, 2, None)[97].rank == 1


def test_none_of_the_top_when_none_was_asked():
    assert list(position_logprobs(TokenLogprobs(97, -2.0, 2, TOP), 0, None)) == [97]


def entry(position: int) -> TokenLogprobs:
    return TokenLogprobs(97 + position, -float(position), 1, ())


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 6])
def test_chunks_add_up_and_repeats_are_passed_over(chunk):
    prompt = PromptLogprobs(6, 0)
    for _ in range(2):
        for start in range(0, 6, chunk):
            places = range(start + 1, min(start + chunk, 5) + 1)
            prompt.collect(start, tuple(map(entry, places)), shared_tokenizer())
            assert len(prompt._by_position) >= places.stop if len(places) else True
    whole = prompt.whole()
    assert whole[0] is None
    assert [next(iter(position)) for position in whole[1:]] == [98, 99, 100, 101, 102]


def test_a_repeat_that_goes_further_adds_what_is_new():
    prompt = PromptLogprobs(6, 0)
    prompt.collect(0, (entry(1), entry(2)), None)
    prompt.collect(0, (entry(1), entry(2), entry(3)), None)
    prompt.collect(1, (entry(2),), None)
    prompt.collect(3, (entry(4), entry(5)), None)
    assert [next(iter(position)) for position in prompt.whole()[1:]] == [98, 99, 100, 101, 102]


def test_a_gap_is_noticed():
    prompt = PromptLogprobs(6, 0)
    prompt.collect(0, (entry(1),), None)
    with pytest.raises(AssertionError, match="without logprobs"):
        prompt.collect(2, (entry(3),), None)
    with pytest.raises(AssertionError, match="2 of 6 prompt positions"):
        prompt.whole()

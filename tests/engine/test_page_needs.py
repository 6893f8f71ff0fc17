"""PageNeeds: pages for tokens, claims, and who can never run."""

import pytest

from holdfast.config import Limits
from holdfast.engine.scheduler import PageNeeds
from holdfast.errors import RequestError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence

NEEDS = PageNeeds(Limits(8, 64, max_model_len=40, page_tokens=4), num_pages=8)


def sequence(num_prompt: int, max_tokens: int, num_outputs: int = 0, num_pages: int = 0) -> Sequence:
    tokens = [0] * (num_prompt + num_outputs)
    return Sequence(0, tokens, num_prompt, SamplingParams(), 0, max_tokens, pages=list(range(num_pages)))


def test_pages_for_tokens_at_the_edges() -> None:
    assert [NEEDS.pages_for(tokens) for tokens in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "pages"),
    [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3), (32, 1, 8), (1, 32, 8), (31, 2, 8)],
)
def test_the_last_token_needs_no_page(num_prompt: int, max_tokens: int, pages: int) -> None:
    assert NEEDS.max_pages(sequence(num_prompt, max_tokens)) == pages


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [
        (0, 5, "a sequence of 0 tokens was asked; 1 to max_model_len=40 work"),
        (41, 1, "a sequence of 41 tokens was asked; 1 to max_model_len=40 work"),
        (33, 1, "33 prompt and 1 output tokens were asked; the KV cache holds 32 tokens"),
        (1, 33, "1 prompt and 33 output tokens were asked; the KV cache holds 32 tokens"),
    ],
)
def test_what_can_never_run_is_refused_in_one_line(num_prompt: int, max_tokens: int, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        NEEDS.max_pages(sequence(num_prompt, max_tokens))
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert caught.value.do


def test_a_longer_context_than_the_pool_is_bounded_by_max_model_len() -> None:
    needs = PageNeeds(Limits(8, 64, max_model_len=16, page_tokens=4), num_pages=4)
    assert needs.max_pages(sequence(10, 1000)) == 4


def test_a_claim_has_one_page_to_grow_into_but_never_more_than_it_may_need() -> None:
    assert NEEDS.claim(sequence(5, 20), max_pages=6) == 3
    assert NEEDS.claim(sequence(5, 20, num_pages=2), max_pages=6) == 1
    assert NEEDS.claim(sequence(5, 4), max_pages=2) == 2
    assert NEEDS.claim(sequence(5, 4, num_pages=2), max_pages=2) == 0
    assert NEEDS.claim(sequence(5, 20, num_outputs=4, num_pages=3), max_pages=6) == 1

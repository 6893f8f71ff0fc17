"""Slots: the rows that a sequence gets copies of are those that it lacks, or its first step is refused."""

import pytest

from error_codes import raises_code
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Admitted, RowCopy, Step, StepItem
from holdfast.runner.slots import Slots

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=20, max_model_len=60, page_tokens=4)
GROUPS = (
    CacheGroup("window of 8", 4, window=8),
    CacheGroup("entries of 4", 16, tokens_per_row=4),
    CacheGroup("entries of 8", 32, tokens_per_row=8),
)
TABLES = ((-1, -1, -1, -1, 4, 5, 6), (10, 11), (20,))
RIGHT = (RowCopy(1, 30, 11, 2), RowCopy(2, 31, 20, 3))
"""For a prefix of 24 tokens."""


def step(copies: tuple[RowCopy, ...], start: int = 24, number: int = 1) -> Step:
    tokens = tuple(range(10, 37))
    one = Admitted(0, 7, tokens, len(tokens), SamplingParams(), seed=1, copies=copies)
    return Step(number, (), (one,), (StepItem(0, start, 27 - start, True, TABLES),))


def test_accept_of_the_rows_that_are_missing() -> None:
    slots = Slots(LIMITS, GROUPS, 40, 100)
    slots.accept(step(RIGHT))
    slots.accept(Step(2, (), (), (StepItem(0, 27, 1, True),)))


@pytest.mark.parametrize(
    "copies",
    [
        (),
        RIGHT[:1],
        RIGHT[::-1],
        (*RIGHT, RIGHT[0]),
        (RIGHT[0]._replace(num_rows=1), RIGHT[1]),
        (RIGHT[0]._replace(target=10), RIGHT[1]),
        (RIGHT[0]._replace(group=0), RIGHT[1]),
        (RIGHT[0]._replace(source=40), RIGHT[1]),
    ],
)
def test_accept_of_other_copies_is_refused(copies: tuple[RowCopy, ...]) -> None:
    slots = Slots(LIMITS, GROUPS, 40, 100)
    with raises_code("runner.bad_step", MessageError):
        slots.accept(step(copies))
    slots.accept(step(RIGHT))


def test_accept_of_copies_without_a_prefix_is_refused() -> None:
    slots = Slots(LIMITS, (GROUPS[1], GROUPS[2]), 40, 100)
    tokens = tuple(range(10, 20))
    one = Admitted(0, 7, tokens, 10, SamplingParams(), seed=1, copies=(RowCopy(0, 30, 11, 1),))
    with raises_code("runner.bad_step", MessageError):
        slots.accept(Step(1, (), (one,), (StepItem(0, 0, 10, True, ((11,), (20,))),)))

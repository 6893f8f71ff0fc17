"""Slots with states outside the pages: where a sequence begins, how its rows are cut, and which snapshots are copied."""

from dataclasses import replace
from typing import Any

import pytest

from error_codes import raises_code
from holdfast.cache.groups import CacheGroup
from holdfast.cache.states import StateRule
from holdfast.config import Limits
from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.slots import Slots

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=40, max_model_len=60, page_tokens=4)
RULE = StateRule(grid=8, num_snapshots=3)
TOKENS = tuple(range(10, 43))
"""33 tokens; a prompt of 25 ends with a row alone on its chunk."""
PAGES = (tuple(range(10)),)


def make_slots(rule: StateRule | None = RULE) -> Slots:
    return Slots(replace(LIMITS, max_sampled_rows=8), (CacheGroup("whole context", 4),), 40, 100, rule)


def step(start: int, num_new: int, *, number: int = 1, num_prompt: int = 25, first: bool = True, **fields: Any) -> Step:
    """A step of one sequence: fields of its admission and its item."""
    item_fields = {name: fields.pop(name) for name in ("state_to",) if name in fields}
    one = Admitted(0, 7, TOKENS, num_prompt, SamplingParams(), seed=1, **fields)
    samples = start + num_new == len(TOKENS)
    item = StepItem(0, start, num_new, samples, PAGES if first else (), **item_fields)
    return Step(number, (), (one,) if first else (), (item,))


def test_pieces_of_a_prompt_and_single_rows_are_accepted() -> None:
    slots = make_slots()
    cuts = [(0, 16), (16, 8), (24, 1), (25, 1), (26, 1)]
    for number, (start, num_new) in enumerate(cuts, 1):
        slots.accept(step(start, num_new, number=number, first=number == 1))


def test_state_of_a_snapshot_and_for_a_snapshot_are_accepted() -> None:
    slots = make_slots()
    live = slots.accept(step(8, 16, state_from=2, state_to=2))
    assert live.step.items[0].state_to == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 0, "num_new": 12},
        {"start": 0, "num_new": 25},
        {"start": 0, "num_new": 26},
        {"start": 0, "num_new": 24, "num_prompt": 20},
        {"start": 8, "num_new": 8},
        {"start": 0, "num_new": 8, "state_from": 0},
        {"start": 4, "num_new": 4, "state_from": 0},
        {"start": 8, "num_new": 8, "state_from": 3},
        {"start": 0, "num_new": 8, "state_to": 3},
        {"start": 0, "num_new": 20, "num_prompt": 20, "state_to": 0},
    ],
    ids=str,
)
def test_steps_that_kernels_would_compute_otherwise_are_refused(wrong: dict[str, int]) -> None:
    slots = make_slots()
    with raises_code("runner.bad_step", MessageError):
        slots.accept(step(**wrong))
    slots.accept(step(0, 8))


@pytest.mark.parametrize(("start", "num_new"), [(20, 5), (25, 2)])
def test_later_steps_go_on_as_kernels_take_them(start: int, num_new: int) -> None:
    slots = make_slots()
    num_prompt = 32 if start == 20 else 25
    slots.accept(step(0, 24, num_prompt=num_prompt))
    number = 2
    if start == 25:
        slots.accept(step(24, 1, number=2, first=False))
        number = 3
    with raises_code("runner.bad_step", MessageError):
        slots.accept(step(start, num_new, number=number, first=False))


def test_snapshot_after_the_prompt_is_refused() -> None:
    slots = make_slots()
    slots.accept(step(0, 7, num_prompt=7))
    with raises_code("runner.bad_step", MessageError):
        slots.accept(step(7, 1, number=2, first=False, num_prompt=7, state_to=0))


@pytest.mark.parametrize("fields", [{"state_from": 0}, {"state_to": 0}])
def test_snapshots_of_a_model_without_states_are_refused(fields: dict[str, int]) -> None:
    slots = make_slots(None)
    with raises_code("runner.bad_step", MessageError):
        slots.accept(step(8, 8, **fields))


def test_two_sequences_for_one_snapshot_are_refused() -> None:
    slots = make_slots()
    admitted = tuple(Admitted(slot, 7 + slot, TOKENS, 25, SamplingParams(), seed=1) for slot in range(2))
    pages = (tuple(range(4)),), (tuple(range(4, 8)),)
    for places in ((1, 1), (1, 2)):
        items = tuple(StepItem(slot, 0, 16, False, pages[slot], (), place) for slot, place in enumerate(places))
        if places == (1, 1):
            with raises_code("runner.bad_step", MessageError):
                slots.accept(Step(1, (), admitted, items))
        else:
            slots.accept(Step(1, (), admitted, items))


def decode(start: int, *drafts: int, number: int, slot: int = 0) -> Step:
    return Step(number, (), (), (StepItem(slot, start, 1 + len(drafts), True, (), drafts),))


def chosen(*tokens: int) -> StepResult:
    return StepResult((SequenceResult(tokens),))


def with_drafts() -> Slots:
    """A sequence of 33 tokens that is computed up to the last one."""
    slots = make_slots(StateRule(grid=8, num_snapshots=3, num_drafts=3))
    for number, (start, num_new) in enumerate([(0, 24), *((24 + nth, 1) for nth in range(8))], 1):
        slots.book(slots.accept(step(start, num_new, number=number, first=number == 1)), chosen())
    return slots


@pytest.mark.parametrize("num_accepted", range(4))
def test_next_step_applies_the_draft_tokens_that_were_accepted(num_accepted: int) -> None:
    """Once: the step after it has all of them in its state."""
    slots, drafts = with_drafts(), (50, 51, 52)
    live = slots.accept(decode(32, *drafts, number=10))
    assert live.scheduled[0].num_accepted == 0
    slots.book(live, chosen(*drafts[:num_accepted], 60))
    start = 33 + num_accepted
    for number, expected in ((11, num_accepted), (12, 0)):
        live = slots.accept(decode(start, number=number))
        assert live.scheduled[0].num_accepted == expected
        slots.book(live, chosen(61))
        start += 1


def test_sequence_that_takes_a_slot_again_has_accepted_nothing() -> None:
    slots = with_drafts()
    slots.book(slots.accept(decode(32, 50, 51, number=10)), chosen(50, 51, 60))
    again = Admitted(0, 7, (*TOKENS, 50, 51, 60), 25, SamplingParams(), seed=1)
    live = slots.accept(Step(11, (0,), (again,), (StepItem(0, 0, 24, False, PAGES),)))
    assert live.scheduled[0].num_accepted == 0


@pytest.mark.parametrize("drafts", [(50,) * 4, (50,) * 6], ids=len)
def test_more_draft_tokens_than_a_slot_keeps_are_refused(drafts: tuple[int, ...]) -> None:
    slots = with_drafts()
    with raises_code("runner.bad_step", MessageError) as caught:
        slots.accept(decode(32, *drafts, number=10))
    assert "its slot keeps 3" in str(caught.value)
    slots.accept(decode(32, *drafts[:3], number=10))

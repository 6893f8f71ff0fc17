"""Rows with masks whatever is in flight: late, beside others, after a preemption, cut short: the same tokens to the bit."""

from random import Random

import pytest

from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import Admitted, Step, StepItem
from loading.tiny_models import VOCAB, save_tiny
from runner.drive import LoadedModel, Rig, load_model
from runner.sampling_rows import FakeForms
from runner.stepping import Ran, Wish, make_wishes
from runner.test_launch import assert_same, make_rig, run

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_k": 8},
    {"temperature": 1.2, "repetition_penalty": 1.3},
    {"temperature": 0.7, "min_tokens": 4},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return load_model(folder)


def make_mixed(seed: int) -> list[Wish]:
    """Requests of every kind, about half of which follow a form."""
    dice, wishes = Random(seed), make_wishes(seed, 12, VOCAB)
    for wish in wishes:
        if dice.random() < 0.5:
            wish.params = SamplingParams(**dice.choice(KINDS), structured_outputs={"json_object": True})
    return wishes


def run_following(rig: Rig, wishes: list[Wish], seed: int, run_ahead: int) -> tuple[Ran, FakeForms]:
    forms = FakeForms(VOCAB, eos_token_id=2)
    rig.runner.sampler.follow(forms)
    return run(rig, wishes, seed, run_ahead), forms


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_masks_in_any_schedule(model, seed):
    wishes = make_mixed(seed)
    expected, forms = run_following(make_rig(model, like_gpu=False), wishes, seed, run_ahead=0)
    followed = [person for person in expected.people if person.wish.params.structured_outputs is not None]
    assert len(followed) >= 2
    assert set(forms.requested) == {person.number for person in followed}
    for like_gpu in (False, True):
        for run_ahead in (0, 1):
            ran, _ = run_following(make_rig(model, like_gpu=like_gpu), wishes, seed + 7, run_ahead)
            assert_same(ran, expected)


def test_neighbours_are_as_if_none_had_a_form(model):
    wishes = make_mixed(5)
    mixed, _ = run_following(make_rig(model, like_gpu=True), wishes, 5, run_ahead=1)
    plain = [wish for wish in wishes if wish.params.structured_outputs is None]
    alone = run(make_rig(model, like_gpu=True), plain, 5, run_ahead=1)
    left = [person for person in mixed.people if person.wish.params.structured_outputs is None]
    assert [person.output for person in left] == [person.output for person in alone.people]


def test_proposals_for_a_sequence_with_a_form_are_refused(model):
    runner = make_rig(model, like_gpu=False).runner
    runner.sampler.follow(FakeForms(VOCAB))
    params = SamplingParams(structured_outputs={"json_object": True})
    runner.launch(Step(1, (), (Admitted(0, 1, (9, 10), 2, params, 0),), (StepItem(0, 0, 2, True, ((0, 1, 2),)),)))
    runner.collect()
    with pytest.raises(MessageError, match="its choices depend on one another"):
        runner.launch(Step(2, (), (), (StepItem(0, 2, 2, True, (), (11,)),)))

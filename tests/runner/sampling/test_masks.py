"""Masks of a step: filled by row, ends that are not wanted yet, a form that has the last word, rows without one."""

import numpy as np
import pytest
import torch

from holdfast.memory.ledger import Ledger
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence
from holdfast.runner.sampling.batch import Choice
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.masks import fill_masks, has_masks
from holdfast.runner.sampling.sampler import HostSampler

VOCAB_SIZE = 70
EOS = frozenset((3, 40))
FORM = {"json_object": True}


class Fixed:
    """Just the same tokens for every sequence that follows a form."""

    def __init__(self, *token_ids: int) -> None:
        bits = np.zeros(96, dtype=bool)
        bits[list(token_ids)] = True
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def fill(self, sequences, masks_RW):
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                masks_RW[row] = self._words


def make_sequence(number: int = 0, **params) -> Sequence:
    return Sequence(number, [5, 6, 7], 2, SamplingParams(**params), 0, max_tokens=99)


def filled(source, *sequences: Sequence) -> list[list[int]]:
    masks = np.full((len(sequences), 3), 12345, dtype=np.int32)
    fill_masks(source, list(map(Choice.of, sequences)), EOS, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def chosen(source, logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    """Just the same by both samplers."""
    found = []
    for sampler in (
        HostSampler(VOCAB_SIZE, 8),
        DeviceSampler(VOCAB_SIZE, torch.device("cpu"), 8, Ledger()),
    ):
        sampler.mask_source = source
        samples = sampler.launch(logits.clone(), list(map(Choice.of, sequences)), EOS).read()
        found.append([sample.token_id for sample in samples])
    assert found[0] == found[1]
    return found[0]


def test_rows_without_a_form_keep_every_token():
    plain, form = make_sequence(), make_sequence(structured_outputs=FORM)
    assert filled(Fixed(1, 3, 69), plain, form, plain) == [list(range(96)), [1, 3, 69], list(range(96))]
    assert not has_masks([Choice.of(plain)])
    assert has_masks([Choice.of(plain), Choice.of(form)])


def test_mask_of_unknown_grammar_allows_no_token():
    """A row whose form is not known must not come out as if it had none."""
    form = make_sequence(structured_outputs=FORM, temperature=0.0)
    assert filled(None, form, make_sequence()) == [[], list(range(96))]
    assert chosen(None, torch.randn(1, VOCAB_SIZE), form) == [NO_TOKEN]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [1, 3, 9, 40]),
        ({"min_tokens": 1}, [1, 3, 9, 40]),
        ({"min_tokens": 2}, [1, 9]),
        ({"ignore_eos": True}, [1, 9]),
        ({"stop_token_ids": [9]}, [1, 3, 9, 40]),
        ({"stop_token_ids": [9], "min_tokens": 5}, [1]),
        ({"stop_token_ids": [9], "ignore_eos": True}, [1, 9]),
    ],
)
def test_ends_that_are_not_wanted_yet(params, expected):
    assert filled(Fixed(1, 3, 9, 40), make_sequence(structured_outputs=FORM, **params)) == [expected]


@pytest.mark.parametrize("params", [{"min_tokens": 50}, {"ignore_eos": True}])
def test_mask_of_complete_grammar_allows_only_its_end_tokens(params):
    form = make_sequence(structured_outputs=FORM, temperature=0.0, **params)
    assert filled(Fixed(3), form) == [[3]]
    assert filled(Fixed(3, 40), form) == [[3, 40]]
    assert chosen(Fixed(3), torch.randn(1, VOCAB_SIZE), form) == [3]


def test_mask_overrides_bias_and_bans_may_leave_no_token():
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    for greedy in (0.0, 1.0):
        options = {"structured_outputs": FORM, "temperature": greedy}
        assert chosen(Fixed(8), logits, make_sequence(**options, logit_bias={9: 100.0})) == [8]
        assert chosen(Fixed(8, 9), logits, make_sequence(**options, logit_bias={9: 100.0})) == [9]
        assert chosen(Fixed(8, 9), logits, make_sequence(**options, allowed_token_ids=[9, 10])) == [9]
        assert chosen(Fixed(8), logits, make_sequence(**options, allowed_token_ids=[9, 10])) == [NO_TOKEN]
        banned = make_sequence(**options)
        banned.bad_word_ids = ((8,),)
        assert chosen(Fixed(8), logits, banned) == [NO_TOKEN]
        assert chosen(Fixed(8, 9), logits, banned) == [9]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.4}, {"top_k": 400, "min_p": 0.1}]
)
def test_neighbours_choose_the_same_to_the_bit(params):
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3
    plain = [make_sequence(number, **params) for number in range(6)]
    alone = chosen(Fixed(8, 9), logits, *plain)
    mixed = [
        make_sequence(number, structured_outputs=FORM, **params) if number % 2 else sequence
        for number, sequence in enumerate(plain)
    ]
    found = chosen(Fixed(8, 9), logits, *mixed)
    assert found[::2] == alone[::2]
    assert set(found[1::2]) <= {8, 9}


def test_logprobs_are_of_raw_logits():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 20] = 9.0
    sampler = HostSampler(VOCAB_SIZE, 1)
    sampler.mask_source = Fixed(8)
    form = make_sequence(structured_outputs=FORM, temperature=0.0, logprobs=1)
    (sample,) = sampler.launch(logits, [Choice.of(form)], EOS).read()
    assert sample.token_id == 8
    assert sample.logprobs is not None
    assert [token for token, _ in sample.logprobs.top] == [20]
    assert sample.logprobs.rank == 2


def test_choice_with_grammar_is_late_until_its_token_is_known():
    form, plain = make_sequence(structured_outputs=FORM), make_sequence()
    assert [Choice(form, position).is_late for position in (3, 4)] == [False, True]
    assert [Choice(plain, position).is_late for position in (3, 4)] == [False, False]
    assert Choice.of(form).is_edited

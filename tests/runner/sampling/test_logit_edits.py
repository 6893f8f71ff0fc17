"""Edits through a list of fixed length: in their order, in rounds where they are many, and none twice."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from holdfast.kernels.geometry import EDITS_PER_PROGRAM
from holdfast.kernels.sampling.edit_logits import EditKind
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling import logit_edits
from holdfast.runner.sampling.batch import Choice
from holdfast.runner.sampling.logit_edits import (
    EDITS_OF,
    EditContext,
    EditedBlock,
    Edits,
    EditStaging,
    SeenTokens,
    edit_rows,
)

VOCAB_SIZE = 50
token = st.integers(0, VOCAB_SIZE + 3)


def make_sequence(prompt: list[int], output: list[int], sequence_id: int = 0, bad_words=(), **params) -> Sequence:
    own = SamplingParams(**params)
    return Sequence(sequence_id, prompt + output, len(prompt), own, seed=0, max_tokens=1000, bad_word_ids=bad_words)


def assert_counted(seen: SeenTokens, sequence: Sequence) -> None:
    counts = seen.of(sequence)
    known = [token_id for token_id in sequence.token_ids if token_id < VOCAB_SIZE]
    output = Counter(token_id for token_id in sequence.token_ids[sequence.num_prompt_tokens :] if token_id < VOCAB_SIZE)
    assert sorted(counts.seen_ids.tolist()) == sorted(set(known))
    assert dict(zip(counts.output_ids.tolist(), counts.output_counts.tolist(), strict=True)) == output


@given(st.lists(token, max_size=60), st.lists(st.lists(token, max_size=40), max_size=5))
def test_seen_tokens_counts_growing_sequences(prompt, outputs):
    seen, sequence = SeenTokens(VOCAB_SIZE, 2), make_sequence(prompt, [])
    for output in outputs:
        sequence.token_ids.extend(output)
        assert_counted(seen, sequence)
        assert_counted(seen, sequence)


def test_seen_tokens_reused_sequence_id_is_recounted():
    seen = SeenTokens(VOCAB_SIZE, 8)
    first, second = make_sequence([1, 2], [3]), make_sequence([1, 2], [4])
    assert_counted(seen, first)
    assert_counted(seen, second)
    assert_counted(seen, first)
    first.num_prompt_tokens = 1
    assert_counted(seen, first)
    del first.token_ids[1:]
    assert_counted(seen, first)


def test_seen_tokens_evicts_least_recently_used_and_recounts():
    seen, rng = SeenTokens(VOCAB_SIZE, 3), random.Random(0)
    sequences = [make_sequence(rng.choices(range(VOCAB_SIZE), k=9), [], sequence_id) for sequence_id in range(7)]
    for _ in range(200):
        sequence = rng.choice(sequences)
        sequence.token_ids.append(rng.randrange(VOCAB_SIZE))
        assert_counted(seen, sequence)
        assert len(seen) <= 3
    latest = [seen.of(sequence) for sequence in sequences[:3]]
    assert [seen.of(sequence) for sequence in sequences[:3]] == latest
    seen.of(sequences[3])
    assert seen.of(sequences[1]) is latest[1]
    assert seen.of(sequences[0]) is not latest[0]


def test_seen_tokens_reads_only_new_tokens():
    class Tokens(list):
        num_read = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            Tokens.num_read += len(found)
            return found

    seen, sequence = SeenTokens(VOCAB_SIZE, 3), make_sequence([], [])
    sequence.token_ids = Tokens(range(40))
    sequence.num_prompt_tokens = 30
    seen.of(sequence)
    Tokens.num_read = 0
    sequence.token_ids.append(7)
    seen.of(sequence)
    assert Tokens.num_read == 1


EOS = frozenset({7, 11})


def edit_logits(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> None:
    vocab_size = logits.shape[1]
    edit_rows(
        logits, list(map(Choice.of, sequences)), EditContext(eos_token_ids, SeenTokens(vocab_size, 8), vocab_size)
    )


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 5


def reference(row: list[float], sequence: Sequence) -> list[float]:
    params, output = sequence.params, sequence.token_ids[sequence.num_prompt_tokens :]
    allowed = params.allowed_token_ids
    edited = [x if allowed is None or token_id in allowed else -math.inf for token_id, x in enumerate(row)]
    for token_id in set(sequence.token_ids):
        edited[token_id] *= params.repetition_penalty if edited[token_id] <= 0 else 1 / params.repetition_penalty
    for token_id in set(output):
        edited[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in [*(() if params.ignore_eos else EOS), *params.stop_token_ids]:
            edited[token_id] = -math.inf
    for *before, last in sequence.bad_word_ids:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            edited[last] = -math.inf
    return edited


CASES = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.4},
    "all penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {0: 5.0, 3: -100.0, VOCAB_SIZE - 1: 1.0}},
    "empty bias": {"logit_bias": {}},
    "min tokens": {"min_tokens": 90},
    "min tokens reached": {"min_tokens": 12},
    "min tokens and stop ids": {"min_tokens": 90, "stop_token_ids": (2, 7)},
    "min tokens past eos": {"min_tokens": 90, "stop_token_ids": (2,), "ignore_eos": True},
    "allowed": {"allowed_token_ids": (3, 5, VOCAB_SIZE - 1)},
    "one allowed": {"allowed_token_ids": (0,), "repetition_penalty": 1.2, "logit_bias": {1: 100.0}},
    "everything": {
        "allowed_token_ids": (7, 5, 9, 11),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 100.0, 5: 2.0},
        "min_tokens": 90,
    },
}


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_edit_logits_one_row_matches_reference_loop(params):
    sequence = make_sequence(some_tokens(1, 30), some_tokens(2, 12), **params)
    logits = make_logits(1)
    expected = reference(logits[0].tolist(), sequence)
    edit_logits(logits, [sequence], EOS)
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_mixed_rows_are_each_as_alone_to_the_bit():
    sequences = [
        make_sequence(some_tokens(seed, 20), some_tokens(seed + 100, seed), **params)
        for seed, params in enumerate(CASES.values())
    ]
    logits = make_logits(len(sequences))
    alone = logits.clone()
    for row, sequence in enumerate(sequences):
        edit_logits(alone[row : row + 1], [sequence], EOS)
    raw = logits.clone()
    edit_logits(logits, sequences, EOS)
    assert torch.equal(logits, alone)
    assert torch.equal(logits[0], raw[0])
    assert (logits != raw).any(dim=1).sum() > 8


def test_work_in_slices_is_the_same(monkeypatch):
    sequences = [
        make_sequence(some_tokens(row, 40), some_tokens(row + 9, 30), **CASES["everything"]) for row in range(5)
    ]
    whole, sliced = make_logits(5), make_logits(5)
    edit_logits(whole, sequences, EOS)
    monkeypatch.setattr(logit_edits, "EDIT_ENTRIES", 7)
    edit_logits(sliced, sequences, EOS)
    assert torch.equal(whole, sliced)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.0])
def test_repetition_is_that_of_transformers(penalty):
    sequence = make_sequence(some_tokens(3, 50), some_tokens(4, 20), repetition_penalty=penalty)
    logits = make_logits(1, seed=5)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([sequence.token_ids]), logits.clone())
    edit_logits(logits, [sequence], EOS)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("params", [CASES["presence"], CASES["frequency"]], ids=["presence", "frequency"])
def test_edit_logits_presence_and_frequency_ignore_prompt(params):
    logits = make_logits(1)
    raw = logits.clone()
    edit_logits(logits, [make_sequence([1, 2, 3, 3], [], **params)], EOS)
    assert torch.equal(logits, raw)


def test_infinities_stay_and_do_not_become_nan():
    sequence = make_sequence([0, 1], [0, 1], repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={0: 3.0, 1: 3.0})
    logits = torch.tensor([[math.inf, -math.inf, 0.0]])
    edit_logits(logits, [sequence], frozenset())
    assert logits.tolist() == [[math.inf, -math.inf, 0.0]]


def test_tokens_outside_the_vocabulary_touch_no_neighbour():
    wild = make_sequence(
        [1, 70, 61],
        [VOCAB_SIZE, 2**31 - 1],
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias={VOCAB_SIZE: 9.0, 2**31 - 1: 9.0},
        stop_token_ids=(VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1),
        min_tokens=10,
    )
    logits = make_logits(2)
    raw = logits.clone()
    edit_logits(logits, [wild, make_sequence([1], [2])], EOS | {VOCAB_SIZE + 3})
    assert torch.equal(logits[1], raw[1])
    changed = np.flatnonzero((logits[0] != raw[0]).numpy()).tolist()
    assert changed == [1, 7, 11]


@pytest.mark.parametrize(("num_output", "banned"), [(0, True), (4, True), (5, False), (6, False)])
def test_bans_end_with_min_tokens(num_output, banned):
    logits = make_logits(1)
    edit_logits(logits, [make_sequence([1], [2] * num_output, min_tokens=5)], EOS)
    assert [token_id for token_id in range(VOCAB_SIZE) if logits[0, token_id] == -math.inf] == [
        7,
        11,
    ] * banned


def test_kinds_come_in_their_order():
    assert list(EDITS_OF) == list(EditKind)


def test_edit_logits_sequence_of_100k_tokens_matches_reference():
    sequence = make_sequence(some_tokens(1, 100_000), some_tokens(2, 1000), **CASES["all penalties"])
    logits = make_logits(1)
    expected = reference(logits[0].tolist(), sequence)
    edit_logits(logits, [sequence], EOS)
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


BAD_WORDS = {
    "a single token": (((4,),), {4}),
    "its beginning is not there": (((9, 4),), set()),
    "its beginning is there": (((2, 3, 4),), {4}),
    "the whole output begins it": (((1, 2, 3, 8),), {8}),
    "the prompt does not count": (((6, 1, 2, 3, 8),), set()),
    "longer than the output": (((1, 1, 1, 1, 1, 8),), set()),
    "several at once": (((3, 5), (2, 3, 6), (3, 7), (2, 9), (5,)), {5, 6, 7}),
}


@pytest.mark.parametrize(("words", "banned"), BAD_WORDS.values(), ids=BAD_WORDS)
def test_edit_logits_bans_bad_word_after_its_prefix(words, banned):
    sequence = make_sequence([5, 6], [1, 2, 3], bad_words=words)
    logits = make_logits(1)
    expected = reference(logits[0].tolist(), sequence)
    edit_logits(logits, [sequence], EOS)
    assert logits[0].tolist() == expected
    assert {token_id for token_id, logit in enumerate(logits[0].tolist()) if logit == -math.inf} == banned


def test_edit_logits_bad_word_before_first_token_is_banned():
    logits = make_logits(2)
    edit_logits(logits, [make_sequence([1, 2], [], bad_words=((3,), (2, 4))) for _ in range(2)], EOS)
    assert logits.isneginf().nonzero().tolist() == [[0, 3], [1, 3]]


def make_staging(num_programs: int) -> EditStaging:
    shape = (num_programs * EDITS_PER_PROGRAM, 2)
    return EditStaging(torch.full(shape, -5, dtype=torch.int32), torch.full(shape, -5, dtype=torch.int32))


def run(staging: EditStaging, block: torch.Tensor, edits: dict[EditKind, list[tuple[int, Edits]]]) -> None:
    edited = EditedBlock(block, block, torch.empty(0, 8))
    for kind in EditKind:
        for row, row_edits in edits.get(kind, ()):
            staging.add(row * block.shape[1], row_edits, kind, edited)
        staging.end_kind(kind)
    staging.apply(edited)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 40])
def test_edit_staging_many_edits_apply_over_several_rounds(num_programs):
    rng = np.random.default_rng(0)
    staging = make_staging(num_programs)
    block = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    expected = block.clone()
    for step in range(3):
        staging.reset()
        for _ in range(2):  # blocks of one step
            ids = [rng.permutation(700)[: rng.integers(0, 700)].astype(np.int32) for _ in range(3)]
            numbers = [rng.uniform(0.5, 2, len(row)) for row in ids]
            run(
                staging,
                block,
                {
                    EditKind.REPETITION: [(row, Edits(ids[row], 1.3)) for row in range(3)],
                    EditKind.ADD: [(row, Edits(ids[row], numbers[row])) for row in (0, 2)],
                    EditKind.REPLACE: [(1, Edits(ids[1][:2], -np.inf))],
                },
            )
            for row in range(3):
                places = torch.from_numpy(ids[row]).long()
                logits = expected[row, places]
                logits = torch.where(logits > 0, logits / 1.3, logits * 1.3)
                if row != 1:
                    logits = logits + torch.from_numpy(numbers[row].astype(np.float32))
                expected[row, places] = logits
            expected[1, ids[1][:2].tolist()] = -torch.inf
        assert torch.equal(block, expected), f"{step=}"


def test_edit_staging_without_edits_leaves_block_unchanged():
    block = torch.ones(1, 5)
    staging = make_staging(1)
    run(staging, block, {EditKind.ADD: [(0, Edits(np.empty(0, np.int32), 1.0))]})
    assert block.tolist() == [[1.0] * 5]


def test_edit_staging_full_list_takes_one_round(monkeypatch):
    waits = []
    monkeypatch.setattr(EditStaging, "wait", lambda self: (waits.append(1), self.reset()))
    staging, block = make_staging(2), torch.zeros(1, 2 * EDITS_PER_PROGRAM)
    everything = np.arange(2 * EDITS_PER_PROGRAM, dtype=np.int32)
    run(staging, block, {EditKind.ADD: [(0, Edits(everything, 1.0))]})
    assert not waits
    run(staging, block, {EditKind.ADD: [(0, Edits(everything[:1], 1.0))]})
    assert len(waits) == 1
    assert block.sum() == 2 * EDITS_PER_PROGRAM + 1

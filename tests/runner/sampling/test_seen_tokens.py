"""Counts of tokens that are kept up to date: never other than counted anew."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.logit_edits import SeenTokens

VOCAB_SIZE = 50
token = st.integers(0, VOCAB_SIZE + 3)


def make_sequence(prompt: list[int], output: list[int], sequence_id: int = 0) -> Sequence:
    return Sequence(sequence_id, prompt + output, len(prompt), SamplingParams(), seed=0, max_tokens=99)


def assert_counted(seen: SeenTokens, sequence: Sequence) -> None:
    counts = seen.of(sequence)
    known = [token_id for token_id in sequence.token_ids if token_id < VOCAB_SIZE]
    output = Counter(token_id for token_id in sequence.output_token_ids if token_id < VOCAB_SIZE)
    assert sorted(counts.seen_ids.tolist()) == sorted(set(known))
    assert dict(zip(counts.output_ids.tolist(), counts.output_counts.tolist(), strict=True)) == output


@given(st.lists(token, max_size=60), st.lists(st.lists(token, max_size=40), max_size=5))
def test_growing_sequences(prompt, outputs):
    seen, sequence = SeenTokens(VOCAB_SIZE, 2), make_sequence(prompt, [])
    for output in outputs:
        sequence.token_ids.extend(output)
        assert_counted(seen, sequence)
        assert_counted(seen, sequence)


def test_a_number_that_means_somebody_else_is_no_matter():
    seen = SeenTokens(VOCAB_SIZE, 8)
    first, second = make_sequence([1, 2], [3]), make_sequence([1, 2], [4])
    assert_counted(seen, first)
    assert_counted(seen, second)
    assert_counted(seen, first)
    first.num_prompt_tokens = 1
    assert_counted(seen, first)
    del first.token_ids[1:]
    assert_counted(seen, first)


def test_who_has_not_asked_for_longest_is_forgotten_and_counted_anew():
    seen, rng = SeenTokens(VOCAB_SIZE, 3), random.Random(0)
    sequences = [make_sequence(rng.choices(range(VOCAB_SIZE), k=9), [], sequence_id) for sequence_id in range(7)]
    for _ in range(200):
        sequence = rng.choice(sequences)
        sequence.token_ids.append(rng.randrange(VOCAB_SIZE))
        assert_counted(seen, sequence)
        assert len(seen._counts) <= 3
    assert next(reversed(seen._counts)) == sequence.sequence_id


def test_only_what_is_new_is_looked_at():
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

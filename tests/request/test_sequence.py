"""Sequence and LiveStep: the arithmetic of what is computed and what is sampled."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence, SequenceState


def make(num_prompt: int, num_output: int = 0, sequence_id: int = 0) -> Sequence:
    return Sequence(
        sequence_id=sequence_id,
        token_ids=list(range(num_prompt + num_output)),
        num_prompt_tokens=num_prompt,
        params=SamplingParams(),
        seed=0,
        max_tokens=100,
    )


@given(st.integers(1, 50), st.integers(0, 50))
def test_prompt_and_output_make_up_the_tokens(num_prompt: int, num_output: int) -> None:
    sequence = make(num_prompt, num_output)
    assert sequence.num_tokens == num_prompt + num_output
    assert sequence.num_output_tokens == num_output


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_chunked_prefill_samples_exactly_once(num_prompt: int, chunk: int) -> None:
    sequence = make(num_prompt)
    starts = range(0, num_prompt, chunk)
    chunks = [ScheduledSequence.of(sequence, start, min(chunk, num_prompt - start)) for start in starts]
    assert [item.samples for item in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_step_counts_tokens_and_names_those_that_sample_in_order() -> None:
    first, second, third = make(8, sequence_id=1), make(4, 3, sequence_id=2), make(9, sequence_id=3)
    step = LiveStep(
        (ScheduledSequence.of(first, 0, 5), ScheduledSequence.of(second, 6, 1), ScheduledSequence.of(third, 0, 9))
    )
    assert step.num_tokens == 15
    assert [item.sequence.sequence_id for item in step.sampling()] == [2, 3]
    assert LiveStep(()).num_tokens == 0


def test_sequences_are_told_apart_by_identity() -> None:
    """Two equal prompts are two sequences: sets and dicts of them must not merge them."""
    assert make(3) != make(3)
    assert len({make(3), make(3)}) == 2


def test_a_new_sequence_waits_and_owns_nothing() -> None:
    first, second = make(3), make(3)
    assert first.state is SequenceState.WAITING
    assert first.num_computed == 0
    first.tables[0].append(1)
    assert second.tables == [[]]

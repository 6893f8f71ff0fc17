"""Sequence and LiveStep: the arithmetic of what is computed and what is sampled."""

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
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
def test_chunked_prefill_samples_once(num_prompt: int, chunk: int) -> None:
    sequence = make(num_prompt)
    starts = range(0, num_prompt, chunk)
    chunks = [ScheduledSequence.of(sequence, start, min(chunk, num_prompt - start)) for start in starts]
    assert [item.samples for item in chunks] == [False] * (len(chunks) - 1) + [True]


def test_live_step_counts_tokens_and_lists_samplers() -> None:
    first, second, third = make(8, sequence_id=1), make(4, 3, sequence_id=2), make(9, sequence_id=3)
    step = LiveStep(
        (ScheduledSequence.of(first, 0, 5), ScheduledSequence.of(second, 6, 1), ScheduledSequence.of(third, 0, 9))
    )
    assert step.num_tokens == 15
    assert [item.sequence.sequence_id for item in step.sampling()] == [2, 3]
    assert LiveStep(()).num_tokens == 0


def test_sequences_compare_by_identity() -> None:
    """Two equal prompts are two sequences: sets and dicts of them must not merge them."""
    assert make(3) != make(3)
    assert len({make(3), make(3)}) == 2


def test_new_sequence_waits_without_pages() -> None:
    first, second = make(3), make(3)
    assert first.state is SequenceState.WAITING
    assert first.num_computed == 0
    first.tables[0].append(1)
    assert second.tables == [[]]


@for_each(
    "start, num_new, samples, proposals, is_fork, expected",
    [
        (0, 4, False, (), False, (4, 4, 4, 4)),
        (4, 5, False, (), False, (5, 5, 5, 9)),
        (4, 6, True, (), False, (6, 5, 6, 10)),
        (9, 1, True, (), False, (1, 0, 1, 10)),
        (10, 1, True, (), False, (1, 0, 1, 11)),
        (10, 4, True, (1, 2, 3), False, (4, 0, 4, 11)),
        (9, 1, True, (), True, (0, 0, 1, 10)),
    ],
)
def test_rows_and_logits_of_a_prompt_of_ten_are_counted(
    start: int, num_new: int, samples: bool, proposals: tuple[int, ...], is_fork: bool, expected: tuple[int, ...]
) -> None:
    for prompt_logprobs in (None, 0):
        own = Sequence(0, list(range(10)), 10, SamplingParams(prompt_logprobs=prompt_logprobs), 0, 5)
        item = ScheduledSequence(own, start, num_new, samples, proposals, own if is_fork else None)
        num_rows, num_prompt_logits, num_logits, num_tokens = expected
        if prompt_logprobs is None:
            num_prompt_logits, num_logits = 0, num_logits - num_prompt_logits
        found = item.num_rows, item.num_prompt_logits, item.num_logits, item.num_tokens
        assert found == (num_rows, num_prompt_logits, num_logits, num_tokens)

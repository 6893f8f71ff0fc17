"""Which tokens a sequence holds, and how often its output holds each; counted once, not at every step; no torch.

Penalties ask this at every step, and a sequence only grows. A count is believed only of the very list of tokens that it
was made from, so one that was forgotten or belongs to somebody else is simply made anew.
"""

from collections.abc import Sequence as SequenceABC

import numpy as np

from holdfast.request.sequence import Sequence


class SeenTokens:
    """Counts of the sequences that asked last."""

    def __init__(self, vocab_size: int, max_sequences: int) -> None:
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._counts: dict[int, TokenCounts] = {}

    def of(self, sequence: Sequence) -> "TokenCounts":
        """What a sequence holds now; the arrays in it are good until the sequence is asked for again."""
        counts = self._counts.pop(sequence.sequence_id, None)
        if counts is None or not counts.is_of(sequence):
            counts = TokenCounts(sequence, self._vocab_size)
        counts.count_new()
        self._counts[sequence.sequence_id] = counts  # at the end: who has not asked for longest comes first
        if len(self._counts) > self._max_sequences:
            del self._counts[next(iter(self._counts))]
        return counts


class TokenCounts:
    """Distinct tokens of one sequence; those outside the vocabulary have no logit and are left out."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._token_ids = sequence.token_ids
        self._num_prompt_tokens = self._num_counted = sequence.num_prompt_tokens
        self._vocab_size = vocab_size
        self._seen = {token_id for token_id in set(self._prompt()) if 0 <= token_id < vocab_size}
        self._seen_ids = _Column(self._seen, np.int32)
        self._output_places: dict[int, int] = {}
        self._output_ids = _Column((), np.int32)
        self._output_counts = _Column((), np.float64)

    @property
    def seen_ids(self) -> np.ndarray:
        """Of prompt and output."""
        return self._seen_ids.values

    @property
    def output_ids(self) -> np.ndarray:
        return self._output_ids.values

    @property
    def output_counts(self) -> np.ndarray:
        """How often the output holds each of `output_ids`."""
        return self._output_counts.values

    def is_of(self, sequence: Sequence) -> bool:
        return (
            self._token_ids is sequence.token_ids
            and self._num_prompt_tokens == sequence.num_prompt_tokens
            and self._num_counted <= sequence.num_tokens
        )

    def count_new(self) -> None:
        """Count what the sequence has grown by."""
        for token_id in self._token_ids[self._num_counted :]:
            if not 0 <= token_id < self._vocab_size:
                continue
            place = self._output_places.setdefault(token_id, len(self._output_places))
            if place < len(self._output_ids):
                self._output_counts.values[place] += 1
                continue
            self._output_ids.append(token_id)
            self._output_counts.append(1)
            if token_id not in self._seen:
                self._seen.add(token_id)
                self._seen_ids.append(token_id)
        self._num_counted = len(self._token_ids)

    def _prompt(self) -> SequenceABC[int]:
        return self._token_ids[: self._num_prompt_tokens]


class _Column:
    """Numbers that more are appended to."""

    def __init__(self, numbers: set[int] | tuple[()], dtype: type) -> None:
        self._length = len(numbers)
        self._room = np.empty(2 * self._length + 16, dtype=dtype)
        self._room[: self._length] = np.fromiter(numbers, dtype=dtype, count=self._length)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        return self._room[: self._length]

    def append(self, number: int) -> None:
        if self._length == len(self._room):
            self._room = np.concatenate((self._room, np.empty_like(self._room)))
        self._room[self._length] = number
        self._length += 1

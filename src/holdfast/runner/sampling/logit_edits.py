"""Edits of single logits for penalties, biases and bans, on the host or by one list on a device.

R rows of a block, S rows of a step, F fields, V vocabulary, E edits

The host lists the few (row, token) pairs that change, and only those logits are touched. The device keeps nothing
between steps. So nothing is rebuilt after a preemption, and nothing leaks from one sequence into another.

Penalties need token counts at every step, and a sequence only grows. A count is valid only for the list object
that it was made from; otherwise it is recomputed.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
import torch

from holdfast.kernels.geometry import EDITS_PER_PROGRAM
from holdfast.kernels.sampling.edit_logits import PADDING, EditKind, edit_logits, restore_logits
from holdfast.planning.terms import EDIT_ENTRIES
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.batch import Choice


class SeenTokens:
    """Token counts of recently used sequences."""

    def __init__(self, vocab_size: int, max_sequences: int) -> None:
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._counts: dict[int, TokenCounts] = {}

    def __len__(self) -> int:
        """Number of sequences with cached counts."""
        return len(self._counts)

    def of(self, sequence: Sequence) -> "TokenCounts":
        """Return a sequence's counts; their arrays are valid until the next call for the sequence."""
        counts = self._counts.pop(sequence.sequence_id, None)
        if counts is None or not counts.is_of(sequence):
            counts = TokenCounts(sequence, self._vocab_size)
        counts.count_new()
        self._counts[sequence.sequence_id] = counts  # at the end: the least recently read comes first
        if len(self._counts) > self._max_sequences:
            del self._counts[next(iter(self._counts))]
        return counts


class TokenCounts:
    """Distinct tokens of one sequence, without those outside the vocabulary, which have no logit."""

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
        """Distinct tokens of prompt and output."""
        return self._seen_ids.values

    @property
    def output_ids(self) -> np.ndarray:
        return self._output_ids.values

    @property
    def output_counts(self) -> np.ndarray:
        """Counts of each of `output_ids` in the output."""
        return self._output_counts.values

    def is_of(self, sequence: Sequence) -> bool:
        return (
            self._token_ids is sequence.token_ids
            and self._num_prompt_tokens == sequence.num_prompt_tokens
            and self._num_counted <= sequence.num_tokens
        )

    def count_new(self) -> None:
        """Count the sequence's new tokens."""
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
    """A growing array of numbers."""

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


class Edits(NamedTuple):
    """Changes of one kind to one row: distinct token ids of the vocabulary, and a number for each or for all."""

    token_ids: np.ndarray
    numbers: np.ndarray | float


class EditContext(NamedTuple):
    """Inputs of edits beside their sequence."""

    eos_token_ids: frozenset[int]
    seen: SeenTokens
    vocab_size: int


def edit_rows(logits_RV: torch.Tensor, choices: SequenceABC[Choice], context: EditContext) -> None:
    """Change a block of logits on the host in place, kind after kind. Row i belongs to choices[i]."""
    logits = logits_RV.view(-1)
    for row, choice in enumerate(choices):
        kept = allowed_tokens(choice, context)
        if kept is not None:
            ids_E = torch.from_numpy(kept.token_ids.astype(np.int64))
            kept_E = logits_RV[row].index_select(0, ids_E)
            logits_RV[row].fill_(-torch.inf).index_copy_(0, ids_E, kept_E)
    for kind, edits_of in EDITS_OF.items():
        rows = [edits_of(choice, context) for choice in choices]
        edits = [(row * context.vocab_size, row_edits) for row, row_edits in enumerate(rows) if row_edits is not None]
        if not edits:
            continue
        places = np.concatenate([start + row_edits.token_ids.astype(np.int64) for start, row_edits in edits])
        numbers = np.concatenate(
            [np.full(len(row_edits.token_ids), row_edits.numbers, dtype=np.float32) for _, row_edits in edits]
        )
        for start in range(0, len(places), EDIT_ENTRIES):
            places_E = torch.from_numpy(places[start : start + EDIT_ENTRIES])
            numbers_E = torch.from_numpy(numbers[start : start + EDIT_ENTRIES])
            logits.index_copy_(0, places_E, _CHANGES[kind](logits.index_select(0, places_E), numbers_E))


def allowed_tokens(choice: Choice, context: EditContext) -> Edits | None:
    """Return the only tokens that may be chosen. This comes before all edits; none can bring others back."""
    allowed = choice.sequence.params.allowed_token_ids
    return None if allowed is None else _in_vocabulary(dict.fromkeys(allowed, 0.0), context.vocab_size)


def _repetitions(choice: Choice, context: EditContext) -> Edits | None:
    sequence = choice.sequence
    penalty = sequence.params.repetition_penalty
    return None if penalty == 1.0 else Edits(context.seen.of(sequence).seen_ids, penalty)


def _subtrahends(choice: Choice, context: EditContext) -> Edits | None:
    sequence = choice.sequence
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    if presence == frequency == 0.0:
        return None
    counts = context.seen.of(sequence)
    return Edits(counts.output_ids, presence + frequency * counts.output_counts)


def _biases(choice: Choice, context: EditContext) -> Edits | None:
    sequence = choice.sequence
    bias = sequence.params.logit_bias
    return _in_vocabulary(bias, context.vocab_size) if bias else None


def _bans(choice: Choice, context: EditContext) -> Edits | None:
    sequence = choice.sequence
    params = sequence.params
    banned = _last_of_bad_words(sequence) if sequence.bad_word_ids else []
    # If an answer has a grammar, its mask decides when it may end.
    if choice.may_not_end and params.structured_outputs is None:
        banned += params.stop_token_ids
        banned += () if params.ignore_eos else context.eos_token_ids
    return _in_vocabulary(dict.fromkeys(banned, -np.inf), context.vocab_size) if banned else None


def _last_of_bad_words(sequence: Sequence) -> list[int]:
    """Return tokens that would complete a bad word at the end of the output."""
    longest = max(map(len, sequence.bad_word_ids)) - 1
    tail = sequence.token_ids[max(sequence.num_prompt_tokens, sequence.num_tokens - longest) :]
    return [
        word[-1]
        for word in sequence.bad_word_ids
        if len(word) - 1 <= len(tail) and tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]
    ]


EDITS_OF: dict[EditKind, Callable[[Choice, EditContext], Edits | None]] = {
    EditKind.REPETITION: _repetitions,
    EditKind.SUBTRACT: _subtrahends,
    EditKind.ADD: _biases,
    EditKind.REPLACE: _bans,
}
"""Function per kind that returns a choice's edits, in the order of application."""


def _in_vocabulary(numbers: dict[int, float], vocab_size: int) -> Edits:
    """Drop tokens outside the vocabulary: they have no logit, and a flat index would hit the next row."""
    known = {token_id: number for token_id, number in numbers.items() if 0 <= token_id < vocab_size}
    return Edits(np.fromiter(known, np.int32, len(known)), np.fromiter(known.values(), np.float32, len(known)))


def _repeated(logits_E: torch.Tensor, penalty_E: torch.Tensor) -> torch.Tensor:
    return torch.where(logits_E > 0, logits_E / penalty_E, logits_E * penalty_E)


def _replaced(logits_E: torch.Tensor, number_E: torch.Tensor) -> torch.Tensor:
    return number_E


_CHANGES: dict[EditKind, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    EditKind.REPETITION: _repeated,
    EditKind.SUBTRACT: torch.sub,
    EditKind.ADD: torch.add,
    EditKind.REPLACE: _replaced,
}


class EditedBlock(NamedTuple):
    """Copies of a step's rows to edit, and their sources."""

    block_RV: torch.Tensor
    logits_SV: torch.Tensor
    rows_RF: torch.Tensor


class EditStaging:
    """Collects edits kind by kind, then applies them to a block in the order of arrival.

    The list fills up during a step. If it is full, the host waits until the device has read it.
    Kind None restores raw logits in rows that were copied blank.
    """

    def __init__(self, host_E2: torch.Tensor, device_E2: torch.Tensor) -> None:
        self._host_E2, self._device_E2 = host_E2, device_E2
        self._list_E2 = host_E2.numpy()
        self._places_E, self._numbers_E = self._list_E2[:, 0], self._list_E2[:, 1].view(np.float32)
        self._read = torch.cuda.Event() if device_E2.is_cuda else None
        self._start = self._end = 0
        self._runs: list[tuple[EditKind | None, int, int]] = []
        self._run_start = 0

    def reset(self) -> None:
        """Empty the list, which the device has read."""
        self._start = self._end = self._run_start = 0
        self._runs.clear()

    def add(self, first_place: int, edits: Edits, kind: EditKind | None, block: EditedBlock) -> None:
        """Add edits of one row, whose first logit is at `first_place` of the flat block."""
        token_ids, numbers = edits
        while len(token_ids):
            count = min(len(token_ids), len(self._list_E2) - self._end)
            if not count:
                self.end_kind(kind)
                self.apply(block)
                self.wait()
                continue
            end = self._end + count
            np.add(token_ids[:count], first_place, out=self._places_E[self._end : end])
            self._numbers_E[self._end : end] = numbers[:count] if isinstance(numbers, np.ndarray) else numbers
            self._end = end
            token_ids = token_ids[count:]
            numbers = numbers[count:] if isinstance(numbers, np.ndarray) else numbers

    def end_kind(self, kind: EditKind | None) -> None:
        """End a run: edits added later are of another kind or round."""
        if self._end > self._run_start:
            end = -(-self._end // EDITS_PER_PROGRAM) * EDITS_PER_PROGRAM
            self._list_E2[self._end : end] = PADDING
            self._runs.append((kind, self._run_start, end))
            self._run_start = self._end = end

    def apply(self, block: EditedBlock) -> None:
        """Edit a block, kind by kind, without waiting."""
        if self._runs:
            span = slice(self._start, self._end)
            self._device_E2[span].copy_(self._host_E2[span], non_blocking=True)
            for kind, start, end in self._runs:
                edits_E2 = self._device_E2[start:end]
                if kind is None:
                    restore_logits(block.logits_SV, block.rows_RF, block.block_RV, edits_E2)
                else:
                    edit_logits(block.block_RV, edits_E2, kind)
            self._runs.clear()
            self._start = self._end

    def wait(self) -> None:
        """Wait until the device has read the list, then empty it."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device_E2.device))
            self._read.synchronize()
        self.reset()

"""Penalties, logit biases and the ban on ending too early: changes to single logits, derived anew at each step.

Nothing is kept on the device between steps, so nothing has to be rebuilt after a preemption and nothing can leak from
one sequence into another. The host lists the few (row, token) pairs that change; only those logits are touched.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
import torch

from holdfast.kernels.logits.edit_logits import EditKind
from holdfast.request.sequence import Sequence
from holdfast.runner.planning.sampling_terms import EDIT_ENTRIES
from holdfast.runner.sampling.seen_tokens import SeenTokens

# R rows of a block, V vocabulary, E edited logits


class Edits(NamedTuple):
    """Changes of one kind to one row: token ids inside the vocabulary, none twice, and a number for each or for all."""

    token_ids: np.ndarray
    numbers: np.ndarray | float


class EditContext(NamedTuple):
    """What edits depend on beside their sequence."""

    eos_token_ids: frozenset[int]
    seen: SeenTokens
    vocab_size: int


def edit_rows(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence], context: EditContext) -> None:
    """Change a block of logits on the host in place, kind after kind. Row i belongs to sequences[i]."""
    logits = logits_RV.view(-1)
    for kind, edits_of in EDITS_OF.items():
        rows = [edits_of(sequence, context) for sequence in sequences]
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


def _repetitions(sequence: Sequence, context: EditContext) -> Edits | None:
    penalty = sequence.params.repetition_penalty
    return None if penalty == 1.0 else Edits(context.seen.of(sequence).seen_ids, penalty)


def _subtrahends(sequence: Sequence, context: EditContext) -> Edits | None:
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    if presence == frequency == 0.0:
        return None
    counts = context.seen.of(sequence)
    return Edits(counts.output_ids, presence + frequency * counts.output_counts)


def _biases(sequence: Sequence, context: EditContext) -> Edits | None:
    bias = sequence.params.logit_bias
    return _in_vocabulary(bias, context.vocab_size) if bias else None


def _bans(sequence: Sequence, context: EditContext) -> Edits | None:
    params = sequence.params
    if not params.min_tokens or sequence.num_output_tokens >= params.min_tokens:
        return None
    ends = params.stop_token_ids if params.ignore_eos else (*context.eos_token_ids, *params.stop_token_ids)
    return _in_vocabulary(dict.fromkeys(ends, -np.inf), context.vocab_size)


EDITS_OF: dict[EditKind, Callable[[Sequence, EditContext], Edits | None]] = {
    EditKind.REPETITION: _repetitions,
    EditKind.SUBTRACT: _subtrahends,
    EditKind.ADD: _biases,
    EditKind.REPLACE: _bans,
}
"""What a sequence asks for of each kind, in the order in which kinds are applied."""


def _in_vocabulary(numbers: dict[int, float], vocab_size: int) -> Edits:
    """A token outside the vocabulary has no logit to change; in a flat index it would be one of the next row's."""
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

"""Penalties, logit biases and the ban on ending too early: changes to single logits, derived anew at each step.

Nothing is kept on the device between steps, so nothing has to be rebuilt after a preemption and nothing can leak from
one sequence into another. The host lists the few (row, token) pairs that change; only those logits are touched.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from itertools import chain

import numpy as np
import torch

from holdfast.request.sequence import Sequence
from holdfast.runner.sampling_batch import to_device
from holdfast.runner.sampling_terms import EDIT_ENTRIES

# R rows of a block, V vocabulary, E edited logits


def edit_logits(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Change a block of logits in place: penalties, then biases, then bans. Row i belongs to sequences[i]."""
    _apply(logits_RV, [_repetitions(sequence) for sequence in sequences], _repeated)
    _apply(logits_RV, [_subtrahends(sequence) for sequence in sequences], torch.sub)
    _apply(logits_RV, [sequence.params.logit_bias or {} for sequence in sequences], torch.add)
    _apply(logits_RV, [_bans(sequence, eos_token_ids) for sequence in sequences], _replaced)


def _apply(
    logits_RV: torch.Tensor,
    numbers: list[dict[int, float]],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """logit = change(logit, number) for the tokens in the dict of each row.

    A token outside the vocabulary has no logit to change; in a flat index it would be one of the next row's.
    """
    if not any(numbers):
        return
    num_rows, vocab_size = logits_RV.shape
    token_ids = np.fromiter(chain.from_iterable(numbers), dtype=np.int64)
    values = np.fromiter(chain.from_iterable(row.values() for row in numbers), dtype=np.float32)
    rows = np.repeat(np.arange(num_rows), [len(row) for row in numbers])
    known = (token_ids >= 0) & (token_ids < vocab_size)
    places, values = (rows * vocab_size + token_ids)[known], values[known]
    logits = logits_RV.view(-1)
    for start in range(0, len(places), EDIT_ENTRIES):
        places_E = to_device(places[start : start + EDIT_ENTRIES], logits.device)
        values_E = to_device(values[start : start + EDIT_ENTRIES], logits.device)
        logits.index_copy_(0, places_E, change(logits.index_select(0, places_E), values_E))


def _repetitions(sequence: Sequence) -> dict[int, float]:
    penalty = sequence.params.repetition_penalty
    return {} if penalty == 1.0 else dict.fromkeys(sequence.token_ids, penalty)


def _subtrahends(sequence: Sequence) -> dict[int, float]:
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    if presence == frequency == 0.0:
        return {}
    return {token_id: presence + frequency * count for token_id, count in Counter(sequence.output_token_ids).items()}


def _bans(sequence: Sequence, eos_token_ids: frozenset[int]) -> dict[int, float]:
    params = sequence.params
    if sequence.num_output_tokens >= params.min_tokens:
        return {}
    ends = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
    return dict.fromkeys(ends, -np.inf)


def _repeated(logits_E: torch.Tensor, penalty_E: torch.Tensor) -> torch.Tensor:
    return torch.where(logits_E > 0, logits_E / penalty_E, logits_E * penalty_E)


def _replaced(logits_E: torch.Tensor, value_E: torch.Tensor) -> torch.Tensor:
    return value_E

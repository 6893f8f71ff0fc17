"""Penalties, logit biases and the ban on ending too early: changes to single logits, derived anew at each step.

Nothing is kept on the device between steps, so nothing has to be rebuilt after a preemption and nothing can leak from
one sequence into another. The host lists the few (row, token) pairs that change; only those logits are touched.
"""

from collections.abc import Sequence as SequenceABC

import numpy as np
import torch

from holdfast.request.sequence import Sequence
from holdfast.runner.sampling_batch import to_device
from holdfast.runner.sampling_terms import EDIT_ENTRIES

# R rows of a block, V vocabulary, E edited logits


def edit_logits(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Change a block of logits in place: penalties, then biases, then bans. Row i belongs to sequences[i]."""
    _penalise(logits_RV, sequences)
    _bias(logits_RV, sequences)
    _ban(logits_RV, sequences, eos_token_ids)


def _penalise(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence]) -> None:
    vocab_size = logits_RV.shape[1]
    found = [
        penalised_tokens(sequence, vocab_size, row * vocab_size)
        for row, sequence in enumerate(sequences)
        if sequence.params.has_penalties
    ]
    if not found:
        return
    places = np.concatenate([places for places, _ in found])
    amounts = np.concatenate([amounts for _, amounts in found], axis=1)
    logits = logits_RV.view(-1)
    for start in range(0, len(places), EDIT_ENTRIES):
        places_E = to_device(places[start : start + EDIT_ENTRIES], logits.device)
        repetition_E, subtrahend_E = to_device(
            np.ascontiguousarray(amounts[:, start : start + EDIT_ENTRIES]), logits.device
        )
        logits_E = logits.index_select(0, places_E)
        logits_E = torch.where(logits_E > 0, logits_E / repetition_E, logits_E * repetition_E)
        logits.index_copy_(0, places_E, logits_E.sub_(subtrahend_E))


def penalised_tokens(sequence: Sequence, vocab_size: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the penalised logits of a sequence are, and [2, E]: what repetition divides or multiplies each by, and
    what presence and frequency take from it."""
    params = sequence.params
    output_ids, counts = np.unique(np.array(sequence.output_token_ids, dtype=np.int64), return_counts=True)
    token_ids = output_ids
    if params.repetition_penalty != 1.0:
        token_ids = np.unique(np.array(sequence.token_ids, dtype=np.int64))
    amounts = np.zeros((2, len(token_ids)), dtype=np.float32)
    amounts[0] = params.repetition_penalty
    amounts[1, np.searchsorted(token_ids, output_ids)] = params.presence_penalty + params.frequency_penalty * counts
    known = (token_ids >= 0) & (token_ids < vocab_size)
    return token_ids[known] + offset, amounts[:, known]


def _bias(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence]) -> None:
    vocab_size = logits_RV.shape[1]
    biases = {
        row * vocab_size + token_id: bias
        for row, sequence in enumerate(sequences)
        for token_id, bias in (sequence.params.logit_bias or {}).items()
        if token_id < vocab_size
    }
    logits = logits_RV.view(-1)
    places = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
    values = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
    for start in range(0, len(biases), EDIT_ENTRIES):
        places_E = to_device(places[start : start + EDIT_ENTRIES], logits.device)
        values_E = to_device(values[start : start + EDIT_ENTRIES], logits.device)
        logits.index_copy_(0, places_E, logits.index_select(0, places_E).add_(values_E))


def _ban(logits_RV: torch.Tensor, sequences: SequenceABC[Sequence], eos_token_ids: frozenset[int]) -> None:
    vocab_size = logits_RV.shape[1]
    banned = [
        row * vocab_size + token_id
        for row, sequence in enumerate(sequences)
        for token_id in banned_token_ids(sequence, eos_token_ids)
        if token_id < vocab_size
    ]
    logits = logits_RV.view(-1)
    for start in range(0, len(banned), EDIT_ENTRIES):
        places = np.array(banned[start : start + EDIT_ENTRIES], dtype=np.int64)
        logits.index_fill_(0, to_device(places, logits.device), -torch.inf)


def banned_token_ids(sequence: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that would end the sequence before it has min_tokens."""
    params = sequence.params
    if sequence.num_output_tokens >= params.min_tokens:
        return frozenset()
    return eos_token_ids.union(params.stop_token_ids) if not params.ignore_eos else frozenset(params.stop_token_ids)

"""Sampler: from logits to chosen tokens and log-probabilities, on the device, with one copy to the host at the end.

The order of operations is the one that vLLM's users know:

raw logits -> log-probabilities
           -> penalties -> logit bias -> ban on ending before min_tokens
           -> temperature -> min_p -> top_k -> top_p -> one token, by a random number that (seed, position) gives

Every filter keeps the first tokens of one order: the likelier first, and the smaller id among equals. The token is
then looked up among the weights that are left, in the order of the vocabulary. All sums are of whole numbers, so a row
gives the same token and the same log-probabilities to the bit alone, in any company and in any place.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
import torch

from holdfast.request.sequence import Sequence
from holdfast.runner.choices import choose_narrow, choose_unfiltered, choose_wide
from holdfast.runner.logit_edits import edit_logits
from holdfast.runner.logprobs import FIXED_COLUMNS, logprob_columns, read_logprobs
from holdfast.runner.result import NO_TOKEN, TokenLogprobs
from holdfast.runner.sampling_batch import RowParameters, SamplingBatch, is_edited, to_device
from holdfast.runner.sampling_terms import rows_per_block
from holdfast.runner.token_weights import distances_

# S sequences, T prompt positions, V vocabulary, R rows of a block, K candidates


class SequenceSample(NamedTuple):
    """What was chosen for one sequence."""

    token_id: int
    """Or NO_TOKEN, where the logits hold NaN or rule every token out."""
    logprobs: TokenLogprobs | None
    """Where the request asked and a token was chosen."""


class Sampler:
    """Chooses tokens. It keeps nothing from one step to the next."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows_per_block = rows_per_block(vocab_size)
        self._vocabulary_V = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def sample(
        self, logits_SV: torch.Tensor, sequences: SequenceABC[Sequence], eos_token_ids: frozenset[int]
    ) -> list[SequenceSample]:
        """One token for each sequence; row i of the float32 logits follows everything in sequences[i].token_ids."""
        assert logits_SV.shape == (len(sequences), self._vocab_size), (
            f"logits are {tuple(logits_SV.shape)} for {len(sequences)} sequences and {self._vocab_size=}"
        )
        assert logits_SV.dtype == torch.float32, f"{logits_SV.dtype=} must be float32"
        if not sequences:
            return []
        batch = SamplingBatch.of(sequences, self._vocab_size)
        chosen_S = self.choose(logits_SV, sequences, eos_token_ids, batch)
        if not batch.logprobs:
            return [SequenceSample(token_id, None) for token_id in chosen_S.tolist()]
        return _read(self.measure(logits_SV, chosen_S, batch), sequences)

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Of target_ids[i] where row i of the float32 logits predicts it."""
        assert logits_TV.shape == (len(target_ids), self._vocab_size), (
            f"logits are {tuple(logits_TV.shape)} for {len(target_ids)} targets and {self._vocab_size=}"
        )
        assert logits_TV.dtype == torch.float32, f"{logits_TV.dtype=} must be float32"
        if not target_ids:
            return []
        targets_T1 = to_device(np.array(target_ids, dtype=np.int64), self._device).unsqueeze(1)
        num_top = min(num_top, self._vocab_size)
        blocks = [
            logprob_columns(logits_RV.clone(), targets_R1, self._vocabulary_V, num_top)
            for logits_RV, targets_R1 in zip(
                logits_TV.split(self._rows_per_block), targets_T1.split(self._rows_per_block), strict=True
            )
        ]
        rows = torch.cat(blocks).tolist()
        return [read_logprobs(token_id, row, num_top) for token_id, row in zip(target_ids, rows, strict=True)]

    def choose(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        batch: SamplingBatch,
    ) -> torch.Tensor:
        """int64 [S]: token ids or NO_TOKEN, without waiting for the device; the logits stay as they are."""
        likeliest_S = _likeliest(logits_SV)
        if batch.is_plain:
            return likeliest_S
        chosen_S = likeliest_S.clone()
        for rows in self._blocks(batch.edited_greedy):
            rows_R = to_device(np.array(rows, dtype=np.int64), self._device)
            logits_RV = self._edited(logits_SV, rows, rows_R, sequences, eos_token_ids)
            chosen_S.index_copy_(0, rows_R, _likeliest(logits_RV))
            del logits_RV
        for kind, choose_tokens in (
            (batch.unfiltered, choose_unfiltered),
            (batch.narrow, choose_narrow),
            (batch.wide, choose_wide),
        ):
            for rows in self._blocks(kind):
                params = RowParameters.of(rows, sequences, self._vocab_size, self._device)
                logits_RV = self._edited(logits_SV, rows, params.rows, sequences, eos_token_ids)
                distance_RV, choosable_R1 = distances_(logits_RV)
                chosen_R1 = torch.where(choosable_R1, choose_tokens(distance_RV, params, self._vocabulary_V), NO_TOKEN)
                chosen_S.index_copy_(0, params.rows, chosen_R1.squeeze(1))
                del logits_RV, distance_RV  # the next block takes its memory before these names are bound again
        # A ban may hide the only NaN of a row, so the raw logits have the last word.
        return torch.where(likeliest_S == NO_TOKEN, NO_TOKEN, chosen_S)

    def measure(self, logits_SV: torch.Tensor, chosen_S: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """float64 [S, 1 + columns of logprob_columns]: token ids, and numbers from raw logits where somebody asked."""
        columns_SC = logits_SV.new_zeros((batch.num_rows, 1 + FIXED_COLUMNS + 2 * batch.num_top), dtype=torch.float64)
        columns_SC[:, 0] = chosen_S
        for rows in self._blocks(batch.logprobs):
            rows_R = to_device(np.array(rows, dtype=np.int64), self._device)
            chosen_R1 = chosen_S.index_select(0, rows_R).clamp_(min=0).unsqueeze(1)
            columns_SC[:, 1:].index_copy_(
                0,
                rows_R,
                logprob_columns(logits_SV.index_select(0, rows_R), chosen_R1, self._vocabulary_V, batch.num_top),
            )
        return columns_SC

    def _blocks(self, rows: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(rows), self._rows_per_block):
            yield rows[start : start + self._rows_per_block]

    def _edited(
        self,
        logits_SV: torch.Tensor,
        rows: tuple[int, ...],
        rows_R: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
    ) -> torch.Tensor:
        """A block's own copy of its logits, with every change that its sequences ask for."""
        logits_RV = logits_SV.index_select(0, rows_R)
        block = [sequences[row] for row in rows]
        if any(is_edited(sequence) for sequence in block):
            edit_logits(logits_RV, block, eos_token_ids)
        return logits_RV


def _likeliest(logits_SV: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the id of a row's largest logit, the smallest among equals; NO_TOKEN where there is none."""
    if logits_SV.device.type != "cpu":
        logit_S, ids_S = logits_SV.max(dim=1)  # NaN counts as the largest
        return torch.where(logit_S > -torch.inf, ids_S, NO_TOKEN)
    # On CPU torch takes three to ten times longer to find an index, and this is all that greedy sampling does.
    logits = logits_SV.numpy()
    ids = logits.argmax(axis=1)
    ids[~(logits[np.arange(len(ids)), ids] > -np.inf)] = NO_TOKEN
    return torch.from_numpy(ids)


def _read(columns_SC: torch.Tensor, sequences: SequenceABC[Sequence]) -> list[SequenceSample]:
    """Rows of (token id, columns of logprob_columns), in one copy to the host."""
    samples = []
    for sequence, (number, *row) in zip(sequences, columns_SC.tolist(), strict=True):
        token_id, num_top = int(number), sequence.params.logprobs
        if num_top is None or token_id == NO_TOKEN:
            samples.append(SequenceSample(token_id, None))
        else:
            samples.append(SequenceSample(token_id, read_logprobs(token_id, row, num_top)))
    return samples

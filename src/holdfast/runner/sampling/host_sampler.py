"""HostSampler: choices and log-probabilities on a CPU, in torch operations over blocks of rows."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC

import numpy as np
import torch

from holdfast.request.sequence import Sequence
from holdfast.runner.planning.sampling_terms import rows_per_block
from holdfast.runner.sampling.choices import choose_narrow, choose_unfiltered, choose_wide
from holdfast.runner.sampling.logit_edits import EditContext, edit_rows
from holdfast.runner.sampling.logprobs import FIXED_COLUMNS, logprob_columns, read_logprobs
from holdfast.runner.sampling.result import NO_TOKEN, TokenLogprobs
from holdfast.runner.sampling.sampling_batch import RowParameters, SamplingBatch, SequenceSample, is_edited
from holdfast.runner.sampling.seen_tokens import SeenTokens
from holdfast.runner.sampling.token_weights import distances_

# S sequences, T prompt positions, V vocabulary, R rows of a block


class HostSampler:
    """Chooses tokens. From one step to the next it keeps counts of tokens and nothing else."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.likeliest_S = torch.zeros(max_rows, dtype=torch.int64)
        self._vocab_size = vocab_size
        self._rows_per_block = rows_per_block(vocab_size, max_rows)
        self._vocabulary_V = torch.arange(vocab_size, dtype=torch.int32)
        self._seen = SeenTokens(vocab_size, max_rows)

    def find_likeliest(self, logits_SV: torch.Tensor) -> None:
        """Into the first places of `likeliest_S`."""
        self.likeliest_S[: logits_SV.shape[0]] = _likeliest(logits_SV)

    def read_greedy(self, num_rows: int) -> list[SequenceSample]:
        return [SequenceSample(token_id, None) for token_id in self.likeliest_S[:num_rows].tolist()]

    def sample(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None,
    ) -> list[SequenceSample]:
        batch = SamplingBatch.of(sequences, self._vocab_size)
        likeliest_S = _likeliest(logits_SV) if chosen_by_graph is None else chosen_by_graph[: len(sequences)]
        chosen_S = likeliest_S
        if not batch.is_plain:
            chosen_S = self._choose(logits_SV, likeliest_S, sequences, eos_token_ids, batch)
        if not batch.logprobs:
            return [SequenceSample(token_id, None) for token_id in chosen_S.tolist()]
        return _read(self._measure(logits_SV, chosen_S, batch), sequences)

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        targets_T1 = torch.tensor(target_ids, dtype=torch.int64).unsqueeze(1)
        num_top = min(num_top, self._vocab_size)
        rows: list[list[float]] = []
        for logits_RV, targets_R1 in zip(
            logits_TV.split(self._rows_per_block), targets_T1.split(self._rows_per_block), strict=True
        ):
            rows += logprob_columns(logits_RV.clone(), targets_R1, self._vocabulary_V, num_top).tolist()
        return [read_logprobs(token_id, row, num_top) for token_id, row in zip(target_ids, rows, strict=True)]

    def _choose(
        self,
        logits_SV: torch.Tensor,
        likeliest_S: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        batch: SamplingBatch,
    ) -> torch.Tensor:
        """int64 [S]: token ids or NO_TOKEN; the logits stay as they are."""
        chosen_S = likeliest_S.clone()
        for rows in self._blocks(batch.edited_greedy):
            rows_R = torch.tensor(rows, dtype=torch.int64)
            logits_RV = self._edited(logits_SV, rows, rows_R, sequences, eos_token_ids)
            chosen_S.index_copy_(0, rows_R, _likeliest(logits_RV))
            del logits_RV
        for kind, choose_tokens in (
            (batch.unfiltered, choose_unfiltered),
            (batch.narrow, choose_narrow),
            (batch.wide, choose_wide),
        ):
            for rows in self._blocks(kind):
                params = RowParameters.of(rows, sequences, self._vocab_size)
                logits_RV = self._edited(logits_SV, rows, params.rows, sequences, eos_token_ids)
                distance_RV, choosable_R1 = distances_(logits_RV)
                chosen_R1 = torch.where(choosable_R1, choose_tokens(distance_RV, params, self._vocabulary_V), NO_TOKEN)
                chosen_S.index_copy_(0, params.rows, chosen_R1.squeeze(1))
                del logits_RV, distance_RV  # the next block takes its memory before these names are bound again
        # A ban may hide the only NaN of a row, so the raw logits have the last word.
        return torch.where(likeliest_S == NO_TOKEN, NO_TOKEN, chosen_S)

    def _measure(self, logits_SV: torch.Tensor, chosen_S: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """float64 [S, 1 + columns of logprob_columns]: token ids, and numbers from raw logits where somebody asked."""
        columns_SC = logits_SV.new_zeros((batch.num_rows, 1 + FIXED_COLUMNS + 2 * batch.num_top), dtype=torch.float64)
        columns_SC[:, 0] = chosen_S
        for rows in self._blocks(batch.logprobs):
            rows_R = torch.tensor(rows, dtype=torch.int64)
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
            edit_rows(logits_RV, block, EditContext(eos_token_ids, self._seen, self._vocab_size))
        return logits_RV


def _likeliest(logits_SV: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the id of a row's largest logit, the smallest among equals; NO_TOKEN where there is none.

    Torch takes three to ten times longer than numpy to find an index, and this is all that greedy sampling does.
    """
    logits = logits_SV.numpy()
    ids = logits.argmax(axis=1)  # NaN counts as the largest
    ids[~(logits[np.arange(len(ids)), ids] > -np.inf)] = NO_TOKEN
    return torch.from_numpy(ids)


def _read(columns_SC: torch.Tensor, sequences: SequenceABC[Sequence]) -> list[SequenceSample]:
    """Rows of (token id, columns of logprob_columns)."""
    samples = []
    for sequence, (number, *row) in zip(sequences, columns_SC.tolist(), strict=True):
        token_id, num_top = int(number), sequence.params.logprobs
        if num_top is None or token_id == NO_TOKEN:
            samples.append(SequenceSample(token_id, None))
        else:
            samples.append(SequenceSample(token_id, read_logprobs(token_id, row, num_top)))
    return samples

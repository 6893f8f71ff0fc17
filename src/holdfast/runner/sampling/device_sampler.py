"""DeviceSampler: choices and log-probabilities by kernels, in buffers that are taken once, with one wait at the end.

One table says what is asked of every row and goes to the device in one copy. Rows whose logits are edited are copied into a
block and edited there; all others are read where they are. What comes back is token ids, and a few numbers for each row
that asked for log-probabilities. After construction nothing is allocated on the device.

S sequences, T prompt positions, V vocabulary, R rows that are worked on together, F fields of a row, C columns, X any rows
"""

from collections.abc import Sequence as SequenceABC
from itertools import repeat
from typing import NamedTuple

import torch

from holdfast.kernels.geometry import NUM_FIELDS, LogitRow
from holdfast.kernels.sampling.argmax import LogitScratch, argmax
from holdfast.kernels.sampling.edit_logits import copy_rows
from holdfast.kernels.sampling.logprobs import logprob_rows
from holdfast.kernels.sampling.sample import sample_tokens
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import PROMPT_ROWS, device_specs, edited_rows_per_block, host_specs
from holdfast.request.sequence import NO_TOKEN, Sequence, TokenLogprobs
from holdfast.runner.sampling.batch import SequenceSample, is_edited, logit_row
from holdfast.runner.sampling.logit_edits import (
    EDITS_OF,
    EditContext,
    EditedBlock,
    EditStaging,
    SeenTokens,
    allowed_tokens,
)
from holdfast.runner.sampling.logprobs import read_logprobs


class DeviceSampler:
    """Chooses tokens. From one step to the next it keeps counts of tokens on the host and nothing else."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int, ledger: Ledger) -> None:
        tensors = Arena("sampling", device_specs(max_rows, vocab_size), device, ledger, "fixed buffers").tensors
        self.argmax_S, self._chosen_S = tensors["argmax"], tensors["chosen"]
        self._block_argmax_R, self._block_RV = tensors["block_argmax"], tensors["block"]
        self._rows_XF, self._columns_SC = tensors["rows"], tensors["columns"]
        self._scratch = LogitScratch.of(tensors)
        is_cuda = device.type == "cuda"
        host = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=is_cuda)
            for spec in host_specs(max_rows, vocab_size)
        }
        self._host_chosen_S, self._host_rows_XF, self._host_columns_SC = host["chosen"], host["rows"], host["columns"]
        self._host_fields = self._host_rows_XF.numpy().reshape(-1)
        self._staging = EditStaging(host["edits"], tensors["edits"])
        self._done = torch.cuda.Event() if is_cuda else None
        self._is_busy = False
        self._vocab_size, self._device = vocab_size, device
        self._rows_at_once = self._block_argmax_R.shape[0]
        self._edited_at_once = edited_rows_per_block(vocab_size, max_rows)
        self._seen = SeenTokens(vocab_size, max_rows)

    def find_argmax(self, logits_SV: torch.Tensor) -> None:
        """Into the first places of `argmax_S`."""
        argmax(logits_SV, self.argmax_S[: logits_SV.shape[0]], self._scratch)

    def sample(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None,
    ) -> list[SequenceSample]:
        self._begin()
        num_rows = len(sequences)
        argmax_S = (self.argmax_S if chosen_by_graph is None else chosen_by_graph)[:num_rows]
        if chosen_by_graph is None:
            self.find_argmax(logits_SV)
        table = _Table.of(sequences, self._vocab_size, self._edited_at_once)
        direct_XF, edited_XF, asked_XF = self._send(table.fields).split(
            (table.num_direct, len(table.edited), len(table.asked))
        )
        chosen_S = argmax_S
        if table.num_direct or table.edited:
            chosen_S = self._chosen_S[:num_rows]
            chosen_S.copy_(argmax_S)
        for start in range(0, table.num_direct, self._rows_at_once):
            rows_RF = direct_XF[start : start + self._rows_at_once]
            sample_tokens(logits_SV, argmax_S, rows_RF, argmax_S, chosen_S, self._scratch)
        for start in range(0, len(table.edited), self._edited_at_once):
            rows_RF = edited_XF[start : start + self._edited_at_once]
            block_RV = self._block_RV[: rows_RF.shape[0]]
            block_argmax_R = self._block_argmax_R[: rows_RF.shape[0]]
            copy_rows(logits_SV, rows_RF, block_RV)
            edited = [sequences[row] for row in table.edited[start : start + self._edited_at_once]]
            self._edit(EditedBlock(block_RV, logits_SV, rows_RF), edited, eos_token_ids)
            argmax(block_RV, block_argmax_R, self._scratch)
            sample_tokens(block_RV, block_argmax_R, rows_RF, argmax_S, chosen_S, self._scratch)
        self._measure(logits_SV, argmax_S, chosen_S, asked_XF)
        token_ids, columns = self._read(chosen_S, len(table.asked))
        samples = list(map(SequenceSample, token_ids, repeat(None)))
        for row, column in zip(table.asked, columns, strict=True):
            if token_ids[row] != NO_TOKEN:
                num_top = min(sequences[row].params.logprobs or 0, self._vocab_size)
                samples[row] = SequenceSample(token_ids[row], read_logprobs(token_ids[row], column, num_top))
        return samples

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        num_top = min(num_top, self._vocab_size)
        results: list[TokenLogprobs] = []
        for start in range(0, len(target_ids), PROMPT_ROWS):
            self._begin()
            targets = target_ids[start : start + PROMPT_ROWS]
            logits_RV = logits_TV[start : start + PROMPT_ROWS]
            self._host_chosen_S.numpy()[: len(targets)] = targets
            tokens_R, argmax_R = self._chosen_S[: len(targets)], self._block_argmax_R[: len(targets)]
            tokens_R.copy_(self._host_chosen_S[: len(targets)], non_blocking=True)
            argmax(logits_RV, argmax_R, self._scratch)
            rows_RF = self._send([field for row in range(len(targets)) for field in _logprob_row(row, num_top)])
            self._measure(logits_RV, argmax_R, tokens_R, rows_RF)
            _, columns = self._read(tokens_R, len(targets))
            results += [read_logprobs(token_id, row, num_top) for token_id, row in zip(targets, columns, strict=True)]
        return results

    def _begin(self) -> None:
        """What was sent before has been read, unless an interrupt cut a step short; then it may be on its way still."""
        if self._is_busy and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._is_busy = True
        self._staging.reset()

    def _send(self, fields: list[float]) -> torch.Tensor:
        """Rows of a table, one behind the other, on the device."""
        num_rows = len(fields) // NUM_FIELDS
        if num_rows:
            self._host_fields[: len(fields)] = fields
            self._rows_XF[:num_rows].copy_(self._host_rows_XF[:num_rows], non_blocking=True)
        return self._rows_XF[:num_rows]

    def _edit(self, block: EditedBlock, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> None:
        context = EditContext(eos_token_ids, self._seen, self._vocab_size)
        for row, sequence in enumerate(sequences):
            kept = allowed_tokens(sequence, context)
            if kept is not None:
                self._staging.add(row * self._vocab_size, kept, None, block)
        self._staging.end_kind(None)
        for kind, edits_of in EDITS_OF.items():
            for row, sequence in enumerate(sequences):
                edits = edits_of(sequence, context)
                if edits is not None:
                    self._staging.add(row * self._vocab_size, edits, kind, block)
            self._staging.end_kind(kind)
        self._staging.apply(block)

    def _measure(
        self, logits_SV: torch.Tensor, argmax_S: torch.Tensor, tokens_S: torch.Tensor, rows_XF: torch.Tensor
    ) -> None:
        for start in range(0, rows_XF.shape[0], self._rows_at_once):
            rows_RF = rows_XF[start : start + self._rows_at_once]
            columns_RC = self._columns_SC[start : start + rows_RF.shape[0]]
            logprob_rows(logits_SV, argmax_S, tokens_S, rows_RF, columns_RC, self._scratch)

    def _read(self, ids_S: torch.Tensor, num_columns: int) -> tuple[list[int], list[list[float]]]:
        """Token ids and the first columns, on the host: the only wait of a step."""
        host_S, host_RC = self._host_chosen_S[: ids_S.shape[0]], self._host_columns_SC[:num_columns]
        host_S.copy_(ids_S, non_blocking=True)
        if num_columns:
            host_RC.copy_(self._columns_SC[:num_columns], non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))
            self._done.synchronize()
        self._is_busy = False
        return host_S.tolist(), host_RC.tolist()


class _Table(NamedTuple):
    """What is asked of the rows of a step."""

    fields: list[float]
    """Of random rows that are read where they are, then `edited`, then `asked`. The most likely raw token takes no row."""
    num_direct: int
    edited: list[int]
    """Rows of the step whose logits are edited."""
    asked: list[int]
    """Rows of the step that asked for log-probabilities."""

    @classmethod
    def of(cls, sequences: SequenceABC[Sequence], vocab_size: int, edited_at_once: int) -> "_Table":
        fields: list[float] = []
        edited: list[int] = []
        asked: list[int] = []
        for row, sequence in enumerate(sequences):
            if is_edited(sequence):
                edited.append(row)
            elif sequence.params.temperature != 0.0:
                fields += logit_row(sequence, row, row, vocab_size)
            if sequence.params.logprobs is not None:
                asked.append(row)
        num_direct = len(fields) // NUM_FIELDS
        for index, row in enumerate(edited):
            is_blank = sequences[row].params.allowed_token_ids is not None
            fields += (*logit_row(sequences[row], index % edited_at_once, row, vocab_size)[:-1], float(is_blank))
        for row in asked:
            fields += _logprob_row(row, min(sequences[row].params.logprobs or 0, vocab_size))
        return cls(fields, num_direct, edited, asked)


def _logprob_row(row: int, num_top: int) -> LogitRow:
    return LogitRow(row, row, negative_temperature=-1.0, top_k=num_top)

"""DeviceSampler: samples and computes log-probabilities by kernels, in buffers allocated once; only reading waits.

One table holds the parameters of all rows and goes to the device in one copy. Edited rows are copied into a block and
edited there; all others are read in place. Token ids come back, and a few numbers per row with log-probabilities.
After construction nothing is allocated on the device.

Two steps may be in flight. The device runs them in sequence, so its buffers serve both; each step has its own pinned
host memory for inputs and results. Late rows (batch.py) are chosen after the tokens of the previous step have been
read; their logits stay in the workspace until the next forward pass, which comes later.

S sequences, T prompt positions, V vocabulary, R rows that are worked on together, M rows of a step with masks, F
fields of a row, C columns, X any rows, N slots
"""

from collections import deque
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch

from holdfast.kernels.geometry import NUM_FIELDS, LogitRow
from holdfast.kernels.sampling.argmax import LogitScratch, argmax, argmax_share
from holdfast.kernels.sampling.edit_logits import copy_rows, mask_logits
from holdfast.kernels.sampling.last_tokens import keep_tokens, resolve_tokens
from holdfast.kernels.sampling.logprobs import logprob_rows
from holdfast.kernels.sampling.sample import sample_tokens
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.planning.terms import PROMPT_ROWS, device_specs, edited_rows_per_block, host_mask_spec, host_specs
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, Sequence, TokenLogprobs
from holdfast.request.structured import StructuredOutputs
from holdfast.runner.sampling.batch import Choice, SequenceSample, logit_row
from holdfast.runner.sampling.logit_edits import (
    EDITS_OF,
    EditContext,
    EditedBlock,
    EditStaging,
    allowed_tokens,
)
from holdfast.runner.sampling.logprobs import read_logprobs
from holdfast.runner.sampling.masks import fill_masks, has_masks
from holdfast.runner.sampling.sampler import Sampler

MAX_UNDER_WAY = 2
"""Steps whose choices may be on the device at once."""
_EVERY_EDIT = SamplingParams(
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    min_tokens=9,
    stop_token_ids=(0,),
    allowed_token_ids=(0,),
    logprobs=1,
)
_FORM = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))


class _Doubles:
    """Pinned memory of one step in flight: inputs, results, and the event of their arrival."""

    def __init__(self, specs: SequenceABC[TensorSpec], device_edits_E2: torch.Tensor) -> None:
        self._device = device_edits_E2.device
        is_cuda = device_edits_E2.is_cuda
        host = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), pin_memory=is_cuda) for spec in specs
        }
        self.chosen_S, self.rows_XF, self.columns_SC = host["chosen"], host["rows"], host["columns"]
        self.masks_MW = host["masks"]
        self.fields = self.rows_XF.numpy().reshape(-1)
        self.staging = EditStaging(host["edits"], device_edits_E2)
        self._done = torch.cuda.Event() if is_cuda else None
        self._is_busy = False

    def begin(self) -> None:
        """Reuse the memory. Wait if an interrupt cut its last step short: that may still be in flight."""
        if self._is_busy and self._done is not None:
            torch.cuda.current_stream(self._device).synchronize()
        self._is_busy = True
        self.staging.reset()

    def end(self) -> None:
        """Record that all copies are enqueued."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the copies have arrived."""
        if self._done is not None:
            self._done.synchronize()
        self._is_busy = False


class DeviceSampler(Sampler):
    """Chooses by kernels. Across steps it keeps token counts on the host and the newest token of each slot."""

    keeps_tokens = True

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int, ledger: Ledger) -> None:
        super().__init__(vocab_size, max_rows)
        tensors = Arena("sampling", device_specs(max_rows, vocab_size), device, ledger, "fixed buffers").tensors
        self.argmax_S, self._chosen_S = tensors["argmax"], tensors["chosen"]
        self._last_tokens_N = tensors["last_tokens"].zero_()
        self._block_argmax_R, self._block_RV = tensors["block_argmax"], tensors["block"]
        self._rows_XF, self.columns_SC = tensors["rows"], tensors["columns"]
        self._masks_RW = tensors["masks"]
        self._scratch = LogitScratch.of(tensors)
        specs = (*host_specs(max_rows, vocab_size), host_mask_spec(max_rows, vocab_size))
        self._doubles = deque(_Doubles(specs, tensors["edits"]) for _ in range(MAX_UNDER_WAY))
        self._rows_at_once = self._block_argmax_R.shape[0]
        self._edited_at_once = edited_rows_per_block(vocab_size, max_rows)

    def warm(self, logits_SV: torch.Tensor) -> None:
        for params in (SamplingParams(top_k=1), _EVERY_EDIT, _FORM):
            self.sample(logits_SV[:1], [Sequence(-1, [0, 0], 1, params, seed=0, max_tokens=9)], frozenset())
        self.prompt_logprobs(logits_SV[:1], [0], 1)

    def resolve(self, ids_T: torch.Tensor) -> None:
        resolve_tokens(ids_T, self._last_tokens_N)

    def find_argmax(self, logits_SV: torch.Tensor, keep_slots_S: torch.Tensor | None = None) -> None:
        """Write the argmax of each row to the front of `argmax_S`; a CUDA graph may capture this.

        With `keep_slots_S` it is also the slot's newest token, until another is chosen for the row.
        """
        argmax_S = self.argmax_S[: logits_SV.shape[0]]
        argmax(logits_SV, argmax_S, self._scratch)
        if keep_slots_S is not None:
            keep_tokens(argmax_S, keep_slots_S, self._last_tokens_N)

    def share_argmax(self, logits_SV: torch.Tensor, first_token: int, out_SX: torch.Tensor) -> None:
        """Write id and logit of each row's argmax in columns from `first_token` on; a CUDA graph may capture this."""
        argmax_share(logits_SV, first_token, out_SX, self._scratch)

    def keep(self, tokens_S: torch.Tensor, keep_slots_S: torch.Tensor) -> None:
        keep_tokens(tokens_S, keep_slots_S, self._last_tokens_N)

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> "DeviceChoosing":
        """Enqueue the choices that can be made now, and the copies of the results if none is late."""
        if logits_SV is not None:
            self.check(logits_SV, len(choices), "choices")
        doubles = self._next_doubles()
        table = _Table.of(choices, self._vocab_size, self._edited_at_once)
        if logits_SV is None:
            logits_SV = self._block_RV[:0]
        argmax_S = (self.argmax_S if chosen_by_graph is None else chosen_by_graph)[: len(choices)]
        if chosen_by_graph is None and choices:
            self.find_argmax(logits_SV, keep_slots_S)
        rows = _TableRows(*self._send(doubles, table.fields).split(table.lengths))
        chosen_S = argmax_S
        if not table.is_plain:
            chosen_S = self._chosen_S[: len(choices)]
            chosen_S.copy_(argmax_S)
        step = _ChoosingRows(logits_SV, argmax_S, chosen_S, choices, eos_token_ids)
        for start in range(0, table.num_direct, self._rows_at_once):
            rows_RF = rows.direct_XF[start : start + self._rows_at_once]
            sample_tokens(logits_SV, argmax_S, rows_RF, argmax_S, chosen_S, self._scratch)
        self._choose_edited(step, table.edited, rows.edited_XF, doubles)
        choosing = DeviceChoosing(self, doubles, table, rows, step, keep_slots_S, waits=bool(table.late))
        if not choosing.waits:
            self.finish(choosing)
        return choosing

    def finish(self, choosing: "DeviceChoosing") -> None:
        """Enqueue late rows, log-probabilities and the copies of the results."""
        table, rows, step, doubles = choosing.table, choosing.rows, choosing.step, choosing.doubles
        self._choose_edited(step, table.late, rows.late_XF, doubles, first_mask=len(table.edited))
        if choosing.keep_slots_S is not None and not table.is_plain:
            keep_tokens(step.chosen_S, choosing.keep_slots_S, self._last_tokens_N)
        self._measure(step.logits_SV, step.argmax_S, step.chosen_S, rows.reported_XF)
        self._return(doubles, step.chosen_S, len(table.reported))

    def read(self, choosing: "DeviceChoosing") -> list[SequenceSample]:
        table, choices, doubles = choosing.table, choosing.step.choices, choosing.doubles
        doubles.wait()
        token_ids = doubles.chosen_S[: len(choices)].tolist()
        samples = list(map(SequenceSample, token_ids, repeat(None)))
        for row, column in zip(table.reported, doubles.columns_SC[: len(table.reported)].tolist(), strict=True):
            if token_ids[row] != NO_TOKEN:
                num_top = min(choices[row].sequence.params.logprobs or 0, self._vocab_size)
                samples[row] = SequenceSample(token_ids[row], read_logprobs(token_ids[row], column, num_top))
        return samples

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score target_ids[i] by row i of the float32 logits, which predicts it."""
        self.check(logits_TV, len(target_ids), "targets")
        num_top = min(num_top, self._vocab_size)
        results: list[TokenLogprobs] = []
        for start in range(0, len(target_ids), PROMPT_ROWS):
            doubles = self._next_doubles()
            targets = target_ids[start : start + PROMPT_ROWS]
            logits_RV = logits_TV[start : start + PROMPT_ROWS]
            doubles.chosen_S.numpy()[: len(targets)] = targets
            tokens_R, argmax_R = self._chosen_S[: len(targets)], self._block_argmax_R[: len(targets)]
            tokens_R.copy_(doubles.chosen_S[: len(targets)], non_blocking=True)
            argmax(logits_RV, argmax_R, self._scratch)
            fields = [field for row in range(len(targets)) for field in _logprob_row(row, num_top)]
            self._measure(logits_RV, argmax_R, tokens_R, self._send(doubles, fields))
            self._return(doubles, tokens_R, len(targets))
            doubles.wait()
            columns = doubles.columns_SC[: len(targets)].tolist()
            results += [read_logprobs(token_id, row, num_top) for token_id, row in zip(targets, columns, strict=True)]
        return results

    def _next_doubles(self) -> _Doubles:
        """Take the least recently used doubles; their results have been read."""
        self._doubles.rotate()
        self._doubles[0].begin()
        return self._doubles[0]

    def _send(self, doubles: _Doubles, fields: list[float]) -> torch.Tensor:
        """Copy the rows of a table to the device."""
        num_rows = len(fields) // NUM_FIELDS
        if num_rows:
            doubles.fields[: len(fields)] = fields
            self._rows_XF[:num_rows].copy_(doubles.rows_XF[:num_rows], non_blocking=True)
        return self._rows_XF[:num_rows]

    def _choose_edited(
        self, step: "_ChoosingRows", rows: list[int], rows_XF: torch.Tensor, doubles: _Doubles, first_mask: int = 0
    ) -> None:
        """Edit and choose rows block by block; the host holds masks of all blocks of a step in sequence."""
        for start in range(0, len(rows), self._edited_at_once):
            rows_RF = rows_XF[start : start + self._edited_at_once]
            block_RV = self._block_RV[: rows_RF.shape[0]]
            block_argmax_R = self._block_argmax_R[: rows_RF.shape[0]]
            copy_rows(step.logits_SV, rows_RF, block_RV)
            edited = [step.choices[row] for row in rows[start : start + self._edited_at_once]]
            self._edit(EditedBlock(block_RV, step.logits_SV, rows_RF), edited, step.eos_token_ids, doubles.staging)
            if has_masks(edited):
                first = first_mask + start
                masks_RW = doubles.masks_MW[first : first + len(edited)]
                fill_masks(self.mask_source, edited, step.eos_token_ids, masks_RW.numpy())
                device_masks_RW = self._masks_RW[: len(edited)]
                device_masks_RW.copy_(masks_RW, non_blocking=True)
                mask_logits(block_RV, device_masks_RW)
            argmax(block_RV, block_argmax_R, self._scratch)
            sample_tokens(block_RV, block_argmax_R, rows_RF, step.argmax_S, step.chosen_S, self._scratch)

    def _edit(
        self, block: EditedBlock, choices: list[Choice], eos_token_ids: frozenset[int], staging: EditStaging
    ) -> None:
        context = EditContext(eos_token_ids, self._seen, self._vocab_size)
        for row, choice in enumerate(choices):
            kept = allowed_tokens(choice, context)
            if kept is not None:
                staging.add(row * self._vocab_size, kept, None, block)
        staging.end_kind(None)
        for kind, edits_of in EDITS_OF.items():
            for row, choice in enumerate(choices):
                edits = edits_of(choice, context)
                if edits is not None:
                    staging.add(row * self._vocab_size, edits, kind, block)
            staging.end_kind(kind)
        staging.apply(block)

    def _measure(
        self, logits_SV: torch.Tensor, argmax_S: torch.Tensor, tokens_S: torch.Tensor, rows_XF: torch.Tensor
    ) -> None:
        for start in range(0, rows_XF.shape[0], self._rows_at_once):
            rows_RF = rows_XF[start : start + self._rows_at_once]
            columns_RC = self.columns_SC[start : start + rows_RF.shape[0]]
            logprob_rows(logits_SV, argmax_S, tokens_S, rows_RF, columns_RC, self._scratch)

    def _return(self, doubles: _Doubles, ids_S: torch.Tensor, num_columns: int) -> None:
        """Send token ids and the first columns to the host."""
        if ids_S.shape[0]:
            doubles.chosen_S[: ids_S.shape[0]].copy_(ids_S, non_blocking=True)
        if num_columns:
            doubles.columns_SC[:num_columns].copy_(self.columns_SC[:num_columns], non_blocking=True)
        doubles.end()


class _ChoosingRows(NamedTuple):
    """Inputs and outputs of choices."""

    logits_SV: torch.Tensor
    argmax_S: torch.Tensor
    chosen_S: torch.Tensor
    choices: SequenceABC[Choice]
    eos_token_ids: frozenset[int]


class _TableRows(NamedTuple):
    """The parts of a table on the device."""

    direct_XF: torch.Tensor
    edited_XF: torch.Tensor
    late_XF: torch.Tensor
    reported_XF: torch.Tensor


@dataclass(eq=False, slots=True)
class DeviceChoosing:
    """Choices of a step in flight on the device (`Choosing` of batch.py)."""

    sampler: DeviceSampler
    doubles: _Doubles
    table: "_Table"
    rows: _TableRows
    step: _ChoosingRows
    keep_slots_S: torch.Tensor | None
    waits: bool
    has_begun: bool = False

    def choose_late(self) -> None:
        if not self.waits:
            return
        if self.has_begun:  # an interrupt cut it off
            self.doubles.begin()
        self.has_begun = True
        self.sampler.finish(self)
        self.waits = False

    def read(self) -> list[SequenceSample]:
        assert not self.waits, "rows that are late were not chosen"
        return self.sampler.read(self)


class _Table(NamedTuple):
    """Parameters of the rows of a step."""

    fields: list[float]
    """Random rows read in place, then `edited`, `late` and `reported`. Plain greedy rows have none."""
    num_direct: int
    edited: list[int]
    """Rows of the step whose logits can be edited now."""
    late: list[int]
    """Rows whose edits must wait."""
    reported: list[int]
    """Rows of the step with log-probabilities."""

    @property
    def is_plain(self) -> bool:
        """True if every row takes the argmax of its raw logits."""
        return not (self.num_direct or self.edited or self.late)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return self.num_direct, len(self.edited), len(self.late), len(self.reported)

    @classmethod
    def of(cls, choices: SequenceABC[Choice], vocab_size: int, edited_at_once: int) -> "_Table":
        fields: list[float] = []
        edited: list[int] = []
        late: list[int] = []
        reported: list[int] = []
        for row, choice in enumerate(choices):
            params = choice.sequence.params
            if choice.is_edited:
                (late if choice.is_late else edited).append(row)
            elif params.temperature != 0.0:
                fields += logit_row(choice, row, row, vocab_size)
            if params.logprobs is not None:
                reported.append(row)
        num_direct = len(fields) // NUM_FIELDS
        for rows in (edited, late):
            for index, row in enumerate(rows):
                is_blank = choices[row].sequence.params.allowed_token_ids is not None
                fields += (*logit_row(choices[row], index % edited_at_once, row, vocab_size)[:-1], float(is_blank))
        for row in reported:
            fields += _logprob_row(row, min(choices[row].sequence.params.logprobs or 0, vocab_size))
        return cls(fields, num_direct, edited, late, reported)


def _logprob_row(row: int, num_top: int) -> LogitRow:
    return LogitRow(row, row, negative_temperature=-1.0, top_k=num_top)

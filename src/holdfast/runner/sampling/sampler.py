"""Sampler: chooses tokens and log-probabilities from logits, on the device; `launch` does not wait, reading does.

The order of operations is vLLM's:

raw logits -> log-probabilities
           -> allowed tokens alone -> penalties -> logit bias -> bans: bad words, an end before min_tokens
           -> the mask of a grammar (structured outputs)
           -> temperature -> min_p -> top_k -> top_p -> one token, by a random number that (seed, position) gives

Every filter keeps the first tokens of one order: more likely first, then smaller id. The token is then looked up among
the remaining weights, in vocabulary order. All sums are of integers, so sampling is batch-invariant: a row gives the
same token and log-probabilities, to the bit, in any batch and at any row.

S sequences, T prompt positions, R rows of a block, V vocabulary, K candidates, X either, C columns of
log-probabilities, B buckets of a histogram and one on each side for keys outside of them

On a CPU the HostSampler chooses, by torch operations over blocks of rows; on a GPU the DeviceSampler. Random rows are
unfiltered, narrow (sorted candidates) or wide (the whole vocabulary). All three follow one rule, so they agree to the
bit if two of them apply; they differ in cost. Filters keep the first tokens by distance below the largest logit, then
by id, up to top_k tokens or a weight of top_p of the total. Then the random number picks a position in the kept
weights, in vocabulary order.

To cut the whole vocabulary, three histograms of a key's bits, each inside the bucket found by the one before, give the
key at which the weights reach the required sum. Shapes are fixed, sums are of integers, and the memory is as planned; a
sort's is not.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.kernels.sampling.edit_logits import mask_logits
from holdfast.planning.terms import MAX_NARROW_TOP_K, NUM_BUCKETS, mask_words, rows_per_block
from holdfast.request.sequence import NO_TOKEN, Sequence, TokenLogprobs
from holdfast.runner.sampling.batch import Choice, Choosing, RowParameters, SamplingBatch, SequenceSample
from holdfast.runner.sampling.logit_edits import EditContext, SeenTokens, edit_rows
from holdfast.runner.sampling.logprobs import (
    FIXED_COLUMNS,
    distances_,
    draw_,
    logprob_columns,
    nearest,
    nucleus_weight,
    read_logprobs,
    weights,
)
from holdfast.runner.sampling.masks import MaskSource, fill_masks, has_masks

_SHIFTS = (20, 9, 0)
"""A key has 31 bits: 11, 11 and 9 of them."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choices of a step on a CPU, made at once: all inputs are known before a step begins."""

    samples: list[SequenceSample]
    waits: bool = False

    def choose_late(self) -> None: ...

    def read(self) -> list[SequenceSample]:
        return self.samples


class Sampler:
    """Chooses tokens for up to `max_rows` sequences at once: a HostSampler on a CPU, a DeviceSampler on a GPU.

    Logits are float32 and may be a view of a larger buffer whose rows lie side by side. On a GPU nothing is allocated
    after construction, and nothing compiled after `warm` as long as the logits begin at a multiple of 16 bytes.
    """

    keeps_tokens = False
    """True if the newest token of each slot stays on the device, so that a step can begin before the host knows it."""
    shares_tokens = False
    """True if ids of every step come from another rank's device."""
    argmax_S: torch.Tensor
    """int64, at least `max_rows` long, at a fixed address."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size, max_rows)
        self.mask_source: MaskSource | None = None

    def end_step(self) -> None:
        """End a step that chose nothing."""

    def follow(self, source: MaskSource) -> None:
        """Take masks of structured outputs from `source`; without one, such rows choose nothing."""
        self.mask_source = source

    def warm(self, logits_SV: torch.Tensor) -> None:
        """Compile every kernel for logits of this layout; values do not matter."""

    def resolve(self, ids_T: torch.Tensor) -> None:
        """Replace ids of -1 - slot by the newest token of the slot; a CUDA graph may capture this."""

    def keep(self, tokens_S: torch.Tensor, keep_slots_S: torch.Tensor) -> None:
        """Store the newest tokens of their slots, if tokens are kept."""

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> Choosing:
        """Begin to choose a token from each row of the float32 logits; None: there is nothing to choose.

        `chosen_by_graph` holds what `find_argmax` would find, if a graph has found it already. If rows are late, the
        logits must stay until they are chosen. Two steps may be in flight.
        """
        raise NotImplementedError

    def sample(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
    ) -> list[SequenceSample]:
        """Choose a token per sequence and wait; row i of the float32 logits follows all of sequences[i].token_ids."""
        self.check(logits_SV, len(sequences), "sequences")
        if not sequences:
            return []
        return self.launch(logits_SV, list(map(Choice.of, sequences)), eos_token_ids, chosen_by_graph).read()

    def check(self, logits_XV: torch.Tensor, num_rows: int, name: str) -> None:
        """Refuse logits of another shape or type."""
        assert logits_XV.shape == (num_rows, self._vocab_size), (
            f"logits are {tuple(logits_XV.shape)} for {num_rows} {name} and {self._vocab_size=}"
        )
        assert logits_XV.dtype == torch.float32, f"{logits_XV.dtype=} must be float32"


class HostSampler(Sampler):
    """Chooses on a CPU. Across steps it keeps only token counts."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        super().__init__(vocab_size, max_rows)
        self.argmax_S = torch.zeros(max_rows, dtype=torch.int64)
        self._rows_per_block = rows_per_block(vocab_size, max_rows)
        self._vocabulary_V = torch.arange(vocab_size, dtype=torch.int32)
        self._masks_RW = torch.zeros((self._rows_per_block, mask_words(vocab_size)), dtype=torch.int32)

    def find_argmax(self, logits_SV: torch.Tensor, keep_slots_S: torch.Tensor | None = None) -> None:
        """Write the argmax of each row to the front of `argmax_S`; ignore `keep_slots_S`."""
        self.argmax_S[: logits_SV.shape[0]] = _argmax(logits_SV)

    def share_argmax(self, logits_SV: torch.Tensor, first_token: int, out_SX: torch.Tensor) -> None:
        """Write id and logit of a vocabulary share's argmax; by numpy for the same reason as `_argmax`."""
        logits, out = logits_SV.numpy(), out_SX.numpy()
        ids = logits.argmax(axis=1)
        out[:, 0] = ids + first_token
        out[:, 1] = logits[np.arange(len(ids)), ids]

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> Chosen:
        if logits_SV is None:
            return Chosen([])
        self.check(logits_SV, len(choices), "choices")
        assert not any(choice.is_late for choice in choices), "a token that is counted is not known yet"
        batch = SamplingBatch.of(choices, self._vocab_size)
        argmax_S = _argmax(logits_SV) if chosen_by_graph is None else chosen_by_graph[: len(choices)]
        chosen_S = argmax_S
        if not batch.is_plain:
            chosen_S = self._choose(logits_SV, argmax_S, choices, eos_token_ids, batch)
        if not batch.logprobs:
            return Chosen([SequenceSample(token_id, None) for token_id in chosen_S.tolist()])
        return Chosen(_read(self._measure(logits_SV, chosen_S, batch), choices))

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score target_ids[i] by row i of the float32 logits, which predicts it."""
        self.check(logits_TV, len(target_ids), "targets")
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
        argmax_S: torch.Tensor,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        batch: SamplingBatch,
    ) -> torch.Tensor:
        """Return token ids or NO_TOKEN, int64 [S]; keep the logits unchanged."""
        chosen_S = argmax_S.clone()
        for rows in self._blocks(batch.edited_greedy):
            rows_R = torch.tensor(rows, dtype=torch.int64)
            logits_RV = self._edited(logits_SV, rows, rows_R, choices, eos_token_ids)
            chosen_S.index_copy_(0, rows_R, _argmax(logits_RV))
            del logits_RV
        for kind, choose_tokens in (
            (batch.unfiltered, choose_unfiltered),
            (batch.narrow, choose_narrow),
            (batch.wide, choose_wide),
        ):
            for rows in self._blocks(kind):
                params = RowParameters.of(rows, choices, self._vocab_size)
                logits_RV = self._edited(logits_SV, rows, params.rows, choices, eos_token_ids)
                distance_RV, choosable_R1 = distances_(logits_RV)
                chosen_R1 = torch.where(choosable_R1, choose_tokens(distance_RV, params, self._vocabulary_V), NO_TOKEN)
                chosen_S.index_copy_(0, params.rows, chosen_R1.squeeze(1))
                del logits_RV, distance_RV  # the next block takes its memory before these names are bound again
        # A ban may hide the only NaN of a row, so the raw logits have the last word.
        return torch.where(argmax_S == NO_TOKEN, NO_TOKEN, chosen_S)

    def _measure(self, logits_SV: torch.Tensor, chosen_S: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return token ids and, for rows with log-probabilities, numbers from raw logits: float64 [S, 1 + columns]."""
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
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
    ) -> torch.Tensor:
        """Copy a block of logits and apply all edits and masks of its sequences."""
        logits_RV = logits_SV.index_select(0, rows_R)
        block = [choices[row] for row in rows]
        if any(choice.is_edited for choice in block):
            edit_rows(logits_RV, block, EditContext(eos_token_ids, self._seen, self._vocab_size))
        if has_masks(block):
            masks_RW = self._masks_RW[: len(block)]
            fill_masks(self.mask_source, block, eos_token_ids, masks_RW.numpy())
            mask_logits(logits_RV, masks_RW)
        return logits_RV


def _argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the id of a row's largest logit, the smallest among equals, or NO_TOKEN: int64 [S].

    Torch takes three to ten times longer than numpy here, and greedy sampling does nothing else.
    """
    logits = logits_SV.numpy()
    ids = logits.argmax(axis=1)  # NaN counts as the largest
    ids[~(logits[np.arange(len(ids)), ids] > -np.inf)] = NO_TOKEN
    return torch.from_numpy(ids)


def _read(columns_SC: torch.Tensor, choices: SequenceABC[Choice]) -> list[SequenceSample]:
    """Read rows of (token id, columns of logprob_columns)."""
    samples = []
    for choice, (number, *row) in zip(choices, columns_SC.tolist(), strict=True):
        token_id, num_top = int(number), choice.sequence.params.logprobs
        if num_top is None or token_id == NO_TOKEN:
            samples.append(SequenceSample(token_id, None))
        else:
            samples.append(SequenceSample(token_id, read_logprobs(token_id, row, num_top)))
    return samples


def choose_unfiltered(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """Choose token ids, [R, 1], from the whole vocabulary or after min_p."""
    return draw_(_weights(distance_RV, params), params.uniform)


def choose_narrow(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """Choose token ids, [R, 1]; every row has a top_k of at most MAX_NARROW_TOP_K."""
    distance_RK, ids_RK = nearest(distance_RV, vocabulary_V, params.max_top_k)
    weight_RK = _weights(distance_RK, params)
    weight_RK.masked_fill_(vocabulary_V[: params.max_top_k] >= params.top_k, 0)
    if params.any_top_p:
        running_RK = weight_RK.cumsum(dim=1)
        needed_R1 = nucleus_weight(running_RK[:, -1:], params.top_p)
        weight_RK.masked_fill_(running_RK.sub_(weight_RK) >= needed_R1, 0)
    return _draw_candidate(ids_RK, weight_RK, params.uniform)


def choose_wide(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """Choose token ids, [R, 1]; any top_k and top_p."""
    key_RV = distance_RV.view(torch.int32)
    weight_RV = _weights(distance_RV, params)
    if params.max_top_k:
        one_RV = weight_RV.new_ones(()).expand_as(weight_RV)
        weight_RV.masked_fill_(cut(key_RV, one_RV, params.top_k), 0)
    if not params.any_top_p:
        return draw_(weight_RV, params.uniform)
    needed_R1 = nucleus_weight(weight_RV.sum(dim=1, keepdim=True), params.top_p)
    return _choose_looking(distance_RV, weight_RV, needed_R1, params.uniform, vocabulary_V)


def _choose_nucleus(
    key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor, uniform_R1: torch.Tensor
) -> torch.Tensor:
    weight_RV.masked_fill_(cut(key_RV, weight_RV, needed_R1), 0)
    return draw_(weight_RV, uniform_R1)


def _choose_looking(
    distance_RV: torch.Tensor,
    weight_RV: torch.Tensor,
    needed_R1: torch.Tensor,
    uniform_R1: torch.Tensor,
    vocabulary_V: torch.Tensor,
) -> torch.Tensor:
    """Choose like `_choose_nucleus`, but from a few candidates if the nucleus is small, as most are."""
    _, ids_RK = nearest(distance_RV, vocabulary_V, min(MAX_NARROW_TOP_K, len(vocabulary_V)))
    weight_RK = weight_RV.gather(1, ids_RK)
    running_RK = weight_RK.cumsum(dim=1)
    large_R = running_RK[:, -1] < needed_R1[:, 0]
    weight_RK.masked_fill_(running_RK.sub_(weight_RK) >= needed_R1, 0)
    chosen_R1 = _draw_candidate(ids_RK, weight_RK, uniform_R1)
    for row in large_R.nonzero()[:, 0].tolist():
        one = slice(row, row + 1)
        key_1V = distance_RV[one].view(torch.int32)
        chosen_R1[one] = _choose_nucleus(key_1V, weight_RV[one], needed_R1[one], uniform_R1[one])
    return chosen_R1


def _draw_candidate(ids_RK: torch.Tensor, weight_RK: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    ids_RK, order_RK = ids_RK.sort(dim=1)
    return ids_RK.gather(1, draw_(weight_RK.gather(1, order_RK), uniform_R1))


def _weights(distance_RX: torch.Tensor, params: RowParameters) -> torch.Tensor:
    return weights(distance_RX, params.negative_temperature, params.min_p if params.any_min_p else None)


def cut(key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor) -> torch.Tensor:
    """Return True for tokens to drop: all after the first ones whose weights reach `needed`."""
    last_key_R1, before_R1 = _last_key(key_RV, weight_RV, needed_R1)
    tie_RV = key_RV == last_key_R1
    tie_weight_RV = torch.where(tie_RV, weight_RV, 0).cumsum_(dim=1).sub_(weight_RV)
    late_tie_RV = tie_RV.logical_and_(tie_weight_RV >= needed_R1 - before_R1)
    return late_tie_RV.logical_or_(key_RV > last_key_R1)


def _last_key(
    key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key up to which the weights reach `needed`, and the weight before it: [R, 1] each."""
    start_R1 = key_RV.new_zeros((key_RV.shape[0], 1))
    before_R1 = torch.zeros_like(needed_R1)
    for shift in _SHIFTS:
        running_RB = _histogram(key_RV, weight_RV, start_R1, shift).cumsum_(dim=1)
        bucket_R1 = torch.searchsorted(running_RB, needed_R1).clamp_(1, NUM_BUCKETS)
        before_R1 = running_RB.gather(1, bucket_R1 - 1)
        start_R1 = start_R1 + ((bucket_R1 - 1) << shift).to(torch.int32)
    return start_R1, before_R1


def _histogram(key_RV: torch.Tensor, weight_RV: torch.Tensor, start_R1: torch.Tensor, shift: int) -> torch.Tensor:
    """Sum weights by bucket of 2**shift keys from `start` on; the first bucket has keys before, the last keys after."""
    bucket_RV = (key_RV - start_R1).bitwise_right_shift_(shift).clamp_(-1, NUM_BUCKETS).add_(1).to(torch.int64)
    histogram_RB = weight_RV.new_zeros((key_RV.shape[0], NUM_BUCKETS + 2))
    return histogram_RB.scatter_add_(1, bucket_RV, weight_RV)

"""Sampler: from logits to chosen tokens and log-probabilities, on the device; `launch` waits for nothing, reading does.

The order of operations is the one that vLLM's users know:

raw logits -> log-probabilities
           -> allowed tokens alone -> penalties -> logit bias -> bans: bad words, an end before min_tokens
           -> the mask of a form (structured outputs)
           -> temperature -> min_p -> top_k -> top_p -> one token, by a random number that (seed, position) gives

Every filter keeps the first tokens of one order: the more likely first, and the smaller id among equals. The token is
then looked up among the weights that are left, in the order of the vocabulary. All sums are of whole numbers, so a row
gives the same token and the same log-probabilities to the bit alone, in any company and in any place.

S sequences, T prompt positions, R rows of a block, V vocabulary, K candidates, X either, C columns of log-probabilities,
B buckets of a histogram and one on each side for keys outside of them

On a CPU the HostSampler chooses, in torch operations over blocks of rows, on a GPU the DeviceSampler.
Random rows go one of three ways: unfiltered, narrow (sorted candidates), wide (the whole vocabulary). All three follow one
rule and so agree to the bit wherever two of them apply; they differ in what they cost. Filters keep the first tokens of
one order, the smaller distance below the largest logit first and the smaller id among equals, as far as top_k tokens or a
weight of top_p of the total; then the random number picks a place in the kept weights, in the vocabulary's order.

Where the whole vocabulary is cut, three histograms of a key's bits, each inside the bucket that the one before has found,
give the key at which the weights reach what is needed. All shapes are fixed, all sums are of whole numbers, and the memory
is what the plan says; a sort's is not.
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
    """The choices of a step on a CPU, which are made at once: what they need is known before a step begins."""

    samples: list[SequenceSample]
    waits: bool = False

    def choose_late(self) -> None: ...

    def read(self) -> list[SequenceSample]:
        return self.samples


class Sampler:
    """Chooses tokens for up to `max_rows` sequences at once: a HostSampler on a CPU, a DeviceSampler on a GPU.

    Logits are float32 and may be a view of a larger buffer whose rows lie side by side. On a GPU nothing is allocated after
    construction, and nothing compiled after `warm` as long as the logits begin at a multiple of 16 bytes.
    """

    keeps_tokens = False
    """True if the newest token of each slot stays on the device, so that a step can begin before the host knows it."""
    shares_tokens = False
    """True if ids of every step come from another rank's device."""
    argmax_S: torch.Tensor
    """int64, at least `max_rows` long, and always in the same place."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size, max_rows)
        self.mask_source: MaskSource | None = None

    def end_step(self) -> None:
        """End a step that chose nothing."""

    def follow(self, source: MaskSource) -> None:
        """Take masks of structured outputs from this source; without one, such rows can choose nothing."""
        self.mask_source = source

    def warm(self, logits_SV: torch.Tensor) -> None:
        """Compile every kernel for logits that lie like these; their values do not matter."""

    def resolve(self, ids_T: torch.Tensor) -> None:
        """Put tokens in the places of ids that are -1 - slot: the newest of that slot; a CUDA graph may capture this."""

    def keep(self, tokens_S: torch.Tensor, keep_slots_S: torch.Tensor) -> None:
        """Have these be the newest tokens of their slots, if tokens are kept."""

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
        logits must stay until they are chosen. Two steps may be under way.
        """
        raise NotImplementedError

    def sample(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
    ) -> list[SequenceSample]:
        """One token for each sequence, waited for; row i of the float32 logits follows everything in sequences[i].token_ids."""
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
    """Chooses on a CPU. From one step to the next it keeps counts of tokens and nothing else."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        super().__init__(vocab_size, max_rows)
        self.argmax_S = torch.zeros(max_rows, dtype=torch.int64)
        self._rows_per_block = rows_per_block(vocab_size, max_rows)
        self._vocabulary_V = torch.arange(vocab_size, dtype=torch.int32)
        self._masks_RW = torch.zeros((self._rows_per_block, mask_words(vocab_size)), dtype=torch.int32)

    def find_argmax(self, logits_SV: torch.Tensor, keep_slots_S: torch.Tensor | None = None) -> None:
        """The most likely token of each row, into the first places of `argmax_S`; nothing is kept."""
        self.argmax_S[: logits_SV.shape[0]] = _argmax(logits_SV)

    def share_argmax(self, logits_SV: torch.Tensor, first_token: int, out_SX: torch.Tensor) -> None:
        """Id and logit of the argmax of a share of the vocabulary; by numpy for the same reason as `_argmax`."""
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
        """int64 [S]: token ids or NO_TOKEN; the logits stay as they are."""
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
        """float64 [S, 1 + columns of logprob_columns]: token ids, and numbers from raw logits for rows with log-probabilities."""
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
        """A block's own copy of its logits, with every change that its sequences ask for."""
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
    """int64 [S]: the id of a row's largest logit, the smallest among equals; NO_TOKEN where there is none.

    Torch takes three to ten times longer than numpy to find an index, and this is all that greedy sampling does.
    """
    logits = logits_SV.numpy()
    ids = logits.argmax(axis=1)  # NaN counts as the largest
    ids[~(logits[np.arange(len(ids)), ids] > -np.inf)] = NO_TOKEN
    return torch.from_numpy(ids)


def _read(columns_SC: torch.Tensor, choices: SequenceABC[Choice]) -> list[SequenceSample]:
    """Rows of (token id, columns of logprob_columns)."""
    samples = []
    for choice, (number, *row) in zip(choices, columns_SC.tolist(), strict=True):
        token_id, num_top = int(number), choice.sequence.params.logprobs
        if num_top is None or token_id == NO_TOKEN:
            samples.append(SequenceSample(token_id, None))
        else:
            samples.append(SequenceSample(token_id, read_logprobs(token_id, row, num_top)))
    return samples


def choose_unfiltered(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; of tokens that min_p leaves, where it is used."""
    return draw_(_weights(distance_RV, params), params.uniform)


def choose_narrow(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; every row has a top_k of at most MAX_NARROW_TOP_K."""
    distance_RK, ids_RK = nearest(distance_RV, vocabulary_V, params.max_top_k)
    weight_RK = _weights(distance_RK, params)
    weight_RK.masked_fill_(vocabulary_V[: params.max_top_k] >= params.top_k, 0)
    if params.any_top_p:
        running_RK = weight_RK.cumsum(dim=1)
        needed_R1 = nucleus_weight(running_RK[:, -1:], params.top_p)
        weight_RK.masked_fill_(running_RK.sub_(weight_RK) >= needed_R1, 0)
    return _draw_candidate(ids_RK, weight_RK, params.uniform)


def choose_wide(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; any top_k and top_p."""
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
    """Choose like `_nucleus`, by a look at the numbers: most nuclei are small, and then candidates do."""
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
    """Booleans: which tokens fall away when the first ones whose weights reach `needed` are kept."""
    last_key_R1, before_R1 = _last_key(key_RV, weight_RV, needed_R1)
    tie_RV = key_RV == last_key_R1
    tie_weight_RV = torch.where(tie_RV, weight_RV, 0).cumsum_(dim=1).sub_(weight_RV)
    late_tie_RV = tie_RV.logical_and_(tie_weight_RV >= needed_R1 - before_R1)
    return late_tie_RV.logical_or_(key_RV > last_key_R1)


def _last_key(
    key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, 1] each: the key with which the weights of all keys up to it reach `needed`, and the weight before it."""
    start_R1 = key_RV.new_zeros((key_RV.shape[0], 1))
    before_R1 = torch.zeros_like(needed_R1)
    for shift in _SHIFTS:
        running_RB = _histogram(key_RV, weight_RV, start_R1, shift).cumsum_(dim=1)
        bucket_R1 = torch.searchsorted(running_RB, needed_R1).clamp_(1, NUM_BUCKETS)
        before_R1 = running_RB.gather(1, bucket_R1 - 1)
        start_R1 = start_R1 + ((bucket_R1 - 1) << shift).to(torch.int32)
    return start_R1, before_R1


def _histogram(key_RV: torch.Tensor, weight_RV: torch.Tensor, start_R1: torch.Tensor, shift: int) -> torch.Tensor:
    """Weights by bucket of 2**shift keys from `start` on; the first bucket is for keys before, the last for later ones."""
    bucket_RV = (key_RV - start_R1).bitwise_right_shift_(shift).clamp_(-1, NUM_BUCKETS).add_(1).to(torch.int64)
    histogram_RB = weight_RV.new_zeros((key_RV.shape[0], NUM_BUCKETS + 2))
    return histogram_RB.scatter_add_(1, bucket_RV, weight_RV)

"""SharedSampler: samples if each rank has a share of the vocabulary: argmax by share, whole logits on rank 0 if needed.

S rows that are chosen from, V a rank's share of the vocabulary, W all of it, N ranks, X the id and the logit of an
argmax

    every rank     argmax of its share and its logit -> gather_small -> the first largest: lowest id among equals
    rank 0         chooses; if a row is not plain greedy, from the whole logits (gather_logits)
    other ranks    follow: they join every exchange, and get the chosen tokens from rank 0

Which exchanges a step makes follows from its sequences' parameters, which all ranks have.

In a pipeline the last stage has the logits. Rank 0, in the first stage, exchanges with its ranks when it reads the
results: it passes logits without columns, which give only the number of rows (all of a graph's, if a graph of the last
stage has found the argmax). Ranks in between take no part.
"""

from collections.abc import Sequence as SequenceABC

import torch

from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import CHOICE_FIELDS, ExchangeNeeds, choice_specs
from holdfast.distributed.mesh import Mesh
from holdfast.kernels.sampling.argmax import first_largest
from holdfast.memory.ledger import Ledger
from holdfast.request.sequence import NO_TOKEN, TokenLogprobs
from holdfast.runner.sampling.batch import Choice, Choosing, SequenceSample
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.masks import MaskSource
from holdfast.runner.sampling.sampler import Chosen, HostSampler

OWNER = "sampling/shares"
LINK_FORM_ROWS = 8
"""Row count at which argmaxes and logits are multiples of 16 numbers, which have their own kernel specialization."""


class SharedSampler:
    """A Sampler over this rank's columns of the logits."""

    def __init__(
        self,
        sampler: HostSampler | DeviceSampler,
        exchange: Exchange,
        mesh: Mesh,
        needs: ExchangeNeeds,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        """`sampler` handles the whole vocabulary."""
        self.sampler = sampler
        self.exchange = exchange
        self._first_token = mesh.tensor_rank * needs.vocab_share(mesh)
        self.is_follower = mesh.rank != 0
        self.is_behind = not mesh.is_last_stage
        self._takes_part = mesh.is_last_stage or mesh.rank == 0
        self.num_stages = mesh.num_stages
        self.argmax_S = sampler.argmax_S
        own, everyone = choice_specs(needs, mesh)
        self._own_SX = torch.zeros(own.shape, dtype=torch.float32, device=device)
        self._all = torch.zeros(everyone.shape, dtype=torch.float32, device=device)
        ledger.record(OWNER, own.num_bytes + everyone.num_bytes, "the argmax of every share of the vocabulary")
        self._num_shares = mesh.tensor_size

    @property
    def keeps_tokens(self) -> bool:
        """True if a step can begin before the host knows the tokens of the last one."""
        return self.sampler.keeps_tokens

    @property
    def shares_tokens(self) -> bool:
        """True if ids of every step come from rank 0's device: other ranks do not keep tokens.

        With stages every token that a step begins with is known when it is launched (engine/scheduler.py).
        """
        return self.sampler.keeps_tokens and self.num_stages == 1

    def follow(self, source: MaskSource) -> None:
        """Take the masks of structured outputs from `source`."""
        self.sampler.follow(source)

    def warm(self, logits_SV: torch.Tensor) -> None:
        """Compile every kernel, and run every exchange once."""
        if not self._takes_part:
            return
        for num_rows in (1, LINK_FORM_ROWS):
            self.find_argmax(logits_SV[: min(num_rows, len(self.argmax_S))])
        whole_1W = self._gather(logits_SV[:1])
        if whole_1W is not None:
            self.sampler.warm(whole_1W)

    def resolve(self, ids_T: torch.Tensor) -> None:
        """Replace ids of -1 - slot by tokens, on every rank; a CUDA graph may capture this."""
        if self.shares_tokens:
            if not self.is_follower:
                self.sampler.resolve(ids_T)
            self.exchange.share_tokens(ids_T)

    def find_argmax(self, logits_SV: torch.Tensor, keep_slots_S: torch.Tensor | None = None) -> None:
        """Write the argmax of each row over all shares to the front of `argmax_S`; a CUDA graph may capture this."""
        if not self._takes_part:
            return
        num_rows = logits_SV.shape[0]
        own_SX = self._own_SX[:num_rows]
        all_NSX = self._all[: self._num_shares * num_rows * CHOICE_FIELDS].view(
            self._num_shares, num_rows, CHOICE_FIELDS
        )
        if not self.is_behind:
            self.sampler.share_argmax(logits_SV, self._first_token, own_SX)
        self.exchange.gather_small(None if self.is_behind else own_SX, all_NSX)
        self._end_call()
        argmax_S = self.argmax_S[:num_rows]
        first_largest(all_NSX, argmax_S)
        if keep_slots_S is not None and not self.is_follower:
            self.sampler.keep(argmax_S, keep_slots_S)

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> Choosing:
        """Begin to choose a token from each row; ranks other than 0 have the argmax until rank 0 sends the token."""
        if logits_SV is None:
            self.exchange.end_step()
            return self.sampler.launch(None, choices, eos_token_ids)
        if chosen_by_graph is None and choices:
            self.find_argmax(logits_SV, keep_slots_S)
        argmax_S = (self.argmax_S if chosen_by_graph is None else chosen_by_graph)[: len(choices)]
        whole_SW = None if all(map(_is_plain, choices)) else self._gather(logits_SV)
        if self.is_follower:
            # On a GPU do not wait for a token that rank 0 will send.
            ids = [NO_TOKEN] * len(choices) if self.keeps_tokens else argmax_S.tolist()
            return Chosen([SequenceSample(token_id, None) for token_id in ids])
        if whole_SW is None:
            whole_SW = self.exchange.whole_logits(len(choices))  # not read if every row is plain
        return self.sampler.launch(whole_SW, choices, eos_token_ids, argmax_S, keep_slots_S)

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score target_ids[i] by row i, which predicts it; empty on ranks other than 0."""
        whole_TW = self._gather(logits_TV)
        return [] if whole_TW is None else self.sampler.prompt_logprobs(whole_TW, target_ids, num_top)

    def end_step(self) -> None:
        """End a step that chose nothing."""
        self.exchange.end_step()

    def _gather(self, logits_SV: torch.Tensor) -> torch.Tensor | None:
        """Gather all shares on rank 0."""
        whole_SW = None if self.is_follower else self.exchange.whole_logits(logits_SV.shape[0])
        self.exchange.gather_logits(None if self.is_behind else logits_SV, whole_SW)
        self._end_call()
        return whole_SW

    def _end_call(self) -> None:
        """End the step, except on a pipeline's rank 0: the ranks of its stage have ended it after their layers."""
        if not self.is_behind:
            self.exchange.end_step()


def _is_plain(choice: Choice) -> bool:
    """True if a row needs only the argmax of its raw logits."""
    params = choice.sequence.params
    return params.temperature == 0.0 and params.logprobs is None and not choice.is_edited

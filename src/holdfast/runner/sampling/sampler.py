"""Sampler: from logits to chosen tokens and log-probabilities, on the device; `launch` waits for nothing, reading does.

The order of operations is the one that vLLM's users know:

raw logits -> log-probabilities
           -> allowed tokens alone -> penalties -> logit bias -> bans: bad words, an end before min_tokens
           -> the mask of a form (structured outputs)
           -> temperature -> min_p -> top_k -> top_p -> one token, by a random number that (seed, position) gives

Every filter keeps the first tokens of one order: the more likely first, and the smaller id among equals. The token is
then looked up among the weights that are left, in the order of the vocabulary. All sums are of whole numbers, so a row
gives the same token and the same log-probabilities to the bit alone, in any company and in any place.

S sequences, T prompt positions, V vocabulary, X either
"""

from collections.abc import Sequence as SequenceABC

import torch

from holdfast.memory.ledger import Ledger
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence, TokenLogprobs
from holdfast.request.structured import StructuredOutputs
from holdfast.runner.sampling.batch import Choice, Choosing, SequenceSample
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.host_sampler import HostSampler
from holdfast.runner.sampling.masks import MaskSource

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


class Sampler:
    """Chooses tokens for up to `max_rows` sequences at once.

    Logits are float32 and may be a view of a larger buffer whose rows lie side by side. On a GPU nothing is allocated after
    construction, and nothing compiled after `warm` as long as the logits begin at a multiple of 16 bytes.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int, ledger: Ledger) -> None:
        self._vocab_size = vocab_size
        self._has_kernels = device.type != "cpu"
        self._chooser = (
            DeviceSampler(vocab_size, device, max_rows, ledger)
            if self._has_kernels
            else HostSampler(vocab_size, max_rows)
        )
        self.argmax_S = self._chooser.argmax_S
        """int64, at least `max_rows` long, and always in the same place."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether the newest token of each slot stays on the device, so that a step can begin before the host knows it."""
        return isinstance(self._chooser, DeviceSampler)

    @property
    def is_follower(self) -> bool:
        """Whether another rank chooses."""
        return False

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return 1

    @property
    def is_behind(self) -> bool:
        """Whether the logits are those of another stage."""
        return False

    @property
    def shares_tokens(self) -> bool:
        """Whether ids of every step come from another rank's device."""
        return False

    def end_step(self) -> None:
        """End a step that chose nothing."""

    def follow(self, source: MaskSource) -> None:
        """Have this one say which tokens the forms of answers leave; before, such rows can choose nothing."""
        self._chooser.mask_source = source

    def warm(self, logits_SV: torch.Tensor) -> None:
        """Compile every kernel for logits that lie like these; their values do not matter."""
        if not self._has_kernels:
            return
        for params in (SamplingParams(top_k=1), _EVERY_EDIT, _FORM):
            self.sample(logits_SV[:1], [Sequence(-1, [0, 0], 1, params, seed=0, max_tokens=9)], frozenset())
        self.prompt_logprobs(logits_SV[:1], [0], 1)

    def resolve(self, ids_T: torch.Tensor) -> None:
        """Put tokens in the places of ids that are -1 - slot: the newest of that slot; a CUDA graph may capture this."""
        if isinstance(self._chooser, DeviceSampler):
            self._chooser.resolve(ids_T)

    def find_argmax(self, logits_SV: torch.Tensor, keep_slots_S: torch.Tensor | None = None) -> None:
        """The most likely token of each row into the first places of `argmax_S`; a CUDA graph may capture this.

        With `keep_slots_S` it is also the newest of that slot, until something else is chosen for the row.
        """
        self._chooser.find_argmax(logits_SV, keep_slots_S)

    def share_argmax(self, logits_SV: torch.Tensor, first_token: int, out_SX: torch.Tensor) -> None:
        """Id and logit of each row's argmax in columns of the vocabulary from `first_token` on; a CUDA graph may capture this."""
        self._chooser.share_argmax(logits_SV, first_token, out_SX)

    def keep(self, tokens_S: torch.Tensor, keep_slots_S: torch.Tensor) -> None:
        """Have these be the newest tokens of their slots, where tokens are kept."""
        if isinstance(self._chooser, DeviceSampler):
            self._chooser.keep(tokens_S, keep_slots_S)

    def launch(
        self,
        logits_SV: torch.Tensor | None,
        choices: SequenceABC[Choice],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
        keep_slots_S: torch.Tensor | None = None,
    ) -> Choosing:
        """Begin to choose a token from each row of the float32 logits; None: there is nothing to choose.

        `chosen_by_graph` holds what `find_argmax` would find, where a graph has found it already. Where rows are late, the
        logits must stay until they are chosen. Two steps may be under way.
        """
        if logits_SV is not None:
            self._check(logits_SV, len(choices), "choices")
        return self._chooser.launch(logits_SV, choices, eos_token_ids, chosen_by_graph, keep_slots_S)

    def sample(
        self,
        logits_SV: torch.Tensor,
        sequences: SequenceABC[Sequence],
        eos_token_ids: frozenset[int],
        chosen_by_graph: torch.Tensor | None = None,
    ) -> list[SequenceSample]:
        """One token for each sequence, waited for; row i of the float32 logits follows everything in sequences[i].token_ids."""
        self._check(logits_SV, len(sequences), "sequences")
        if not sequences:
            return []
        return self.launch(logits_SV, list(map(Choice.of, sequences)), eos_token_ids, chosen_by_graph).read()

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids: SequenceABC[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Score target_ids[i] by row i of the float32 logits, which predicts it."""
        self._check(logits_TV, len(target_ids), "targets")
        return self._chooser.prompt_logprobs(logits_TV, target_ids, num_top) if target_ids else []

    def _check(self, logits_XV: torch.Tensor, num_rows: int, name: str) -> None:
        assert logits_XV.shape == (num_rows, self._vocab_size), (
            f"logits are {tuple(logits_XV.shape)} for {num_rows} {name} and {self._vocab_size=}"
        )
        assert logits_XV.dtype == torch.float32, f"{logits_XV.dtype=} must be float32"

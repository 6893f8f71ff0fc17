"""Rows to sample from: every kind of setting, a sequence and logits for each, made from a seed."""

import random
from collections.abc import Sequence as SequenceABC

import numpy as np
import pytest
import torch

from holdfast.memory.ledger import Ledger
from holdfast.planning import terms
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.device_sampler import DeviceSampler
from holdfast.runner.sampling.sampler import HostSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EOS = frozenset({1})

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 40},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.95},
    "tiny top_p": {"top_p": 1e-12},
    "min_p": {"min_p": 0.1},
    "narrow filters": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "wide filters": {"temperature": 1.3, "top_k": 600, "top_p": 0.9, "min_p": 0.001},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {1: 3.0, 0: -5.0}},
    "greedy bias": {"temperature": 0.0, "logit_bias": {0: 5.0}},
    "min tokens": {"min_tokens": 50},
    "greedy min tokens": {"temperature": 0.0, "min_tokens": 50},
    "logprobs": {"logprobs": 3},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 20},
    "chosen logprob": {"logprobs": 0, "top_p": 0.9, "presence_penalty": 0.7},
    "allowed": {"allowed_token_ids": (1, 0)},
    "greedy allowed": {"temperature": 0.0, "allowed_token_ids": (1,), "logit_bias": {0: 5.0}},
    "form": {"structured_outputs": {"json_object": True}},
    "greedy form": {"temperature": 0.0, "structured_outputs": {"json_object": True}, "min_tokens": 50, "logprobs": 2},
    "form and edits": {"structured_outputs": {"json_object": True}, "top_k": 9, "repetition_penalty": 1.3},
    "everything": {
        "temperature": 0.7,
        "top_k": 25,
        "top_p": 0.9,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 2.0},
        "min_tokens": 50,
        "logprobs": 5,
    },
}


class FakeForms:
    """Masks that are a hash of a sequence's tokens: every second token or so, and the end."""

    def __init__(self, vocab_size: int, eos_token_id: int = min(EOS)) -> None:
        self._vocab_size, self._eos_token_id = vocab_size, eos_token_id
        self.requested: list[int] = []
        """The sequences, by id, whose masks were filled."""

    def allowed(self, sequence: Sequence) -> np.ndarray:
        chance = np.random.default_rng([sequence.sequence_id + 2**32, *sequence.token_ids])
        is_allowed_V = chance.random(self._vocab_size) < 0.5
        is_allowed_V[[self._eos_token_id, chance.integers(self._vocab_size)]] = True
        return is_allowed_V

    def fill(self, sequences: SequenceABC[Sequence | None], masks_RW: np.ndarray) -> None:
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                self.requested.append(sequence.sequence_id)
                bits = np.packbits(self.allowed(sequence), bitorder="little")
                masks_RW[row].view(np.uint8)[: len(bits)] = bits


def make_sequence(seed: int = 0, vocab_size: int = 100, **params) -> Sequence:
    tokens = random.Random(seed).choices(range(vocab_size), k=9)
    return Sequence(seed, tokens, 5, SamplingParams(**params), seed * 7919, max_tokens=1000)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def make_sampler(vocab_size: int, max_rows: int = 64, device: torch.device = DEVICE) -> HostSampler | DeviceSampler:
    on_cpu = device.type == "cpu"
    sampler = HostSampler(vocab_size, max_rows) if on_cpu else DeviceSampler(vocab_size, device, max_rows, Ledger())
    sampler.follow(FakeForms(vocab_size))
    return sampler


def divide_rows(patch: pytest.MonkeyPatch, vocab_size: int, rows_at_once: int) -> None:
    """Samplers that are made from here on divide their rows into blocks of so many."""
    for name in ("BLOCK_ELEMENTS", "EDITED_ELEMENTS"):
        patch.setattr(terms, name, rows_at_once * vocab_size)
    patch.setattr(terms, "MAX_LOGIT_ROWS", min(rows_at_once, terms.MAX_LOGIT_ROWS))


def make_divided_sampler(vocab_size: int, max_rows: int, rows_at_once: int) -> HostSampler | DeviceSampler:
    with pytest.MonkeyPatch.context() as patch:
        divide_rows(patch, vocab_size, rows_at_once)
        return make_sampler(vocab_size, max_rows)

"""Choices of one step: the token position of each row, random numbers, kinds of rows on a CPU, and parameters.

R rows of a block

Random numbers are a hash of (seed, position). A stateful generator would make a sequence's choices depend on earlier
draws: on other rows, their order, a preemption. A hash of a counter has no state to share or to rebuild.
"""

import struct
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch

from holdfast.kernels.geometry import LogitRow
from holdfast.planning.terms import MAX_NARROW_TOP_K
from holdfast.request.sequence import Sequence, TokenLogprobs

_COUNTER = struct.Struct("<QQ")
_HASH = blake2b(digest_size=8, person=b"holdfast.sample")
"""Copied for each number: half the cost of a new one."""
_WORD = 2**64 - 1
LEAST_TEMPERATURE = 1e-30
"""Replaces smaller temperatures above 0: float32 would round them to 0, and 0 / 0 is NaN."""


def uniform(seed: int, position: int) -> float:
    """Return a multiple of 2**-53 in [0, 1); seeds count modulo 2**64."""
    counter = _HASH.copy()
    counter.update(_COUNTER.pack(seed & _WORD, position))
    return (int.from_bytes(counter.digest(), "little") >> 11) * 2.0**-53


class Choice(NamedTuple):
    """Choice of one row of logits: the token at `position` of a sequence."""

    sequence: Sequence
    position: int

    @classmethod
    def of(cls, sequence: Sequence) -> "Choice":
        """Choose the token after all known ones."""
        return cls(sequence, len(sequence.token_ids))

    @property
    def is_edited(self) -> bool:
        """True if the sequence edits its logits before choosing."""
        sequence, params = self.sequence, self.sequence.params
        return (
            sequence.has_penalties
            or bool(params.logit_bias)
            or self.may_not_end
            or params.allowed_token_ids is not None
            or params.structured_outputs is not None
            or bool(sequence.bad_word_ids)
        )

    @property
    def may_not_end(self) -> bool:
        return self.sequence.params.min_tokens > self.position - self.sequence.num_prompt_tokens

    @property
    def is_late(self) -> bool:
        """True if the choice needs a token that the host does not have yet: for penalties, grammars or bad words of
        several tokens."""
        sequence, params = self.sequence, self.sequence.params
        return self.position > len(sequence.token_ids) and (
            sequence.has_penalties
            or params.structured_outputs is not None
            or any(len(word) > 1 for word in sequence.bad_word_ids)
        )


class SequenceSample(NamedTuple):
    """Token chosen for one sequence."""

    token_id: int
    """NO_TOKEN if the logits hold NaN or exclude every token."""
    logprobs: TokenLogprobs | None
    """If the request wants them and a token was chosen."""


class Choosing(Protocol):
    """Choices of a step, in flight or made."""

    @property
    def waits(self) -> bool:
        """True if late rows are still to be chosen."""
        ...

    def choose_late(self) -> None:
        """Choose late rows; every token before them is known. Idempotent."""
        ...

    def read(self) -> list[SequenceSample]:
        """Wait for the choices, and return them in row order. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Rows by kind, for a CPU. A row's kind does not depend on other rows, and all kinds choose by the same rule."""

    num_rows: int
    edited_greedy: tuple[int, ...]
    """Argmax after penalties, biases or bans."""
    unfiltered: tuple[int, ...]
    """Sampled from the whole vocabulary, or after min_p."""
    narrow: tuple[int, ...]
    """Sampled from a few candidates: a small top_k, with or without top_p."""
    wide: tuple[int, ...]
    """Sampled from part of the vocabulary: top_p, or a large top_k."""
    logprobs: tuple[int, ...]
    """Rows with log-probabilities; each is also of a kind above, or plain greedy."""
    num_top: int
    """Largest number of top tokens among them."""

    @property
    def is_plain(self) -> bool:
        """True if every row takes the argmax of its raw logits."""
        return not (self.edited_greedy or self.unfiltered or self.narrow or self.wide)

    @classmethod
    def of(cls, choices: SequenceABC[Choice], vocab_size: int) -> "SamplingBatch":
        edited_greedy: list[int] = []
        unfiltered: list[int] = []
        narrow: list[int] = []
        wide: list[int] = []
        logprobs: list[int] = []
        num_top = 0
        for row, choice in enumerate(choices):
            params = choice.sequence.params
            if params.temperature == 0.0:
                if choice.is_edited:
                    edited_greedy.append(row)
            elif 0 < params.top_k < vocab_size and params.top_k <= MAX_NARROW_TOP_K:
                narrow.append(row)
            elif 0 < params.top_k < vocab_size or params.top_p < 1.0:
                wide.append(row)
            else:
                unfiltered.append(row)
            if params.logprobs is not None:
                logprobs.append(row)
                num_top = max(num_top, params.logprobs)
        kinds = (tuple(kind) for kind in (edited_greedy, unfiltered, narrow, wide, logprobs))
        return cls(len(choices), *kinds, num_top=min(num_top, vocab_size))


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Parameters of a block of random rows on a CPU: rows is [R], the others [R, 1]."""

    rows: torch.Tensor
    negative_temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor
    any_min_p: bool
    any_top_p: bool
    max_top_k: int
    """0 if no row has one."""

    @classmethod
    def of(cls, rows: tuple[int, ...], choices: SequenceABC[Choice], vocab_size: int) -> "RowParameters":
        table = np.array([logit_row(choices[row], row, row, vocab_size) for row in rows], dtype=np.float64)
        _, _, negative_temperature, min_p, top_p, top_k, random, _ = torch.from_numpy(
            np.ascontiguousarray(table.T)
        ).unsqueeze(-1)
        return cls(
            rows=torch.tensor(rows, dtype=torch.int64),
            negative_temperature=negative_temperature.to(torch.float32),
            min_p=min_p.to(torch.float32),
            top_p=top_p,
            top_k=top_k.to(torch.int64).masked_fill_(top_k == 0, vocab_size),
            uniform=random,
            any_min_p=bool((table[:, 3] > 0).any()),
            any_top_p=bool((table[:, 4] < 1).any()),
            max_top_k=int(table[:, 5].max(initial=0)),
        )


def logit_row(choice: Choice, source: int, target: int, vocab_size: int) -> tuple[float, ...]:
    """Return the fields of a LogitRow: a choice's parameters for kernels."""
    sequence, position = choice
    params = sequence.params
    if params.temperature == 0.0:
        return LogitRow(source, target)
    return (
        source,
        target,
        -max(params.temperature, LEAST_TEMPERATURE),
        params.min_p,
        params.top_p,
        params.top_k if params.top_k < vocab_size else 0,
        uniform(sequence.seed, position),
        0.0,
    )

"""Masks of a step: tokens that the grammars of answers allow, filled on the host row by row, in block order.

R rows of a block, W words of 32 bits

A grammar has priority. An unwanted end (min_tokens, ignore_eos) is masked only if another token may follow: if a
grammar is complete, the answer ends. If other parameters leave no token of a mask, the sequence fails.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Protocol

import numpy as np

from holdfast.request.sequence import Sequence
from holdfast.runner.sampling.batch import Choice

EVERY_TOKEN = -1
"""A word of ones."""
_WORD_BITS = 32


class MaskSource(Protocol):
    """Follows the grammars of sequences."""

    def fill(self, sequences: SequenceABC[Sequence | None], masks_RW: np.ndarray) -> None:
        """Set bit t of row i if token t may follow sequences[i]; rows of None are unchanged."""
        ...


def has_masks(choices: Iterable[Choice]) -> bool:
    """Return True if some rows follow a grammar."""
    return any(choice.sequence.params.structured_outputs is not None for choice in choices)


def fill_masks(
    source: MaskSource | None, choices: SequenceABC[Choice], eos_token_ids: frozenset[int], masks_RW: np.ndarray
) -> None:
    """Fill the masks of a block: every token if a row has no grammar, none if its grammar is not followed."""
    followed = [None if choice.sequence.params.structured_outputs is None else choice.sequence for choice in choices]
    for row, sequence in enumerate(followed):
        masks_RW[row] = EVERY_TOKEN if sequence is None else 0
    if source is None:
        return
    source.fill(followed, masks_RW)
    for row, choice in enumerate(choices):
        params = choice.sequence.params
        ends = eos_token_ids if params.ignore_eos or choice.may_not_end else frozenset()
        unwanted = ends.union(params.stop_token_ids) if choice.may_not_end else ends
        if followed[row] is not None and unwanted:
            _rule_out(masks_RW[row], unwanted)


def _rule_out(mask_W: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of these tokens, unless no other is left."""
    rest_W = mask_W.copy()
    bits_W = rest_W.view(np.uint32)
    for token_id in token_ids:
        if token_id < _WORD_BITS * len(bits_W):
            bits_W[token_id // _WORD_BITS] &= ~np.uint32(1 << (token_id % _WORD_BITS))
    if rest_W.any():
        mask_W[:] = rest_W

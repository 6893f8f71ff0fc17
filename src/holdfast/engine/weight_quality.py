"""What a weight scheme changes: next-token distributions of quantized weights against those of the weights as stored, row by row.

R rows of a piece, T rows of a step, H hidden, V vocabulary

Schemes are loaded one after the other beside the reference, which reads the text once: its hidden states are kept, a few
kilobytes a token, and become logits again when there is something to compare them with.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from holdfast.engine.kv_quality import (
    PIECE_ELEMENTS,
    Contender,
    Quality,
    ReferencePiece,
    Tally,
    refuse_broken,
    steps_of,
)
from holdfast.request.sequence import Step
from holdfast.runner.planning.sampling_terms import PROMPT_ROWS

OnTokens = Callable[[int], None]
"""Called with the number of tokens that have been read since the last call."""


class ReferenceReading:
    """The reference's hidden states of a whole text, on the host, and its own figures."""

    def __init__(self, reference: Contender, windows: Sequence[Sequence[int]]) -> None:
        self.reference = reference
        self.windows = windows
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_predictions(self) -> int:
        """Of each window."""
        return len(self.windows[0]) - 1

    def steps(self) -> Iterator[tuple[int, Step]]:
        """Every chunk of every window."""
        for index, token_ids in enumerate(self.windows):
            for step in steps_of(index, token_ids, self.reference.runner.limits):
                yield index, step

    @torch.inference_mode()
    def read(self, on_tokens: OnTokens) -> Quality:
        """Go through the text once; the figures of the reference."""
        tally = Tally(len(self.windows), self.num_predictions)
        device = self.reference.runner.device
        for index, step in self.steps():
            with tally.timed(device):
                hidden_TH = self.reference.runner.hidden_rows(step)
            self._hidden[index, step.scheduled[0].start] = hidden_TH.to("cpu", copy=True)
            on_tokens(step.num_tokens)
            for first, rows, piece, logits_RV in self.pieces(index, step):
                del rows
                refuse_broken(self.reference, hidden_TH.dtype, logits_RV)
                tally.add(index, first, piece, logits_RV)
        return tally.quality(self.reference)

    def pieces(self, index: int, step: Step) -> Iterator[tuple[int, slice, ReferencePiece, torch.Tensor]]:
        """A few rows of a step at a time: their first place, which rows they are, what the reference says, its logits."""
        (item,) = step.scheduled
        runner = self.reference.runner
        hidden_TH = self._hidden[index, item.start].to(runner.device)
        num_rows = min(item.num_new_tokens, item.sequence.num_tokens - 1 - item.start)
        piece_rows = max(1, min(PROMPT_ROWS, PIECE_ELEMENTS // runner.vocab_size))
        for offset in range(0, num_rows, piece_rows):
            rows = slice(offset, min(offset + piece_rows, num_rows))
            first = item.start + offset
            targets = item.sequence.token_ids[first + 1 : first + 1 + rows.stop - rows.start]
            logits_RV = runner.row_logits(hidden_TH[rows])
            yield first, rows, ReferencePiece.of(logits_RV, torch.tensor(targets, device=logits_RV.device)), logits_RV


@torch.inference_mode()
def measure_scheme(contender: Contender, reading: ReferenceReading, on_tokens: OnTokens) -> Quality:
    """One scheme's figures against the reference's. Both have the same limits, so that steps are the same."""
    limits, wanted = contender.runner.limits, reading.reference.runner.limits
    assert limits == wanted, f"{contender.name} has {limits}, the reference {wanted}"
    tally = Tally(len(reading.windows), reading.num_predictions)
    device = contender.runner.device
    for index, step in reading.steps():
        with tally.timed(device):
            hidden_TH = contender.runner.hidden_rows(step)
        on_tokens(step.num_tokens)
        for first, rows, piece, _ in reading.pieces(index, step):
            with tally.timed(device):
                logits_RV = contender.runner.row_logits(hidden_TH[rows])
            tally.add(index, first, piece, logits_RV)
    return tally.quality(contender)

"""Exchange: what ranks of one engine tell each other inside a step: sums and gathers of rows, logits, tokens, rows between stages.

T rows of the step, R rows whose logits are wanted, H hidden, X a rank's share of columns, V a rank's share of the vocabulary

Only models and the runner's ends of a step get one, and with one rank they get None. All ranks of a stage make the same
calls with the same shapes in the same order; nothing in a call depends on values, so that a CUDA graph may capture it.
"""

from typing import Protocol

import torch


class Exchange(Protocol):
    """The ranks that share the layers of one stage, and the way to the stages before and behind it."""

    @property
    def rank(self) -> int:
        """Among those that share layers."""
        ...

    @property
    def size(self) -> int:
        """How many share layers."""
        ...

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Where peers read: [num_rows, width], dense, with whatever lies there. Who computes a part writes it here.

        Two rooms take turns: this one stays as it is until the call after the next one that takes a part.
        """
        ...

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        """out = the parts of all ranks added up in float32, in the order of ranks, rounded once: the same bits on every rank.

        `part_TH` is the last room; `out_TH` lies elsewhere.
        """
        ...

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        """out[:, r * X : (r + 1) * X] = the part of rank r, on every rank; `part_TX` is the last room, Y = size * X."""
        ...

    def gather_logits(self, part_RV: torch.Tensor, out_RW: torch.Tensor | None) -> None:
        """The float32 logits of all shares side by side into `out_RW` of rank 0; all others pass None.

        The last share may be narrower; rooms are as wide as the widest, and `out_RW` is as wide as the vocabulary.
        """
        ...

    def gather_small(self, part_RX: torch.Tensor, out_SRX: torch.Tensor) -> torch.Tensor:
        """A few numbers a row from every rank, rank by rank: the argmax of each share and its logit."""
        ...

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        """The int64 ids of rank 0 in place of every other rank's."""
        ...

    def send_rows(self, x_TH: torch.Tensor) -> None:
        """To the rank of the same place in the next stage."""
        ...

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        """From the rank of the same place in the stage before; waits for them."""
        ...

    def close(self) -> None:
        """Nothing can be exchanged afterwards; again is nothing."""
        ...

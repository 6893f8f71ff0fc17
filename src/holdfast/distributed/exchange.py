"""Exchange: what ranks of one engine tell each other inside a step: sums and gathers of rows, logits, tokens, rows between stages.

T rows of the step, R rows whose logits are wanted, H hidden, X a rank's share of columns, V a rank's share of the vocabulary,
W the whole vocabulary, S ranks that share layers

Only models and the runner's ends of a step get one, and with one rank they get None. All ranks of a stage make the same
calls with the same shapes in the same order; nothing in a call depends on values, so that a CUDA graph may capture it.

Logits are the last stage's, and the runner that chooses is rank 0, in the first. So `gather_logits` and `gather_small` are calls
of the ranks of the last stage, and where there are several stages of rank 0 as well, which then has no part.
"""

from typing import Protocol

import torch

from holdfast.kernels.exchange.add_rows import DeferredStream


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

        Two rooms take turns: the next call that takes a part goes to the other one, and this one comes again after it.
        A room that no call has taken is the same when it is asked for again. What lies in it behind a call is nobody's.
        """
        ...

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        """out = the parts of all ranks added up in float32, in the order of ranks, rounded once: the same bits on every rank.

        `part_TH` is the last room; `out_TH` is dense and lies elsewhere.
        """
        ...

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        """x += the sum of `sum_rows`, of a small batch, with the next RMSNorm deferred: how many blocks a row of it has.

        `part_TH` is the last room.
        """
        ...

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        """out[:, r * X : (r + 1) * X] = the part of rank r, on every rank; `part_TX` is the last room, Y = size * X."""
        ...

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        """On rank 0, where whole logits may be gathered: [num_rows, W], float32; it lies in the exchange's own memory."""
        ...

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        """The float32 logits of all shares side by side into `out_RW` of rank 0; all others pass None for it.

        The last share may be narrower. `part_RV` may lie anywhere; it is None on rank 0 of several stages.
        """
        ...

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        """A few numbers a row from every rank, rank by rank: the argmax of each share and its logit.

        `part_RX` may lie anywhere; it is None on rank 0 of several stages.
        """
        ...

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        """The int64 ids of rank 0 of this stage in place of every other rank's."""
        ...

    def send_rows(self, x_TH: torch.Tensor) -> None:
        """To the rank of the same place in the next stage; `x_TH` may be written again at once."""
        ...

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        """From the rank of the same place in the stage before; waits for them."""
        ...

    def end_step(self) -> None:
        """The last call of every step, inside what a graph captures: whatever step follows finds both rooms free.

        The same rooms take turns in every step, and a graph is captured with the addresses of its own. Where a step makes an odd
        number of calls, its last room is the first of the next, and a slower peer may still read there.
        """
        ...

    def abandon(self) -> None:
        """From any thread, once a peer is lost: whatever waits for peers on this rank's device goes on, with numbers that mean nothing."""
        ...

    def close(self) -> None:
        """Nothing can be exchanged afterwards; again is nothing."""
        ...

"""Exchange: collectives inside a step: all-reduce and all-gather of rows, logits, tokens; sends between stages.

T rows of the step, R rows with logits, H hidden, X a rank's share of columns, V a rank's share of the vocabulary,
W the whole vocabulary, S ranks that share layers

Only models and the runner's sampling and token inputs use one; with one rank they get None. All ranks of a stage make
the same calls with the same shapes in the same order; no call depends on values, so a CUDA graph may capture it.

The last stage has the logits, and rank 0, in the first, samples. So the ranks of the last stage call `gather_logits`
and `gather_small`, and with several stages rank 0 calls them too, without a part.
"""

from typing import Protocol

import torch

from holdfast.kernels.exchange.add_rows import DeferredStream


class Exchange(Protocol):
    """The ranks that share the layers of one stage, and the links to the stages before and after it."""

    @property
    def rank(self) -> int:
        """Rank among those that share layers."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks that share layers."""
        ...

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer that peers read, [num_rows, width], dense and uninitialized. A rank writes its part here.

        Two buffers alternate: a call that takes a part moves on to the other one. Until then the same buffer is
        returned.
        """
        ...

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        """All-reduce in float32, in rank order, rounded once: the same bits on every rank.

        `part_TH` is the last room; `out_TH` is dense and elsewhere.
        """
        ...

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        """x += the sum of `sum_rows`, for a small batch, with the next RMSNorm deferred; return its blocks a row.

        `part_TH` is the last room.
        """
        ...

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        """All-gather: out[:, r * X : (r + 1) * X] = the part of rank r; `part_TX` is the last room, Y = size * X."""
        ...

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        """Return the buffer for gathered logits on rank 0, [num_rows, W], float32."""
        ...

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        """Gather the float32 logits of all shares into `out_RW` of rank 0; all others pass None for it.

        The last share may be narrower. `part_RV` may lie anywhere; it is None on rank 0 of several stages.
        """
        ...

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        """All-gather a few numbers a row, rank by rank: the argmax of each share and its logit.

        `part_RX` may lie anywhere; it is None on rank 0 of several stages.
        """
        ...

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        """Broadcast the int64 ids of rank 0 of this stage."""
        ...

    def send_rows(self, x_TH: torch.Tensor) -> None:
        """Send to the same tensor rank of the next stage; `x_TH` may be reused at once."""
        ...

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        """Receive from the same tensor rank of the previous stage."""
        ...

    def end_step(self) -> None:
        """End a step, inside the captured graph, so that both buffers are free for the next step.

        Every step starts with the same buffer, because a graph captures addresses. After an odd number of calls the
        last buffer is the first of the next step, and a slower peer may still read it.
        """
        ...

    def abandon(self) -> None:
        """Release all waits for peers on this device after a peer is lost; results are garbage. Any thread."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

"""HyperConnection: the streams of a residual around one block (mHC), and StreamHead, which makes one of them behind the last.

T rows, S streams, H hidden, M shares of a row
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.hyper_connections import (
    HeadMix,
    MixNumbers,
    StreamMix,
    combine_streams,
    enter_block,
)
from holdfast.layers.mlp import RMSNorm


class StreamBuffers(NamedTuple):
    """One set for all layers, which lives through them: a block's shares are still wanted behind it."""

    shares_TM: torch.Tensor
    parts: torch.Tensor
    """Sums of the mix that comes next, from where the streams were written to where they are read."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor]) -> "StreamBuffers":
        """From the tensors of `stream_specs` (kernels/stream_geometry.py), by name."""
        return cls(held["stream_shares"], held["stream_parts"])


class StreamHead:
    """Streams to the input of the head: their sum by shares, and its norm."""

    def __init__(self, mix: HeadMix, numbers: MixNumbers, norm: RMSNorm) -> None:
        assert norm.offset == 0.0, f"{norm.offset=}: weights are taken as they are"
        self._mix = mix
        self._numbers = numbers
        self._norm = norm

    def __call__(self, x_TSH: torch.Tensor, buffers: StreamBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        """Sum, mix and norm rows whose sums no block has computed."""
        combine_streams(x_TSH, None, None, self._mix.weight_SX, buffers.parts)
        shares_TS = buffers.shares_TM[: len(x_TSH), : x_TSH.shape[1]]
        norm = self._norm
        return enter_block(x_TSH, buffers.parts, self._mix, self._numbers, shares_TS, norm.weight_H, norm.eps, out_TH)


class HyperConnection:
    """What stands before and behind one block: attention or experts.

    Sums of its mix lie in the buffers when it begins: `begin` leaves them before the first block, and `leave` of the block
    before it elsewhere.
    """

    def __init__(self, mix: StreamMix, numbers: MixNumbers, norm: RMSNorm) -> None:
        """`norm` is that of the block's input."""
        assert norm.offset == 0.0, f"{norm.offset=}: weights are taken as they are"
        self.mix = mix
        self._numbers = numbers
        self._norm = norm

    def begin(self, x_TSH: torch.Tensor, buffers: StreamBuffers) -> None:
        """Sums of streams that no block has left."""
        combine_streams(x_TSH, None, None, self.mix.weight_MX, buffers.parts)

    def enter(self, x_TSH: torch.Tensor, buffers: StreamBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        """The block's input, normed, into `out_TH`; shares stay in the buffers until `leave`."""
        shares_TM, norm = buffers.shares_TM, self._norm
        return enter_block(x_TSH, buffers.parts, self.mix, self._numbers, shares_TM, norm.weight_H, norm.eps, out_TH)

    def leave(
        self, x_TSH: torch.Tensor, y_TH: torch.Tensor, buffers: StreamBuffers, following: "HyperConnection | None"
    ) -> None:
        """Streams become what the block gave and what they were, in place; with the sums that the one that follows begins with."""
        weight_MX = None if following is None else following.mix.weight_MX
        combine_streams(x_TSH, y_TH, buffers.shares_TM, weight_MX, buffers.parts)

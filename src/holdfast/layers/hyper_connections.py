"""HyperConnection: residual streams around one block (mHC), and StreamHead, which merges them after the last.

T rows, S streams, H hidden, M shares of a row
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.kernels.gemm.quantize_activations import QuantizedRows, enter_block_coded
from holdfast.kernels.hyper_connections import (
    HeadMix,
    MixNumbers,
    StreamMix,
    combine_streams,
    enter_block,
)
from holdfast.layers.mlp import RMSNorm


class StreamBuffers(NamedTuple):
    """One set for all layers, kept across them: a block's shares are read again after it."""

    shares_TM: torch.Tensor
    parts: torch.Tensor
    """Sums for the next mix, kept from writing the streams to reading them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor]) -> "StreamBuffers":
        """Take the tensors of `stream_specs` (kernels/stream_geometry.py) by name."""
        return cls(held["stream_shares"], held["stream_parts"])


class StreamHead:
    """Makes the head's input: the normed sum of streams by shares."""

    def __init__(self, mix: HeadMix, numbers: MixNumbers, norm: RMSNorm) -> None:
        assert norm.offset == 0.0, f"{norm.offset=}: weights are taken as they are"
        self._mix = mix
        self._numbers = numbers
        self._norm = norm

    def __call__(self, x_TSH: torch.Tensor, buffers: StreamBuffers, out_TH: torch.Tensor) -> torch.Tensor:
        """Sum, mix and norm rows; no block has computed their sums."""
        combine_streams(x_TSH, None, None, self._mix.weight_SX, buffers.parts)
        shares_TS = buffers.shares_TM[: len(x_TSH), : x_TSH.shape[1]]
        norm = self._norm
        return enter_block(x_TSH, buffers.parts, self._mix, self._numbers, shares_TS, norm.weight_H, norm.eps, out_TH)


class HyperConnection:
    """Mixes the streams before and after one block: attention or experts.

    The buffers hold the sums of its mix when it begins: `begin` writes them for the first block, `leave` of the
    previous block for others.
    """

    def __init__(self, mix: StreamMix, numbers: MixNumbers, norm: RMSNorm) -> None:
        """`norm` applies to the block's input."""
        assert norm.offset == 0.0, f"{norm.offset=}: weights are taken as they are"
        self.mix = mix
        self._numbers = numbers
        self._norm = norm

    def begin(self, x_TSH: torch.Tensor, buffers: StreamBuffers) -> None:
        """Compute the sums before the first block."""
        combine_streams(x_TSH, None, None, self.mix.weight_MX, buffers.parts)

    def enter(
        self,
        x_TSH: torch.Tensor,
        buffers: StreamBuffers,
        out_TH: torch.Tensor,
        codes: QuantizedRows | None = None,
    ) -> torch.Tensor:
        """Write the block's normed input to `out_TH`, and quantized to `codes`; shares stay in the buffers until `leave`."""
        shares_TM, norm = buffers.shares_TM, self._norm
        own = x_TSH, buffers.parts, self.mix, self._numbers, shares_TM, norm.weight_H, norm.eps, out_TH
        return enter_block(*own) if codes is None else enter_block_coded(*own, codes)

    def leave(
        self, x_TSH: torch.Tensor, y_TH: torch.Tensor, buffers: StreamBuffers, following: "HyperConnection | None"
    ) -> None:
        """Mix the block's output into the streams in place, and compute the sums of the following block's mix."""
        weight_MX = None if following is None else following.mix.weight_MX
        combine_streams(x_TSH, y_TH, buffers.shares_TM, weight_MX, buffers.parts)

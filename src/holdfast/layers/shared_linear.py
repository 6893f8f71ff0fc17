"""Tensor-parallel linear layers with whole outputs on every rank: products by a share of a weight, and their exchange.

T rows, K inputs, N outputs, n ranks

summed     a rank has columns of the weight, [N, K / n], and their inputs; partial outputs are all-reduced
gathered   a rank has rows of the weight, [N / n, K]; all-gathers of inputs before and outputs after the product, so
           that each number is computed as on one rank

Nothing here waits for the host or allocates: parts lie where peers read them, gathered rows in the workspace.
"""

import torch

from holdfast.distributed.exchange import Exchange
from holdfast.kernels.exchange.add_rows import DeferredStream
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream
from holdfast.kernels.gemm.linear import linear
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.layers.mlp import Linear
from holdfast.quant.packed_weight import AnyWeight


class Gathering:
    """All-gathers the columns of all ranks into a buffer of the workspace."""

    def __init__(self, exchange: Exchange, room_X: torch.Tensor) -> None:
        """`room_X` are bytes, enough for the largest gathered input."""
        assert room_X.dtype == torch.uint8, f"{room_X.dtype}, not bytes"
        self.exchange = exchange
        self._room_X = room_X
        self._given = 0
        """Address of the buffer that `room` returned last."""

    def room(self, like_TX: torch.Tensor) -> torch.Tensor:
        """Return the buffer that peers read; rows written there need no copy in the next call."""
        num_rows, width = like_TX.shape
        room_TX = self.exchange.room(num_rows, width, like_TX.dtype)
        self._given = room_TX.data_ptr()
        return room_TX

    def __call__(self, part_TX: torch.Tensor) -> torch.Tensor:
        """Gather all parts, [T, n * X], valid until the next call; copy `part_TX` unless it is in the last `room`."""
        num_rows, width = part_TX.shape
        whole = num_rows, self.exchange.size * width
        num_bytes = whole[0] * whole[1] * part_TX.element_size()
        assert num_bytes <= self._room_X.numel(), f"{whole} of {part_TX.dtype} into {self._room_X.numel()} bytes"
        gathered_TY = self._room_X[:num_bytes].view(part_TX.dtype).view(whole)
        if part_TX.data_ptr() != self._given:
            part_TX = self.room(part_TX).copy_(part_TX)
        return self.exchange.gather_columns(part_TX, gathered_TY)


def add_part(exchange: Exchange, part_TH: torch.Tensor, stream: ResidualStream) -> NormedRows:
    """Fused decode path: x += the parts of all ranks, with the next norm deferred; `part_TH` is the last room."""
    x_TH, norm_weight_H, eps, scaled_TH, scratch, offset = stream
    amax = None if scratch.amax is None else scratch.amax.normed
    onto = DeferredStream(x_TH, norm_weight_H, scaled_TH, scratch.squares, amax, offset)
    num_squares = exchange.add_rows(part_TH, onto)
    return NormedRows(scaled_TH, num_squares, eps)


class SummedLinear(Linear):
    """y = the sum over ranks of x @ weight.T, plus the bias once: the first rank adds it."""

    def __init__(self, weight_NK: AnyWeight, bias_N: torch.Tensor | None, exchange: Exchange) -> None:
        super().__init__(weight_NK, bias_N if exchange.rank == 0 else None)
        self.exchange = exchange

    def __call__(
        self, x_TK: torch.Tensor, out_TN: torch.Tensor, quantized: QuantizedRows | None = None, is_coded: bool = False
    ) -> torch.Tensor:
        num_rows, size_n = out_TN.shape
        if num_rows == 0:
            return out_TN
        part_TN = self.exchange.room(num_rows, size_n, out_TN.dtype)
        linear(x_TK, self.weight_NK, self.bias_N, part_TN, quantized, is_coded)
        return self.exchange.sum_rows(part_TN, out_TN)


class GatheredLinear(Linear):
    """y = x @ weight.T + bias; each rank has some columns of x and y, and the rows of weight and bias for its y."""

    takes_codes = False

    def __init__(
        self,
        weight_NK: AnyWeight,
        bias_N: torch.Tensor | None,
        gathering: Gathering,
        keeps_share: bool = False,
    ) -> None:
        """If `keeps_share`, outputs are the rank's own columns, and the caller gathers them."""
        super().__init__(weight_NK, bias_N)
        self._gathering = gathering
        self._keeps_share = keeps_share

    def room_for_inputs(self, like_TK: torch.Tensor) -> torch.Tensor:
        return self._gathering.room(like_TK)

    def __call__(
        self, x_TK: torch.Tensor, out_TN: torch.Tensor, quantized: QuantizedRows | None = None, is_coded: bool = False
    ) -> torch.Tensor:
        """Quantize here, since scales follow from whole rows."""
        assert not is_coded, "codes of a rank's columns are not those of whole rows"
        if out_TN.shape[0] == 0:
            return out_TN
        whole_TK = self._gathering(x_TK)
        if self._keeps_share:
            return linear(whole_TK, self.weight_NK, self.bias_N, out_TN, quantized)
        exchange = self._gathering.exchange
        part_TN = exchange.room(out_TN.shape[0], self.weight_NK.shape[0], out_TN.dtype)
        linear(whole_TK, self.weight_NK, self.bias_N, part_TN, quantized)
        return exchange.gather_columns(part_TN, out_TN)


class OutputSharing:
    """Makes the outputs of a decoder's halves whole on every rank: summed or gathered."""

    def __init__(self, exchange: Exchange, gathering: Gathering | None) -> None:
        """With `gathering` they are gathered: no result depends on the number of ranks."""
        self.exchange = exchange
        self.gathering = gathering

    def linear(self, weight_NK: AnyWeight, bias_N: torch.Tensor | None, keeps_share: bool = False) -> Linear:
        """Make an output projection. If `keeps_share`, it returns the rank's part: a summand or columns."""
        if self.gathering is not None:
            return GatheredLinear(weight_NK, bias_N, self.gathering, keeps_share)
        if keeps_share:
            return Linear(weight_NK, bias_N if self.exchange.rank == 0 else None)
        return SummedLinear(weight_NK, bias_N, self.exchange)

"""Causal convolution in steps of any cut and company: against torch's conv1d in float64, and itself to the bit."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.state.causal_conv import causal_conv_reference, causal_conv_triton
from kernels.exactness import same_bits
from kernels.state_cases import NUM_PLACES, Part, join, make_rows
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BOTH = pytest.mark.parametrize("function", [causal_conv_triton, causal_conv_reference])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Conv:
    """States of poison between red zones, on the device of a function."""

    def __init__(
        self, function, device, num_channels: int, width: int, dtype=torch.float32, has_bias: bool = False
    ) -> None:
        self.function, self.device = function, torch.device("cpu") if function is causal_conv_reference else device
        self.zones = RedZones(self.device)
        generator = torch.Generator().manual_seed(width)
        self.weight_CW = torch.randn(num_channels, width, generator=generator).to(dtype)
        self.bias_C = torch.randn(num_channels, generator=generator).to(dtype) if has_bias else None
        self.conv_PCW = self.zones.allocate(NUM_PLACES, num_channels, width - 1, dtype=dtype).fill_(torch.nan)

    def run(
        self, parts: Sequence[tuple[Part, torch.Tensor]], num_padding: int = 2, as_decode: bool = False
    ) -> torch.Tensor:
        x_TC = join([x for _, x in parts], num_padding)
        rows = make_rows([part for part, _ in parts], num_padding, self.device, as_decode=as_decode)
        out_TC = self.zones.allocate(*x_TC.shape, dtype=x_TC.dtype).fill_(torch.nan)
        weights = [None if x is None else x.to(self.device) for x in (self.weight_CW, self.bias_C)]
        self.function(amid_poison(x_TC, self.device), rows, weights[0], self.conv_PCW, out_TC, weights[1])
        self.zones.check()
        assert not out_TC[len(x_TC) - num_padding :].any(), "padding is not zero"
        return out_TC[: len(x_TC) - num_padding].cpu()

    def exact(self, x_TC: torch.Tensor) -> torch.Tensor:
        """The whole sequence in float64."""
        width = self.weight_CW.shape[1]
        padded = F.pad(x_TC.double().T, (width - 1, 0))
        bias = None if self.bias_C is None else self.bias_C.double()
        y_CT = F.conv1d(padded.unsqueeze(0), self.weight_CW.double().unsqueeze(1), bias, groups=x_TC.shape[1])[0]
        return F.silu(y_CT).T

    def in_pieces(self, x_TC: torch.Tensor, cuts: Sequence[int], place: int = 2) -> torch.Tensor:
        outputs, start = [], 0
        for end in (*cuts, len(x_TC)):
            outputs.append(self.run([(Part(place, start, end - start), x_TC[start:end])]))
            start = end
        others = [other for other in range(NUM_PLACES) if other != place]
        assert bool(self.conv_PCW[others].isnan().all()), "the state of another place was written"
        assert same_bits(self.conv_PCW[place].cpu(), x_TC[1 - self.weight_CW.shape[1] :].T), "the newest inputs"
        return torch.cat(outputs)


def make_x(num_rows: int, num_channels: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_channels, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.each_pair
@BOTH
@DTYPES
@pytest.mark.parametrize(("width", "num_channels", "has_bias"), [(4, 40, False), (2, 300, True), (8, 17, False)])
def test_causal_conv_in_any_pieces_matches_conv1d(device, function, dtype, width, num_channels, has_bias) -> None:
    x_TC = make_x(90, num_channels, dtype)
    for cuts in ((), (64,), (1, 2, 3, 5, 66), (7, 9)):
        conv = Conv(function, device, num_channels, width, dtype, has_bias)
        tolerance = TOLERANCE[dtype]
        found = conv.in_pieces(x_TC, cuts)
        torch.testing.assert_close(found.double(), conv.exact(x_TC), rtol=tolerance, atol=tolerance)


@BOTH
def test_causal_conv_any_cut_changes_no_bit(device, function) -> None:
    x_TC = make_x(140, 24)
    whole = Conv(function, device, 24, 4).in_pieces(x_TC, ())
    for cuts in ((64,), (128,), (1, 2), (64, 65)):
        assert same_bits(Conv(function, device, 24, 4).in_pieces(x_TC, cuts), whole), f"cut at {cuts}"


@BOTH
def test_causal_conv_is_batch_invariant(device, function) -> None:
    lengths = (70, 1, 2, 1)
    sequences = [make_x(3 + length, 24, seed=i) for i, length in enumerate(lengths)]
    alone = [Conv(function, device, 24, 4).in_pieces(x, (3,), place) for place, x in enumerate(sequences)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        conv = Conv(function, device, 24, 4)
        conv.run([(Part(i, 0, 3), sequences[i][:3]) for i in order], 0)
        found = conv.run([(Part(i, 3, lengths[i]), sequences[i][3:]) for i in order], 5)
        for i, mine in zip(order, found.split([lengths[i] for i in order]), strict=True):
            assert same_bits(mine, alone[i][3:]), f"sequence {i} in {order}"


@BOTH
def test_causal_conv_without_lists_equals_lists(device, function) -> None:
    x_TC = make_x(9, 24)
    listed, plain = (Conv(function, device, 24, 4) for _ in range(2))
    for start in range(3):
        parts = [(Part(place, start, 1), x_TC[3 * start + i : 3 * start + i + 1]) for i, place in enumerate((4, 0, 2))]
        assert same_bits(listed.run(parts, 3), plain.run(parts, 3, as_decode=True))
    assert same_bits(listed.conv_PCW.cpu(), plain.conv_PCW.cpu())


@pytest.mark.gpu
def test_causal_conv_allocates_nothing(device) -> None:
    conv_PCW, weight_CW = (
        torch.zeros(4, 10240, 3, device=device).bfloat16(),
        torch.randn(10240, 4, device=device).bfloat16(),
    )
    x_TC = torch.randn(70, 10240, device=device).bfloat16()
    out_TC = torch.empty_like(x_TC)
    rows = make_rows([Part(0, 0, 66), Part(1, 5, 1)], 3, device)
    assert_allocates_nothing(lambda: causal_conv_triton(x_TC, rows, weight_CW, conv_PCW, out_TC))

"""Norm and output gate of value heads: kernel and reference against float64."""

import pytest
import torch

from holdfast.kernels.state.gated_norm import gated_norm_reference, gated_norm_triton
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BOTH = pytest.mark.parametrize("function", [gated_norm_triton, gated_norm_reference])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def heads_of(rows_TX: torch.Tensor, num_heads: int, device) -> torch.Tensor:
    return amid_poison(rows_TX, device).unflatten(1, (num_heads, -1))


@BOTH
@DTYPES
@pytest.mark.parametrize(("num_rows", "num_heads", "dim"), [(1, 1, 24), (5, 3, 128), (3, 7, 96), (0, 2, 16)])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_norm_matches_float64(device, function, dtype, num_rows, num_heads, dim, gate) -> None:
    on = torch.device("cpu") if function is gated_norm_reference else device
    generator = torch.Generator().manual_seed(dim)
    o, z = (torch.randn(num_rows, num_heads * dim, generator=generator).to(dtype) for _ in range(2))
    weight_V, zones, eps = torch.randn(dim, generator=generator).to(dtype), RedZones(on), 0.3
    out_THV = zones.allocate(num_rows, num_heads, dim, dtype=dtype).fill_(torch.nan)
    function(heads_of(o, num_heads, on), heads_of(z, num_heads, on), weight_V.to(on), eps, out_THV, gate)
    zones.check()
    o, z = (x.double().unflatten(1, (num_heads, dim)) for x in (o, z))
    opened = 1 / (1 + (-z).exp()) * (z if gate == "silu" else 1)
    exact = o / (o.square().mean(-1, keepdim=True) + eps).sqrt() * weight_V.double() * opened
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out_THV.cpu().double(), exact, rtol=tolerance, atol=tolerance)


@BOTH
def test_gated_norm_may_overwrite_its_input(device, function) -> None:
    on = torch.device("cpu") if function is gated_norm_reference else device
    o_THV, z_THV, weight_V = (torch.randn(*shape, device=on) for shape in ((3, 2, 16), (3, 2, 16), (16,)))
    apart = torch.empty_like(o_THV)
    function(o_THV, z_THV, weight_V, 1e-6, apart)
    function(o_THV, z_THV, weight_V, 1e-6, o_THV)
    assert torch.equal(o_THV, apart)


@pytest.mark.gpu
def test_gated_norm_allocates_nothing(device) -> None:
    o_THV, weight_V = torch.randn(7, 48, 128, device=device).bfloat16(), torch.randn(128, device=device)
    gate_THV = o_THV.clone()
    assert_allocates_nothing(lambda: gated_norm_triton(o_THV, gate_THV, weight_V, 1e-6, o_THV))

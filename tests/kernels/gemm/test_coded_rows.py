"""Norms, gates and inputs of a block whose rows come as codes too: those of what is stored, to the bit, a scale for 128 columns."""

import pytest
import torch

from holdfast.kernels import hyper_connections as hc
from holdfast.kernels.activation import gate_mul_triton
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    add_rms_norm_coded,
    add_rms_norm_coded_triton,
    enter_block_coded,
    enter_block_coded_triton,
    gate_mul_coded,
    gate_mul_coded_triton,
    quantize_rows_reference,
)
from holdfast.kernels.norm import rms_norm_triton
from holdfast.kernels.stream_geometry import num_shares, stream_parts_spec
from kernels.exactness import random, same_bits
from kernels.triton_cases import DTYPES, QUIET, amid_poison
from red_zones import RedZones

pytestmark = QUIET

SIZES = pytest.mark.parametrize("size", [129, 300, 512, 2049, 4224], ids=lambda size: f"D{size}")
NUMBERS = hc.MixNumbers(1e-6, 1e-6, 20)


def room(zones: RedZones, num_rows: int, size: int, columns: int = 128) -> QuantizedRows:
    codes = zones.allocate(num_rows, size, dtype=torch.uint8).fill_(0x55).view(torch.float8_e4m3fn)
    return QuantizedRows(codes, zones.allocate(num_rows, -(-size // columns)).fill_(7.0))


def assert_codes_of(y_TD: torch.Tensor, quantized: QuantizedRows) -> None:
    """Codes and scales are those that the reference makes of what was stored."""
    host = QuantizedRows(torch.empty(y_TD.shape, dtype=torch.float8_e4m3fn), torch.empty(quantized.scales_TB.shape))
    quantize_rows_reference(y_TD.cpu(), host)
    assert torch.equal(quantized.codes_TK.cpu().view(torch.uint8), host.codes_TK.view(torch.uint8))
    assert same_bits(quantized.scales_TB.cpu().nan_to_num(-1.0), host.scales_TB.nan_to_num(-1.0))


def assert_alike(y: torch.Tensor, plain: torch.Tensor) -> None:
    """The plain kernel gives the same numbers; a GPU may add them up in another order."""
    if y.is_cuda:
        step = torch.finfo(y.dtype).eps
        torch.testing.assert_close(y, plain, rtol=2 * step + 1e-5, atol=1e-5)
    else:
        assert same_bits(y, plain)


def parts_of(x: torch.Tensor, mix: hc.StreamMix) -> torch.Tensor:
    parts = torch.zeros(stream_parts_spec(x.shape[0], x.shape[1]).shape, device=x.device)
    hc.combine_streams_reference(x, None, None, mix.weight_MX, parts)
    return parts


def make_mix(num_streams: int, hidden: int) -> hc.StreamMix:
    width = num_shares(num_streams)
    return hc.StreamMix(random(width, num_streams * hidden, scale=0.02), random(width, seed=1), torch.ones(3))


@DTYPES
@SIZES
def test_rms_norm_coded_codes_blocks_of_stored_rows(device, size, dtype):
    x, weight = random(5, size).to(dtype), random(1, size, seed=2).to(dtype)[0]
    zones = RedZones(device)
    quantized, out = room(zones, 5, size), zones.allocate(5, size, dtype=dtype)
    x, weight = amid_poison(x, device), amid_poison(weight[None], device)[0]
    assert add_rms_norm_coded_triton(x, None, weight, 1e-6, out, quantized) is out
    zones.check()
    assert_alike(out, rms_norm_triton(x, weight, 1e-6))
    assert_codes_of(out, quantized)


@pytest.mark.each_pair
@DTYPES
@SIZES
@pytest.mark.parametrize("limit", [None, 0.5])
def test_gate_mul_coded_codes_blocks_of_stored_rows(device, size, limit, dtype):
    x = amid_poison(random(3, 2 * size, scale=3).to(dtype), device)
    zones = RedZones(device)
    quantized, out = room(zones, 3, size), zones.allocate(3, size, dtype=dtype)
    assert gate_mul_coded_triton(x, "silu", out, limit, quantized) is out
    zones.check()
    assert_alike(out, gate_mul_triton(x, "silu", torch.empty_like(out), limit))
    assert_codes_of(out, quantized)


@pytest.mark.each_pair
@DTYPES
@pytest.mark.parametrize("columns", [128, 512])
@pytest.mark.parametrize("size", [40, 128, 300, 512], ids=lambda size: f"D{size}")
def test_enter_block_coded_codes_blocks_of_stored_rows(device, size, columns, dtype):
    x, mix = random(3, 4, size).to(device, dtype), hc.StreamMix(*(one.to(device) for one in make_mix(4, size)))
    zones, parts, norm = RedZones(device), parts_of(x, mix), random(size, seed=3).to(device, dtype)
    quantized, out = room(zones, 3, size, columns), zones.allocate(3, size, dtype=dtype)
    shares, plain_shares = (torch.empty(3, 24, device=device) for _ in range(2))
    enter_block_coded_triton(x, parts, mix, NUMBERS, shares, norm, 1e-6, out, quantized)
    zones.check()
    plain = hc.enter_block_triton(x, parts, mix, NUMBERS, plain_shares, norm, 1e-6, torch.empty_like(out))
    assert_alike(out, plain)
    assert_alike(shares, plain_shares)
    assert_codes_of(out, quantized)


def test_coded_rows_on_a_cpu_are_those_of_the_plain_operation():
    x, norm, mix, zones = random(3, 4, 200), random(200, seed=3), make_mix(4, 200), RedZones(torch.device("cpu"))
    quantized, shares = room(zones, 3, 200), torch.empty(3, 24)
    out = enter_block_coded(x, parts_of(x, mix), mix, NUMBERS, shares, norm, 1e-6, torch.empty(3, 200), quantized)
    assert_codes_of(out, quantized)
    assert_codes_of(add_rms_norm_coded(x[:, 0], None, norm, 1e-6, torch.empty(3, 200), quantized), quantized)
    gates = random(3, 400)
    assert_codes_of(gate_mul_coded(gates, "silu", torch.empty(3, 200), 0.3, quantized), quantized)


def test_coded_rows_nonfinite_number_spoils_its_block_alone(device):
    gates = random(2, 600)
    gates[1, 140] = float("nan")
    quantized = room(RedZones(device), 2, 300)
    gate_mul_coded_triton(gates.to(device), "silu", torch.empty(2, 300, device=device), None, quantized)
    assert quantized.scales_TB.cpu().isnan().tolist() == [[False] * 3, [False, True, False]]


def test_coded_rows_refuse_wrong_code_buffers(device):
    x, quantized = random(3, 600).to(device), room(RedZones(device), 3, 299)
    with pytest.raises(AssertionError, match="shape"):
        gate_mul_coded_triton(x, "silu", torch.empty(3, 300, device=device), None, quantized)
    one_scale = room(RedZones(device), 3, 298, columns=298)
    with pytest.raises(AssertionError, match="shape"):
        gate_mul_coded_triton(x, "silu", torch.empty(3, 300, device=device), None, one_scale)

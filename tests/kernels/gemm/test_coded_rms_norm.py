"""RMSNorm whose result comes as codes too: the norm is as exact as torch, and codes are those of what it stores, to the bit."""

import pytest
import torch

from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    add_rms_norm_coded,
    add_rms_norm_coded_reference,
    add_rms_norm_coded_triton,
    quantize_rows_reference,
    rms_norm_codes,
    rms_norm_codes_triton,
)
from holdfast.kernels.norm import add_rms_norm_reference, rms_norm_reference
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

EPS = 1e-5


def room(zones, num_rows, size) -> QuantizedRows:
    codes = zones.allocate(num_rows, size, dtype=torch.uint8).fill_(0x55).view(torch.float8_e4m3fn)
    return QuantizedRows(codes, zones.allocate(num_rows, 3).fill_(7.0)[:, 1:2])


def assert_codes_of(y_TD, quantized) -> None:
    """Codes and scales are those that the reference makes of what was stored."""
    host = QuantizedRows(torch.empty(y_TD.shape, dtype=torch.float8_e4m3fn), torch.empty(len(y_TD), 1))
    quantize_rows_reference(y_TD.cpu(), host)
    assert torch.equal(quantized.codes_TK.cpu().view(torch.uint8), host.codes_TK.view(torch.uint8))
    assert torch.equal(quantized.scales_TB.cpu().isnan(), host.scales_TB.isnan())
    assert same_bits(quantized.scales_TB.cpu().nan_to_num(0), host.scales_TB.nan_to_num(0))


@pytest.mark.each_pair
@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 3, 64, 100, 577, 5120], ids=lambda size: f"D{size}")
def test_add_rms_norm_coded_is_exact_and_codes_stored_rows(device, size, offset, dtype):
    x, delta, weight = (random(count, size, seed=seed).to(dtype) for seed, count in enumerate((7, 7, 1)))
    zones = RedZones(device)
    quantized, out = room(zones, 7, size), zones.allocate(7, size, dtype=dtype).fill_(float("nan"))
    on_device, weights = amid_poison(x, device), amid_poison(weight, device)[0]
    y = add_rms_norm_coded_triton(on_device, amid_poison(delta, device), weights, EPS, out, quantized, offset)
    assert y is out
    zones.check()
    summed = x.clone()
    in_torch = add_rms_norm_reference(summed, delta, weight[0], EPS, torch.empty_like(x), offset)
    exact = rms_norm_reference(summed.double(), weight[0].double() + offset, EPS)
    assert same_bits(on_device.cpu().contiguous(), summed)
    assert_as_exact_as_torch(out.cpu(), in_torch, exact)
    assert_codes_of(out, quantized)


def test_add_rms_norm_coded_nonfinite_row_is_nan_alone(device):
    x, delta, weight = random(4, 300), random(4, 300, seed=1), random(300, seed=2)
    x[1, 7], x[2] = float("nan"), 0.0  # zeros by negative weights are -0
    delta[2] = 0.0
    quantized = room(RedZones(device), 4, 300)
    out = torch.empty(4, 300, device=device)
    add_rms_norm_coded_triton(*(one.to(device, copy=True) for one in (x, delta, weight)), EPS, out, quantized)
    assert_codes_of(out, quantized)
    assert quantized.scales_TB.cpu().isnan().flatten().tolist() == [False, True, False, False]


def test_add_rms_norm_coded_runs_in_place_and_on_strided_rows(device):
    x, delta, weight = random(3, 100), random(3, 100, seed=1), random(100, seed=2)
    rows, wide = amid_poison(x, device), torch.full((3, 200), 0x55, dtype=torch.uint8, device=device)
    out = amid_poison(delta, device)
    quantized = QuantizedRows(wide.view(torch.float8_e4m3fn)[:, :100], torch.empty(1, 3, device=device).t())
    add_rms_norm_coded_triton(rows, out, weight.to(device), EPS, out, quantized)
    assert_codes_of(out.contiguous(), quantized._replace(codes_TK=quantized.codes_TK.contiguous()))
    assert (wide[:, 100:] == 0x55).all()


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_add_rms_norm_coded_codes_match_stored_rows(num_rows):
    x, delta, weight = random(num_rows, 96), random(num_rows, 96, seed=1), random(96, seed=2)
    results = []
    for function in (add_rms_norm_coded, add_rms_norm_coded_reference):
        quantized, mine = room(RedZones(torch.device("cpu")), num_rows, 96), x.clone()
        out = function(mine, delta, weight, EPS, torch.empty_like(x), quantized)
        assert_codes_of(out, quantized)
        results.append((mine, out))
    assert same_bits(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_add_rms_norm_coded_refuses_wrong_code_buffers(device):
    x, weight = random(3, 256).to(device), random(256).to(device)
    for codes, scales in (((3, 255), (3, 1)), ((3, 256), (3, 3))):
        wrong = QuantizedRows(
            torch.empty(codes, dtype=torch.float8_e4m3fn, device=device), torch.empty(scales, device=device)
        )
        with pytest.raises(AssertionError, match="shape"):
            add_rms_norm_coded_triton(x, x.clone(), weight, EPS, torch.empty_like(x), wrong)


@DTYPES
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_scales", [1, 3])
def test_rms_norm_codes_are_those_of_the_stored_norm(device, num_scales, has_delta, dtype):
    x, delta, weight = (random(count, 300, seed=seed).to(device, dtype) for seed, count in enumerate((5, 5, 1)))
    results = []
    for function in (add_rms_norm_coded_triton, rms_norm_codes_triton):
        zones, stream = RedZones(device), x.clone()
        codes = zones.allocate(5, 300, dtype=torch.uint8).fill_(0x55).view(torch.float8_e4m3fn)
        quantized = QuantizedRows(codes, zones.allocate(5, num_scales).fill_(7.0))
        scratch = torch.full_like(x, float("nan"))
        function(stream, delta if has_delta else None, weight[0], EPS, scratch, quantized)
        zones.check()
        results.append((stream, codes.view(torch.uint8), quantized.scales_TB))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_rms_norm_codes_on_a_cpu_are_those_of_the_norm():
    x, weight, quantized = random(3, 96), random(96, seed=2), room(RedZones(torch.device("cpu")), 3, 96)
    rms_norm_codes(x.clone(), None, weight, EPS, torch.empty_like(x), quantized)
    assert_codes_of(rms_norm_reference(x, weight, EPS), quantized)


@pytest.mark.gpu
def test_add_rms_norm_coded_allocates_nothing(device):
    x, weight = random(33, 5120).to(device, torch.bfloat16), random(5120).to(device, torch.bfloat16)
    delta, quantized = torch.zeros_like(x), room(RedZones(device), 33, 5120)
    assert_allocates_nothing(lambda: add_rms_norm_coded(x, delta, weight, EPS, delta, quantized))

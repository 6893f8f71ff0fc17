"""Weights quantized and dequantized in plain torch: every code, every scale, and what is not finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import (
    E2M1_VALUES,
    LEAST_E4M3_SCALE,
    LEAST_INT8_SCALE,
    dequantize,
    e8m0_values,
    largest_finite,
)
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WEIGHT_SCHEMES
from quant.whole_weights import quantize

SCHEMES = pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)


def make(scheme, shape):
    tensors = (torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes(shape))
    return QuantizedWeight(scheme, shape, *tensors)


@SCHEMES
@pytest.mark.parametrize("shape", [(256, 192), (3, 128, 64)], ids=str)
def test_quantized_weight_check_accepts_planes_of_the_scheme(scheme, shape):
    make(scheme, shape).check()


@SCHEMES
def test_quantized_weight_check_refuses_other_planes(scheme):
    good, other = make(scheme, (256, 192)), make(scheme, (128, 192))
    wrong = {
        "shape": (other.codes, good.scales),
        "not": (good.codes, other.scales),
        "int16, not": (good.codes.to(torch.int16), good.scales),
        "float64, not": (good.codes, good.scales.to(torch.float64)),
        "strides": (good.codes.t().contiguous().t(), good.scales),
    }
    for message, planes in wrong.items():
        with pytest.raises(AssertionError, match=message):
            QuantizedWeight(scheme, good.shape, *planes).check()


E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(*shape):
    """Student's t with three degrees of freedom."""
    squares = torch.stack([normal(*shape, seed=seed) ** 2 for seed in (1, 2, 3)]).mean(0)
    return normal(*shape) / squares.sqrt()


def quantized(values, scheme):
    """As a weight whose planes are as the scheme has them."""
    amax = values.abs().amax().view(1) if scheme.is_whole_tensor else None
    weight = QuantizedWeight(scheme, tuple(values.shape), *quantize(values, scheme, amax))
    weight.check()
    return weight


def nearest(values, choices):
    """The choices nearest to values in exact arithmetic, and whether each is one of two that are."""
    choices = choices.unique()  # 0 and -0 are one
    distance = (values.double()[..., None] - choices).abs()
    least = distance.amin(-1, keepdim=True)
    return choices[distance.argmin(-1)], (distance == least).sum(-1) > 1


@SCHEMES
@pytest.mark.parametrize(("make", "column"), [(normal, 0), (heavy_tailed, 1)], ids=["normal", "heavy"])
def test_quantize_noise_matches_known_decibels(scheme, make, column):
    known = {"fp8": (31.6, 32.1), "fp8_tensor": (31.5, 31.6), "fp8_block": (31.6, 31.8), "mxfp4": (19.0, 17.1)}
    values = make(256, 1024)
    error = dequantize(quantized(values, scheme)) - values
    decibel = float(10 * torch.log10(values.square().sum() / error.square().sum()))
    if scheme is INT8:  # falls with the width of rows and the weight of their tails
        assert (41.0, 28.0)[column] < decibel < (43.5, 36.0)[column]
    else:
        assert abs(decibel - known[scheme.name][column]) < 0.4


@SCHEMES
def test_quantize_picks_the_nearest_code_under_its_scale(scheme):
    values = normal(48, 160) * torch.logspace(-3, 3, 48)[:, None]
    weight = quantized(values, scheme)
    ones = torch.full_like(weight.scales, 127 if scheme is MXFP4 else 1)
    steps = dequantize(QuantizedWeight(scheme, weight.shape, weight.codes, ones))
    scales = dequantize(
        QuantizedWeight(scheme, weight.shape, quantized(torch.ones_like(values), scheme).codes, weight.scales)
    )
    scales = scales / {"int8": 127.0, "mxfp4": 4.0}.get(scheme.name, 448.0)
    choices = {
        "int8": torch.arange(-127.0, 128).double(),
        "mxfp4": torch.tensor([*E2M1_VALUES, *(-x for x in E2M1_VALUES)]),
    }
    wanted, is_tie = nearest(values / scales, choices.get(scheme.name, E4M3_VALUES[E4M3_VALUES.isfinite()]).double())
    assert torch.equal(torch.where(is_tie, 0, steps.double()), torch.where(is_tie, 0, wanted))
    assert is_tie.sum() < 5


def test_quantize_by_row_scales_are_known():
    values = torch.tensor([[1.0, -896.0, 3.0], [0.0, -0.0, 0.0], [1e-9, 0.0, 0.0]])
    codes, scales = quantize(values, FP8)
    assert scales.tolist() == [2.0, pytest.approx(LEAST_E4M3_SCALE), pytest.approx(LEAST_E4M3_SCALE)]
    assert codes.float().tolist() == [[0.5, -448.0, 1.5], [0.0, -0.0, 0.0], [0.0, 0.0, 0.0]]
    codes, scales = quantize(torch.tensor([[254.0, 1.0, -3.0, 5.0], [0.0, -0.0, 0.0, 0.0]]), INT8)
    assert scales.tolist() == [2.0, LEAST_INT8_SCALE]
    assert codes.tolist() == [[127, 0, -2, 2], [0, 0, 0, 0]]


def test_quantize_fp8_tensor_repeats_its_scale_in_every_row():
    values = normal(5, 64)
    _, scales = quantize(values, FP8_TENSOR, torch.tensor([896.0]))
    assert scales.tolist() == [2.0] * 5
    with pytest.raises(AssertionError, match="amax of the whole tensor"):
        quantize(values, FP8_TENSOR)


def test_quantize_fp8_block_scales_ragged_blocks():
    values = normal(200, 300)
    _, scales = quantize(values, FP8_BLOCK)
    expected = [[values[i : i + 128, j : j + 128].abs().max() / 448 for j in (0, 128, 256)] for i in (0, 128)]
    assert torch.equal(scales, torch.tensor(expected))


def test_quantize_mxfp4_scales_round_as_defined():
    amax = torch.tensor([1.0, 1.74, 1.75, 3.4, 3.5, 6.0, 0.0, 2.0**-130, 3.4e38, 2.0**-126])
    values = torch.zeros(len(amax), 32)
    values[:, 5] = -amax
    codes, scales = quantize(values, MXFP4)
    assert scales.flatten().tolist() == [125, 125, 126, 126, 127, 127, 0, 0, 252, 0]
    assert dequantize(QuantizedWeight(MXFP4, (10, 32), codes, scales)).isfinite().all()
    assert codes[6].tolist() == [0] * 16


def test_quantize_mxfp4_ties_to_even_with_even_column_low():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -5.0, 6.0, 7.0, -0.0, 0.5, -6.0])
    values = torch.cat([halves, torch.zeros(15), torch.tensor([7.0])])[None]  # 7 is 1.75 * 4: the scale stays 2
    codes, scales = quantize(values * 1.0, MXFP4)
    assert scales.item() == 128
    codes, scales = quantize(values.clamp(-6, 6), MXFP4)
    assert scales.item() == 127
    steps = [0, 2, 2, 4, 4, 6, 6, 0, 10, 10, 14, 7, 7, 0, 1, 15]
    assert codes[0, :8].tolist() == [low | high << 4 for low, high in zip(steps[::2], steps[1::2], strict=True)]


def test_dequantize_mxfp4_decodes_every_byte():
    weight = QuantizedWeight(
        MXFP4, (16, 32), torch.arange(256, dtype=torch.uint8).view(16, 16), torch.full((16, 1), 128, dtype=torch.uint8)
    )
    table = [2 * value for value in (*E2M1_VALUES, *(-value for value in E2M1_VALUES))]
    expected = [table[byte >> shift & 15] for byte in range(256) for shift in (0, 4)]
    assert dequantize(weight).flatten().tolist() == expected


def test_e8m0_values_are_powers_of_two():
    values = e8m0_values(torch.arange(256, dtype=torch.uint8))
    assert torch.equal(values[:255].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert values[255].isnan()


@SCHEMES
@pytest.mark.parametrize("rows", [(0, 256), (5, 9), (127, 130), (128, 256), (255, 256), (3, 3)], ids=str)
def test_dequantize_row_range_matches_the_whole(scheme, rows):
    for shape in ((256, 192), (2, 128, 192)):
        values = normal(*shape)
        flat = values.view(256, 192)
        amax = flat.abs().amax().view(1) if scheme.is_whole_tensor else None
        codes, scales = quantize(flat, scheme, amax)
        planes = scheme.planes(shape)
        weight = QuantizedWeight(scheme, shape, codes.view(planes[0].shape), scales.view(planes[1].shape))
        assert torch.equal(dequantize(weight, rows), dequantize(weight)[rows[0] : rows[1]])


@SCHEMES
def test_quantize_zeros_stay_zeros_with_a_scale(scheme):
    weight = quantized(torch.zeros(3, 64), scheme)
    assert weight.codes.view(torch.uint8).count_nonzero() == 0
    assert torch.equal(dequantize(weight), torch.zeros(3, 64))
    assert scheme is MXFP4 or bool((weight.scales > 0).all())


@SCHEMES
def test_quantize_nonfinite_value_moves_no_scale(scheme):
    clean = normal(4, 128)
    clean[1, 7] = clean[2, 3] = clean[2, 4] = clean[3, 9] = 0.0
    bad = clean.clone()
    bad[1, 7], bad[2, 3], bad[2, 4], bad[3, 9] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan])
    amax = clean.abs().amax().view(1) if scheme.is_whole_tensor else None
    codes, scales = quantize(bad, scheme, amax)
    clean_codes, clean_scales = quantize(clean, scheme, amax)
    assert torch.equal(scales, clean_scales)
    differ = codes.view(torch.uint8) != clean_codes.view(torch.uint8)
    decoded = dequantize(QuantizedWeight(scheme, (4, 128), codes, scales))
    if scheme.code_dtype == "float8_e4m3fn":
        assert codes.view(torch.uint8)[differ].tolist() == [0x7F, 0x7E, 0xFE, 0x7F]
        assert decoded.isnan().nonzero().tolist() == [[1, 7], [3, 9]]
    else:
        assert decoded[1, 7] == decoded[3, 9] == 0
        assert decoded.isfinite().all()
    top = decoded[2, :32].abs().max()
    assert (decoded[2, 3], decoded[2, 4]) == (top, -top)


def test_largest_finite_ignores_nonfinite_values():
    values = torch.tensor([[1.0, -3.0], [torch.nan, 2.0], [-torch.inf, torch.inf], [-0.0, -0.0]])
    found = largest_finite(values)
    assert found.tolist() == [3.0, 2.0, 0.0, 0.0]
    assert not found.signbit().any()
    assert largest_finite(torch.empty(3, 0)).tolist() == [0.0] * 3


@SCHEMES
@given(st.integers(1, 5), st.sampled_from([1e-45, 1e-38, 1e-30, 1e-6, 1.0, 1e10, 3e38]), st.integers(0, 99))
def test_dequantize_returns_any_magnitude_finite_and_near(scheme, num_rows, magnitude, seed):
    values = (torch.rand(num_rows, 64, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * magnitude
    weight = quantized(values, scheme)
    decoded = dequantize(weight)
    assert decoded.isfinite().all()
    floor = {"int8": 2.0**-127, "mxfp4": 2.0**-128}.get(scheme.name, LEAST_E4M3_SCALE * 2.0**-10)
    largest = float(values.abs().max())
    step = {"int8": 0.5 / 127, "mxfp4": 0.34}.get(scheme.name, 1 / 28)
    assert float((decoded.double() - values.double()).abs().max()) <= step * largest * 1.00001 + floor

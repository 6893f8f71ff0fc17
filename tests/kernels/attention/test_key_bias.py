"""Key biases beside quantized pages: tables against float64 rotations, attention against keys that have their bias."""

import math

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.key_bias import KeyBias, key_bias_rows, make_key_turns
from holdfast.kernels.geometry import BLOCK_TOKENS, key_bias_spec, key_turns_specs
from kernels.exactness import random, same_bits
from kernels.quantized_kv_cases import (
    FORMATS,
    QUIET,
    Cut,
    QuantizedStep,
    cut_tiles,
    judge,
    quantized_step,
    run_tiles,
)

pytestmark = QUIET

LENGTHS = (1, 63, 64, 65, 1000, 4096)


def frequencies(head_dim: int, theta: float = 1e6) -> torch.Tensor:
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def turned(bias_KD: torch.Tensor, positions: torch.Tensor, frequency_C: torch.Tensor, magnitude: float) -> torch.Tensor:
    """[K, L, D] in float64, pair by pair as a complex number."""
    first, second = bias_KD.double().chunk(2, dim=-1)
    angle_LC = torch.outer(positions.double(), frequency_C.double())
    turned_KLC = torch.complex(first, second).unsqueeze(1) * torch.polar(torch.full_like(angle_LC, magnitude), angle_LC)
    return torch.cat((turned_KLC.real, turned_KLC.imag), dim=-1)


@pytest.mark.each_value
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_key_bias_rows_are_the_bias_rotated_by_position(head_dim, max_model_len):
    bias, frequency = 600 * random(3, head_dim), frequencies(head_dim)
    positions = torch.arange(max_model_len)
    expected = turned(bias, positions, frequency, 1.25)
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.bfloat16, 5e-4)):
        turns = make_key_turns(frequency, 1.25, max_model_len, dtype, "cpu")
        rows = key_bias_rows(KeyBias(bias, turns), positions)
        assert rows.dtype == torch.float32
        error = (rows.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < tolerance, f"{dtype=} {float(error.max())=}"


def test_key_bias_slow_pair_is_more_exact_than_half():
    """What differs from token to token counts, and not the size of the bias."""
    frequency = torch.tensor([1e-3, 1e-5])
    turns = make_key_turns(frequency, 1.0, 4096, torch.float16, "cpu")
    bias = torch.tensor([[700.0, 900.0, -300.0, 50.0]])
    positions = torch.tensor([5, 63, 64, 2000, 4095])
    rows, expected = key_bias_rows(KeyBias(bias, turns), positions), turned(bias, positions, frequency, 1.0)
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=0.02)
    assert float((expected.half().double() - expected).abs().max()) > 0.1


def test_key_bias_rows_are_exact_for_any_positions():
    bias, frequency = random(2, 32), frequencies(32)
    turns = make_key_turns(frequency, 1.0, 70_000, torch.float32, "cpu")
    positions = torch.tensor([69_999, 0, 31, 32, 31, 65_536])
    torch.testing.assert_close(
        key_bias_rows(KeyBias(bias, turns), positions).double(),
        turned(bias, positions, frequency, 1.0),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_key_bias_turns_have_planned_bytes(max_model_len, dtype):
    turns = make_key_turns(frequencies(48), 1.0, max_model_len, dtype, "cpu")
    specs = key_turns_specs(48, max_model_len, str(dtype).removeprefix("torch."))
    for table, spec in zip(turns, specs, strict=True):
        if table is None:
            assert spec.num_bytes == 0
            continue
        assert (tuple(table.shape), str(table.dtype)) == (spec.shape, f"torch.{spec.dtype}")
    assert turns.num_bytes == sum(spec.num_bytes for spec in specs)
    bias = KeyBias(torch.zeros(5, 48), turns)
    assert bias.num_bytes == key_bias_spec(5, 48).num_bytes == 5 * 48 * 4
    assert len(turns.cos_BC) == math.ceil(max_model_len / BLOCK_TOKENS)


SMALL, LARGE, HALVES = Cut(), Cut(large=True), Cut(splits=2)
CUTS = pytest.mark.parametrize("cut", [SMALL, HALVES, LARGE], ids=["small", "split", "large"])
CODERS = pytest.mark.parametrize("bits", [8, 4, 3], ids=lambda bits: f"{bits} bits")


def with_bias(step: QuantizedStep, size: float, magnitude: float = 1.0, theta: float = 1e4) -> QuantizedStep:
    """A bias whose coordinates are about `size`, as a rope of this base turns it."""
    num_kv_heads, head_dim = step.tokens[0][0].shape[1:]
    step.bias = size * random(num_kv_heads, head_dim, seed=5)
    step.rope = frequencies(head_dim, theta), magnitude
    return step


@FORMATS
def test_key_bias_is_exact_for_every_format(device, key_bits, value_bits):
    """Small tiles, splits, large tiles and padding in one step, over several blocks."""
    rows = [(69, 1), (0, 12), (130, 3), (0, 1)]
    step = with_bias(quantized_step((key_bits, value_bits), rows, 32, group=4, num_kv_heads=2), 1.0, 1.2)
    judge(step, [HALVES, LARGE, Cut(large=True, splits=2), SMALL], device, num_padding=2, num_sms=2)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize("head_dim", [16, 48, 80, 112, 128])
def test_key_bias_is_exact_for_every_head_dim(device, head_dim, bits):
    """Also those whose pairs are no power of two, and whose rotation has several blocks."""
    for cut in (SMALL, LARGE):
        judge(with_bias(quantized_step((bits, 4), [(65, 1)], head_dim, group=2), 1.0), cut, device)


@for_each("group", [1, 3, 8, 9])
def test_key_bias_is_exact_for_every_grouping(device, group):
    step = with_bias(quantized_step((4, 4), [(62, 3), (67, 1)], 16, group, num_kv_heads=2), 1.0)
    judge(step, [SMALL, HALVES], device)


@for_each("page_tokens", [1, 16, 64, 128])
def test_key_bias_is_exact_for_every_page_size(device, page_tokens):
    """Blocks of tokens have their rotations, wherever pages end."""
    judge(with_bias(quantized_step((3, 4), [(139, 1)], 32, page_tokens=page_tokens), 1.0), HALVES, device)


@pytest.mark.each_value
@CUTS
@pytest.mark.parametrize("window", [1, 5, 64, 100], ids=lambda window: f"window of {window}")
def test_key_bias_is_exact_for_every_window(device, window, cut):
    judge(with_bias(quantized_step((4, 4), [(190, 1), (126, 3)], 16, group=2, window=window), 1.0), cut, device)


@pytest.mark.each_value
@CUTS
@CODERS
def test_key_bias_of_zeros_changes_no_bit(device, bits, cut):
    """To the bit: nothing else about the scores has changed."""
    step = quantized_step((bits, 4), [(130, 2)], 32, group=2)
    tiles = cut_tiles(step, [cut])
    plain = run_tiles(step, tiles, device)
    assert same_bits(run_tiles(with_bias(step, 0.0), tiles, device), plain)


@pytest.mark.gpu
@FORMATS
def test_key_bias_bfloat16_is_exact_in_compiled_kernels(device, key_bits, value_bits):
    """Decode in splits, prefill whole and in splits, over many blocks."""
    rows = [(3000, 1), (0, 150), (700, 40)]
    bits = (key_bits, value_bits)
    step = with_bias(quantized_step(bits, rows, 128, 8, page_tokens=64, dtype=torch.bfloat16), 1.0)
    judge(step, [Cut(splits=4), LARGE, Cut(large=True, splits=2)], device, num_sms=132)

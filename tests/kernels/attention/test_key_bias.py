"""Key biases beside quantized pages: tables against float64 rotations, for every kind of rope."""

import math

import pytest
import torch

from holdfast.kernels.attention.key_bias import KeyBias, key_bias_rows, make_key_turns
from holdfast.kernels.geometry import BLOCK_TOKENS, key_bias_spec, key_turns_specs
from kernels.exactness import random

LENGTHS = (1, 63, 64, 65, 1000, 4096)


def frequencies(head_dim: int, theta: float = 1e6) -> torch.Tensor:
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def turned(bias_KD: torch.Tensor, positions: torch.Tensor, frequency_C: torch.Tensor, magnitude: float) -> torch.Tensor:
    """[K, L, D] in float64, pair by pair as a complex number."""
    first, second = bias_KD.double().chunk(2, dim=-1)
    angle_LC = torch.outer(positions.double(), frequency_C.double())
    turned_KLC = torch.complex(first, second).unsqueeze(1) * torch.polar(torch.full_like(angle_LC, magnitude), angle_LC)
    return torch.cat((turned_KLC.real, turned_KLC.imag), dim=-1)


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_rows_are_the_bias_turned_by_its_position(head_dim, max_model_len):
    bias, frequency = 600 * random(3, head_dim), frequencies(head_dim)
    positions = torch.arange(max_model_len)
    expected = turned(bias, positions, frequency, 1.25)
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.bfloat16, 5e-4)):
        turns = make_key_turns(frequency, 1.25, max_model_len, dtype, "cpu")
        rows = key_bias_rows(KeyBias(bias, turns), positions)
        assert rows.dtype == torch.float32
        error = (rows.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < tolerance, f"{dtype=} {float(error.max())=}"


def test_a_pair_that_turns_slowly_is_held_much_better_than_half_precision_holds_it():
    """What differs from token to token counts, and not the size of the bias."""
    frequency = torch.tensor([1e-3, 1e-5])
    turns = make_key_turns(frequency, 1.0, 4096, torch.float16, "cpu")
    bias = torch.tensor([[700.0, 900.0, -300.0, 50.0]])
    positions = torch.tensor([5, 63, 64, 2000, 4095])
    rows, expected = key_bias_rows(KeyBias(bias, turns), positions), turned(bias, positions, frequency, 1.0)
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=0.02)
    assert float((expected.half().double() - expected).abs().max()) > 0.1


def test_any_positions_in_any_order():
    bias, frequency = random(2, 32), frequencies(32)
    turns = make_key_turns(frequency, 1.0, 70_000, torch.float32, "cpu")
    positions = torch.tensor([69_999, 0, 31, 32, 31, 65_536])
    torch.testing.assert_close(
        key_bias_rows(KeyBias(bias, turns), positions).double(),
        turned(bias, positions, frequency, 1.0),
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_bytes_are_those_that_a_plan_counts(max_model_len, dtype):
    turns = make_key_turns(frequencies(48), 1.0, max_model_len, dtype, "cpu")
    specs = key_turns_specs(48, max_model_len, str(dtype).removeprefix("torch."))
    for table, spec in zip(turns, specs, strict=True):
        assert (tuple(table.shape), str(table.dtype)) == (spec.shape, f"torch.{spec.dtype}")
    assert turns.num_bytes == sum(spec.num_bytes for spec in specs)
    bias = KeyBias(torch.zeros(5, 48), turns)
    assert bias.num_bytes == key_bias_spec(5, 48).num_bytes == 5 * 48 * 4
    assert len(turns.cos_BC) == math.ceil(max_model_len / BLOCK_TOKENS)

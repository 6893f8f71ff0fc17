"""Gated rows straight to codes with a scale per row: those of the gate and the quantizer one after the other, to the bit."""

import pytest
import torch

from holdfast.kernels.activation import gate_mul_triton
from holdfast.kernels.gemm.quantize_activations import (
    WHOLE_ROW,
    QuantizedRows,
    gate_mul_coded,
    gate_mul_coded_triton,
    quantize_rows_reference,
    quantize_rows_triton,
    row_parts,
    takes_gated_row,
)
from kernels.exactness import random, same_bits
from kernels.place_cases import hostile_rows
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BF16 = torch.bfloat16


def room(zones: RedZones, num_rows: int, size: int) -> QuantizedRows:
    """Codes with a gap after each row, and scales with a gap after each: even places, as a word of codes needs."""
    codes = zones.allocate(num_rows, size + size % 2 + 6, dtype=torch.uint8).fill_(0x55)
    return QuantizedRows(codes[:, :size].view(torch.float8_e4m3fn), zones.allocate(num_rows, 3).fill_(7.0)[:, 1:2])


def among_nan(rows_TX: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Place rows between NaN, an even number of columns apart."""
    num_rows, width = rows_TX.shape
    buffer = torch.full((num_rows + 2, width + 32), float("nan"), dtype=rows_TX.dtype, device=device)
    buffer[1:-1, 16 : 16 + width] = rows_TX.to(device)
    return buffer[1:-1, 16 : 16 + width]


def codes_apart(gate_up_TX: torch.Tensor, kind: str, limit: float | None) -> QuantizedRows:
    """Codes of the gate, rounded to bfloat16, from two kernels; the interpreter rounds in torch."""
    num_rows, width = gate_up_TX.shape
    dtype = BF16 if gate_up_TX.is_cuda else torch.float32
    y = torch.empty(num_rows, width // 2, dtype=dtype, device=gate_up_TX.device)
    gate_mul_triton(gate_up_TX.to(dtype).contiguous(), kind, y, limit)
    codes = torch.empty(y.shape, dtype=torch.float8_e4m3fn, device=y.device)
    apart = QuantizedRows(codes, torch.empty(num_rows, 1, device=y.device))
    return (quantize_rows_triton if y.is_cuda else quantize_rows_reference)(y.to(BF16), apart)


def check(
    gate_up_TX: torch.Tensor, device: torch.device, kind: str = "silu", limit: float | None = None
) -> QuantizedRows:
    zones = RedZones(device)
    num_rows, size = len(gate_up_TX), gate_up_TX.shape[1] // 2
    quantized, rows = room(zones, num_rows, size), among_nan(gate_up_TX, device)
    out = zones.allocate(num_rows, size, dtype=BF16)
    assert takes_gated_row(rows, quantized)
    assert gate_mul_coded_triton(rows, kind, out, limit, quantized) is out
    zones.check()
    wide = quantized.codes_TK.view(torch.uint8).as_strided((num_rows, size + 6), quantized.codes_TK.stride())
    assert (wide[:, size:] == 0x55).all(), "codes were written past a row"
    apart = codes_apart(rows, kind, limit)
    assert torch.equal(quantized.codes_TK.contiguous().view(torch.uint8), apart.codes_TK.view(torch.uint8))
    scales, others = (one.scales_TB.cpu().contiguous() for one in (quantized, apart))
    assert torch.equal(scales.isnan(), others.isnan())
    assert same_bits(scales.nan_to_num(0), others.nan_to_num(0))
    return quantized


@pytest.mark.parametrize("size", [2, 6, 254, 256, 258, 1280, 1282, 5122], ids=lambda size: f"I{size}")
def test_gate_mul_coded_row_is_that_of_two_kernels(device, size):
    gate_up = random(5, 2 * size, scale=3.0) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0])[:, None]
    check(gate_up.to(BF16), device)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [768, 9728, 14336, 25600, 28672, WHOLE_ROW], ids=lambda size: f"I{size}")
def test_gate_mul_coded_row_of_models_is_that_of_two_kernels(device, size):
    check(random(37, 2 * size, scale=3.0).to(BF16), device)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gate_mul_coded_row_takes_any_gate(device, kind, limit):
    check(random(3, 200, scale=3.0).to(BF16), device, kind, limit)


def test_gate_mul_coded_row_takes_every_gate_and_hostile_numbers(device):
    """Every bfloat16 gate: shares below 2^-126 count, because ups are large; then rows of hostile numbers."""
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(128, 512)
    ups = torch.full_like(gates, 3e38)
    ups[:, ::2] = -1.5
    check(torch.cat((gates, ups), dim=1), device)
    hostile = hostile_rows(256, BF16)
    check(torch.cat((hostile, hostile.flip(0)), dim=1), device)


def test_gate_mul_coded_nonfinite_number_spoils_its_row_alone(device):
    gate_up = random(4, 600).to(BF16)
    gate_up[1, 140], gate_up[2, 299], gate_up[3, 599] = float("nan"), float("inf"), -float("inf")
    quantized = check(gate_up, device)
    assert quantized.scales_TB.flatten().isnan().tolist() == [False, True, True, True]


def test_gate_mul_coded_row_is_batch_invariant(device):
    gate_up = random(7, 520, scale=2.0).to(BF16)
    whole = check(gate_up, device)
    for row in (0, 6):
        alone = check(gate_up[row : row + 1], device)
        assert torch.equal(alone.codes_TK.view(torch.uint8)[0], whole.codes_TK.view(torch.uint8)[row])


def test_gate_mul_coded_other_rows_take_two_kernels(device):
    """Other types, an odd width, rows at odd places and rows too long for registers have the same codes."""
    zones = RedZones(device)
    odd = torch.zeros(3, 405, device=device, dtype=BF16)[:, :400]
    for rows in (random(3, 400).to(device), random(3, 402).to(device, torch.float16), odd):
        size = rows.shape[1] // 2
        quantized, out = room(zones, 3, size), torch.empty(3, size, dtype=rows.dtype, device=device)
        assert not takes_gated_row(rows, quantized)
        gate_mul_coded_triton(rows, "silu", out, None, quantized)
        theirs = quantize_rows_reference(out.cpu(), room(RedZones(torch.device("cpu")), 3, size))
        assert torch.equal(quantized.codes_TK.cpu().view(torch.uint8), theirs.codes_TK.view(torch.uint8))
    long = torch.empty(1, 2 * WHOLE_ROW + 4, dtype=BF16, device=device)
    assert not takes_gated_row(long, room(zones, 1, WHOLE_ROW + 2))


def test_gate_mul_coded_without_rows_is_empty(device):
    quantized = room(RedZones(device), 0, 64)
    assert gate_mul_coded(
        torch.empty(0, 128, dtype=BF16), "silu", torch.empty(0, 64, dtype=BF16), None, quantized
    ).shape == (0, 64)


def test_row_parts_hold_every_column():
    for size in (*range(1, 3000, 7), 5120, 8192, 25600, 28672, WHOLE_ROW):
        warps, parts = row_parts(size)
        assert (parts - 1) * warps * 256 < size <= parts * warps * 256
        assert parts <= (5 if warps < 16 else 8)


@pytest.mark.gpu
def test_gate_mul_coded_row_allocates_nothing(device):
    gate_up, out = torch.zeros(33, 4096, device=device, dtype=BF16), torch.empty(33, 2048, device=device, dtype=BF16)
    quantized = room(RedZones(device), 33, 2048)
    assert_allocates_nothing(lambda: gate_mul_coded(gate_up, "silu", out, None, quantized))

"""Activations quantized to e4m3: the kernel is the reference to the bit, by row and by block."""

import pytest
import torch

from holdfast.kernels.gemm.quantize_activations import (
    BLOCK_COLUMNS,
    QuantizedRows,
    RowAmaxBits,
    quantize_rows,
    quantize_rows_by_amax,
    quantize_rows_reference,
    quantize_rows_triton,
)
from kernels.exactness import random, same_bits
from kernels.place_cases import FLOAT_TYPES, hostile_rows
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BLOCKED = pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])


def quantized(function, x, blocked, device="cpu"):
    """Codes as bytes and scales, from room full of poison between red zones; scales lie block by block, codes apart."""
    zones = RedZones(torch.device(device))
    num_rows, num_columns = x.shape
    num_blocks = -(-num_columns // BLOCK_COLUMNS) if blocked else 1
    codes = zones.allocate(num_rows, num_columns + 16, dtype=torch.float8_e4m3fn)
    codes.view(torch.uint8).fill_(0x55)
    scales = zones.allocate(num_blocks, num_rows, 2, dtype=torch.float32).fill_(torch.nan)[:, :, 0].t()
    room = QuantizedRows(codes[:, :num_columns], scales)
    assert function(x, room) is room
    zones.check()
    assert (codes[:, num_columns:].view(torch.uint8) == 0x55).all(), "codes were written behind a row"
    return room.codes_TK.contiguous().view(torch.uint8).cpu(), room.scales_TB.cpu().contiguous()


def assert_same(mine, theirs):
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1].isnan(), theirs[1].isnan())
    assert same_bits(mine[1].nan_to_num(0), theirs[1].nan_to_num(0))


@BLOCKED
@pytest.mark.parametrize("width", [1, 7, 33, 128, 129, 576, 1408, 4099, 32773], ids=lambda width: f"K{width}")
def test_quantize_rows_matches_reference_in_any_width(device, width, blocked):
    x = random(2 if width > 1280 else 5, width)
    assert_same(
        quantized(quantize_rows_triton, amid_poison(x, device), blocked, device),
        quantized(quantize_rows_reference, x, blocked),
    )


@pytest.mark.parametrize("num_amax", [1, 3, 16])
@pytest.mark.parametrize("width", [33, 2048, 2049, 4100], ids=lambda width: f"K{width}")
def test_quantize_rows_by_amax_matches_reference_in_any_width(device, width, num_amax):
    """Sizes of rows differ by far, and the largest number may lie in any of their blocks."""
    x = random(3, width) * torch.tensor([1e-2, 1.0, 1e4])[:, None]
    padded = torch.nn.functional.pad(x.abs(), (0, -width % num_amax)).view(3, num_amax, -1).amax(-1)
    bits = amid_poison(padded.reshape(1, -1), device).view(torch.int32)
    amax = RowAmaxBits(bits, num_amax)
    assert_same(
        quantized(lambda rows, room: quantize_rows_by_amax(rows, amax, room), amid_poison(x, device), False, device),
        quantized(quantize_rows_reference, x, False),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_rows_of_16_bits_match_a_division(device, dtype):
    """Rows of every number up to one of 512 largest ones, of both signs: ties of codes among them."""
    infinity = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
    numbers = torch.arange(infinity, dtype=torch.int16).view(dtype)
    largest = torch.cat((numbers[-3:], numbers[1:4], numbers[torch.randint(infinity, (506,))]))
    x = torch.where(numbers <= largest[:, None], numbers, largest[:, None])
    for rows in (x, -x):
        mine = quantized(quantize_rows_triton, rows.to(device), False, device)
        theirs = quantized(quantize_rows_reference, rows, False)
        assert_same(mine, theirs)


@BLOCKED
@FLOAT_TYPES
def test_quantize_rows_hostile_values_match_reference(device, dtype, blocked):
    x = hostile_rows(200, dtype)
    x = x.clamp(-3e38, 3e38) if dtype == torch.float64 else x
    mine = quantized(quantize_rows_triton, amid_poison(x, device), blocked, device)
    assert_same(mine, quantized(quantize_rows_reference, x, blocked))
    assert mine[1].isfinite().all()


@BLOCKED
def test_quantize_rows_codes_are_near_the_rows(blocked):
    x = random(5, 300) * torch.tensor([1e-2, 1.0, 30.0, 1e4, 1.0])[:, None]
    codes, scales = quantized(quantize_rows, x, blocked)
    width = BLOCK_COLUMNS if blocked else 300
    expected = [[row[start : start + width].abs().max() / 448 for start in range(0, 300, width)] for row in x]
    assert torch.equal(scales, torch.tensor(expected))
    decoded = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(width, dim=1)[:, :300]
    assert ((decoded - x).abs() <= x.abs() / 16 + scales.amax(1, keepdim=True) * 2.0**-10).all()


@BLOCKED
def test_quantize_rows_codes_zeros_as_zeros(device, blocked):
    for where, function in (("cpu", quantize_rows), (device, quantize_rows_triton)):
        codes, scales = quantized(function, torch.zeros(2, 130, device=where), blocked, where)
        assert codes.count_nonzero() == 0
        assert (scales > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_quantize_rows_nonfinite_value_spoils_codes_of_its_scale(device, bad):
    x = random(3, 300).half()
    x[1, 140] = bad
    for blocked in (False, True):
        theirs = quantized(quantize_rows_reference, x, blocked)
        assert_same(quantized(quantize_rows_triton, amid_poison(x, device), blocked, device), theirs)
        assert theirs[1].isnan().nonzero().tolist() == ([[1, 1]] if blocked else [[1, 0]])
        assert (theirs[0] == 0x7F).nonzero().shape[0] == (128 if blocked else 300)


@BLOCKED
def test_quantize_rows_without_rows_is_empty(device, blocked):
    for where, function in (("cpu", quantize_rows), (device, quantize_rows_triton)):
        codes, _ = quantized(function, torch.empty(0, 200, device=where), blocked, where)
        assert codes.shape == (0, 200)


def test_quantize_rows_is_batch_invariant(device):
    x = random(7, 260).half().to(device)
    for blocked in (False, True):
        codes, scales = quantized(quantize_rows_triton, x, blocked, device)
        for row in (0, 3, 6):
            alone = quantized(quantize_rows_triton, x[row : row + 1], blocked, device)
            assert_same(alone, (codes[row : row + 1], scales[row : row + 1].contiguous()))


def test_quantize_rows_refuses_buffers_of_another_shape():
    x = random(2, 300)
    codes = torch.empty(2, 300, dtype=torch.float8_e4m3fn)
    for scales in (torch.empty(2, 2), torch.empty(3, 1), torch.empty(2, 4)):
        with pytest.raises(AssertionError, match=r"scales_TB\.shape"):
            quantize_rows(x, QuantizedRows(codes, scales))
    with pytest.raises(AssertionError, match=r"codes_TK\.shape"):
        quantize_rows(x, QuantizedRows(codes[:, :299], torch.empty(2, 1)))


def test_quantize_rows_refuses_strided_columns(device):
    codes, scales = torch.empty(4, 4, dtype=torch.float8_e4m3fn, device=device), torch.empty(4, 1, device=device)
    x = random(4, 4).to(device)
    for left, right in ((x.t(), codes), (x, codes.t())):
        with pytest.raises(AssertionError, match="columns lie apart"):
            quantize_rows_triton(left, QuantizedRows(right, scales))


@pytest.mark.gpu
@BLOCKED
@pytest.mark.parametrize("shape", [(1, 5120), (64, 2048), (300, 25600), (4096, 768)], ids=str)
def test_quantize_rows_matches_reference_at_model_shapes(device, blocked, shape):
    x = random(*shape).bfloat16()
    assert_same(quantized(quantize_rows, x.to(device), blocked, device), quantized(quantize_rows_reference, x, blocked))


@pytest.mark.gpu
@BLOCKED
def test_quantize_rows_allocates_nothing(device, blocked):
    x = random(5, 640).to(device, torch.bfloat16)
    scales = torch.empty(5 if blocked else 1, 5, device=device).t()
    room = QuantizedRows(torch.empty(5, 640, dtype=torch.float8_e4m3fn, device=device), scales)
    assert_allocates_nothing(lambda: quantize_rows(x, room))

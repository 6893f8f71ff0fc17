"""GEMV by e4m3 weights in blocks: rows coded as `quantize_rows` codes them, every size as exact as torch, and nothing read beyond."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.kernels.gemm import block_scaled_gemv as kernels
from holdfast.kernels.gemm.block_scaled_gemv import (
    PAIRS_ASM_TEXT,
    BlockGemvForm,
    block_products_asm,
    block_scaled_gemv,
    gemv_form,
    row_form,
    takes,
)
from holdfast.kernels.gemm.linear import dequantize_rows, quantized_linear
from holdfast.kernels.gemm.quantize_activations import quantize_rows_reference
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4
from kernels.assembler import run_assembler
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import block_scaled_gemv_reference
from kernels.quantized_cases import (
    HALF_SLACK,
    codable_rows,
    exact_rows,
    exact_weight,
    random_weight,
    room_amid,
    scheme_id,
    weight_amid,
    weight_on,
)
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BLOCK_SCHEMES = pytest.mark.parametrize(
    "scheme", [replace(FP8_BLOCK, block_rows=rows) for rows in (128, 64, 24)], ids=scheme_id
)
DEEPSEEK = [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (7168, 18432), (128, 7168)]
"""Shapes of V3 and V3.2."""


@pytest.fixture(autouse=True)
def _few_programs_in_the_interpreter(device, monkeypatch):
    """Which takes its time for each."""
    if device.type == "cpu":
        cut_as(monkeypatch, BlockGemvForm(16, 1, ahead=False))


def cut_as(monkeypatch, form: BlockGemvForm) -> None:
    monkeypatch.setattr(kernels, "gemv_form", lambda size_n, size_k: form)


def run(function, x_MK, weight, bias_N, device, out_dtype=torch.float32) -> torch.Tensor:
    """Amid poison: rows apart, results NaN before and between red zones."""
    zones = RedZones(device)
    out = zones.allocate(len(x_MK), weight.shape[0], dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    assert function(amid_poison(x_MK, device), weight_amid(weight, device), bias, out) is out
    zones.check()
    return out.cpu()


def judge(x_MK, weight, bias_N, device, out_dtype=torch.float32, magnitude=10.0) -> None:
    y = run(block_scaled_gemv, x_MK, weight, bias_N, device, out_dtype)
    in_torch = run(block_scaled_gemv_reference, x_MK, weight, bias_N, torch.device("cpu"), out_dtype)
    exact = exact_rows(x_MK, weight.scheme) @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    slack = 1.0 if device.type == "cpu" else HALF_SLACK
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=magnitude * slack)


def ones_on_the_diagonal(size: int) -> QuantizedWeight:
    """A weight that gives every input back, as it is coded."""
    return QuantizedWeight(
        FP8_BLOCK,
        (size, size),
        torch.eye(size).to(torch.float8_e4m3fn),
        torch.ones(FP8_BLOCK.scale_shape((size, size))),
    )


@pytest.mark.each_value
@BLOCK_SCHEMES
@pytest.mark.parametrize(
    ("size_n", "size_k"), [(1, 16), (33, 128), (47, 96), (140, 336), (33, 1024), (19, 1552)], ids=str
)
def test_block_scaled_gemv_is_exact_at_every_size(device, scheme, size_n, size_k):
    """Columns that end within a block, within a load of all threads, and behind several of them."""
    x, weight = codable_rows(1, size_k, block_columns=128), random_weight(size_n, size_k, scheme)
    judge(x, weight, None, device)
    judge(x, weight, random(size_n, seed=5), device)


@pytest.mark.each_pair
@pytest.mark.parametrize("num_warps", [1, 4, 16])
@pytest.mark.parametrize("block_n", [1, 8, 32])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_block_scaled_gemv_is_exact_in_every_form(device, monkeypatch, num_warps, block_n, ahead):
    cut_as(monkeypatch, BlockGemvForm(block_n, num_warps, ahead))
    for size_k in (2048, 2064):
        judge(codable_rows(1, size_k, block_columns=128), random_weight(5, size_k, FP8_BLOCK), None, device)


@DTYPES
def test_block_scaled_gemv_takes_every_dtype(device, dtype):
    x, weight = codable_rows(1, 656, block_columns=128).to(dtype), random_weight(130, 656, FP8_BLOCK)
    judge(x, weight, random(130, seed=5).to(dtype), device, dtype)
    judge(x, weight, None, device)


@DTYPES
def test_block_scaled_gemv_codes_rows_like_quantize_rows(device, dtype):
    """Numbers of all sizes, and blocks in which every one is the largest or none is above zero."""
    sizes = 10.0 ** torch.linspace(-7, 4, 4)[:, None]
    x = torch.cat([random(4, 144) * sizes, random(4, 144, seed=1).exp() ** 3 * sizes])
    x[3, 128:], x[5, :128], x[6] = 0.0, 1.75, 0.0
    x = x.clamp(-6e4, 6e4).to(dtype)
    weight = ones_on_the_diagonal(144)
    expected = dequantize_rows(quantize_rows_reference(x, room_amid(RedZones(torch.device("cpu")), len(x), weight)))
    assert torch.equal(run(block_scaled_gemv, x, weight, None, device), expected)


@pytest.mark.gpu
def test_block_scaled_gemv_codes_every_bfloat16_quotient(device):
    """A block for every amax: its mantissas go through all of theirs, and so do those of the others, down to codes of zero."""
    mantissas = 1 + torch.arange(128) / 128
    below = (mantissas[None, :] * 2.0 ** -torch.arange(20.0)[:, None]).flatten()
    blocks = [
        torch.cat([amax.view(1), some, amax.expand(127 - len(some))])
        for amax in mantissas
        for some in below[below <= amax].split(127)
    ]
    x = torch.cat(blocks)
    x = torch.cat([x, x.new_zeros(-len(x) % 2048)]).view(-1, 2048)
    weight = ones_on_the_diagonal(2048)
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.bfloat16, 3e5), (torch.float16, 1.0), (torch.float16, 1 / 512)):
        rows = (x * scale).to(dtype)
        room = room_amid(RedZones(torch.device("cpu")), len(rows), weight)
        expected = dequantize_rows(quantize_rows_reference(rows, room))
        assert torch.equal(run(block_scaled_gemv, rows, weight, None, device), expected)


def test_block_scaled_gemv_applies_each_block_its_own_scale(device):
    x, weight = codable_rows(1, 656, block_columns=128), random_weight(200, 656, FP8_BLOCK)
    weight.scales.mul_(2.0 ** (torch.arange(weight.scales.numel()) % 5 - 3).view(weight.scales.shape))
    judge(x * 2.0 ** (torch.arange(656) // 128 - 2), weight, None, device, magnitude=100.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_block_scaled_gemv_nonfinite_input_stays_in_its_row(device, bad):
    x, weight = codable_rows(3, 656, block_columns=128), random_weight(33, 656, FP8_BLOCK)
    clean = run(block_scaled_gemv, x, weight, None, device)
    x[1, 140] = bad
    y = run(block_scaled_gemv, x, weight, None, device)
    assert y[1].isnan().all()
    assert same_bits(y[[0, 2]], clean[[0, 2]])


def test_block_scaled_gemv_nonfinite_weight_stays_in_its_rows(device):
    x, weight = codable_rows(1, 656, block_columns=128), random_weight(150, 656, FP8_BLOCK)
    clean = run(block_scaled_gemv, x, weight, None, device)
    weight.codes.view(torch.uint8)[70, 655] = 0x7F
    weight.scales[1, 5] = NAN
    y = run(block_scaled_gemv, x, weight, None, device)
    assert y[0, 70].isnan()
    assert y[0, 128:].isnan().all()
    others = [row for row in range(128) if row != 70]
    assert same_bits(y[0, others], clean[0, others])


def test_block_scaled_gemv_zero_row_is_the_bias(device):
    weight, bias = random_weight(33, 656, FP8_BLOCK), random(33, seed=3)
    assert same_bits(run(block_scaled_gemv, torch.zeros(1, 656), weight, bias, device)[0], bias)


def test_block_scaled_gemv_is_batch_invariant(device):
    x, weight = random(3, 1040), random_weight(40, 1040, FP8_BLOCK)
    whole = run(block_scaled_gemv, x, weight, None, device)
    for row in range(3):
        assert same_bits(run(block_scaled_gemv, x[row : row + 1], weight, None, device)[0], whole[row])


def test_gemv_takes_accepts_one_row_of_aligned_blocks():
    assert [num_rows for num_rows in range(1, 20) if row_form(num_rows)] == [1]
    for shape, taken in (((128, 128), True), ((5, 16), True), ((5, 336), True), ((128, 100), False), ((5, 8), False)):
        assert takes(random_weight(*shape, FP8_BLOCK), 1) == taken
        assert not takes(random_weight(*shape, FP8_BLOCK), 2)
    for scheme in (FP8, INT8, MXFP4):
        assert not takes(random_weight(32, 64, scheme), 1)
    assert not takes(random_weight(32, 64, replace(FP8_BLOCK, block_columns=64)), 1)


def test_gemv_form_gives_warps_columns_and_programs_one_block():
    for shape in (*DEEPSEEK, (36864, 7168), (8192, 1536), (2048, 512), (64, 16), (7168, 512)):
        form = gemv_form(*shape)
        assert form.num_warps * 512 < 2 * max(shape[1], 512), f"{shape}: {form}"
        assert 64 % form.block_n == 0, f"{shape}: {form}"


def test_block_scaled_gemv_refuses_mismatched_shapes(device):
    weight, out = weight_on(random_weight(33, 256, FP8_BLOCK), device), torch.empty(1, 33, device=device)
    with pytest.raises(AssertionError, match=r"weight\.shape"):
        block_scaled_gemv(torch.empty(1, 128, device=device), weight, None, out)
    with pytest.raises(AssertionError, match=r"out_MN\.shape"):
        block_scaled_gemv(torch.empty(1, 256, device=device), weight, None, out[:, :32])
    with pytest.raises(AssertionError, match="columns lie apart"):
        block_scaled_gemv(torch.empty(1, 512, device=device)[:, ::2], weight, None, out)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DEEPSEEK, ids=str)
def test_block_scaled_gemv_bfloat16_is_exact_at_model_sizes(device, shape):
    """Against float32 on the same device, whose sums are near enough beside those of half precision."""
    x = codable_rows(1, shape[1], block_columns=128).bfloat16()
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randn(shape, generator=generator, device=device).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(FP8_BLOCK.scale_shape(shape), generator=generator, device=device) / 100
    weight = QuantizedWeight(FP8_BLOCK, shape, codes, scales)
    out, again, expected = (torch.full((1, shape[0]), NAN, device=device) for _ in range(3))
    block_scaled_gemv(x.to(device), weight, None, out)
    block_scaled_gemv_reference(x.to(device), weight, None, expected)
    assert (out - expected).norm() <= 5e-4 * expected.norm()
    assert (out - expected).abs().max() <= 1.5e-3 * expected.abs().max()
    block_scaled_gemv(x.to(device), weight, None, again)
    assert same_bits(again.cpu(), out.cpu())


@pytest.mark.gpu
def test_block_scaled_gemv_allocates_nothing(device):
    x, weight = random(1, 512).to(device, torch.bfloat16), weight_on(random_weight(256, 512, FP8_BLOCK), device)
    out = torch.empty(1, 256, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: quantized_linear(x, weight, None, out))
    expected = run(block_scaled_gemv_reference, x.cpu(), weight_on(weight, torch.device("cpu")), None, x.device)
    assert (out.float().cpu() - expected).norm() <= 4e-3 * expected.norm()


def test_block_products_asm_sums_sixteen_products():
    """For integers, whose sums are exact in half precision."""
    generator = torch.Generator().manual_seed(0)
    weights, inputs = (torch.randint(-8, 9, (50, 16), generator=generator).float() for _ in range(2))
    codes = np.ascontiguousarray(weights.to(torch.float8_e4m3fn).view(torch.uint8).numpy()).view(np.uint32)
    pairs = np.ascontiguousarray(inputs.half().numpy()).view(np.uint32)
    words = [codes[:, word] for word in range(4)]
    words += [pairs[:, 2 * word + half] for half in range(2) for word in range(4)]
    sums = run_assembler(block_products_asm(), words, 4)
    assert torch.equal(torch.from_numpy(sum(part.view(np.float32) for part in sums)), (weights * inputs).sum(-1))


def test_pairs_asm_codes_two_quotients():
    quotients = torch.tensor([[0.0, 448.0], [-448.0, 460.0], [17.0, 19.0], [2.0**-9, 2.0**-10], [1.06, -3e-3]])
    (pairs,) = run_assembler(PAIRS_ASM_TEXT, [quotients[:, column].contiguous().numpy() for column in range(2)], 1)
    expected = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).float() / 16
    assert torch.equal(torch.from_numpy(pairs.view(np.float16).astype(np.float32)).view(-1, 2), expected)

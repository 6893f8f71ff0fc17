"""GEMV by packed codes: every word decoded, every size as exact as torch, and hostile rows and scales as torch has them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.kernels.gemm import packed_gemv as kernels
from holdfast.kernels.gemm.e2m1 import PAIR_EXPONENT, e2m1_pair_lines
from holdfast.kernels.gemm.linear import quantized_linear
from holdfast.kernels.gemm.packed_gemv import (
    PAIR_ASM,
    PackedGemvForm,
    PackedProduct,
    gemv_form,
    packed_gemv,
    products_asm,
    row_form,
    takes,
)
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E2M1_VALUES, dequantize
from holdfast.quant.weight_schemes import FP8, INT8, MXFP4
from kernels.assembler import run_assembler
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.expert_cases import GPT_OSS, expert_case, judge, run_kernel
from kernels.gemm_references import quantized_linear_reference
from kernels.quantized_cases import HALF_SLACK, exact_weight, random_weight, weight_amid, weight_on
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

BF16 = torch.bfloat16
VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


@pytest.fixture(autouse=True)
def _few_programs_in_the_interpreter(device, monkeypatch):
    """Which takes its time for each."""
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "BLOCK_ROWS", 64)


def run(x_MK, weight, bias_N, device, out_dtype=torch.float32) -> torch.Tensor:
    """Amid poison: rows apart, results NaN before and between red zones."""
    zones = RedZones(device)
    out = zones.allocate(len(x_MK), weight.shape[0], dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    product = PackedProduct(amid_poison(x_MK, device), weight_amid(weight, device), out, bias)
    assert packed_gemv(product) is out
    zones.check()
    return out.cpu()


def judge_rows(x_MK, weight, bias_N, device, out_dtype=torch.float32, magnitude=10.0) -> None:
    y = run(x_MK, weight, bias_N, device, out_dtype)
    in_torch = torch.empty(len(x_MK), weight.shape[0], dtype=out_dtype)
    quantized_linear_reference(x_MK.float(), weight, bias_N, in_torch)
    exact = x_MK.double() @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    slack = HALF_SLACK if device.type == "cuda" and x_MK.dtype == BF16 else 1.0
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=magnitude * slack)


def with_scales(weight: QuantizedWeight, exponent: int) -> QuantizedWeight:
    return replace(weight, scales=torch.full_like(weight.scales, exponent))


def test_products_asm_multiplies_every_code_by_its_input():
    """Integers, so that sums are exact in half precision too."""
    generator = np.random.default_rng(0)
    words = [generator.integers(0, 2**32, 4096, dtype=np.uint32) for _ in range(4)]
    numbers = generator.integers(-8, 9, (4, 8, 4096)).astype(np.float16)
    pairs = [np.stack((numbers[w, p], numbers[w, p + 4]), axis=-1).reshape(-1) for w in range(4) for p in range(4)]
    (found,) = run_assembler(products_asm(e2m1_pair_lines), [*words, *pairs], 1)
    codes = torch.from_numpy(
        np.stack([[word >> np.uint32(4 * i) & 15 for i in range(8)] for word in words]).astype(int)
    )
    expected = (VALUES[codes] * torch.from_numpy(numbers.astype(np.float32))).sum((0, 1)) / 2**PAIR_EXPONENT
    assert torch.equal(torch.from_numpy(found.view(np.float32)), expected)


def test_pair_asm_puts_its_first_number_into_the_low_half():
    low, high = (np.array([value], dtype=np.float32) for value in (1.5, -2.0))
    text = PAIR_ASM if isinstance(PAIR_ASM, str) else PAIR_ASM.value
    found = run_assembler(text, [low, high], 1)[0].view(np.float16)
    assert found.tolist() == [1.5, -2.0]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 32), (3, 64), (17, 96), (33, 1024), (5, 1056), (18, 2880)], ids=str)
def test_packed_gemv_is_exact_at_every_size(device, dtype, sizes):
    """Columns that end within a load of all threads, at its end, and after several of them."""
    size_n, size_k = sizes
    x, weight = random(1, size_k).to(dtype), random_weight(size_n, size_k, MXFP4)
    judge_rows(x, weight, None, device)
    judge_rows(x, weight, random(size_n, seed=5).to(dtype), device)


@pytest.mark.parametrize(
    "form",
    [PackedGemvForm(2, 8, 1), PackedGemvForm(8, 64, 2), PackedGemvForm(32, 32, 4)],
    ids=str,
)
def test_packed_gemv_is_exact_in_every_form(device, monkeypatch, form):
    monkeypatch.setattr(kernels, "gemv_form", lambda size_k, gated: form)
    for size_k in (32, 352, 2880):
        judge_rows(random(2, size_k).to(BF16), random_weight(21, size_k, MXFP4), None, device)


@DTYPES
def test_packed_gemv_stores_every_dtype(device, dtype):
    x, weight = random(1, 640).to(dtype), random_weight(70, 640, MXFP4)
    judge_rows(x, weight, random(70, seed=5).to(dtype), device, dtype)


def test_packed_gemv_decodes_every_byte_in_every_place(device):
    """Rows of ones at one column: each output is the number of a code."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    weight = QuantizedWeight(MXFP4, (256, 32), codes, torch.full((256, 1), 127, dtype=torch.uint8))
    y_KN = run(torch.eye(32).to(BF16), weight, None, device)
    assert torch.equal(y_KN, dequantize(weight).T)


@pytest.mark.parametrize("size", [2.0**-133, 2.0**-126, 1e-20, 1e4, 1e20, 2.0**120], ids=lambda size: f"{size:.0e}")
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_packed_gemv_takes_rows_of_every_size(device, dtype, size):
    x, weight = (random(1, 160).clamp(-4, 4) * size).to(dtype), random_weight(9, 160, MXFP4)
    judge_rows(x, weight, None, device, magnitude=10 * size)


def test_packed_gemv_keeps_small_units_beside_large_ones(device):
    """A factor belongs to 32 columns: those of small ones do not follow from the largest of the row."""
    x = random(1, 96).to(BF16)
    x[:, 32:64] *= 2.0**60
    weight = random_weight(8, 96, MXFP4)
    weight.codes[:, 16:32] = 0
    judge_rows(x, weight, None, device)


@pytest.mark.parametrize("exponent", [0, 1, 127, 253, 254])
def test_packed_gemv_takes_every_exponent(device, exponent):
    """A code of 6 times 2^127 is no float32, but the sum is one."""
    ones = with_scales(random_weight(7, 96, MXFP4), 127)
    weight = with_scales(ones, exponent)
    x = (random(1, 96).clamp(-2, 2) * 2.0 ** min(100, 120 - exponent)).to(BF16)
    exact = (x.double() @ exact_weight(ones).T) * 2.0 ** (exponent - 127)
    slack = HALF_SLACK if device.type == "cuda" else 1.0
    magnitude = 100 * 2.0 ** (exponent - 127 + min(100, 120 - exponent))
    assert_as_exact_as_torch(run(x, weight, None, device), exact.float(), exact, magnitude=magnitude * slack)
    assert torch.equal(run(torch.zeros(1, 96).to(BF16), weight, None, device), torch.zeros(1, 7))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_packed_gemv_keeps_infinity_and_nan_in_their_row(device, dtype, value):
    x, weight = random(3, 96).to(dtype), random_weight(9, 96, MXFP4)
    weight.codes[:, 35] = 0x21  # the last two columns of the third unit would be 94 and 95; these are 70 and 71
    clean = run(x, weight, None, device)
    x[1, 70] = value
    y = run(x, weight, None, device)
    expected = quantized_linear_reference(x.float(), weight, None, torch.empty(3, 9))
    assert torch.equal(y[1].nan_to_num(7.0), expected[1].nan_to_num(7.0))
    assert same_bits(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("form", [GPT_OSS, GPT_OSS._replace(is_interleaved=False)], ids=str)
def test_packed_gemv_experts_of_bfloat16_rows_are_exact(device, form):
    case = expert_case((2, 2, 3, 9, 160), True, "mxfp4", has_bias=True, form=form)
    whole = replace(case, x_XK=case.x_XK.to(BF16).float(), bias_EN=None if case.bias_EN is None else case.bias_EN)
    judge(packed_in_bfloat16, whole, device)


def packed_in_bfloat16(product) -> torch.Tensor:
    """`expert_gemv` of bfloat16 rows with results in float32."""
    x, weight, order, out, gated, _, bias, form = product
    return packed_gemv(PackedProduct(x.to(BF16), weight, out, bias, order.expert_ids_TS, gated, form))


def test_packed_gemv_writes_no_pairs_without_an_expert(device):
    case = expert_case((2, 3, 4, 6, 64), True, "mxfp4")
    whole = run_kernel(packed_in_bfloat16, case, device)
    case.expert_ids_TS[0, 1] = case.expert_ids_TS[1, 2] = -1
    y = run_kernel(packed_in_bfloat16, case, device)
    own = (case.expert_ids_TS.flatten() >= 0).nonzero().flatten()
    assert same_bits(y[own], whole[own])
    assert y[[1, 5]].isnan().all()


def test_packed_gemv_row_is_batch_invariant(device):
    x, weight = random(3, 352).to(BF16), random_weight(40, 352, MXFP4)
    whole = run(x, weight, None, device)
    for row in range(3):
        assert same_bits(run(x[row : row + 1], weight, None, device)[0], whole[row])


def test_takes_follows_scheme_and_rows():
    weight = random_weight(8, 64, MXFP4)
    assert [takes(weight, num_rows) for num_rows in (1, 2)] == [True, False]
    assert not any(takes(random_weight(8, 64, scheme), 1) for scheme in (FP8, INT8))
    assert not takes(expert_case((1, 1, 2, 2, 64), scheme="mxfp4").weight, 1)
    assert row_form(1) != row_form(2) == row_form(300)


def test_gemv_form_follows_the_columns():
    """gpt-oss and dense models of 5,120 columns fill one warp at a time, DeepSeek-V4 two or four; gates of gpt-oss pad to four."""
    sizes = (32, 2048, 2880, 4096, 5120, 8192, 25600)
    found = {size_k: tuple(gemv_form(size_k, gated).num_warps for gated in (False, True)) for size_k in sizes}
    assert found == {32: (1, 1), 2048: (2, 2), 2880: (1, 4), 4096: (4, 4), 5120: (1, 2), 8192: (4, 4), 25600: (4, 4)}
    for size_k in range(32, 30000, 32):
        for gated in (False, True):
            form = gemv_form(size_k, gated)
            assert form.units == 32 * form.num_warps or size_k < 1024
            assert form.units // 2 < size_k / 32 or form.units == 32


@pytest.mark.gpu
def test_packed_gemv_rounds_little_more_than_its_output(device):
    """Root mean square errors: half-precision sums add at most a fifth to bfloat16 outputs."""
    for size_n, size_k in ((512, 2880), (256, 8192)):
        x, weight = random(1, size_k).to(BF16), random_weight(size_n, size_k, MXFP4)
        exact = x.double() @ exact_weight(weight).T
        y = run(x, weight, None, device, BF16)
        rounded = exact.to(BF16)
        errors = [(values.double() - exact).square().mean().sqrt().item() for values in (y, rounded)]
        assert errors[0] <= 1.2 * errors[1]


@pytest.mark.gpu
def test_quantized_linear_of_one_row_allocates_nothing(device):
    weight = weight_on(random_weight(256, 320, MXFP4), device)
    x, out = torch.ones(1, 320, dtype=BF16, device=device), torch.empty(1, 256, dtype=BF16, device=device)
    assert_allocates_nothing(lambda: quantized_linear(x, weight, None, out))

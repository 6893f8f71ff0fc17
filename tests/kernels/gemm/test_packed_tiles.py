"""Packed tiles: the assembler decodes every code exactly, and products are as exact as torch in hostile shapes on Hopper."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.gemm import packed_tiles
from holdfast.kernels.gemm.e2m1 import e2m1_pairs_asm
from holdfast.kernels.gemm.packed_tiles import (
    LARGEST_EXPONENT,
    packed_tile,
    packed_tile_kernel,
    takes_packed_tiles,
)
from holdfast.kernels.moe.grouped_gemm import grouped_gemm
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.quant.quantized_weight import QuantizedWeight
from kernels.exactness import same_bits
from kernels.expert_cases import (
    DEEPSEEK_V4,
    FORMS,
    GPT_OSS,
    ExpertCase,
    exact,
    expert_case,
    judge,
    order_of,
    run_kernel,
)
from kernels.triton_cases import QUIET

pytestmark = QUIET

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
BF16 = torch.bfloat16
ROWS = pytest.mark.parametrize("num_rows", [5, 8, 9, 16, 17, 40, 200, 700])
"""Unsorted with at most 8 rows of an expert and with more, sorted in blocks of 16, 32, 64 and 128."""


def run_assembler(first: int, second: int, factor: int) -> list[int]:
    """Run `e2m1_pairs_asm` on two words; return its eight registers."""
    values = {"$8": first, "$9": second, "$10": factor}
    for line in e2m1_pairs_asm().strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        operation, out, *operands = re.findall(r"[$\w.]+", line)
        left, right = (values[name] if name in values else int(name, 0) for name in operands)
        if operation == "and.b32":
            values[out] = left & right
        elif operation == "shr.u32":
            values[out] = left >> right
        elif operation == "mul.lo.u32":
            values[out] = left * right & 0xFFFFFFFF
        else:
            assert operation == "mul.rn.bf16x2"
            halves = [number_of(left >> shift) * number_of(right >> shift) for shift in (0, 16)]
            values[out] = sum(bits_of(half) << shift for half, shift in zip(halves, (0, 16), strict=True))
    return [values[f"${register}"] for register in range(8)]


def number_of(bits: int) -> float:
    word = (bits & 0xFFFF) << 16
    return float(torch.tensor(word - (word >> 31 << 32), dtype=torch.int32).view(torch.float32))


def bits_of(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).to(BF16).view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize("exponent", [0, 1, 61, 118, 127, LARGEST_EXPONENT])
def test_e2m1_pairs_asm_decodes_every_code(exponent):
    factor = (exponent + 66 << 7) * 0x10001
    for code in range(16):
        first = sum((code + nibble & 15) << 4 * nibble for nibble in range(8))
        second = sum((code - nibble & 15) << 4 * nibble for nibble in range(8))
        pairs = run_assembler(first, second, factor)
        for register, pair in enumerate(pairs):
            word, nibble = (first, second)[register // 4], register % 4
            for half in range(2):
                expected = NUMBERS[word >> 4 * (nibble + 4 * half) & 15] * 2.0 ** (exponent - 127 - 60)
                assert pair >> 16 * half & 0xFFFF == bits_of(float(expected)), f"{code=} {register=} {half=}"


def test_packed_tile_fills_instructions():
    for block_rows in (16, 32, 64, 128):
        tile = packed_tile(block_rows)
        assert tile.num_stages >= 3, "the last steps rely on it"
        assert tile.block_n % (16 * tile.num_warps) == 0


def test_takes_packed_tiles_declines_a_host():
    case = expert_case((5, 1, 2, 6, 64), True, "mxfp4", BF16)
    assert not takes_packed_tiles(case.x_XK, case.weight)


@pytest.mark.parametrize(("num_rows", "tile_rows"), [(8, 128), (200, 256)])
def test_packed_product_gives_every_argument(monkeypatch, num_rows, tile_rows):
    """Without a GPU: unsorted pairs in one block of 16 for each, and sorted ones in blocks of 128."""
    names = list(inspect.signature(getattr(packed_tile_kernel, "fn", packed_tile_kernel)).parameters)
    launches = []

    class Recorder:
        def __class_getitem__(cls, grid):
            return lambda *given, **named: launches.append((grid, dict(zip(names, given, strict=False)) | named))

    monkeypatch.setattr(packed_tiles, "packed_tile_kernel", Recorder)
    monkeypatch.setattr("holdfast.kernels.moe.grouped_gemm.takes_packed_tiles", lambda x, weight: True)
    case = expert_case((num_rows, 2, 3, 300, 160), True, "mxfp4", BF16, has_bias=True, form=GPT_OSS)
    order, out = order_of(case), torch.empty(2 * num_rows, 300, dtype=BF16)
    grouped_gemm(ExpertProduct(case.x_XK, case.weight, order, out, True, None, case.bias_EN, case.form))
    ((grid, given),) = launches
    assert grid == (-(-300 // (tile_rows // 2)), order.num_blocks)
    assert given["p_codes"].dtype == torch.int32
    blocks = (order.pairs_BR, order.block_experts_B) if order.is_sorted else (order.expert_ids_TS, order.expert_ids_TS)
    tensors = (case.x_XK, case.weight.codes, case.weight.scales, case.bias_EN, *blocks, out)
    names = ("p_x", "p_codes", "p_scales", "p_bias", "p_pairs", "p_experts", "p_out")
    assert [given[name].data_ptr() for name in names] == [tensor.data_ptr() for tensor in tensors]
    expected = {
        "num_rows": num_rows, "size_n": 300, "SIZE_K": 160, "GATED": True, "INTERLEAVED": True, "LIMIT": GPT_OSS.limit,
        "IS_SCALED": True, "HAS_BIAS": True, "IS_SORTED": order.is_sorted, "TOP_K": 2,
        "PAIRS_PER_ROW": 2, "BLOCK_M": order.block_rows, "BLOCK_N": tile_rows, "FEW": num_rows == 8,
    }  # fmt: skip
    assert expected.items() <= given.items()


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packed_tiles_are_exact_in_every_gate_form(device, num_rows, form):
    judge(grouped_gemm, expert_case((num_rows, 2, 3, 70, 256), True, "mxfp4", BF16, has_bias=True, form=form), device)


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize("size_k", [32, 64, 96, 128, 160, 224, 256, 288, 384, 416, 544, 2880])
def test_packed_tiles_are_exact_for_odd_sizes(device, num_rows, size_k):
    for size_n in (1, 9, 130):
        judge(grouped_gemm, expert_case((num_rows, 2, 3, size_n, size_k), False, "mxfp4", BF16, by_pair=True), device)
    judge(grouped_gemm, expert_case((num_rows, 2, 3, 33, size_k), True, "mxfp4", BF16, form=DEEPSEEK_V4), device)


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize("choice", ["same", "some", "twice"])
def test_packed_tiles_are_exact_for_uneven_experts(device, num_rows, choice):
    for by_pair in (False, True):
        case = expert_case((num_rows, 4, 30, 40, 320), not by_pair, "mxfp4", BF16, by_pair, choice)
        judge(grouped_gemm, case, device)


@pytest.mark.gpu
@ROWS
def test_packed_tiles_nan_and_inf_stay_in_their_row(device, num_rows):
    """The first row too, which stands in for rows of padding."""
    case = expert_case((num_rows, 1, 2, 40, 288), True, "mxfp4", BF16, form=GPT_OSS)
    clean = run_kernel(grouped_gemm, case, device)
    for row, bad in ((0, float("nan")), (num_rows - 1, float("inf"))):
        x = case.x_XK.clone()
        case.x_XK[row, 287] = bad
        y = run_kernel(grouped_gemm, case, device)
        case.x_XK.copy_(x)
        others = [other for other in range(num_rows) if other != row]
        assert not same_bits(y[row], clean[row])
        assert same_bits(y[others], clean[others])


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize("exponents", [(0, 1), (0, 127), (60, 61), (180, LARGEST_EXPONENT)], ids=str)
def test_packed_tiles_are_exact_for_extreme_exponents(device, num_rows, exponents):
    case = with_exponents(expert_case((num_rows, 2, 3, 20, 416), False, "mxfp4", BF16, by_pair=True), exponents)
    y, expected = run_kernel(grouped_gemm, case, device), exact(case)
    least = 2.0**-66  # below this, weights round
    assert ((y.double() - expected).abs() <= 2**-7 * expected.abs().max() + 416 * least).all()


def with_exponents(case: ExpertCase, exponents: tuple[int, int]) -> ExpertCase:
    """Give every group one of two exponents."""
    assert isinstance(case.weight, QuantizedWeight)
    picked = torch.randint(2, case.weight.scales.shape, generator=torch.Generator().manual_seed(5))
    return replace(case, weight=replace(case.weight, scales=torch.tensor(exponents, dtype=torch.uint8)[picked]))


@pytest.mark.gpu
def test_packed_tiles_few_rows_have_the_same_bits_in_any_block(device):
    """At most 8 rows of an expert, more than 8, sorted and not."""
    case = expert_case((24, 2, 8, 80, 416), True, "mxfp4", BF16, choice="same")
    whole = run_kernel(grouped_gemm, case, device).view(24, 2, -1)
    for rows in (list(range(16)), list(range(5)), [7, 3, 20, 11, 0, 23]):
        assert same_bits(run_kernel(grouped_gemm, case.rows(rows), device).view(len(rows), 2, -1), whole[rows])

"""GEMVs of experts: as exact as torch for every scheme, in odd sizes, and a row the same in any company."""

import pytest
import torch

from holdfast.kernels.geometry import MAX_DIRECT_TOKENS
from holdfast.kernels.moe.deep_gemv import MAX_DEPTH, column_blocks, gemv_blocks, takes_deep_loads
from holdfast.kernels.moe.expert_gemv import expert_gemv
from holdfast.kernels.moe.routing import ExpertProduct
from kernels.exactness import same_bits
from kernels.expert_cases import DEEPSEEK_V4, FORMS, GPT_OSS, SCHEMES, expert_case, judge, run_kernel
from kernels.quantized_cases import HALF_SLACK
from kernels.triton_cases import QUIET, assert_allocates_nothing

pytestmark = QUIET

HALF = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


@pytest.mark.each_value
@EVERY_SCHEME
@GATED
def test_expert_gemv_is_exact_for_odd_sizes(device, scheme, gated):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(expert_gemv, expert_case((2, 2, 3, 9, size_k), gated, scheme), device)


@pytest.mark.each_value
@EVERY_SCHEME
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_expert_gemv_gated_adds_bias_in_every_gate_form(device, scheme, form):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(expert_gemv, expert_case((2, 2, 3, 9, size_k), True, scheme, has_bias=True, form=form), device)


@EVERY_SCHEME
def test_expert_gemv_ungated_adds_bias(device, scheme):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(
        expert_gemv, expert_case((2, 2, 3, 9, size_k), False, scheme, by_pair=True, has_bias=True, form=GPT_OSS), device
    )


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_expert_gemv_half_precision_by_pair_is_exact(device, scheme, dtype):
    judge(expert_gemv, expert_case((1, 3, 5, 16, 256), True, scheme, dtype, by_pair=True), device)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2, 32), (MAX_DIRECT_TOKENS, 1, 1, 5, 64), (1, 8, 60, 3, 96)], ids=str)
def test_expert_gemv_is_exact_for_few_and_many_experts(device, sizes):
    for choice in ("any", "same", "some"):
        judge(expert_gemv, expert_case(sizes, scheme="mxfp4", choice=choice), device)
    judge(expert_gemv, expert_case(sizes, gated=True), device)


@pytest.mark.parametrize("size_k", [1024, 1536, 2176], ids=lambda size: f"K{size}")
@pytest.mark.parametrize("scheme", [None, "fp8_block", "mxfp4"], ids=str)
def test_expert_gemv_long_rows_are_exact(device, size_k, scheme):
    judge(expert_gemv, expert_case((1, 1, 2, 4, size_k), True, scheme), device)


def test_expert_gemv_applies_scales_of_row_blocks(device):
    """Blocks of 128, 64 and 2 rows: a program stays within one of them."""
    for size_n in (128, 64, 6):
        judge(expert_gemv, expert_case((1, 1, 2, size_n, 130), size_n < 128, "fp8_block"), device)
        judge(expert_gemv, expert_case((1, 1, 2, size_n, 130), True, "fp8_block", form=GPT_OSS), device)


@pytest.mark.parametrize("scheme", [None, "fp8_block", "mxfp4"], ids=str)
def test_expert_gemv_is_exact_at_gpt_oss_width(device, scheme):
    """A ninth of 2880 rows, and all of its columns: 90 groups of 32, in blocks that the last one does not fill."""
    judge(expert_gemv, expert_case((1, 1, 2, 32, 2880), True, scheme, has_bias=True, form=GPT_OSS), device)


def test_expert_gemv_token_with_repeated_expert_is_exact(device):
    for scheme in (None, "mxfp4"):
        judge(expert_gemv, expert_case((3, 4, 3, 6, 64), True, scheme, choice="twice"), device)


@pytest.mark.parametrize("form", [GPT_OSS, DEEPSEEK_V4], ids=str)
def test_expert_gemv_nan_passes_the_clamp(device, form):
    case = expert_case((3, 1, 2, 5, 64), True, has_bias=True, form=form)
    clean = run_kernel(expert_gemv, case, device)
    case.x_XK[1, 63] = float("nan")
    y = run_kernel(expert_gemv, case, device)
    assert y[1].isnan().all()
    assert same_bits(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("scheme", [None, "fp8", "mxfp4"], ids=str)
def test_expert_gemv_is_batch_invariant(device, scheme):
    case = expert_case((3, 2, 4, 5, 64), True, scheme)
    whole = run_kernel(expert_gemv, case, device).view(3, 2, -1)
    for rows in ([0], [2], [2, 1]):
        assert same_bits(run_kernel(expert_gemv, case.rows(rows), device).view(len(rows), 2, -1), whole[rows])


@EVERY_SCHEME
def test_expert_gemv_without_rows_is_empty(device, scheme):
    assert run_kernel(expert_gemv, expert_case((2, 2, 3, 9, 64), True, scheme).rows([]), device).shape == (0, 9)


def test_expert_gemv_nan_stays_in_its_row(device):
    case = expert_case((3, 1, 2, 5, 64))
    clean = run_kernel(expert_gemv, case, device)
    case.x_XK[1, 63] = float("nan")
    y = run_kernel(expert_gemv, case, device)
    assert y[1].isnan().all()
    assert same_bits(y[[0, 2]], clean[[0, 2]])


def test_column_blocks_cover_every_width():
    for size_k in range(1, 5121, 7):
        block_k, depth = column_blocks(size_k)
        assert depth <= MAX_DEPTH
        assert block_k * (depth - 1) < size_k <= block_k * depth
    assert column_blocks(768) == (256, 3)
    assert column_blocks(2048) == (512, 4)


def test_gemv_blocks_outputs_of_a_program_are_known():
    """As measured: four of Qwen3-30B-A3B's gates with their ups, sixteen of its outputs, and never none."""
    assert gemv_blocks(2048, True, 1)[0] == 4
    assert gemv_blocks(768, False, 1)[0] == 16
    assert all(gemv_blocks(size_k, True, 2)[0] >= 1 for size_k in range(1, 5121, 100))


def test_takes_deep_loads_follows_scheme_and_width():
    for scheme, is_taken in ((None, True), ("fp8", True), ("int8", True), ("fp8_block", False), ("mxfp4", False)):
        assert takes_deep_loads(expert_case((1, 1, 2, 2, 64), scheme=scheme).weight) == is_taken, scheme
    assert not takes_deep_loads(torch.empty(1, 2, 5121))


def test_expert_gemv_rows_beyond_one_load_are_exact(device):
    judge(expert_gemv, expert_case((1, 1, 2, 2, 5152), True), device)


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", [None, "fp8", "int8"], ids=str)
@pytest.mark.parametrize("size_k", [768, 1408, 2880], ids=lambda size: f"K{size}")
def test_expert_gemv_rows_in_several_loads_are_exact(device, size_k, scheme):
    """Whose products are added in half precision, where they are of codes."""
    gated = expert_case((2, 2, 3, 5, size_k), True, scheme, has_bias=True, form=GPT_OSS)
    judge(expert_gemv, gated, device, HALF_SLACK)
    judge(expert_gemv, expert_case((2, 2, 3, 21, size_k), False, scheme, by_pair=True), device, HALF_SLACK)


@pytest.mark.gpu
@EVERY_SCHEME
def test_expert_gemv_bfloat16_is_exact_at_model_sizes(device, scheme):
    for sizes, gated in (((1, 8, 16, 768, 2048), True), ((4, 8, 16, 2048, 768), False), ((2, 4, 8, 2048, 1408), False)):
        judge(expert_gemv, expert_case(sizes, gated, scheme, torch.bfloat16, by_pair=not gated), device)
    gpt_oss = expert_case((1, 4, 8, 180, 2880), True, scheme, torch.bfloat16, has_bias=True, form=GPT_OSS)
    judge(expert_gemv, gpt_oss, device)


@pytest.mark.gpu
def test_expert_gemv_allocates_nothing(device):
    from kernels.expert_cases import order_of, placed

    case = placed(expert_case((1, 2, 4, 64, 256), dtype=torch.bfloat16), device)
    order, out = order_of(case), torch.empty(2, 64, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: expert_gemv(ExpertProduct(case.x_XK, case.weight, order, out, False)))

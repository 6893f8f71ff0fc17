"""Grouped GEMM over experts: as exact as torch for every scheme and height of blocks, and a row the same in any company."""

import pytest
import torch

from holdfast.kernels.activation import SILU_HALVES
from holdfast.kernels.gemm.quantized_tiles import OperandKind
from holdfast.kernels.geometry import expert_block_rows
from holdfast.kernels.moe.grouped_gemm import grouped_gemm, tile_for
from holdfast.kernels.moe.routing import ExpertProduct
from kernels.exactness import same_bits
from kernels.expert_cases import DEEPSEEK_V4, FORMS, GPT_OSS, SCHEMES, expert_case, judge, run_kernel
from kernels.triton_cases import QUIET, assert_allocates_nothing

pytestmark = QUIET

HALF = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


@pytest.mark.each_value
@EVERY_SCHEME
@GATED
def test_grouped_gemm_is_exact_for_odd_sizes(device, scheme, gated):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(grouped_gemm, expert_case((6, 2, 3, 9, size_k), gated, scheme), device)


@pytest.mark.each_value
@EVERY_SCHEME
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_grouped_gemm_gated_adds_bias_in_every_gate_form(device, scheme, form):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(grouped_gemm, expert_case((6, 2, 3, 9, size_k), True, scheme, has_bias=True, form=form), device)


@EVERY_SCHEME
def test_grouped_gemm_ungated_adds_bias(device, scheme):
    size_k = 160 if scheme == "mxfp4" else 200
    judge(
        grouped_gemm,
        expert_case((6, 2, 3, 9, size_k), False, scheme, by_pair=True, has_bias=True, form=GPT_OSS),
        device,
    )


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_grouped_gemm_half_precision_by_pair_is_exact(device, scheme, dtype):
    judge(grouped_gemm, expert_case((17, 3, 5, 70, 256), True, scheme, dtype, by_pair=True), device)


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "block_rows"),
    [(5, 1, 1, 16), (17, 8, 60, 16), (17, 2, 3, 32), (100, 2, 3, 64), (100, 1, 1, 128)],
)
def test_grouped_gemm_is_exact_for_every_block_height(device, num_rows, top_k, num_experts, block_rows):
    assert expert_block_rows(num_rows, top_k, num_experts) == block_rows
    for scheme in (None, "fp8"):
        judge(grouped_gemm, expert_case((num_rows, top_k, num_experts, 5, 48), True, scheme, choice="some"), device)


@pytest.mark.parametrize("num_rows", [5, 16, 17, 40])
@pytest.mark.parametrize("scheme", [None, "mxfp4"], ids=str)
def test_grouped_gemm_token_with_repeated_expert_is_exact(device, num_rows, scheme):
    """As a table may; sorted and not, with a row of its own for each pair, as what experts give is multiplied again."""
    for by_pair in (False, True):
        case = expert_case((num_rows, 4, 3, 6, 64), not by_pair, scheme, choice="twice", by_pair=by_pair)
        judge(grouped_gemm, case, device)


@pytest.mark.parametrize("scheme", [None, "int8"], ids=str)
def test_grouped_gemm_all_rows_to_one_expert_is_exact(device, scheme):
    judge(grouped_gemm, expert_case((40, 1, 12, 7, 40), False, scheme, choice="same"), device)


def test_grouped_gemm_applies_scales_of_row_blocks(device):
    """Blocks of 128, 64 and 2 rows: tiles within one of them, and over many."""
    for size_n in (128, 64, 6):
        judge(grouped_gemm, expert_case((5, 1, 2, size_n, 130), size_n < 128, "fp8_block", torch.float16), device)
        interleaved = expert_case((5, 1, 2, size_n, 130), True, "fp8_block", torch.float16, form=GPT_OSS)
        judge(grouped_gemm, interleaved, device)


@EVERY_SCHEME
def test_grouped_gemm_is_batch_invariant(device, scheme):
    """So many rows that blocks are as high, in another order, and among others."""
    case = expert_case((9, 2, 4, 5, 64), True, scheme, torch.float16)
    whole = run_kernel(grouped_gemm, case, device).view(9, 2, -1)
    for rows in ([8, 7, 6, 5, 4, 3, 2, 1, 0], [1, 3, 5, 7, 8]):
        assert same_bits(run_kernel(grouped_gemm, case.rows(rows), device).view(len(rows), 2, -1), whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "form"), [((768, 2048), SILU_HALVES), ((360, 2880), GPT_OSS), ((1408, 2048), SILU_HALVES)], ids=str
)
@GATED
def test_grouped_gemm_block_height_changes_no_bit(dtype, sizes, form, gated):
    """Which batch_invariant relies on: the heights follow from the number of rows (the interpreter's sums are numpy's)."""
    has_bias = form == GPT_OSS
    case = expert_case((512, 2, 8, *sizes), gated, None, dtype, by_pair=not gated, has_bias=has_bias, form=form)
    heights, device = {16: 16, 24: 16, 64: 32, 256: 64, 512: 128}, torch.device("cuda")
    first_TSN = run_kernel(grouped_gemm, case.rows(list(range(16))), device).view(16, 2, -1)
    for num_rows, block_rows in heights.items():
        assert expert_block_rows(num_rows, 2, 8) == block_rows
        y_TSN = run_kernel(grouped_gemm, case.rows(list(range(num_rows))), device).view(num_rows, 2, -1)
        assert same_bits(y_TSN[:16], first_TSN), f"{num_rows} rows, in blocks of {block_rows}"


@EVERY_SCHEME
def test_grouped_gemm_without_rows_is_empty(device, scheme):
    assert run_kernel(grouped_gemm, expert_case((6, 2, 3, 9, 64), True, scheme).rows([]), device).shape == (0, 9)


def test_grouped_gemm_nan_stays_in_its_row(device):
    """The first row too, which stands in for rows of padding."""
    case = expert_case((6, 1, 2, 5, 64))
    clean = run_kernel(grouped_gemm, case, device)
    for row in (0, 3):
        x = case.x_XK.clone()
        case.x_XK[row, 63] = float("nan")
        y = run_kernel(grouped_gemm, case, device)
        case.x_XK.copy_(x)
        others = [other for other in range(6) if other != row]
        assert y[row].isnan().all()
        assert same_bits(y[others], clean[others])


@pytest.mark.parametrize("scheme", [None, "mxfp4"], ids=str)
def test_grouped_gemm_is_exact_at_gpt_oss_width(device, scheme):
    judge(grouped_gemm, expert_case((5, 1, 2, 30, 2880), True, scheme, has_bias=True, form=GPT_OSS), device)


def test_grouped_gemm_mxfp4_rows_of_half_blocks_are_exact(device):
    """Rows that 64 inputs divide and 128 do not."""
    for size_k in (64, 192):
        judge(grouped_gemm, expert_case((5, 2, 3, 9, size_k), True, "mxfp4", torch.float16, form=GPT_OSS), device)


@pytest.mark.parametrize("form", [GPT_OSS, DEEPSEEK_V4], ids=str)
def test_grouped_gemm_nan_passes_the_clamp(device, form):
    case = expert_case((6, 1, 2, 5, 64), True, has_bias=True, form=form)
    clean = run_kernel(grouped_gemm, case, device)
    case.x_XK[3, 63] = float("nan")
    y = run_kernel(grouped_gemm, case, device)
    assert y[3].isnan().all()
    assert same_bits(y[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def test_tile_for_keeps_whole_scale_blocks():
    for kind in OperandKind:
        for block_rows in (16, 32, 64, 128):
            for gated in (False, True):
                tile = tile_for(
                    block_rows, gated, kind, 1 if kind in (OperandKind.FP8_ROWS, OperandKind.FP8_BLOCKS) else 2
                )
                assert kind != OperandKind.FP8_BLOCKS or tile.block_k == 128
                assert tile.block_k % 32 == 0
                assert tile.block_n >= 64, "less does not fill an instruction"


@pytest.mark.gpu
@EVERY_SCHEME
@pytest.mark.parametrize("num_rows", [8, 40, 120, 700])
def test_grouped_gemm_bfloat16_is_exact_at_model_sizes(device, scheme, num_rows):
    for sizes, gated in (((8, 8, 16, 768, 2048), True), ((8, 8, 16, 2048, 768), False), ((8, 4, 8, 2048, 1408), False)):
        sizes = (num_rows, *sizes[1:])
        judge(grouped_gemm, expert_case(sizes, gated, scheme, torch.bfloat16, by_pair=not gated), device)
    gpt_oss = expert_case((num_rows, 4, 8, 180, 2880), True, scheme, torch.bfloat16, has_bias=True, form=GPT_OSS)
    judge(grouped_gemm, gpt_oss, device)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "mxfp4"], ids=str)
def test_grouped_gemm_bfloat16_block_height_changes_no_bit(device, scheme):
    """Packed tiles take other instructions for few rows (kernels/gemm/packed_tiles.py)."""
    case = expert_case((700, 2, 4, 256, 1024), True, scheme, torch.bfloat16)
    whole = run_kernel(grouped_gemm, case, device).view(700, 2, -1)
    for count in (5, 30, 100):
        rows = list(range(count))
        assert same_bits(run_kernel(grouped_gemm, case.rows(rows), device).view(count, 2, -1), whole[rows]), f"{count=}"


@pytest.mark.gpu
def test_grouped_gemm_allocates_nothing(device):
    from kernels.expert_cases import order_of, placed

    case = placed(expert_case((9, 2, 4, 64, 256), dtype=torch.bfloat16), device)
    order, out = order_of(case), torch.empty(18, 64, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: grouped_gemm(ExpertProduct(case.x_XK, case.weight, order, out, False)))

"""Down of one token's experts: as exact as torch for every scheme, in odd sizes, amid poison; and the sum that goes on to the residual."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.deferred_rms_norm import AmaxScratch, NormedRows, ResidualStream, SmallBatchScratch
from holdfast.kernels.gemm.quantized_tiles import OperandKind
from holdfast.kernels.geometry import GEMV_MIN_BLOCK_N
from holdfast.kernels.moe.expert_row import down_blocks, down_row_add, down_row_add_reference, down_row_add_triton
from holdfast.quant.quantized_weight import QuantizedWeight
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.expert_cases import CPU, ExpertCase, among, exact, expert_case, placed
from kernels.quantized_cases import HALF_SLACK, codable_rows, slack
from kernels.small_batch_cases import EPS
from kernels.tiled_cases import NAN
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

# A block of which all is NaN is right where a row is.
pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

SCHEMES = (None, "fp8", "fp8_tensor", "int8")
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SIZES = [(1, 1, 2, 3), (8, 8, 5, 40), (3, 7, 9, 200), (8, 9, 4, 768), (2, 5, 6, 1024), (4, 5, 6, 1280), (2, 3, 3, 1408)]
"""(S, E, N, K): one expert, all of them, three of seven; columns that fill their blocks and that do not."""
EACH_SIZE = pytest.mark.parametrize("sizes", SIZES, ids=str)


def less(device, case: ExpertCase) -> float:
    """How much less exact a product of codes may be: some sums of the kernels are in half precision."""
    if isinstance(case.weight, QuantizedWeight) and case.weight.scheme.quantizes_activations:
        return max(slack(device, case.weight.scheme), HALF_SLACK)
    return 1.0


class DownCase:
    """What goes into the second product of one token."""

    def __init__(self, case: ExpertCase, shares_1S, x_1N, norm_N) -> None:
        self.case, self.shares_1S, self.x_1N, self.norm_N = case, shares_1S, x_1N, norm_N


def down_case(sizes, scheme=None, dtype=torch.float32, has_bias=False, seed=0) -> DownCase:
    case = expert_case((1, *sizes), False, scheme, dtype, by_pair=True, has_bias=has_bias, seed=seed)
    if isinstance(case.weight, QuantizedWeight) and case.weight.scheme.quantizes_activations:
        case.x_XK.copy_(codable_rows(*case.x_XK.shape, seed=seed).to(dtype))
    top_k, size_n = sizes[0], sizes[2]
    shares = random(1, top_k, seed=seed + 5).softmax(-1)
    return DownCase(
        case,
        shares,
        random(1, size_n, seed=seed + 6).to(dtype),
        (1 + 0.3 * random(size_n, seed=seed + 7)).to(dtype),
    )


def run_down(down: DownCase, device, function=down_row_add_triton, has_amax=True):
    """x, scaled rows, squares and amax, each NaN before."""
    case, zones = placed(down.case, device), RedZones(device)
    size_n = down.x_1N.shape[1]
    x = zones.allocate(1, size_n, dtype=down.x_1N.dtype).copy_(down.x_1N)
    scaled = zones.allocate(1, size_n, dtype=down.x_1N.dtype).fill_(NAN)
    squares, amax = (zones.allocate(size_n).fill_(NAN) for _ in range(2))
    empty = zones.allocate(0, dtype=torch.int32)
    scratch = SmallBatchScratch(squares, squares, empty, AmaxScratch(amax, amax, empty) if has_amax else None)
    rows = function(
        case.x_XK,
        case.weight,
        case.expert_ids_TS,
        among(down.shares_1S, device),
        case.bias_EN,
        ResidualStream(x, among(down.norm_N, device), EPS, scaled, scratch),
    )
    zones.check()
    assert rows == NormedRows(scaled, rows.num_squares, EPS)
    return x.cpu(), scaled.cpu(), squares.cpu()[: rows.num_squares], amax.cpu()[: rows.num_squares]


def exact_sum(down: DownCase) -> torch.Tensor:
    """In float64, from the numbers that codes stand for."""
    y_SN = exact(down.case)
    return (down.shares_1S.double() @ y_SN) + down.x_1N.double()


def judge_down(down: DownCase, device) -> None:
    x, scaled, squares, amax = run_down(down, device)
    expected, *_ = run_down(down, CPU, down_row_add_reference)
    assert x.isfinite().all(), "an element was not written, or read what lies outside"
    assert_as_exact_as_torch(x, expected, exact_sum(down), magnitude=10.0 * less(device, down.case))
    assert same_bits(scaled, (x.float() * down.norm_N.float()).to(x.dtype))
    torch.testing.assert_close(squares.sum(), x.float().square().sum(), rtol=1e-5, atol=1e-6)
    assert amax.max() == scaled.float().abs().max()
    without = run_down(down, device, has_amax=False)
    assert same_bits(without[0], x)
    assert without[3].isnan().all(), "unrequested amax are written"


@EACH_SIZE
def test_down_row_add_is_exact_for_codes_and_numbers(device, sizes):
    """Codes and numbers, with one to five loads of a row: what is added, and the largest number, may lie in any of them."""
    for scheme in (None, "fp8"):
        judge_down(down_case(sizes, scheme), device)


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_down_row_add_half_precision_is_exact(device, scheme, dtype):
    judge_down(down_case((3, 5, 9, 256), scheme, dtype, has_bias=True), device)


@EVERY_SCHEME
def test_down_row_add_weighs_biases_by_shares(device, scheme):
    judge_down(down_case((3, 5, 9, 200), scheme, has_bias=True), device)


@hypothesis_settings(max_examples=8)
@given(
    top_k=st.integers(1, 9),
    more=st.integers(0, 20),
    size_n=st.integers(1, 40),
    size_k=st.integers(2, 700),
    scheme=st.sampled_from(SCHEMES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_down_row_add_is_exact_at_any_size(device, top_k, more, size_n, size_k, scheme, has_bias, seed):
    sizes = top_k, top_k + more, size_n, size_k
    judge_down(down_case(sizes, scheme, has_bias=has_bias, seed=seed), device)


@EVERY_SCHEME
def test_down_row_add_on_cpu_uses_reference(scheme):
    down = down_case((3, 5, 9, 200), scheme, has_bias=True)
    for mine, theirs in zip(
        run_down(down, CPU, down_row_add), run_down(down, CPU, down_row_add_reference), strict=True
    ):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_down_row_add_nonfinite_expert_is_visible(device, bad):
    for scheme in (None, "fp8", "int8"):
        down = down_case((2, 3, 5, 64), scheme)
        down.case.x_XK[1, 63] = bad
        x, *_ = run_down(down, device)
        assert not x.isfinite().any()


def test_down_row_add_experts_of_any_scale_are_exact(device):
    """Each expert's row has a scale of its own."""
    down = down_case((3, 5, 9, 200), "fp8")
    down.case.x_XK.mul_(torch.tensor([[1e4], [1.0], [1e-4]]))
    down.shares_1S.copy_(torch.tensor([[0.0, 1.0, 0.0]]))
    judge_down(down, device)


def test_down_row_add_zero_rows_leave_the_residual(device):
    down = down_case((3, 5, 9, 200), "fp8")
    down.case.x_XK.zero_()
    x, *_ = run_down(down, device)
    assert same_bits(x, down.x_1N)


def test_down_row_blocks_fit_squares_into_their_buffer():
    """Every kind and size: two outputs a program at least, and registers that a thread has."""
    for kind, element_bytes in ((OperandKind.FP8_ROWS, 1), (OperandKind.INT8_ROWS, 1), (OperandKind.PLAIN, 2)):
        for size_k in (16, 300, 768, 1408, 2880, 5120):
            for top_k in (1, 6, 8, 16):
                blocks = down_blocks(size_k, top_k, kind, element_bytes)
                assert blocks.block_n >= GEMV_MIN_BLOCK_N
                assert blocks.num_warps <= 16


@pytest.mark.gpu
@EVERY_SCHEME
def test_down_row_add_bfloat16_is_exact_at_model_sizes(device, scheme):
    for sizes in ((8, 16, 2048, 768), (4, 8, 2048, 1408)):
        judge_down(down_case(sizes, scheme, torch.bfloat16), device)


@pytest.mark.gpu
def test_down_row_add_allocates_nothing(device):
    down = down_case((2, 4, 64, 256), dtype=torch.bfloat16)
    case, x, norm = placed(down.case, device), down.x_1N.to(device), down.norm_N.to(device)
    shares, squares, scaled = down.shares_1S.to(device), torch.empty(64, device=device), torch.empty_like(x)
    scratch = SmallBatchScratch(squares, squares, torch.zeros(1, dtype=torch.int32, device=device))
    operands = case.x_XK, case.weight, case.expert_ids_TS, shares, None
    assert_allocates_nothing(lambda: down_row_add(*operands, ResidualStream(x, norm, EPS, scaled, scratch)))

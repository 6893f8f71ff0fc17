"""Routing of rows whose norm is deferred: the router's product, the choice, and the finished norm, amid poison and in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.deferred_rms_norm import AmaxScratch, NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.linear import dequantize_rows
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, SPLIT_K_COLUMNS
from holdfast.kernels.moe.normed_routing import SharedGate, route_normed, route_normed_reference, route_normed_triton
from holdfast.kernels.moe.routing import Routing, route_tokens_reference
from kernels.exactness import random, same_bits
from kernels.quantized_cases import codable_rows, widest_on
from kernels.small_batch_cases import EPS, amax_of, squares_of
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

CPU = torch.device("cpu")
ROWS = pytest.mark.parametrize("num_rows", [1, 2, 7, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
CODED = pytest.mark.parametrize("is_coded", [False, True], ids=["numbers", "codes"])
SIZES = [(1, 1, 5), (3, 3, 64), (8, 60, 200), (2, 7, 300), (8, 128, 256)]
"""(S, E, K): one expert, all of them, and some of many."""


class Found:
    """What one launch left."""

    def __init__(self, logits_TE, ids_TS, shares_TS, finished, scales_T1, gate_T1=None) -> None:
        self.gate_T1, self.logits_TE, self.ids_TS, self.shares_TS = gate_T1, logits_TE, ids_TS, shares_TS
        self.finished, self.scales_T1 = finished, scales_T1

    def rows(self) -> torch.Tensor:
        """The finished norm in float32."""
        if self.scales_T1 is None:
            return self.finished.float()
        return dequantize_rows(QuantizedRows(self.finished, self.scales_T1))


class Case:
    """Rows, a router, and how the rows' squares are cut."""

    def __init__(self, num_rows, sizes, dtype, has_bias=False, num_squares=1, seed=0) -> None:
        self.top_k, num_experts, size_k = sizes
        self.x_TK = random(num_rows, size_k, seed=seed).to(dtype)
        self.scaled_TK = codable_rows(num_rows, size_k, seed=seed + 1).to(dtype)
        self.squares_TJ = squares_of(self.x_TK, min(num_squares, size_k))
        self.router_EK = random(num_experts, size_k, seed=seed + 2, scale=2 * size_k**-0.5).to(dtype)
        self.bias_E = random(num_experts, seed=seed + 3).to(dtype) if has_bias else None


def run(
    case: Case, device, is_coded=False, normalize=True, function=route_normed_triton, rows=None, gate_1K=None
) -> Found:
    rows = list(range(len(case.x_TK))) if rows is None else rows
    zones, num_experts = RedZones(device), len(case.router_EK)
    squares_TJ, scaled_TK = case.squares_TJ[rows], case.scaled_TK[rows]
    (num_rows, size_k), num_squares = scaled_TK.shape, squares_TJ.shape[1]
    amax = amax_of(scaled_TK, num_squares)
    squares = zones.allocate(squares_TJ.numel()).copy_(squares_TJ.flatten())
    normed = zones.allocate(squares_TJ.numel()).copy_(amax.flatten())
    arrived = zones.allocate(8, dtype=torch.int32).zero_()
    empty = zones.allocate(0, dtype=torch.int32)
    partials = zones.allocate(num_rows * SPLIT_K_COLUMNS).fill_(NAN)
    scratch = SmallBatchScratch(squares, partials, arrived, AmaxScratch(normed, normed, empty))
    logits = zones.allocate(num_rows, num_experts).fill_(NAN)
    ids = zones.allocate(num_rows, case.top_k, dtype=torch.int32).fill_(-7)
    shares = zones.allocate(num_rows, case.top_k).fill_(NAN)
    scales = zones.allocate(num_rows, 1).fill_(NAN) if is_coded else None
    dtype = torch.uint8 if is_coded else scaled_TK.dtype
    place = zones.allocate(num_rows, size_k, dtype=dtype).fill_(0x7F)
    finished = place.view(torch.float8_e4m3fn) if is_coded else place
    gate = None
    if gate_1K is not None:
        gate = SharedGate(amid(gate_1K, device), zones.allocate(num_rows, 1).fill_(NAN))
    bias = None if case.bias_E is None else amid(case.bias_E[None], device)[0]
    function(
        NormedRows(amid(scaled_TK, device), num_squares, EPS),
        amid(case.router_EK, device),
        bias,
        normalize,
        logits,
        ids,
        shares,
        finished if scales is None else QuantizedRows(finished, scales),
        scratch,
        gate,
    )
    zones.check()
    assert not arrived.any(), "counters are zeros between launches"
    made = logits, ids, shares, finished, scales, None if gate is None else gate.logit_T1
    cpu = [None if tensor is None else tensor.cpu() for tensor in made]
    return Found(*cpu)


def judge(case: Case, device, is_coded=False, normalize=True) -> None:
    """Logits near the reference's; the choice is that of these logits; the norm is finished."""
    found = run(case, device, is_coded, normalize)
    expected = run(case, CPU, is_coded, normalize, route_normed_reference)
    torch.testing.assert_close(found.logits_TE, expected.logits_TE, rtol=1e-4, atol=1e-4)
    ids, shares = torch.empty_like(found.ids_TS), torch.empty_like(found.shares_TS)
    route_tokens_reference(found.logits_TE, Routing(normalize), ids, shares, case.bias_E)
    assert same_bits(found.ids_TS, ids)
    torch.testing.assert_close(found.shares_TS, shares, rtol=1e-5, atol=1e-6)
    tolerance = 1e-5 if is_coded or case.scaled_TK.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.rows(), expected.rows(), rtol=tolerance, atol=1e-5)


@ROWS
@CODED
def test_route_normed_is_exact_for_every_number_of_rows(device, num_rows, is_coded):
    judge(Case(num_rows, (3, 9, 200), widest_on(device), num_squares=7), device, is_coded)


@pytest.mark.each_value
@CODED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_route_normed_is_exact_for_every_size(device, sizes, is_coded):
    for num_rows in (1, 3):
        for normalize in (False, True):
            judge(Case(num_rows, sizes, widest_on(device), has_bias=True), device, is_coded, normalize)


@ROWS
@CODED
def test_route_normed_gate_logit_is_exact_and_changes_nothing_else(device, num_rows, is_coded):
    """The logit of each row by its own squares."""
    case = Case(num_rows, (2, 7, 300), widest_on(device), num_squares=5)
    gate_1K = random(1, 300, seed=11, scale=0.1).to(case.router_EK.dtype)
    found, plain = run(case, device, is_coded, gate_1K=gate_1K), run(case, device, is_coded)
    scaled, squares = case.scaled_TK.double(), case.squares_TJ.double().sum(-1, keepdim=True)
    exact = scaled @ gate_1K.double().t() * (squares / 300 + EPS).rsqrt()
    torch.testing.assert_close(found.gate_T1.double(), exact, rtol=1e-5, atol=1e-5)
    expected = run(case, CPU, is_coded, function=route_normed_reference, gate_1K=gate_1K)
    torch.testing.assert_close(expected.gate_T1.double(), exact, rtol=1e-5, atol=1e-5)
    for mine, other in ((found.logits_TE, plain.logits_TE), (found.shares_TS, plain.shares_TS)):
        assert same_bits(mine, other)
    assert same_bits(found.ids_TS, plain.ids_TS)
    assert same_bits(found.rows(), plain.rows())


@hypothesis_settings(max_examples=10)
@given(
    num_rows=st.integers(1, FUSED_DECODE_ROWS),
    top_k=st.integers(1, 9),
    more=st.integers(0, 40),
    size_k=st.integers(2, 500),
    has_bias=st.booleans(),
    num_squares=st.integers(1, 40),
    is_coded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_route_normed_is_exact_for_any_sizes(
    device, num_rows, top_k, more, size_k, has_bias, num_squares, is_coded, seed
):
    sizes = top_k, top_k + more, size_k
    judge(Case(num_rows, sizes, widest_on(device), has_bias, num_squares, seed), device, is_coded)


@CODED
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_route_normed_half_precision_is_exact(device, dtype, is_coded):
    for num_rows in (1, 5):
        judge(Case(num_rows, (8, 60, 256), dtype, num_squares=16), device, is_coded)


@CODED
def test_route_normed_is_batch_invariant_from_two_rows(device, is_coded):
    case = Case(9, (3, 20, 256), widest_on(device), num_squares=4)
    whole = run(case, device, is_coded)
    for rows in ([8, 1], [3, 4, 5], [7, 6, 5, 4, 3, 2, 1, 0]):
        some = run(case, device, is_coded, rows=rows)
        assert same_bits(some.logits_TE, whole.logits_TE[rows])
        assert same_bits(some.ids_TS, whole.ids_TS[rows])
        assert same_bits(some.shares_TS, whole.shares_TS[rows])
        assert same_bits(some.rows(), whole.rows()[rows])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_route_normed_nonfinite_row_has_experts_and_stays_alone(device, num_rows):
    case = Case(num_rows, (3, 9, 64), widest_on(device))
    clean = run(case, device)
    case.squares_TJ[0] = NAN
    found = run(case, device)
    assert found.shares_TS[0].isnan().all()
    assert len(set(found.ids_TS[0].tolist())) == 3
    assert 0 <= found.ids_TS[0].min() <= found.ids_TS[0].max() < 9
    assert same_bits(found.shares_TS[1:], clean.shares_TS[1:])
    assert same_bits(found.rows()[1:], clean.rows()[1:])


def test_route_normed_refuses_to_finish_the_norm_in_place():
    x, tensor = torch.zeros(1, 4), torch.zeros(1)
    scratch = SmallBatchScratch(tensor, tensor, tensor.int())
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="other programs still read the rows"):
        route_normed_triton(
            NormedRows(x, 1, EPS), torch.zeros(2, 4), None, False, torch.zeros(1, 2), ids, torch.zeros(1, 1), x, scratch
        )


def test_route_normed_on_cpu_uses_reference():
    case = Case(3, (2, 5, 64), torch.float32, has_bias=True)
    mine, theirs = run(case, CPU, function=route_normed), run(case, CPU, function=route_normed_reference)
    assert same_bits(mine.logits_TE, theirs.logits_TE)
    assert same_bits(mine.rows(), theirs.rows())


@pytest.mark.gpu
@CODED
def test_route_normed_bfloat16_is_exact_at_model_sizes(device, is_coded):
    for num_rows in (1, 2, 8, 16):
        for sizes in ((8, 128, 2048), (4, 60, 2048), (4, 32, 2880)):
            judge(Case(num_rows, sizes, torch.bfloat16, num_squares=256 if num_rows == 1 else 32), device, is_coded)


@pytest.mark.gpu
def test_route_normed_allocates_nothing(device):
    for num_rows in (1, 4):
        x, router = torch.ones(num_rows, 256, device=device).bfloat16(), torch.ones(8, 256, device=device).bfloat16()
        squares, parts = torch.ones(num_rows, device=device), torch.zeros(num_rows * SPLIT_K_COLUMNS, device=device)
        scratch = SmallBatchScratch(squares, parts, torch.zeros(8, dtype=torch.int32, device=device))
        ids = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        logits, shares = torch.zeros(num_rows, 8, device=device), torch.zeros(num_rows, 2, device=device)
        finished, rows = torch.empty_like(x), NormedRows(x, 1, EPS)
        assert_allocates_nothing(
            lambda: route_normed(rows, router, None, True, logits, ids, shares, finished, scratch)  # noqa: B023
        )

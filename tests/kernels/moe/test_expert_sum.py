"""What experts give, added to the residual stream with the next norm deferred: as the sum and the norm one after the other, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.gemm.deferred_rms_norm import AmaxScratch, NormedRows, ResidualStream, SmallBatchScratch
from holdfast.kernels.geometry import FUSED_DECODE_ROWS
from holdfast.kernels.moe.expert_sum import (
    SMALL_BATCH_COLUMNS,
    ExpertOutputs,
    add_experts,
    add_experts_reference,
    add_experts_triton,
    sum_experts_reference,
    sum_experts_triton,
)
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.expert_cases import among
from kernels.small_batch_cases import EPS
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
NAN = float("nan")
KINDS = pytest.mark.parametrize("kind", ["routed", "shared", "gated"])


class Case:
    """What is summed and added, in host memory."""

    def __init__(self, num_rows, top_k, size, dtype=torch.float32, kind="routed", seed=0) -> None:
        self.routed_PH = random(num_rows * top_k, size, seed=seed).to(dtype)
        self.shares_TS = random(num_rows, top_k, seed=seed + 1).softmax(-1)
        self.shared_TH = None if kind == "routed" else random(num_rows, size, seed=seed + 2).to(dtype)
        self.logit_T1 = random(num_rows, 1, seed=seed + 3) if kind == "gated" else None
        self.x_TH = random(num_rows, size, seed=seed + 4).to(dtype)
        self.norm_H = (1 + 0.3 * random(size, seed=seed + 5)).to(dtype)

    def rows(self, which: list[int]) -> "Case":
        """Keep some of the tokens."""
        num_rows, size = self.x_TH.shape
        some = Case(1, 1, 1)
        some.routed_PH = self.routed_PH.view(num_rows, -1, size)[which].flatten(0, 1)
        some.shared_TH = None if self.shared_TH is None else self.shared_TH[which]
        some.logit_T1 = None if self.logit_T1 is None else self.logit_T1[which]
        some.shares_TS, some.x_TH, some.norm_H = self.shares_TS[which], self.x_TH[which], self.norm_H
        return some


def run(case: Case, device, function=add_experts_triton, has_amax=True):
    """x, the scaled rows, squares and amax by row and block, each NaN before and between red zones."""
    zones, (num_rows, size) = RedZones(device), case.x_TH.shape
    x = zones.allocate(num_rows, size, dtype=case.x_TH.dtype).copy_(case.x_TH)
    scaled = zones.allocate(num_rows, size, dtype=case.x_TH.dtype).fill_(NAN)
    room = num_rows * -(-size // SMALL_BATCH_COLUMNS)
    squares, amax = (zones.allocate(room).fill_(NAN) for _ in range(2))
    empty = zones.allocate(0, dtype=torch.int32)
    scratch = SmallBatchScratch(squares, squares, empty, AmaxScratch(amax, amax, empty) if has_amax else None)
    shared, logit = (None if one is None else among(one, device) for one in (case.shared_TH, case.logit_T1))
    routed, shares, norm = (among(one, device) for one in (case.routed_PH, case.shares_TS, case.norm_H))
    rows = function(ExpertOutputs(routed, shares, shared, logit), ResidualStream(x, norm, EPS, scaled, scratch))
    zones.check()
    assert rows == NormedRows(scaled, rows.num_squares, EPS)
    taken = num_rows * rows.num_squares
    by_row = [one.cpu()[:taken].view(num_rows, rows.num_squares) for one in (squares, amax)]
    return x.cpu(), scaled.cpu(), *by_row


def judge(case: Case, device) -> None:
    x, scaled, squares, amax = run(case, device)
    summed = torch.full_like(case.x_TH, NAN, device=device)
    operands = (case.routed_PH, case.shares_TS, case.shared_TH, case.logit_T1)
    sum_experts_triton(ExpertOutputs(*(None if one is None else one.to(device) for one in operands)), summed)
    assert same_bits(x, (case.x_TH.float() + summed.cpu().float()).to(x.dtype)), "as the sum, then the residual"
    assert same_bits(scaled, (x.float() * case.norm_H.float()).to(x.dtype))
    exact = x.double().square().sum(-1)
    assert_as_exact_as_torch(squares.sum(-1), x.float().square().sum(-1), exact, magnitude=4 * float(exact.max()))
    assert same_bits(amax.amax(-1), scaled.float().abs().amax(-1))
    without = run(case, device, has_amax=False)
    assert same_bits(without[0], x)
    assert without[3].isnan().all(), "unrequested amax are written"


@pytest.mark.each_pair
@KINDS
@DTYPES
@pytest.mark.parametrize("size", [1, 100, 256, 600], ids=lambda size: f"H{size}")
def test_add_experts_is_exact_for_every_kind_and_size(device, kind, dtype, size):
    for num_rows in (1, 5):
        judge(Case(num_rows, 3, size, dtype, kind), device)


@hypothesis_settings(max_examples=10)
@given(
    num_rows=st.integers(1, FUSED_DECODE_ROWS),
    top_k=st.integers(1, 9),
    size=st.integers(1, 700),
    kind=st.sampled_from(["routed", "shared", "gated"]),
    seed=st.integers(0, 99),
)
def test_add_experts_is_exact_for_any_sum(device, num_rows, top_k, size, kind, seed):
    judge(Case(num_rows, top_k, size, kind=kind, seed=seed), device)


@KINDS
def test_add_experts_reference_gives_the_same_sum(kind):
    case = Case(5, 3, 300, kind=kind)
    for mine, theirs in zip(run(case, CPU)[:2], run(case, CPU, add_experts_reference)[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(run(case, CPU, add_experts), run(case, CPU, add_experts_reference), strict=True):
        assert same_bits(mine, theirs), "a CPU takes it"


def test_add_experts_is_batch_invariant(device):
    case = Case(9, 3, 300, kind="gated")
    whole = run(case, device)
    for rows in companies(9):
        for mine, theirs in zip(run(case.rows(rows), device), whole, strict=True):
            assert same_bits(mine, theirs[rows]), f"{rows=}"


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_add_experts_nonfinite_value_stays_in_its_row(device, bad):
    case = Case(4, 2, 100)
    clean = run(case, device)
    case.routed_PH[2 * 2 + 1, 99] = bad
    hurt = run(case, device)
    assert not hurt[0][2, 99].isfinite()
    assert not hurt[2][2].isfinite().all()
    for mine, theirs in zip(hurt, clean, strict=True):
        assert same_bits(mine[[0, 1, 3]], theirs[[0, 1, 3]])


@pytest.mark.gpu
def test_add_experts_allocates_nothing(device):
    case = Case(16, 8, 2048, torch.bfloat16)
    routed, shares, x, norm = (one.to(device) for one in (case.routed_PH, case.shares_TS, case.x_TH, case.norm_H))
    squares, scaled = torch.empty(128, device=device), torch.empty_like(x)
    scratch = SmallBatchScratch(squares, squares, torch.zeros(1, dtype=torch.int32, device=device))
    outputs, stream = ExpertOutputs(routed, shares), ResidualStream(x, norm, EPS, scaled, scratch)
    assert_allocates_nothing(lambda: add_experts(outputs, stream))


@KINDS
@pytest.mark.parametrize(("num_rows", "size"), [(3, 40), (20, 1100)])
def test_add_experts_ignores_pairs_of_other_ranks(device, kind, num_rows, size):
    """Whatever lies in their rows: it is as if their shares were none."""
    case = Case(num_rows, 3, size, kind=kind)
    ids = torch.arange(num_rows * 3, dtype=torch.int32).view(num_rows, 3) % 4 - 1
    is_elsewhere = ids < 0
    routed = case.routed_PH.masked_fill(is_elsewhere.flatten()[:, None], NAN)
    operands = case.shares_TS.masked_fill(is_elsewhere, 0.0), case.shared_TH, case.logit_T1
    expected = sum_experts_reference(ExpertOutputs(case.routed_PH, *operands), torch.empty_like(case.x_TH))
    found = sum_experts_reference(ExpertOutputs(routed, *operands), torch.full_like(case.x_TH, NAN), ids)
    assert torch.equal(found, expected)
    shared, logit = (None if one is None else among(one, device) for one in (case.shared_TH, case.logit_T1))
    zones = RedZones(device)
    out = zones.allocate(num_rows, size).fill_(NAN)
    given, plain = (among(one, device) for one in (routed, case.routed_PH))
    shares = among(operands[0], device)
    sum_experts_triton(ExpertOutputs(given, shares, shared, logit), out, among(ids, device))
    zones.check()
    assert torch.equal(out, sum_experts_triton(ExpertOutputs(plain, shares, shared, logit), torch.empty_like(out)))

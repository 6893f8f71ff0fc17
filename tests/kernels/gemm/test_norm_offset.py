"""Every kernel that defers an RMSNorm adds the offset of its weight (1 + w): to the bit what it leaves for that weight."""

from collections.abc import Callable

import pytest
import torch

from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows_reference, add_rows_triton
from holdfast.kernels.exchange.sum_rows import Ranks, Tiles
from holdfast.kernels.gemm.deferred_rms_norm import (
    AmaxScratch,
    ResidualStream,
    SmallBatchScratch,
    defer_rms_norm,
    defer_rms_norm_reference,
)
from holdfast.kernels.gemm.small_batch import linear_add
from holdfast.kernels.moe.expert_row import down_row_add_triton
from holdfast.kernels.moe.expert_sum import ExpertOutputs, add_experts_triton
from kernels.exactness import random, same_bits
from kernels.gemm_references import linear_add_reference
from kernels.tiled_cases import NAN
from kernels.triton_cases import QUIET

pytestmark = [QUIET, pytest.mark.any_device]

SIZE, OFFSET = 96, 1.0
Run = Callable[[ResidualStream, torch.device], object]


def _experts(stream: ResidualStream, device: torch.device) -> object:
    num_rows = len(stream.x_MN)
    routed, shares = random(num_rows * 2, SIZE, seed=5).to(device), random(num_rows, 2, seed=6).to(device)
    return add_experts_triton(ExpertOutputs(routed, shares), stream)


def _down_row(stream: ResidualStream, device: torch.device) -> object:
    ids, shares = torch.tensor([[1, 0]], dtype=torch.int32, device=device), random(1, 2, seed=6).to(device)
    weight = random(3, SIZE, 40, seed=7, scale=0.1).to(device)
    return down_row_add_triton(random(2, 40, seed=5).to(device), weight, ids, shares, None, stream)


def _product(function) -> Run:
    def run(stream: ResidualStream, device: torch.device) -> object:
        a, weight = random(len(stream.x_MN), 64, seed=5).to(device), random(SIZE, 64, seed=7, scale=0.1).to(device)
        return function(a, weight, None, stream)

    return run


def _ranks(function) -> Run:
    def run(stream: ResidualStream, device: torch.device) -> object:
        assert stream.scratch.amax is not None, "with amax"
        parts = [random(len(stream.x_MN), SIZE, seed=seed).to(device) for seed in (5, 6)]
        x, norm, _, scaled, scratch, offset = stream
        onto = DeferredStream(x, norm, scaled, scratch.squares, stream.scratch.amax.normed, offset)
        return function(parts, onto)

    return run


LAUNCHES: dict[str, tuple[int, Run]] = {
    "norm": (3, lambda stream, device: defer_rms_norm(stream)),
    "norm in torch": (3, lambda stream, device: defer_rms_norm_reference(stream)),
    "one row": (1, _product(linear_add)),
    "rows": (3, _product(linear_add)),
    "rows in torch": (3, _product(linear_add_reference)),
    "experts": (3, _experts),
    "one row of experts": (1, _down_row),
    "ranks": (
        3,
        _ranks(lambda parts, onto: add_rows_triton(parts, onto, Ranks(0, 2, None, max_blocks=2), Tiles(128, 4))),
    ),
    "ranks in torch": (3, _ranks(add_rows_reference)),
}
"""Rows of each, and what runs."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_deferred_norm_adds_offset_to_weight(device, name):
    num_rows, run = LAUNCHES[name]
    x, norm = random(num_rows, SIZE, seed=1), (random(SIZE, seed=2) * 16).round() / 64  # 1 + w is exact

    def left(weight: torch.Tensor, offset: float) -> list[torch.Tensor]:
        own, scaled = x.clone().to(device), torch.full_like(x, NAN, device=device)
        squares, amax = (torch.full((num_rows * SIZE,), NAN, device=device) for _ in range(2))
        counts = torch.zeros(64, dtype=torch.int32, device=device)
        scratch = SmallBatchScratch(squares, squares.clone(), counts, AmaxScratch(amax, amax.clone(), counts))
        run(ResidualStream(own, weight.to(device), 1e-5, scaled, scratch, offset), device)
        return [one.nan_to_num(7.0).cpu() for one in (own, scaled, squares, amax)]

    found, wanted = left(norm, OFFSET), left(norm + OFFSET, 0.0)
    assert all(same_bits(*pair) for pair in zip(found, wanted, strict=True))
    assert same_bits(found[1], found[0] * (norm + OFFSET)), "x * (1 + w)"
    assert not same_bits(found[1], left(norm, 0.0)[1]), "the offset does nothing"

"""A side product: one more plain weight in the launch of a product, which changes no bit of it, and is as exact as torch."""

import pytest
import torch

from holdfast.kernels.gemm.small_batch import normed_linear
from holdfast.kernels.geometry import FUSED_DECODE_ROWS
from holdfast.quant.weight_schemes import FP8, INT8, WeightScheme
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import normed_linear_reference
from kernels.quantized_cases import widest_on
from kernels.small_batch_cases import EPS, SmallBatchCase, quantized_case, run_normed, small_batch_case
from kernels.triton_cases import QUIET

pytestmark = [QUIET, pytest.mark.any_device]

CPU = torch.device("cpu")
SIZES = [(70, 1024, 6), (300, 320, 70), (130, 192, 2), (9, 200, 131)]
"""(N, K, P): split along K, whole and broken blocks, more side outputs than others."""


def make_case(
    num_rows: int, sizes: tuple[int, int, int], scheme: WeightScheme | None, device: torch.device
) -> tuple[SmallBatchCase, torch.Tensor]:
    size_n, size_k, size_p = sizes
    dtype = widest_on(device)
    side_PK = random(size_p, size_k, seed=12, scale=size_k**-0.5).to(dtype)
    if scheme is None:
        return small_batch_case(num_rows, size_n, size_k, dtype), side_PK
    return quantized_case(num_rows, size_n, size_k, dtype, scheme), side_PK


@pytest.mark.parametrize("scheme", [None, FP8, INT8], ids=lambda one: one.name if one else "plain")
@pytest.mark.parametrize("num_rows", [1, 2, FUSED_DECODE_ROWS], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_side_product_is_exact_and_changes_no_bit_of_the_other(device, num_rows, sizes, scheme):
    case, side_PK = make_case(num_rows, sizes, scheme, device)
    found = run_normed(normed_linear, case, device, 5, side_PK=side_PK)
    alone = run_normed(normed_linear, case, device, 5)
    assert same_bits(found[:, : sizes[0]].to(alone.dtype), alone)
    x = case.x_MK.double()
    exact = x @ side_PK.double().t() * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    in_torch = run_normed(normed_linear_reference, case, CPU, 5, side_PK=side_PK)[:, sizes[0] :]
    assert_as_exact_as_torch(found[:, sizes[0] :], in_torch, exact, magnitude=10.0)


def test_side_product_rows_are_batch_invariant(device):
    """From two rows on."""
    case, side_PK = make_case(7, SIZES[1], None, device)
    whole = run_normed(normed_linear, case, device, 5, side_PK=side_PK)
    for rows in ([4, 1], [6, 2, 3, 0, 1]):
        assert same_bits(run_normed(normed_linear, case.rows(rows), device, 5, side_PK=side_PK), whole[rows])

"""Rows in groups of columns, each by a weight of its own: against a sum in float64, on a CPU row by row, on a GPU in place."""

import pytest
import torch

from holdfast.kernels.gemm.linear import batched_linear, grouped_linear
from kernels.exactness import random, same_bits
from kernels.triton_cases import assert_allocates_nothing

SHAPES = pytest.mark.parametrize(
    ("num_rows", "groups", "size_k", "size_n"), [(1, 1, 8, 3), (5, 2, 33, 7), (17, 8, 64, 16), (0, 2, 4, 4)], ids=str
)


def parts(num_rows: int, groups: int, size_k: int, size_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = random(num_rows, groups * size_k), random(groups, size_n, size_k, seed=1)
    expected = torch.einsum("tgk,gnk->tgn", x.double().unflatten(1, (groups, size_k)), weight.double()).flatten(1)
    return x, weight, expected


@SHAPES
@pytest.mark.parametrize("product", [grouped_linear, batched_linear])
def test_grouped_linear_multiplies_each_group_by_its_weight(device, guarded, product, num_rows, groups, size_k, size_n):
    x, weight, expected = parts(num_rows, groups, size_k, size_n)
    out = guarded(num_rows, groups * size_n, dtype=torch.float32).fill_(torch.nan)
    assert product(x.to(device), weight.to(device), out) is out
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_grouped_linear_sums_half_precision_in_float32(device, guarded, dtype):
    x, weight, _ = parts(9, 4, 64, 16)
    x, weight = x.to(dtype), weight.to(dtype)
    out = guarded(9, 64, dtype=dtype).fill_(torch.nan)
    grouped_linear(x.to(device), weight.to(device), out)
    expected = torch.einsum("tgk,gnk->tgn", x.double().unflatten(1, (4, 64)), weight.double()).flatten(1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-2, atol=3e-2)


def test_grouped_linear_is_batch_invariant_on_cpu():
    x, weight, _ = parts(13, 4, 64, 16)
    whole = grouped_linear(x, weight, torch.empty(13, 64))
    for row in range(13):
        assert same_bits(grouped_linear(x[row : row + 1], weight, torch.empty(1, 64))[0], whole[row])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_grouped_linear_allocates_nothing(num_rows):
    x = torch.randn(num_rows, 8 * 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8, 128, 512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_rows, 8 * 128, device="cuda", dtype=torch.bfloat16)
    assert_allocates_nothing(lambda: grouped_linear(x, weight, out))

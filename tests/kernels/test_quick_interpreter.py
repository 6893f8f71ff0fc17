"""The quickened interpreter is in use where there is no GPU."""

import pytest
import torch
import triton
import triton.language as tl

from quick_interpreter import quicken_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _double_kernel(values, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(values + places, tl.max(_double(_double(tl.load(values + places))), 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32])
def test_device_functions_and_those_of_the_language_run(dtype: torch.dtype) -> None:
    assert quicken_interpreter()
    for _ in range(2):
        values = torch.arange(8, dtype=dtype)
        _double_kernel[(1,)](values, 8)
        assert values.tolist() == [28] * 8

"""Bounds of pointers in the interpreter: what a kernel may touch, and what is an error."""

import pytest
import torch
import triton
import triton.language as tl

from pointer_bounds import bound_pointers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _copy_kernel(p_x, p_y, start, count, N: tl.constexpr):
    o_n = start + tl.arange(0, N)
    b_x = tl.load(p_x + o_n, mask=o_n < count, other=0.0)
    tl.store(p_y + tl.arange(0, N), b_x)


@triton.jit
def _count_kernel(p_count, place):
    tl.atomic_add(p_count + place, 1)


def room(size: int) -> torch.Tensor:
    """In the middle of a larger storage: what lies around it is memory of this process."""
    return torch.zeros(size + 2000)[1000 : 1000 + size]


def test_bound_pointers_accepts_tensors_and_their_gaps():
    assert bound_pointers()
    x, y = room(80), room(8)
    _copy_kernel[(1,)](x, y, 72, 80, 8)
    _copy_kernel[(1,)](x, y, 76, 80, 8)  # half of them are masked
    _copy_kernel[(1,)](x.view(8, 10)[:, :3], y, 60, 80, 8)
    _count_kernel[(1,)](torch.zeros(3, dtype=torch.int32), 2)


@pytest.mark.parametrize(
    ("start", "count", "verb"), [(73, 99, "loads 1 of 8"), (-1, 80, "loads 1 of 8"), (200, 999, "loads 8")]
)
def test_bound_pointers_refuses_loads_outside_tensors(start, count, verb):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"_copy_kernel {verb}"):
        _copy_kernel[(1,)](room(80), room(8), start, count, 8)


def test_bound_pointers_refuses_stores_outside_tensors():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="_copy_kernel stores 1 of 8"):
        _copy_kernel[(1,)](room(80), room(7), 0, 80, 8)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="_count_kernel changes 1 of 1"):
        _count_kernel[(1,)](room(3).to(torch.int32), 3)

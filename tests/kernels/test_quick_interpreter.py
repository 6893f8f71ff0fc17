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
def test_quick_interpreter_runs_device_and_language_functions(dtype: torch.dtype) -> None:
    assert quicken_interpreter()
    for _ in range(2):
        values = torch.arange(8, dtype=dtype)
        _double_kernel[(1,)](values, 8)
        assert values.tolist() == [28] * 8


@triton.jit
def _mixed_kernel(left, right, out, M: tl.constexpr, N: tl.constexpr, scale: tl.constexpr):
    b_left = tl.load(left + tl.arange(0, M))[:, None]
    b_right = tl.load(right + tl.arange(0, N))[None, :]
    places = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + places, tl.where(b_left > b_right, b_left * scale + b_right, 1 - b_right).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32])
@pytest.mark.parametrize(("left", "right", "scale"), [(4, 8, 2), (1, 4, 1), (8, 1, -1)])
def test_quick_interpreter_types_are_those_of_the_launch(dtype: torch.dtype, left: int, right: int, scale: int) -> None:
    """Shapes, kinds of numbers and constants that equal each other follow one another, each launch after another's."""
    assert quicken_interpreter()
    for kind in (torch.float32, dtype, torch.int32):
        lefts, rights = torch.arange(left, dtype=kind), torch.arange(right, dtype=kind) - 1
        out = torch.full((left, right), 77, dtype=dtype)
        _mixed_kernel[(1,)](lefts, rights, out, left, right, scale)
        wanted = torch.where(lefts[:, None] > rights, lefts[:, None] * scale + rights, 1 - rights)
        assert torch.equal(out, wanted.to(dtype))


def test_quick_interpreter_shares_equal_types_only() -> None:
    assert quicken_interpreter()
    assert tl.block_type(tl.int32, [4, 8]) is tl.block_type(tl.int32, [tl.constexpr(4), 8])
    kinds = [(tl.int32, [4]), (tl.int32, [4, 1]), (tl.int32, [8]), (tl.float32, [4]), (tl.pointer_type(tl.int32), [4])]
    blocks = [tl.block_type(element, shape) for element, shape in kinds]
    for one, block in enumerate(blocks):
        assert [block == other for other in blocks] == [one == other for other in range(len(blocks))]
        assert tl.tensor(None, block).shape == kinds[one][1]
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])


@triton.jit
def _shifted_kernel(out, number, N: tl.constexpr, less: tl.constexpr):
    places = tl.arange(0, N)
    value = tl.load(out + places + N - number - (N - 1))  # behind a scalar and a number, both ways round
    tl.store(out + places, tl.where(number > 0, value.to(tl.uint32) + less, value.to(tl.uint32)).to(tl.int32))


@pytest.mark.parametrize("less", [1, 2])
def test_quick_interpreter_type_promotion_is_repeatable(less: int) -> None:
    """Also after a launch that was refused for its number: of numbers only those that were taken are known."""
    assert quicken_interpreter()
    for _ in range(2):
        values = torch.arange(8, dtype=torch.int32)
        _shifted_kernel[(1,)](values, 1, 8, less)
        assert values.tolist() == [place + less for place in range(8)]
        with pytest.raises(triton.runtime.errors.InterpreterError, match="negative scalar"):
            _shifted_kernel[(1,)](values, 1, 8, -less)

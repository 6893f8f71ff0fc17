"""How kernels are judged: against float64 and torch's own float32, to the bit against themselves, and amid poison."""

import ctypes
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from holdfast.kernels.native_library import native_library

EPSILON = torch.finfo(torch.float32).eps
MOAT = 64
"""Elements of NaN on both sides of an island: more than any vector or tile reads at once."""


def require_native() -> ctypes.CDLL:
    """The C kernels. Without a compiler the test is skipped; with one they have to be there."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler is there")
    library = native_library()
    assert library is not None, "a compiler is there, and the kernels could not be built"
    return library


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def island(values: torch.Tensor) -> torch.Tensor:
    """Put values in the middle of NaN, so that a read outside of them shows in the result."""
    buffer = torch.full((values.numel() + 2 * MOAT,), float("nan"), dtype=values.dtype)
    body = buffer[MOAT : MOAT + values.numel()].view(values.shape)
    body.copy_(values)
    return body


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the bit, NaN and the sign of zero included."""
    return left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return tensor.contiguous().view(integers[tensor.element_size()])


def assert_as_exact_as_torch(
    kernel: torch.Tensor, in_torch: torch.Tensor, exact: torch.Tensor, magnitude: float | None = None
) -> None:
    """The kernel's error is at most four times torch's in the same type, plus two units in the last place.

    `magnitude` is that of the largest sum of absolute values behind an element, where elements cancel; by default that of
    the largest element.
    """
    assert kernel.shape == in_torch.shape == exact.shape, f"{kernel.shape=} {in_torch.shape=} {exact.shape=}"
    assert exact.dtype == torch.float64, f"{exact.dtype=} is not exact"
    if not exact.numel():
        return
    error, torch_error = _error(kernel, exact), _error(in_torch, exact)
    allowed = 4 * torch_error + 2 * EPSILON * (float(exact.abs().max()) if magnitude is None else magnitude)
    assert error <= allowed, f"the kernel is off by {error:.3g}, torch by {torch_error:.3g}, allowed are {allowed:.3g}"


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    error = (result.double() - exact).abs().max()
    assert not error.isnan(), "NaN in a result, or in what it is judged by"
    return float(error)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Torch and the C kernels, which share its OpenMP library, on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    assert require_native().omp_get_max_threads() == count, "the kernels do not share torch's threads"
    try:
        yield
    finally:
        torch.set_num_threads(before)


def companies(num_rows: int, seed: int = 0) -> Sequence[list[int]]:
    """Choices of rows: leading ones of every count that tiles can treat differently, a reversal, and shuffled subsets."""
    generator = torch.Generator().manual_seed(seed)
    leading = [list(range(count)) for count in (*range(1, 10), 17, 63, 65, 129) if count <= num_rows]
    shuffled = []
    for _ in range(6):
        order = torch.randperm(num_rows, generator=generator).tolist()
        shuffled.append(order[: int(torch.randint(1, num_rows + 1, (), generator=generator))])
    return [*leading, list(range(num_rows))[::-1], *shuffled]

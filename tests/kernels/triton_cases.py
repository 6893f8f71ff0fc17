"""How Triton kernels are tried: in every type, on rows that lie apart amid poison, and without an allocation."""

import warnings
from collections.abc import Callable
from itertools import cycle

import pytest
import torch

from kernels.exactness import MOAT

# The interpreter truncates what it stores as bfloat16; compiled kernels round.
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["float32", "float16", "bfloat16"],
)
# Numpy, on which the interpreter runs, warns where an infinity is the right answer.
QUIET = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


MOATS = cycle(MOAT + 16 * more for more in range(5))


def amid_poison(values_TX: torch.Tensor, device: torch.device, moat: int | None = None) -> torch.Tensor:
    """Put rows on the device with NaN before, behind and between them: a read outside of a row shows.

    Rows of the next tensor lie further apart, or nearer: no tensor has the row stride of another.
    """
    num_rows, width = values_TX.shape
    moat = next(MOATS) if moat is None else moat
    buffer = torch.full((num_rows + 2, width + 2 * moat), float("nan"), dtype=values_TX.dtype, device=device)
    rows = buffer[1:-1, moat : moat + width]
    rows.copy_(values_TX)
    return rows


def amid_echoes(numbers_T: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Place integers between copies of the first and of the last: a read outside of them looks like one more row."""
    if not len(numbers_T):
        return numbers_T.to(device)
    before, after = (numbers_T[end : end + 1 or None].expand(MOAT) for end in (0, -1))
    return torch.cat((before, numbers_T, after)).to(device)[MOAT:-MOAT]


def assert_allocates_nothing(call: Callable[[], object]) -> None:
    """A second call takes no memory on the device and does not wait for it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings(action="ignore"):  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "memory was allocated"

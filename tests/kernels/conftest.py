"""What tests of kernels lean on."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.exactness import require_native
from red_zones import RedZones


@pytest.fixture
def native() -> ctypes.CDLL:
    """The C kernels; a test that names it is skipped where no compiler is."""
    return require_native()


@pytest.fixture
def guarded_host() -> Iterator[Callable[..., torch.Tensor]]:
    """guarded(*shape, dtype=...) in host memory, where C kernels write whatever other devices there are."""
    zones = RedZones(torch.device("cpu"))
    yield zones.allocate
    zones.check()

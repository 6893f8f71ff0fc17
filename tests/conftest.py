"""What every test may lean on: the device, guarded and poisoned memory. No torch here, so that the pure lane starts at once."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from red_zones import RedZones

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent


def has_cuda() -> bool:
    """A driver, and a torch that was built for it; read from files, since asking torch costs seconds."""
    spec = find_spec("torch")
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return False
    if spec is None or spec.origin is None:
        return False
    version = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b.*=\s*['\"]", version, re.MULTILINE) is not None


# Triton reads this when it is imported, which happens long after this file.
if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# A job in the background of a script inherits an ignored Ctrl-C; tests that send one would wait for it for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a check that was green stays green; --hypothesis-profile=search looks for new ones.
settings.register_profile("house", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu need CUDA."""
    if has_cuda():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def device() -> "torch.device":
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    import torch

    return torch.device("cuda" if has_cuda() else "cpu")


@pytest.fixture
def guarded(device: "torch.device") -> "Iterator[Callable[..., torch.Tensor]]":
    """guarded(*shape, dtype=...) -> a zeroed tensor between two red zones, which are checked when the test ends.

    A write at slot -1 or one row too far lands in a red zone instead of in silence.
    """
    zones = RedZones(device)
    yield zones.allocate
    zones.check()


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN (or the largest integer), so that its use shows."""
    import torch

    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(was[0], warn_only=was[1])

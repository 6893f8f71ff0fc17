"""Fixtures and hooks of all tests: the device, guarded and poisoned memory. Imports no torch, so pure tests start at once."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import time_budget
from each_value import mark_others_slow
from pointer_bounds import bound_pointers
from quick_interpreter import quicken_interpreter
from red_zones import RedZones
from scratch_memory import Memory, Poison, filled_empty

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent
PACKAGES = (
    *(
        "fastapi",
        "gguf",
        "httptools",
        "httpx",
        "huggingface_hub",
        "hypothesis",
        "jinja2",
        "jsonschema",
        "litellm",
        "llguidance",
    ),
    *(
        "llm",
        "openai",
        "playwright",
        "prometheus_client",
        "pydantic",
        "rich",
        "safetensors",
        "schemathesis",
        "starlette",
    ),
    *("anthropic", "ollama", "tokenizers", "transformers", "uvicorn"),
)
"""Optional packages: if one is missing, the tests that import it are skipped with a reason."""
OWN_PROCESS = "HOLDFAST_OWN_PROCESS"
"""Environment variable of the process that runs one test marked own_process."""
FROZEN = pytest.StashKey[tuple[Path, int]]()
"""Session key: the test file and the number of imported modules when `gc.freeze` last ran."""
FAULT = pytest.StashKey[str]()
"""Session key: the test that broke CUDA in this process, and CUDA's message."""


def has_cuda() -> bool:
    """True if there is a driver and a CUDA build of torch. Reads files, since importing torch costs seconds."""
    spec = find_spec("torch")
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return False
    if spec is None or spec.origin is None:
        return False
    version = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b.*=\s*['\"]", version, re.MULTILINE) is not None


# Triton reads this variable when it is imported, which is later.
if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# A background job inherits an ignored SIGINT. Tests that send one would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run draws the same examples, so a green check stays green. --hypothesis-profile=search (make test-slow) draws new
# ones. There is no deadline: a busy machine is no reason to fail.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    patient = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("house", patient, derandomize=True, max_examples=25)
    settings.register_profile("search", patient, max_examples=500)
    settings.load_profile("house")


class TestModule(pytest.Module):
    """A test file. If an optional package is missing, the whole file is skipped."""

    def collect(self) -> Sequence[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and cause.name in PACKAGES:
                pytest.skip(f"needs the package {cause.name}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)


def pytest_addoption(parser: pytest.Parser) -> None:
    time_budget.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are collected: imports leave none, and looking takes a fifth of the time."""
    gc.disable()
    config.pluginmanager.register(time_budget)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip importing files of GPU tests if `-m` excludes them."""
    is_excluded = "not gpu" in config.getoption("markexpr") and collection_path.name.endswith("_gpu.py")
    return True if is_excluded else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without CUDA, skip tests marked gpu and sample those marked each_value or each_pair."""
    if has_cuda():
        return
    mark_others_slow(items)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze collected tests and their imports: the garbage collector need not visit them."""
    freeze(session, Path())
    # Reference counting frees most objects of a test before this threshold.
    gc.set_threshold(5_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    quicken_interpreter()
    bound_pointers()
    path, num_modules = item.session.stash.get(FROZEN, (Path(), 0))
    if item.path != path or len(sys.modules) >= num_modules + 30:
        freeze(item.session, item.path)


def freeze(session: pytest.Session, path: Path) -> None:
    """Freeze imports and what earlier test files cached. Closing an engine runs the garbage collector, which would visit them."""
    session.stash[FROZEN] = path, len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked own_process in a fresh process: a kernel that faults takes the whole process with it."""
    if not (pyfuncitem.get_closest_marker("own_process") and has_cuda()) or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", pyfuncitem.nodeid]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {OWN_PROCESS: "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        outcomes = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        outcome = outcomes[-1] if outcomes else f"exit status {done.returncode}"
        pytest.fail(f"in a process of its own: {outcome}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}", pytrace=False)
    return True


def cuda_fault() -> str | None:
    """Return CUDA's message if a kernel has failed in this process, else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a failed test, check whether CUDA still works."""
    report = yield
    if report.failed and FAULT not in item.session.stash and (fault := cuda_fault()):
        words = f"CUDA failed in {item.nodeid} ({fault}): nothing more can run in this process"
        item.session.stash[FAULT] = words
        report.sections.append(("CUDA", words))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """End this process after a CUDA fault. xdist starts another one; without xdist the run stops with a message."""
    done = yield
    if fault := item.session.stash.get(FAULT, None):
        if hasattr(item.config, "workerinput"):
            os._exit(70)
        item.session.shouldfail = fault
    return done


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


@pytest.fixture(params=list(Poison), ids=str)
def poison(request: pytest.FixtureRequest) -> Iterator[Poison]:
    """Memory from torch.empty holds NaN (or the largest integer), zeros, or old numbers: a test runs once with each."""
    with filled_empty(request.param):
        yield request.param


@pytest.fixture
def memory(device: "torch.device", poison: Poison) -> Iterator[Memory]:
    """memory.take(name, *shape, dtype=...) -> scratch in the state of `poison`; its red zones are checked at the end."""
    taken = Memory(device, poison)
    yield taken
    taken.check()

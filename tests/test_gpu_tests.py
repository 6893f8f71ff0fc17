"""The GPU lane as far as it runs without a GPU: nothing is lost where processes end, and the report is what happened."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_tests = import_module("gpu_tests")

SHARED = """
import os, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(6))
def test_fine(number):
    assert os.environ["TRITON_CACHE_DIR"].endswith(".triton-cache")

def test_ends_its_process():
    os._exit(3)

def test_fails():
    assert 1 == 2, "of course"

def test_teardown_fails(request):
    request.addfinalizer(lambda: 1 / 0)

def test_has_no_luck():
    pytest.skip("the moon is full")

@pytest.mark.own_process
@pytest.mark.parametrize("fails", [False, True])
def test_of_its_own(fails):
    assert "HOLDFAST_OWN_PROCESS" in os.environ
    assert not fails, "alone"

def test_is_not_of_its_own():
    assert "HOLDFAST_OWN_PROCESS" not in os.environ

@pytest.mark.alone
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""
FAULTS = """
import sys
from types import SimpleNamespace
import pytest
pytestmark = pytest.mark.gpu

def fail():
    raise RuntimeError("CUDA error: misaligned address" + chr(10) + "advice")

def check():
    assert "torch" not in sys.modules, "this process was broken before"

@pytest.mark.parametrize("number", range(3))
def test_before(number):
    check()

def test_faults():
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=fail))
    fail()

@pytest.mark.parametrize("number", range(3))
def test_behind(number):
    check()
"""
OTHERS = """
def test_needs_no_gpu():
    assert False, "not of this lane"
"""


@pytest.fixture
def lane(tmp_path: Path):
    """lane(num_jobs, **files) -> a lane over these files of tests, with our conftest, on a machine that has CUDA."""

    def make(num_jobs: int, seconds: float = 120.0, **files: str):
        tests = tmp_path / "tests"
        tests.mkdir()
        for name in (
            "conftest.py",
            "each_value.py",
            "pointer_bounds.py",
            "quick_interpreter.py",
            "red_zones.py",
            "scratch_memory.py",
            "time_budget.py",
        ):
            shutil.copy(ROOT / "tests" / name, tests)
        with (tests / "conftest.py").open("a") as conftest:
            conftest.write("\n\ndef has_cuda():\n    return True\n")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        for name, text in files.items():
            (tests / f"test_{name}.py").write_text(text)
        return gpu_tests.Lane(tmp_path, num_jobs, seconds, time.monotonic())

    return make


def failures(report) -> dict[str, str]:
    return {name.partition("::")[2]: reason for name, reason in report["failed"].items()}


@pytest.mark.slow
def test_gpu_lane_accounts_for_every_test(lane) -> None:
    found = gpu_tests.run_lane(lane(2, shared=SHARED, faults=FAULTS, others=OTHERS), (1, 1), {})
    report = gpu_tests.summary(found)
    failed = failures(report)
    assert "crashed" in failed.pop("test_ends_its_process")
    assert "of course" in failed.pop("test_fails")
    assert "ZeroDivisionError" in failed.pop("test_teardown_fails")
    assert "misaligned address" in failed.pop("test_faults")
    assert "alone" in failed.pop("test_of_its_own[True]")
    assert not failed
    assert report["skipped"] == {"the moon is full": 1}
    assert report["passed"] == 6 + 1 + 1 + 1 + 6
    assert report["seconds_by_function"]["tests/test_shared.py::test_fine"][0] == 6


@pytest.mark.slow
def test_gpu_lane_one_process_at_a_time_loses_no_test(lane) -> None:
    """A fault ends the run with a reason; a process that ends takes one test with it."""
    ends = "import os, pytest\n@pytest.mark.gpu\ndef test_ends(): os._exit(3)\n"
    found = gpu_tests.run_lane(lane(1, faults=FAULTS + ends), (1, 1), {})
    report = gpu_tests.summary(found)
    assert report["passed"] == 6
    assert failures(report) == {
        "test_faults": "RuntimeError: CUDA error: misaligned address",
        "test_ends": gpu_tests.ENDED,
    }


def test_gpu_lane_missing_package_skips_and_broken_file_fails(lane) -> None:
    made = lane(1, needs="import absent", broken="import misspelt", faults=FAULTS)
    with (made.root / "tests" / "conftest.py").open("a") as conftest:
        conftest.write("\nPACKAGES = ('absent',)\n")
    collected, found = gpu_tests.collect(made, made.root)
    assert len(collected) == 7
    assert found["tests/test_needs.py"] == gpu_tests.Found("skipped", "needs the package absent")
    assert found["tests/test_broken.py"].outcome == "failed"
    assert "misspelt" in found["tests/test_broken.py"].reason


def test_gpu_lane_ends_pytest_past_its_limit(tmp_path: Path) -> None:
    lane = gpu_tests.Lane(tmp_path, 1, 0.5, time.monotonic())
    assert lane.pytest(["--collect-only"], tmp_path / "notes") is None
    assert lane.left_seconds < 0


class ShortLane(NamedTuple):
    """Its time is up in the second test."""

    seconds: float = 9.0

    def pytest(self, arguments: Sequence[str], notes: Path) -> None:
        report: list[dict] = [{"started": "a"}]
        report += [{"id": "a", "outcome": "passed", "reason": None, "seconds": 1.0, "when": "teardown"}]
        report += [{"started": "b"}, {"id": "b", "outcome": "passed", "reason": None, "seconds": 0.1, "when": "setup"}]
        notes.write_text("".join(json.dumps(note) + "\n" for note in report) + '{"id": "b", "outc')


def test_gpu_lane_tests_not_run_in_time_fail(tmp_path: Path) -> None:
    found = gpu_tests.run(ShortLane(), ["a", "b", "c"], tmp_path, 1)
    no_time = gpu_tests.Found("failed", "no time: the lane was ended after 9 s")
    assert found == {"a": gpu_tests.Found("passed", None, 1.0), "b": no_time, "c": no_time}


FUNCTIONS = st.dictionaries(st.sampled_from([f"t.py::f{n}" for n in range(12)]), st.integers(1, 9), min_size=1)


@given(FUNCTIONS, st.integers(1, 4), st.dictionaries(st.sampled_from(["t.py::f1", "t.py::f5"]), st.floats(0, 100)))
def test_parts_have_every_test_once_and_each_function_whole(functions, num_parts: int, known) -> None:
    ids = [f"{name}[{index}]" for name, count in functions.items() for index in range(count)]
    parts = gpu_tests.parts_of(ids, num_parts, known)
    assert sorted(name for part in parts for name in part) == sorted(ids)
    assert gpu_tests.parts_of(ids, num_parts, known) == parts
    homes = [{gpu_tests.function_of(name) for name in part} for part in parts]
    assert sum(map(len, homes)) == len(functions)
    seconds = {name: count * known.get(name, gpu_tests.UNKNOWN_SECONDS) for name, count in functions.items()}
    totals = [sum(seconds[name] for name in home) for home in homes]
    assert max(totals) - min(totals) <= max(seconds.values()) + 1e-9


def test_earlier_records_say_how_long_tests_take(tmp_path: Path) -> None:
    for date, seconds in (("2026-01-01", 8.0), ("2026-01-02", 6.0)):
        record = {"seconds_by_function": {"t.py::f": [4, seconds]}}
        (tmp_path / f"gpu-{date}-tests.json").write_text(json.dumps(record))
    (tmp_path / "gpu-2026-01-03-tests-1-of-2.json").write_text("{}")
    assert gpu_tests.known_seconds(tmp_path) == {"t.py::f": 1.5}


def test_summary_times_no_test_that_had_no_time() -> None:
    found = {
        "t.py::f[0]": gpu_tests.Found("passed", None, 2.0),
        "t.py::f[1]": gpu_tests.Found("failed", "no time: ..."),
    }
    report = gpu_tests.summary(found)
    assert report["seconds_by_function"] == {"t.py::f": [1, 2.0]}
    assert failures(report) == {"f[1]": "no time: ..."}


def test_was_green_needs_a_run_without_failure() -> None:
    record = {"seconds_by_function": {"t.py::f": [1, 8.0], "t.py::g": [2, 1.0]}, "failed": {"t.py::g[1]": "no time"}}
    names = ["t.py::f", "t.py::g[0]", "t.py::g[1]", "t.py::new"]
    assert [gpu_tests.was_green(name, record) for name in names] == [True, True, False, False]


@pytest.mark.parametrize(("text", "part"), [("1/1", (1, 1)), ("2/3", (2, 3))])
def test_as_part_reads_number_of_number(text: str, part: tuple[int, int]) -> None:
    assert gpu_tests.as_part(text) == part


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/2/3", "a/b", "1/0"])
def test_as_part_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gpu_tests.as_part(text)


@pytest.mark.slow
def test_make_test_gpu_without_cuda_is_refused() -> None:
    command = ["make", "test-gpu", f"PYTHON={sys.executable}", "JOBS=3", "PART=1/2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "error: the tests need CUDA; " in done.stderr
    assert "without CUDA" in done.stderr

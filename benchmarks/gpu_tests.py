"""Run the tests that need CUDA in this Python, and write a record: python benchmarks/gpu_tests.py [--jobs 12] [--part 1/2]

--only tests/runner,tests/kernels runs these files. --after RECORD runs all that was not green in an earlier record, so that
two short runs make one lane.

Tests are collected once. Tests that share the device run in --jobs processes. Then tests that measure the whole device
(marker `alone`) run in one process. If a process dies in a test, that test fails and another process runs the rest, so no
test is lost. Compiled kernels are kept in .triton-cache/ between runs.

As a plugin (-p gpu_tests) this file records the tests that pytest collects, starts and finishes.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
KEPT_KERNELS = ".triton-cache"
LANE = "gpu or any_device"
"""Tests of the lane. Those marked any_device run in a model of the GPU elsewhere."""
PACKAGES = {
    "xdist": "tests run in one process, not in several",
    "hypothesis": "files that draw examples are skipped",
    "gguf": "files that compare with it are skipped",
    "msgspec": "files of steps and ranks fail as they are collected",
    "transformers": "files that compare with it are skipped",
}
"""Modules that may be missing, and the effect; nothing is installed."""
UNKNOWN_SECONDS = 1.0
"""Assumed seconds of a test without a record."""
NUM_SLOWEST = 25
ENDED = "the process ended in it"
NO_TIME = "no time"


# --- in the processes of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu lane")
    group.addoption("--lane-ids", type=Path, help="a JSON list of the tests to run, by id; no others are")
    group.addoption("--lane-notes", type=Path, help="file that a line of JSON is added to for all that happens")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (path := config.getoption("--lane-ids")) is None:
        return
    wanted = set(json.loads(path.read_text()))
    others = [item for item in items if item.nodeid not in wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--lane-notes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notes(path, bool(config.getoption("collectonly"))))


class Notes:
    """Writes each note at once, so an interrupted run keeps its results."""

    def __init__(self, path: Path, is_collecting: bool) -> None:
        self._path = path
        self._is_collecting = is_collecting

    def _note(self, **facts: object) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(facts) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._is_collecting:
            for item in session.items:
                self._note(collected=item.nodeid, alone=item.get_closest_marker("alone") is not None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed" and self._is_collecting:
            self._note(id=report.nodeid, outcome=report.outcome, reason=words_of(report), seconds=0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = None if report.passed else words_of(report)
        self._note(id=report.nodeid, outcome=report.outcome, reason=reason, seconds=report.duration, when=report.when)


def words_of(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the reason of a skip or failure on one line."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [report.outcome]
    # An unparsed traceback has its error at the end.
    return lines[0 if crash is not None or isinstance(report.longrepr, str) else -1][:300]


# --- in the parent process


class Found(NamedTuple):
    """Result of one test."""

    outcome: str
    """passed, failed or skipped"""
    reason: str | None = None
    seconds: float = 0.0


class Lane(NamedTuple):
    """Settings of a run of tests."""

    root: Path
    num_jobs: int
    seconds: float
    """Deadline of every process, after `start`."""
    start: float

    @property
    def left_seconds(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def pytest(self, arguments: Sequence[str], notes: Path) -> int | None:
        """Run pytest with its output on ours; return its exit status, or None if the deadline killed it."""
        command = [sys.executable, "-m", "pytest", "-p", "gpu_tests", "-p", "no:benchmark", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, "--lane-notes", str(notes), *arguments],
            cwd=self.root,
            env=environment(self.root, self.num_jobs),
            start_new_session=True,
        )
        try:
            return process.wait(timeout=max(self.left_seconds, 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:  # ends workers too, also after an exception
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def environment(root: Path, num_jobs: int) -> dict[str, str]:
    """Return our environment with the tree first on the path, the kernel cache, and cores divided among processes."""
    paths = [str(root / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "TRITON_CACHE_DIR": str(root / KEPT_KERNELS),
        "OMP_NUM_THREADS": str(max(1, num_cores // num_jobs)),
    }
    # A nested run is not a worker of the outer one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**defaults, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Read complete lines; the last may be cut off."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def collect(lane: Lane, folder: Path) -> tuple[dict[str, bool], dict[str, Found]]:
    """Return the tests of the lane, whether each runs alone, and the collection errors."""
    notes = folder / "collected"
    status = lane.pytest(["-m", LANE, "--collect-only", "-qq", "--no-summary"], notes)
    found, failures = {}, {}
    for note in read_notes(notes):
        if "collected" in note:
            found[note["collected"]] = note["alone"]
        else:
            failures[note["id"]] = Found(note["outcome"], note["reason"])
    if not found and not failures:
        sys.exit(f"error: pytest found no tests marked {LANE} and ended with {status}; see above")
    return found, failures


def run(lane: Lane, ids: Sequence[str], folder: Path, num_jobs: int) -> dict[str, Found]:
    """Run all these tests, restarting processes as needed."""
    found: dict[str, Found] = {}
    while left := [name for name in ids if name not in found]:
        wanted, notes = folder / "wanted.json", folder / "notes"
        wanted.write_text(json.dumps(left))
        notes.unlink(missing_ok=True)
        files = list(dict.fromkeys(name.partition("::")[0] for name in left))
        spread = ["-n", str(num_jobs), "--dist", "worksteal", "--max-worker-restart", "1000"] if num_jobs > 1 else []
        status = lane.pytest(["-m", LANE, "-q", *spread, "--lane-ids", str(wanted), *files], notes)
        seen = results(read_notes(notes), left)
        if status is None:
            ended = {
                name: Found("failed", f"{NO_TIME}: the lane was ended after {lane.seconds:.0f} s") for name in left
            }
            return {**found, **ended, **{name: one for name, one in seen.items() if one.reason != ENDED}}
        if not seen:
            return found | {name: Found("failed", f"it was not run: pytest ended with {status}") for name in left}
        found |= seen
    return found


def results(notes: Iterable[Mapping[str, Any]], ids: Collection[str]) -> dict[str, Found]:
    """Return results by test. A test failed if any part failed, or if it began and never reported."""
    found: dict[str, Found] = {}
    open_ids: set[str] = set()
    for note in notes:
        if "started" in note:
            open_ids.add(note["started"])
        elif note.get("id") in ids:
            name, before = note["id"], found.get(note["id"], Found("passed"))
            worse = before.outcome == "passed" or note["outcome"] == "failed" != before.outcome
            outcome, reason = (note["outcome"], note["reason"]) if worse else (before.outcome, before.reason)
            found[name] = Found(outcome, reason, before.seconds + note["seconds"])
            if note["when"] not in ("setup", "call"):  # the last part, or a process that xdist lost
                open_ids.discard(name)
    for name in open_ids & set(ids):
        before = found.get(name, Found("passed"))
        found[name] = before if before.outcome == "failed" else Found("failed", ENDED, before.seconds)
    return found


def function_of(name: str) -> str:
    """Return a test id without its parameters."""
    return name.partition("[")[0]


def known_seconds(records: Path) -> dict[str, float]:
    """Read seconds per test of each function from earlier records; later ones win."""
    found: dict[str, float] = {}
    for path in sorted(records.glob("*-tests*.json")):
        for function, (count, seconds) in json.loads(path.read_text()).get("seconds_by_function", {}).items():
            found[function] = seconds / count
    return found


def was_green(name: str, record: Mapping[str, Any]) -> bool:
    """Return True if a test of an earlier record passed: its function ran, and the test is not among the failures."""
    return function_of(name) in record["seconds_by_function"] and name not in record["failed"]


def parts_of(ids: Iterable[str], num_parts: int, known: Mapping[str, float]) -> list[list[str]]:
    """Split tests into deterministic parts: whole functions, longest first, each to the shortest part."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in ids:
        functions[function_of(name)].append(name)
    cost = {name: len(members) * known.get(name, UNKNOWN_SECONDS) for name, members in functions.items()}
    totals, chosen = [0.0] * num_parts, [set[str]() for _ in range(num_parts)]
    for name in sorted(functions, key=lambda name: (-cost[name], name)):
        part = totals.index(min(totals))
        totals[part] += cost[name]
        chosen[part].add(name)
    return [[name for function in functions if function in part for name in functions[function]] for part in chosen]


def summary(found: Mapping[str, Found]) -> dict[str, Any]:
    """Summarize the tests for a record."""
    outcomes = Counter(one.outcome for one in found.values())
    by_function: dict[str, list[float]] = {}
    for name, one in found.items():
        if one.outcome != "skipped" and not (one.reason or "").startswith(NO_TIME):
            entry = by_function.setdefault(function_of(name), [0, 0.0])
            entry[0], entry[1] = entry[0] + 1, round(entry[1] + one.seconds, 2)
    slowest = sorted(found, key=lambda name: -found[name].seconds)[:NUM_SLOWEST]
    skips = Counter(one.reason or "" for one in found.values() if one.outcome == "skipped")
    return {
        "passed": outcomes["passed"],
        "failed": {name: one.reason for name, one in sorted(found.items()) if one.outcome == "failed"},
        "skipped": dict(skips.most_common()),
        "slowest": {name: round(found[name].seconds, 2) for name in slowest},
        "seconds_by_function": dict(sorted(by_function.items())),
    }


def missing_packages() -> dict[str, str]:
    return {name: words for name, words in PACKAGES.items() if find_spec(name) is None}


def run_lane(
    lane: Lane,
    part: tuple[int, int],
    known: Mapping[str, float],
    only: tuple[str, ...] = ("",),
    before: Mapping[str, Any] | None = None,
) -> dict[str, Found]:
    """Run the tests of one part: first the shared ones, then those that need the whole device.

    `only` has beginnings of test ids. Tests that passed in the record `before` are left out.
    """
    num_jobs = lane.num_jobs if find_spec("xdist") else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collected, found = collect(lane, folder)
        number, num_parts = part
        wanted = [name for name in collected if name.startswith(only)]
        wanted = [name for name in wanted if before is None or not was_green(name, before)]
        ids = parts_of(wanted, num_parts, known)[number - 1]
        shared, alone = ([name for name in ids if collected[name] is is_alone] for is_alone in (False, True))
        print(f"{len(shared)} tests in {num_jobs} processes, then {len(alone)} alone", flush=True)
        found |= run(lane, shared, folder, num_jobs) if shared else {}
        return found | (run(lane, alone, folder, 1) if alone else {})


def why_not_here() -> str | None:
    """Return why this Python cannot run the tests, or None."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{sys.executable} has no torch"
    version, cuda, is_available = done.stdout.split()
    if cuda == "None":
        return f"torch {version} of {sys.executable} was built without CUDA"
    return None if is_available == "True" else f"torch {version} finds no GPU"


def as_part(text: str) -> tuple[int, int]:
    """1/2 -> (1, 2)"""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(text)
    return int(match[1]), int(match[2])


def as_paths(text: str) -> tuple[str, ...]:
    """tests/a.py,tests/b -> ("tests/a.py", "tests/b")"""
    return tuple(text.split(","))


def main() -> int:
    """Run, print, record."""
    sys.path.insert(0, str(ROOT / "src"))
    from gpu_records import COMMIT_VARIABLE, RECORDS, make_record, write_record

    parser = argparse.ArgumentParser(description="The tests that need CUDA")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=as_part, default=(1, 1), help="such as 1/2: the first of two halves")
    parser.add_argument("--only", type=as_paths, default=("",), help="such as tests/runner,tests/kernels: no others")
    parser.add_argument("--after", type=Path, default=None, help="a record: what passed there is left out")
    parser.add_argument("--label", default="", help="added to the record's name")
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="what runs then is ended")
    parser.add_argument("--out", type=Path, default=ROOT / RECORDS, help="folder of the record")
    parser.add_argument("--commit", default=None, help=f"else ${COMMIT_VARIABLE}, else what git says")
    parser.set_defaults(device="cuda")
    arguments = parser.parse_args()
    if (reason := why_not_here()) is not None:
        sys.exit(f"error: the tests need CUDA; {reason}; give a Python that has it: make test-gpu PYTHON=...")
    missing = missing_packages()
    for name, words in missing.items():
        print(f"{name} is not there: {words}")
    start = time.monotonic()
    lane = Lane(ROOT, max(1, arguments.jobs), arguments.budget_seconds, start)
    before = json.loads(arguments.after.read_text()) if arguments.after else None
    found = run_lane(lane, arguments.part, known_seconds(arguments.out), arguments.only, before)
    seconds = time.monotonic() - start
    facts = summary(found)
    counts = {"passed": facts["passed"], "failed": len(facts["failed"]), "skipped": sum(facts["skipped"].values())}
    number, num_parts = arguments.part
    settings = {
        "jobs": lane.num_jobs,
        "part": f"{number}/{num_parts}",
        "seconds": round(seconds, 1),
        "missing": missing,
        "after": before and {"record": arguments.after.name, "commit": before["commit"], "passed": before["passed"]},
    }
    record = make_record(
        "gpu-tests",
        [{"measure": "tests that need CUDA", "unit": "tests", "values": counts, "seconds": settings["seconds"]}],
        "every test marked gpu",
        f"part {number} of {num_parts}",
        arguments,
        settings | facts,
    )
    record["commit"] = record["commit"] or "unknown"
    for name, why in facts["failed"].items():
        print(f"FAILED {shlex.quote(name)}: {why}")
    for why, count in facts["skipped"].items():
        print(f"skipped {count}: {why}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped in {seconds:.0f} s")
    name = "tests" if num_parts == 1 else f"tests-{number}-of-{num_parts}"
    write_record(record, f"{name}-{arguments.label}" if arguments.label else name, arguments)
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())

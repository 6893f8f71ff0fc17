"""Plant bugs one by one in a copy of the tree, run the tests of their package, and report the bugs that no test catches.

`make test-mutants` plants every bug of tests/mutants/*.toml. `--only WORD` takes those with the word in their name or file.
`--search FILE` plants random one-place changes of a source file instead and runs `--tests`, to find untested code.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".carry", "__pycache__", ".hypothesis", ".*_cache", "build", "dist", "*.egg-info"
)
FIELDS = frozenset({"name", "file", "old", "new", "tests", "equivalent", "gpu"})
WARM = multiprocessing.get_context("forkserver")
"""Forks each run's process from one that has done the slow imports, without the engine."""
IMPORTED = ["torch", "triton", "numpy", "pytest", "hypothesis", "fastapi", "httpx", "transformers.modeling_utils"]
VERDICTS = ("caught", "equivalent", "needs CUDA", "survived", "broken")
LIMIT_S = 300
"""Time limit of one run of tests; a bug that makes them hang counts as caught."""


@dataclass(frozen=True)
class Bug:
    """A change of one place in the source, and the tests that have to fail."""

    name: str
    file: str
    """Below src/holdfast."""
    old: str
    """Occurs in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """Test files or tests, run first. If none fails, the tests of the room run."""
    equivalent: str = ""
    """Reason if no test can detect this change."""
    gpu: bool = False
    """True if the kernel runs only on a GPU: then the tests marked gpu run, and without CUDA none do."""

    def planted(self, text: str) -> str:
        """Return the text of the file with the bug in it."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name!r}: its old text is {found} times in {self.file}, not once: write it anew")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Result of the tests with one bug in the source."""

    bug: Bug
    verdict: str
    """One of VERDICTS."""
    caught_by: str
    """The first test that failed; for a broken bug, the error."""
    seconds: float


def has_cuda() -> bool:
    """Return whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def room_of(file: str, root: Path) -> str:
    """Return the folder of tests that mirrors the package of a source file."""
    folder = Path("tests") / Path(file).parent
    while not any((root / folder).glob("test_*.py")):
        folder = folder.parent
    return str(folder)


def read_bugs(folder: Path = LISTS) -> list[Bug]:
    """Read every list, in the order of the files and of the bugs in them."""
    bugs = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["bug"]:
            unknown = entry.keys() - FIELDS
            if unknown:
                raise ValueError(f"{path.name}: {entry.get('name')!r} has unknown fields {sorted(unknown)}")
            tests = entry["tests"]
            bugs.append(Bug(**(entry | {"tests": (tests,) if isinstance(tests, str) else tuple(tests)})))
    return bugs


class Tree:
    """A copy of the tree in which one bug at a time is planted."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder / "tree"
        shutil.copytree(root, self.folder, ignore=NOT_COPIED, symlinks=True)

    def run(self, bug: Bug, *, widen: bool) -> Outcome:
        """Plant the bug, run its tests and, to widen, those of its room, and take the bug out."""
        if bug.gpu and not has_cuda():
            return Outcome(bug, "needs CUDA", "", 0.0)
        path = self.folder / "src" / "holdfast" / bug.file
        text, began = path.read_text(), time.monotonic()
        try:
            self._write(path, bug.planted(text))
            verdict, caught_by = self._test(bug.tests, gpu=bug.gpu)
            if verdict == "survived" and widen and not bug.equivalent:
                verdict, caught_by = self._test((room_of(bug.file, self.folder),), gpu=bug.gpu)
        except (OSError, ValueError) as error:
            verdict, caught_by = "broken", str(error)
        finally:
            self._write(path, text)
        if bug.equivalent and verdict == "survived":
            verdict, caught_by = "equivalent", bug.equivalent
        return Outcome(bug, verdict, caught_by, time.monotonic() - began)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A compiled file of the same second and size would hide the change.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _test(self, tests: Sequence[str], *, gpu: bool) -> tuple[str, str]:
        report, printed = self.folder.parent / "report.xml", self.folder.parent / "printed.txt"
        report.unlink(missing_ok=True)
        marked = "gpu" if gpu else "not gpu and not slow"
        # pytest warns that it cannot rewrite plugins already imported.
        options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += ["-m", marked, f"--junitxml={report}"]
        child = WARM.Process(target=_run_pytest, args=(str(self.folder), str(printed), [*options, *tests]))
        child.start()
        child.join(LIMIT_S)
        code = child.exitcode
        if child.pid is not None:
            _stop(child.pid)
        if code is None:
            child.join()
            return "caught", f"{tests[0]} hangs"
        if code == 1 and report.exists():
            return _read_report(report)
        if code < 0:
            return "caught", f"{tests[0]} dies of signal {-code}"
        return ("survived", "") if code == 0 else ("broken", f"pytest ended with {code}: {printed.read_text()[-600:]}")


def _run_pytest(tree: str, printed: str, arguments: list[str]) -> None:
    """Run the tests of a tree in this process, which has torch and no module of the engine yet."""
    import pytest

    os.setsid()
    os.chdir(tree)
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = f"{tree}/src"
    sys.path[:0] = [f"{tree}/src", tree]
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(code)


def _stop(pid: int) -> None:
    """End leftover processes of servers and ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _read_report(report: Path) -> tuple[str, str]:
    """Return the first failed test; a file that cannot be imported does not count as catching the bug."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is None:
                continue
            if "collection failure" in found.get("message", ""):
                return "broken", f"{case.get('name')} cannot be imported"
            return "caught", f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
    return "broken", "a test failed and the report names none"


def run_bugs(bugs: Sequence[Bug], jobs: int, *, widen: bool) -> Iterator[Outcome]:
    """Plant each bug in one of as many copies of the tree as jobs run at once."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            trees.put(Tree(Path(folder) / str(number), ROOT))

        def run(bug: Bug) -> Outcome:
            tree = trees.get()
            try:
                return tree.run(bug, widen=widen)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, bugs)


def report(outcomes: Iterable[Outcome], num_bugs: int, out: Path | None) -> int:
    """Print a line for each bug as it ends and the count of each verdict; return the exit status."""
    done, began = [], time.monotonic()
    for outcome in outcomes:
        done.append(outcome)
        line = f"[{len(done):3}/{num_bugs}] {outcome.verdict:10} {outcome.seconds:5.1f} s  {outcome.bug.file}: {outcome.bug.name}"
        print(f"{line}\n{'':24}{outcome.caught_by}" if outcome.caught_by else line, flush=True)
    missed = [outcome for outcome in done if outcome.verdict in ("survived", "broken")]
    counts = {verdict: sum(one.verdict == verdict for one in done) for verdict in VERDICTS}
    print(
        "\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        f"in {time.monotonic() - began:.0f} s",
    )
    for outcome in missed:
        print(
            f"{outcome.verdict}: {outcome.bug.file}: {outcome.bug.name}\n  - {outcome.bug.old}\n  + {outcome.bug.new}"
        )
    if out is not None:
        rows = [
            {"name": one.bug.name, "file": one.bug.file, "verdict": one.verdict, "caught_by": one.caught_by}
            for one in done
        ]
        out.write_text(json.dumps({"counts": counts, "bugs": rows}, indent=1) + "\n")
    return 1 if missed else 0


def main() -> int:
    """Read the options, plant, and return 1 if a bug survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree, and tests at once (default 2)")
    parser.add_argument("--only", default="", metavar="WORD", help="bugs with this word in their name or file")
    parser.add_argument("--lists", type=Path, default=LISTS, metavar="FOLDER", help="folder of *.toml lists")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--search", metavar="FILE", help="plant random changes of this file below src/holdfast instead")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="TEST", help="tests that a search runs (default: the room's)"
    )
    parser.add_argument("--count", type=int, default=20, help="random changes of a search (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes (default 0)")
    options = parser.parse_args()
    if options.search:
        from random_mutants import random_changes

        text = (ROOT / "src" / "holdfast" / options.search).read_text()
        changes = random_changes(text, options.count, options.seed)
        tests = tuple(options.tests) or (room_of(options.search, ROOT),)
        bugs = [Bug(change.name, options.search, change.old, change.new, tests) for change in changes]
    else:
        bugs = [bug for bug in read_bugs(options.lists) if options.only in bug.name or options.only in bug.file]
    if not bugs:
        parser.error(f"no bug has {options.only!r} in its name or file")
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    if not has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
    WARM.set_forkserver_preload(IMPORTED)
    return report(run_bugs(bugs, options.jobs, widen=not options.search), len(bugs), options.out)


if __name__ == "__main__":
    sys.exit(main())

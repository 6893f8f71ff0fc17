"""Run the tests that a change may break: python scripts/changed_tests.py [--since COMMIT | --commit COMMIT] [--list]

By default the change is everything that differs from HEAD, untracked files included. Tests run in this order until the
budget ends: changed test files; tests that import a changed module; tests of its room; tests of modules that import it.
Then a smoke run starts a tiny engine and checks the rules of the tree. `make test` runs everything.

    python scripts/changed_tests.py                     what is not committed yet
    python scripts/changed_tests.py --since main        what this branch changes
    python scripts/changed_tests.py --commit HEAD~3     what one commit changed, on today's tree
"""

import argparse
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
SMOKE = ("tests/test_smoke.py", "tests/test_architecture.py", "tests/test_errors.py", "tests/test_imports.py")
BUDGET_SECONDS = 35.0
"""Seconds for the tests. Startup, collection and the smoke run come on top, so the total stays within a minute."""
OTHER_TESTS = {
    "docs": ("test_docs.py",),
    "README.md": ("test_docs.py",),
    "scripts": (
        "test_scripts.py",
        "test_mutation_lane.py",
        "test_compare_ptx.py",
        "test_changed_tests.py",
        "test_digests.py",
    ),
    "benchmarks": ("test_benchmarks.py", "test_fresh_records.py", "test_digests.py"),
    "pyproject.toml": ("test_packaging.py", "test_imports.py"),
    "Makefile": ("test_scripts.py", "test_docs.py"),
    "src/holdfast/messages": ("test_errors.py",),
}
"""Test files of sources that are not Python modules of the package, by path prefix."""
FROM = re.compile(r"^[ \t]*from[ \t]+(\w[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]+)", re.MULTILINE)
IMPORT = re.compile(r"^[ \t]*import[ \t]+([\w., \t]+)", re.MULTILINE)


def changed_files(since: str | None, commit: str | None) -> list[Path]:
    """List the changed files that still exist."""
    if commit is not None:
        names = _git("diff-tree", "--no-commit-id", "--name-only", "-r", "-m", "--first-parent", commit)
    else:
        names = _git("diff", "--name-only", since or "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return sorted({ROOT / name for name in names if (ROOT / name).is_file()})


def _git(*command: str) -> list[str]:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: git {command[0]} failed: {done.stderr.strip()}")
    return done.stdout.splitlines()


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Names of the modules that a file imports, lazily or not: `a.b`, and `a.b.c` for `from a.b import c`.

    Programs in the strings of tests count too. Patterns find them, because to parse every file takes seconds.
    """
    found, text = set[str](), path.read_text(encoding="utf-8")
    for module, names in FROM.findall(text):
        found |= {module, *(f"{module}.{name}" for name in _names_of(names))}
    for names in IMPORT.findall(text):
        found |= _names_of(names)
    return frozenset(found)


def _names_of(text: str) -> set[str]:
    """Names between commas, in parentheses or not, without comments and what they are called here."""
    parts = re.sub("#.*", "", text).strip("() \t\n").split(",")
    return {part.split()[0] for part in parts if part.split()}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package and every helper module of the tests, by its import name."""
    package = {_module_name(path, SOURCE): path for path in (SOURCE / "holdfast").rglob("*.py")}
    helpers = {_module_name(path, TESTS): path for path in TESTS.rglob("*.py") if not is_test(path)}
    return package | helpers


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_test(path: Path) -> bool:
    """True if pytest collects a file."""
    return path.suffix == ".py" and path.name.startswith("test_") and path.is_relative_to(TESTS)


@cache
def importers() -> dict[Path, frozenset[Path]]:
    """The package's modules and the test files that import each module; test helpers count as their users."""
    direct: dict[Path, set[Path]] = defaultdict(set)
    every = [*(SOURCE / "holdfast").rglob("*.py"), *TESTS.rglob("*.py")]
    for path in every:
        for name in imports_of(path):
            if (module := modules().get(name)) is not None and module != path:
                direct[module].add(path)
    return {path: frozenset(_through_helpers(path, direct)) for path in every}


def _through_helpers(path: Path, direct: dict[Path, set[Path]]) -> set[Path]:
    found, open_paths = set(), [path]
    while open_paths:
        for user in direct.get(open_paths.pop(), ()):
            if user not in found:
                found.add(user)
                if user.is_relative_to(TESTS) and not is_test(user):
                    open_paths.append(user)
    return found


def room_tests(path: Path) -> set[Path]:
    """Test files in the folder that mirrors a source file's folder."""
    folder = TESTS / path.relative_to(SOURCE / "holdfast").parent
    return set(folder.glob("test_*.py")) if folder != TESTS else set()


def choose_tests(changed: Iterable[Path]) -> list[Path]:
    """Order the test files of a change, the most likely to break first."""
    ranks: tuple[set[Path], ...] = (set(), set(), set(), set())
    for path in changed:
        name = str(path.relative_to(ROOT))
        for start, tests in OTHER_TESTS.items():
            if name == start or name.startswith(f"{start}/"):
                ranks[1].update(TESTS / test for test in tests)
        if is_test(path):
            ranks[0].add(path)
            continue
        if path.suffix == ".py" and path.is_relative_to(ROOT):
            users = importers().get(path, frozenset())
            ranks[1].update(user for user in users if is_test(user))
            if path.is_relative_to(SOURCE):
                for user in users:
                    ranks[3].update(test for test in importers()[user] if is_test(test))
        if path.is_relative_to(SOURCE / "holdfast") and path.parent.name != "messages":
            ranks[2].update(room_tests(path))
    ordered = dict.fromkeys(test for rank in ranks for test in sorted(rank) if test.is_file())
    return list(ordered)


def run_pytest(arguments: Sequence[str], num_jobs: int) -> int:
    """Run pytest over the quick lane; no tests at all count as success."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(num_jobs), "--dist", "load", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if code == 5 else code


def main() -> None:
    """Parse the command line, choose tests and run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", help="compare the working tree with this commit (default: HEAD)")
    parser.add_argument("--commit", help="take the files that this commit changed")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds of tests (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the test files and run nothing")
    arguments = parser.parse_args()
    started = time.monotonic()
    changed = changed_files(arguments.since, arguments.commit)
    tests = [str(path.relative_to(ROOT)) for path in choose_tests(changed)]
    print(f"{len(changed)} changed files, {len(tests)} test files of their rooms and importers")
    if arguments.list:
        print("\n".join(tests))
        return
    quick = "not gpu and not slow"
    budget = f"--budget={arguments.budget}"
    others = [test for test in tests if test not in SMOKE]
    code = run_pytest(["-m", quick, budget, *others], arguments.jobs) if others else 0
    code = run_pytest(["-m", quick, *SMOKE], arguments.jobs) or code
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    main()

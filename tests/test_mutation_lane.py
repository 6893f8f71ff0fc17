"""The lane of planted bugs: its lists name places and tests that exist, every kernel has a bug, and verdicts are right."""

import ast
import json
from pathlib import Path

import pytest

import mutation_lane
from mutation_lane import Bug, read_bugs, report, room_of, run_bugs
from random_mutants import random_changes

TESTED = {
    "tests/test_adds.py": "from holdfast.adds import add\n\n\ndef test_add_small_numbers_sums():\n    assert add(1, 2) == 3\n"
}
SOURCE = "def add(x: int, y: int) -> int:\n    total = x + y\n    return total if total < 100 else 100\n"


def small_tree(folder: Path) -> Path:
    """Write a project with one source file and one test."""
    files = TESTED | {
        "src/holdfast/adds.py": SOURCE,
        "src/holdfast/__init__.py": "",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def is_compiled(function: ast.FunctionDef) -> bool:
    """Tell whether Triton compiles the function: a kernel, or what kernels call."""
    return any("jit" in ast.dump(mark) for mark in function.decorator_list)


def test_lists_every_bug_has_one_place_and_tests(root: Path) -> None:
    names = set()
    for bug in read_bugs():
        text = (root / "src" / "holdfast" / bug.file).read_text()
        planted = bug.planted(text)
        assert planted != text, f"{bug.name!r} changes nothing"
        if bug.file.endswith(".py"):
            ast.parse(planted)
        for test in bug.tests:
            file, _, function = test.partition("::")
            found = (
                (root / file).exists() and f"def {function.partition('[')[0]}" in (root / file).read_text()
                if function
                else (root / file).exists()
            )
            assert found, f"{bug.name!r}: {test} does not exist"
        assert bug.name not in names, f"two bugs have the name {bug.name!r}"
        names.add(bug.name)


def test_lists_are_many_and_in_every_package(root: Path) -> None:
    bugs = read_bugs()
    assert len(bugs) >= 150
    packages = {path.name for path in (root / "src" / "holdfast").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    without = packages - {bug.file.split("/")[0] for bug in bugs} - {"__pycache__"}
    assert not without, f"no bug is planted in {sorted(without)}"


def parts_of(kernel: ast.FunctionDef, functions: list[ast.FunctionDef]) -> list[ast.FunctionDef]:
    """Return a kernel and the compiled functions of its file that it calls, at any depth."""
    parts, names = [kernel], [kernel.name]
    for part in parts:
        called = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}.difference(names)
        parts += [one for one in functions if one.name in called and is_compiled(one)]
        names += called
    return parts


def test_lists_have_a_bug_in_every_kernel(root: Path) -> None:
    bugs, without = read_bugs(), []
    for path in sorted((root / "src" / "holdfast" / "kernels").rglob("*.py")):
        file, text = str(path.relative_to(root / "src" / "holdfast")), path.read_text()
        lines = [text[: text.index(bug.old)].count("\n") + 1 for bug in bugs if bug.file == file]
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        for kernel in (one for one in functions if one.name.endswith("kernel") and is_compiled(one)):
            parts = parts_of(kernel, functions)
            if not any(one.lineno <= line <= (one.end_lineno or 0) for one in parts for line in lines):
                without.append(f"{file}: {kernel.name}")
    assert not without, "no bug is planted in " + ", ".join(without)


def test_run_bugs_gives_each_its_verdict_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = ("tests/test_adds.py",)
    expected = {
        Bug("wrong sum", "adds.py", "x + y", "x - y", tests): "caught",
        Bug("border without a test", "adds.py", "< 100", "< 99", tests): "survived",
        Bug("the same at the border", "adds.py", "< 100", "<= 100", tests, equivalent="100 stays 100"): "equivalent",
        Bug("no import", "adds.py", "def add(", "def plus(", tests): "broken",
        Bug("no such place", "adds.py", "z = 1", "z = 2", tests): "broken",
        Bug("only a GPU shows it", "adds.py", "x + y", "x - y", tests, gpu=True): "needs CUDA",
    }
    monkeypatch.setattr(mutation_lane, "ROOT", small_tree(tmp_path))
    monkeypatch.setattr(mutation_lane, "has_cuda", lambda: False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take most of a child's second
    mutation_lane.WARM.set_forkserver_preload(["pytest"])
    outcomes = list(run_bugs(list(expected), 1, widen=False))
    assert [outcome.verdict for outcome in outcomes] == list(expected.values()), outcomes
    assert outcomes[0].caught_by == "tests/test_adds.py::test_add_small_numbers_sums"
    assert report(outcomes, len(outcomes), tmp_path / "table.json") == 1
    assert "survived: adds.py: border without a test" in capsys.readouterr().out
    assert json.loads((tmp_path / "table.json").read_text())["counts"]["broken"] == 2
    assert report(outcomes[:1] + outcomes[2:3], 2, None) == 0


@pytest.mark.parametrize("file", ["kernels/sampling/argmax.py", "engine/queues.py", "kernels/native/attention.c"])
def test_random_changes_of_a_source_are_single_and_valid(root: Path, file: str) -> None:
    text = (root / "src" / "holdfast" / file).read_text()
    changes = random_changes(text, 60, seed=1)
    assert changes == random_changes(text, 60, seed=1)
    assert len({change.new for change in changes}) > 20
    for change in changes:
        planted = Bug(change.name, file, change.old, change.new, ()).planted(text)
        assert planted != text
        if file.endswith(".py"):
            ast.parse(planted)


def test_room_of_a_file_is_the_nearest_folder_of_tests(root: Path) -> None:
    assert room_of("kernels/moe/routing.py", root) == "tests/kernels/moe"
    assert room_of("models/blueprints/layered.py", root) == "tests/models/blueprints"
    assert room_of("config.py", root) == "tests"

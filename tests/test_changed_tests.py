"""Which tests a change selects, and in which order."""

from pathlib import Path

import pytest

import changed_tests
from changed_tests import ROOT, SOURCE, TESTS, choose_tests

PREFIX = SOURCE / "holdfast" / "cache" / "prefix.py"


def test_choose_tests_of_a_module_puts_direct_importers_first() -> None:
    chosen = choose_tests([PREFIX])
    importers = [path for path in chosen if "holdfast.cache.prefix" in path.read_text()]
    assert importers
    assert chosen.index(importers[0]) == 0
    assert set((TESTS / "cache").glob("test_*.py")) <= set(chosen)
    assert any(path.parent.name == "engine" for path in chosen), "the scheduler imports it"
    assert len(chosen) < 200


def test_choose_tests_of_a_test_helper_takes_its_users() -> None:
    chosen = choose_tests([TESTS / "red_zones.py"])
    assert chosen


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("docs/memory.md", "test_docs.py"),
        ("README.md", "test_docs.py"),
        ("src/holdfast/messages/value.toml", "test_errors.py"),
        ("pyproject.toml", "test_packaging.py"),
        ("tests/test_errors.py", "test_errors.py"),
    ],
)
def test_choose_tests_of_other_files_names_their_test(name: str, test: str) -> None:
    assert TESTS / test in choose_tests([ROOT / name])


def test_changed_files_of_a_commit_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_tests, "_git", lambda *command: ["README.md", "no/such.py", "README.md"])
    assert changed_tests.changed_files(None, "HEAD") == [ROOT / "README.md"]


def test_importers_through_a_helper_reach_the_test() -> None:
    helper = TESTS / "error_codes.py"
    assert TESTS / "test_errors.py" in changed_tests.importers()[helper]
    assert TESTS / "test_errors.py" in changed_tests.importers()[SOURCE / "holdfast" / "errors.py"]
    assert all(isinstance(path, Path) for path in changed_tests.importers()[helper])


def test_imports_of_a_file_are_those_of_its_statements(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import a.b as c, d\nif d:\n    from e.f import g, h as i  # j\nfrom k import (\n    l,  # m\n    n,\n)\n"
    )
    wanted = {"a.b", "d", "e.f", "e.f.g", "e.f.h", "k", "k.l", "k.n"}
    assert changed_tests.imports_of(file) == wanted

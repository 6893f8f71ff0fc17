"""Bugs that no test saw once are planted one by one in a copy of the source: now a test sees each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from source_mutants import SOURCE_MUTANTS, SourceMutant

ASSERTED = re.compile(r"AssertionError|assert |Failed: ")
"""How the report of pytest begins where a test said no, rather than something else breaking."""


def plant(mutant: SourceMutant, source: Path) -> None:
    """Change the one place that the bug belongs to."""
    path = source / "holdfast" / mutant.file
    assert path.exists(), f"{mutant.file} is not there any more: say in source_mutants.py where the code went"
    text = path.read_text()
    found = text.count(mutant.old)
    assert found == 1, f"{mutant.old!r} is {found} times in {mutant.file}, not once: write it anew in source_mutants.py"
    path.write_text(text.replace(mutant.old, mutant.new))


@pytest.mark.parametrize("name", SOURCE_MUTANTS)
def test_every_bug_has_its_place_and_its_test(root: Path, tmp_path: Path, name: str) -> None:
    mutant = SOURCE_MUTANTS[name]
    place = tmp_path / "holdfast" / mutant.file
    place.parent.mkdir(parents=True)
    shutil.copy(root / "src" / "holdfast" / mutant.file, place)
    plant(mutant, tmp_path)
    file, _, test = mutant.test.partition("::")
    assert f"def {test}" in (root / file).read_text(), f"{mutant.test} is not there any more"


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCE_MUTANTS)
def test_a_bug_in_the_source_is_caught(root: Path, tmp_path: Path, name: str) -> None:
    mutant = SOURCE_MUTANTS[name]
    source = shutil.copytree(root / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    plant(mutant, source)
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", mutant.test],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, f"no test failed, or none ran (exit {done.returncode}): {done.stdout[-3000:]}"
    cases = ElementTree.parse(report).getroot()
    broken = [error.get("message", "") for error in cases.iter("error")]
    failures = [failure.get("message", "") for failure in cases.iter("failure")]
    assert not broken, f"something broke before a test could say no: {broken}"
    assert all(ASSERTED.match(words) for words in failures), f"not the words of an assertion: {failures}"
    assert any(re.search(mutant.says, words) for words in failures), f"{mutant.says!r} is not in {failures}"

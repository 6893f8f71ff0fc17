"""The examples run as they stand, and so does the script that makes a record."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from docs_rules import fences

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WORDS = {
    "async_streaming.py": "caller 2: Once upon a time",
    "basic.py": "'def fibonacci(n):' -> ",
    "chat.py": "prompt tokens cached",
    "logprobs.py": "perplexity of the prompt: ",
    "quantized_weights.py": "MiB of weights -> ",
    "ranks.py": "2 ranks, exact ",
    "streaming.py": "kv pages ",
    "turboquant_cache.py": "KiB, the newest tokens as they came",
}


def test_examples_all_have_expected_words() -> None:
    assert [path.name for path in EXAMPLES] == sorted(WORDS)


SLOW = {"ranks.py"}
"""Those that start several processes, three times."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else ()) for path in EXAMPLES],
    ids=[path.stem for path in EXAMPLES],
)
def test_example_runs_and_prints_expected_words(
    path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), str(tiny)])
    runpy.run_path(str(path), run_name="__main__")
    assert WORDS[path.name] in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_imports_public_names_of_holdfast(path: Path) -> None:
    modules = re.findall(r"^(?:from|import) (holdfast[\w.]*)", path.read_text(), re.MULTILINE)
    assert set(modules) <= {"holdfast"}


def test_readme_code_for_transformers_runs(tiny: Path) -> None:
    pytest.importorskip("transformers")
    (code,) = (text for text in fences((ROOT / "README.md").read_text(), "python") if "TurboQuantCache" in text)
    name = re.search(r'name = ("[^"]+")', code)
    assert name is not None
    made: dict[str, Any] = {}
    exec(compile(code.replace(name[1], repr(str(tiny))), "README.md", "exec"), made)
    assert made["cache"].get_seq_length() >= len("The sea is")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_fewer_than_40_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40


def test_cpu_benchmark_writes_record_where_readme_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from holdfast.cli.commands import invoke

    script = runpy.run_path(str(ROOT / "benchmarks" / "cpu.py"))
    assert script["record_path"]("latency").match("benchmarks/records/*-latency.json")
    called: list[list[str]] = []
    place = script["main"].__globals__
    monkeypatch.setitem(place, "ROOT", tmp_path)
    monkeypatch.setitem(place, "run", lambda arguments: called.append(arguments) or 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "some-name"])
    with pytest.raises(SystemExit) as ending:
        script["main"]()
    assert ending.value.code == 0
    assert called[0][-1].endswith("-some-name.json")
    assert (tmp_path / "benchmarks" / "records").is_dir()
    assert invoke([*called[0], "--help"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["cpu.py", "../Oh no"])
    with pytest.raises(SystemExit, match="letters, digits and hyphens"):
        script["main"]()

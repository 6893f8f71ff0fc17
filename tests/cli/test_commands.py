"""Help pages: quick, complete, and with examples that work."""

import re
import shlex

import pytest

from cli.cli_models import Here

PAGES = [("run",), ("chat",), ("plan",), ("bench", "latency"), ("bench", "throughput"), ("eval", "kv")]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
@pytest.mark.usefixtures("wide")
def test_a_page_has_examples_and_panels(page: tuple[str, ...], here: Here) -> None:
    ended = here(*page, "--help")
    assert ended.code == 0
    assert ended.err == ""
    panels = ["Model", "Memory", "Output", *(["Sampling"] if page not in (("plan",), ("eval", "kv")) else [])]
    assert all(re.search(rf"─ {panel} ─", ended.out) for panel in panels), ended.out
    examples = [line.strip() for line in ended.out.splitlines() if re.match(rf"\s+(.*\| )?holdfast {page[0]}\b", line)]
    assert 2 <= len(examples) <= 3
    for example in examples:
        words = shlex.split(example.partition("holdfast ")[2])
        assert words[: len(page)] == list(page)
        for option in (word for word in words if word.startswith("-") and word != "-"):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", ended.out.partition("─ Arguments")[2]), option


@pytest.mark.usefixtures("wide")
def test_other_spellings_are_understood_and_not_shown(here: Here) -> None:
    shown = here("run", "--help").out
    assert "--memory-utilization" in shown
    assert "--gpu-memory-utilization" not in shown
    assert "--block-size" not in shown


@pytest.mark.usefixtures("wide")
def test_all_commands_are_listed_however_few_of_them_are_built(here: Here) -> None:
    shown = here("--help").out
    assert all(re.search(rf"│ {name} +\S", shown) for name in ("run", "chat", "plan", "cache", "bench", "eval")), shown
    assert here("plan", "--help").out.count("Usage: holdfast plan ") == 1
    assert "did you mean plan?" in here("plam").err


@pytest.mark.usefixtures("wide")
def test_a_short_option_asks_for_help_too(here: Here) -> None:
    assert here("run", "-h").out == here("run", "--help").out

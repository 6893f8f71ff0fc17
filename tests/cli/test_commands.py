"""Help pages: quick, complete, and with examples that work."""

import re
import shlex

import pytest

from cli.cli_models import Here
from holdfast.cli.commands import COMMANDS, GROUPS, HABITS_LINE
from holdfast.cli.habits import COMMANDS_ELSEWHERE

PAGES = [command.path for command in COMMANDS]
FEW_PANELS = {
    ("cache",): [],
    ("ps",): [],
    ("quantize",): ["Arguments", "Model"],
    ("doctor",): ["Output"],
    ("completion",): ["Arguments"],
    ("bench", "serve"): ["Benchmark", "Output"],
}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
@pytest.mark.usefixtures("wide")
def test_help_page_has_panels_and_working_examples(page: tuple[str, ...], here: Here) -> None:
    ended = here(*page, "--help")
    assert ended.code == 0
    assert ended.err == ""
    panels = FEW_PANELS.get(page, ["Arguments", "Model", "Memory", "Output"])
    assert all(re.search(rf"^{panel}:$", ended.out, re.MULTILINE) for panel in ("Options", *panels)), ended.out
    assert max(map(len, ended.out.splitlines())) <= 120
    examples = [line.strip() for line in ended.out.splitlines() if re.match(rf"\s+(.*\| )?holdfast {page[0]}\b", line)]
    assert 2 <= len(examples) <= 3
    rows = ended.out.partition("Examples:")[2].partition("\n\n")[2]
    for example in examples:
        words = shlex.split(example.partition("holdfast ")[2])
        assert words[: len(page)] == list(page)
        for option in (word for word in words if word.startswith("-") and word != "-"):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", rows), option


@pytest.mark.parametrize("page", [*GROUPS, *PAGES], ids=" ".join)
def test_help_page_fits_80_columns(page: tuple[str, ...], here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = [line for line in here(*page, "--help").out.splitlines() if len(line) > 80]
    assert not long, long


@pytest.mark.usefixtures("wide")
def test_other_spellings_are_understood_and_not_shown(here: Here) -> None:
    shown = here("run", "--help").out
    assert "--memory-utilization" in shown
    assert "--gpu-memory-utilization" not in shown
    assert "--block-size" not in shown
    assert "--ctx-size" not in shown
    assert shown.count(HABITS_LINE) == here("--help").out.count(HABITS_LINE) == 1
    assert HABITS_LINE not in here("doctor", "--help").out


@pytest.mark.usefixtures("wide")
def test_help_lists_all_commands(here: Here) -> None:
    shown = here("--help").out
    names = ("run", "chat", "serve", "plan", "ps", "quantize", "cache", "doctor", "completion", "bench", "eval")
    assert re.findall(r"^  ([a-z]+) +\S", shown.partition("Commands:")[2], re.MULTILINE) == list(names)
    assert re.findall(r"^  ([a-z]+) +\S", here("eval").out.partition("Commands:")[2], re.MULTILINE) == ["kv", "weights"]


@pytest.mark.usefixtures("wide")
def test_defaults_are_reported_where_a_setting_has_one(here: Here) -> None:
    shown = " ".join(here("run", "--help").out.split())
    assert "--top-k N Keep the k most likely tokens; 0 keeps all. Default: 0." in shown
    assert "--memory-utilization SHARE Share of the device's memory that the engine may take: 0.9 or 90%. --kv" in shown
    assert "Default: 512,2048." in here("bench", "latency", "-h").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "x", "--temperature", "-1.5"), "temperature"),
        (("run", "x", "--temperature", "-inf"), "temperature"),
        (("run", "x", "--memory-limit", "-5GiB"), "memory_limit"),
        (("run", "x", "--stop", "-x", "--n", "-k"), "n"),
        (("plan", "x", "-tp", "--json"), "cli.needs_value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_option_accepts_value_starting_with_dash(here: Here, arguments: tuple[str, ...], words: str) -> None:
    ended = here(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.refuses(words), ended


@pytest.mark.usefixtures("wide")
def test_help_short_option_equals_long_option(here: Here) -> None:
    assert here("run", "-h").out == here("run", "--help").out


@pytest.mark.parametrize("name", COMMANDS_ELSEWHERE)
def test_commands_of_other_engines_say_what_to_type(here: Here, name: str) -> None:
    ended = here(name)
    assert ended.code == 2
    assert ended.refuses("cli.not_here")
    advised = re.findall(r"holdfast ([a-z]+)", ended.err)
    assert advised or "LLM.generate" in ended.err
    assert not {(name,) for name in COMMANDS_ELSEWHERE} & {command.path for command in COMMANDS}
    assert {(word,) for word in advised} <= {command.path for command in COMMANDS}

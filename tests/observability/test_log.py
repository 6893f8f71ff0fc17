"""The logger: quiet by default, set up once, robust to a wrong level."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.observability.log import LOG_LEVEL_VARIABLE, get_logger, log_to_stderr


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger("holdfast")
    was = root.level, root.handlers[:], root.propagate
    root.handlers.clear()
    root.propagate = True  # pytest watches loggers that keep to themselves by a handler of its own
    monkeypatch.delenv(LOG_LEVEL_VARIABLE, raising=False)
    yield
    root.setLevel(was[0])
    root.handlers[:] = was[1]
    root.propagate = was[2]


@pytest.mark.parametrize("name", ["runner", "holdfast.runner"])
def test_get_logger_names_are_under_holdfast(name: str) -> None:
    assert get_logger(name).name == "holdfast.runner"


def test_get_logger_adds_no_handlers() -> None:
    get_logger("engine")
    assert logging.getLogger("holdfast").handlers == []


def test_log_to_stderr_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("INFO")
    log_to_stderr("INFO")
    get_logger("runner").info("attention=%s because %s", "torch", "no GPU")
    err = capsys.readouterr().err
    assert err.count("attention=torch because no GPU") == 1
    assert "holdfast.runner" in err


def test_log_level_variable_overrides_the_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "debug")
    log_to_stderr("ERROR")
    get_logger("runner").debug("a detail")
    assert "a detail" in capsys.readouterr().err


def test_log_level_variable_unknown_level_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "chatty")
    log_to_stderr("ERROR")
    assert logging.getLogger("holdfast").level == logging.ERROR


SCRIPT = """
import logging, sys
from holdfast.observability.log import get_logger, log_in_scripts
{before}
log_in_scripts()
log_in_scripts()
get_logger("engine").info("a detail")
get_logger("engine").warning("a warning")
{after}
get_logger("engine").warning("another")
assert logging.getLogger().level == logging.WARNING, "the root logger is the program's"
"""


@pytest.mark.parametrize(
    ("level", "before", "after", "lines"),
    [
        (None, "", "", ["WARNING holdfast.engine: a warning", "WARNING holdfast.engine: another"]),
        (
            "info",
            "",
            "",
            [
                "INFO holdfast.engine: a detail",
                "WARNING holdfast.engine: a warning",
                "WARNING holdfast.engine: another",
            ],
        ),
        ("error", "", "", []),
        ("chatty", "", "", ["WARNING holdfast.engine: a warning", "WARNING holdfast.engine: another"]),
        ("info", "logging.basicConfig(format='app %(message)s')", "", ["app a detail", "app a warning", "app another"]),
        (
            None,
            "",
            "logging.basicConfig(format='app %(message)s')",
            ["WARNING holdfast.engine: a warning", "app another"],
        ),
        ("info", "logging.getLogger('holdfast').setLevel('ERROR')", "", []),
    ],
    ids=["default", "info", "error", "unknown", "configured", "configured later", "level of the program"],
)
def test_log_of_a_script_appears_once(level: str | None, before: str, after: str, lines: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LOG_LEVEL_VARIABLE}
    environment |= {LOG_LEVEL_VARIABLE: level} if level else {}
    code = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [re.sub(r" \d\d:\d\d:\d\d ", " ", line) for line in done.stderr.splitlines()] == lines

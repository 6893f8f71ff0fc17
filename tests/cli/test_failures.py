"""From exceptions to one line and an exit code."""

import logging
import re
import sys

import pytest

from holdfast.cli import failures
from holdfast.errors import (
    ConfigError,
    EngineDeadError,
    MemoryPlanError,
    ModelNotFoundError,
    PlanRow,
    PlanTable,
    PromptError,
)

CLAUSES = ("it was asked", "it is not there", "do this")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(*CLAUSES), 2),
        (PromptError(*CLAUSES), 2),
        (ModelNotFoundError(*CLAUSES), 1),
        (MemoryPlanError(*CLAUSES), 1),
        (EngineDeadError(*CLAUSES), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_errors_are_one_line(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(error) == code
    assert capsys.readouterr().err == "error: it was asked; it is not there; do this\n"


def test_a_fault_of_ours_says_so_and_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(ZeroDivisionError("a\nb")) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "ZeroDivisionError: a b" in line
    assert "HOLDFAST_DEBUG=1" in line


def test_files_and_memory_have_words_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(PermissionError(13, "Permission denied", "record.json")) == 1
    assert "record.json was needed; Permission denied" in capsys.readouterr().err
    assert failures.report(MemoryError()) == 1
    assert "smaller model" in capsys.readouterr().err


def test_a_traceback_comes_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    with pytest.raises(ConfigError) as caught:
        raise ConfigError(*CLAUSES)
    assert failures.report(caught.value) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: it was asked; it is not there; do this\n")


def raised_while(inner: BaseException, outer: BaseException) -> BaseException:
    """An error that a library made of another one."""
    outer.__context__ = inner
    return outer


def test_an_interrupt_in_disguise_is_an_interrupt() -> None:
    assert failures._was_interrupted(raised_while(KeyboardInterrupt(), ImportError("numpy failed")))
    assert not failures._was_interrupted(raised_while(ValueError(), ImportError("numpy failed")))


def test_a_chain_that_never_ends_is_given_up() -> None:
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert not failures._was_interrupted(first)


@pytest.mark.parametrize("is_debugging", [False, True])
def test_the_log_has_tracebacks_only_for_those_who_ask(
    is_debugging: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1" if is_debugging else "0")
    logger = logging.getLogger("holdfast")
    monkeypatch.setattr(logger, "handlers", [])
    failures.log_plainly()
    try:
        raise ValueError("inside")
    except ValueError as error:
        logging.getLogger("holdfast.engine").error("it stopped", exc_info=error)
    shown = capsys.readouterr().err
    assert "it stopped" in shown
    assert ("Traceback" in shown) is is_debugging


def test_a_refused_plan_is_drawn_for_whoever_watches_and_is_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = PlanTable("serve", (PlanRow("weights", 3 * 2**30, "12 tensors"),), 3 * 2**30, 2**30, "memory_limit")
    error = MemoryPlanError(*CLAUSES, table)
    assert failures.report(error) == 1
    line = "error: it was asked; it is not there; do this\n"
    assert capsys.readouterr().err == line
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert failures.report(error) == 1
    told = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert told.startswith(line)
    assert re.search(r"short +2.00 GiB", told)
    assert failures.report(MemoryPlanError(*CLAUSES)) == 1
    assert capsys.readouterr().err == line, "not every refusal has a table"

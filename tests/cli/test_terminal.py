"""The process of a command: Ctrl-C is deadly at first and an exception later; lines beside answers; JSON that every parser takes."""

import json
import math
import signal
import sys

import pytest

from cli.cli_models import refuse
from holdfast.cli import terminal
from holdfast.cli.terminal import dumps, write_line


@pytest.fixture(autouse=True)
def handler_put_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_leave_on_interrupt_lasts_until_raise_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal.leave_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is terminal.leave
    terminal.raise_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_leave_on_interrupt_keeps_foreign_handler():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminal.leave_on_interrupt()
    terminal.raise_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_leaving_writes_one_line_and_exits_as_a_shell_expects(monkeypatch):
    seen = []
    monkeypatch.setattr(terminal.os, "write", lambda file, text: seen.append((file, text)))
    monkeypatch.setattr(terminal.os, "_exit", seen.append)
    terminal.leave(signal.SIGINT, None)
    assert seen == [(2, b"interrupted\n"), 130]


def test_write_line_goes_to_stderr(capsys):
    write_line("one")
    write_line("")
    assert capsys.readouterr() == ("", "one\n\n")


def test_write_line_without_stderr_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    write_line("one")


def test_numbers_that_are_not_finite_become_null() -> None:
    value = {"a": [1.5, math.nan, -math.inf], 7: (math.inf, {"b": True}), "text": "\ud800 é"}
    read = json.loads(dumps(value), parse_constant=refuse)
    assert read == {"a": [1.5, None, None], "7": [None, {"b": True}], "text": "\ud800 é"}


def test_dumps_is_ascii_on_one_line() -> None:
    assert dumps({"text": "é\n"}).isascii()
    assert "\n" not in dumps({"text": "é\n"})

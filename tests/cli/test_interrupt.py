"""The life of Ctrl-C in a command: deadly at first, an exception later; a handler of somebody else's stays."""

import signal

import pytest

from holdfast.cli import interrupt


@pytest.fixture(autouse=True)
def handler_put_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_default_is_replaced_until_there_is_something_to_clean_up():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.leave_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is interrupt.leave
    interrupt.raise_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_elses_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.leave_on_interrupt()
    interrupt.raise_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_leaving_writes_one_line_and_exits_as_a_shell_expects(monkeypatch):
    seen = []
    monkeypatch.setattr(interrupt.os, "write", lambda file, text: seen.append((file, text)))
    monkeypatch.setattr(interrupt.os, "_exit", seen.append)
    interrupt.leave(signal.SIGINT, None)
    assert seen == [(2, b"interrupted\n"), 130]

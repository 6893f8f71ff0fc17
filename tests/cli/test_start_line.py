"""The line of a start: drawn at once on a terminal, redrawn while nothing else is reported, erased; plain lines elsewhere."""

import io
import sys
import threading

import pytest

from holdfast.cli import start_line
from holdfast.cli.app import run
from holdfast.cli.start_line import StartLine


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr; inside a test, since pytest sets stderr anew before it."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("COLUMNS", "40")
    return made


def screen(text: str) -> str:
    """What a terminal shows of one line."""
    cells: list[str] = []
    place = 0
    for sign in text:
        if sign == "\r":
            place = 0
            continue
        cells[place : place + 1] = [sign]
        place += 1
    return "".join(cells).rstrip()


def test_start_line_on_a_terminal_shows_the_last_stage(monkeypatch):
    terminal = watch(monkeypatch)
    with StartLine() as line:
        line.show("Importing the server")
        assert screen(terminal.getvalue()) == "Importing the server  0 s"
        line.report("Planning")
        assert screen(terminal.getvalue()) == "Planning  0 s"
        line.clear()
        assert screen(terminal.getvalue()) == ""
        line.report("A stage whose name is longer than the terminal")
        assert len(screen(terminal.getvalue())) == 39
    assert screen(terminal.getvalue()) == ""


def test_start_line_is_redrawn_while_a_stage_lasts(monkeypatch):
    terminal = watch(monkeypatch)
    monkeypatch.setattr(start_line, "REDRAW_SECONDS", 0.001)
    with StartLine() as line:
        line.show("Importing torch")
        while terminal.getvalue().count("Importing torch") < 3:
            pass
        line.clear()
        num_before = len(terminal.getvalue())
    assert len(terminal.getvalue()) == num_before
    for thread in threading.enumerate():
        if thread.name == "holdfast-start":
            thread.join(10)
            assert not thread.is_alive()


def test_start_line_in_a_pipe_writes_reported_stages(capsys):
    with StartLine() as line:
        line.show("Importing the server")
        line.report("Planning memory")
        line.clear()
    assert capsys.readouterr() == ("", "Planning memory\n")


@pytest.mark.parametrize("command", ["serve", "run", "chat"])
def test_start_line_before_an_error_is_erased(monkeypatch, command):
    terminal = watch(monkeypatch)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run([command, "--max-num-seqs", "0"]) == 2
    start, end, last = terminal.getvalue().rpartition("\r")
    assert "  0 s" in start
    assert screen(start + end) == ""
    assert last.startswith("error: max_num_seqs")

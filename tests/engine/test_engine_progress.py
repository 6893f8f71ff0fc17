import io
import sys

import pytest

from holdfast.api.progress import GenerationBar, LoadingBar, is_watched


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(monkeypatch) -> Terminal:
    """Called in the test itself, since pytest puts its own stderr back before each test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


def test_a_person_sees_prompts_and_tokens_per_second(monkeypatch):
    terminal = watch(monkeypatch)
    with GenerationBar(3, wanted=True) as bar:
        for number in range(4):
            bar.update(number, number * 100, number * 10)
    shown = terminal.getvalue()
    assert "Processed prompts" in shown
    assert "3/3" in shown
    assert "est. speed input: " in shown
    assert "output: " in shown


def test_a_person_sees_bytes_while_loading(monkeypatch):
    terminal = watch(monkeypatch)
    with LoadingBar() as bar:
        bar(0, 2**20)
        bar(2**19, 2**20)
    shown = terminal.getvalue()
    assert "Loading weights" in shown
    assert "left" in shown
    assert "0.5/1.0 MiB" in shown


def test_nobody_sees_anything_when_it_is_not_wanted(monkeypatch):
    terminal = watch(monkeypatch)
    with GenerationBar(3, wanted=False) as bar:
        bar.update(3, 1, 1)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["a pipe", "no stderr"])
def test_a_program_sees_nothing(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_watched()
    with GenerationBar(3, wanted=True) as bar, LoadingBar() as loading:
        loading(1, 2)
        bar.update(3, 1, 1)
    assert stream is None or stream.getvalue() == ""

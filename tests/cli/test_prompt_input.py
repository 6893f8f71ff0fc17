"""The prompt: from an option, from a pipe, or both."""

import io
import os
import sys
import threading
import time

import pytest

from holdfast.cli import prompt_input
from holdfast.cli.prompt_input import decode, read_prompt
from holdfast.errors import PromptError


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("option", "piped", "prompt"),
    [
        ("Hello", b"", "Hello"),
        (None, b"Hello\n", "Hello"),
        (None, b"Hello\r\n", "Hello"),
        (None, b"one\n\n", "one\n"),
        ("Sum up", b"text\n", "Sum up\n\ntext"),
        ("", b"text", "text"),
        (None, b"\xef\xbb\xbfmark", "mark"),
        (None, "käse".encode(), "käse"),
    ],
)
def test_what_is_asked(monkeypatch: pytest.MonkeyPatch, option: str | None, piped: bytes, prompt: str) -> None:
    pipe_in(monkeypatch, piped)
    assert read_prompt(option) == prompt


@pytest.mark.parametrize(("option", "words"), [(None, "no prompt"), ("", "an empty prompt")])
def test_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, option: str | None, words: str) -> None:
    pipe_in(monkeypatch, b"\n")
    with pytest.raises(PromptError, match=words):
        read_prompt(option)


def test_a_process_without_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt("Hello") == "Hello"


def test_a_terminal_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("typed by nobody"))
    assert read_prompt("Hello") == "Hello"


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(PromptError, match=r"byte 2 of it, 0xff, is not UTF-8.*iconv"):
        decode(b"ab\xff")


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_input, "MAX_STDIN_BYTES", 1 << 20)
    pipe_in(monkeypatch, b"x" * (1 << 20))
    assert len(read_prompt(None)) == 1 << 20
    pipe_in(monkeypatch, b"x" * ((1 << 20) + 1))
    with pytest.raises(PromptError, match="more than 1 MiB"):
        read_prompt(None)


def test_a_pipe_that_stays_open_is_not_a_silent_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(prompt_input, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))

    def write_late() -> None:
        time.sleep(0.3)
        os.write(writing, b"late")
        os.close(writing)

    thread = threading.Thread(target=write_late)
    thread.start()
    assert read_prompt(None) == "late"
    thread.join()
    sys.stdin.close()
    assert "waiting for standard input" in capsys.readouterr().err

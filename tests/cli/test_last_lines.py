"""Closed streams, narrow encodings and small limits of a process: one line each, the right exit code, no traceback."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cli.cli_models import MAIN, Ended
from holdfast.cli import app, terminal
from holdfast.cli.chat import Typed
from holdfast.errors import ModelFormatError


def shell(line: str, *arguments: object, **environment: str) -> Ended:
    """A command in a process of its own, behind words of a shell: {} stands for it."""
    words = ["bash", "-c", line.format('"$@"'), "bash", sys.executable, "-c", MAIN, *map(str, arguments)]
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(words, env=own, capture_output=True, timeout=300, check=False)
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_chat_closed_stdin_is_refused(tiny: Path) -> None:
    ended = shell("{} <&-", "chat", tiny)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "error: Standard input is closed. Start the chat at a terminal, or pipe in messages, one per line.\n"
    )


@pytest.mark.slow
def test_answers_and_tables_where_only_ascii_can_be_written(tiny: Path) -> None:
    line = "printf 'h\\xc3\\xa9\\xf0\\x9f\\x98\\x80\\n/undo\\n/system \\xf0\\x9f\\x98\\x80\\n/memory\\n' | {}"
    ended = shell(line, "chat", tiny, "--max-tokens", 6, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert ended.code == 0, ended
    assert ended.out.isascii()
    assert ended.err.isascii()
    assert "\\ufffd" in ended.out, "a model of random bytes says what is no character"
    assert "(removed: 'h\\xe9\\U0001f600')" in ended.err
    assert "#####" in ended.err
    assert "Traceback" not in ended.err


def test_plan_ascii_output_uses_plain_signs() -> None:
    ended = shell("{}", "plan", "Qwen3-8B", "--gpu", "h200", "--sweep", PYTHONIOENCODING="ascii", COLUMNS="20")
    assert ended.code == 0, ended
    assert ended.out.isascii()
    assert "###" in ended.out


def test_run_low_address_space_limit_is_named(tiny: Path) -> None:
    ended = shell("ulimit -v 300000; {} </dev/null", "run", tiny, "-q", "-p", "hi")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("\n") == 1
    assert "this process may map 292 MiB (ulimit -v)" in ended.err


def test_run_low_open_file_limit_is_named(tiny: Path) -> None:
    held = " ".join(f"{number}</dev/null" for number in range(3, 9))
    ended = shell(f"exec {held}; ulimit -n 12; {{}} </dev/null", "run", tiny, "-q", "-p", "hi", "--max-tokens", 2)
    assert "Traceback" not in ended.err
    if ended.code:
        assert ended.code == 1
        assert ended.err.count("\n") == 1
        assert "this process may open 12 (ulimit -n). Raise it" in ended.err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files", "model.safetensors"), "may open 12 (ulimit -n)"),
        (ImportError("libtorch.so: cannot open shared object file: Too many open files"), "may open 12 (ulimit -n)"),
        (MemoryError(), "may map 64 MiB (ulimit -v)"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "may map 64 MiB (ulimit -v)"),
        (RuntimeError("can't start new thread"), "may map 64 MiB (ulimit -v)"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 5 bytes"), "may map 64 MiB"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_report_names_process_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    limits = {resource.RLIMIT_NOFILE: (12, 12), resource.RLIMIT_AS: (64 * 2**20, 64 * 2**20)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert app.report(error) == 1
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1
    wrapped = ModelFormatError("value.empty", name="model.safetensors")
    wrapped.__cause__ = error
    assert app.report(wrapped) == 1
    assert words in capsys.readouterr().err, "also where an error of ours was made of it"


def test_line_that_cannot_be_decoded_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter([UnicodeDecodeError("ascii", b"\xf0\x9f", 0, 1, "ordinal not in range"), "next", EOFError()])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return line

    assert list(Typed(read)) == ["next"]
    assert "error: the line is not ascii and was dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello 😀", "Hello 😀"),
        ("a\n b\x1b[31m", "a b␛[31m"),
        ("👩‍👩‍👧" * 40, "👩‍👩‍👧" * 15 + "👩‍..."),
        ("\ud83d half", "\ud83d half"),
    ],
    ids=ascii,
)
def test_quoted_stays_on_one_line_of_80_characters(text: str, shown: str) -> None:
    assert terminal.quoted(text) == shown
    assert len(terminal.quoted(text)) <= 80

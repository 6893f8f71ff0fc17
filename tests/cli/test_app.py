"""The entry point: however a command ends, an exit code and at most one line on stderr."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.cli_models import Here, finish, start
from holdfast import __version__
from holdfast.loading.default_model import find_default_model


def test_the_version(here: Here) -> None:
    ended = here("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"holdfast {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("bench",)], ids=["holdfast", "bench"])
def test_no_command_is_a_question_for_help(here: Here, arguments: tuple[str, ...]) -> None:
    ended = here(*arguments)
    assert ended.code == 0
    assert "usage: holdfast" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rum",), "did you mean run?"),
        (("bench", "latence"), "did you mean latency?"),
        (("xyzzy",), "no such command"),
        (("run", "--temprature", "1"), "did you mean --temperature"),
        (("chat", "--max-model-length", "1"), "did you mean --max-model-len"),
        (("run", "one", "two"), "argument two was asked; holdfast run takes no further argument"),
        (("run", "-p"), "option -p/--prompt was asked; it requires an argument"),
        (("run", "--stop", "--raw"), "requires an argument"),
        (("run", "--raw=yes"), "option --raw was asked"),
        (("--verbose", "run"), "holdfast has no such option"),
        (("cache", "model"), "holdfast cache takes no further argument"),
        (("run", "-tp", "2"), "no such option"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(here: Here, arguments: tuple[str, ...], words: str) -> None:
    ended = here(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert words in ended.err


def test_a_full_disk_is_told(tiny: Path) -> None:
    with open("/dev/full", "wb") as full:
        ended = finish(start("run", tiny, "-q", "-p", "Hello", stdout=full))
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert "No space left" in ended.err


def wait_for(process: subprocess.Popen[bytes], is_there: "os.PathLike[str]", words: bytes) -> None:
    """Until the process has words in a file of /proc."""
    deadline = time.monotonic() + 60
    while words not in Path(is_there).read_bytes():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, f"{words!r} never came"
        time.sleep(0.002)


@pytest.mark.parametrize("library", ["libtorch_cpu", "_multiarray_umath"])
def test_interrupted_while_torch_is_imported(library: str) -> None:
    process = start("run", "-p", "Hello")
    wait_for(process, Path(f"/proc/{process.pid}/maps"), library.encode())
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert ended.err.endswith("interrupted\n")


def read_until(stream: object, words: bytes) -> bytes:
    """What a pipe brings, up to and including words."""
    got = b""
    while words not in got:
        piece = os.read(stream.fileno(), 4096)  # type: ignore[attr-defined]
        assert piece, f"{words!r} never came: {got!r}"
        got += piece
    return got


def test_interrupted_while_weights_are_loaded() -> None:
    process = start("run", "-p", "Hello", env={"HOLDFAST_LOG_LEVEL": "INFO"})
    assert process.stderr is not None
    read_until(process.stderr, b"attention=")
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.err


def test_interrupted_while_it_answers(endless: Path) -> None:
    process = start("run", endless, "-p", "Tell me a long story", "--ignore-eos", "--max-tokens", "90000")
    assert process.stdout is not None
    assert process.stdout.read(8)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.err
    assert time.monotonic() - began < 10


def test_a_closed_pipe_ends_in_silence(endless: Path) -> None:
    process = start("run", endless, "-q", "-p", "Tell me a long story", "--ignore-eos", "--max-tokens", "90000")
    assert process.stdout is not None
    assert process.stdout.read(8)
    process.stdout.close()
    process.stdout = None
    ended = finish(process)
    assert (ended.code, ended.err) == (141, "")


def test_the_default_model_answers_in_a_fresh_process() -> None:
    ended = finish(
        start("run", "-p", "What is the capital of France?", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    )
    assert ended.code == 0, ended
    assert "Paris" in ended.out
    assert "\x1b" not in ended.out + ended.err
    assert "weights" in ended.err
    assert "tokens/s" in ended.err
    assert find_default_model().name in ended.err

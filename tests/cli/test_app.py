"""The entry point: however a command ends, an exit code and at most one line on stderr."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cli.cli_models import Here, finish, start
from holdfast import __version__
from holdfast.cli import app, terminal
from holdfast.errors import (
    ConfigError,
    EngineDeadError,
    MemoryPlanError,
    ModelNotFoundError,
    PlanRow,
    PlanTable,
    PromptError,
)
from holdfast.loading.model_files import find_default_model


def test_version_option_prints_version(here: Here) -> None:
    ended = here("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"holdfast {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("bench",)], ids=["holdfast", "bench"])
def test_cli_without_command_prints_help(here: Here, arguments: tuple[str, ...]) -> None:
    ended = here(*arguments)
    assert ended.code == 0
    assert "usage: holdfast" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rum",), "Did you mean run?"),
        (("bench", "latence"), "Did you mean latency?"),
        (("xyzzy",), "cli.unknown_command"),
        (("chat", "--model", "x", "y"), "A command takes one model, got x, y"),
        (("run", "--temprature", "1"), "Did you mean --temperature"),
        (("chat", "--max-model-length", "1"), "Did you mean --max-model-len"),
        (("chat", "one", "two"), "cli.extra_argument"),
        (("run", "-p"), "Option -p/--prompt needs a value"),
        (("run", "--stop", "--raw"), "cli.needs_value"),
        (("run", "--raw=yes"), "cli.bad_option"),
        (("--verbose", "run"), "holdfast has no option '--verbose'"),
        (("cache", "model"), "cli.extra_argument"),
        (
            ("run", "--data-parallel-size", "2"),
            "cli.not_here",
        ),
    ],
)
def test_cli_bad_arguments_print_one_error_line(here: Here, arguments: tuple[str, ...], words: str) -> None:
    ended = here(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.refuses(words), ended


def test_run_full_disk_reports_no_space(here: Here, tiny: Path) -> None:
    with open("/dev/full", "w") as full, redirect_stdout(full):
        ended = here("run", tiny, "-q", "-p", "Hello", "--max-tokens", "4")
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


@pytest.mark.parametrize("library", ["libtorch_cpu", pytest.param("_multiarray_umath", marks=pytest.mark.slow)])
def test_run_interrupted_during_torch_import_exits_130(library: str) -> None:
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


@pytest.mark.slow
def test_run_interrupted_during_weight_load_exits_130() -> None:
    process = start("run", "-p", "Hello", env={"HOLDFAST_LOG_LEVEL": "INFO"})
    assert process.stderr is not None
    read_until(process.stderr, b"attention=")
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.err


def test_run_interrupted_during_answer_exits_130(endless: Path) -> None:
    process = start("run", endless, "-p", "Tell me a long story", "--ignore-eos", "--max-tokens", "90000")
    assert process.stdout is not None
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.err


def test_run_closed_pipe_exits_141_silently(here: Here, endless: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, redirect_stdout(pipe):
        ended = here("run", endless, "-q", "-p", "A long story", "--ignore-eos", "--max-tokens", "90000")
    assert (ended.code, ended.err) == (141, "")


@pytest.mark.slow
def test_run_default_model_answers_in_fresh_process() -> None:
    ended = finish(start("run", "-p", "Who wrote Hamlet?", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}))
    assert ended.code == 0, ended
    assert "Shakespeare" in ended.out
    assert "\x1b" not in ended.out + ended.err
    assert "weights" in ended.err
    assert "tokens/s" in ended.err
    assert find_default_model().name in ended.err


LINE = "error: --x must not be empty.\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("value.empty", name="--x"), 2),
        (PromptError("value.empty", name="--x"), 2),
        (ModelNotFoundError("value.empty", name="--x"), 1),
        (MemoryPlanError("value.empty", name="--x"), 1),
        (EngineDeadError("value.empty", name="--x"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_report_holdfast_error_is_one_line(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.report(error) == code
    assert capsys.readouterr().err == LINE


def test_report_unexpected_error_names_debug_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.report(ZeroDivisionError("a\nb")) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "ZeroDivisionError: a b" in line
    assert "HOLDFAST_DEBUG=1" in line


def test_report_file_and_memory_errors_name_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.report(PermissionError(13, "Permission denied", "record.json")) == 1
    assert "record.json: Permission denied" in capsys.readouterr().err
    assert app.report(MemoryError()) == 1
    assert "smaller model" in capsys.readouterr().err


def test_report_with_debug_prints_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    with pytest.raises(ConfigError) as caught:
        raise ConfigError("value.empty", name="--x")
    assert app.report(caught.value) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith(LINE)


def raised_while(inner: BaseException, outer: BaseException) -> BaseException:
    """An error that a library made of another one."""
    outer.__context__ = inner
    return outer


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """An interrupt that is reported leaves Ctrl-C as the system has it; other tests want it as it was."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_report_error_raised_during_interrupt_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.report(raised_while(KeyboardInterrupt(), ImportError("numpy failed"))) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert app.report(raised_while(ValueError(), ImportError("numpy failed"))) == 1
    assert "numpy failed" in capsys.readouterr().err


def test_report_cyclic_exception_context_terminates() -> None:
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert app.report(first) == 1


@pytest.mark.parametrize("is_debugging", [False, True])
def test_log_plainly_prints_tracebacks_only_when_debugging(
    is_debugging: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1" if is_debugging else "0")
    logger = logging.getLogger("holdfast")
    monkeypatch.setattr(logger, "handlers", [])
    terminal.log_plainly()
    try:
        raise ValueError("inside")
    except ValueError as error:
        logging.getLogger("holdfast.engine").error("it stopped", exc_info=error)
    shown = capsys.readouterr().err
    assert "it stopped" in shown
    assert ("Traceback" in shown) is is_debugging


def test_report_refused_plan_draws_table_only_at_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = PlanTable("serve", (PlanRow("weights", 3 * 2**30, "12 tensors"),), 3 * 2**30, 2**30, "memory_limit")
    error = MemoryPlanError("value.empty", name="--x", table=table)
    assert app.report(error) == 1
    line = LINE
    assert capsys.readouterr().err == line
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert app.report(error) == 1
    reported = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert reported.startswith(line)
    assert re.search(r"short +2.00 GiB", reported)
    assert app.report(MemoryPlanError("value.empty", name="--x")) == 1
    assert capsys.readouterr().err == line, "not every refusal has a table"


def test_python_m_holdfast_prints_version() -> None:
    done = subprocess.run([sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"holdfast {__version__}\n", "")


@pytest.mark.parametrize("is_profiled", [False, True])
def test_main_exits_at_once_unless_profiled(is_profiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler writes its file when the program has returned to it."""
    left: list[int] = []
    ended: list[str] = []
    for name in ("leave_on_interrupt", "escape_unwritable"):
        monkeypatch.setattr(app, name, lambda: None)
    monkeypatch.setattr(app, "run", lambda arguments: 3)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: ended.append("atexit"))
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(sys, "getprofile", lambda: print if is_profiled else None)
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 3
    assert (left, ended) == (([], []) if is_profiled else ([3], ["atexit"]))

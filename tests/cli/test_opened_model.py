"""A model that a command opens: what is shown while it loads, where prompts come from, defaults of sampling, and speed."""

import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from cli.cli_models import Here, pipe_in
from cli.page_reader import read_page
from engine.fakes import assert_at_rest, make_engine, solo
from error_codes import raises_code
from holdfast.api.llm import LLM
from holdfast.cli import opened_model
from holdfast.cli.opened_model import (
    decode,
    import_torch,
    model_name,
    open_quietly,
    open_visibly,
    prepare,
    read_prompt,
    report_file,
    sampling_params,
    speed_of,
    stream,
)
from holdfast.cli.terminal import for_terminal, leave, write_answer
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, HoldfastError, ModelNotFoundError, PromptError
from holdfast.loading.model_files import find_default_model
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from holdfast.request.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _no_handlers() -> None:
    logging.getLogger("holdfast").handlers.clear()


@pytest.mark.parametrize("command", ["run", "chat"])
def test_command_without_tokenizer_refuses_text(command: str, here: Here) -> None:
    ended = here(command, "/nowhere", "--tokenizer", "none", stdin="hello")
    assert ended.code != 0
    assert ended.refuses("cli.no_tokenizer")
    assert "prompt_token_ids" in ended.err


def test_open_quietly_prints_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_quietly(EngineConfig(model=str(tiny), max_num_seqs=1))
    assert gc.isenabled(), "collections are paused only while a model opens"
    assert capsys.readouterr() == ("", "")
    assert opened.name == tiny.name
    assert opened.context_tokens == 256
    assert opened.load_seconds > 0
    assert opened.llm.memory is opened.memory


def test_plain_lines_where_none_watches(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_visibly(EngineConfig(model=str(tiny)))
    lines = capsys.readouterr().err.splitlines()
    stages = ["Planning memory", "Reading 394.75 KiB of weights", "Taking KV pages and workspace"]
    assert [line for line in lines[:-1] if not line.startswith("Compiling")] == [f"Loading {tiny.name}", *stages]
    assert lines[-1].startswith("Model loading took 394.75 KiB memory and ")


def test_open_visibly_at_terminal_shows_bar_with_bytes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    open_visibly(EngineConfig(model=str(tiny)))
    logging.getLogger("holdfast").handlers.clear()
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "Loading weights" in shown
    assert "394.8" in shown
    assert [words for words in ("Reading headers", "Planning memory", "Taking KV pages") if words not in shown] == []
    assert shown.endswith(" \r"), "the line of the start is erased"
    assert "Model loading took" not in shown


def test_open_model_memory_report_draws_owners(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.html"
    opened = open_quietly(EngineConfig(model=str(tiny), max_num_seqs=1), file)
    assert capsys.readouterr() == ("", "")
    document = read_page(file.read_text(encoding="utf-8"))
    owners = [row.all("td")[0].text for row in document.all("tbody")[0].all("tr")]
    assert owners[: len(opened.memory.rows)] == [row.owner for row in opened.memory.rows]
    drawn = [box for group in document.all("svg")[1].children for box in group.children]
    only_planned = sum(
        row.planned_bytes for row in opened.memory.rows if row.held_bytes is None and "serve" in row.phases
    )
    unaccounted = max(0, opened.memory.unaccounted_bytes or 0)
    total = sum(int(box.attributes["data-bytes"]) for box in drawn)
    assert total == opened.memory.held_bytes + only_planned + unaccounted
    file.unlink()
    open_visibly(EngineConfig(model=str(tiny)), file)
    assert capsys.readouterr().err.splitlines()[-1] == f"memory report written to {file}"
    assert file.exists()


def test_report_file_refuses_folder(tmp_path: Path) -> None:
    assert report_file(None) is None
    assert report_file(str(tmp_path / "memory.html")) == tmp_path / "memory.html"
    with raises_code("cli.bad_page_file", ConfigError, option="--memory-report", reason="it is a folder"):
        report_file(str(tmp_path))


@pytest.mark.parametrize("open_model", [open_quietly, open_visibly])
def test_open_model_missing_path_raises_and_keeps_gc_enabled(open_model, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        open_model(EngineConfig(model=str(tmp_path / "nothing")))
    assert gc.isenabled()


def test_model_name_is_short_and_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_name(EngineConfig(model=str(tmp_path / "A-Model/"))) == "A-Model"
    assert model_name(EngineConfig(model="x/bad\x1b[31m")) == "bad\\x1b[31m"
    assert model_name(EngineConfig()) == find_default_model().name
    monkeypatch.chdir(tmp_path)
    assert model_name(EngineConfig(model=".")) == tmp_path.name


def test_interrupts_are_exceptions_once_torch_is_there() -> None:
    before = signal.signal(signal.SIGINT, leave)
    try:
        import_torch()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import_torch()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "a choice of a caller else is left alone"
    finally:
        signal.signal(signal.SIGINT, before)


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
def test_read_prompt_joins_option_and_pipe(
    monkeypatch: pytest.MonkeyPatch, option: str | None, piped: bytes, prompt: str
) -> None:
    pipe_in(monkeypatch, piped)
    assert read_prompt(option) == prompt


@pytest.mark.parametrize("option", [None, ""])
def test_prompt_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, option: str | None) -> None:
    pipe_in(monkeypatch, b"\n")
    with raises_code("cli.no_prompt", PromptError):
        read_prompt(option)


def test_read_prompt_without_stdin_returns_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt("Hello") == "Hello"


def test_read_prompt_ignores_terminal_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("typed by no caller"))
    assert read_prompt("Hello") == "Hello"


def test_bytes_that_are_no_text() -> None:
    with raises_code("cli.not_utf8", PromptError, place=2, found="0xff"):
        decode(b"ab\xff")


def test_read_prompt_refuses_oversized_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_model, "MAX_STDIN_BYTES", 1 << 20)
    pipe_in(monkeypatch, b"x" * (1 << 20))
    assert len(read_prompt(None)) == 1 << 20
    pipe_in(monkeypatch, b"x" * ((1 << 20) + 1))
    with raises_code("cli.long_stdin", PromptError, limit_mib=1):
        read_prompt(None)


def test_read_prompt_slow_pipe_prints_waiting_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(opened_model, "PATIENCE_SECONDS", 0.05)
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


SILENT = GenerationDefaults()


ADVICE = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize(
    ("given", "advice", "temperature"),
    [
        ({}, SILENT, 0.0),
        ({}, ADVICE, 0.6),
        ({"temperature": 0.0}, ADVICE, 0.0),
        ({"top_p": 0.9}, SILENT, 1.0),
        ({"top_k": 5}, SILENT, 1.0),
        ({"min_p": 0.1}, SILENT, 1.0),
        ({"n": 2}, SILENT, 1.0),
        ({"n": 2}, ADVICE, 0.6),
        ({"top_p": 0.9, "temperature": 0.3}, SILENT, 0.3),
        ({"max_tokens": 5}, SILENT, 0.0),
    ],
)
def test_sampling_params_prefer_given_then_advice_then_greedy(given, advice, temperature) -> None:
    params = sampling_params(given, advice)
    assert params.temperature == temperature
    assert all(getattr(params, name) == value for name, value in given.items())


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [
        (SamplingParams(), 50),
        (SamplingParams(max_tokens=7), 7),
        (SamplingParams(max_tokens=100), 100),
        (SamplingParams(min_tokens=60), 60),
    ],
    ids=["default", "less", "more", "at least"],
)
def test_prepare_bounds_answer_unless_max_tokens_given(params: SamplingParams, max_tokens: int) -> None:
    prepared = prepare(make_engine(max_model_len=128), "Hello", params, 50)
    assert (prepared.max_tokens, prepared.params.max_tokens) == (max_tokens, max_tokens)


@pytest.mark.parametrize("requested", [None, 50], ids=["open", "requested"])
def test_prepare_clamps_max_tokens_to_context(requested: int | None, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare(make_engine(max_model_len=16), "Hello", SamplingParams(max_tokens=requested), 50)
    assert prepared.max_tokens == 11
    reported = [
        record.getMessage() for record in caplog.records if "the answer ends after at most 11" in record.getMessage()
    ]
    assert len(reported) == (requested is not None), "a bound that was requested is cut with a warning"


def test_messages_go_through_the_template() -> None:
    prepared = prepare(make_engine(), [{"role": "user", "content": "Hi"}], SamplingParams(), 50)
    assert prepared.prompt == "user: Hi\nassistant: "


def test_stream_closed_early_ends_request() -> None:
    engine = make_engine()
    deltas = stream(LLM.from_engine(engine), prepare(engine, "Hello", SamplingParams(temperature=0.0), 20))
    first = next(deltas)
    assert solo("Hello", SamplingParams(temperature=0.0, max_tokens=20))[1].startswith(first.text)
    deltas.close()
    assert_at_rest(engine)


def test_stream_failed_request_raises() -> None:
    engine = make_engine()
    engine.runner.script["Hello"] = [ord("a"), -1]  # type: ignore[attr-defined]
    with pytest.raises(HoldfastError, match="not finite"):
        list(stream(LLM.from_engine(engine), prepare(engine, "Hello", SamplingParams(), 20)))


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_terminal("a\x1b[31m\nb\tc\x07\x9b\x7f") == "a␛[31m\nb\tc␇\ufffd␡"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stdout, shown in ((Terminal(), "␛é"), (io.StringIO(), "\x1bé")):
        monkeypatch.setattr(sys, "stdout", stdout)
        write_answer("\x1bé")
        assert stdout.getvalue() == shown


def output(num_prompt: int, num_output: int, metrics: RequestMetrics | None) -> RequestOutput:
    completions = [CompletionOutput(0, token_ids=[1] * num_output)]
    return RequestOutput("0", None, [1] * num_prompt, completions, True, metrics=metrics)


def test_speed_is_tokens_by_the_seconds_they_took() -> None:
    speed = speed_of(output(100, 11, RequestMetrics(0.5, 2.5, 7.5, 20, 0)))
    assert (speed.prefill_rate, speed.decode_rate) == (40.0, 2.0)
    assert speed.line == (
        "prompt 100 tokens (20 cached), generated 11 tokens, first token 2.500 s, "
        "prefill 40.0 tokens/s, decode 2.0 tokens/s"
    )


@pytest.mark.parametrize(
    ("num_output", "metrics"),
    [(0, None), (1, RequestMetrics(0.0, 0.0, 0.0, 0, 0)), (1, RequestMetrics(0.0, 1.0, 1.0, 3, 0))],
)
def test_speed_of_unmeasured_decode_omits_rate(num_output: int, metrics: RequestMetrics | None) -> None:
    speed = speed_of(output(3, num_output, metrics))
    assert speed.decode_rate is None
    assert "decode" not in speed.line

"""Flags of vLLM, llama.cpp and Ollama: put as ours, taken in one line, or answered in one sentence."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from cli.cli_models import Here
from holdfast.cli.commands import COMMANDS, Command
from holdfast.cli.habits import HABITS, MODEL, SEVERAL_VALUES, as_ours
from holdfast.cli.options import ARGUMENTS
from holdfast.cli.serve import ServeOptions, check_parsers
from holdfast.errors import ConfigError
from holdfast.request.vllm_flags import find_flag, read_value
from holdfast.request.vllm_names import ENGINE_NAMES, PARSERS_OF_VLLM, SERVER_NAMES, SHORT_FLAGS

BY_PATH = {command.path: command for command in COMMANDS}
Translate = Callable[..., list[str]]


def ours(line: str, *more: str) -> list[str]:
    """A command line behind `holdfast`, in our flags."""
    words = [*line.split(), *more]
    path = next(path for path in BY_PATH if tuple(words[: len(path)]) == path)
    return as_ours(path, BY_PATH[path].rows, words[len(path) :])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("run -m x.gguf -c 4096 -n 128 -p hi", "--max-model-len=4096 --max-tokens=128 -p hi x.gguf"),
        ("run x --ctx-size=4096 --n-predict -1", "--max-model-len=4096 --max-tokens=2147483647 x"),
        ("run --model x --temp 0.5 --top-k 3", "--temp 0.5 --top-k 3 x"),
        ("run x -ngl 0", "--device=cpu x"),
        ("run x why is it", "x --prompt=why is it"),
        ("run -m x why", "x --prompt=why"),
        ("run x --n 3 --repeat-penalty 1.1 -r User:", "--n 3 --repetition-penalty=1.1 --stop=User: x"),
        ("run x --format json", '--structured-outputs={"json_object": true} x'),
        ("run x -no-cnv --stop -n", "--raw --stop -n x"),
        ("chat -hf owner/name:Q4_K_M -np 4 -b 512", "--max-num-seqs=4 --max-num-batched-tokens=512 owner/name:Q4_K_M"),
        ("serve --model x -tp 2 --max_model_len 8k", "--tensor-parallel-size 2 --max-model-len 8k x"),
        (
            "serve x -sc {} -ep -a my-name",
            "--speculative-config {} --enable-expert-parallel --served-model-name=my-name x",
        ),
        ("serve x --tool-call-parser hermes -q fp8", "--tool-parser=hermes --quantization=fp8 x"),
        ('serve x --allowed-origins ["https://a.b"]', "--allow-origin=https://a.b x"),
        ("plan -m x -c 8K", "--max-model-len=8K x"),
        ("bench serve --base-url u --num-prompts 9 --max-concurrency 2", "--url=u --requests=9 --clients=2"),
        ("bench latency --model x --batch-size 8 --num-iters 2", "--batch=8 --repeats=2 x"),
        ("bench throughput --model x --num-prompts 4 -t 2", "--num-prompts 4 --threads=2 x"),
        ("completion --shell bash", "bash"),
    ],
)
def test_flag_of_another_program_becomes_ours(typed: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert " ".join(ours(typed)) == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", BY_PATH, ids=" ".join)
def test_as_ours_keeps_own_flags(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for row in BY_PATH[path].rows:
        for flag in () if row.panel == ARGUMENTS else row.all_flags:
            typed = [flag, "-x"] if row.metavar else [flag]
            assert as_ours(path, BY_PATH[path].rows, typed) == typed
    assert capsys.readouterr().err == ""


def test_flags_without_effect_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    typed = (
        "serve x --trust-remote-code --disable-log-requests --disable_log_stats --swap-space 4 --enable-chunked-prefill "
        "--enable-auto-tool-choice --no-enable-lora -dp 1 -O3 --compilation-config.mode 3 -fa on -ngl 99 --mlock --port 1 "
        "--cudagraph-capture-sizes 1 2 4 --hf-overrides {} --async-scheduling false --uvicorn-log-level=info"
    )
    assert ours(typed) == ["--port", "1", "x"]
    line = capsys.readouterr().err
    assert line.startswith("note: ignored: ")
    assert line.count("\n") == 1
    for words in (
        "--trust-remote-code (code out of a model folder is never run",
        "--disable-log-requests (holdfast serve logs prompts only with --log-requests)",
        "--disable-log-stats (",
        "--swap-space 4",
        "-O3, --compilation-config.mode 3, --cudagraph-capture-sizes 1 2 4 (graph sizes",
        "-fa on (",
        "-ngl 99 (",
        "--enable-auto-tool-choice (",
        "--async-scheduling false (",
    ):
        assert words in line


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("serve x --no-enable-chunked-prefill", "cli.not_here"),
        ("serve x --enable-lora", "cli.not_here"),
        ("serve x --lora-modules a=b c=d", "--lora-modules a=b c=d is not in this version"),
        ("serve x -dp 2", "cli.not_here"),
        ("serve x --ssl-keyfile k", "cli.not_here"),
        ("serve x --hf-overrides.rope 1", "cli.not_here"),
        ("serve x -n 5", "it belongs to a request"),
        ("serve x --swap-space", "cli.needs_value"),
        ("run x -ngl 20", "cli.some_gpu_layers"),
        ("run x -t 4", "set OMP_NUM_THREADS=N"),
        ("run x -ctk q8_0", "use --kv-cache-dtype"),
        ("run x --mirostat 2", "use temperature, top-k"),
        ("run x -f prompt.txt", "pipe it in"),
        ("run x -m y -m z", "cli.several_models"),
        ("chat x -p hello", "use holdfast run -p TEXT"),
        ("bench serve --dataset-path x", "use --dataset FILE"),
    ],
)
def test_flag_that_is_not_here_is_answered(typed: str, words: str, here: Here) -> None:
    ended = here(*typed.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.refuses(words), ended
    assert ended.err.count("\n") == 1


def test_habits_name_existing_flags() -> None:
    flags = {flag for command in COMMANDS for row in command.rows for flag in row.all_flags}
    used: set[str] = set()
    for habit in HABITS:
        assert not habit.own or habit.own == MODEL or habit.own in flags, habit
        assert habit.own or habit.advice, habit
        assert not habit.act or habit.own or habit.advice, habit
        used |= set(habit.flags.split())
    assert all(flag.startswith("-") for flag in used)


@pytest.mark.parametrize("table", [ENGINE_NAMES, SERVER_NAMES], ids=["engine", "server"])
def test_as_ours_takes_every_vllm_serve_flag(table: dict, capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings, with the right number of values: what follows stays where it is."""
    serve: Command = BY_PATH[("serve",)]
    own = {flag for row in serve.rows for flag in row.all_flags}
    for name, foreign in table.items():
        for flag in (f"--{name.replace('_', '-')}", f"--{name}"):
            if flag.replace("_", "-") in own or name in SEVERAL_VALUES:
                continue
            quiet = [value for value in foreign.taken or ("4",) if value is not None and value != []]
            text = "True" if foreign.is_switch and True in quiet else ""
            values = [] if foreign.is_switch else [str(quiet[0]) if quiet else "none"]
            typed = f"--no-{flag[2:]}" if foreign.is_switch and not text and foreign.is_missing else flag
            assert as_ours(serve.path, serve.rows, [typed, *values, "--port", "1"]) == ["--port", "1"], name
    assert capsys.readouterr().err.count("note: ignored: ") > 50


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("-1", -1),
        ("True", True),
        ("none", None),
        ('{"a": 1}', {"a": 1}),
        ("[1]", [1]),
        ("{x", "{x"),
        ("auto", "auto"),
    ],
)
def test_value_of_a_flag_is_read_by_its_text(text: str, value: object) -> None:
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


def test_find_flag_knows_short_and_negative_spellings() -> None:
    assert {found.name for short in SHORT_FLAGS if (found := find_flag(short, ENGINE_NAMES))} <= set(
        SHORT_FLAGS.values()
    )
    found = find_flag("--no-trust-remote-code", ENGINE_NAMES)
    assert found is not None
    assert (found.name, found.is_off) == ("trust_remote_code", True)
    for spelling in ("-cc.mode", "-O.mode", "-O3", "--compilation-config.mode"):
        assert find_flag(spelling, ENGINE_NAMES) is not None, spelling
    assert find_flag("-ccmode", ENGINE_NAMES) is None
    assert find_flag("--no-swap-space", ENGINE_NAMES) is None
    assert find_flag("-swap-space", ENGINE_NAMES) is None
    assert {*ENGINE_NAMES, *SERVER_NAMES} >= SEVERAL_VALUES


def serve_options(**changes: str) -> ServeOptions:
    fields = dict.fromkeys(ServeOptions.__dataclass_fields__)
    return ServeOptions(**{**fields, "tool_parser": "auto", "reasoning_parser": "auto", **changes})  # type: ignore[arg-type]


def test_parser_that_only_vllm_has_is_left_to_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    settled = check_parsers(serve_options(tool_parser="mistral", reasoning_parser="qwen3"))
    assert (settled.tool_parser, settled.reasoning_parser) == ("auto", "qwen3")
    assert "note: ignored: --tool-parser 'mistral' (the chat template" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--tool-parser"):
        check_parsers(serve_options(tool_parser="mistrel"))
    for name in PARSERS_OF_VLLM:
        changed = check_parsers(serve_options(tool_parser=name, reasoning_parser=name))
        assert "auto" in (changed.tool_parser, changed.reasoning_parser)


def test_run_takes_the_flags_of_llama_cpp(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr(
        "holdfast.cli.run.run", lambda options, engine, sampling, start: seen.append((options, engine, sampling))
    )
    ended = here("run", "-m", "x.gguf", "-q", "-c", "64", "-n", "4", "-ngl", "0", "--trust-remote-code", "Hello")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith("note: ignored: --trust-remote-code")
    ((options, engine, sampling),) = seen
    assert (options.model, options.prompt, options.quiet) == ("x.gguf", "Hello", True)
    assert (engine, sampling) == ({"max_model_len": 64, "device": "cpu"}, {"max_tokens": 4})


def test_module_of_vllms_server_runs_holdfast_serve() -> None:
    command = [
        sys.executable,
        "-m",
        "holdfast.entrypoints.openai.api_server",
        "--model",
        "/no/such",
        "--swap-space",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--swap-space 4" in done.stderr
    assert "/no/such" in done.stderr

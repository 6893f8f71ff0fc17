"""Every command: its help page, its options, and what runs it; argparse is made of that; no torch.

Little is imported here, so that help and plans come at once.
"""

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from holdfast import __version__
from holdfast.cli.habits import COMMANDS_ELSEWHERE, as_ours
from holdfast.cli.options import (
    ARGUMENTS,
    BENCHMARK,
    ENGINE_SETTINGS,
    EVAL_SETTINGS,
    MEMORY,
    MODEL,
    OPTIONS,
    OUTPUT,
    PANELS,
    PLAN_SETTINGS,
    SAMPLING_SETTINGS,
    SERVER,
    SEVERAL_SETTINGS,
    WEIGHT_EVAL_SETTINGS,
    Given,
    Option,
    Setting,
    given,
)
from holdfast.cli.terminal import FAILED
from holdfast.errors import ConfigError
from holdfast.request.vllm_names import NOT_HERE

if TYPE_CHECKING:
    from holdfast.cli.start_line import StartLine

PROGRAM = "holdfast"
ABOUT = "An LLM inference engine that plans its memory, takes it once, and holds it."
START = "Start with: holdfast run -p 'What is the capital of France?'"
HABITS_LINE = "Flags of vLLM, llama.cpp and Ollama are understood: docs/from_vllm.md"
PARAGRAPH = "\n\n"
HELP_FLAGS, VERSION_FLAGS = ("-h", "--help"), ("-V", "--version")
MIN_COLUMNS, MAX_COLUMNS = 60, 120
"""Of a help page."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program."""

    path: tuple[str, ...]
    """What is typed behind `holdfast`."""
    summary: str
    options: tuple[Option, ...]
    run: Callable[[Given, Given, Given], int | None]
    """Takes its own options, those of an engine and those of sampling; None is success."""
    more: str = ""
    examples: tuple[str, ...] = ()
    engine: tuple[Setting, ...] = ()
    sampling: tuple[Setting, ...] = ()

    @property
    def rows(self) -> tuple[Option | Setting, ...]:
        return (*self.options, *self.sampling, *self.engine)


def invoke(arguments: Sequence[str]) -> int:
    """Run a command line; its exit code. Complaints about the command line itself are raised."""
    try:
        for command in COMMANDS:
            depth = len(command.path)
            if command.path == tuple(arguments[:depth]):
                return _run(command, arguments[depth:])
        return _show_group(arguments)
    except SystemExit as ending:  # argparse, when it has shown a help page
        return ending.code if isinstance(ending.code, int) else FAILED


def _run(command: Command, arguments: Sequence[str]) -> int:
    arguments = as_ours(command.path, command.rows, arguments)
    if any(option.name == "config" for option in command.options):
        from holdfast.cli.config_file import with_config

        arguments = with_config(command.rows, arguments)
    flags = [flag for row in command.rows if row.panel != ARGUMENTS for flag in row.all_flags]
    values = vars(_parsed(parser_of(command), _with_dashes(command, flags, arguments), flags))
    own = {option.name: values[option.name] for option in command.options}
    return command.run(own, given(command.engine, values), given(command.sampling, values)) or 0


def _show_group(arguments: Sequence[str]) -> int:
    """Commands that begin alike, or all of them: their help page, or the nearest to a wrong name."""
    path = tuple(arguments[:1]) if tuple(arguments[:1]) in GROUPS else ()
    parser = _group_parser(path)
    rest = arguments[len(path) :]
    if rest and not rest[0].startswith("-"):
        if not path and rest[0] in COMMANDS_ELSEWHERE:
            raise ConfigError(f"command {rest[0]} was asked", NOT_HERE, COMMANDS_ELSEWHERE[rest[0]])
        meant = _nearest(rest[0], _next_names(path))
        raise ConfigError(
            f"command {ascii(rest[0])[1:-1]} was asked",
            f"{parser.prog} has no such command",
            f"{meant}run {parser.prog} --help",
        )
    _parsed(parser, rest, VERSION_FLAGS)
    parser.print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse, whose complaints are errors like all others."""

    def error(self, message: str) -> NoReturn:
        named = re.match(r"argument (.*?): (.*)", message)
        asked, has = (f"option {named[1]} was asked", named[2]) if named else (f"{self.prog} was asked", message)
        has = "it requires an argument" if has == "expected one argument" else has
        raise ConfigError(asked, has, f"run {self.prog} --help")


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of a command line behind a command's name."""
    words = [command.summary, *([command.more] if command.more else [])]
    examples = "\n".join(("Examples:", *(f"  {example}" for example in command.examples)))
    model = "".join(f" [{option.metavar}]" for option in command.options if option.panel == ARGUMENTS)
    about = f"{_wrapped(words, gap=PARAGRAPH)}{PARAGRAPH}{examples}"
    parser = _parser(command.path, f"[OPTIONS]{model}", about, _wrapped([HABITS_LINE]) if command.engine else "")
    titles = {row.panel for row in command.rows} | {OPTIONS}
    panels = {title: parser.add_argument_group(title) for title in PANELS if title in titles}
    for row in command.rows:
        for flags, told in row.arguments:
            panels[row.panel].add_argument(*flags, **told)
    panels[OPTIONS].add_argument(*HELP_FLAGS, action="help", help="Show this page.")
    return parser


def _group_parser(path: tuple[str, ...]) -> argparse.ArgumentParser:
    """A page that lists commands, each with its summary."""
    parser = _parser(path, "COMMAND [OPTIONS]", _wrapped([GROUPS[path]]), "" if path else f"{START}\n{HABITS_LINE}")
    panel = parser.add_argument_group(OPTIONS)
    panel.add_argument(*HELP_FLAGS, action="help", help="Show this page; behind a command: that of the command.")
    if not path:
        panel.add_argument(
            *VERSION_FLAGS, action="version", version=f"{PROGRAM} {__version__}", help="Print the version."
        )
    below = {
        command.path[: len(path) + 1]: command.summary for command in COMMANDS if command.path[: len(path)] == path
    }
    listed = [f"{name[-1]:<10}  {GROUPS.get(name, summary)}" for name, summary in below.items()]
    parser.add_argument_group("Commands", _wrapped(listed, indent=" " * 12, width=_columns() - 2))
    return parser


def _parser(path: tuple[str, ...], usage: str, about: str, end: str = "") -> argparse.ArgumentParser:
    name = " ".join((PROGRAM, *path))
    return _Parser(
        prog=name,
        usage=f"{name} {usage}",
        description=about,
        epilog=end,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=_columns()),
        add_help=False,
        allow_abbrev=False,
    )


def _columns() -> int:
    return min(max(shutil.get_terminal_size().columns - 2, MIN_COLUMNS), MAX_COLUMNS)


def _wrapped(texts: Iterable[str], indent: str = "", gap: str = "\n", width: int | None = None) -> str:
    return gap.join(textwrap.fill(text, width or _columns(), subsequent_indent=indent) for text in texts)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str], flags: Iterable[str]) -> argparse.Namespace:
    """What was typed; the nearest right option to one that does not exist."""
    values, extras = parser.parse_known_args(arguments)
    if not extras:
        return values
    option = next((extra.partition("=")[0] for extra in extras if extra.startswith("-")), None)
    if option is None:
        asked, has, meant = f"argument {ascii(extras[0])[1:-1]} was asked", "takes no further argument", ""
    else:
        asked, has, meant = f"option {ascii(option)[1:-1]} was asked", "has no such option", _nearest(option, flags)
    raise ConfigError(asked, f"{parser.prog} {has}", f"{meant}run {parser.prog} --help")


def _with_dashes(command: Command, flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The same with --stop=-x for --stop -x: argparse takes what begins with a dash, and is no option, for a mistake."""
    longest = {flag: max(row.all_flags, key=len) for row in command.rows if row.metavar for flag in row.all_flags}
    joined: list[str] = []
    for argument in arguments:
        flag = joined[-1] if joined else ""
        is_value = argument.startswith("-") and argument.partition("=")[0] not in (*flags, *HELP_FLAGS)
        if flag in longest and is_value:
            joined[-1] = f"{longest[flag]}={argument}"
        else:
            joined.append(argument)
    return joined


def _nearest(typed: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(typed, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def _refuse_wrong_path(own: Given, *settings: Given) -> None:
    """What takes long to import does not make somebody wait who mistyped a path; other options are looked at before it."""
    others = any(own.get(name) not in (None, False) for name in ("raw", "system", "memory_report"))
    if own["model"] is not None and not others and not any(settings):
        from holdfast.loading.locate import refuse_wrong_path

        refuse_wrong_path(own["model"])


def _start_line(words: str, is_wanted: bool = True) -> "StartLine":
    """The line of a start, drawn before anything else is imported: that alone may take a second."""
    from holdfast.cli.start_line import StartLine

    start = StartLine()
    if is_wanted:
        start.show(words)
    return start


def _run_run(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Starting", is_wanted=not (own["quiet"] or own["as_json"])) as start:
        from holdfast.cli.run import RunOptions, run

        run(RunOptions(**own), engine, sampling, start)


def _run_chat(own: Given, engine: Given, sampling: Given) -> int:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Starting", is_wanted=sys.stdin is not None and sys.stdin.isatty()) as start:
        from holdfast.cli.chat import chat

        report, allows = own["memory_report"], own["allow_special_tokens"]
        return chat(own["model"], own["system"], engine, sampling, report, allows, start)


def _run_serve(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Importing the server") as start:
        from holdfast.cli.serve import ServeOptions, serve

        serve(ServeOptions(**own), engine, start)


def _run_ps(own: Given, engine: Given, sampling: Given) -> int:
    from holdfast.cli.ps import ps

    return ps(own["port"])


def _run_plan(own: Given, engine: Given, sampling: Given) -> int:
    from holdfast.cli.plan import PlanOptions, plan

    return plan(PlanOptions(**own), engine)


def _run_cache(own: Given, engine: Given, sampling: Given) -> None:
    from holdfast.cli.cache import clear_weights, list_weights

    clear_weights() if own["clear"] else list_weights()


def _run_latency(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    from holdfast.cli.bench import LatencyOptions, bench_latency

    bench_latency(LatencyOptions(**own), engine)


def _run_throughput(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    from holdfast.cli.bench import ThroughputOptions, bench_throughput

    bench_throughput(ThroughputOptions(**own), engine)


def _run_bench_serve(own: Given, engine: Given, sampling: Given) -> int | None:
    from holdfast.cli.bench_serve import ServeBenchOptions, bench_serve

    return bench_serve(ServeBenchOptions(**own))


def _run_eval_kv(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    from holdfast.cli.eval import EvalOptions, eval_kv

    eval_kv(EvalOptions(**own), engine)


def _run_eval_weights(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    from holdfast.cli.eval import WeightEvalOptions, eval_weights

    eval_weights(WeightEvalOptions(**own), engine)


def _run_doctor(own: Given, engine: Given, sampling: Given) -> int:
    from holdfast.cli.doctor import doctor

    return doctor(own["as_json"], own["measure"])


def _run_completion(own: Given, engine: Given, sampling: Given) -> None:
    from holdfast.cli.completion import Page, Row, row_of, write_completion

    help_row = Row(HELP_FLAGS, "Show this page.")
    pages = [
        Page(
            path,
            summary,
            (help_row, *(() if path else (Row(VERSION_FLAGS, "Print the version."),))),
            tuple(_next_names(path)),
        )
        for path, summary in GROUPS.items()
    ]
    for command in COMMANDS:
        rows = tuple(row_of(row, command.path) for row in command.rows)
        pages.append(Page(command.path, command.summary, (*rows, help_row)))
    write_completion(own["shell"], pages)


def _next_names(path: tuple[str, ...]) -> Iterable[str]:
    """What may be typed behind the beginning of a command."""
    return dict.fromkeys(command.path[len(path)] for command in COMMANDS if command.path[: len(path)] == path)


def _file(name: str, flag: str, help: str) -> Option:
    """An option that names a file to write."""
    return Option(name, help, "FILE", panel=OUTPUT, flags=(flag,))


def _measured(name: str, help: str, metavar: str, default: str | None) -> Option:
    return Option(name, help, metavar, default, BENCHMARK)


def _served(name: str, help: str, metavar: str, default: str | None = None) -> Option:
    return Option(name, help, metavar, default, SERVER)


def _listed(name: str, help: str, metavar: str) -> Option:
    return Option(name, help, metavar, panel=SERVER, is_repeated=True)


MODEL_ARGUMENT = Option(
    "model",
    "A folder in Hugging Face layout, a GGUF file, or a model of the Hub: owner/name, owner/name:Q4_K_M, "
    "owner/name@REVISION. Left out: the default model.",
    "MODEL",
    panel=ARGUMENTS,
)
SYSTEM = Option("system", "What the model is told first.", "TEXT", flags=("-s", "--system"))
ALLOW_SPECIAL_TOKENS = Option(
    "allow_special_tokens",
    "Read control tokens that are written out in a message, such as <|im_end|>, as control tokens; else they are text.",
)
MEMORY_REPORT = _file("memory_report", "--memory-report", "Write a page (HTML) that draws who holds which memory.")
JSON_FILE = _file("json_file", "--json", "Write a record of the run as JSON; - writes to stdout.")
QUALITY_PAGE = _file("html", "--html", "Write a page that draws quality against bytes.")
WINDOW_HELP = "Tokens that are read together, from an empty cache."
MOST_TOKENS = "Most tokens of the text, such as 16K; at least one whole window is read."
BENCH_OPTIONS = (
    _measured("repeats", "Runs of each case after one to warm up.", "N", "3"),
    _measured("against", "Run another engine in turn with ours, and print ratios: transformers.", "ENGINE", None),
    _measured("threads", "CPU threads of every engine.", "N", None),
    JSON_FILE,
    MEMORY_REPORT,
)

GROUPS = {
    (): ABOUT,
    ("bench",): "Measure speed: of engines on this machine, or of a server anywhere.",
    ("eval",): "Measure what a setting costs in quality.",
}
"""What commands that begin alike have in common."""

COMMANDS = (
    Command(
        ("run",),
        "Answer a prompt: the text streams to stdout; who holds which memory, and the speed, go to stderr.",
        (
            MODEL_ARGUMENT,
            Option("prompt", "The prompt; piped input follows it.", "TEXT", flags=("-p", "--prompt")),
            SYSTEM,
            Option("raw", "Continue the bare text, without the chat template; control tokens in it are understood."),
            ALLOW_SPECIAL_TOKENS,
            Option("quiet", "Print the answer and nothing else.", panel=OUTPUT, flags=("-q", "--quiet")),
            Option("as_json", "Print one JSON object in place of the text.", panel=OUTPUT, flags=("--json",)),
            MEMORY_REPORT,
        ),
        _run_run,
        "The model's chat template is applied where it has one. At most 512 tokens are generated unless --max-tokens "
        "says otherwise.",
        (
            'holdfast run -p "What is the capital of France?"',
            'git diff | holdfast run path/to/model -p "Write a commit message" -q',
            'holdfast run model.gguf --raw -p "Once upon" --temperature 0.8 --n 3 --json',
        ),
        ENGINE_SETTINGS,
        (*SEVERAL_SETTINGS, *SAMPLING_SETTINGS),
    ),
    Command(
        ("chat",),
        "Talk with a model, turn by turn; /help lists what can be typed beside questions.",
        (MODEL_ARGUMENT, SYSTEM, ALLOW_SPECIAL_TOKENS, MEMORY_REPORT),
        _run_chat,
        "Ctrl-C stops an answer and keeps the chat; Ctrl-D leaves. Piped input is taken line by line.",
        (
            "holdfast chat",
            'holdfast chat path/to/model --system "Be brief." --temperature 0.7',
            "holdfast chat model.gguf --max-model-len 32K --kv-cache-dtype fp8",
        ),
        ENGINE_SETTINGS,
        SAMPLING_SETTINGS,
    ),
    Command(
        ("serve",),
        "Serve a model over HTTP: the APIs of OpenAI, Anthropic and Ollama, a web page with a live memory map, metrics.",
        (
            MODEL_ARGUMENT,
            _served(
                "host", "Address to listen on; 127.0.0.1 is this machine alone, 0.0.0.0 everybody.", "NAME", "127.0.0.1"
            ),
            _served("port", "Port to listen on; 0 takes a free one.", "N", "8000"),
            _listed(
                "api_key",
                "A key that requests must send (Authorization: Bearer KEY). May be repeated. Better: HOLDFAST_API_KEY, or "
                "HOLDFAST_API_KEYS with commas between, or a file.",
                "KEY",
            ),
            _served("api_key_file", "File with a key on each line, which others may not read.", "FILE"),
            _listed(
                "served_model_name",
                "What the model is called in requests and answers. May be repeated: aliases.",
                "NAME",
            ),
            _listed(
                "allowed_host", "A name that this server goes by beside localhost and addresses; * is any.", "NAME"
            ),
            _listed(
                "allow_origin", "Origin of pages that may ask, such as https://example.com; none unless told.", "ORIGIN"
            ),
            Option("allow_public", "Let everybody who reaches --host use the model, without a key.", panel=SERVER),
            _served("max_connections", "Most connections at once.", "N", "4096"),
            _served(
                "drain_seconds", "For running requests to finish once the server was told to end.", "SECONDS", "30"
            ),
            _served(
                "response_memory",
                "For answers of /v1/responses that previous_response_id may name; the oldest go first, 0 keeps none.",
                "BYTES",
                "64MiB",
            ),
            _served(
                "tool_parser",
                "How calls of tools are written: auto (by the chat template), none, or a name, such as kimi_k2 or harmony.",
                "NAME",
                "auto",
            ),
            _served(
                "reasoning_parser",
                "How reasoning is written: auto (by the chat template), none, or a name, such as qwen3 or harmony.",
                "NAME",
                "auto",
            ),
            Option("log_requests", "Log prompts and answers too.", panel=SERVER),
            _served("log_format", "Lines of the log: text (key=value) or json.", "NAME", "text"),
            _served("config", "TOML file with options, under their names here; what is typed wins.", "FILE"),
            MEMORY_REPORT,
        ),
        _run_serve,
        "The model runs in a process of its own, unless --no-core-process says otherwise. SIGTERM and Ctrl-C let running "
        "requests finish; a second signal does not. Every path but /health, /ready and the page needs a key where keys are "
        "given; a public --host without one is refused.",
        (
            "holdfast serve",
            "holdfast serve path/to/model --port 8080 --served-model-name my-model",
            "holdfast serve --host 0.0.0.0 --api-key-file keys.txt --config serve.toml",
        ),
        ENGINE_SETTINGS,
    ),
    Command(
        ("plan",),
        "Tell what a model would take of a device, before anything is read or taken; needs no GPU, no weights, "
        "no network.",
        (
            Option(
                "model",
                "A folder with a config.json, a GGUF file, a model of the Hub (owner/name), or a well-known name such as "
                "Qwen3-32B, qwen3 32b or openai/gpt-oss-20b; --list shows them. Left out: the default model.",
                "MODEL",
                panel=ARGUMENTS,
            ),
            Option(
                "model_config",
                "Plan from this config.json alone; MODEL, if given, is what to call it.",
                "FILE",
                panel=MODEL,
                flags=("--config",),
            ),
            Option(
                "parameters",
                "Estimate a model of so many parameters, such as 32B: weights by count, KV of a typical dense model.",
                "N",
                panel=MODEL,
            ),
            Option(
                "gpu",
                "A GPU such as h200, 4090, H100-PCIe, 2x4090 or 4090 laptop; --list shows them.",
                "NAME",
                panel=MEMORY,
            ),
            Option("memory", "A GPU of that size, such as 24GiB.", "SIZE", panel=MEMORY),
            Option(
                "tensor_parallel_size",
                "GPUs that share the model.",
                "N",
                panel=MODEL,
                flags=("-tp", "--tensor-parallel-size"),
            ),
            Option("as_json", "Print one JSON object and nothing else.", panel=OUTPUT, flags=("--json",)),
            Option(
                "purpose",
                "The command that is planned: chat and run take one sequence, serve up to 256 (64 on a CPU). Left out: serve, "
                "and chat if only that fits.",
                "COMMAND",
                panel=MEMORY,
                flags=("--for",),
            ),
            Option("owners", "Show every owner of memory, with its reason.", panel=OUTPUT),
            Option("sweep", "Chart tokens by KV format and weights.", panel=OUTPUT),
            Option("list_names", "List the models and GPUs that are known by name.", panel=OUTPUT, flags=("--list",)),
            _file("html", "--html", "Write a page with the plan and the sweep."),
        ),
        _run_plan,
        "The first line is the answer: YES with tokens and speed, NO with what is short, CANNOT START if this version does "
        "not run the model, or not on that GPU (compute capability below 8.0). Exits with 0, 1 and 3 for these; 2 is a "
        "wrong command line. Then come the command that starts it, or that fits best, and what else would fit: "
        "settings that change no answer (more of the memory, shorter steps, fewer sequences, no graphs), alone and "
        "together, a shorter context, pages and weights in fewer bits, more of the same GPU, another GPU. Each is a plan "
        "of its own. A folder whose weights are quantized already is counted as it would load: as stored, and with "
        "--quantization and its own scheme also what its makers left plain in that scheme. "
        "--json prints: verdict (the first line), status (fits, does_not_fit or cannot_start), for, speed (one_stream, "
        "batch_size, batch, first_token_seconds, assumption; null if unknown), best_command, model, target, fits, "
        "short_bytes, budget (bytes, reason), "
        "kv_bytes_per_token, kv_tokens, max_model_len, context_note (which limit shortened it), max_concurrency, terms "
        "(owner, bytes, phases, reason), phases (bytes to load, capture and serve), choices, alternatives (change, "
        "settings, command, speed and what it gives), not_in_this_version, command (with the smallest change), notes (what "
        "a name left open); of several ranks also ranks (rank, layers, total_bytes, own_pages, and by owner what differs "
        "from the one that decides); with --sweep also sweep.",
        (
            "holdfast plan Qwen3-32B --gpu h200",
            "holdfast plan path/to/model --memory 24GiB --for chat --json",
            "holdfast plan Qwen3-32B --gpu 5090 --quantization mxfp4 --html plan.html",
        ),
        PLAN_SETTINGS,
    ),
    Command(
        ("ps",),
        "List the servers that run at some ports of this machine: model, memory, sequences.",
        (Option("port", "Ports to ask, with commas between.", "N", "8000"),),
        _run_ps,
        "A server with API keys answers where HOLDFAST_API_KEY holds one of them. Exits with 1 where no server answers.",
        ("holdfast ps", "holdfast ps --port 8000,8001"),
    ),
    Command(
        ("cache",),
        "List the quantized weights that earlier starts have kept for the next, or remove them.",
        (Option("clear", "Remove all that no process reads."),),
        _run_cache,
        examples=("holdfast cache", "holdfast cache --clear"),
    ),
    Command(
        ("doctor",),
        "Tell what is here (torch, CUDA, Triton, GPUs, a compiler, caches, models) and what is missing for what.",
        (
            Option(
                "measure",
                "Time how fast the CPU and every GPU read memory and multiply, a few seconds each. The rates are kept in "
                "the cache folder, and holdfast plan tells speeds by them.",
            ),
            Option("as_json", "Print one JSON object and nothing else.", panel=OUTPUT, flags=("--json",)),
        ),
        _run_doctor,
        "Exits with 0 where a model can run, on a GPU or on a CPU, and with 1 where none can. Without --measure it "
        "changes nothing. It asks nothing of a network.",
        ("holdfast doctor", "holdfast doctor --measure", "holdfast doctor --json"),
    ),
    Command(
        ("completion",),
        "Print a script that completes commands, options, formats, GPUs and names of models when Tab is pressed.",
        (Option("shell", "The shell: bash, zsh or fish.", "SHELL", panel=ARGUMENTS),),
        _run_completion,
        'Put eval "$(holdfast completion bash)" into ~/.bashrc, or eval "$(holdfast completion zsh)" into ~/.zshrc behind '
        "compinit; or keep the script where the shell looks for it, and print it anew after an update.",
        (
            "holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast",
            "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
        ),
    ),
    Command(
        ("bench", "latency"),
        "Time the reading of prompts and the decoding of batches.",
        (
            MODEL_ARGUMENT,
            _measured("prefill", "Prompt lengths whose reading is timed.", "TOKENS", "512,2048"),
            _measured("batch", "Batch sizes whose decoding is timed.", "SIZES", "1,8"),
            _measured("input_len", "Prompt of each sequence in a batch.", "TOKENS", "128"),
            _measured("output_len", "Tokens that each sequence generates.", "TOKENS", "64"),
            *BENCH_OPTIONS,
        ),
        _run_latency,
        examples=(
            "holdfast bench latency",
            "holdfast bench latency --against transformers --json record.json",
            "holdfast bench latency path/to/model --prefill 128,1k --batch 1,4,16",
        ),
        engine=ENGINE_SETTINGS,
    ),
    Command(
        ("bench", "throughput"),
        "Time many requests of random lengths at once, through continuous batching.",
        (
            MODEL_ARGUMENT,
            _measured("num_prompts", "How many requests.", "N", "32"),
            _measured("input_len", "Lengths of their prompts.", "LOW-HIGH", "32-256"),
            _measured("output_len", "Lengths of their answers.", "LOW-HIGH", "16-96"),
            _measured("peer_batch", "Batch size of the other engine, which pads.", "N", "8"),
            *BENCH_OPTIONS,
        ),
        _run_throughput,
        examples=(
            "holdfast bench throughput",
            "holdfast bench throughput --against transformers --num-prompts 16",
            "holdfast bench throughput path/to/model --input-len 512 --json -",
        ),
        engine=ENGINE_SETTINGS,
    ),
    Command(
        ("bench", "serve"),
        "Put load on a server with OpenAI's API, ours or another: times to tokens, throughput, errors.",
        (
            _measured("url", "Where it listens, with or without /v1.", "URL", "http://127.0.0.1:8000"),
            _measured("model", "Its name there. Left out: the first that the server lists.", "NAME", None),
            _measured("endpoint", "chat (/v1/chat/completions) or completions (/v1/completions).", "NAME", "chat"),
            _measured(
                "clients", "Closed loop: so many at once, each with its next request after an answer.", "N", None
            ),
            _measured(
                "rate", "Open loop: new requests per second, at random times, whatever becomes of others.", "N", None
            ),
            _measured(
                "requests", "How many in all. Left out: 4 for each client and at least 64, or the dataset's.", "N", None
            ),
            _measured("input_len", "Lengths of prompts.", "LOW-HIGH", "128"),
            _measured("output_len", "Lengths of answers.", "LOW-HIGH", "64"),
            _measured(
                "dataset",
                "JSON lines with prompt or messages, and max_tokens, in place of random prompts.",
                "FILE",
                None,
            ),
            _measured("api_key", "Sent as Authorization: Bearer KEY. Better: HOLDFAST_API_KEY.", "KEY", None),
            _measured("timeout", "For one request, from its first byte to its last.", "SECONDS", "600"),
            _measured("seed", "Where random choices start.", "N", "0"),
            JSON_FILE,
        ),
        _run_bench_serve,
        "Without --clients and --rate there are 8 clients. All answers are streamed, each over a connection of its own, "
        "which counts in the time to its first token. Tokens are counted by the server where it tells usage, else by "
        "events, and that is told. Lengths are in tokens of the server: two short requests before the run tell how it "
        "counts. Exits with 1 where a request failed.",
        (
            "holdfast bench serve --clients 8",
            "holdfast bench serve --url http://gpu-box:8000 --rate 4 --requests 200",
            "holdfast bench serve --dataset prompts.jsonl --clients 64 --json -",
        ),
    ),
    Command(
        ("eval", "kv"),
        "Read a text over pages of every KV format at once, and tell how far predictions move from those over full "
        "precision.",
        (
            MODEL_ARGUMENT,
            Option("text", "Plain text (UTF-8) that is read.", "FILE"),
            Option("formats", "KV formats, with commas between; all: every one below the dtype.", "NAMES", "all"),
            Option("window", WINDOW_HELP, "TOKENS", "1024"),
            Option("tokens", f"{MOST_TOKENS} Left out: all.", "N"),
            JSON_FILE,
            QUALITY_PAGE,
        ),
        _run_eval_kv,
        "For each format: bytes of a token, perplexity, mean and 99th percentile of the KL divergence, and how often "
        "the most likely token is the same. The weights are loaded once and all formats see the same windows.",
        (
            "holdfast eval kv --text book.txt --tokens 16K",
            "holdfast eval kv path/to/model --text book.txt --formats fp8 --html kv.html",
            "holdfast eval kv model.gguf --text book.txt --window 4K --json record.json",
        ),
        EVAL_SETTINGS,
    ),
    Command(
        ("eval", "weights"),
        "Read a text with weights in one scheme after the other, and tell how far predictions move from those in "
        "float32.",
        (
            MODEL_ARGUMENT,
            Option(
                "text",
                "Plain text (UTF-8) that is read. Left out: what Python's own help knows of the language.",
                "FILE",
            ),
            Option("schemes", "Weight schemes, with commas between; all: every one that can run.", "NAMES", "all"),
            Option("window", WINDOW_HELP, "TOKENS", "512"),
            Option("tokens", MOST_TOKENS, "N", "1024"),
            JSON_FILE,
            QUALITY_PAGE,
        ),
        _run_eval_weights,
        "For each scheme: bytes of all weights, perplexity, mean and 99th percentile of the KL divergence, and how "
        "often the most likely token is the same. The reference has the weights as stored, in float32, and stays loaded "
        "beside the scheme whose turn it is. Where they are stored quantized, the reference is called after their "
        'scheme ("fp8 as stored (float32)"), and that is the only scheme there is to compare.',
        (
            "holdfast eval weights",
            "holdfast eval weights path/to/model --text book.txt --schemes fp8,mxfp4",
            "holdfast eval weights model.gguf --schemes int8 --html quality.html",
        ),
        WEIGHT_EVAL_SETTINGS,
    ),
)

"""Commands of data/commands.json: their argparse parsers and the functions that run them; no torch.

This module imports little, so that help and plans start fast.
"""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast import __version__
from holdfast.cli.habits import COMMANDS_ELSEWHERE, as_ours
from holdfast.cli.options import (
    ARGUMENTS,
    ENGINE_SETTINGS,
    OPTIONS,
    PANELS,
    SAMPLING_SETTINGS,
    SEVERAL_SETTINGS,
    Given,
    Option,
    Setting,
    given,
    read_data,
)
from holdfast.cli.terminal import FAILED
from holdfast.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from holdfast.cli.start_line import StartLine

PROGRAM = "holdfast"
START = "Start with: holdfast run -p 'Who wrote Hamlet?'"
HABITS_LINE = "Flags of vLLM, llama.cpp and Ollama work too: docs/from_vllm.md"
PARAGRAPH = "\n\n"
HELP_FLAGS, VERSION_FLAGS = ("-h", "--help"), ("-V", "--version")
MIN_COLUMNS, MAX_COLUMNS = 60, 120
"""Widths of a help page."""
Run = Callable[[Given, Given, Given], int | None]
"""Function of the command's own, engine and sampling options; returns an exit code, None for success."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program."""

    path: tuple[str, ...]
    """The words after `holdfast`."""
    summary: str
    options: tuple[Option, ...]
    run: Run
    more: str = ""
    examples: tuple[str, ...] = ()
    engine: tuple[Setting, ...] = ()
    sampling: tuple[Setting, ...] = ()

    @property
    def rows(self) -> tuple[Option | Setting, ...]:
        return (*self.options, *self.sampling, *self.engine)


def invoke(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. A wrong command line raises ConfigError."""
    try:
        for command in COMMANDS:
            depth = len(command.path)
            if command.path == tuple(arguments[:depth]):
                return _run(command, arguments[depth:])
        return _show_group(arguments)
    except SystemExit as ending:  # argparse has shown a help page
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
    """Print the help page of a group of commands, or of all; refuse an unknown command."""
    path = tuple(arguments[:1]) if tuple(arguments[:1]) in GROUPS else ()
    parser = _group_parser(path)
    rest = arguments[len(path) :]
    if rest and not rest[0].startswith("-"):
        if not path and rest[0] in COMMANDS_ELSEWHERE:
            raise ConfigError("cli.not_here", typed=f"command {rest[0]}", advice=COMMANDS_ELSEWHERE[rest[0]])
        nearest = did_you_mean(rest[0], _next_names(path))
        raise ConfigError("cli.unknown_command", program=parser.prog, value=rest[0], nearest=nearest)
    _parsed(parser, rest, VERSION_FLAGS)
    parser.print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        named = re.match(r"argument (.*?): (.*)", message)
        if named is None:
            raise ConfigError("cli.usage", program=self.prog, reason=message)
        if named[2] == "expected one argument":
            raise ConfigError("cli.needs_value", program=self.prog, option=named[1])
        raise ConfigError("cli.bad_option", program=self.prog, option=named[1], reason=named[2])


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Make the parser of the arguments after a command's name."""
    paragraphs = [command.summary, *([command.more] if command.more else [])]
    examples = "\n".join(("Examples:", *(f"  {example}" for example in command.examples)))
    model = "".join(f" [{option.metavar}]" for option in command.options if option.panel == ARGUMENTS)
    about = f"{_wrapped(paragraphs, gap=PARAGRAPH)}{PARAGRAPH}{examples}"
    parser = _parser(command.path, f"[OPTIONS]{model}", about, _wrapped([HABITS_LINE]) if command.engine else "")
    titles = {row.panel for row in command.rows} | {OPTIONS}
    panels = {title: parser.add_argument_group(title) for title in PANELS if title in titles}
    for row in command.rows:
        for flags, keywords in row.arguments:
            panels[row.panel].add_argument(*flags, **keywords)
    panels[OPTIONS].add_argument(*HELP_FLAGS, action="help", help="Show this page.")
    return parser


def _group_parser(path: tuple[str, ...]) -> argparse.ArgumentParser:
    """Make the parser of a page that lists commands."""
    parser = _parser(path, "COMMAND [OPTIONS]", _wrapped([GROUPS[path]]), "" if path else f"{START}\n{HABITS_LINE}")
    panel = parser.add_argument_group(OPTIONS)
    panel.add_argument(*HELP_FLAGS, action="help", help="Show this page; after a command: the page of the command.")
    if not path:
        version = f"{PROGRAM} {__version__}"
        panel.add_argument(*VERSION_FLAGS, action="version", version=version, help="Print the version.")
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
    """Parse arguments; refuse an unknown option with the nearest known one."""
    values, extras = parser.parse_known_args(arguments)
    if not extras:
        return values
    option = next((extra.partition("=")[0] for extra in extras if extra.startswith("-")), None)
    if option is None:
        raise ConfigError("cli.extra_argument", program=parser.prog, value=extras[0])
    raise ConfigError("cli.unknown_option", program=parser.prog, value=option, nearest=did_you_mean(option, flags))


def _with_dashes(command: Command, flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Join --stop -x to --stop=-x: argparse refuses a value that begins with a dash."""
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


def _next_names(path: tuple[str, ...]) -> Iterable[str]:
    """List the words that may follow a partial command."""
    return dict.fromkeys(command.path[len(path)] for command in COMMANDS if command.path[: len(path)] == path)


def _refuse_wrong_path(own: Given, *settings: Given) -> None:
    """Refuse a mistyped model path before the slow imports; other options are checked before it."""
    others = any(own.get(name) not in (None, False) for name in ("raw", "system", "memory_report"))
    if own["model"] is not None and not others and not any(settings):
        from holdfast.loading.locate import refuse_wrong_path

        refuse_wrong_path(own["model"])


def _start_line(stage: str, is_wanted: bool = True) -> "StartLine":
    """Draw the start line before the slow imports."""
    from holdfast.cli.start_line import StartLine

    start = StartLine()
    if is_wanted:
        start.show(stage)
    return start


def _run_run(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Starting", is_wanted=not (own["quiet"] or own["as_json"])) as start:
        from holdfast.cli.run import RunOptions, run

        run(RunOptions(**own), engine, sampling, start)


def _run_chat(own: Given, engine: Given, sampling: Given) -> int:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Starting", is_wanted=sys.stdin is not None and sys.stdin.isatty()) as start:
        from holdfast.cli.chat import ChatRequest, chat

        return chat(ChatRequest(**own), engine, sampling, start)


def _run_serve(own: Given, engine: Given, sampling: Given) -> None:
    _refuse_wrong_path(own, engine, sampling)
    with _start_line("Importing the server") as start:
        from holdfast.cli.serve import ServeOptions, serve

        serve(ServeOptions(**own), engine, start)


def _entry(module: str, options: str, function: str, *, checks_path: bool = False) -> Run:
    """Return a function that imports a module and calls its `function(options(**own), engine)`."""

    def run(own: Given, engine: Given, sampling: Given) -> int | None:
        if checks_path:
            _refuse_wrong_path(own, engine, sampling)
        found = import_module(f"holdfast.cli.{module}")
        return getattr(found, function)(getattr(found, options)(**own), engine)

    return run


def _run_completion(own: Given, engine: Given, sampling: Given) -> None:
    from holdfast.cli.completion import Page, Row, row_of, write_completion

    help_row, version_row = Row(HELP_FLAGS, "Show this page."), Row(VERSION_FLAGS, "Print the version.")
    pages = [
        Page(path, summary, (help_row,) if path else (help_row, version_row), tuple(_next_names(path)))
        for path, summary in GROUPS.items()
    ]
    for command in COMMANDS:
        rows = tuple(row_of(row, command.path) for row in command.rows)
        pages.append(Page(command.path, command.summary, (*rows, help_row)))
    write_completion(own["shell"], pages)


RUNS: Mapping[str, Run] = {
    "run": _run_run,
    "chat": _run_chat,
    "serve": _run_serve,
    "plan": _entry("plan", "PlanOptions", "plan"),
    "ps": _entry("ps", "PsOptions", "ps"),
    "quantize": _entry("quantize", "QuantizeOptions", "quantize"),
    "cache": _entry("cache", "CacheOptions", "cache"),
    "doctor": _entry("doctor", "DoctorOptions", "doctor"),
    "completion": _run_completion,
    "bench latency": _entry("bench", "LatencyOptions", "bench_latency", checks_path=True),
    "bench throughput": _entry("bench", "ThroughputOptions", "bench_throughput", checks_path=True),
    "bench fill": _entry("bench_fill", "FillOptions", "bench_fill", checks_path=True),
    "bench serve": _entry("bench_serve", "ServeBenchOptions", "bench_serve"),
    "eval kv": _entry("eval", "KvOptions", "eval_kv", checks_path=True),
    "eval weights": _entry("eval", "EvalOptions", "eval_weights", checks_path=True),
}


def _read_commands(data: Mapping[str, Any]) -> Iterator[Command]:
    engine = {setting.name: setting for setting in ENGINE_SETTINGS}
    sampling = {"sampling": SAMPLING_SETTINGS, "several": SEVERAL_SETTINGS}
    for row in data["commands"]:
        options = [data["shared"][option] if isinstance(option, str) else option for option in row["options"]]
        names = row.get("engine", ())
        yield Command(
            tuple(row["path"].split()),
            row["summary"],
            tuple(Option(**(option | {"flags": tuple(option.get("flags", ()))})) for option in options),
            RUNS[row["path"]],
            row.get("more", ""),
            tuple(row["examples"]),
            ENGINE_SETTINGS if names == "all" else tuple(engine[name] for name in names),
            tuple(setting for key in row.get("sampling", ()) for setting in sampling[key]),
        )


GROUPS = {tuple(path.split()): summary for path, summary in read_data("commands.json")["groups"].items()}
"""Summaries of command groups, and of the program."""
COMMANDS = tuple(_read_commands(read_data("commands.json")))

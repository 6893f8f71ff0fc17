"""Flags of vLLM, llama.cpp and Ollama (data/habits.json): translated to ours, ignored with a note, or refused; no torch.

A command's own flags win: a row of the table never changes their meaning. A row for a flag of ours applies to
commands that have it. Help pages and completion leave these spellings out; docs/from_vllm.md lists them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from holdfast.cli.options import ARGUMENTS, Option, Setting, flag, read_data
from holdfast.cli.terminal import write_line
from holdfast.errors import ConfigError, shown
from holdfast.request.vllm_flags import find_flag, read_value
from holdfast.request.vllm_names import ENGINE_NAMES, SERVER_NAMES, SHORT_FLAGS

MODEL = "MODEL"
"""Placeholder for the model argument, which is a flag in other programs."""
ALL_LAYERS = 99
"""Minimum value of -ngl that means all layers."""
LONGEST = str(2**31 - 1)
"""Value of --max-tokens that means up to the end of the context."""
_SWITCH_VALUES = ("true", "false", "on", "off", "auto", "1", "0")
Act = Callable[[str, str], Sequence[str] | None]
"""Function from a flag and its value to our arguments; None if it has no effect."""


def _unless(default: str, own: str, typed: str, value: str) -> Sequence[str] | None:
    """Return our flag with the value, or None if it is the default."""
    return None if value == default else (f"{own}={value}",)


def _gpu_layers(typed: str, value: str) -> Sequence[str] | None:
    count = read_value(value)
    if value in ("all", "auto", "-1") or (isinstance(count, int) and count >= ALL_LAYERS):
        return None
    if count == 0:
        return ("--device=cpu",)
    raise ConfigError("cli.some_gpu_layers", option=typed, value=value, all=ALL_LAYERS)


def _cache_type(typed: str, value: str) -> Sequence[str] | None:
    if value in ("f32", "f16", "bf16"):
        return None
    advice = "use --kv-cache-dtype for keys and values, such as fp8 or turboquant_4bit_nc"
    raise ConfigError("cli.not_here", typed=_shown(f"{typed} {value}"), advice=advice)


def _grammar(key: str, typed: str, value: str) -> Sequence[str]:
    return (f"--structured-outputs={json.dumps({key: value})}",)


def _format(typed: str, value: str) -> Sequence[str]:
    grammar: dict[str, object] = {"json_object": True} if value == "json" else {"json": read_value(value)}
    return (f"--structured-outputs={json.dumps(grammar)}",)


def _origins(typed: str, value: str) -> Sequence[str]:
    read = read_value(value)
    return [f"--allow-origin={origin}" for origin in (read if isinstance(read, list) else [value])]


ACTS: Mapping[str, Act] = {
    "nothing": lambda typed, value: None,
    "raw": lambda typed, value: ("--raw",),
    "num_predict": lambda typed, value: (f"--max-tokens={LONGEST if value in ('-1', '-2') else value}",),
    "rate": partial(_unless, "inf", "--rate"),
    "unless 0": partial(_unless, "0", "--max-model-len"),
    "unless -1": partial(_unless, "-1", "--max-num-seqs"),
    "gpu_layers": _gpu_layers,
    "cache_type": _cache_type,
    "grammar": partial(_grammar, "grammar"),
    "json": partial(_grammar, "json"),
    "format": _format,
    "origins": _origins,
}
"""Functions that translate a flag whose value changes, by name in the data file."""


@dataclass(frozen=True, slots=True)
class Habit:
    """A flag of another program."""

    flags: str
    """All spellings."""
    own: str = ""
    """Our flag with the same meaning; MODEL for the argument; empty if none."""
    note: str = ""
    """Why it has no effect, or what to do if it is declined."""
    act: str = ""
    values: str = "1"
    """Number of values: 0, 1, or ? for an optional one."""
    is_declined: bool = False
    only: str = ""
    """Commands that it applies to; empty for all commands with an engine."""
    advice_of: str = ""
    """vLLM's option whose advice replaces the note."""

    @property
    def advice(self) -> str:
        return ENGINE_NAMES[self.advice_of].words if self.advice_of else self.note


HABITS = tuple(Habit(**row) for row in read_data("habits.json")["habits"])
"""Rows of the table. For a flag, the first row that fits the command wins."""
SEVERAL_VALUES = frozenset(read_data("habits.json")["several_values"])
"""Options of vLLM that take all values up to the next flag."""
COMMANDS_ELSEWHERE: Mapping[str, str] = read_data("habits.json")["commands"]
"""Commands of other programs, with their replacements."""


class _Ignored(NamedTuple):
    """A flag without effect."""

    typed: str
    reason: str


class Typed:
    """Translates a command line from left to right."""

    def __init__(self, path: Sequence[str], rows: Sequence[Option | Setting], arguments: Sequence[str]) -> None:
        self._path = path
        options = [row for row in rows if row.panel != ARGUMENTS]
        self._takes_value = {flag: bool(row.metavar) for row in options for flag in row.all_flags}
        self._places = {flag: row.name for row in rows if row.panel == ARGUMENTS for flag in row.all_flags}
        self._has_engine = any(isinstance(row, Setting) for row in rows)
        self._habits = {
            spelling: habit for habit in reversed(HABITS) if self._fits(habit) for spelling in habit.flags.split()
        }
        self._foreign = {**ENGINE_NAMES, **(SERVER_NAMES if path[0] == "serve" else {})} if self._has_engine else {}
        self._waiting = deque(arguments)
        self._left: list[str] = []
        self._models: list[str] = []
        self._arguments: list[str] = []
        self._ignored: list[_Ignored] = []

    def as_ours(self) -> list[str]:
        """Return the command line in our flags; print one line about flags without effect."""
        while self._waiting:
            typed = self._waiting.popleft()
            if typed.startswith("-") and typed != "-":
                self._take_flag(typed)
            else:
                self._arguments.append(typed)
        if self._ignored:
            write_line(f"note: ignored: {_listed(self._ignored)}")
        return [*self._left, *self._positional()]

    def _fits(self, habit: Habit) -> bool:
        if habit.only and self._path[0] not in habit.only.split():
            return False
        if habit.own == MODEL:
            return bool(self._places)
        return habit.own in self._takes_value if habit.own else self._has_engine or bool(habit.only)

    def _take_flag(self, typed: str) -> None:
        name, equals, value = typed.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        given = value if equals else None
        own = flag(SHORT_FLAGS[name]) if name in SHORT_FLAGS and name not in self._takes_value else name
        if own in self._takes_value:
            self._left.append(f"{own}{equals}{value}")
            if self._takes_value[own] and not equals and self._waiting and self._waiting[0] not in self._takes_value:
                self._left.append(self._waiting.popleft())
        elif name in self._places:
            self._models.append(self._value(name, given))
        elif name in self._habits:
            self._take_habit(self._habits[name], name, given)
        elif not self._take_foreign(name, given):
            self._left.append(typed)

    def _take_habit(self, habit: Habit, name: str, given: str | None) -> None:
        if habit.values == "1":
            value = self._value(name, given)
        elif habit.values == "?" and given is None and self._waiting and self._waiting[0] in _SWITCH_VALUES:
            value = self._waiting.popleft()
        else:
            value = given or ""
        typed = f"{name} {value}".rstrip()
        if habit.is_declined:
            raise ConfigError("cli.not_here", typed=_shown(typed), advice=habit.advice)
        if habit.own == MODEL:
            self._models.append(value)
            return
        ours = ACTS[habit.act](name, value) if habit.act else (f"{habit.own}={value}",) if habit.own else None
        if ours is None:
            self._ignored.append(_Ignored(typed, habit.advice))
        else:
            self._left.extend(ours)

    def _take_foreign(self, name: str, given: str | None) -> bool:
        """Ignore or refuse an option of vLLM; return False if vLLM has none of that name."""
        found = find_flag(name, self._foreign)
        if found is None:
            return False
        foreign, before = found.foreign, list(self._waiting)
        value = self._foreign_value(name, given, found.name, foreign.is_switch)
        if found.is_off:
            value = not value
        values = before[: len(before) - len(self._waiting)] if given is None else [given]
        typed = _shown(" ".join((name, *values)))
        if not foreign.takes(value):
            raise ConfigError("cli.not_here", typed=typed, advice=foreign.words)
        self._ignored.append(_Ignored(typed, "" if foreign.is_missing else foreign.words))
        return True

    def _foreign_value(self, name: str, given: str | None, option: str, is_switch: bool) -> object:
        if is_switch:
            follows = given is None and self._waiting and self._waiting[0].lower() in ("true", "false")
            text = self._waiting.popleft() if follows else given
            return True if text is None else read_value(text)
        if name.startswith("-O") and name[2:].isdecimal():
            return read_value(name[2:])
        if option in SEVERAL_VALUES and given is None:
            several = [self._value(name, None)]
            while self._waiting and not self._waiting[0].startswith("-"):
                several.append(self._waiting.popleft())
            return several
        value = read_value(self._value(name, given))
        return {name.partition(".")[2]: value} if "." in name else value

    def _value(self, name: str, given: str | None) -> str:
        if given is not None:
            return given
        if not self._waiting or self._waiting[0] in self._takes_value:
            raise ConfigError("cli.needs_value", option=name, program=" ".join(("holdfast", *self._path)))
        return self._waiting.popleft()

    def _positional(self) -> Iterator[str]:
        """Yield the model, from an argument or a flag, then the other arguments."""
        if len(self._models) > 1 or (self._models and self._arguments and self._path[0] != "run"):
            raise ConfigError("cli.several_models", models=[*self._models, *self._arguments][:2])
        yield from self._models or self._arguments[:1]
        rest = self._arguments if self._models else self._arguments[1:]
        has_prompt = any(argument.partition("=")[0] in ("-p", "--prompt") for argument in self._left)
        if rest and self._path[0] == "run" and not has_prompt:
            yield f"--prompt={' '.join(rest)}"  # as in `ollama run`
        else:
            yield from rest


def _shown(typed: str) -> str:
    return shown(typed)[1:-1]


def _listed(ignored: Sequence[_Ignored]) -> str:
    """Group flags by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in ignored:
        by_reason.setdefault(one.reason, []).append(one.typed)
    return "; ".join(", ".join(flags) + (f" ({reason})" if reason else "") for reason, flags in by_reason.items())


def as_ours(path: Sequence[str], rows: Sequence[Option | Setting], arguments: Sequence[str]) -> list[str]:
    """Translate a command line to our flags."""
    return Typed(path, rows, arguments).as_ours()

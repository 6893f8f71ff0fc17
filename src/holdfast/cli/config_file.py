"""`--config FILE`: options of a command from a TOML file, under the names of its flags; what is typed wins; no torch."""

import difflib
import os
import stat
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.cli.options import ARGUMENTS, Option, Setting
from holdfast.errors import ConfigError, shown

FLAG = "--config"
MAX_BYTES = 2**20
SECRETS = ("api_key",)
"""Options whose values nobody else on the machine may read."""


def with_config(rows: Sequence[Option | Setting], arguments: Sequence[str]) -> list[str]:
    """The command line with what its --config file adds in front of what was typed."""
    file = _named_file(arguments)
    if file is None:
        return list(arguments)
    asked = f"--config {shown(file)} was asked"
    values, is_open = _read(file, asked)
    typed = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    by_name = {name: row for row in rows for name in _names(row)}
    added: list[str] = []
    places: list[str] = []
    for key, value in values.items():
        row = by_name.get(key.replace("-", "_"))
        if row is None and isinstance(value, dict):
            raise ConfigError(asked, f"[{shown(key)[1:-1]}] is a table", "write options at the top, without tables")
        if row is None or key.replace("-", "_") == FLAG[2:]:
            near = difflib.get_close_matches(key.replace("_", "-"), [name.replace("_", "-") for name in by_name], n=1)
            do = f"did you mean {near[0]}?" if near else "leave it out; keys are the names of options"
            raise ConfigError(asked, f"its key {shown(key)} is no option", do)
        if row.name in SECRETS and is_open:
            raise ConfigError(asked, f"it has {key}, and everybody on this machine may read it", "run chmod 600 on it")
        if row.panel == ARGUMENTS:
            places = [_text(key, value, asked)]
        elif not typed & set(row.all_flags):
            added += _arguments(row, key, value, asked)
    return [*added, *arguments, *([] if _has_argument(rows, arguments) else places)]


def _named_file(arguments: Sequence[str]) -> str | None:
    """The last one that was typed."""
    file: str | None = None
    for index, argument in enumerate(arguments):
        if argument == FLAG and index + 1 < len(arguments):
            file = arguments[index + 1]
        elif argument.startswith(f"{FLAG}="):
            file = argument.removeprefix(f"{FLAG}=")
    return file


def _read(file: str, asked: str) -> tuple[dict[str, object], bool]:
    """What is in the file, and whether everybody may read it."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            is_open = bool(os.fstat(opened.fileno()).st_mode & stat.S_IROTH)
            data = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it cannot be read"
        raise ConfigError(asked, reason, "check the path and its permissions") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(asked, f"it is larger than {MAX_BYTES >> 20} MiB", "name a TOML file with options")
    try:
        return tomllib.loads(data.decode()), is_open
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(asked, f"it is not TOML: {shown(str(error), 120)[1:-1]}", "mend the file") from error


def _names(row: Option | Setting) -> Iterable[str]:
    """Every long spelling of an option, as a key."""
    if row.panel == ARGUMENTS:
        return (row.name,)
    return tuple(flag.removeprefix("--").replace("-", "_") for flag in row.all_flags if flag.startswith("--"))


def _arguments(row: Option | Setting, key: str, value: object, asked: str) -> list[str]:
    """What somebody would have typed."""
    flag = f"--{key.replace('_', '-')}"
    if not row.metavar:
        if not isinstance(value, bool):
            _refuse(asked, key, value, "true or false works")
        if value:
            return [flag]
        opposite = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return [opposite] if opposite in row.all_flags else []
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not row.is_repeated:
        return [f"{flag}={','.join(_text(key, part, asked) for part in parts)}"]
    return [f"{flag}={_text(key, part, asked)}" for part in parts]


def _text(key: str, value: object, asked: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        _refuse(asked, key, value, "a text, a number or a list of them works")
    return str(value)


def _refuse(asked: str, key: str, value: object, works: str) -> NoReturn:
    raise ConfigError(asked, f"{key} is {shown(value)}, and {works}", "write the value as behind the option")


def _has_argument(rows: Sequence[Option | Setting], arguments: Sequence[str]) -> bool:
    """Whether something was typed that belongs to no option."""
    takes_value = {flag for row in rows if row.metavar for flag in row.all_flags}
    is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif argument.startswith("-"):
            is_value = argument in takes_value
        else:
            return True
    return False

"""`--config FILE`: options of a command from a TOML file; the command line wins; no torch."""

import os
import stat
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.cli.options import ARGUMENTS, Option, Setting
from holdfast.errors import ConfigError, did_you_mean, shown

FLAG = "--config"
MAX_BYTES = 2**20
SECRETS = ("api_key",)
"""Options that other users of the machine must not read."""


def with_config(rows: Sequence[Option | Setting], arguments: Sequence[str]) -> list[str]:
    """Prepend the options of the --config file to the arguments."""
    file = _named_file(arguments)
    if file is None:
        return list(arguments)
    values, is_open = _read(file)
    typed = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    by_name = {name: row for row in rows for name in _names(row)}
    added: list[str] = []
    places: list[str] = []
    for key, value in values.items():
        row = by_name.get(key.replace("-", "_"))
        if row is None and isinstance(value, dict):
            raise ConfigError("cli.config_table", file=file, key=key)
        if row is None or key.replace("-", "_") == FLAG[2:]:
            nearest = did_you_mean(key.replace("_", "-"), [name.replace("_", "-") for name in by_name])
            nearest = nearest or "Keys are the names of options."
            raise ConfigError("cli.config_unknown_key", file=file, key=key, nearest=nearest)
        if row.name in SECRETS and is_open:
            raise ConfigError("cli.config_exposed_secret", file=file, key=key)
        if row.panel == ARGUMENTS:
            places = [_text(key, value)]
        elif not typed & set(row.all_flags):
            added += _arguments(row, key, value)
    return [*added, *arguments, *([] if _has_argument(rows, arguments) else places)]


def _named_file(arguments: Sequence[str]) -> str | None:
    """Return the last --config of the command line."""
    file: str | None = None
    for index, argument in enumerate(arguments):
        if argument == FLAG and index + 1 < len(arguments):
            file = arguments[index + 1]
        elif argument.startswith(f"{FLAG}="):
            file = argument.removeprefix(f"{FLAG}=")
    return file


def _read(file: str) -> tuple[dict[str, object], bool]:
    """Parse the file; the second value is True if other users can read it."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            is_open = bool(os.fstat(opened.fileno()).st_mode & stat.S_IROTH)
            data = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError("cli.config_unreadable", file=file, reason=reason) from error
    if len(data) > MAX_BYTES:
        raise ConfigError("cli.config_too_large", file=file, limit_mib=MAX_BYTES >> 20)
    try:
        return tomllib.loads(data.decode()), is_open
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("cli.config_not_toml", file=file, reason=shown(str(error), 120)[1:-1]) from error


def _names(row: Option | Setting) -> Iterable[str]:
    """Return every long spelling of an option as a key."""
    if row.panel == ARGUMENTS:
        return (row.name,)
    return tuple(flag.removeprefix("--").replace("-", "_") for flag in row.all_flags if flag.startswith("--"))


def _arguments(row: Option | Setting, key: str, value: object) -> list[str]:
    """Write a key and its value as command-line arguments."""
    flag = f"--{key.replace('_', '-')}"
    if not row.metavar:
        if not isinstance(value, bool):
            raise ConfigError("value.not_bool", name=key, value=value).within("--config")
        if value:
            return [flag]
        opposite = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return [opposite] if opposite in row.all_flags else []
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not row.is_repeated:
        return [f"{flag}={','.join(_text(key, part) for part in parts)}"]
    return [f"{flag}={_text(key, part)}" for part in parts]


def _text(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError("cli.config_bad_value", key=key, value=value)
    return str(value)


def _has_argument(rows: Sequence[Option | Setting], arguments: Sequence[str]) -> bool:
    """Return True if an argument belongs to no option."""
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

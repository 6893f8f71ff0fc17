"""JSON files of a model, read as hostile input: bounded size and depth, no duplicate keys, no NaN; no torch."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from holdfast.errors import ModelFormatError, shown
from holdfast.models.settings import plain

MAX_JSON_BYTES = 32 * 2**20
"""Of one file; the largest indexes there are have about 15 MiB."""
AGAIN = "download the model again"


def read_json_object(path: Path) -> dict[str, object]:
    """The object that a JSON file holds."""
    value = parse_json(read_small_file(path, MAX_JSON_BYTES), path.name)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} holds a JSON {type(value).__name__}", "an object is needed", AGAIN)
    return value


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file that has at most `max_bytes`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{path.name} is not a regular file", "a file is needed", AGAIN)
        if status.st_size > max_bytes:
            raise ModelFormatError(
                f"{path.name} has {status.st_size} bytes", f"at most {max_bytes} are read of such a file", AGAIN
            )
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelFormatError(f"{path.name} cannot be read", str(error.strerror or error), "check the file") from error
    if len(data) > max_bytes:
        raise ModelFormatError(f"{path.name} grew while it was read", f"at most {max_bytes} bytes are read", AGAIN)
    return data


def parse_json(data: bytes, file: str, parse_int: Callable[[str], int] = int) -> object:
    """The value in a JSON text; what is wrong with it is told with the name of the file."""
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_int=parse_int,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file} is not UTF-8 at byte {error.start}", "JSON is UTF-8", AGAIN) from error
    except RecursionError as error:
        raise ModelFormatError(f"{file} is nested too deeply", "no model needs that", AGAIN) from error
    except ValueError as error:
        reason = plain(str(error))
        raise ModelFormatError(f"{file} is not sound JSON", reason, AGAIN) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} appears twice")
            seen.add(key)
    return values

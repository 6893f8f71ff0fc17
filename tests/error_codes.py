"""Checks of errors by code: `raises_code`, and the codes that the source raises with the values of each."""

import ast
import contextlib
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, shown

PACKAGE = Path(errors.__file__).parent
CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HoldfastError)}
CLASSES.add("ApiError")  # of the server


@contextlib.contextmanager
def raises_code(code: str, kind: type[BaseException] = HoldfastError, /, **values: object) -> Iterator[Any]:
    """Expect an error of `kind` with `code`, a message from the table, and at least these values."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert isinstance(error, HoldfastError), f"{type(error).__name__} has no code"
    assert error.code == code, f"{error.code}, not {code}: {error}"
    assert "no message" not in str(error), str(error)
    held = {name: error.values.get(name) for name in values}
    assert held == values, f"{code} has {shown(error.values, 400)}"


class RaiseSite(NamedTuple):
    """A call in the source that makes an error."""

    place: str
    code: str
    values: frozenset[str]
    is_open: bool
    """True if `**values` follows, so that not every name is known."""


def raise_sites() -> list[RaiseSite]:
    """List every call `SomeError("area.name", key=...)` with a literal code."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or len(node.args) != 1:
                continue
            first = node.args[0]
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name not in CLASSES or not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                continue
            keys = [keyword.arg for keyword in node.keywords]
            place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            known = frozenset(key for key in keys if key is not None) - {"table"}
            found.append(RaiseSite(place, first.value, known, None in keys))
    return found


def message_table() -> dict[str, str]:
    """Read all messages by code."""
    return {
        f"{path.stem}.{name}": text
        for path in sorted((PACKAGE / "messages").glob("*.toml"))
        for name, text in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def placeholders(template: str) -> frozenset[str]:
    """Names of the values that a message shows."""
    return frozenset(name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name)

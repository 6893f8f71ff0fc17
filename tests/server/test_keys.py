"""Keys: where they come from, which are refused, and how they are compared."""

import ast
import hmac
from pathlib import Path

import pytest

from error_codes import raises_code
from holdfast.errors import ConfigError
from holdfast.server import keys as module
from holdfast.server.keys import Keys, collect_keys, read_key_file


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_keys_come_from_options_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", " one ")
    monkeypatch.setenv("HOLDFAST_API_KEYS", "two, three,,one")
    keys = collect_keys(["zero"], write(tmp_path, "# comment\nfour\n\n  five  \n"))
    assert len(keys) == 6
    assert [keys.find(key.encode()) for key in ("zero", "one", "two", "three", "four", "five", "six", "", "zer")] == [
        *range(6),
        *(None,) * 3,
    ]
    assert "zero" not in repr(keys)


def test_keys_invalid_key_is_refused_and_not_shown() -> None:
    for key in ("a b", "", "é", "a\n", "x" * 513, "\x7f"):
        with raises_code("http.key_invalid", ConfigError) as caught:
            Keys([key])
        assert not key.strip() or key not in str(caught.value)


def test_keys_too_many_are_refused() -> None:
    assert len(Keys([*map(str, range(1024)), "0"])) == 1024
    with raises_code("http.keys_too_many", ConfigError, count=1025):
        Keys(map(str, range(1025)))


def test_longest_key_is_taken() -> None:
    assert Keys(["x" * 512]).find(b"x" * 512) == 0


def test_key_file_that_is_wrong_is_refused(tmp_path: Path) -> None:
    for mode in (0o644, 0o604):
        with raises_code("http.key_file_public", ConfigError):
            read_key_file(write(tmp_path, "a-key\n", mode))
    for text in ("# none\n", "é\n", "k" * (2**20 + 1)):
        with raises_code("http.key_file_unreadable", ConfigError):
            read_key_file(write(tmp_path, text))
    for file in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        with raises_code("http.key_file_unreadable", ConfigError):
            read_key_file(str(file))


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key, whichever matches; and nowhere with ==."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append(1) or compare(one, other))
    keys = Keys(["a", "b", "c"])
    for presented in (b"a", b"c", b"x", b"", b"a" * 10_000):
        compared.clear()
        keys.find(presented)
        assert len(compared) == 3
    tree = ast.parse(Path(module.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)]

"""Keys: where they come from, which are refused, and how they are compared."""

import ast
import hmac
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.server import keys as module
from holdfast.server.keys import Keys, collect_keys, read_key_file


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_keys_of_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", " one ")
    monkeypatch.setenv("HOLDFAST_API_KEYS", "two, three,,one")
    keys = collect_keys(["zero"], write(tmp_path, "# comment\nfour\n\n  five  \n"))
    assert len(keys) == 6
    assert [keys.find(key.encode()) for key in ("zero", "one", "two", "three", "four", "five", "six", "", "zer")] == [
        *range(6),
        *(None,) * 3,
    ]
    assert "zero" not in repr(keys)


@pytest.mark.parametrize("key", ["a b", "", "é", "a\n", "x" * 513, "\x7f"])
def test_bad_keys(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys([key])
    assert not key.strip() or key not in str(caught.value)


def test_too_many_keys() -> None:
    assert len(Keys([*map(str, range(1024)), "0"])) == 1024
    with pytest.raises(ConfigError):
        Keys(map(str, range(1025)))


def test_longest_key_is_taken() -> None:
    assert Keys(["x" * 512]).find(b"x" * 512) == 0


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("a-key\n", 0o644, "chmod 600"),
        ("a-key\n", 0o604, "chmod 600"),
        ("# none\n", 0o600, "no key"),
        ("é\n", 0o600, "not ASCII"),
        ("k" * (2**20 + 1), 0o600, "larger"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_key_file(write(tmp_path, text, mode))


def test_files_that_are_none(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        with pytest.raises(ConfigError):
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

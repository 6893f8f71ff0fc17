"""--config: a TOML file with the names of options; what is typed wins, and what is wrong is reported with the nearest name."""

from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.cli.commands import COMMANDS
from holdfast.cli.config_file import with_config
from holdfast.errors import ConfigError

SERVE = next(command for command in COMMANDS if command.path == ("serve",))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "serve.toml"
    made.touch(0o600)
    return made


def expanded(file: Path, text: str, *typed: str) -> list[str]:
    file.write_text(text)
    found = with_config(SERVE.rows, [*typed, "--config", str(file)])
    place = found.index("--config")
    return [*found[:place], *found[place + 2 :]]


def test_with_config_without_file_keeps_arguments() -> None:
    assert with_config(SERVE.rows, ["a-model", "--port", "1"]) == ["a-model", "--port", "1"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("port = 8080", ["--port=8080"]),
        ('host = "0.0.0.0"\nallow-public = true', ["--host=0.0.0.0", "--allow-public"]),
        ("allow_public = false", []),
        ("drain-seconds = 2.5", ["--drain-seconds=2.5"]),
        ('served-model-name = ["a", "b"]', ["--served-model-name=a", "--served-model-name=b"]),
        ('api-key = "k"', ["--api-key=k"]),
        ("max_model_len = 4096", ["--max-model-len=4096"]),
        ('max-model-len = "4K"', ["--max-model-len=4K"]),
        ("gpu_memory_utilization = 0.5", ["--gpu-memory-utilization=0.5"]),
        ("enable-prefix-caching = false", ["--no-enable-prefix-caching"]),
        ("enable-prefix-caching = true", ["--enable-prefix-caching"]),
        ("no-core-process = true", ["--no-core-process"]),
        ("core-process = false", ["--no-core-process"]),
        ("kv-protected-layers = [0, 1, 30]", ["--kv-protected-layers=0,1,30"]),
    ],
)
def test_keys_are_the_names_of_options(file: Path, text: str, arguments: list[str]) -> None:
    assert expanded(file, text) == arguments


def test_config_file_typed_option_wins(file: Path) -> None:
    text = 'port = 1\nserved-model-name = ["a"]\nhost = "::1"'
    assert expanded(file, text, "--port", "2", "--served-model-name=b") == [
        "--host=::1",
        "--port",
        "2",
        "--served-model-name=b",
    ]


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("memory-utilization = 0.5", ("--gpu-memory-utilization", "0.7")),
        ("gpu-memory-utilization = 0.5", ("--memory-utilization=0.7",)),
        ("enable-prefix-caching = true", ("--no-enable-prefix-caching",)),
        ("no-enable-prefix-caching = true", ("--enable-prefix-caching",)),
        ('served-model-name = ["a", "b"]', ("--served-model-name", "c")),
    ],
)
def test_other_spelling_that_is_typed_wins(file: Path, text: str, typed: tuple[str, ...]) -> None:
    assert expanded(file, text, *typed) == list(typed)
    assert len(expanded(file, text, "--port", "1")) > 2, "else the file is read"


def test_last_of_two_files_is_read(file: Path) -> None:
    other = file.with_name("other.toml")
    other.write_text("port = 2")
    file.write_text("port = 1")
    for words in (("--config", str(file), "--config", str(other)), (f"--config={file}", f"--config={other}")):
        assert with_config(SERVE.rows, words)[0] == "--port=2"
    assert with_config(SERVE.rows, [f"--config={other}", "--config", str(file)])[0] == "--port=1"


def test_config_file_keys_are_added_in_order(file: Path) -> None:
    text = 'port = 1\nhost = "::1"\nmax-num-seqs = 3\nallow-public = true'
    assert expanded(file, text) == ["--port=1", "--host=::1", "--max-num-seqs=3", "--allow-public"]


def test_config_file_above_one_mebibyte_is_refused(file: Path) -> None:
    head = "port = 1\n# "
    assert expanded(file, head + "x" * (2**20 - len(head))) == ["--port=1"]
    with raises_code("cli.config_too_large", ConfigError, limit_mib=1):
        expanded(file, head + "x" * (2**20 - len(head) + 1))


def test_config_file_model_key_is_positional_argument(file: Path) -> None:
    assert expanded(file, 'model = "there"', "--port", "2") == ["--port", "2", "there"]
    assert expanded(file, 'model = "there"', "here", "--port", "2") == ["here", "--port", "2"]


@for_each(
    "text, code, values",
    [
        ("prot = 1", "cli.config_unknown_key", {"nearest": "Did you mean port?"}),
        ("max-conections = 1", "cli.config_unknown_key", {"nearest": "Did you mean max-connections?"}),
        ("zzzz = 1", "cli.config_unknown_key", {}),
        ('config = "other"', "cli.config_unknown_key", {}),
        ("[server]\nport = 1", "cli.config_table", {"key": "server"}),
        ("port = {a = 1}", "cli.config_bad_value", {"key": "port"}),
        ("port = true", "cli.config_bad_value", {"value": True}),
        ('allow-public = "yes"', "value.not_bool", {"value": "yes"}),
        ("port = ", "cli.config_not_toml", {}),
        ("port = 1\nport = 2", "cli.config_not_toml", {}),
    ],
)
def test_config_file_with_mistakes_is_refused(file: Path, text: str, code: str, values: dict) -> None:
    with raises_code(code, ConfigError, **values):
        expanded(file, text)


def test_config_file_readable_by_others_refuses_secret_keys(file: Path) -> None:
    file.chmod(0o644)
    with raises_code("cli.config_exposed_secret", ConfigError, key="api-key"):
        expanded(file, 'api-key = "k"')
    assert expanded(file, "port = 1") == ["--port=1"]


def test_config_file_unreadable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("missing", "", "bytes"):
        with pytest.raises(ConfigError):
            with_config(SERVE.rows, ["--config", str(tmp_path / name)])

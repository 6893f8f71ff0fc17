"""The completion script: bash runs it and offers what the command line takes."""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli.cli_models import Here
from holdfast.cli.commands import COMMANDS
from holdfast.cli.completion import SHELLS, VALUES
from holdfast.cli.options import Setting
from holdfast.config import EngineConfig
from holdfast.memory.devices import GPUS, find_gpu
from holdfast.models.catalogue import CATALOGUE

BASH = shutil.which("bash")
Complete = Callable[..., list[str]]


@pytest.fixture
def script(here: Here) -> Callable[[str], str]:
    def print_script(shell: str) -> str:
        ended = here("completion", shell)
        assert (ended.code, ended.err) == (0, "")
        return ended.out

    return print_script


@pytest.fixture
def complete(script: Callable[[str], str], tmp_path: Path) -> Complete:
    """What bash offers for the last of some words."""
    if BASH is None:
        pytest.skip("there is no bash")
    file = tmp_path / "completion.sh"
    file.write_text(script("bash"))
    shell: str = BASH

    def offered(*words: str) -> list[str]:
        code = '. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _holdfast; printf "%s\\n" "${COMPREPLY[@]}"'
        command = [shell, "--norc", "-c", code, "bash", str(file), "holdfast", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    return offered


def test_bash_offers_commands_and_those_below_them(complete: Complete) -> None:
    assert set(complete("")) == {command.path[0] for command in COMMANDS}
    assert complete("ru") == ["run"]
    assert complete("bench", "") == ["latency", "throughput", "fill", "serve"]
    assert complete("--v") == ["--version"]


def test_bash_offers_the_options_of_the_command_at_hand(complete: Complete) -> None:
    assert complete("bench", "latency", "--ag") == ["--against"]
    assert complete("run", "--ag") == []
    assert complete("run", "a prompt", "--kv-cache-d") == ["--kv-cache-dtype"]
    assert "--help" in complete("cache", "-")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "--dtype", "b"), ["bfloat16"]),
        (("run", "--dtype", "=", "b"), ["bfloat16"]),
        (("run", "--dtype=b"), ["--dtype=bfloat16"]),
        (("run", "--dtype", "="), ["auto", "float32", "float16", "bfloat16"]),
        (("eval", "kv", "--formats", "turboquant_k"), ["turboquant_k8v4", "turboquant_k5v4", "turboquant_k3v4_nc"]),
        (("completion", ""), list(SHELLS)),
        (("run", "-p", ""), []),
        (("run", "--max-tokens", ""), []),
    ],
)
def test_bash_offers_values(complete: Complete, words: Sequence[str], expected: list[str]) -> None:
    assert complete(*words) == expected


def test_bash_offers_models_and_gpus_to_a_plan(complete: Complete) -> None:
    assert set(complete("plan", "--gpu", "")) == set(GPUS)
    assert set(complete("plan", "Qwen3-")) == {name for name in CATALOGUE if name.startswith("Qwen3-")}
    assert not any(name in CATALOGUE for name in complete("run", ""))


def test_bash_completes_names_in_any_case(complete: Complete) -> None:
    assert set(complete("plan", "qwen3-")) == set(complete("plan", "Qwen3-")) == set(complete("plan", "QWEN3-"))
    assert complete("plan", "meta-LLAMA-zz") == []
    assert complete("plan", "--gpu", "H20") == complete("plan", "--gpu", "h20") != []
    assert complete("run", "--dtype=BF") == ["--dtype=bfloat16"]
    assert complete("run", "--dtype", "=", "BF") == ["bfloat16"]
    assert complete("plan", "qwen3\\") == []


def test_bash_offers_files_where_a_path_is_requested(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert complete("run", "mod") == ["model.gguf"]
    assert complete("run", "--tokenizer", "mod") == ["model.gguf"]
    assert complete("eval", "kv", "--text", "mod") == ["model.gguf"]
    assert complete("run", "--dtype", "mod") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_contains_every_option(script: Callable[[str], str], shell: str) -> None:
    text = script(shell)
    for command in COMMANDS:
        for row in command.rows:
            flag = row.all_flags[0]
            if row.panel == "Arguments" or not flag.startswith("--"):
                continue
            assert re.search(rf"(?:{flag}|-l {flag[2:]})(?![\w-])", text), f"{command.path}: {flag}"
    assert "holdfast completion" in text.splitlines()[0], "how to install it"


def test_offered_values_are_those_that_settings_take() -> None:
    names = {row.name for command in COMMANDS for row in command.rows}
    assert set(VALUES) <= names
    fields = {row.name for command in COMMANDS for row in command.rows if isinstance(row, Setting)}
    for name in set(VALUES) & fields:
        for value in VALUES[name]:
            other = {"quantization": "fp8"} if name == "weight_cache" else {}
            EngineConfig.from_options(**{name: value, **other})
    assert all(find_gpu(name) for name in VALUES["gpu"])


@pytest.mark.parametrize("arguments", [(), ("tcsh",)])
def test_another_shell_is_reported_which_there_are(here: Here, arguments: tuple[str, ...]) -> None:
    ended = here("completion", *arguments)
    assert ended.code == 2
    assert "bash, zsh, fish" in ended.err

"""Options as they were typed: the same values as with typer's own checks, and without their library."""

import subprocess
import sys
from typing import Annotated

import pytest
import typer

from cli.cli_models import finish, start
from holdfast.cli.as_typed import take_as_typed


def parsed(arguments: list[str], is_plain: bool) -> list[object]:
    """What a command gets."""
    found: list[object] = []
    app = typer.Typer(add_completion=False)

    @app.callback()
    def group(verbose: Annotated[bool, typer.Option("--verbose")] = False) -> None:
        found.append(verbose)

    @app.command("inner")
    def inner(
        model: Annotated[str | None, typer.Argument()] = None,
        name: Annotated[str | None, typer.Option()] = None,
        length: Annotated[str, typer.Option()] = "16",
        stop: Annotated[list[str] | None, typer.Option()] = None,
        on: Annotated[bool | None, typer.Option("--on")] = None,
    ) -> None:
        found.append((model, name, length, stop or [], on))

    command = typer.main.get_command(app)
    if is_plain:
        take_as_typed(command)
    with command.make_context("test", list(arguments)) as context:
        command.invoke(context)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["inner"],
        ["--verbose", "inner", "path", "--name", "", "--length", "-1"],
        ["inner", "--stop", "a", "--stop", "b", "--on"],
        ["inner", "--stop", "1", "--name", "0.5"],
    ],
    ids=" ".join,
)
def test_values_are_the_same(arguments: list[str]) -> None:
    assert parsed(arguments, is_plain=True) == parsed(arguments, is_plain=False)


def test_the_library_is_not_imported() -> None:
    words = "import sys; from holdfast.cli.app import run; run(['--version']); print('pydantic' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def test_a_command_line_still_works_in_a_fresh_process() -> None:
    ended = finish(start("run", "no/such/model", "-p", "Hello", "--stop", "a", "--temperature", "hot"))
    assert ended.code == 2
    assert "temperature='hot' was asked" in ended.err

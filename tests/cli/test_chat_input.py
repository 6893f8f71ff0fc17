"""What a person types: lines, blocks, Ctrl-C and Ctrl-D."""

import io
import sys
from collections.abc import Callable

import pytest

from holdfast.cli.chat_input import MORE, PROMPT, Piped, Typed
from holdfast.errors import PromptError


def typing(*events: str | type[BaseException]) -> tuple[Callable[[str], str], list[str]]:
    """Somebody at a keyboard, and the prompts that they saw; they leave at the end."""
    left, prompts = list(events), []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        event = left.pop(0) if left else EOFError
        if isinstance(event, str):
            return event
        raise event

    return ask, prompts


def test_lines_until_the_end() -> None:
    ask, prompts = typing("one", "", "two")
    assert list(Typed(ask)) == ["one", "", "two"]
    assert prompts == [PROMPT] * 4


def test_blocks_between_triple_quotes() -> None:
    ask, prompts = typing('"""', "a", "  b", '"""', '"""one line"""', '"""c', 'd"""', "e")
    assert list(Typed(ask)) == ["a\n  b", "one line", "c\nd", "e"]
    assert prompts.count(MORE) == 4


def test_a_block_that_never_ends_is_what_was_typed() -> None:
    assert list(Typed(typing('"""a', "b")[0])) == ["a\nb"]


def test_two_interrupts_in_a_row_leave(capsys: pytest.CaptureFixture[str]) -> None:
    ask, prompts = typing("one", KeyboardInterrupt, "two", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert list(Typed(ask)) == ["one", "two"]
    assert capsys.readouterr().err.count("Ctrl-C again") == 2
    assert len(prompts) == 5


def test_an_interrupt_drops_the_block_that_was_begun() -> None:
    assert list(Typed(typing('"""a', KeyboardInterrupt, "b")[0])) == ["b"]


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_piped_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe_in(monkeypatch, 'one\r\n"""\na\n\nb"""\nkäse'.encode())
    assert list(Piped()) == ["one", "a\n\nb", "käse"]
    assert capsys.readouterr() == ("", "")


def test_piped_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"fine\nnot \xff fine\n")
    messages = iter(Piped())
    assert next(messages) == "fine"
    with pytest.raises(PromptError, match="byte 4 of it"):
        next(messages)

"""What a person types in a chat, message by message: from a terminal, or piped in; no torch."""

import sys
from collections.abc import Callable, Iterator

from holdfast.cli.prompt_input import decode
from holdfast.cli.side_lines import write_line

QUOTES = '"""'
PROMPT, MORE = ">>> ", "... "


class Typed:
    """Messages from a terminal; one Ctrl-C clears the line, two in a row or Ctrl-D end the chat."""

    def __init__(self, ask: Callable[[str], str] | None = None) -> None:
        _edit_lines()
        self._ask = ask if ask is not None else input

    def __iter__(self) -> Iterator[str]:
        was_interrupted = False
        while True:
            try:
                message = _message(self._ask)
            except EOFError:
                write_line("")
                return
            except KeyboardInterrupt:
                if was_interrupted:
                    write_line("")
                    return
                was_interrupted = True
                write_line("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
                continue
            was_interrupted = False
            yield message


class Piped:
    """Messages from a pipe or a file: a line each, or several between triple quotes."""

    def __iter__(self) -> Iterator[str]:
        def ask(prompt: str) -> str:
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            return decode(line, "a line of standard input").removesuffix("\n").removesuffix("\r")

        while True:
            try:
                yield _message(ask)
            except EOFError:
                return


def _message(ask: Callable[[str], str]) -> str:
    """One line, or the lines from one that begins with triple quotes to one that ends with them."""
    line = ask(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(ask(MORE))
        except EOFError:
            return "\n".join(lines)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _edit_lines() -> None:
    """Arrow keys and history, on systems that have them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return

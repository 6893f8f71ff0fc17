"""The prompt of a command: from its option, from piped input, or both; bytes that are no text are refused; no torch."""

import select
import sys
from typing import BinaryIO

from holdfast.cli.side_lines import write_line
from holdfast.errors import PromptError

MAX_STDIN_BYTES = 64 * 2**20
PATIENCE_SECONDS = 3.0
"""How long piped input may stay silent before somebody is told that it is waited for."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_prompt(option: str | None) -> str:
    """The option, then a blank line, then what is piped in; at least one of them."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_all(sys.stdin.buffer)
    parts = [part for part in (option, piped) if part]
    if not parts:
        raise PromptError(
            "an answer was asked for, with no prompt" if option is None else "an empty prompt was given",
            "it is taken from -p, and from piped input",
            'write holdfast run -p "...", or talk in holdfast chat',
        )
    return "\n\n".join(parts)


def decode(data: bytes, what: str = "standard input") -> str:
    """Text of bytes that should be UTF-8."""
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{what} was given as a prompt",
            f"byte {error.start} of it, 0x{data.removeprefix(BYTE_ORDER_MARK)[error.start]:02x}, is not UTF-8",
            "convert it first, as with iconv -t utf-8",
        ) from error


def _read_all(stream: BinaryIO) -> str:
    _tell_when_waiting(stream)
    data = stream.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise PromptError(
            f"more than {MAX_STDIN_BYTES >> 20} MiB were given on standard input", "no model reads that", "pipe in less"
        )
    text = decode(data)
    # The newline that ends the last line of a file is not part of what was said.
    return text.removesuffix("\n").removesuffix("\r")


def _tell_when_waiting(stream: BinaryIO) -> None:
    """A pipe that nobody closes looks like a hang; say what is waited for."""
    try:
        ready, _, _ = select.select([stream], [], [], PATIENCE_SECONDS)
    except (OSError, ValueError):
        return  # no file behind it, or a system that selects sockets only
    if not ready:
        write_line("waiting for standard input to end; start with < /dev/null to leave it out")

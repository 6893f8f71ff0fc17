"""The process of a command: Ctrl-C, exit codes, answers to stdout, lines and log to stderr, strict JSON; no torch."""

import io
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

FAILED = 1
INTERRUPTED = 128 + signal.SIGINT
"""Exit codes; the second is what a shell expects."""
STDOUT = "-"
"""Stands for stdout where a file is asked for."""
MAX_PATH = 4096
"""Characters of a path that a line repeats: all of them, as Linux has it."""
DEBUG_VARIABLE = "HOLDFAST_DEBUG"
"""Tracebacks come only where it asks for them."""
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def escape_unwritable() -> None:
    """From now on a character that a stream cannot encode is written as an escape, such as \\u2588, and raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave_on_interrupt() -> None:
    """Until a model is loaded."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def leave(signum: int, frame: FrameType | None) -> None:
    """What Ctrl-C does until a model is loaded: there is nothing yet to clean up.

    An exception would not do while libraries are imported: torch drops it around its import of numpy, and aborts the
    process where its C++ gets one.
    """
    os.write(2, b"\r\x1b[Kinterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(INTERRUPTED)


def raise_interrupts() -> None:
    """From now on Ctrl-C is an exception, for those who have something to put in order."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """The same for a while, after which Ctrl-C leaves again as it did before."""
    was_leaving = signal.getsignal(signal.SIGINT) is leave
    raise_interrupts()
    try:
        yield
    finally:
        if was_leaving:
            leave_on_interrupt()


def write_line(text: str) -> None:
    """A line on stderr, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def log_plainly() -> None:
    """The log on stderr, without tracebacks unless they are asked for."""
    # A plan logs nothing, and comes sooner without.
    import logging

    from holdfast.observability.log import log_to_stderr

    log_to_stderr()
    if not is_debugging():
        for handler in logging.getLogger("holdfast").handlers:
            handler.addFilter(_without_traceback)


def is_debugging() -> bool:
    """True where somebody wants tracebacks."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def _without_traceback(record: "logging.LogRecord") -> bool:
    record.exc_info = record.exc_text = None
    return True


def for_terminal(text: str) -> str:
    """Text that cannot move the cursor or recolour the screen: control characters become pictures of themselves."""
    return text.translate(_CONTROLS)


def write_answer(text: str) -> None:
    """Text to stdout at once, made harmless where a terminal shows it."""
    if text and sys.stdout is not None:
        sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def quoted(text: str, max_chars: int = 80) -> str:
    """A part of what somebody typed, on one line, as a terminal can show it."""
    words = for_terminal(" ".join(text.split()))
    return words if len(words) <= max_chars else f"{words[: max_chars - 3]}..."


def dumps(value: object, indent: int | None = None) -> str:
    """One JSON text, without a newline at its end."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

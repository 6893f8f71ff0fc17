"""Process helpers of commands: Ctrl-C, exit codes, answers to stdout, logs to stderr, strict JSON; no torch."""

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
"""Exit code after Ctrl-C, by the shell's convention."""
STDOUT = "-"
"""The value of a file option that means stdout."""
MAX_PATH = 4096
"""Longest path on Linux."""
DEBUG_VARIABLE = "HOLDFAST_DEBUG"
"""Environment variable: 1 prints tracebacks."""
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def escape_unwritable() -> None:
    """Escape characters that a stream cannot encode, such as \\u2588."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave_on_interrupt() -> None:
    """Let Ctrl-C end the process at once, until a model is loaded."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def leave(signum: int, frame: FrameType | None) -> None:
    """End the process on Ctrl-C: nothing needs cleaning up yet.

    An exception does not work during imports: torch drops it around its import of numpy, or aborts the process.
    """
    os.write(2, b"\r\x1b[Kinterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(INTERRUPTED)


def raise_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt inside the context."""
    was_leaving = signal.getsignal(signal.SIGINT) is leave
    raise_interrupts()
    try:
        yield
    finally:
        if was_leaving:
            leave_on_interrupt()


def write_line(text: str) -> None:
    """Write a line to stderr, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def log_plainly() -> None:
    """Log to stderr, without tracebacks unless HOLDFAST_DEBUG is set."""
    # Imported here, because a plan logs nothing.
    import logging

    from holdfast.observability.log import log_to_stderr

    log_to_stderr()
    if not is_debugging():
        for handler in logging.getLogger("holdfast").handlers:
            handler.addFilter(_without_traceback)


def is_debugging() -> bool:
    """Return True if HOLDFAST_DEBUG is set."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def _without_traceback(record: "logging.LogRecord") -> bool:
    record.exc_info = record.exc_text = None
    return True


def for_terminal(text: str) -> str:
    """Replace control characters by visible symbols."""
    return text.translate(_CONTROLS)


def write_answer(text: str) -> None:
    """Write text to stdout and flush; escape it for a terminal."""
    if text and sys.stdout is not None:
        sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def quoted(text: str, max_chars: int = 80) -> str:
    """Shorten text to one line for a terminal."""
    line = for_terminal(" ".join(text.split()))
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def dumps(value: object, indent: int | None = None) -> str:
    """Return strict JSON; numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

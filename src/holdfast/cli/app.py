"""Entry point of `holdfast`: a command ends with an exit code and at most one line on stderr; no torch."""

import atexit
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from holdfast.cli.terminal import (
    DEBUG_VARIABLE,
    FAILED,
    INTERRUPTED,
    escape_unwritable,
    is_debugging,
    leave_on_interrupt,
    write_line,
)
from holdfast.errors import ConfigError, HoldfastError, MemoryPlanError, RequestError

WRONG_USE = 2
PIPE_CLOSED = 141
"""Exit code after SIGPIPE, by the shell's convention."""
MAX_CHAIN = 32
NO_MEMORY = "The machine is out of memory. Use a smaller model, dtype or max_model_len."
OUT_OF_MEMORY = (
    *("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new thread"),
    *("not enough memory", "cannot apply additional memory protection", "std::bad_alloc"),
)
"""Lower-case library messages about exhausted memory or address space."""


def main() -> None:
    """Run the command line of this process."""
    leave_on_interrupt()
    escape_unwritable()
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        os._exit(code)
    if "torch" in sys.modules and sys.getprofile() is None and sys.gettrace() is None:
        _leave_at_once(code)
    sys.exit(code)


def serve_main() -> None:
    """Run `holdfast serve` for python -m holdfast.entrypoints.openai.api_server."""
    sys.argv[1:1] = ["serve"]
    main()


def _leave_at_once(code: int) -> NoReturn:
    """Flush, run exit handlers and exit, because unloading torch takes a second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        from holdfast.cli.commands import invoke

        code = invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        return report(error)
    return code


def report(error: BaseException) -> int:
    """Print an error, if needed, and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if _was_interrupted(error):
        # A second Ctrl-C ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _discard_unwritten()
        write_line("interrupted")
        return INTERRUPTED
    if isinstance(error, OSError):
        _discard_unwritten()
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    if is_debugging():
        write_line("".join(traceback.format_exception(error)).rstrip())
    write_line(f"error: {describe(error)}")
    if isinstance(error, MemoryPlanError):
        _draw_refusal(error)
    return WRONG_USE if isinstance(error, ConfigError | RequestError) else FAILED


def describe(error: BaseException) -> str:
    """Return the message of an error on one line."""
    limited = _limit_message(error)
    if limited is not None:
        return limited
    if isinstance(error, HoldfastError):
        return str(error)
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "a file"
        return f"{ascii(what)[1:-1]}: {error.strerror or error}. Check the path, its permissions and the disk."
    message = " ".join(str(error).split())[:300] or "no message"
    return (
        f"{type(error).__name__}: {message}. This is a bug in holdfast. "
        f"Set {DEBUG_VARIABLE}=1 for the traceback and report it."
    )


def _limit_message(error: BaseException) -> str | None:
    """Explain an error that a limit of the process caused; None for other errors."""
    chain = list(_chain(error))
    numbers = {part.errno for part in chain if isinstance(part, OSError)}
    text = " ".join(str(part) for part in chain if not isinstance(part, HoldfastError)).lower()
    if errno.EMFILE in numbers or "too many open files" in text:
        limit = _limit("RLIMIT_NOFILE")
        return f"Too many open files: this process may open {limit} (ulimit -n). Raise it, as with ulimit -n 1024."
    lacks_memory = errno.ENOMEM in numbers or any(isinstance(part, MemoryError) for part in chain)
    if not lacks_memory and not any(phrase in text for phrase in OUT_OF_MEMORY):
        return None
    address_space = _limit("RLIMIT_AS")
    if address_space is None:
        return None if not lacks_memory and "thread" not in text else NO_MEMORY
    return (
        f"Out of address space: this process may map {address_space >> 20} MiB (ulimit -v), and libraries, weights and "
        "pages need more. Raise it, as with ulimit -v unlimited; memory_limit bounds the engine."
    )


def _limit(name: str) -> int | None:
    """Return a limit of this process; None if it is unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _draw_refusal(error: MemoryPlanError) -> None:
    """Draw the table on a terminal; the line above it has the same facts."""
    if error.table is None or sys.stderr is None or not sys.stderr.isatty():
        return
    from holdfast.cli.tables import refusal_lines, show_beside

    show_beside(refusal_lines(error.table, error.changes))


def _was_interrupted(error: BaseException | None) -> bool:
    """Return True for KeyboardInterrupt, even if a library wrapped it during import."""
    return any(isinstance(part, KeyboardInterrupt) for part in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    for _ in range(MAX_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _discard_unwritten() -> None:
    """Redirect the interpreter's last flush of stdout to /dev/null."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # no stdout, or not a file
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # too many open files
        os.close(number)
        return
    os.dup2(nowhere, number)
    os.close(nowhere)

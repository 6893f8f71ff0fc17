"""The entry point of `holdfast`: however a command ends, an exit code and at most one line on stderr; no torch."""

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
"""What a shell shows for a program that SIGPIPE ended."""
MAX_CHAIN = 32
NO_MEMORY = "more memory was asked; the machine has no more; take a smaller model, dtype or max_model_len"
OUT_OF_MEMORY = (
    *("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new thread"),
    *("not enough memory", "cannot apply additional memory protection", "std::bad_alloc"),
)
"""What libraries say, in small letters, where memory or address space ends."""


def main() -> None:
    """Run the command that the process was started with."""
    leave_on_interrupt()
    escape_unwritable()
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        os._exit(code)
    if "torch" in sys.modules and sys.getprofile() is None and sys.gettrace() is None:
        _leave_at_once(code)
    sys.exit(code)


def serve_main() -> None:
    """Run holdfast serve with what follows python -m holdfast.entrypoints.openai.api_server, as vLLM's users type it."""
    sys.argv[1:1] = ["serve"]
    main()


def _leave_at_once(code: int) -> NoReturn:
    """With all that was written, and what libraries do at the end; the interpreter would take a second to put torch away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a command; its exit code."""
    try:
        from holdfast.cli.commands import invoke

        code = invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        return report(error)
    return code


def report(error: BaseException) -> int:
    """Say what happened, if anything needs saying; the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if _was_interrupted(error):
        # Whoever is impatient ends what is left of the process at once.
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
    write_line(f"error: {in_words(error)}")
    if isinstance(error, MemoryPlanError):
        _draw_refusal(error)
    return WRONG_USE if isinstance(error, ConfigError | RequestError) else FAILED


def in_words(error: BaseException) -> str:
    """What was asked, what is there, what to do."""
    limited = _limit_words(error)
    if limited is not None:
        return limited
    if isinstance(error, HoldfastError):
        return str(error)
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "a file"
        return (
            f"{ascii(what)[1:-1]} was needed; {error.strerror or error}; check the path, its permissions and the disk"
        )
    words = " ".join(str(error).split())[:300] or "no message"
    return (
        f"holdfast stopped at {type(error).__name__}: {words}; this is a fault of its own; "
        f"set {DEBUG_VARIABLE}=1 for the traceback and report it"
    )


def _limit_words(error: BaseException) -> str | None:
    """Where a limit of the process is behind an error, however a library tells it; None elsewhere."""
    chain = list(_chain(error))
    numbers = {part.errno for part in chain if isinstance(part, OSError)}
    told = " ".join(str(part) for part in chain if not isinstance(part, HoldfastError)).lower()
    if errno.EMFILE in numbers or "too many open files" in told:
        return (
            f"one more file was to be opened; this process may hold {_limit('RLIMIT_NOFILE')} (ulimit -n); "
            "raise it, as with ulimit -n 1024"
        )
    lacks_memory = errno.ENOMEM in numbers or any(isinstance(part, MemoryError) for part in chain)
    if not lacks_memory and not any(words in told for words in OUT_OF_MEMORY):
        return None
    address_space = _limit("RLIMIT_AS")
    if address_space is None:
        return None if not lacks_memory and "thread" not in told else NO_MEMORY
    return (
        f"more memory was asked; this process may map {address_space >> 20} MiB (ulimit -v), and libraries, weights and "
        "pages need more; raise the limit, as with ulimit -v unlimited: memory_limit bounds what the engine takes"
    )


def _limit(name: str) -> int | None:
    """A limit of this process; None where there is none, or the system knows no limits."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _draw_refusal(error: MemoryPlanError) -> None:
    """The table, for eyes: the line before it says the same to a log, which keeps to one line."""
    if error.table is None or sys.stderr is None or not sys.stderr.isatty():
        return
    from holdfast.cli.tables import refusal_lines, show_beside

    show_beside(refusal_lines(error.table, error.changes))


def _was_interrupted(error: BaseException | None) -> bool:
    """True also where a library made an error of its own out of Ctrl-C, as some do while they are imported."""
    return any(isinstance(part, KeyboardInterrupt) for part in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    for _ in range(MAX_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _discard_unwritten() -> None:
    """Let the interpreter's last flush of stdout go nowhere, where it cannot fail."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # no stdout, or one that is not a file
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # no file can be opened any more: this one makes room
        os.close(number)
        return
    os.dup2(nowhere, number)
    os.close(nowhere)

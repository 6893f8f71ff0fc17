"""The entry point of `holdfast`: however a command ends, an exit code and at most one line on stderr; no torch."""

import os
import signal
import sys
import traceback

from holdfast.cli.terminal import DEBUG_VARIABLE, FAILED, INTERRUPTED, is_debugging, leave_on_interrupt, write_line
from holdfast.errors import ConfigError, HoldfastError, MemoryPlanError, RequestError

WRONG_USE = 2
PIPE_CLOSED = 141
"""What a shell shows for a program that SIGPIPE ended."""
MAX_CHAIN = 32


def main() -> None:
    """Run the command that the process was started with."""
    leave_on_interrupt()
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # The interpreter would take another second to put torch away.
        os._exit(code)
    sys.exit(code)


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
    if isinstance(error, HoldfastError):
        return str(error)
    if isinstance(error, OSError):
        what = error.filename if isinstance(error.filename, str) else "a file"
        return (
            f"{ascii(what)[1:-1]} was needed; {error.strerror or error}; check the path, its permissions and the disk"
        )
    if isinstance(error, MemoryError):
        return "more memory was asked; the machine has no more; take a smaller model, dtype or max_model_len"
    words = " ".join(str(error).split())[:300] or "no message"
    return (
        f"holdfast stopped at {type(error).__name__}: {words}; this is a fault of its own; "
        f"set {DEBUG_VARIABLE}=1 for the traceback and report it"
    )


def _draw_refusal(error: MemoryPlanError) -> None:
    """The table, for eyes: the line before it says the same to a log, which keeps to one line."""
    if error.table is None or sys.stderr is None or not sys.stderr.isatty():
        return
    from holdfast.cli.tables import refusal_lines, show_beside

    show_beside(refusal_lines(error.table, error.changes))


def _was_interrupted(error: BaseException | None) -> bool:
    """True also where a library made an error of its own out of Ctrl-C, as some do while they are imported."""
    for _ in range(MAX_CHAIN):
        if error is None:
            return False
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _discard_unwritten() -> None:
    """Let the interpreter's last flush of stdout go nowhere, where it cannot fail."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # no stdout, or one that is not a file
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)

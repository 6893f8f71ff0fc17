"""The entry point of `holdfast`: however a command ends, an exit code and at most one line on stderr; no torch."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command that the process was started with."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
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
        from holdfast.cli.failures import report

        return report(error)
    return code


def leave(signum: int, frame: FrameType | None) -> None:
    """What Ctrl-C does until a model is loaded: there is nothing yet to clean up.

    An exception would not do while libraries are imported: torch drops it around its import of numpy, and aborts the
    process where its C++ gets one.
    """
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def raise_interrupts() -> None:
    """From now on Ctrl-C is an exception, for those who have something to put in order."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)

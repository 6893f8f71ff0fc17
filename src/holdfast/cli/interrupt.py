"""What Ctrl-C does: end the process at once while there is nothing to clean up, be an exception afterwards; no torch."""

import os
import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit code that a shell expects."""


def leave_on_interrupt() -> None:
    """Until a model is loaded."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


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

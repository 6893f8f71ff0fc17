"""What a forked child has to know: that it is one, and whether threads that it counts on have stayed in its parent; no torch.

Imported with the package, since a fork is only seen by who is there when it happens.
"""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import ForkError

PATIENCE_SECONDS = 5.0
"""For a product of a thousandth of that; a process that waits for threads waits for ever."""


@dataclass
class _Ancestry:
    """Of this process."""

    had_torch: bool = False
    """Whether torch was there when it was forked."""

    def note(self) -> None:
        """Just after a fork, in the child."""
        self.had_torch = "torch" in sys.modules


_ANCESTRY = _Ancestry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ANCESTRY.note)


class HomeProcess:
    """The process that opened a model, which alone can ask it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """True in a child that was forked from it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise in such a child: there is nobody to answer."""
        if self.is_elsewhere:
            raise ForkError(
                f"{self._what} of process {self._pid} was asked in process {os.getpid()}, forked from it",
                "the threads that answer do not come along with a fork",
                "start the process with multiprocessing.get_context('spawn') and open the model there, or ask in the parent",
            )


def refuse_lost_threads(use_threads: Callable[[], object]) -> None:
    """For whoever is about to compute on several threads: those that its parent had started it would wait for for ever.

    Nothing tells whether they were started but to use them, which a child of this process does.
    """
    if _ANCESTRY.had_torch and _hangs(use_threads):
        raise ForkError(
            f"a model was to be opened in process {os.getpid()}, forked from {os.getppid()}, where torch has threads",
            "these do not come along with a fork",
            "start the process with multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) in it before",
        )


def _hangs(work: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, that a fork may hang: here it may
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    last_moment = time.monotonic() + PATIENCE_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > last_moment:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.005)
    return False

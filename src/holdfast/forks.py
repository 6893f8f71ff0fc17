"""Forks: detect a forked child, and whether threads that it needs stayed in its parent; no torch.

Imported with the package, because a handler must be registered before the fork.
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
"""A thousand times longer than the work takes; a process that lacks its threads waits forever."""


@dataclass
class _Ancestry:
    """History of this process."""

    had_torch: bool = False
    """True if torch was imported when it was forked."""

    def note(self) -> None:
        """Record the state just after a fork, in the child."""
        self.had_torch = "torch" in sys.modules


_ANCESTRY = _Ancestry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ANCESTRY.note)


class HomeProcess:
    """The process that opened a model and alone can use it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """True in a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise ForkError in a forked child."""
        if self.is_elsewhere:
            raise ForkError("engine.forked", what=self._what, parent=self._pid, child=os.getpid())


def refuse_lost_threads(use_threads: Callable[[], object]) -> None:
    """Raise ForkError if torch would wait forever for threads that a fork did not copy.

    The only way to find out is to use them, which a child of this process tries.
    """
    if _ANCESTRY.had_torch and _hangs(use_threads):
        raise ForkError("engine.lost_threads", child=os.getpid(), parent=os.getppid())


def _hangs(work: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python warns that a fork may hang, which is what is tested here
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

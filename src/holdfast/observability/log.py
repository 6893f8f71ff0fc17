"""The one logger, and how much of it reaches a person."""

import logging
import os
import sys
from typing import TextIO

LOG_LEVEL_VARIABLE = "HOLDFAST_LOG_LEVEL"


def get_logger(name: str) -> logging.Logger:
    """A logger under `holdfast.`; handlers come with `log_to_stderr` (commands) and `log_in_scripts` (programs)."""
    return logging.getLogger(name if name.startswith("holdfast") else f"holdfast.{name}")


def log_to_stderr(default_level: str = "WARNING") -> None:
    """Send the package's log to stderr, once; `HOLDFAST_LOG_LEVEL` overrides the level."""
    root = logging.getLogger("holdfast")
    root.setLevel(_asked_level() or default_level)
    if not any(not isinstance(handler, _ScriptHandler) for handler in root.handlers):
        root.handlers.clear()
        root.addHandler(_formatted(logging.StreamHandler()))
        root.propagate = False


def log_in_scripts() -> None:
    """For a program that imports the package: its log reaches stderr unless the program configures logging itself.

    The root logger is never touched. `HOLDFAST_LOG_LEVEL` sets the package's level where the program has set none.
    """
    root = logging.getLogger("holdfast")
    level = _asked_level()
    if level is not None and root.level == logging.NOTSET:
        root.setLevel(level)
    if not root.handlers:
        root.addHandler(_formatted(_ScriptHandler()))


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes where nobody else would: not beside handlers of the program, even if they come later."""

    @property
    def stream(self) -> TextIO:
        # Looked up at every line, as logging's own last resort does: notebooks and tests put other streams there.
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None: ...

    def filter(self, record: logging.LogRecord) -> bool:
        others = [handler for handler in logging.getLogger("holdfast").handlers if handler is not self]
        is_heard = bool(others) or bool(logging.getLogger().handlers)
        return not is_heard and sys.stderr is not None and bool(super().filter(record))


def _asked_level() -> str | None:
    """The level in the environment; None where there is none, or one that nobody knows."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    return level if level in logging.getLevelNamesMapping() else None


def _formatted(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    return handler

"""The logger of the package: where its lines go, and at which level."""

import logging
import os
import sys
from typing import TextIO

LOG_LEVEL_VARIABLE = "HOLDFAST_LOG_LEVEL"


def get_logger(name: str) -> logging.Logger:
    """Return a logger under `holdfast.`; `log_to_stderr` (commands) and `log_in_scripts` (programs) add handlers."""
    return logging.getLogger(name if name.startswith("holdfast") else f"holdfast.{name}")


def log_to_stderr(default_level: str = "WARNING") -> None:
    """Send the package's log to stderr, once; `HOLDFAST_LOG_LEVEL` overrides the level."""
    root = logging.getLogger("holdfast")
    root.setLevel(_configured_level() or default_level)
    if not any(not isinstance(handler, _ScriptHandler) for handler in root.handlers):
        root.handlers.clear()
        root.addHandler(_formatted(logging.StreamHandler()))
        root.propagate = False


def log_in_scripts() -> None:
    """Log to stderr in a program that imports the package, unless it configures logging itself.

    The root logger is never touched. `HOLDFAST_LOG_LEVEL` sets the package's level if the program has set none.
    """
    root = logging.getLogger("holdfast")
    level = _configured_level()
    if level is not None and root.level == logging.NOTSET:
        root.setLevel(level)
    if not root.handlers:
        root.addHandler(_formatted(_ScriptHandler()))


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes only if the program has no handlers, even if they are added later."""

    @property
    def stream(self) -> TextIO:
        # Looked up at every line, like logging's last resort: notebooks and tests replace it.
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None: ...

    def filter(self, record: logging.LogRecord) -> bool:
        others = [handler for handler in logging.getLogger("holdfast").handlers if handler is not self]
        is_heard = bool(others) or bool(logging.getLogger().handlers)
        return not is_heard and sys.stderr is not None and bool(super().filter(record))


def _configured_level() -> str | None:
    """Return the level in the environment; None if unset or unknown."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    return level if level in logging.getLevelNamesMapping() else None


def _formatted(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    return handler

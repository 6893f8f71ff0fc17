"""The one logger, and how much of it reaches a person."""

import logging
import os

LOG_LEVEL_VARIABLE = "HOLDFAST_LOG_LEVEL"


def get_logger(name: str) -> logging.Logger:
    """A logger under `holdfast.`; handlers are the application's business until `log_to_stderr` is called."""
    return logging.getLogger(name if name.startswith("holdfast") else f"holdfast.{name}")


def log_to_stderr(default_level: str = "WARNING") -> None:
    """Send the package's log to stderr, once; `HOLDFAST_LOG_LEVEL` overrides the level."""
    root = logging.getLogger("holdfast")
    level = os.environ.get(LOG_LEVEL_VARIABLE, default_level).upper()
    root.setLevel(level if level in logging.getLevelNamesMapping() else default_level)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False

"""pytest's capture of logs without every logger that keeps its records to itself: it joins and leaves some sixty of them six times a test.

Around a test that reads the log (caplog) it joins all of them, as ever; in all others it listens at the root alone.
Where a version of pytest is built otherwise, nothing is changed.
"""

import logging
from typing import Any

from _pytest import logging as capture

KNOWN = ("attached_loggers", "handler", "level", "orig_level")
"""What a capture holds in the versions that are known."""


class QuickCapture:
    """Whether somebody will read what loggers say; `quicken` it once."""

    def __init__(self) -> None:
        self.is_read = False

    def quicken(self) -> None:
        catching: Any = getattr(capture, "catching_logs", None)
        if getattr(catching, "__slots__", None) != KNOWN:
            return
        whole = catching.__enter__

        def enter(capturing: Any) -> logging.Handler:
            if self.is_read or capturing.level is not None:
                return whole(capturing)
            logging.root.addHandler(capturing.handler)
            capturing.attached_loggers.append(logging.root)
            return capturing.handler

        catching.__enter__ = enter

"""Preparing: progress of what is compiled or compared before a model can answer; no torch."""

from collections.abc import Callable
from typing import NamedTuple


class Preparing(NamedTuple):
    """One report."""

    what: str
    """Such as "Compiling CPU kernels"."""
    num_done: int
    num_total: int
    """0: not counted."""
    note: str = ""
    """Further information, such as where the result is kept."""


OnPrepare = Callable[[Preparing], None]
"""Callback for reports; never called if there is nothing to wait for."""


def prepare_silently(preparing: Preparing) -> None:
    """Ignore a report."""

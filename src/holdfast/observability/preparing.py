"""What is made or compared before a model can answer, kernels, graphs, products, and how far it is; no torch."""

from collections.abc import Callable
from typing import NamedTuple


class Preparing(NamedTuple):
    """One moment of it."""

    what: str
    """As Compiling CPU kernels."""
    num_done: int
    num_total: int
    """0: a stage that nothing counts."""
    note: str = ""
    """What else somebody who waits wants to know: where the result is kept."""


OnPrepare = Callable[[Preparing], None]
"""Told where somebody waits for what is made, or compared, before a model can answer; never where there is nothing to wait for."""


def prepare_silently(preparing: Preparing) -> None:
    """Tell nobody."""

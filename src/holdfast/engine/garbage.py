"""Garbage collection of a serving process: freeze what the start allocated, collect the rest while idle; no torch.

CPython's full collection runs once new survivors are a quarter of all objects. After a start there are some hundred
thousand, and steps leave few survivors, so it would not run for weeks. Meanwhile the free lists of tuples grow, which
only a full collection empties: at most 5 MiB, 50 KiB for 500 short requests.
"""

import gc


def keep_start() -> None:
    """Freeze all objects: no later collection visits or counts them."""
    gc.freeze()
    gc.collect()


class IdleCollector:
    """Collects when idle after some work: a millisecond for the objects of a step loop."""

    def __init__(self, least: int) -> None:
        """`least`: steps or requests between two collections."""
        self._least = least
        self._num_seen = 0

    def look(self, num_done: int) -> None:
        """Collect if due; called when idle with the steps or requests since the start."""
        if num_done - self._num_seen >= self._least:
            self._num_seen = num_done
            gc.collect()

"""When a process that serves collects its garbage: never what its start has made, the rest while there is nothing to do; no torch.

CPython looks through all objects once those that are new and have lasted are a quarter of the others. After a start those are
some hundred thousand, and steps leave next to nothing that lasts: it would not come to it for weeks. Meanwhile its free lists
of tuples grow, which only such a collection empties: `tuple` over a generator takes a tuple of ten elements, and it is given
back to the list of its own length. That is 5 MiB at the most, 50 KiB for 500 short requests.
"""

import gc


def keep_start() -> None:
    """What there is stays to the end: no later collection looks at it, and it does not count any more."""
    gc.freeze()
    gc.collect()


class IdleCollector:
    """Collects after some work, once there is none: a millisecond for what a step loop holds, and nobody waits for it."""

    def __init__(self, least: int) -> None:
        """`least`: steps, or requests, between two collections."""
        self._least = least
        self._num_seen = 0

    def look(self, num_done: int) -> None:
        """Called by whoever has nothing to do; `num_done` counts what was done since the start."""
        if num_done - self._num_seen >= self._least:
            self._num_seen = num_done
            gc.collect()

"""HangUps: sequences whose clients are gone, written by any thread and read in the middle of a step; no torch.

A sequence has a place by its number, which is never used again. A place that another one has taken since is only lost: the
sequence is then aborted between two steps, as it would be anyway. A core process has these words in memory of both processes
(engine/pulse.py): its front cannot reach it by a message while a step runs.
"""

from collections.abc import Iterable

NUM_PLACES = 1024
NUM_BYTES = 8 * NUM_PLACES


class HangUps:
    """One word a place, each written in one piece. Any thread may call it."""

    def __init__(self, words: memoryview | None = None) -> None:
        """Over NUM_BYTES of memory that are zero; left out, over its own."""
        self._words = (memoryview(bytearray(NUM_BYTES)) if words is None else words).cast("q")

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Mark sequences."""
        for sequence_id in sequence_ids:
            self._words[sequence_id % NUM_PLACES] = sequence_id + 1

    def has_all(self, sequence_ids: Iterable[int]) -> bool:
        """Whether all of these are marked; True for none."""
        words = self._words
        return all(words[sequence_id % NUM_PLACES] == sequence_id + 1 for sequence_id in sequence_ids)

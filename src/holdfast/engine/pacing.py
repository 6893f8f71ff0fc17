"""StepPacer: rows of prompts that a step may have, so that sequences that decode keep their pace; no clock, no torch.

While sequences decode, a step should take at most `stretch` times the seconds of a decode step. The pacer learns both numbers
from steps that have ended, and gives the rows of prompts for the next one. The core measures and asks (engine/core.py), and the
scheduler keeps to the answer.

**The decode step.** The median of recent steps without prompts, of about as many sequences. If there is none, or the last one
is LOOK_STEPS ago, the next step takes no rows of prompts. Such a look costs a prompt one short step.

**Growth.** A step of R rows took T seconds. A step of twice the rows takes at most 2 T: weights are read once, and products and
attention grow with the rows. That bound is tight if the step is limited by products, and far too high if weights limit it. The
line through the decode step and (R, T) is tight in between, and too low where weights stop being the limit. The pacer predicts
the mean of the two, and at most doubles the rows. So a new engine starts with few rows and approaches the target from below.

**Cuts.** If R rows took longer than the target, the line through the decode step and (R, T) says how many fit. A row costs more
the longer the context before it is, so this happens again and again in a long prompt, by little each time.

**Padding.** A step that replays a graph computes the rows of the graph. Rows that fit count as far as the next captured size,
and a step grows beyond a size only if the whole next size is predicted to fit.

**Tiles.** A kernel of attention takes the rows of a prompt in tiles. One row more than whole tiles costs a tile, which is a lot
after a long context: 49 rows took 42 ms and 48 took 34 (Qwen3-32B, 32K tokens, H200). So rows are rounded down to whole tiles.

Nothing is lost by it: a step with few rows of a prompt brings the tokens of all sequences that decode, which would need that
step anyway. The prompt waits longer for its first token: its rows have (stretch - 1) / stretch of the time.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

MIN_ROWS: Final = 8
"""Rows of prompts in a step, whatever they cost: prompts go on."""
START_ROWS: Final = 64
"""Rows of the first step in which no sequence decodes, if its seconds are limited."""
LOOK_STEPS: Final = 64
"""Steps with prompts between two looks at a decode step."""
MAX_AGE: Final = 64
"""Steps with prompts after which a measured point no longer counts."""
NUM_DECODE_STEPS: Final = 16
ALIKE: Final = 1.25
"""Decode steps of sequences up to this factor apart count as alike."""
MAX_GROWTH: Final = 2.0


@dataclass(slots=True)
class _Point:
    """A measured step."""

    num_rows: int
    seconds: float
    seen_at: int
    """The number of steps with prompts until then."""


class StepPacer:
    """Learns from finished steps. One thread.

    `stretch`: how many times a decode step a step may take. `sizes`: rows that steps are padded to, in order; larger steps are
    not padded. `max_seconds`: the most that a step should take if no sequence decodes; None: no limit. `tile_rows`: rows of a
    prompt that attention computes together.
    """

    def __init__(
        self, stretch: float, sizes: Sequence[int] = (), max_seconds: float | None = None, tile_rows: int = 1
    ) -> None:
        assert stretch > 1, f"{stretch=}"
        assert tile_rows > 0, f"{tile_rows=}"
        self.stretch = stretch
        self.max_seconds = max_seconds
        self.sizes = tuple(sizes)
        self.tile_rows = tile_rows
        self._decode_steps: deque[tuple[int, float]] = deque(maxlen=NUM_DECODE_STEPS)
        self._points: dict[int, _Point] = {}
        """By the size of the step."""
        self._num_seen = 0
        self._num_since_look = 0

    def prompt_rows(self, num_decoding: int) -> int | None:
        """Rows of prompts for the next step, in which so many sequences may decode; None: no limit."""
        if num_decoding == 0:
            return None if self.max_seconds is None else self._rows_that_fit(self.max_seconds, 0, 0.0)
        base = self.decode_seconds(num_decoding)
        if base is None or self._num_since_look >= LOOK_STEPS:
            self._num_since_look = 0
            return 0
        rows = self._rows_that_fit(self.stretch * base, num_decoding, base) - num_decoding
        return rows - rows % self.tile_rows or rows

    def see(self, num_rows: int, num_prompt_rows: int, num_decoding: int, seconds: float) -> None:
        """Record a finished step: its rows, its prompt rows, and the decoding sequences."""
        if num_prompt_rows == 0:
            self._decode_steps.append((num_decoding, seconds))
            self._num_since_look = 0
            return
        self._num_seen += 1
        self._num_since_look += 1
        # Steps of one class replace each other as points: a captured size, or a power of two.
        place = bisect_left(self.sizes, num_rows)
        size = self.sizes[place] if place < len(self.sizes) else 1 << (num_rows - 1).bit_length()
        point = self._points.get(size)
        if point is not None and seconds < point.seconds:
            # One step may seem short because the host was late for the one before it.
            seconds = (seconds + point.seconds) / 2
        self._points[size] = _Point(num_rows, seconds, self._num_seen)

    def decode_seconds(self, num_decoding: int) -> float | None:
        """Seconds of a decode step of about so many sequences; None if none was seen."""
        least, most = num_decoding / ALIKE, num_decoding * ALIKE
        alike = [seconds for count, seconds in self._decode_steps if least <= count <= most]
        return median(alike) if alike else None

    def _rows_that_fit(self, target: float, num_decoding: int, base: float) -> int:
        """Rows of a step of `target` seconds; a step of `num_decoding` rows takes `base` seconds."""
        oldest = self._num_seen - MAX_AGE
        points = [point for point in self._points.values() if point.seen_at > oldest and point.num_rows > num_decoding]
        short = [point for point in points if point.seconds <= target]
        long = [point for point in points if point.seconds > target]
        least = num_decoding + MIN_ROWS
        if short:
            rows = self._grown(max(short, key=lambda point: point.num_rows), target, num_decoding, base)
        elif long:
            rows = min(point.num_rows for point in long)
        else:
            rows = self._first(least if num_decoding else START_ROWS)
        for point in long:
            share = (target - base) / (point.seconds - base)
            rows = min(rows, num_decoding + int((point.num_rows - num_decoding) * share))
        return max(rows, least)

    def _first(self, least: int) -> int:
        """Rows of a step if nothing is known: up to the next captured size, since padding costs the same."""
        place = bisect_left(self.sizes, least)
        return self.sizes[place] if place < len(self.sizes) else least

    def _grown(self, point: _Point, target: float, num_decoding: int, base: float) -> int:
        """Rows that are predicted to take the target, from a step that took no longer."""
        num_padded = self._first(point.num_rows)
        rows = _predicted(point.num_rows, point.seconds, target, num_decoding, base)
        if rows <= num_padded or num_padded not in self.sizes:
            return rows
        wider = _predicted(num_padded, point.seconds, target, num_decoding, base)
        if wider > self.sizes[-1]:
            return wider
        return max(self.sizes[bisect_right(self.sizes, wider) - 1], num_padded)


def _predicted(num_rows: int, seconds: float, target: float, num_decoding: int, base: float) -> int:
    """Rows R for which the mean of line and bound is the target: (base + (R - D) * slope + R * seconds / num_rows) / 2."""
    slope = max(seconds - base, 0.0) / (num_rows - num_decoding)
    bound = seconds / num_rows
    rows = (2 * target - base + num_decoding * slope) / (slope + bound)
    return int(min(max(rows, num_rows), MAX_GROWTH * num_rows))

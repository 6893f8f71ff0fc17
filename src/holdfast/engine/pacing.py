"""StepPacer: limits the prompt rows of a step, so that decoding sequences keep their pace; no clock, no torch.

While sequences decode, a step should take at most `stretch` times as long as a decode step. The pacer learns both times
from finished steps, and returns the prompt rows for the next one. The core measures steps and calls the pacer
(engine/core.py), and the scheduler keeps to the limit.

**Decode step.** The median of recent steps without prompts, of about as many sequences. If there is none, or the last
one is LOOK_STEPS ago, the next step takes no prompt rows. Such a look delays a prompt by one short step.

**Growth.** If a step of R rows took T seconds, one of twice the rows takes at most 2 T: weights are read once, and
GEMMs and attention grow with the rows. That bound is tight if GEMMs limit the step, and far too high if weights limit
it. The line through the decode step and (R, T) is tight in between, and too low once weights stop being the limit. The
pacer predicts the mean of the two, and at most doubles the rows. So a new engine starts with few rows and approaches
the target from below.

**Cuts.** If R rows took longer than the target, the line through the decode step and (R, T) gives the rows that fit. A
row costs more after a longer context, so a long prompt is cut repeatedly, by little each time.

**Padding.** A step that replays a graph computes all rows of the graph. So a measured step counts with its captured
size, and a step grows beyond a size only if the whole next size is predicted to fit.

**Tiles.** Attention kernels process prompt rows in tiles. One row more than whole tiles costs a tile, which is a lot
after a long context: 49 rows took 42 ms and 48 took 34 (Qwen3-32B, 32K tokens, H200). So rows are rounded down to whole
tiles.

No throughput is lost: a step with few prompt rows also brings the tokens of all decoding sequences, which need that
step anyway. The prompt waits longer for its first token: its rows have (stretch - 1) / stretch of the time.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

MIN_ROWS: Final = 8
"""Fewest prompt rows in a step, whatever they cost: prompts must advance."""
START_ROWS: Final = 64
"""Rows of the first step without decoding sequences, if its time is limited."""
LOOK_STEPS: Final = 64
"""Most prompt steps between two looks at a decode step."""
MAX_AGE: Final = 64
"""Prompt steps after which a measured point no longer counts."""
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
    """Number of prompt steps before it."""


class StepPacer:
    """Learns from finished steps. One thread.

    `stretch`: target step time over a decode step. `sizes`: row counts that steps are padded to, in order; larger steps
    are not padded. `max_seconds`: longest step if no sequence decodes; None: no limit. `tile_rows`: prompt rows per
    attention tile.
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
        """Points by class of the step size."""
        self._num_seen = 0
        self._num_since_look = 0

    def prompt_rows(self, num_decoding: int) -> int | None:
        """Return the prompt rows for the next step, in which `num_decoding` sequences may decode; None: no limit."""
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
        # One point per class of steps: a captured size, or a power of two.
        place = bisect_left(self.sizes, num_rows)
        size = self.sizes[place] if place < len(self.sizes) else 1 << (num_rows - 1).bit_length()
        point = self._points.get(size)
        if point is not None and seconds < point.seconds:
            # One step may seem short if the host collected the one before it late.
            seconds = (seconds + point.seconds) / 2
        self._points[size] = _Point(num_rows, seconds, self._num_seen)

    def decode_seconds(self, num_decoding: int) -> float | None:
        """Return the seconds of a decode step of about `num_decoding` sequences; None if none was seen."""
        least, most = num_decoding / ALIKE, num_decoding * ALIKE
        alike = [seconds for count, seconds in self._decode_steps if least <= count <= most]
        return median(alike) if alike else None

    def _rows_that_fit(self, target: float, num_decoding: int, base: float) -> int:
        """Return the rows of a step of `target` seconds; one of `num_decoding` rows takes `base` seconds."""
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
        """Return the rows of a first step: up to the next captured size, since padding costs the same."""
        place = bisect_left(self.sizes, least)
        return self.sizes[place] if place < len(self.sizes) else least

    def _grown(self, point: _Point, target: float, num_decoding: int, base: float) -> int:
        """Return the rows predicted to take `target` seconds, from a step that took no longer."""
        num_padded = self._first(point.num_rows)
        rows = _predicted(point.num_rows, point.seconds, target, num_decoding, base)
        if rows <= num_padded or num_padded not in self.sizes:
            return rows
        wider = _predicted(num_padded, point.seconds, target, num_decoding, base)
        if wider > self.sizes[-1]:
            return wider
        return max(self.sizes[bisect_right(self.sizes, wider) - 1], num_padded)


def _predicted(num_rows: int, seconds: float, target: float, num_decoding: int, base: float) -> int:
    """Return R with target = mean of line and bound: (base + (R - D) * slope + R * seconds / num_rows) / 2."""
    slope = max(seconds - base, 0.0) / (num_rows - num_decoding)
    bound = seconds / num_rows
    rows = (2 * target - base + num_decoding * slope) / (slope + bound)
    return int(min(max(rows, num_rows), MAX_GROWTH * num_rows))

"""How far an evaluation is: a bar with tokens per second and the time left, or a line for each tenth; no torch."""

import time
from types import TracebackType

from holdfast.cli.side_lines import write_line
from holdfast.engine.progress import SECONDS_BETWEEN_UPDATES, is_watched

NUM_LINES = 10


class EvalBar:
    """`bar(done, total)` in tokens that some format or scheme has read."""

    def __init__(self) -> None:
        self._started_at = self._shown_at = time.monotonic()
        self._num_told = 0
        self._progress = None
        if not is_watched():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("Reading"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens, {task.fields[speed]:.0f} tokens/s,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None, speed=0.0)

    def __enter__(self) -> "EvalBar":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        speed = num_done / max(now - self._started_at, 1e-6)
        if self._progress is None:
            self._tell(num_done, num_total, speed)
        elif now - self._shown_at >= SECONDS_BETWEEN_UPDATES or num_done == num_total:
            self._shown_at = now
            self._progress.update(self._task, completed=num_done, total=num_total, speed=speed)

    def _tell(self, num_done: int, num_total: int, speed: float) -> None:
        tenth = num_done * NUM_LINES // max(num_total, 1)
        if tenth > self._num_told:
            self._num_told = tenth
            left = (num_total - num_done) / max(speed, 1e-6)
            write_line(f"read {num_done:,} of {num_total:,} tokens, {speed:.0f} tokens/s, {left:.0f} s left")

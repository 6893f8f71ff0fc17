"""Progress on a terminal: bytes while a model loads, prompts and tokens per second while it answers; no torch."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SECONDS_BETWEEN_UPDATES = 0.1


def is_watched() -> bool:
    """True when somebody sits in front of stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


class LoadingBar:
    """`bar(done, total)` in bytes; shows nothing where nobody watches."""

    def __init__(self) -> None:
        columns = (
            TextColumn("Loading weights"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_watched())
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> "LoadingBar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, num_done: int, num_total: int) -> None:
        self._progress.update(self._task, completed=num_done, total=num_total)


class GenerationBar:
    """Counts finished prompts, and estimates tokens per second in and out."""

    def __init__(self, num_prompts: int, wanted: bool) -> None:
        columns = (
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        disable = not (wanted and is_watched())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=disable)
        self._task = self._progress.add_task("", total=num_prompts, speed="")
        self._started_at = self._shown_at = time.monotonic()

    def __enter__(self) -> "GenerationBar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, num_finished: int, num_input_tokens: int, num_output_tokens: int) -> None:
        """Show how far it is; cheap enough for every step."""
        now = time.monotonic()
        is_last = num_finished == self._progress.tasks[0].total
        if self._progress.disable or (now - self._shown_at < SECONDS_BETWEEN_UPDATES and not is_last):
            return
        self._shown_at = now
        seconds = max(now - self._started_at, 1e-6)
        speed = (
            f"est. speed input: {num_input_tokens / seconds:.2f} toks/s, "
            f"output: {num_output_tokens / seconds:.2f} toks/s"
        )
        self._progress.update(self._task, completed=num_finished, speed=speed)

"""Progress bars in terminals and notebooks: downloads, loading, compilation, prompts; no torch.

rich is imported only if a terminal or a notebook shows the bars.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from holdfast.loading.hub.download import Download
    from holdfast.observability.preparing import Preparing

SECONDS_BETWEEN_UPDATES = 0.1
NOTEBOOK_COLUMNS = 100


def is_watched() -> bool:
    """Return True if stderr is a terminal or a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or is_notebook())


def is_notebook() -> bool:
    """Return True inside the kernel of a notebook."""
    # IPython defines this function; its shell in a terminal has another class.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


def bar_console() -> Console:
    """Return the console for bars: widgets in a notebook that has them, else carriage returns."""
    from rich.console import Console

    if is_notebook() and find_spec("ipywidgets") is None:
        return Console(file=sys.stderr, force_terminal=True, force_jupyter=False, width=NOTEBOOK_COLUMNS)
    return Console(stderr=True)


class Bar:
    """Context manager for a one-task rich progress bar; does nothing without a terminal."""

    starts_at_once = False
    _progress: Progress | None = None

    def open(self, columns: tuple[Any, ...], *, transient: bool = True, **fields: object) -> None:
        """Make the bar with its task."""
        from rich.progress import Progress

        self._progress = Progress(*columns, console=bar_console(), transient=transient)
        self._progress.add_task("", **({"total": None} | fields))  # type: ignore[arg-type]

    def update(self, **fields: object) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], **fields)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        if self._progress is not None and self.starts_at_once:
            self._progress.start()
        return self

    def __exit__(self, *ended: object) -> None:
        if self._progress is not None:
            self._progress.stop()


class LoadingBar(Bar):
    """`bar(done, total)` in bytes; visible from the first byte to the last."""

    def __init__(self, title: str = "Loading weights") -> None:
        if not is_watched():
            return
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        self.open((TextColumn(title, markup=False), BarColumn(), *sizes, TextColumn("left")))

    def __call__(self, num_done: int, num_total: int) -> None:
        if self._progress is None:
            return
        self._progress.start()
        self.update(completed=num_done, total=num_total)
        if num_done == num_total:
            self._progress.stop()


class DownloadBar(LoadingBar):
    """`bar(done)` in bytes over all files of a download."""

    def __init__(self, download: Download) -> None:
        super().__init__(f"Downloading {download.name}")
        self._num_bytes = download.num_bytes

    def __call__(self, num_done: int) -> None:  # type: ignore[override]
        super().__call__(num_done, self._num_bytes)


class PreparingBar(Bar):
    """`bar(preparing)` shows compilation and graph capture; a start without either draws nothing."""

    def __call__(self, preparing: Preparing) -> None:
        if not is_watched() or preparing.num_total == 0:
            return
        if self._progress is None:
            self._start()
        note = f" {preparing.note}" if preparing.note else ""
        # Draw at once: compilation may take long without an update.
        counts = {"completed": preparing.num_done, "total": preparing.num_total}
        self.update(**counts, description=preparing.what, note=note, refresh=True)
        if preparing.num_done == preparing.num_total:
            self.__exit__()
            self._progress = None

    def _start(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        what, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
        self.open((what, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), note), note="")
        assert self._progress is not None, "the bar was opened"
        self._progress.start()


class GenerationBar(Bar):
    """Counts finished prompts, and estimates tokens per second in and out."""

    starts_at_once = True

    def __init__(self, num_prompts: int, wanted: bool) -> None:
        self._started_at = self._shown_at = time.monotonic()
        self._num_prompts = num_prompts
        if not (wanted and is_watched()):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        what, speed = TextColumn("Processed prompts"), TextColumn("{task.fields[speed]}")
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.open(
            (what, BarColumn(), MofNCompleteColumn(), *times, speed), transient=False, total=num_prompts, speed=""
        )

    def count(self, num_finished: int, num_input_tokens: int, num_output_tokens: int) -> None:
        """Show the progress; cheap enough to call every step."""
        now = time.monotonic()
        is_last = num_finished == self._num_prompts
        if self._progress is None or (now - self._shown_at < SECONDS_BETWEEN_UPDATES and not is_last):
            return
        self._shown_at = now
        seconds = max(now - self._started_at, 1e-6)
        speed = (
            f"est. speed input: {num_input_tokens / seconds:.2f} toks/s, "
            f"output: {num_output_tokens / seconds:.2f} toks/s"
        )
        self.update(completed=num_finished, speed=speed)

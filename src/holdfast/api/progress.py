"""Progress in terminals and notebooks: bytes while a model is downloaded and loads, prompts and tokens/s later; no torch.

rich is imported where somebody watches, and not before.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from holdfast.loading.hub.download import Download

SECONDS_BETWEEN_UPDATES = 0.1
NOTEBOOK_COLUMNS = 100


def is_watched() -> bool:
    """True when somebody sits in front of stderr: at a terminal, or in a notebook."""
    return sys.stderr is not None and (sys.stderr.isatty() or is_notebook())


def is_notebook() -> bool:
    """True inside the kernel of a notebook, whose cells show what is written to them."""
    # IPython puts its function there; a shell in a terminal has another class, and is a terminal anyhow.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


def bar_console() -> Console:
    """Where bars are drawn: rich shows widgets in a notebook that has them, and lines over each other elsewhere."""
    from rich.console import Console

    if is_notebook() and find_spec("ipywidgets") is None:
        # Cells understand a carriage return, which is all that a bar of one line needs.
        return Console(file=sys.stderr, force_terminal=True, force_jupyter=False, width=NOTEBOOK_COLUMNS)
    return Console(stderr=True)


def _bytes_bar(title: str) -> Progress | None:
    """A bar with one task that counts bytes; None where nobody watches."""
    if not is_watched():
        return None
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(title, markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    progress = Progress(*columns, console=bar_console(), transient=True)
    progress.add_task("", total=None)
    return progress


class LoadingBar:
    """`bar(done, total)` in bytes; shows nothing where nobody watches, nor before and after the bytes, when others draw."""

    def __init__(self, title: str = "Loading weights") -> None:
        self._progress = _bytes_bar(title)

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, num_done: int, num_total: int) -> None:
        if self._progress is None:
            return
        self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=num_done, total=num_total)
        if num_done == num_total:
            self._progress.stop()


class DownloadBar:
    """`bar(done)` in bytes over all files of a download; shows nothing where nobody watches."""

    def __init__(self, download: Download) -> None:
        self._num_bytes = download.num_bytes
        self._bar = LoadingBar(f"Downloading {download.name}")

    def __enter__(self) -> DownloadBar:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def __call__(self, num_done: int) -> None:
        self._bar(num_done, self._num_bytes)


class GenerationBar:
    """Counts finished prompts, and estimates tokens per second in and out."""

    def __init__(self, num_prompts: int, wanted: bool) -> None:
        self._started_at = self._shown_at = time.monotonic()
        self._num_prompts = num_prompts
        self._progress = None
        if not (wanted and is_watched()):
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        self._progress = Progress(*columns, console=bar_console())
        self._progress.add_task("", total=num_prompts, speed="")

    def __enter__(self) -> GenerationBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, num_finished: int, num_input_tokens: int, num_output_tokens: int) -> None:
        """Show how far it is; cheap enough for every step."""
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
        self._progress.update(self._progress.task_ids[0], completed=num_finished, speed=speed)

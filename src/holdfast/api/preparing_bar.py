"""Progress on a terminal while kernels are compiled and graphs captured; no torch."""

from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.api.progress import bar_console, is_watched
from holdfast.observability.preparing import Preparing

if TYPE_CHECKING:
    from rich.progress import Progress


class PreparingBar:
    """`bar(preparing)` draws how far it is; a start that makes nothing draws nothing, and neither does one nobody watches."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __enter__(self) -> "PreparingBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, preparing: Preparing) -> None:
        if not is_watched() or preparing.num_total == 0:
            return
        if self._progress is None:
            self._progress = _start()
        (task,) = self._progress.task_ids
        note = f" {preparing.note}" if preparing.note else ""
        # Drawn at once: while a compiler runs nothing else may tell for a long time.
        self._progress.update(
            task,
            completed=preparing.num_done,
            total=preparing.num_total,
            description=preparing.what,
            note=note,
            refresh=True,
        )
        if preparing.num_done == preparing.num_total:
            self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _start() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    progress = Progress(*columns, console=bar_console(), transient=True)
    progress.add_task("", total=None, note="")
    progress.start()
    return progress

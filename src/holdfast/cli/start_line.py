"""StartLine: startup progress, as one timed line on a terminal or as plain lines elsewhere; no torch."""

import shutil
import sys
import threading
import time
from types import TracebackType

from holdfast.cli.terminal import write_line

REDRAW_SECONDS = 0.5


class StartLine:
    """`show` names the stage on a terminal, `report` everywhere; `clear` erases the line for other output.

    The cursor stays at the beginning of the line, so that a log line of another process overwrites it.
    """

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._num_drawn = 0
        self._is_over = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> "StartLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._is_over.set()

    def show(self, stage: str) -> None:
        """Show the stage on a terminal only, so that elsewhere an early failure prints one line."""
        if not self._is_terminal:
            return
        with self._lock:
            self._stage = stage
            self._draw()
        if self._ticker is None and not self._is_over.is_set():
            self._ticker = threading.Thread(target=self._tick, name="holdfast-start", daemon=True)
            self._ticker.start()

    def report(self, stage: str) -> None:
        """Show the stage, on a line of its own if there is no terminal."""
        if self._is_terminal:
            self.show(stage)
        else:
            write_line(stage)

    def clear(self) -> None:
        """Erase the line. The next stage draws it again."""
        with self._lock:
            self._stage = None
            self._write("")

    def _tick(self) -> None:
        while not self._is_over.wait(REDRAW_SECONDS):
            with self._lock:
                if self._stage is not None:
                    self._draw()

    def _draw(self) -> None:
        self._write(f"{self._stage}  {time.monotonic() - self._began_at:.0f} s")

    def _write(self, text: str) -> None:
        """Overwrite the line. Spaces erase on every terminal; an escape does not."""
        if sys.stderr is None or not self._is_terminal or not (text or self._num_drawn):
            return
        text = text[: max(shutil.get_terminal_size().columns - 1, 0)]
        sys.stderr.write(f"\r{text.ljust(self._num_drawn)}\r")
        sys.stderr.flush()
        self._num_drawn = len(text)

"""InterruptShield: Ctrl-C waits while the engine's tables change, and comes through while the model runs; no torch."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class InterruptShield:
    """Holds SIGINT back inside the `with` block and delivers it at its end, or at once inside `lifted()`.

    Python hands SIGINT to the main thread only, between any two of its instructions; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self._handler: object = None
        self._is_pending = False

    def __enter__(self) -> "InterruptShield":
        self._raise_shield()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deliver()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts through, a remembered one first; the shield is up again when the block is left by any way."""
        try:
            self._deliver()
            yield
        finally:
            self._raise_shield()

    def _raise_shield(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        # The default and ignoring dispositions raise nothing, and a handler set outside Python could not be put back.
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._remember)

    def _deliver(self) -> None:
        handler, self._handler = self._handler, None
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if self._is_pending:
                self._is_pending = False
                handler(signal.SIGINT, None)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._is_pending = True

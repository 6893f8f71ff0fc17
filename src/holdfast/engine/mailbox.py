"""Mailbox: deltas of one request on their way from the engine's thread to the event loop that waits for them; no torch."""

import asyncio
import threading

from holdfast.engine.output_assembly import DeltaBuffer
from holdfast.request.outputs import CompletionDelta


class Mailbox:
    """Filled by the engine's thread, emptied by one reader; what a slow reader has not taken yet is merged.

    Made in the event loop of its reader. Between two wake-ups of that loop any number of deltas may arrive.
    """

    def __init__(self, n: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_id: str | None = None
        """The name under which the engine took the request."""
        self._lock = threading.Lock()
        self._buffer = DeltaBuffer()
        self._num_unfinished = n
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """True once the last delta is in."""
        return self._num_unfinished == 0

    def put(self, delta: CompletionDelta) -> None:
        """Engine's thread: add a delta. The reader does not know before `wake` runs in its loop."""
        with self._lock:
            self._buffer.add(delta)
            self._num_unfinished -= delta.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """Engine's thread: the reader is to get this exception, in place of what it has not read yet."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """In the reader's loop: there is something to take."""
        self._arrived.set()

    async def take(self) -> tuple[list[CompletionDelta], bool]:
        """What has arrived since the last time, merged by completion, and whether it was the last of the request."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                if self._error is not None:
                    raise self._error
                # Empty where an earlier take was ahead of its wake-up.
                if self._buffer:
                    return self._buffer.take(), self._num_unfinished == 0

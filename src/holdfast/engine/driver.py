"""Driver: several calls share one engine; each steps it for all and reads its own deltas; no torch.

    call A: submit, pump, pump, ...   \\                       / sink of A's requests
                                       one lock -> engine.step
    call B: submit, pump, pump, ...   /                       \\ sink of B's requests

`Call.pump` takes the lock, steps the engine once for all calls, and gives each delta to the sink of its request.
A call that ends for any reason (done, an exception, Ctrl-C, a closed generator) aborts its unfinished requests.
In a forked child `close` does nothing: a lock of a parent's thread stays locked there.
"""

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from holdfast.engine.admission import PreparedRequest
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.outputs import DeltaBuffer
from holdfast.errors import QueueFullError, RequestError
from holdfast.forks import HomeProcess
from holdfast.request.outputs import CompletionDelta


class DeltaSink(Protocol):
    """Destination of one request's deltas."""

    def add(self, delta: CompletionDelta) -> None:
        """Add one delta."""
        ...


@dataclass(eq=False, slots=True)
class _Reading:
    sink: DeltaSink
    num_unfinished: int


class Driver:
    """One engine and its callers. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.home = HomeProcess("an LLM")
        self.lock = threading.RLock()
        self.readings: dict[str, _Reading] = {}

    def call(self) -> "Call":
        """Open a context for requests; its end aborts unfinished ones."""
        return Call(self)

    def pump(self) -> None:
        """Run one step for all calls."""
        self.home.check()
        with self.lock:
            self._deliver(self.engine.step())
            self.engine.raise_if_dead()

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests of all calls."""
        with self.lock:
            return len(self.readings)

    def abort(self, names: set[str]) -> None:
        """End requests; their sinks get the last deltas."""
        if self.home.is_elsewhere:
            return
        with self.lock:
            for name in names & self.readings.keys():
                if not self.engine.is_dead:
                    self._deliver(self.engine.abort(name))
                self.readings.pop(name, None)
            if not self.readings:
                self.engine.settle()

    def abort_all(self) -> None:
        """End every request."""
        with self.lock:
            self.abort(set(self.readings))

    def close(self) -> None:
        """End every request and release all memory, after the step that runs."""
        if self.home.is_elsewhere:
            return
        with self.lock:
            try:
                self.abort(set(self.readings))
            finally:
                self.engine.close()

    def stats(self) -> EngineStats:
        """Like `Engine.stats`; never waits for a step."""
        if not self.readings and not self.home.is_elsewhere and self.lock.acquire(blocking=False):
            try:
                self.engine.watch()
            finally:
                self.lock.release()
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, between two steps."""
        self.home.check()
        with self.lock:
            self.engine.reset_prefix_cache()

    def _deliver(self, deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            reading = self.readings.get(delta.request_id)
            if reading is None:
                continue
            reading.sink.add(delta)
            reading.num_unfinished -= delta.finish_reason is not None
            if reading.num_unfinished == 0:
                del self.readings[delta.request_id]


class Call:
    """The requests of one caller."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._names: set[str] = set()
        self.pump = driver.pump

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.abort(self._names)

    def try_submit(self, prepared: PreparedRequest, sink: DeltaSink) -> bool:
        """Queue a request under a new name, which is recorded first; False if the queue is full."""
        driver = self._driver
        driver.home.check()
        with driver.lock:
            name = driver.engine.front.unused_name()
            self._names.add(name)
            driver.readings[name] = _Reading(sink, prepared.params.n)
            try:
                driver.engine.submit(prepared, name)
            except RequestError as error:
                self._names.discard(name)
                del driver.readings[name]
                if isinstance(error, QueueFullError):
                    return False
                raise
        return True

    def take(self, buffer: DeltaBuffer) -> tuple[list[CompletionDelta], bool]:
        """Return what waits in the buffer of the only request and whether that is all, atomically."""
        with self._driver.lock:
            return buffer.take(), not self.num_unfinished

    @property
    def num_unfinished(self) -> int:
        with self._driver.lock:
            self._names &= self._driver.readings.keys()
            return len(self._names)

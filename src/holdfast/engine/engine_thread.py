"""EngineThread: a thread that owns an engine; it runs commands between two steps and publishes deltas after each; no torch.

A reader in an event loop has a Mailbox, which the thread fills.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from holdfast.engine.admission import PreparedRequest
from holdfast.engine.core import refuse_full
from holdfast.engine.engine import Engine, EngineStats
from holdfast.engine.memory_map import MemoryMap
from holdfast.engine.outputs import DeltaBuffer
from holdfast.engine.pulse import CorePulse
from holdfast.errors import EngineDeadError, HoldfastError, QueueFullError
from holdfast.forks import HomeProcess
from holdfast.observability.log import get_logger
from holdfast.request.outputs import CompletionDelta

WATCH_SECONDS = 1.0
"""Interval of checks of an idle engine: its core process may end."""
MAP_SECONDS = 0.02
"""Like WATCH_SECONDS, while an idle engine has to return a map."""
NUM_REMEMBERED = 64
"""Most recent request ends used to estimate the pace."""
RETRY_SECONDS = (1.0, 60.0)
"""Bounds of Retry-After when the queue is full."""
_log = get_logger(__name__)


class Mailbox:
    """Filled by the engine's thread, emptied by one reader; deltas that wait are merged.

    Created in the event loop of its reader. Any number of deltas may arrive between two wake-ups of that loop.
    """

    def __init__(self, n: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_id: str | None = None
        self._lock = threading.Lock()
        self.buffer = DeltaBuffer()
        self._num_unfinished = n
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """True once the last delta is in."""
        return self._num_unfinished == 0

    def put(self, delta: CompletionDelta) -> None:
        """Add a delta; the reader sees it when `wake` runs in its loop. Engine's thread."""
        with self._lock:
            self.buffer.add(delta)
            self._num_unfinished -= delta.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """Make the reader raise this error instead of returning what waits. Engine's thread."""
        with self._lock:
            self._error = error

    def wake(self) -> None:
        """Wake the reader. In the reader's loop."""
        self._arrived.set()

    async def accepted(self) -> None:
        """Wait until the engine has accepted the request, or raise its error. Before the first `take`."""
        while True:
            await self._arrived.wait()
            with self._lock:
                if self._error is not None:
                    raise self._error
            if self.request_id is not None:
                return  # deltas that arrived meanwhile wait for `take`
            self._arrived.clear()

    async def take(self) -> tuple[list[CompletionDelta], bool]:
        """Return new deltas, merged by completion, and whether they end the request."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                if self._error is not None:
                    raise self._error
                # Empty if an earlier take ran before its wake-up.
                if self.buffer:
                    return self.buffer.take(), self._num_unfinished == 0


class MapReader:
    """Waits for a memory map in an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()

    def wake(self) -> None:
        """Signal that the map has arrived, or never will. Engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def wait(self, seconds: float) -> None:
        """Wait for `wake`, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)


@dataclass(frozen=True, slots=True)
class Health:
    """Liveness of the engine. A hung step shows as growing seconds while requests are unfinished."""

    is_alive: bool
    num_unfinished_requests: int
    seconds_since_progress: float
    """Time since the last step ended or work arrived; 0 when idle."""
    num_commands: int
    """Commands that wait for the step in progress."""
    core_silence_seconds: float = 0.0
    """Time since the core process's last heartbeat; 0 if the core is in this process."""
    seconds_in_step: float = 0.0
    """Age of the step in progress; 0 if none runs."""


@dataclass(frozen=True, slots=True)
class _Submission:
    prepared: PreparedRequest
    request_id: str | None
    mailbox: Mailbox


class EngineThread:
    """Drives an engine until it is stopped. Any thread may call public methods, which do not wait for a step.

    In a forked child, which has no such thread, methods raise or, if they end something, do nothing.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.home = HomeProcess("an AsyncLLM")
        self._clock = clock
        self._changed = threading.Condition()
        self._commands: deque[_Submission | Callable[[], None]] = deque()
        self._mailboxes: dict[str, Mailbox] = {}
        """Mailboxes by name of the live request; only the engine's thread changes it."""
        self._takes_requests = True
        self._is_idle = True
        self._progressed_at = clock()
        self._num_posted = 0
        """Completions of requests that wait for the step in progress."""
        self._finished_at: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._map: MemoryMap | None = None
        self._is_map_wanted = False
        self._map_readers: list[MapReader] = []
        self._thread = threading.Thread(target=self._run, name="holdfast-engine", daemon=True)
        self._thread.start()

    def submit(self, prepared: PreparedRequest, request_id: str | None, mailbox: Mailbox) -> None:
        """Queue a request before the next step; a refusal fails its mailbox."""
        self.home.check()
        with self._changed:
            self.engine.raise_if_dead()
            if not self._takes_requests:
                raise EngineDeadError("engine.shutting_down")
            self._num_posted += prepared.params.n
            self._post(_Submission(prepared, request_id, mailbox))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its reader gets the last deltas."""
        self.home.check()
        self.engine.hang_up(request_id)
        with self._changed:
            self._post(lambda: self._publish(self.engine.abort(request_id)))

    def withdraw(self, mailbox: Mailbox) -> None:
        """End the request of a reader that is gone, before the next step."""
        if self.home.is_elsewhere:
            return
        name = mailbox.request_id
        if name is not None and not mailbox.is_complete:
            self.engine.hang_up(name)
        with self._changed:
            self._post(lambda: self._withdraw(mailbox))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix before the next step."""
        self.home.check()
        with self._changed:
            self._post(self.engine.reset_prefix_cache)

    def health(self) -> Health:
        """Return how long ago the engine made progress."""
        self.home.check()
        with self._changed:
            is_idle = self._is_idle and not self._commands
            seconds = 0.0 if is_idle else self._clock() - self._progressed_at
            is_alive = self._thread.is_alive() and not self.engine.is_dead
            pulse = self.engine.core.pulse() or CorePulse(0.0, seconds)
            return Health(is_alive, len(self._mailboxes), seconds, len(self._commands), *pulse)

    def stats(self) -> EngineStats:
        """Like `Engine.stats`; requests that wait for the step in progress count as waiting."""
        stats = self.engine.stats()
        return replace(stats, num_waiting=stats.num_waiting + self._num_posted)

    def memory_map(self) -> MemoryMap | None:
        """Return the last map of the pages; None before the first."""
        return self._map

    def ask_map(self, reader: "MapReader | None" = None) -> None:
        """Request a new map between two steps, one at a time, and wake the reader when it arrives."""
        self.home.check()
        with self._changed:
            self.engine.raise_if_dead()
            if not self._takes_requests and not self._thread.is_alive():
                raise EngineDeadError("engine.shutting_down")
            if reader is not None:
                self._map_readers.append(reader)
            if not self._is_map_wanted:
                self._is_map_wanted = True
                self._post(self._look)

    def check_room(self, num_sequences: int) -> None:
        """Raise QueueFullError if the queue, as known here, cannot take `num_sequences` more."""
        core = self.engine.core
        try:
            refuse_full(num_sequences, core.num_queued + self._num_posted, core.facts.max_queue)
        except QueueFullError as error:
            error.retry_after_seconds = self._retry_after_seconds()
            raise

    def drain(self) -> None:
        """Refuse new requests, finish the others, then end."""
        self.home.check()
        with self._changed:
            self._takes_requests = False
            self._changed.notify()

    def stop(self) -> None:
        """Abort everything, then end."""
        for name in self.engine.front.names():
            self.engine.hang_up(name)
        with self._changed:
            self._takes_requests = False
            self._post(lambda: self._publish(self.engine.abort_all()))

    def join(self) -> None:
        """Wait until the thread ends."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: "_Submission | Callable[[], None]") -> None:
        if self._is_idle and not self._commands:
            self._progressed_at = self._clock()
        self._commands.append(command)
        self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                deltas = self.engine.step()
                self.engine.raise_if_dead()
                with self._changed:
                    self._progressed_at = self._clock()
                self._publish(deltas)
                if self._is_map_wanted:
                    self._take_map()
        except Exception as error:
            _log.error("the engine's thread ended: %s", error)
            self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Run the commands that arrived; True if there is a step to run, False if the thread may end."""
        while True:
            if not self.engine.has_unfinished():
                self.engine.settle()
            with self._changed:
                self._is_idle = not self.engine.has_unfinished()
                if self._is_idle and not self._commands:
                    if not self._takes_requests:
                        return False
                    self._changed.wait(MAP_SECONDS if self._is_map_wanted else WATCH_SECONDS)
                num_commands = len(self._commands)
                self._is_idle = self._is_idle and num_commands == 0
            # One by one: _fail_all must find those after one that fails.
            for _ in range(num_commands):
                self._carry_out(self._commands.popleft())
            if self.engine.has_unfinished():
                return True
            if num_commands == 0:
                self.engine.watch()
                self.engine.raise_if_dead()
                if self._is_map_wanted:
                    self._take_map()

    def _look(self) -> None:
        self.engine.ask_map()
        if not self.engine.has_unfinished():
            self.engine.watch()  # no step would return it
            self.engine.raise_if_dead()
        self._take_map()

    def _take_map(self) -> None:
        """Publish a map that has arrived."""
        taken = self.engine.take_map()
        if taken is None:
            return
        with self._changed:
            self._map, self._is_map_wanted = taken, False
            readers, self._map_readers = self._map_readers, []
        for reader in readers:
            reader.wake()

    def _carry_out(self, command: "_Submission | Callable[[], None]") -> None:
        if not isinstance(command, _Submission):
            command()
            return
        with self._changed:
            self._num_posted -= command.prepared.params.n
        try:
            command.mailbox.request_id = self.engine.submit(command.prepared, command.request_id)
        except HoldfastError as error:
            if isinstance(error, QueueFullError):
                error.retry_after_seconds = self._retry_after_seconds()
            command.mailbox.fail(error)
            self._wake([command.mailbox])
            self.engine.raise_if_dead()
        else:
            self._mailboxes[command.mailbox.request_id] = command.mailbox
            self._wake([command.mailbox])

    def _withdraw(self, mailbox: Mailbox) -> None:
        name = mailbox.request_id
        if name is not None and self._mailboxes.get(name) is mailbox:
            del self._mailboxes[name]
            if not self.engine.is_dead:
                self.engine.abort(name)

    def _publish(self, deltas: Iterable[CompletionDelta]) -> None:
        """Put deltas into their mailboxes and wake the readers, each once."""
        filled: dict[str, Mailbox] = {}
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is not None:
                mailbox.put(delta)
                filled[delta.request_id] = mailbox
        for name, mailbox in filled.items():
            if mailbox.is_complete:
                del self._mailboxes[name]
                self._finished_at.append(self._clock())
        self._wake(list(filled.values()))

    def _wake(self, mailboxes: list[Mailbox]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for mailbox in mailboxes:
            by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, waiting in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, waiting)
            except RuntimeError:
                # The loop is closed, and its readers are gone.
                for mailbox in waiting:
                    self._withdraw(mailbox)

    def _retry_after_seconds(self) -> float:
        """Return the time in which a quarter of the queue drains at the recent pace: refused clients retry together."""
        finished = list(self._finished_at)
        if len(finished) < 2:
            return RETRY_SECONDS[0]
        seconds_each = max(self._clock() - finished[0], 0.0) / len(finished)
        return min(max(seconds_each * self.engine.core.num_queued / 4, RETRY_SECONDS[0]), RETRY_SECONDS[1])

    def _fail_all(self, cause: Exception) -> None:
        """Fail every reader: the engine is gone."""
        with self._changed:
            self._takes_requests = False
            commands, self._commands = self._commands, deque()
        mailboxes = [command.mailbox for command in commands if isinstance(command, _Submission)]
        mailboxes += self._mailboxes.values()
        for mailbox in mailboxes:
            # One error each: a traceback grows as it propagates.
            reason = cause.values.get("reason", str(cause)) if isinstance(cause, HoldfastError) else str(cause)
            death = EngineDeadError("engine.dead", reason=reason)
            death.__cause__ = cause
            mailbox.fail(death)
        self._wake(mailboxes)
        self._mailboxes.clear()
        with self._changed:
            readers, self._map_readers = self._map_readers, []
        for reader in readers:
            reader.wake()


def _wake_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()

"""RankGroup: the processes of all ranks but 0, seen from rank 0: one channel each, one thread that watches them; no torch.

    RankGroup(config, n)   starts n - 1 processes (engine/rank_process.py), each with one end of a socket pair: no open
    port expect(kind)           waits for a message of each: the handshake of a start send_frame(bytes)      sends a
    step to all of them

**Death.** The thread sees a closed channel at once, and silence after 1.5 s (engine/vital_signs.py). Then it kills and
reaps all ranks, and every waiting or later call raises `EngineDeadError` with the rank and its reason. It also writes
the heartbeat of this process, by which the ranks watch rank 0 (launched ranks use a life line, engine/life_line.py).
The thread starts the ranks, because a child that dies with its parent dies with the thread that started it.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.config import EngineConfig
from holdfast.engine.channel import ChannelClosedError
from holdfast.engine.child_process import Child, ending_of
from holdfast.engine.life_line import LifeLine
from holdfast.engine.messages import Died, Heartbeat, Numbering, Refused, Shutdown
from holdfast.engine.pulse import Pulse, open_pulse_file
from holdfast.engine.rank_messages import (
    RankLook,
    RankLookRequest,
    RankMessage,
    RankStart,
    decode_rank_message,
    encode_rank_message,
)
from holdfast.engine.vital_signs import LOOK_SECONDS, VitalSigns
from holdfast.errors import ConfigError, EngineDeadError, HoldfastError, MessageError

COMMAND = (sys.executable, "-P", "-m", "holdfast.engine.rank_process")
"""Four arguments follow: the descriptor of the channel, the pid of rank 0, and the descriptors of its own pulse and rank 0's."""
PEER_SECONDS = 30.0
"""Timeout for a rank that a launcher starts, and for the rendezvous."""
OPENING_SECONDS = 300.0
"""Timeout for a rank that imports its libraries on a busy machine; its death is detected otherwise."""
LOADING_SECONDS = 3600.0
BLAME_SECONDS = 0.1
"""Time to find the cause after the first failure: a dying rank takes others along."""
LET_GO_SECONDS = 0.1
"""Time for kernels that wait for a dead rank to end, before the others are killed."""
END_SECONDS = 3.0
"""Time for ranks to end after Shutdown."""
MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")


class Link:
    """One rank: its process, its channel, its vital signs, and its messages."""

    def __init__(self, rank: int, child: Child) -> None:
        self.rank = rank
        self.child = child
        self.signs = VitalSigns(child.process.pid, child.pulse)
        self.inbox: deque[RankMessage] = deque()
        self.sent = Numbering()
        self._received = Numbering()
        self.trouble: str | None = None
        """Reason that it failed; None if it has not."""
        self.refusal: HoldfastError | None = None

    def send(self, message: RankMessage) -> None:
        """Send a message. Any thread but the watching one."""
        self.child.channel.send(lambda: encode_rank_message(message, self.sent.next()), is_owner=False)

    def read(self) -> None:
        """Process every message that has arrived. Watching thread."""
        try:
            while self.trouble is None and (frame := self.child.channel.take()) is not None:
                number, message = decode_rank_message(frame)
                self._received.accept(number)
                self._hear(message)
        except ChannelClosedError:
            self.trouble = self.trouble or "it ended"
        except MessageError as error:
            self.trouble = str(error).rstrip(".")

    def _hear(self, message: RankMessage) -> None:
        if isinstance(message, Refused):
            self.trouble = str(message.error).rstrip(".")
            self.refusal = message.error.within(f"rank {self.rank}")
        elif isinstance(message, Died):
            self.trouble = f"it stopped at {message.cause}"
        elif isinstance(message, Heartbeat):
            self.child.pulse.beat()  # a launched rank has no shared pulse
        else:
            self.inbox.append(message)

    @property
    def was_killed(self) -> bool:
        """True if a signal of another process ended it."""
        status = self.child.process.poll()
        return status is not None and status < 0

    def how_it_ended(self) -> str:
        """Wait for its process and describe its end."""
        status = self.child.process.wait()
        self.child.last_lines.join(0.2)
        return f"{ending_of(status)}{self.child.last_lines.last()}"


class RankGroup:
    """All ranks but this one. Any thread; one at a time sends."""

    def __init__(
        self,
        config: EngineConfig,
        num_ranks: int,
        command: Sequence[str] = COMMAND,
        *,
        owns_parent: bool = False,
        rendezvous: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Start the ranks. `owns_parent`: this is a core process, not the caller's.

        `rendezvous` returns the ranks that a launcher started (engine/launched.py).
        """
        self.changed = threading.Condition()
        self._links: list[Link] = []
        self._life_lines: list[LifeLine] = []
        """Life lines of launched ranks, which do not share this process's pulse."""
        self.death: str | None = None
        self.refusal: HoldfastError | None = None
        self._is_serving = False
        self._is_ending = False
        self.on_death: Callable[[], None] | None = None
        """Releases what waits for other ranks on this device; a thread calls it repeatedly for a while."""
        self._home = os.getpid()
        spawned: Future[None] = Future()
        self.thread = threading.Thread(
            target=self._watch,
            args=(num_ranks, tuple(command), rendezvous, spawned),
            name="holdfast-ranks",
            daemon=True,
        )
        self.thread.start()
        spawned.result()
        own = replace(config, core_process=False)
        for link in self._links:
            self._send(link, RankStart(own, link.rank, owns_parent))

    @property
    def pids(self) -> list[int]:
        """Pids of ranks 1, 2, ..."""
        return [link.child.process.pid for link in self._links]

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError, or the error with which a rank refused to start."""
        if self.refusal is not None:
            raise self.refusal
        if self.death is not None:
            raise EngineDeadError("rank.dead", reason=self.death)

    def send(self, rank: int, message: RankMessage) -> None:
        """Send a message to one rank."""
        self._send(self._links[rank - 1], message)

    def send_all(self, message: RankMessage) -> None:
        """Send a message to each rank."""
        for link in self._links:
            self._send(link, message)

    def send_frame(self, frame: bytes) -> None:
        """Send the same bytes to each rank."""
        self.raise_if_dead()
        for link in self._links:
            try:
                link.child.channel.send_frame(frame)
            except (ChannelClosedError, MessageError) as error:
                self._await_death(error)

    def expect(self, kind: type[MessageT], seconds: float = PEER_SECONDS) -> list[MessageT]:
        """Wait for one message of this kind from each rank; raise if one is late or gone."""
        with self.changed:
            is_there = self.changed.wait_for(
                lambda: self.death is not None or all(link.inbox for link in self._links), seconds
            )
        self.raise_if_dead()
        late = [link.rank for link in self._links if not link.inbox]
        if not is_there or late:
            self.fail(f"rank {late[0]} has not sent {kind.__name__} within {seconds:.0f} seconds")
        found: list[MessageT] = []
        for link in self._links:
            message = link.inbox.popleft()
            if not isinstance(message, kind):
                self.fail(f"rank {link.rank} sent {type(message).__name__}, expected {kind.__name__}")
            else:
                found.append(message)
        self.raise_if_dead()
        return found

    def look(self) -> list[dict[str, int]]:
        """Return counters of each rank's memory, after every step that was sent."""
        self.send_all(RankLookRequest())
        return [message.counters for message in self.expect(RankLook)]

    def serve(self) -> None:
        """Treat silence as death from now on: all ranks are ready."""
        self._is_serving = True

    def wait(self, future: "Future[ResultT]") -> ResultT:
        """Wait for a result that needs every rank. An interrupt loses nothing."""

        def wake(_: object) -> None:
            with self.changed:
                self.changed.notify_all()

        if not future.done():
            future.add_done_callback(wake)
            with self.changed:
                self.changed.wait_for(lambda: future.done() or self.death is not None)
        if not future.done():
            self.raise_if_dead()
        try:
            result = future.result()
        except Exception as error:
            # A collective fails if a peer is gone: the watching thread knows which one, and why.
            if isinstance(error, EngineDeadError) or not isinstance(error, HoldfastError):
                self._await_death(error, must_die=False)
            raise
        # A step that waited for a dead rank was released, so it ended too.
        with self.changed:
            self.raise_if_dead()
        return result

    def fail(self, cause: str) -> None:
        """Kill all ranks and raise the cause."""
        with self.changed:
            self._die(cause)
        self.raise_if_dead()

    def end(self) -> None:
        """End all ranks: Shutdown, then SIGKILL. Idempotent; does nothing in a fork."""
        if os.getpid() != self._home or self._is_ending:
            return
        with self.changed:  # send to all before the end of one ends the others
            self._is_ending = True
            for link in self._links:
                with contextlib.suppress(ChannelClosedError):
                    link.child.channel.try_send(lambda own=link: encode_rank_message(Shutdown(), own.sent.next()))
        until = time.monotonic() + END_SECONDS
        for link in self._links:
            if self.death is None:
                link.child.channel.wait_for_end(max(until - time.monotonic(), 0.0))
        with self.changed:
            if self.death is None:
                self._die("it was shut down", releases=time.monotonic() >= until)
        self.thread.join(END_SECONDS)

    def _send(self, link: Link, message: RankMessage) -> None:
        self.raise_if_dead()
        try:
            link.send(message)
        except (ChannelClosedError, MessageError) as error:
            self._await_death(error)

    def _await_death(self, error: BaseException, must_die: bool = True) -> None:
        """Wait for the watching thread to name the rank whose end caused this error."""
        with self.changed:
            self.changed.wait_for(lambda: self.death is not None, 2.5)
            if self.death is None and must_die:
                self._die(str(error))
        self.raise_if_dead()

    # The watching thread.

    def _watch(
        self,
        num_ranks: int,
        command: tuple[str, ...],
        rendezvous: Callable[[], Sequence[Any]] | None,
        spawned: "Future[None]",
    ) -> None:
        number = open_pulse_file()
        pulse = Pulse(number)
        pulse.beat()
        try:
            if rendezvous is None:
                for rank in range(1, num_ranks):
                    self._links.append(Link(rank, Child(command, PEER_SECONDS, (number,))))
            else:
                peers = rendezvous()
                self._links += [Link(rank, peer) for rank, peer in enumerate(peers, 1)]
                self._life_lines += [peer.life_line for peer in peers]
        except BaseException as error:
            for link in self._links:
                link.child.process.kill()
                link.child.process.wait()
            spawned.set_exception(error)
            return
        finally:
            os.close(number)
        spawned.set_result(None)
        try:
            self._watch_links(pulse)
        except BaseException as error:
            with self.changed:
                self._die(f"its ranks are not watched any more: {error!r}")
            raise

    def _watch_links(self, pulse: Pulse) -> None:
        poll = select.poll()
        for link in self._links:
            poll.register(link.child.channel, select.POLLIN)
        looked_at = 0.0
        while self.death is None:
            with contextlib.suppress(OSError, ValueError):
                poll.poll(LOOK_SECONDS * 1000)
            with self.changed:
                if self.death is not None:
                    return
                now = time.monotonic()
                if now - looked_at >= LOOK_SECONDS:
                    looked_at = now
                    pulse.beat()
                    for line in self._life_lines:
                        line.beat()
                    for link in self._links:
                        link.signs.look()
                self._look()
                self.changed.notify_all()

    def _look(self) -> None:
        """Process messages; end all ranks if one is gone or silent."""
        for link in self._links:
            link.read()
        silent = [link for link in self._links if link.signs.is_dead(self._is_serving)]
        if not silent and all(link.trouble is None for link in self._links):
            return
        if self._is_ending:
            self._die("it was shut down")
            return
        time.sleep(BLAME_SECONDS)
        for link in self._links:
            link.read()
        killed = [link for link in self._links if link.was_killed]
        refused = [link for link in self._links if link.refusal is not None]
        troubled = [link for link in self._links if link.trouble is not None]
        if killed:
            self._die(f"rank {killed[0].rank} was killed", killed[0])
        elif refused:
            self.refusal = refused[0].refusal
            self._die(f"rank {refused[0].rank} refused: {refused[0].trouble}")
        elif silent:
            seconds = silent[0].signs.silent_seconds
            self._die(f"rank {silent[0].rank} was silent for {seconds:.1f} seconds")
        else:
            self._die(f"rank {troubled[0].rank}: {troubled[0].trouble}", troubled[0])

    def _die(self, cause: str, culprit: Link | None = None, *, releases: bool = False) -> None:
        """Kill all ranks, set the cause, and reap them within a time limit; the caller holds the condition."""
        if culprit is not None and culprit.child.process.poll() is None:
            culprit = None  # it sent its reason, and is killed here
        if self.on_death is not None and (releases or not self._is_ending):
            _release_waiting(self.on_death)
        for link in self._links:
            link.child.process.kill()
        self.death = cause if culprit is None else f"{cause} ({culprit.how_it_ended()})"
        self.changed.notify_all()
        until = time.monotonic() + END_SECONDS
        for link in self._links:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.child.process.wait(max(until - time.monotonic(), 0.0))
            link.child.channel.close()


def _release_waiting(on_death: Callable[[], None]) -> None:
    """Call `on_death` in a thread, and wait a moment for released kernels to end.

    Repeatedly: work that a dead rank's device had started may still overwrite the released signals.
    """
    is_begun = threading.Event()

    def call() -> None:
        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(RuntimeError):  # a failed device releases everything
            while time.monotonic() < until:
                on_death()
                is_begun.set()
                time.sleep(LOOK_SECONDS)

    threading.Thread(target=call, name="holdfast-abandon", daemon=True).start()
    if is_begun.wait(LET_GO_SECONDS):
        time.sleep(LET_GO_SECONDS / 2)


class StepThread:
    """Thread in which rank 0 computes, so that a waiting caller can be interrupted or get the death of another rank."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]] | None] = deque()
        self._has_jobs = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="holdfast-rank-0", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], ResultT]) -> "Future[ResultT]":
        """Queue a job."""
        future: Future[ResultT] = Future()
        self._jobs.append((job, future))
        self._has_jobs.release()
        return future

    def close(self, seconds: float) -> bool:
        """End after the queued jobs; True if it ended in time."""
        self._jobs.append(None)
        self._has_jobs.release()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._has_jobs.acquire()
            task = self._jobs.popleft()
            if task is None:
                return
            job, future = task
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del task, job, future  # a step's tensors must not live until the next one


def check_world(config: EngineConfig, environment: Mapping[str, str]) -> int:
    """Return the number of ranks; a launcher's WORLD_SIZE must agree."""
    num_ranks = config.num_ranks
    found = environment.get("WORLD_SIZE")
    if found is None or "RANK" not in environment:
        return num_ranks
    if not found.isdecimal() or int(found) != num_ranks:
        sizes = {"tensor": config.tensor_parallel_size, "pipeline": config.pipeline_parallel_size}
        raise ConfigError("rank.world_size", needed=num_ranks, found=found, **sizes)
    return num_ranks

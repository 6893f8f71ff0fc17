"""RankGroup: the processes of all ranks but 0, seen from rank 0: one channel each, one thread that watches them; no torch.

    RankGroup(config, n)   starts n - 1 processes (engine/rank_process.py), each with one end of a socket pair: no port is open
    expect(kind)           waits until each has said so: the handshake of a start
    send_frame(bytes)      a step to all of them

**Death.** The thread sees at once where a channel ends, and silence after 1.5 s (engine/vital_signs.py). Then all ranks are killed
and reaped, and whoever waits, or comes later, gets `EngineDeadError` with the rank and its words. It is also what beats the pulse
of this process, by which the ranks watch rank 0 (those of a launcher by a life line, engine/life_line.py); they are started by it, since a child that is to die with its parent dies with
the thread that started it.
"""

import contextlib
import os
import select
import signal
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
from holdfast.engine.child_process import Child
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
"""Four arguments follow: the end of the channel, the process of rank 0, the file of its own pulse, and that of rank 0's."""
PEER_SECONDS = 30.0
"""For a rank that somebody else starts, and for all to meet."""
OPENING_SECONDS = 300.0
"""For one that was started here, lives, and imports its libraries on a busy machine; its death is seen by other means."""
LOADING_SECONDS = 3600.0
BLAME_SECONDS = 0.1
"""After the first sign of trouble: one that dies takes others along, whose words are not the cause."""
LET_GO_SECONDS = 0.1
"""For kernels that wait for a rank that is gone, before the others are killed."""
END_SECONDS = 3.0
"""For ranks that were asked to end."""
MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")


class _Link:
    """One rank: its process, its channel, its signs of life, and what it has said."""

    def __init__(self, rank: int, child: Child) -> None:
        self.rank = rank
        self.child = child
        self.signs = VitalSigns(child.process.pid, child.pulse)
        self.inbox: deque[RankMessage] = deque()
        self.sent = Numbering()
        self._received = Numbering()
        self.trouble: str | None = None
        """Why it cannot go on, in words."""
        self.refusal: HoldfastError | None = None

    def send(self, message: RankMessage) -> None:
        """Any thread but the watching one."""
        self.child.channel.send(lambda: encode_rank_message(message, self.sent.next()), is_owner=False)

    def read(self) -> None:
        """The watching thread: take in whatever is here."""
        try:
            while self.trouble is None and (frame := self.child.channel.take()) is not None:
                number, message = decode_rank_message(frame)
                self._received.accept(number)
                self._hear(message)
        except ChannelClosedError:
            self.trouble = self.trouble or "it ended"
        except MessageError as error:
            self.trouble = str(error)

    def _hear(self, message: RankMessage) -> None:
        if isinstance(message, Refused):
            error = message.error
            name = f"rank {self.rank}"
            is_named = error.asked.startswith(f"{name} ")
            self.refusal = type(error)(error.asked if is_named else f"{name}: {error.asked}", error.has, error.do)
            self.trouble = str(error)
        elif isinstance(message, Died):
            self.trouble = f"it stopped at {message.cause}"
        elif isinstance(message, Heartbeat):
            self.child.pulse.beat()  # of a rank that cannot do so itself
        else:
            self.inbox.append(message)

    @property
    def was_killed(self) -> bool:
        """By a signal that was not ours."""
        status = self.child.process.poll()
        return status is not None and status < 0

    def end_words(self) -> str:
        """How its process ended, once it has."""
        status = self.child.process.wait()
        self.child.last_lines.join(0.2)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{how}{self.child.last_lines.words()}"


class RankGroup:
    """All ranks but this one. Any thread may call; one at a time sends."""

    def __init__(
        self,
        config: EngineConfig,
        num_ranks: int,
        command: Sequence[str] = COMMAND,
        *,
        owns_parent: bool = False,
        meet: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Start them, and tell each what it is. `owns_parent`: this process is ours alone, a core process.

        `meet` gives those that a launcher has started (engine/launched.py).
        """
        self._changed = threading.Condition()
        self._links: list[_Link] = []
        self._life_lines: list[LifeLine] = []
        """To ranks that a launcher has started, which do not see this process's pulse."""
        self._death: str | None = None
        self._refusal: HoldfastError | None = None
        self._is_serving = False
        self._is_ending = False
        self.on_death: Callable[[], None] | None = None
        """Lets go of what waits for other ranks on this one's device; called by a thread of its own, again and again for a while."""
        self._home = os.getpid()
        spawned: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._watch, args=(num_ranks, tuple(command), meet, spawned), name="holdfast-ranks", daemon=True
        )
        self._thread.start()
        spawned.result()
        own = replace(config, core_process=False)
        for link in self._links:
            self._send(link, RankStart(own, link.rank, owns_parent))

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [link.child.process.pid for link in self._links]

    def raise_if_dead(self) -> None:
        """EngineDeadError, or what a rank refused to start for."""
        if self._refusal is not None:
            raise self._refusal
        if self._death is not None:
            raise EngineDeadError("the ranks of this engine were asked", self._death, "make a new engine")

    def send(self, rank: int, message: RankMessage) -> None:
        """To one of them."""
        self._send(self._links[rank - 1], message)

    def send_all(self, message: RankMessage) -> None:
        """To each of them."""
        for link in self._links:
            self._send(link, message)

    def send_frame(self, frame: bytes) -> None:
        """The same bytes to each of them."""
        self.raise_if_dead()
        for link in self._links:
            try:
                link.child.channel.send_frame(frame)
            except (ChannelClosedError, MessageError) as error:
                self._await_death(error)

    def expect(self, kind: type[MessageT], seconds: float = PEER_SECONDS) -> list[MessageT]:
        """What each rank says, which must be of this kind; raises where one does not in time, or is gone."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._death is not None or all(link.inbox for link in self._links), seconds
            )
        self.raise_if_dead()
        late = [link.rank for link in self._links if not link.inbox]
        if not is_there or late:
            self.fail(f"rank {late[0]} has not sent {kind.__name__} within {seconds:.0f} seconds")
        found: list[MessageT] = []
        for link in self._links:
            message = link.inbox.popleft()
            if not isinstance(message, kind):
                self.fail(f"rank {link.rank} sent {type(message).__name__} where {kind.__name__} was due")
            else:
                found.append(message)
        self.raise_if_dead()
        return found

    def look(self) -> list[dict[str, int]]:
        """Counters of each rank's memory, behind every step that was sent."""
        self.send_all(RankLookRequest())
        return [message.counters for message in self.expect(RankLook)]

    def serve(self) -> None:
        """All are ready: from here on nobody has an excuse for silence."""
        self._is_serving = True

    def wait(self, future: "Future[ResultT]") -> ResultT:
        """The result of what this rank computes together with the others. An interrupt loses nothing."""

        def tell(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        if not future.done():
            future.add_done_callback(tell)
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._death is not None)
        if not future.done():
            self.raise_if_dead()
        try:
            result = future.result()
        except Exception as error:
            # A collective fails where a peer is gone: whoever watches knows which one, and why.
            if isinstance(error, EngineDeadError) or not isinstance(error, HoldfastError):
                self._await_death(error, must_die=False)
            raise
        # A step that waited for a dead rank and was let go has come to an end too. Who lets it go has the condition until all are gone.
        with self._changed:
            self.raise_if_dead()
        return result

    def fail(self, cause: str) -> None:
        """Kill all and raise the cause."""
        with self._changed:
            self._die(cause)
        self.raise_if_dead()

    def end(self) -> None:
        """Ask them to end, then end them; nothing is left afterwards. Again is nothing; a fork of ours has no say."""
        if os.getpid() != self._home or self._is_ending:
            return
        with self._changed:  # all are asked before the first that ends ends the others
            self._is_ending = True
            for link in self._links:
                with contextlib.suppress(ChannelClosedError):
                    link.child.channel.try_send(lambda own=link: encode_rank_message(Shutdown(), own.sent.next()))
        until = time.monotonic() + END_SECONDS
        for link in self._links:
            if self._death is None:
                link.child.channel.wait_for_end(max(until - time.monotonic(), 0.0))
        with self._changed:
            if self._death is None:
                self._die("it was shut down", lets_go=time.monotonic() >= until)
        self._thread.join(END_SECONDS)

    def _send(self, link: _Link, message: RankMessage) -> None:
        self.raise_if_dead()
        try:
            link.send(message)
        except (ChannelClosedError, MessageError) as error:
            self._await_death(error)

    def _await_death(self, error: BaseException, must_die: bool = True) -> None:
        """Something failed here, most likely because a rank is gone: the thread that watches will know, and says why."""
        with self._changed:
            self._changed.wait_for(lambda: self._death is not None, 2.5)
            if self._death is None and must_die:
                self._die(str(error))
        self.raise_if_dead()

    # The watching thread.

    def _watch(
        self,
        num_ranks: int,
        command: tuple[str, ...],
        meet: Callable[[], Sequence[Any]] | None,
        spawned: "Future[None]",
    ) -> None:
        number = open_pulse_file()
        pulse = Pulse(number)
        pulse.beat()
        try:
            if meet is None:
                for rank in range(1, num_ranks):
                    self._links.append(_Link(rank, Child(command, PEER_SECONDS, (number,))))
            else:
                peers = meet()
                self._links += [_Link(rank, peer) for rank, peer in enumerate(peers, 1)]
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
        except BaseException as error:  # nobody would watch any more
            with self._changed:
                self._die(f"its ranks are not watched any more: {error!r}")
            raise

    def _watch_links(self, pulse: Pulse) -> None:
        poll = select.poll()
        for link in self._links:
            poll.register(link.child.channel, select.POLLIN)
        looked_at = 0.0
        while self._death is None:
            with contextlib.suppress(OSError, ValueError):
                poll.poll(LOOK_SECONDS * 1000)
            with self._changed:
                if self._death is not None:
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
                self._changed.notify_all()

    def _look(self) -> None:
        """Take in what ranks say, and end all where one is gone or silent."""
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
            self._refusal = refused[0].refusal
            self._die(f"rank {refused[0].rank} refused: {refused[0].trouble}")
        elif silent:
            seconds = silent[0].signs.silent_seconds
            self._die(f"rank {silent[0].rank} has given no sign of life for {seconds:.1f} seconds")
        else:
            self._die(f"rank {troubled[0].rank}: {troubled[0].trouble}", troubled[0])

    def _die(self, cause: str, culprit: _Link | None = None, *, lets_go: bool = False) -> None:
        """Kill all, say so, and reap them; the condition is held. One that does not go, in a driver that hangs, is not waited for."""
        if culprit is not None and culprit.child.process.poll() is None:
            culprit = None  # it has said why, and ends by our hand
        if self.on_death is not None and (lets_go or not self._is_ending):
            _let_go(self.on_death)
        for link in self._links:
            link.child.process.kill()
        self._death = cause if culprit is None else f"{cause} ({culprit.end_words()})"
        self._changed.notify_all()
        until = time.monotonic() + END_SECONDS
        for link in self._links:
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.child.process.wait(max(until - time.monotonic(), 0.0))
            link.child.channel.close()


def _let_go(on_death: Callable[[], None]) -> None:
    """Call it in a thread, and give what it lets go of a moment to end.

    More than once: what the device of a dead rank had begun may still tell that it has come, over what was told instead.
    """
    is_begun = threading.Event()

    def call() -> None:
        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(RuntimeError):  # a device that has failed lets go of everything
            while time.monotonic() < until:
                on_death()
                is_begun.set()
                time.sleep(LOOK_SECONDS)

    threading.Thread(target=call, name="holdfast-abandon", daemon=True).start()
    if is_begun.wait(LET_GO_SECONDS):
        time.sleep(LET_GO_SECONDS / 2)


class StepThread:
    """Where rank 0 computes: whoever waits for it can be interrupted, and told that another rank is gone, while it computes."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]] | None] = deque()
        self._has_jobs = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="holdfast-rank-0", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], ResultT]) -> "Future[ResultT]":
        """Do this behind everything before it."""
        future: Future[ResultT] = Future()
        self._jobs.append((job, future))
        self._has_jobs.release()
        return future

    def close(self, seconds: float) -> bool:
        """Nothing comes any more; whether it has ended in time."""
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
            del task, job, future  # what a step held must not wait here for the next one


def check_world(config: EngineConfig, environment: Mapping[str, str]) -> int:
    """How many ranks there are to be; WORLD_SIZE of a launcher must agree."""
    num_ranks = config.num_ranks
    told = environment.get("WORLD_SIZE")
    if told is None or "RANK" not in environment:
        return num_ranks
    if not told.isdecimal() or int(told) != num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} and "
            f"pipeline_parallel_size={config.pipeline_parallel_size} were asked",
            f"they make {num_ranks} ranks, and the launcher has started WORLD_SIZE={told}",
            f"start {num_ranks} processes, or none: without a launcher ranks are started here",
        )
    return num_ranks

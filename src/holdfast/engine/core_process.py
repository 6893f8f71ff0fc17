"""CoreProcess: an EngineCore in a process of its own, which opens the model itself; the front stays here; no torch until it runs.

    this process                               the child: python -m holdfast.engine.core_process
    Engine = Front + CoreProcess  -- Start, Submit, Abort, ... -->  CoreServer: commands between two steps,
    (text, templates, names)      <-- Ready, CoreOutputs, ... ----  EngineCore.step(), outputs without an acknowledgement
                                  <-- Heartbeat ------------------  watchdog thread; heartbeats also in shared memory
                                                                    (engine/pulse.py)

The child never waits for the front: it sends a step's outputs and continues. Aborts and stop strings reach it a few
steps late, and the front drops the surplus. If the front does not read, the child stops at a full socket.

**Ends.** A child that ends, or sends nothing for `core_timeout` seconds, raises in the next call, which ends the
engine; it is killed and reaped. A child whose parent is gone (closed channel, or another parent) ends at once, even
inside a step. A `CoreProcess` that is garbage collected, or whose process ends, ends its child.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import nullcontext
from dataclasses import replace
from typing import NoReturn

from holdfast.config import EngineConfig
from holdfast.engine.admission import describe
from holdfast.engine.channel import Channel, ChannelClosedError
from holdfast.engine.child_process import GRACE_SECONDS, Child
from holdfast.engine.core import EngineCore, Waiting, refuse_full
from holdfast.engine.engine import Engine
from holdfast.engine.garbage import IdleCollector, keep_start
from holdfast.engine.memory_map import CoreMap
from holdfast.engine.messages import (
    Abort,
    CoreFacts,
    CoreOutputs,
    CoreRequest,
    CoreStats,
    Died,
    Ending,
    Heartbeat,
    LoadingProgress,
    MapRequest,
    Message,
    Numbering,
    Ready,
    Refused,
    ResetPrefixCache,
    SequenceOutput,
    Shutdown,
    Start,
    StatsRequest,
    Submit,
    decode_message,
    encode_message,
    last_message,
)
from holdfast.engine.open_text import engine_of, open_text
from holdfast.engine.pulse import CorePulse, Pulse
from holdfast.engine.vital_signs import SILENCE_SECONDS, is_stopped
from holdfast.errors import EngineDeadError, HoldfastError, MessageError, RequestError
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.report import MemoryReport
from holdfast.observability.log import get_logger, log_to_stderr
from holdfast.observability.preparing import OnPrepare, Preparing, prepare_silently

HEARTBEAT_SECONDS = 0.25
LOOK_SECONDS = 0.25
"""Interval at which a child checks its parent."""
LOADING_SECONDS = 120.0
"""Shortest timeout while a model opens: reading libraries from a slow disk may block every thread."""
PROGRESS_SECONDS = 0.05
"""Interval of messages about loading progress."""
HELD_SECONDS = 0.003
"""Longest time that outputs of short steps are held back."""
COLLECT_STEPS = 256
"""Fewest steps between two garbage collections."""
COMMAND = (sys.executable, "-P", "-m", "holdfast.engine.core_process")
"""Three arguments follow: the descriptor of its channel, the pid of its parent, and the descriptor of its pulse."""
_log = get_logger(__name__)


def connect_engine(
    config: EngineConfig,
    on_progress: Callable[[int, int], None],
    model: OpenModel | None = None,
    *,
    on_prepare: OnPrepare = prepare_silently,
) -> Engine:
    """Build an engine with a core process: it opens the weights, this process tokenizer and template."""
    if model is None:
        model = open_model(config.model, config.load_format, config.revision)
    try:
        text = open_text(config, model)
    finally:
        model.source.close()
    return engine_of(config, model, CoreProcess(config, on_progress, on_prepare), text)


class CoreProcess:
    """Implements `Core` by a child process. One thread at a time (`stats` excepted)."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[int, int], None],
        on_prepare: OnPrepare = prepare_silently,
        command: SequenceABC[str] = COMMAND,
    ) -> None:
        """Start the process and wait until its model is open, or raise its error."""
        self._timeout = max(config.core_timeout, LOADING_SECONDS)
        self._received = Numbering()
        self.last_stats = CoreStats()
        self._map: CoreMap | None = None
        self._pending: deque[CoreOutputs] = deque()
        self._live: set[int] = set()
        self.unseen: deque[int] = deque()
        """Sequences that were sent after the core's last stats."""
        self._num_submitted = 0
        self._death: str | None = None
        self.child = Child(command, config.core_timeout)
        # Also runs when the engine is garbage collected, and before the interpreter ends.
        self._end = weakref.finalize(self, self.child.end)
        try:
            self._send(Start(replace(config, core_process=False)))
            ready = self._await_ready(on_progress, on_prepare)
        except BaseException:
            self._end()
            raise
        self.facts: CoreFacts = ready.facts
        self.memory: MemoryReport | None = ready.memory
        self._timeout = config.core_timeout

    @property
    def pid(self) -> int:
        """Pid of the child."""
        return self.child.process.pid

    def pulse(self) -> CorePulse:
        """Signs of life of the child. Any thread."""
        return self.child.pulse.look()

    def check_room(self, num_sequences: int) -> None:
        """Like `EngineCore.check_room`, but query an idle core first.

        A busy core answers only after its step, which would delay every caller.
        """
        if num_sequences > self.facts.max_queue - self.num_queued:
            if self._live:
                self._hear_all()
            else:
                self.watch()
        refuse_full(num_sequences, self.num_queued, self.facts.max_queue)

    def submit(self, requests: SequenceABC[CoreRequest]) -> None:
        """Send the sequences of one request. A later refusal ends them with an error."""
        self.check_room(len(requests))
        self._send(Submit(tuple(requests)))
        ids = [request.sequence_id for request in requests]
        self._num_submitted = ids[-1] + 1
        self._live.update(ids)
        self.unseen.extend(ids)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences. Idempotent."""
        ids = tuple(sequence_ids)
        self._live.difference_update(ids)
        self._send(Abort(ids))

    def hang_up(self, sequence_ids: Iterable[int]) -> None:
        """Announce an abort, so that a step without other sequences may stop. Any thread."""
        self.child.pulse.hang_ups.add(sequence_ids)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._send(ResetPrefixCache())

    def step(self, waiting: Waiting = nullcontext) -> CoreOutputs:
        """Wait for the outputs of the next step; empty if no sequence is live."""
        if not self._pending and not self._live and self._end.alive:
            self._hear_all()
        while not self._pending and self._live:
            self._hear(self._next(waiting))
        return self._pending.popleft() if self._pending else CoreOutputs((), self.last_stats)

    def settle(self, waiting: Waiting = nullcontext) -> None:
        """Do nothing: the child waits for its own steps."""

    def watch(self, waiting: Waiting = nullcontext) -> None:
        """Query the stats of the core; raise if it is gone or silent."""
        self._send(StatsRequest())
        while not self._hear(self._next(waiting)):
            pass
        # Otherwise stats that the core sent on its own would count as the next answer.
        self._hear_all()

    def stats(self) -> CoreStats:
        """Return the core's last stats, updated with the counts in shared memory. Any thread."""
        last, counts = replace(self.last_stats, num_waiting=self.num_queued), self.child.pulse.counts()
        if counts.num_submitted < last.num_submitted:
            return last
        return replace(last, num_running=counts.num_running, kv_usage=counts.kv_usage)

    def ask_map(self) -> None:
        """Request a map of the pages between two steps."""
        self._send(MapRequest())

    def take_map(self) -> CoreMap | None:
        """Return the requested map once it has arrived."""
        taken, self._map = self._map, None
        return taken

    @property
    def num_queued(self) -> int:
        """Sequences that wait in the core or are on their way. Any thread.

        `stats` shows this number: a client that reads 0 must not find the queue full.
        """
        last, counts = self.last_stats, self.child.pulse.counts()
        num_new = counts.num_submitted - last.num_submitted
        if num_new < 0:
            return last.num_waiting + len(self.unseen)
        return counts.num_waiting + max(len(self.unseen) - num_new, 0)

    def close(self) -> None:
        """End the child. Idempotent."""
        self._end()

    def _await_ready(self, on_progress: Callable[[int, int], None], on_prepare: OnPrepare) -> Ready:
        while True:
            message = self._next(nullcontext)
            if isinstance(message, Ready):
                return message
            if isinstance(message, LoadingProgress):
                if message.preparing is None:
                    on_progress(message.num_done, message.num_total)
                else:
                    on_prepare(message.preparing)
            elif isinstance(message, Refused):
                raise message.error
            elif isinstance(message, Died):
                self._die(f"it stopped at {message.cause}")
            else:
                self._die(f"it sent {type(message).__name__} before it was ready")

    def _send(self, message: Message) -> None:
        self._raise_if_dead()
        try:
            self.child.send(message)
        except ChannelClosedError:
            self._hear_all()  # its last message may say why it ended
            self._die(None)
        except MessageError as error:
            self._die(str(error).rstrip("."))

    def _next(self, waiting: Waiting) -> Message:
        """Wait for the next message that is not a heartbeat. An interrupt of the wait loses nothing."""
        silent_seconds = 0.0
        while True:
            message = self.take()
            if message is not None:
                if not isinstance(message, Heartbeat):
                    return message
                silent_seconds = 0.0
                continue
            if silent_seconds >= self._timeout:
                self._die(f"it was silent for {silent_seconds:.1f} seconds")
            # Count waits, not the clock: a machine that slept was silent as a whole.
            seconds = min(HEARTBEAT_SECONDS, self._timeout - silent_seconds)
            with waiting():
                has_arrived = self.child.channel.wait(seconds)
            silent_seconds += 0.0 if has_arrived else seconds

    def take(self) -> Message | None:
        """Return a message that has arrived."""
        self._raise_if_dead()
        try:
            frame = self.child.channel.take()
            if frame is None:
                return None
            number, message = decode_message(frame)
            self._received.accept(number)
        except ChannelClosedError:
            self._die(None)
        except MessageError as error:
            self._die(str(error).rstrip("."))
        return message

    def _hear_all(self) -> None:
        """Process every message that has arrived."""
        while (message := self.take()) is not None:
            if not isinstance(message, Heartbeat):
                self._hear(message)

    def _hear(self, message: Message) -> bool:
        """Process a message; True if it is CoreStats."""
        if isinstance(message, CoreOutputs):
            for output in message.outputs:
                if output.sequence_id >= self._num_submitted:
                    self._die(f"it sent sequence {output.sequence_id}, expected ids below {self._num_submitted}")
                if output.token_ids and max(output.token_ids) >= self.facts.vocab_size:
                    self._die(f"it chose token {max(output.token_ids)} of a vocabulary of {self.facts.vocab_size}")
            self._see(message.stats)
            self._live.difference_update(one.sequence_id for one in message.outputs if one.ending is not None)
            self._pending.append(message)
        elif isinstance(message, CoreStats):
            self._see(message)
            return True
        elif isinstance(message, CoreMap):
            self._map = message
        elif isinstance(message, Refused) and message.sequence_ids and isinstance(message.error, RequestError):
            refused = set(message.sequence_ids)
            self._live -= refused
            self.unseen = deque(one for one in self.unseen if one not in refused)
            ending = Ending("error", error=str(message.error))
            outputs = tuple(SequenceOutput(sequence_id, ending=ending) for sequence_id in message.sequence_ids)
            self._pending.append(CoreOutputs(outputs, self.last_stats))
        elif isinstance(message, Refused):
            self._die(f"it refused a message: {str(message.error).rstrip('.')}")
        elif isinstance(message, Died):
            self._die(f"it stopped at {message.cause}")
        else:
            self._die(f"it sent an unexpected {type(message).__name__}")
        return False

    def _see(self, stats: CoreStats) -> None:
        self.last_stats = stats
        while self.unseen and self.unseen[0] < stats.num_submitted:
            self.unseen.popleft()

    def _die(self, cause: str | None) -> NoReturn:
        """Kill the child; this and every later call raise the cause."""
        ended = self.child.kill()
        self._death = f"{cause}; {ended}" if cause is not None else ended
        self._raise_if_dead()
        raise AssertionError("the core process is dead")

    def _raise_if_dead(self) -> None:
        death = self._death or (None if self._end.alive else "it was shut down")
        if death is not None:
            raise EngineDeadError("engine.core_dead", pid=self.pid, reason=f"core process {self.pid} is gone: {death}")


def pulse(server: "CoreServer", channel: Channel, parent: int) -> NoReturn:
    """Thread of the child: send heartbeats, and end this process once its parent is gone."""
    sent_at, num_stopped = 0.0, 0
    with contextlib.suppress(ChannelClosedError):
        while os.getppid() == parent and not channel.is_other_side_gone():
            now = time.monotonic()
            server.pulse.beat()
            if now - sent_at >= HEARTBEAT_SECONDS:
                sent_at = now
                channel.try_send(server.heartbeat)
            server.flush_overdue()
            # A stopped front would keep the memory of all ranks.
            num_stopped = num_stopped + 1 if server.has_ranks and is_stopped(parent) else 0
            if num_stopped * LOOK_SECONDS >= SILENCE_SECONDS:
                os._exit(1)
            channel.wait_for_end(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


class CoreServer:
    """The child's side: opens a core, and executes commands between its steps."""

    def __init__(self, channel: Channel, pulse: Pulse) -> None:
        self._channel = channel
        self.pulse = pulse
        self._sent = Numbering()
        self._received = Numbering()
        self.held: list[Message] = []
        """Messages held back to be sent together."""
        self.holding = threading.Lock()
        self.flushed_at = 0.0
        self.has_ranks = False
        self._progress_at = 0.0
        self._num_steps = 0
        self._collector = IdleCollector(COLLECT_STEPS)

    def run(self, open_core: "OpenCore") -> None:
        """Serve until Shutdown or the front is gone; report a death to the front."""
        core: EngineCore | None = None
        try:
            core = open_core(self._await_start(), self._send_progress, self._send_preparing)
            keep_start()
            self.send(Ready(core.facts, core.memory))
            self.serve(core)
        except ChannelClosedError:
            return
        except Exception as error:
            is_refusal = core is None and isinstance(error, HoldfastError)
            if not is_refusal:
                is_known = isinstance(error, EngineDeadError)  # a rank is gone
                _log.error("the core stopped: %s", describe(error), exc_info=None if is_known else error)
            with contextlib.suppress(ChannelClosedError):
                self.send(last_message(error, is_started=core is not None))
            sys.exit(1)
        finally:
            if core is not None:
                core.close()

    def send(self, message: Message) -> None:
        """Send a message, after those that are held back."""
        with self.holding:
            self.held.append(message)
            self._flush(is_owner=True)

    def flush_overdue(self) -> None:
        """Send messages that a long step holds back. Another thread."""
        if time.monotonic() - self.flushed_at > LOOK_SECONDS and self.holding.acquire(blocking=False):
            try:
                self._flush(is_owner=False)
            finally:
                self.holding.release()

    def serve(self, core: EngineCore) -> None:
        """Run steps and the commands between them.

        A message for each step made the shortest steps up to a tenth longer. So outputs of steps shorter than
        HELD_SECONDS are sent together, unless one ends a sequence or a prompt step follows.
        """

        @contextlib.contextmanager
        def awaiting() -> Iterator[None]:
            self._write_counts(core)
            if self.held and not core.awaits_decode:
                self._release()
            yield

        core.hang_ups = self.pulse.hang_ups
        while self._run_commands(core):
            began = time.monotonic()
            self.pulse.begin_step()
            outputs = core.step(awaiting)
            self.pulse.end_step()
            self._write_counts(core)
            self._num_steps += 1
            now = time.monotonic()
            with self.holding:
                self.held.append(outputs)
            is_short = now - began < HELD_SECONDS and now - self.flushed_at < HELD_SECONDS
            if not is_short or any(output.ending is not None for output in outputs.outputs):
                self._release()

    def _write_counts(self, core: EngineCore) -> None:
        self.pulse.write_counts(core.counts)

    def _release(self) -> None:
        with self.holding:
            self._flush(is_owner=True)

    def _flush(self, *, is_owner: bool) -> None:
        held, self.held = self.held, []
        if held:
            self.flushed_at = time.monotonic()

            def made() -> bytes:
                return b"".join(encode_message(message, self._sent.next()) for message in held)

            self._channel.send(made, is_owner=is_owner)

    def heartbeat(self) -> bytes:
        """Encode the next heartbeat. Any thread."""
        return encode_message(Heartbeat(self.pulse.look().step_seconds), self._sent.next())

    def _run_commands(self, core: EngineCore) -> bool:
        """Execute commands until there is a step to run; False at Shutdown."""
        is_reported = True
        while True:
            core.watch()
            frame = self._channel.take()
            if frame is not None:
                message = self._checked(frame)
                if isinstance(message, Shutdown):
                    return False
                self._run_command(core, message)
                # Before a later StatsRequest: the front overlays these counts.
                self._write_counts(core)
                # A front that just got stats needs no more: it queries each second.
                is_reported = isinstance(message, StatsRequest) or (is_reported and isinstance(message, MapRequest))
            elif core.has_unfinished:
                return True
            else:
                self._write_counts(core)
                self._release()
                if not is_reported:
                    self.send(core.stats())
                    is_reported = True
                self._collector.look(self._num_steps)
                self._channel.wait(LOOK_SECONDS if core.has_ranks else None)

    def _checked(self, frame: bytes) -> Message | None:
        """Decode the next message; refuse a malformed one and return None."""
        try:
            number, message = decode_message(frame)
            self._received.accept(number)
        except MessageError as error:
            self.send(Refused((), error))
            return None
        return message

    def _run_command(self, core: EngineCore, message: Message | None) -> None:
        try:
            match message:
                case None:
                    pass
                case Submit(requests):
                    core.submit(requests)
                case Abort(sequence_ids):
                    core.abort(sequence_ids)
                case ResetPrefixCache():
                    core.reset_prefix_cache()
                case StatsRequest():
                    self.send(core.stats())
                case MapRequest():
                    self.send(core.map())
                case _:
                    raise MessageError("wire.unexpected", found=type(message).__name__, expected="a command")
        except RequestError as error:
            assert isinstance(message, Submit), "only requests are refused"
            self.send(Refused(tuple(request.sequence_id for request in message.requests), error))
        except MessageError as error:
            self.send(Refused((), error))

    def _await_start(self) -> EngineConfig:
        while (frame := self._channel.take()) is None:
            self._channel.wait()
        number, message = decode_message(frame)
        self._received.accept(number)
        if not isinstance(message, Start):
            raise MessageError("wire.unexpected", found=type(message).__name__, expected="Start")
        self.has_ranks = message.config.num_ranks > 1
        return message.config

    def _send_progress(self, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_SECONDS or num_done == num_total:
            self._progress_at = now
            self.send(LoadingProgress(num_done, num_total))

    def _send_preparing(self, preparing: Preparing) -> None:
        self.send(LoadingProgress(0, 0, preparing))


OpenCore = Callable[[EngineConfig, Callable[[int, int], None], OnPrepare], EngineCore]


def open_core(config: EngineConfig, on_progress: Callable[[int, int], None], on_prepare: OnPrepare) -> EngineCore:
    """Open the model of a config and build its core."""
    from holdfast.engine.build import build_core  # torch comes with it

    model = open_model(config.model, config.load_format, config.revision)
    try:
        return build_core(config, model, on_progress, on_prepare, is_remote=True)
    finally:
        model.source.close()


def main(open_core: OpenCore = open_core) -> None:
    """Entry point of the child; COMMAND documents its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr()
    number, parent, pulse_number = map(int, sys.argv[1:])
    own_pulse = Pulse(pulse_number)
    os.close(pulse_number)
    with socket.socket(fileno=number) as connection:
        channel = Channel(connection)
        server = CoreServer(channel, own_pulse)
        threading.Thread(target=pulse, args=(server, channel, parent), name="holdfast-pulse", daemon=True).start()
        server.run(open_core)


if __name__ == "__main__":
    main()

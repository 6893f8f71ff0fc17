"""Locks of the engine: what threads share changes under its lock, whatever happens; and who may not wait does not."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fakes import make_engine, own_pulse, solo, tokens_of
from engine.owned_locks import Guard, OwnedLock
from engine.test_core import request
from engine.test_core_server import Line
from error_codes import raises_code
from for_each import for_each
from holdfast.engine import core_process
from holdfast.engine.channel import Channel, ChannelClosedError, channel_pair
from holdfast.engine.core import EngineCore
from holdfast.engine.core_process import CoreServer
from holdfast.engine.driver import Driver
from holdfast.engine.engine_thread import EngineThread, Mailbox, MapReader
from holdfast.engine.messages import CoreOutputs, CoreStats, Submit, decode_message, encode_message
from holdfast.engine.outputs import DeltaBuffer
from holdfast.engine.ranks import RankGroup
from holdfast.errors import EngineDeadError
from holdfast.request.outputs import CompletionDelta
from holdfast.request.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


def in_thread(work: Any) -> Any:
    """What work() returns or raises in a thread of its own; a wait that never ends fails."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(20)


def test_guard_sees_what_happens_without_the_lock():
    """The stand-in itself: a change from another thread is a breach although the lock is taken."""

    class Shared:
        def __init__(self) -> None:
            self.lock, self.count, self.names = threading.Lock(), 0, list[str]()

    shared = Shared()
    guard = Guard(shared, "lock", ("count", "names"))
    with shared.lock:
        shared.count += 1
        shared.names.append("a")
        guard.assert_held("count", "names.append")
        in_thread(lambda: shared.names.append("b"))
    shared.count = 2
    shared.names = []
    shared.names.append("c")
    assert [words.split()[0] for words in guard.breaches] == ["names.append", "count", "names", "names.append"]


def make_driver() -> tuple[Driver, Guard]:
    engine = make_engine()
    driver = Driver(engine)
    guard = Guard(driver, "lock", ("readings",))
    calls = ("submit", "step", "abort", "settle", "watch", "reset_prefix_cache", "close")
    guard.watch(engine, *calls, "raise_if_dead")
    return driver, guard


def test_driver_changes_its_engine_under_its_lock():
    driver, guard = make_driver()
    engine = driver.engine
    ended, left = DeltaBuffer(), DeltaBuffer()
    guard.watch(ended, "add", "take")
    with driver.call() as first, driver.call() as second:
        first.try_submit(engine.prepare("one", PARAMS), ended)
        second.try_submit(engine.prepare("two", PARAMS), left)
        assert driver.num_unfinished == 2
        second.pump()
        while not first.take(ended)[1]:
            first.pump()
        first.try_submit(engine.prepare("three", PARAMS), DeltaBuffer())
    driver.reset_prefix_cache()
    driver.stats()
    assert not driver.lock._is_owned()
    with driver.call() as third:
        third.try_submit(engine.prepare("four", PARAMS), DeltaBuffer())
        driver.abort_all()
    driver.close()
    guard.assert_held(
        *("submit", "step", "abort", "settle", "watch", "reset_prefix_cache", "close", "take", "add"),
        *(
            "readings.__setitem__",
            "readings.__delitem__",
            "readings.pop",
            "readings.keys",
            "readings.__len__",
            "readings.__iter__",
        ),
    )


def test_driver_stats_wait_for_no_step():
    driver, guard = make_driver()
    with driver.lock:
        in_thread(driver.stats)
    assert guard.held["watch"] == 0
    driver.stats()
    assert guard.held["watch"] == 1
    in_thread(driver.stats)
    assert guard.held["watch"] == 2, "the first one gave the lock back"


class WatchedSocket:
    """A socket whose sends need the lock of its channel."""

    def __init__(self, channel: Any) -> None:
        self._socket, self._channel = channel.connection, channel
        self.sent: list[bool] = []
        channel.connection, channel.sending = self, OwnedLock()

    def send(self, data: Any) -> int:
        self.sent.append(self._channel.sending._is_owned())
        return self._socket.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@for_each("name", ["send", "send_frame", "try_send"])
def test_channel_makes_and_sends_a_frame_in_its_turn(name):
    ours, theirs = map(Channel, channel_pair())
    watched, made = WatchedSocket(ours), []

    def make() -> bytes:
        made.append(ours.sending._is_owned())
        return encode_message(CoreStats(), len(made))

    frames = [make() for _ in range(2)]
    for _ in range(2):
        if name == "send_frame":
            ours.send_frame(frames.pop(0))
        else:
            assert getattr(ours, name)(make) in (None, True)
    assert watched.sent == [True, True]
    assert name == "send_frame" or made[2:] == [True, True]
    expected = [1, 2] if name == "send_frame" else [3, 4]
    assert [decode_message(theirs.take() or b"")[0] for _ in range(2)] == expected
    for end in (ours, theirs):
        end.close()


@for_each("name", ["send", "send_frame", "try_send"])
def test_channel_is_free_after_a_send_that_failed(name):
    ours, theirs = map(Channel, channel_pair())
    theirs.close()
    call = getattr(ours, name)
    for _ in range(2):
        with pytest.raises(ChannelClosedError):
            in_thread(lambda: call(b"frame" if name == "send_frame" else lambda: b"frame"))
    ours.close()


def test_channel_try_send_waits_for_no_other_sender():
    ours, theirs = map(Channel, channel_pair())
    with ours.sending:
        assert not in_thread(lambda: ours.try_send(lambda: b"frame"))
    assert theirs.take() is None
    assert in_thread(lambda: ours.try_send(lambda: encode_message(CoreStats(), 1)))
    assert in_thread(lambda: ours.try_send(lambda: encode_message(CoreStats(), 2))), "the first gave the lock back"
    assert [decode_message(theirs.take() or b"")[0] for _ in range(2)] == [1, 2]
    for end in (ours, theirs):
        end.close()


class GuardedLine(Line):
    """A channel that knows who sends, and whether that thread may."""

    def __init__(self, script: list) -> None:
        super().__init__(script)
        self.guard: Guard | None = None
        self.owners: list[tuple[str, bool]] = []

    def send(self, make, *, is_owner: bool = True) -> None:
        assert self.guard is not None
        self.guard.see("channel.send")
        self.owners.append((threading.current_thread().name, is_owner))
        super().send(make, is_owner=is_owner)


def make_server(script: list) -> tuple[CoreServer, GuardedLine, Guard]:
    line = GuardedLine(script)
    server = CoreServer(line, own_pulse())  # type: ignore[arg-type]
    line.guard = guard = Guard(server, "holding", ("held", "flushed_at"))
    return server, line, guard


@pytest.mark.parametrize("held_seconds", [0.0, 1e12])
def test_core_server_holds_outputs_back_under_its_lock(monkeypatch, held_seconds):
    monkeypatch.setattr(core_process, "HELD_SECONDS", held_seconds)
    engine = make_engine(max_num_batched_tokens=8)
    assert isinstance(engine.core, EngineCore)
    server, line, guard = make_server([Submit((request(0, max_tokens=5),))])
    server.serve(engine.core)
    server.send(CoreStats())
    guard.assert_held("held.append", "held", "flushed_at", "channel.send")
    assert all(is_owner for _, is_owner in line.owners), "this thread reads"


def test_core_server_flushes_twice_from_the_pulse_thread(monkeypatch):
    """What is overdue goes, each message once, by a thread that does not read; a flush that is under way is not waited for."""
    monkeypatch.setattr(core_process, "LOOK_SECONDS", -1.0)
    server, line, guard = make_server([])
    for number in range(2):
        with server.holding:
            server.held.append(CoreOutputs())
            in_thread(server.flush_overdue)
            assert len(line.sent) == number, "another thread has the lock"
        in_thread(server.flush_overdue)
        in_thread(server.flush_overdue)
        assert len(line.sent) == number + 1
    guard.assert_held("held", "channel.send")
    assert [is_owner for _, is_owner in line.owners] == [False, False]
    assert [number for messages in line.sent for number, _ in messages] == [1, 2]


def test_core_server_is_free_after_a_flush_that_failed(monkeypatch):
    monkeypatch.setattr(core_process, "LOOK_SECONDS", -1.0)
    server, line, _ = make_server([])

    def fail(*_: object, **__: object) -> None:
        raise ChannelClosedError("gone")

    monkeypatch.setattr(line, "send", fail)
    for call in (server.flush_overdue, lambda: server.send(CoreStats()), server.flush_overdue):
        with server.holding:
            server.held.append(CoreOutputs())
        with pytest.raises(ChannelClosedError):
            in_thread(call)


def make_delta(token: int, finish_reason: str | None = None) -> CompletionDelta:
    return CompletionDelta("r", 0, "x", (token,), None, finish_reason, None)  # type: ignore[arg-type]


def test_mailbox_is_filled_and_emptied_under_its_lock():
    async def work() -> None:
        mailbox = Mailbox(1)
        guard = Guard(mailbox, "_lock", ("_num_unfinished", "_error"))
        buffer: Any = SimpleNamespace(add=mailbox.buffer.add, take=mailbox.buffer.take)
        guard.watch(buffer, "add", "take")
        mailbox.buffer = buffer
        for token, reason in ((1, None), (2, "stop")):
            in_thread(lambda token=token, reason=reason: mailbox.put(make_delta(token, reason)))
            mailbox.wake()
            deltas, is_last = await mailbox.take()
            assert (tokens_of(deltas), is_last) == ([token], reason is not None)
        in_thread(lambda: mailbox.fail(ValueError("why")))
        mailbox.wake()
        with pytest.raises(ValueError, match="why"):
            await mailbox.accepted()
        guard.assert_held("add", "take", "_num_unfinished", "_error")

    asyncio.run(asyncio.wait_for(work(), 20))


POSTED = ("_num_posted", "_is_idle", "_takes_requests", "_progressed_at", "_map", "_is_map_wanted", "_map_readers")


def make_thread(**options: Any) -> tuple[EngineThread, Guard]:
    engine = make_engine(**options)
    thread = EngineThread(engine)
    guard = Guard(thread, "_changed", ("_commands", *POSTED), free=("popleft", "__len__", "__iter__"))
    guard.watch(engine.core, "pulse")
    return thread, guard


async def read(mailbox: Mailbox) -> list[int]:
    tokens, is_last = [], False
    while not is_last:
        deltas, is_last = await mailbox.take()
        tokens += tokens_of(deltas)
    return tokens


def test_engine_thread_changes_shared_state_under_its_condition():
    async def work() -> None:
        thread, guard = make_thread()
        mailboxes = [Mailbox(1) for _ in range(3)]
        for number, mailbox in enumerate(mailboxes):
            thread.submit(thread.engine.prepare(f"prompt {number}", PARAMS), f"name {number}", mailbox)
        thread.abort("unknown")
        thread.health()
        thread.reset_prefix_cache()
        reader = MapReader()
        thread.ask_map(reader)
        thread.withdraw(mailboxes[2])
        for number, mailbox in enumerate(mailboxes[:2]):
            assert await read(mailbox) == solo(f"prompt {number}", PARAMS)[0]
        await reader.wait(10)
        assert thread.memory_map() is not None
        thread.drain()
        thread.stop()
        thread.join()
        guard.assert_held("_commands.append", *POSTED, "_map_readers.append", "pulse")

    asyncio.run(asyncio.wait_for(work(), 30))


def test_engine_thread_that_fails_changes_it_under_its_condition():
    async def work() -> None:
        thread, guard = make_thread()

        def fail(step: object) -> None:
            raise OSError("device lost")

        thread.engine.runner.on_step = fail  # type: ignore[attr-defined]
        mailbox = Mailbox(1)
        thread.submit(thread.engine.prepare("x", PARAMS), None, mailbox)
        with raises_code("engine.dead", EngineDeadError):
            await read(mailbox)
        thread.join()
        guard.assert_held("_takes_requests", "_commands", "_map_readers")

    asyncio.run(asyncio.wait_for(work(), 30))


def make_group() -> Any:
    """A RankGroup that no thread watches: nothing wakes a waiter but what it waits for."""
    group: Any = RankGroup.__new__(RankGroup)
    group.changed, group.death, group.refusal = threading.Condition(), None, None
    return group


def end_of(group: Any, future: Future) -> tuple[threading.Thread, list[object]]:
    """A thread that waits for a step, and what it gets."""
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(group.wait(future))
        except EngineDeadError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, found


def test_rank_group_gives_no_result_while_ranks_are_ended():
    """A step that a dying rank has let go of ends, too; until all are gone the condition says so."""
    group, done = make_group(), Future()
    done.set_result("what lay in the rooms")
    with group.changed:
        waiting, found = end_of(group, done)
        waiting.join(0.1)
        assert not found, "it waits for the thread that ends the ranks"
        group.death = "rank 2 was killed"
    waiting.join(10)
    assert "rank 2 was killed" in str(found[0])


@for_each("dies", [False, True])
def test_rank_group_wakes_who_waits_for_a_step(dies):
    group, step = make_group(), Future()
    waiting, found = end_of(group, step)
    waiting.join(0.1)
    assert not found
    if dies:
        with group.changed:
            group.death = "rank 2 was killed"
            group.changed.notify_all()
    else:
        step.set_result("tokens")
    waiting.join(10)
    assert ("rank 2 was killed" if dies else "tokens") in str(found[0])

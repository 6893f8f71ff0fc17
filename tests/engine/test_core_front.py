"""CoreProcess: what the front makes of its child's messages, in order; the child is a script, so that every race is one of its lines."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fakes import make_engine, own_pulse
from engine.test_core import request
from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.engine import core_process
from holdfast.engine.core_process import HEARTBEAT_SECONDS, CoreProcess
from holdfast.engine.messages import (
    Abort,
    CoreOutputs,
    CoreStats,
    Ending,
    Heartbeat,
    LoadingProgress,
    MapRequest,
    Message,
    Ready,
    Refused,
    SequenceOutput,
    StatsRequest,
    Submit,
    encode_message,
)
from holdfast.engine.pulse import CoreCounts
from holdfast.errors import EngineDeadError, QueueFullError
from holdfast.observability.preparing import Preparing

SILENT = object()
"""A wait that nothing comes in."""
FACTS = make_engine(max_queue=4).core.facts


class Child:
    """A child that says what the script says; a wait beyond its end would last for ever."""

    def __init__(self, script: list[Any]) -> None:
        self.script = deque(script)
        self.sent: list[Message] = []
        self.waited: list[float] = []
        self.pulse = own_pulse()
        self.process = SimpleNamespace(pid=1)
        self.channel = self
        self._number = 0
        self.num_kills = 0

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def take(self) -> bytes | None:
        if not self.script or self.script[0] is SILENT:
            return None
        self._number += 1
        return encode_message(self.script.popleft(), self._number)

    def wait(self, seconds: float) -> bool:
        assert self.script, "it waits for ever"
        self.waited.append(seconds)
        if self.script[0] is SILENT:
            self.script.popleft()
            return False
        return True

    def kill(self) -> str:
        self.num_kills += 1
        return "it was killed"

    def end(self) -> None: ...


@pytest.fixture
def connect(monkeypatch):
    def make(*script: Any, timeout: float = 1.0) -> tuple[CoreProcess, Child]:
        child = Child([Ready(FACTS)])
        monkeypatch.setattr(core_process, "Child", lambda *_: child)
        core = CoreProcess(EngineConfig(core_timeout=timeout), lambda done, total: None)
        child.sent.clear()
        child.waited.clear()
        child.script.extend(script)
        return core, child

    return make


def output(sequence_id: int, token: int, reason: str | None = None) -> SequenceOutput:
    return SequenceOutput(sequence_id, (token,), ending=None if reason is None else Ending(reason))  # type: ignore[arg-type]


def outputs(*own: SequenceOutput, **stats: Any) -> CoreOutputs:
    return CoreOutputs(own, CoreStats(**stats))


def tokens(found: CoreOutputs) -> list[tuple[int, ...]]:
    return [one.token_ids for one in found.outputs]


def test_front_steps_bring_outputs_in_order_each_once(connect):
    core, child = connect()
    core.submit([request(0), request(1)])
    core.submit([request(2)])
    assert child.sent == [Submit((request(0), request(1))), Submit((request(2),))]
    child.script += [
        outputs(output(0, 5), output(1, 6)),
        Heartbeat(0.0),
        outputs(output(0, 7, "stop")),
        outputs(output(1, 8, "length")),
        SILENT,
        outputs(output(2, 9, "stop")),
    ]
    assert [tokens(core.step()) for _ in range(4)] == [[(5,), (6,)], [(7,)], [(8,)], [(9,)]]
    assert core.step() == CoreOutputs((), CoreStats()), "no request waits"
    assert child.waited[-1] == HEARTBEAT_SECONDS


def test_front_does_not_wait_for_what_it_aborted(connect):
    """An output that was on its way when its sequence was aborted comes without a wait, before or after the others'."""
    core, child = connect()
    core.submit([request(0), request(1)])
    core.abort((1,))
    assert child.sent[-1] == Abort((1,))
    child.script += [outputs(output(1, 5)), outputs(output(0, 6, "stop"), output(1, 7))]
    assert tokens(core.step()) == [(5,)]
    assert tokens(core.step()) == [(6,), (7,)]
    child.script.append(outputs(output(1, 8), num_steps=3))
    assert tokens(core.step()) == [(8,)], "what is here already is heard"
    assert core.step() == CoreOutputs((), CoreStats(num_steps=3))


def test_front_watch_takes_no_older_stats_for_its_answer(connect):
    core, child = connect()
    child.script += [CoreStats(num_steps=1), CoreStats(num_steps=2), Heartbeat(0.0), outputs(output(0, 5), num_steps=3)]
    core.submit([request(0)])
    core.watch()
    assert child.sent[-1] == StatsRequest()
    assert core.stats().num_steps == 3
    child.script += [outputs(output(0, 6), num_steps=4), SILENT, CoreStats(num_steps=5)]
    core.watch()
    assert core.stats().num_steps == 5
    assert not child.script
    assert [tokens(core.step()) for _ in range(2)] == [[(5,)], [(6,)]], "what came meanwhile is kept, in order"


def test_front_refusals_end_their_sequences_alone(connect):
    core, child = connect()
    core.submit([request(0), request(1)])
    core.submit([request(2)])
    core.submit([request(3)])
    full = QueueFullError("value.empty", name="a")
    child.script += [Refused((0, 1), full), outputs(output(2, 5, "stop"), num_submitted=3), Refused((3,), full)]
    assert core.num_queued == 4
    first = core.step()
    assert [(one.sequence_id, one.ending.error) for one in first.outputs if one.ending] == [
        (0, "a must not be empty."),
        (1, "a must not be empty."),
    ]
    assert core.num_queued == 2
    assert tokens(core.step()) == [(5,)]
    assert core.num_queued == 1
    assert [one.sequence_id for one in core.step().outputs] == [3]
    assert core.num_queued == 0
    assert core.step().outputs == (), "all have ended"
    assert child.num_kills == 0


@pytest.mark.parametrize(
    ("reported", "counts", "num_queued", "num_running"),
    [
        pytest.param((0, 0), (0, 0, 0), 3, 0, id="it has seen none"),
        pytest.param((2, 1), (1, 0, 0), 3, 2, id="its counts are older than its message"),
        pytest.param((2, 1), (1, 0, 1), 2, 1, id="its counts are as old"),
        pytest.param((2, 1), (1, 2, 3), 2, 1, id="its counts are newer"),
        pytest.param((2, 1), (1, 0, 5), 0, 1, id="it has seen more than were sent"),
    ],
)
def test_front_counts_who_waits_once(connect, reported, counts, num_queued, num_running):
    """Three were sent: some are in the last message, some in the counts, some in neither."""
    core, child = connect()
    core.submit([request(0), request(1), request(2)])
    num_waiting, num_submitted = reported[0] and 1, reported[1]
    child.script.append(CoreStats(num_running=reported[0], num_waiting=num_waiting, num_submitted=num_submitted))
    core.watch()
    child.pulse.write_counts(CoreCounts(*counts, 0.5))
    assert core.num_queued == num_queued
    stats = core.stats()
    assert (stats.num_waiting, stats.num_running) == (num_queued, num_running)
    assert stats.kv_usage == (0.0 if counts[2] < num_submitted else 0.5)


def test_front_asks_an_idle_core_before_it_refuses(connect):
    core, child = connect()
    child.pulse.write_counts(CoreCounts(0, 4, 0, 0.0))
    child.script.append(CoreStats())
    with raises_code("request.queue_full", QueueFullError):
        core.submit([request(0)])
    assert child.sent == [StatsRequest()]
    child.pulse.write_counts(CoreCounts(0, 0, 0, 0.0))
    core.submit([request(number) for number in range(4)])
    child.sent.clear()
    with raises_code("request.queue_full", QueueFullError):
        core.submit([request(4)])
    assert child.sent == [], "one that runs answers when its step ends"
    child.pulse.write_counts(CoreCounts(4, 0, 4, 0.0))
    child.script.append(outputs(output(0, 5), num_submitted=4))
    core.submit([request(4)])
    assert core.num_queued == 1


def test_front_counts_silence_in_waits(connect):
    core, child = connect(timeout=1.1)
    core.submit([request(0)])
    child.script += [*[SILENT] * 4, Heartbeat(1.0), *[SILENT] * 4, outputs(output(0, 5))]
    assert tokens(core.step()) == [(5,)]
    child.waited.clear()
    child.script += [SILENT] * 9
    with pytest.raises(EngineDeadError, match=r"it was silent for 1\.1 seconds; it was killed"):
        core.step()
    assert child.waited == pytest.approx([*[HEARTBEAT_SECONDS] * 4, 0.1])
    for call in (core.step, core.watch, lambda: core.submit([request(1)]), core.ask_map):
        with pytest.raises(EngineDeadError, match="was silent"):
            call()
    assert child.num_kills == 1, "it dies once"


def test_front_hears_how_far_loading_is_in_order(monkeypatch):
    reported: list[object] = []
    preparing = Preparing("Compiling", 1, 2)
    steps: list[Any] = [LoadingProgress(1, 3), LoadingProgress(0, 0, preparing), LoadingProgress(2, 3)]
    child = Child([*steps, *[SILENT] * 9, Heartbeat(0.0), LoadingProgress(3, 3), Ready(FACTS)])
    monkeypatch.setattr(core_process, "Child", lambda *_: child)
    core = CoreProcess(
        EngineConfig(core_timeout=1.0), lambda done, total: reported.append((done, total)), reported.append
    )
    assert reported == [(1, 3), preparing, (2, 3), (3, 3)]
    assert len(child.waited) * HEARTBEAT_SECONDS > 2.0, "a start may be silent for longer"
    core.submit([request(0)])
    child.script += [SILENT] * 9
    with pytest.raises(EngineDeadError, match=r"1\.0 seconds"):
        core.step()


def test_front_keeps_a_map_until_it_is_taken(connect):
    core, child = connect()
    core.ask_map()
    assert child.sent == [MapRequest()]
    assert core.take_map() is None
    engine = make_engine()
    child.script += [engine.core.map(), CoreStats()]  # type: ignore[attr-defined]
    core.watch()
    taken = core.take_map()
    assert taken is not None
    assert taken.num_pages == engine.core.map().num_pages  # type: ignore[attr-defined]
    assert core.take_map() is None

"""CoreServer: what a child tells its front, and when: outputs of short steps travel together, none waits for a prompt."""

from collections import deque

import pytest

from engine.fakes import make_engine, own_pulse
from engine.test_core import request
from for_each import for_each
from holdfast.engine import core_process
from holdfast.engine.core import EngineCore
from holdfast.engine.core_process import CoreServer
from holdfast.engine.memory_map import CoreMap
from holdfast.engine.messages import (
    Abort,
    CoreOutputs,
    CoreStats,
    MapRequest,
    Message,
    Shutdown,
    StatsRequest,
    Submit,
    decode_message,
    encode_message,
)
from holdfast.request.wire import HEADER_BYTES, body_length


class Line:
    """A channel whose other side asks by script: a message, or None for a look that finds nothing."""

    def __init__(self, script: list[Message | None], num_waits: int = 1) -> None:
        """The core is ended when it has waited so many times behind the script."""
        self._script = deque(script)
        self._number = 0
        self._num_waits = num_waits
        self.sent: list[list[tuple[int, Message]]] = []
        """Messages with their numbers, by the sending that they were part of."""

    def take(self) -> bytes | None:
        message = self._script.popleft() if self._script else None
        if message is None:
            return None
        self._number += 1
        return encode_message(message, self._number)

    def wait(self, timeout: float | None = None) -> None:
        if not self._script:
            self._num_waits -= 1
            if not self._num_waits:
                self._script.append(Shutdown())

    def send(self, make, *, is_owner: bool = True) -> None:
        data, messages = make(), []
        while data:
            end = HEADER_BYTES + body_length(data)[1]
            messages.append(decode_message(data[:end]))
            data = data[end:]
        self.sent.append(messages)


def serve(script: list[Message | None]) -> Line:
    engine = make_engine(max_num_batched_tokens=8)
    assert isinstance(engine.core, EngineCore)
    line = Line(script)
    CoreServer(line, own_pulse()).serve(engine.core)  # type: ignore[arg-type]
    numbers = [number for messages in line.sent for number, _ in messages]
    assert numbers == list(range(1, len(numbers) + 1)), "every message once, in order"
    return line


def steps_by_sending(line: Line) -> list[int]:
    counts = [sum(isinstance(message, CoreOutputs) for _, message in messages) for messages in line.sent]
    return [count for count in counts if count]


def test_outputs_of_short_steps_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    assert steps_by_sending(serve([Submit((request(0, max_tokens=6),))])) == [6], "all of them with the last"


def test_outputs_of_long_steps_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 0.0)
    assert steps_by_sending(serve([Submit((request(0, max_tokens=6),))])) == [1] * 6


def test_core_server_holds_no_output_during_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    prompt = Submit((request(1, b"a prompt of several steps", max_tokens=1),))
    line = serve([Submit((request(0, max_tokens=9),)), None, None, None, prompt])
    assert steps_by_sending(line)[0] == 3, "those before the prompt came"
    assert sum(steps_by_sending(line)) >= 9


def test_core_server_flush_overdue_sends_only_overdue_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    line = Line([])
    server = CoreServer(line, own_pulse())  # type: ignore[arg-type]
    server.held.append(CoreOutputs())
    server.flush_overdue()
    assert steps_by_sending(line) == [1]
    server.held.append(CoreOutputs())
    server.flush_overdue()
    assert steps_by_sending(line) == [1], "it is young yet"


class WatchedLine(Line):
    """A channel at whose every look and sending the pulse must say how the core is."""

    def __init__(self, script: list[Message | None], num_waits: int) -> None:
        super().__init__(script, num_waits)
        self.pulse = own_pulse()
        self.core: EngineCore | None = None
        self.server: CoreServer | None = None
        self.num_looks = 0

    def look(self) -> None:
        assert self.core is not None
        assert self.pulse.counts() == self.core.counts
        assert self.pulse.look().step_seconds == 0.0, "no step runs"
        self.num_looks += 1

    def take(self) -> bytes | None:
        self.look()
        return super().take()

    def wait(self, timeout: float | None = None) -> None:
        self.look()
        assert self.server is not None
        assert not self.server.held, "nothing is held back while there is nothing to do"
        super().wait(timeout)


def test_core_server_tells_how_it_is_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are those of now whenever the front could look: between commands, before an answer, in a step and after it."""
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    assert isinstance(engine.core, EngineCore)
    script: list[Message | None] = [
        *(Submit((request(0, max_tokens=3),)), Submit((request(1, b"longer prompt", max_tokens=2), request(2)))),
        *(StatsRequest(), None, Abort((2,)), None, MapRequest(), *[None] * 9, Submit((request(3),)), Abort((3,))),
    ]
    line = WatchedLine(script, num_waits=3)
    line.core, line.server = engine.core, CoreServer(line, line.pulse)  # type: ignore[arg-type]
    in_step: list[int] = []

    def run(step: object) -> None:
        assert line.pulse.look().step_seconds > 0.0
        assert line.pulse.counts() == engine.core.counts  # type: ignore[attr-defined]
        in_step.append(line.pulse.counts().num_running)

    engine.runner.on_step = run  # type: ignore[attr-defined]
    line.server.serve(engine.core)
    assert engine.core.hang_ups is line.pulse.hang_ups
    assert max(in_step) == 2
    assert line.num_looks > 10
    messages = [message for sending in line.sent for _, message in sending]
    answers = [message for message in messages if isinstance(message, CoreStats)]
    assert [answer.num_submitted for answer in answers] == [3, 4], "once as an answer, and once when idle"
    assert (answers[0].num_waiting, answers[1].num_waiting, answers[1].num_running) == (3, 0, 0)
    assert sum(isinstance(message, CoreMap) for message in messages) == 1


@for_each(
    "last, num_sent",
    [
        ((StatsRequest(),), 1),
        ((StatsRequest(), MapRequest()), 1),
        ((MapRequest(), StatsRequest()), 1),
        ((MapRequest(),), 0),
    ],
)
def test_core_server_sends_stats_once(last: tuple[Message, ...], num_sent: int) -> None:
    engine = make_engine()
    assert isinstance(engine.core, EngineCore)
    line = WatchedLine([*last], num_waits=3)
    line.core, line.server = engine.core, CoreServer(line, line.pulse)  # type: ignore[arg-type]
    line.server.serve(engine.core)
    messages = [message for sending in line.sent for _, message in sending]
    assert sum(isinstance(message, CoreStats) for message in messages) == num_sent


def test_core_server_sends_an_end_of_any_sequence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    line = serve([Submit((request(0, max_tokens=6), request(1, max_tokens=3)))])
    assert steps_by_sending(line) == [3, 3]


@pytest.mark.parametrize(
    ("step_seconds", "expected"), [((0.001,) * 9, [3, 3, 3]), ((0.001, 0.001, 0.004, 0.001, 0.001, 0.001), [3, 3])]
)
def test_core_server_holds_short_steps_for_so_long(monkeypatch: pytest.MonkeyPatch, step_seconds, expected) -> None:
    """Steps are short each, and together no longer than HELD_SECONDS; a long one goes at once with those before it."""
    now = [100.0]
    monkeypatch.setattr(core_process.time, "monotonic", lambda: now[0])
    engine = make_engine(max_num_batched_tokens=8)
    assert isinstance(engine.core, EngineCore)
    line, seconds = Line([Submit((request(0, max_tokens=len(step_seconds)),))]), iter(step_seconds)
    server = CoreServer(line, own_pulse())  # type: ignore[arg-type]
    server.flushed_at = now[0]

    def run(step: object) -> None:
        now[0] += next(seconds)

    engine.runner.on_step = run  # type: ignore[attr-defined]
    server.serve(engine.core)
    assert steps_by_sending(line) == expected


def test_core_server_sends_a_long_step_at_once_after_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pulse thread has just sent what was held; the step was long all the same."""
    now = [100.0]
    monkeypatch.setattr(core_process.time, "monotonic", lambda: now[0])
    engine = make_engine(max_num_batched_tokens=8)
    assert isinstance(engine.core, EngineCore)
    line, num_steps = Line([Submit((request(0, max_tokens=4),))]), [0]
    server = CoreServer(line, own_pulse())  # type: ignore[arg-type]
    server.flushed_at = now[0]

    def run(step: object) -> None:
        num_steps[0] += 1
        if num_steps[0] == 2:
            now[0] += 1.0
            server.flush_overdue()

    engine.runner.on_step = run  # type: ignore[attr-defined]
    server.serve(engine.core)
    assert steps_by_sending(line) == [1, 1, 2]


def test_core_server_holds_nothing_back_when_all_have_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that stops because its clients are gone ends nothing that the front waits for."""
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    engine = make_engine(max_num_batched_tokens=8, run_ahead=0)
    assert isinstance(engine.core, EngineCore)
    core, num_steps = engine.core, [0]
    line = WatchedLine([Submit((request(0, max_tokens=9),))], num_waits=1)
    line.core, line.server = core, CoreServer(line, line.pulse)  # type: ignore[arg-type]

    def run(step: object) -> None:
        num_steps[0] += 1
        if num_steps[0] == 3:
            line.pulse.hang_ups.add((0,))
            core.check_needed()

    engine.runner.on_step = run  # type: ignore[attr-defined]
    line.server.serve(core)
    assert num_steps == [3]
    assert steps_by_sending(line)[0] >= 2

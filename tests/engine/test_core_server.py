"""CoreServer: what a child tells its front, and when: outputs of short steps travel together, none waits for a prompt."""

from collections import deque

import pytest

from engine.fakes import make_engine, own_pulse
from engine.test_core import request
from holdfast.engine import core_process
from holdfast.engine.core import EngineCore
from holdfast.engine.core_process import CoreServer
from holdfast.engine.messages import CoreOutputs, Message, Shutdown, Submit, decode_message, encode_message
from holdfast.request.wire import HEADER_BYTES, body_length


class Line:
    """A channel whose other side asks by script: a message, or None for a look that finds nothing."""

    def __init__(self, script: list[Message | None]) -> None:
        self._script = deque(script)
        self._number = 0
        self.sent: list[list[tuple[int, Message]]] = []
        """Messages with their numbers, by the sending that they were part of."""

    def take(self) -> bytes | None:
        message = self._script.popleft() if self._script else None
        if message is None:
            return None
        self._number += 1
        return encode_message(message, self._number)

    def wait(self, timeout: float | None = None) -> None:
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


def test_no_output_waits_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    prompt = Submit((request(1, b"a prompt of several steps", max_tokens=1),))
    line = serve([Submit((request(0, max_tokens=9),)), None, None, None, prompt])
    assert steps_by_sending(line)[0] == 3, "those before the prompt came"
    assert sum(steps_by_sending(line)) >= 9


def test_what_is_overdue_goes_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 1e12)
    line = Line([])
    server = CoreServer(line, own_pulse())  # type: ignore[arg-type]
    server._held.append(CoreOutputs())
    server.flush_overdue()
    assert steps_by_sending(line) == [1]
    server._held.append(CoreOutputs())
    server.flush_overdue()
    assert steps_by_sending(line) == [1], "it is young yet"

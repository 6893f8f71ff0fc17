"""Streams: what fails when an answer has begun is its last event; prompts of one request end together; slow readers lose nothing."""

import asyncio
import json
import selectors
import time
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from engine.fakes import Gate, assert_at_rest
from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.server import streams
from holdfast.server.app import make_app
from holdfast.server.fields import OWN_VARIABLES
from holdfast.server.service import Service
from holdfast.server.streams import EventStream, gathered, merged
from server.served import NAMES, app_client, make_served_engine, said, user

BODIES = {
    "/v1/chat/completions": {"messages": user("Hello"), "max_tokens": 60},
    "/v1/completions": {"prompt": ["Hello", "you"], "max_tokens": 60},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 60},
}


@for_each("path", BODIES)
def test_stream_dead_engine_ends_with_an_error_event(path):
    engine = make_served_engine()
    num_steps = 0

    def fail(step) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.05)
        if num_steps == 5:
            raise RuntimeError("secret of /home/user at 0xdeadbeef")

    engine.runner.on_step = fail
    with app_client(engine) as client:
        answer = client.post(path, json={**BODIES[path], "stream": True})
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("engine_dead", "service_unavailable_error")
        assert "secret" not in answer.text
        assert ("response.failed" in answer.text) == (path == "/v1/responses")
        again = client.post(path, json=BODIES[path])
        assert again.status_code == 503
        assert again.json()["error"]["code"] == "engine_dead"


def test_completion_with_more_prompts_than_the_queue_is_refused():
    engine = make_served_engine(max_queue=3, max_num_seqs=1)
    with app_client(engine) as client:
        for stream in (False, True):
            answer = client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        answer = client.post("/v1/completions", json={"prompt": "a", "n": 4})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert_at_rest(engine)


def test_stream_slow_reader_gets_the_whole_answer():
    """Between two writes the model goes on; what it said meanwhile comes in one piece."""
    text = "0123456789" * 12

    async def main() -> tuple[list[bytes], int]:
        engine = make_served_engine()
        gate, pieces, llm = Gate(engine), [], AsyncLLM.from_engine(engine)
        body = json.dumps({"messages": user(said(text)), "stream": True}).encode()
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict:
            return received.pop() if received else await asyncio.Event().wait()

        async def send(message: dict) -> None:
            pieces.append(message.get("body", b""))
            gate.open(40)
            await asyncio.sleep(0.1)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        gate.open(2)
        await asyncio.wait_for(make_app(Service(llm, NAMES))(scope, receive, send), 30)
        gate.open()
        llm.shutdown()
        return pieces, len(text)

    pieces, num_tokens = asyncio.run(main())
    events = b"".join(pieces).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert len(pieces) < num_tokens / 4


def test_merged_streams_begin_and_end_together():
    closed = []

    async def stream(name: str, fails: bool):
        try:
            yield name
            if fails:
                raise ValueError(name)
            while True:
                await asyncio.sleep(0)
                yield name
        finally:
            closed.append(name)

    found = []

    async def take_all(streams: list) -> None:
        async for piece in merged(streams):
            found.append(piece)

    async def read() -> list[str]:
        streams = [stream("a", False), stream("b", True), stream("c", False)]
        with pytest.raises(ValueError, match="b"):
            await take_all(streams)
        return [*closed]  # the end of the loop would close the others

    assert sorted(asyncio.run(read())) == ["a", "b", "c"]
    assert {(0, "a"), (1, "b"), (2, "c")} <= set(found)


@for_each("path", ["/v1/chat/completions", "/tokenize"])
def test_template_gets_only_its_own_options(client, path):
    """What chat_template_kwargs may set are variables of the template, and none that say how it is rendered."""
    for name in (*sorted(OWN_VARIABLES), "bos_token", "Upper", "a b"):
        answer = client.post(path, json={"messages": user("x"), "chat_template_kwargs": {name: True}})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"].startswith("chat_template_kwargs"), name
    reported = {"enable_thinking": False, "reasoning_effort": "low", "budget": 3}
    assert client.post(path, json={"messages": user(said("x")), "chat_template_kwargs": reported}).status_code == 200
    for value in ([1], {}, {"b": 1}, None, 1.5):
        answer = client.post(path, json={"messages": user("x"), "chat_template_kwargs": {"a": value}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs.a")


def test_gathered_works_end_together():
    ended = []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(0.01 if name == "b" else 30)
            raise ValueError(name)
        except asyncio.CancelledError:
            ended.append(name)
            raise

    async def main() -> None:
        with pytest.raises(ValueError, match="b"):
            await gathered([work("a"), work("b"), work("c")])
        assert ended == ["a", "c"]

    asyncio.run(main())


class VirtualSelector:
    """Moves the clock of a loop in place of waiting."""

    def __init__(self, selector) -> None:
        self._selector, self.now = selector, 0.0

    def select(self, timeout=None):
        found = self._selector.select(0)
        self.now += 0.0 if found or timeout is None else timeout
        return found

    def __getattr__(self, name):
        return getattr(self._selector, name)


def test_event_stream_pings_only_after_silence(monkeypatch):
    """Each piece, and each ping, begins the wait anew."""
    clock = VirtualSelector(selectors.DefaultSelector())
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Pinged(EventStream):
        ping = b"ping"

    async def pieces():
        for seconds in (0, 4, 8, 25, 1):
            await asyncio.sleep(seconds)
            yield b"piece"

    reported = []

    async def send(message) -> None:
        if message.get("body"):
            reported.append((round(clock.now), message["body"]))

    async def main() -> None:
        request = Request({"type": "http", "method": "GET", "path": "/v1/messages", "headers": []})
        await Pinged(request, pieces())({}, asyncio.Event().wait, send)

    loop.run_until_complete(main())
    loop.close()
    assert reported == [
        *((0, b"piece"), (4, b"piece"), (12, b"piece")),
        *((22, b"ping"), (32, b"ping"), (37, b"piece"), (38, b"piece")),
    ]


def test_stream_of_a_client_that_goes_is_closed():
    """Also while a piece waits to be sent; what the pieces hold is let go by then."""
    closed = []

    async def pieces():
        try:
            while True:
                yield b"piece"
        finally:
            closed.append(True)

    async def main() -> None:
        sending = asyncio.Event()

        async def receive() -> dict:
            await sending.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            if message.get("body"):
                sending.set()
                await asyncio.Event().wait()

        request = Request({"type": "http", "method": "GET", "path": "/", "headers": []})
        stream = EventStream(request, pieces())
        await asyncio.wait_for(stream({}, receive, send), 10)
        assert closed == [True]

    asyncio.run(main())

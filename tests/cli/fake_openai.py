"""A server that speaks OpenAI's API in a few lines, as well or as badly as the requested model's name says."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

KEY = "sk-right"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class FakeServer:
    """Where it is, and what it was requested."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    num_now: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = {
                line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head.split("\r\n")[1:]
            }
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._reply(head.split(" ", 2), headers, json.loads(raw) if raw else {}, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_now -= 1
            writer.close()

    async def _reply(
        self, words: list[str], headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if words[1].endswith("/v1/models"):
            writer.write(_json(200, {"data": [{"id": "good"}]}))
            return
        self.bodies.append(body)
        model = body["model"]
        if model == "keyed" and headers.get("authorization") != f"Bearer {KEY}":
            writer.write(_json(401, {"error": {"message": "wrong key"}}))
        elif model == "plain" and "ignore_eos" in body:
            writer.write(_json(422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"}))
        elif model == "busy" and body["max_tokens"] > 2:
            writer.write(_json(429, {"error": {"message": "the queue is full"}}))
        elif model == "whole":
            writer.write(_json(200, {"choices": []}))
        elif model == "garbage":
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif model != "silent":
            await _stream(model, body, words[1], writer)


async def _stream(model: str, body: dict[str, Any], path: str, writer: asyncio.StreamWriter) -> None:
    """Chunks that do not care where events begin."""
    is_chat = path.endswith("chat/completions")
    text = body["messages"][-1]["content"] if is_chat else body["prompt"]
    out = bytearray()
    for place in range(body["max_tokens"]):
        choice = {"delta": {"content": f"w{place} "}} if is_chat else {"text": f"w{place} "}
        out += _event({"choices": [{"index": 0, **choice, "finish_reason": None}]})
        if model == "failing" and body["max_tokens"] > 2 and place == 1:
            out += _event({"error": {"message": "it broke"}}) + b"data: [DONE]\n\n"
            break
    out += _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if model != "uncounted":
        usage = {"prompt_tokens": 7 + 2 * len(text.split()), "completion_tokens": body["max_tokens"]}
        out += _event({"choices": [], "usage": usage})
    out += b"" if model == "doneless" else b"data: [DONE]\n\n"
    writer.write(SSE)
    size = 37
    pieces = [bytes(out[begin : begin + size]) for begin in range(0, len(out), size)]
    if model == "cut" and body["max_tokens"] > 2:
        pieces = pieces[:3]
    for piece in pieces:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await asyncio.sleep(0)
    if not (model == "cut" and body["max_tokens"] > 2):
        writer.write(b"0\r\n\r\n")


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _json(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """In a thread of its own."""
    fake, is_ready = FakeServer(), threading.Event()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        end = asyncio.Event()
        ends.append((asyncio.get_running_loop(), end))
        server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_ready.set()
        await end.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    try:
        yield fake
    finally:
        loop, end = ends[0]
        loop.call_soon_threadsafe(end.set)
        thread.join(10)

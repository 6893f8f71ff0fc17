"""An HTTP client for load tests: one streamed answer per connection, with the time of each event; no torch.

A connection costs a protocol and a future, and parses its bytes once on arrival, so one process holds thousands.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from holdfast.errors import ConfigError

MAX_HEAD_BYTES = 2**16
MAX_BODY_BYTES = 2**24
"""Size limit of a whole answer, and of one event."""
MAX_MESSAGE_CHARS = 200
CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Url:
    """A server's address and API key."""

    host: str
    port: int
    path: str
    """Path before /v1, without a final slash."""
    is_secure: bool
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, text: str, api_key: str | None = None) -> "Url":
        """Parse http://host:port, with or without /v1."""
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
            raise ConfigError("bench.bad_url", value=text)
        if not text.isascii() or not text.strip().isprintable() or " " in text.strip():
            raise ConfigError("bench.bad_url", value=text)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
            raise ConfigError("bench.bad_api_key")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_secure else 80), path, is_secure, api_key)

    @property
    def host_port(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.host_port}{self.path}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Encode a whole request."""
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self.host_port}",
            "Connection: close",
            "Accept: text/event-stream, application/json",
            "User-Agent: holdfast-bench",
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join((*lines, "", "")).encode("ascii") + body


class BadAnswerError(Exception):
    """A malformed answer; its message is a kind of error."""


class AnswerReader:
    """Parses an HTTP/1.1 answer from pieces of any size; holds no socket."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = bytearray()
        self._left_bytes: int | None = None
        """Bytes left of a chunk or of the body; None if the connection ends it."""
        self._is_chunked = False
        self._is_between = True
        """True if a chunk size comes next."""

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in these bytes."""
        self._buffer += data
        if self.status is None and not self._read_head():
            return b""
        if self._is_chunked:
            return self._read_chunks()
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._left_bytes is not None:
            body = body[: self._left_bytes]
            self._left_bytes -= len(body)
            self.is_complete = not self._left_bytes
        return body

    def end(self) -> None:
        """Handle the end of the connection."""
        if self.status is None:
            raise BadAnswerError("closed without an answer")
        if (self._is_chunked or self._left_bytes) and not self.is_complete:
            raise BadAnswerError("closed before the end")
        self.is_complete = True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadAnswerError("headers without an end")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isdecimal() and len(words[1]) == 3):
            raise BadAnswerError("not an HTTP answer")
        if words[1] == "100":
            return self._read_head()
        self.status = int(words[1])
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        if not self._is_chunked and length.isdecimal() and len(length) < 16:
            self._left_bytes = int(length)
            self.is_complete = not self._left_bytes
        return True

    def _read_chunks(self) -> bytes:
        found: list[bytes] = []
        while not self.is_complete:
            if self._is_between:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    if len(self._buffer) > MAX_HEAD_BYTES:
                        raise BadAnswerError("a chunk without a size")
                    break
                self._left_bytes = _chunk_size(bytes(self._buffer[:end]))
                del self._buffer[: end + 2]
                self._is_between = False
                self.is_complete = self._left_bytes == 0
                continue
            left = self._left_bytes or 0
            if len(self._buffer) < left + 2:
                break
            found.append(bytes(self._buffer[:left]))
            del self._buffer[: left + 2]
            self._is_between = True
        return b"".join(found)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16) if digits.isalnum() else -1
    except ValueError:
        size = -1
    if not 0 <= size <= MAX_BODY_BYTES:
        raise BadAnswerError("a chunk without a size")
    return size


@dataclass(slots=True)
class Reply:
    """The result of one request. Times are seconds of one clock."""

    start: float
    end: float = 0.0
    texts: list[float] = field(default_factory=list)
    """Arrival time of each event with text."""
    num_input_tokens: int | None = None
    """The server's count; None if it sends none."""
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The kind of error."""
    message: str = ""
    """The server's message."""

    def fail(self, kind: str, message: str = "") -> None:
        if self.error is None:
            self.error, self.message = kind, " ".join(message.split())[:MAX_MESSAGE_CHARS]


class Exchange(asyncio.Protocol):
    """One request and its reply."""

    def __init__(
        self, request: bytes, reply: Reply, clock: Callable[[], float], abort_after: int | None = None
    ) -> None:
        self.reply = reply
        self._abort_after = abort_after
        self.body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._clock = request, clock
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a TCP connection is read and written"
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        now = self._clock()
        try:
            self.body += self._reader.feed(data)
            if self._is_stream:
                self._read_events(now)
            if len(self.body) > MAX_BODY_BYTES:
                raise BadAnswerError("an answer without an end")
        except BadAnswerError as bad:
            self.reply.fail(str(bad))
            self.finish()
            return
        if self._reader.is_complete:
            self.finish()
        elif self._abort_after is not None and len(self.reply.texts) >= self._abort_after and not self.done.done():
            self.reply.fail("left")
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        try:
            self._reader.end()
        except BadAnswerError as bad:
            self.reply.fail(str(bad))
        self.finish()

    def finish(self) -> None:
        """Stop reading and close the connection."""
        if self.done.done():
            return
        self.reply.end = self._clock()
        if self._reader.status is not None and self._reader.status != 200:
            self.reply.fail(f"HTTP {self._reader.status}", _message(bytes(self.body)))
        elif self._is_stream and not self._has_ended and self.reply.finish_reason is None:
            # transformers' server sends a finish_reason and never [DONE].
            self.reply.fail("a stream without an end")
        self.done.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    @property
    def status(self) -> int | None:
        return self._reader.status

    @property
    def _is_stream(self) -> bool:
        kind = self._reader.headers.get("content-type", "")
        return self._reader.status == 200 and kind.startswith("text/event-stream")

    def _read_events(self, now: float) -> None:
        end = self.body.rfind(b"\n")
        if end < 0:
            return
        lines = bytes(self.body[:end]).split(b"\n")
        del self.body[: end + 1]
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            self.finish()
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BadAnswerError("an event that is not JSON") from None
        if not isinstance(event, dict):
            raise BadAnswerError("an event that is not an object")
        if event.get("error"):
            self.reply.fail("an error in the stream", _message(data))
        take_event(self.reply, event, now)


def take_event(reply: Reply, event: Mapping[str, Any], now: float) -> None:
    """Read text, usage and finish reason from an event of chat completions or completions."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls")):
            reply.texts.append(now)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    usage = event.get("usage")
    if isinstance(usage, dict):
        for name, key in (("num_input_tokens", "prompt_tokens"), ("num_output_tokens", "completion_tokens")):
            if isinstance(usage.get(key), int):
                setattr(reply, name, usage[key])


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of the body."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:MAX_MESSAGE_CHARS].decode("utf-8", "replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


async def ask(
    url: Url,
    path: str,
    body: Mapping[str, object] | None,
    timeout_seconds: float,
    *,
    start: float | None = None,
    abort_after: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Reply, bytes]:
    """Send a request; return its reply, and the body if it is not a stream. Never raises for a server's fault.

    `start` is the due time, if earlier; `abort_after` disconnects after that many texts.
    """
    reply = Reply(clock() if start is None else start)
    data = b"" if body is None else json.dumps(body).encode()
    request = url.request("GET" if body is None else "POST", path, data)
    loop = asyncio.get_running_loop()
    secure = ssl.create_default_context() if url.is_secure else None
    exchange: Exchange | None = None
    try:
        async with asyncio.timeout(min(CONNECT_SECONDS, timeout_seconds)):
            _, exchange = await loop.create_connection(
                lambda: Exchange(request, reply, clock, abort_after), url.host, url.port, ssl=secure
            )
        async with asyncio.timeout(timeout_seconds):
            await exchange.done
    except TimeoutError:
        reply.fail("no connection in time" if exchange is None else "no end in time")
    except OSError as error:
        reply.fail("no connection", error.strerror or type(error).__name__)
    finally:
        if exchange is not None:
            exchange.finish()
    reply.end = reply.end or clock()
    return reply, b"" if exchange is None else bytes(exchange.body)

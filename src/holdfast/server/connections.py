"""GuardedProtocol: uvicorn's HTTP/1.1 connection with bounds on time, bytes and count; what is ambiguous is refused; no torch.

uvicorn by itself waits for ever for headers, bodies and readers. Here every connection is in one phase at a time, and the
server's sweep closes those that are overdue:

    waiting    for the first byte of a request         header_seconds at first, later keep_alive_seconds
    headers    until their last byte                   header_seconds
    body       until its last byte                     body_seconds between two pieces, ten times that in all
    answering  until the answer is written             no limit; but write_seconds without a byte being read
    lingering  after the last answer                   LINGER_SECONDS, in which what still comes is thrown away

**Lingering.** A socket that is closed while the other side still sends is reset, and an answer on its way (413, 401) is lost.
So the answer is followed by the end of our side, and a little of theirs is read before the socket is closed.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import Literal

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from holdfast.server.errors import INVALID_REQUEST, UNAVAILABLE, ApiError
from holdfast.server.service import ServerLimits

Phase = Literal["waiting", "headers", "body", "answering", "lingering"]
LINGER_SECONDS = 2.0
LINGER_BYTES = 2**20
PATIENCE = 10
"""A whole body, or a buffer that is never empty, may take as many times the limit on one pause."""
GRACE_SECONDS = 1.0
"""That the endpoint has for an answer of its own (408) before a slow body is cut."""
SURPLUS_CONNECTIONS = 256
"""Above the limit, that are told so; those beyond are dropped."""
SEND_BUFFER_BYTES = 2**18
"""That the system holds of an answer that nobody reads."""
BODY_OVERHEAD = 8
BODY_OVERHEAD_BYTES = 2**16
"""A chunked body may have as many bytes as this, and eight times its own: six are around a chunk of one byte."""


class GuardedConfig(uvicorn.Config):
    """uvicorn's settings, and the limits."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        super().__init__(
            app,
            http=GuardedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(limits.keep_alive_seconds),
        )
        self.limits = limits


class _RefusalError(Exception):
    """Raised among the parser's callbacks: the request is refused with these words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.error = ApiError(status, words, code="bad_http")


class _LingeringTransport:
    """A transport whose close() lingers where the other side has not said all."""

    def __init__(self, real: asyncio.Transport, protocol: "GuardedProtocol") -> None:
        self.real = real
        self._protocol = protocol
        self.write = real.write
        self.pause_reading = real.pause_reading
        self.resume_reading = real.resume_reading
        self.get_extra_info = real.get_extra_info

    def close(self) -> None:
        """Close at once where a whole request was read, else a little later."""
        self._protocol.part()

    def is_closing(self) -> bool:
        """Whether nothing more can be said."""
        return self._protocol.phase == "lingering" or self.real.is_closing()


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: GuardedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = config.limits
        self.phase: Phase = "waiting"
        self._is_first = True
        self._phase_at = self._read_at = self.loop.time()
        self._header_bytes = self._raw_bytes = self._body_bytes = 0
        self._has_body = False
        """Whether a body is still coming."""
        self._cycles: list[RequestResponseCycle] = []
        """Those that are not answered yet: one runs, others wait behind it."""
        self._stalled_at: float | None = None
        self._unsent_at: float | None = None
        self._unsent_bytes = 0

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or say that there are too many."""
        proxy = _LingeringTransport(transport, self)
        super().connection_made(proxy)  # type: ignore[arg-type]
        self.real = transport
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        surplus = len(self.connections) - self.limits.max_connections
        if surplus > SURPLUS_CONNECTIONS:
            transport.abort()
        elif surplus > 0:
            has = f"a connection was asked; {self.limits.max_connections} are open, and no more are taken; try again"
            self.refuse(ApiError(503, has, UNAVAILABLE, code="too_many_connections", headers={"Retry-After": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of it, also those in front of the last."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, with the bounds of its phase."""
        if self.phase == "lingering" or self.parser is None:
            self._raw_bytes += len(data)
            if self._raw_bytes > LINGER_BYTES:
                self.real.abort()
            return
        self._unset_keepalive_if_required()
        self._raw_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Whatever it would be upgraded to, it is answered in HTTP/1.1, and not asked again.
            self._has_body = False
            for cycle in self._cycles:
                cycle.keep_alive = False
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause.error if isinstance(cause, _RefusalError) else _malformed())
        else:
            self._check_overhead()

    def eof_received(self) -> None:
        """The other side is done: so are we."""

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter("headers")
        self._header_bytes = self._raw_bytes = self._body_bytes = 0
        if len(self._cycles) >= self.limits.max_pipelined:
            raise _RefusalError(400, "requests were sent ahead; too many wait for their answers; wait for some")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_url_bytes:
            raise _RefusalError(
                414, f"an address was asked; it is longer than {self.limits.max_url_bytes} bytes; shorten it"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self.limits.max_header_bytes or len(self.headers) >= self.limits.max_headers:
            self._refuse_headers()
        if self.phase == "body":
            return  # behind a chunked body: what was decided before it stays decided
        super().on_header(name, value)
        lowered = self.headers[-1][0]
        if lowered == b"transfer-encoding" and value.lower().strip() != b"chunked":
            raise _RefusalError(
                400, "a body was announced; its Transfer-Encoding is not chunked alone; send it plainly"
            )

    def on_headers_complete(self) -> None:
        assert self.parser is not None, "it is the parser that calls"
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise _RefusalError(505, "a version of HTTP was asked; 1.0 and 1.1 are spoken; use one of them")
        previous = self.cycle
        self._enter("body")
        self._has_body = True
        self._raw_bytes = 0
        super().on_headers_complete()
        if self.cycle is not previous:
            self._cycles.append(self.cycle)
            _announce_close(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._read_at = self.loop.time()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_body = False
        if self._cycles:
            self._enter("answering")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is written: the next request's turn, or the wait for one."""
        if self._cycles:
            self._cycles.pop(0)
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the sweep does it
        if self._has_body and self.phase == "body" and not self._cycles:
            self.part()
        elif not self._cycles and self.phase == "answering":
            self._enter("waiting")
            self._is_first = False

    def send_400_response(self, msg: str) -> None:
        """uvicorn's words are not ours."""
        self.refuse(_malformed())

    # What the server calls.

    def is_overdue(self, now: float) -> bool:
        """Whether this connection has had its time; also notices readers that do not read."""
        if self._is_unread(now):
            return True
        seconds = now - self._phase_at
        match self.phase:
            case "waiting":
                return seconds > (self.limits.header_seconds if self._is_first else self.limits.keep_alive_seconds)
            case "headers":
                return not self._cycles and seconds > self.limits.header_seconds
            case "body":
                is_ours = self.flow.read_paused  # an endpoint that does not read yet
                pause = 0.0 if is_ours else now - max(self._read_at, self._phase_at)
                limit = self.limits.body_seconds
                return pause > limit + GRACE_SECONDS or seconds > PATIENCE * limit + GRACE_SECONDS
            case "lingering":
                return seconds > LINGER_SECONDS
            case "answering":
                return False

    def cut(self) -> None:
        """Close a connection that is overdue; one that has begun a request is told why."""
        if self.phase in ("headers", "body") and not self._is_unread(self.loop.time()):
            words = "a request was begun; the rest of it did not come in time; send it without pauses"
            self.refuse(ApiError(408, words, INVALID_REQUEST, code="timeout"))
        elif self.phase == "waiting":
            self.real.close()
        else:
            self.real.abort()

    def shutdown(self) -> None:
        """The server is ending: nothing more is taken; what runs may be answered."""
        for cycle in self._cycles:
            cycle.keep_alive = False
        if not self._cycles and self.phase != "lingering":
            self.real.close()

    def part(self) -> None:
        """Close; where more of a request is coming, after our side's end is known to the other one."""
        if self.phase == "lingering" or self.real.is_closing():
            return
        if not self._has_body and self.phase != "headers":
            self.real.close()
            return
        self._enter("lingering")
        self._raw_bytes = 0
        self.flow.resume_reading()
        try:
            self.real.write_eof()
        except (OSError, NotImplementedError, RuntimeError):
            self.real.abort()

    def refuse(self, error: ApiError) -> None:
        """Answer outside of any endpoint, and close. Behind an answer that has begun there is no place for another."""
        self._has_body = True
        if self.real.is_closing() or any(cycle.response_started for cycle in self._cycles) or len(self._cycles) > 1:
            self.real.abort()
            return
        for cycle in self._cycles:  # its endpoint waits for the rest of a body
            cycle.disconnected = True
            cycle.message_event.set()
        self.real.write(raw_answer(error))
        self.part()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._phase_at = self._read_at = self.loop.time()

    def _check_overhead(self) -> None:
        if self.phase == "headers" and self._raw_bytes > self.limits.max_header_bytes:
            self.refuse(_large_headers(self.limits))
        # Chunks of a byte, or extensions of chunks without an end, cost far more than they carry.
        elif self.phase == "body" and self._raw_bytes > BODY_OVERHEAD * self._body_bytes + BODY_OVERHEAD_BYTES:
            words = "a body came in chunks; there is more around its bytes than bytes; send larger chunks"
            self.refuse(ApiError(400, words, code="bad_http"))

    def _refuse_headers(self) -> None:
        refusal = _RefusalError(431, "")
        refusal.error = _large_headers(self.limits)
        raise refusal

    def _is_unread(self, now: float) -> bool:
        """Whether what was written has been left unread for too long."""
        num_bytes = self.real.get_write_buffer_size()
        if num_bytes == 0:
            self._stalled_at = self._unsent_at = None
            self._unsent_bytes = 0
            return False
        if self._unsent_at is None or self._stalled_at is None:
            self._unsent_at = self._stalled_at = now
        elif num_bytes < self._unsent_bytes:
            self._stalled_at = now
        self._unsent_bytes = num_bytes
        limit = self.limits.write_seconds
        return now - self._stalled_at > limit or now - self._unsent_at > PATIENCE * limit


def _announce_close(cycle: RequestResponseCycle) -> None:
    """Add Connection: close to an answer that starts before its request has ended: the connection ends after it.

    Without the header a client sends its next request there, and that request fails.
    """
    write = cycle.send

    async def send(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            cycle.keep_alive = False
        await write(message)

    cycle.send = send


def raw_answer(error: ApiError) -> bytes:
    """An error as the bytes of a whole answer, after which the connection ends."""
    body = error.json_bytes()
    phrase = HTTPStatus(error.status).phrase
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def _malformed() -> ApiError:
    return ApiError(
        400, "a request was expected; what came is not HTTP/1.1 as it is written down; mend the client", code="bad_http"
    )


def _large_headers(limits: ServerLimits) -> ApiError:
    has = f"at most {limits.max_headers} headers and {limits.max_header_bytes} bytes of them are read; more came; send fewer"
    return ApiError(431, has, code="headers_too_large")

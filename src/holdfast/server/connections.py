"""GuardedProtocol: uvicorn's HTTP/1.1 connection with bounds on time, bytes and count; refuses ambiguous requests; no torch.

uvicorn waits forever for headers, bodies and readers. Here every connection is in one phase, and the server's sweep closes
those that are overdue:

    waiting    for the first byte of a request         header_seconds at first, later keep_alive_seconds
    headers    until their last byte                   header_seconds
    body       until its last byte                     body_seconds between two pieces, ten times that in all
    answering  until the answer is written             no limit, but write_seconds without a byte being read
    lingering  after the last answer                   LINGER_SECONDS, in which input is discarded

**Lingering.** Closing a socket while the client still sends resets it, and the client loses the answer (413, 401). So the
server shuts down its own side first, and reads a little more before it closes the socket.
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

from holdfast.server.errors import ApiError
from holdfast.server.service import ServerLimits

Phase = Literal["waiting", "headers", "body", "answering", "lingering"]
LINGER_SECONDS = 2.0
LINGER_BYTES = 2**20
PATIENCE = 10
"""Time limit of a whole body or a never-empty buffer, as a multiple of the limit on one pause."""
GRACE_SECONDS = 1.0
"""Time for the endpoint's own answer (408) before a slow body is cut."""
SURPLUS_CONNECTIONS = 256
"""Connections above the limit that get an answer; those beyond are dropped."""
SEND_BUFFER_BYTES = 2**18
"""Kernel buffer for an unread answer."""
BODY_OVERHEAD = 8
BODY_OVERHEAD_BYTES = 2**16
"""A chunked body takes at most this plus eight times its size on the wire. A one-byte chunk has six extra bytes."""


class GuardedConfig(uvicorn.Config):
    """uvicorn's settings with our limits."""

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


class _LingeringTransport:
    """A transport whose close() lingers if the client has not sent its whole request."""

    def __init__(self, real: asyncio.Transport, protocol: "GuardedProtocol") -> None:
        self.real = real
        self._protocol = protocol
        self.write = real.write
        self.pause_reading = real.pause_reading
        self.resume_reading = real.resume_reading
        self.get_extra_info = real.get_extra_info

    def close(self) -> None:
        """Close at once after a whole request, else a little later."""
        self._protocol.part()

    def is_closing(self) -> bool:
        """Return True if nothing more can be written."""
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
        """True while a body is arriving."""
        self._cycles: list[RequestResponseCycle] = []
        """Unanswered requests: the first runs, the others wait."""
        self._stalled_at: float | None = None
        self._unsent_at: float | None = None
        self._unsent_bytes = 0

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it if there are too many."""
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
            limit = self.limits.max_connections
            self.refuse(ApiError("http.too_many_connections", headers={"Retry-After": "1"}, maximum=limit))

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect every pipelined request; uvicorn disconnects only the last."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse input within the bounds of its phase."""
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
            # Answer in HTTP/1.1 whatever the client wants to upgrade to, then close.
            self._has_body = False
            for cycle in self._cycles:
                cycle.keep_alive = False
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause if isinstance(cause, ApiError) else ApiError("http.malformed"))
        else:
            self._check_overhead()

    def eof_received(self) -> None:
        """Return None, so that asyncio closes the transport."""

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter("headers")
        self._header_bytes = self._raw_bytes = self._body_bytes = 0
        if len(self._cycles) >= self.limits.max_pipelined:
            raise ApiError("http.too_many_pipelined", maximum=self.limits.max_pipelined)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_url_bytes:
            raise ApiError("http.url_too_long", maximum=self.limits.max_url_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self.limits.max_header_bytes or len(self.headers) >= self.limits.max_headers:
            raise _large_headers(self.limits)
        if self.phase == "body":
            return  # trailers of a chunked body do not change what the headers decided
        super().on_header(name, value)
        lowered = self.headers[-1][0]
        if lowered == b"transfer-encoding" and value.lower().strip() != b"chunked":
            raise ApiError("http.transfer_encoding")

    def on_headers_complete(self) -> None:
        assert self.parser is not None, "the parser calls this"
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise ApiError("http.version_not_supported")
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
        """Start the next pipelined request, or wait for one."""
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
        """Send our error body, not uvicorn's."""
        self.refuse(ApiError("http.malformed"))

    # Methods for the server.

    def is_overdue(self, now: float) -> bool:
        """Return True if this connection exceeded its time limit, or its client does not read."""
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
        """Close an overdue connection; if it has begun a request, answer with 408."""
        if self.phase in ("headers", "body") and not self._is_unread(self.loop.time()):
            self.refuse(ApiError("http.request_timeout"))
        elif self.phase == "waiting":
            self.real.close()
        else:
            self.real.abort()

    def shutdown(self) -> None:
        """Take no more requests; those in progress may be answered."""
        for cycle in self._cycles:
            cycle.keep_alive = False
        if not self._cycles and self.phase != "lingering":
            self.real.close()

    def part(self) -> None:
        """Close; if more of a request is arriving, shut down our side first and linger."""
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
        except OSError:  # ENOTCONN: the client has reset the connection
            self.real.abort()

    def refuse(self, error: ApiError) -> None:
        """Send an error without an endpoint, unless an answer has begun; then close."""
        self._has_body = True
        if self.real.is_closing() or any(cycle.response_started for cycle in self._cycles) or len(self._cycles) > 1:
            self.real.abort()
            return
        for cycle in self._cycles:  # the endpoint waits for the rest of a body
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
        # One-byte chunks and long chunk extensions cost far more than their data.
        elif self.phase == "body" and self._raw_bytes > BODY_OVERHEAD * self._body_bytes + BODY_OVERHEAD_BYTES:
            self.refuse(ApiError("http.chunk_overhead"))

    def _is_unread(self, now: float) -> bool:
        """Return True if the client left written bytes unread for too long."""
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
    """Add Connection: close to an answer that starts before its request ends; the connection closes after it.

    Without the header, the client reuses the connection and its next request fails.
    """
    write = cycle.send

    async def send(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            cycle.keep_alive = False
        await write(message)

    cycle.send = send


def raw_answer(error: ApiError) -> bytes:
    """Return the bytes of a whole error answer with Connection: close."""
    body = error.to_json()
    phrase = HTTPStatus(error.status).phrase
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def _large_headers(limits: ServerLimits) -> ApiError:
    return ApiError("http.headers_too_large", max_headers=limits.max_headers, maximum=limits.max_header_bytes)

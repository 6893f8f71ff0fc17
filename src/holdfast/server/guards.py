"""Guards in front of every endpoint, as ASGI middleware: request id and log, Host and Origin, API key, drain; no torch.

All of them decide on `scope["path"]` and headers as they came, and never on an address that was put together from them.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import shown
from holdfast.observability.log import get_logger
from holdfast.server import page
from holdfast.server.dialects import dialect_of, error_body, error_piece
from holdfast.server.errors import (
    DRAINING_MESSAGE,
    FORBIDDEN,
    UNAUTHENTICATED,
    UNAVAILABLE,
    ApiError,
    from_exception,
    is_our_fault,
)
from holdfast.server.keys import Keys
from holdfast.server.logs import RECORD, RequestLog, RequestRecord, cleaned_request_id
from holdfast.server.service import Service
from holdfast.server.traces import Traces

PUBLIC_PATHS = frozenset({"/health", "/ready"}) | page.PUBLIC_PATHS
"""Answered without a key: whether the server lives, and the page, whose own calls need one. All else is closed."""
OPEN_WHILE_DRAINING = frozenset({"/health", "/ready", "/metrics"})
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}))(?::([0-9]{1,5}))?")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BEARER = b"bearer "
TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STREAMS = (b"text/event-stream", b"application/x-ndjson")
CUT = ApiError(
    503, "an answer was being written; the server ended before it was complete; ask again", UNAVAILABLE, code="draining"
)
_log = get_logger("holdfast.server")


class RecordGuard:
    """Outermost: gives a request its id and record, says the id in the answer, logs a line, and holds every exception."""

    def __init__(self, app: ASGIApp, service: Service, log: RequestLog | None, traces: Traces | None) -> None:
        self._app = app
        self._metrics = service.metrics
        self._log = log
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = RequestRecord(
            cleaned_request_id(header(scope, b"x-request-id")),
            scope["method"][:16],
            scope["path"],
            client[0] if client else None,
            wants_text=self._log is not None and self._log.wants_text,
        )
        scope[RECORD] = record
        named = [(b"x-request-id", record.request_id.encode())]
        if dialect_of(record.path) == "anthropic":
            named.append((b"request-id", record.request_id.encode()))
        is_over = is_stream = False

        async def tell(message: Message) -> None:
            nonlocal is_over, is_stream
            if message["type"] == "http.response.start":
                record.status = message["status"]
                is_stream = any(
                    name == b"content-type" and value.startswith(STREAMS) for name, value in message["headers"]
                )
                message["headers"] = [*message["headers"], *named]
            elif not message.get("more_body", False):
                is_over = True
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except asyncio.CancelledError:
            # The server ends, and this answer did not come to its end in time. Whoever reads it is told so.
            if not is_over:
                record.error = CUT.code
                await (end_early(tell, CUT, record, is_stream) if record.status else answer(tell, CUT, scope))
        except ClientDisconnect:
            record.error = "client_gone"
        except Exception as error:
            told = from_exception(error)
            if is_our_fault(error):
                _log.error("request %s failed: %s", record.request_id, type(error).__name__, exc_info=error)
            if not is_over:
                record.error = told.code or told.kind
                await (end_early(tell, told, record, is_stream) if record.status else answer(tell, told, scope))
        finally:
            record.is_cut = not is_over
            record.route = getattr(scope.get("route"), "path", record.route)
            self._metrics.response(record.status, record.route)
            if self._log is not None:
                self._log.write(record)
            if self._traces is not None:
                record.trace_parent = _trace_parent(scope)
                self._traces.write(record)


def _trace_parent(scope: Scope) -> str | None:
    given = header(scope, b"traceparent")
    return given.decode() if given is not None and TRACE_PARENT.fullmatch(given) else None


class HostGuard:
    """Refuses names that nobody gave this server: a page whose name was pointed at us cannot talk to us (DNS rebinding).

    Addresses are all taken: nobody can point those elsewhere. The same for the Origin of a request that may change something.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = (), allowed_origins: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in (*allowed_hosts, "localhost", socket.gethostname()))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            fault = self._fault(scope)
            if fault is not None:
                fault.headers["Connection"] = "close"
                await answer(send, fault, scope)
                return
        await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope.get("http_version") == "1.0" and scope["path"] in PUBLIC_PATHS:
            return None  # a load balancer's probe
        match = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            has = f"{len(hosts)} of them came" if len(hosts) != 1 else f"{shown(hosts[0])[1:]} is none"
            return ApiError(400, f"a Host header was expected; {has}; send one host name", code="bad_host")
        name = match[1].decode().lower()
        if not self._allows(name):
            return ApiError(
                421,
                f"host {shown(name)} was asked; this server does not go by that name; "
                "start it with --allowed-host and the name",
                FORBIDDEN,
                code="host_not_allowed",
            )
        origin = header(scope, b"origin")
        if origin is not None and scope["method"] not in SAFE_METHODS:
            asked = origin.decode("latin-1").lower().rstrip("/")
            is_own = asked.partition("://")[2] == hosts[0].decode().lower()
            if not is_own and asked not in self._origins and "*" not in self._origins:
                return ApiError(
                    403,
                    f"origin {shown(asked)} asked; pages from there are not allowed; start the server with "
                    "--allow-origin and the origin",
                    FORBIDDEN,
                    code="origin_not_allowed",
                )
        return None

    def _allows(self, name: str) -> bool:
        if "*" in self._hosts or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class KeyGuard:
    """Closed by default: whatever is not public needs a key, also what no endpoint answers."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self._keys) and scope["path"] not in PUBLIC_PATHS:
            index, has_any = self._find(scope)
            if index is None:
                await answer(send, _unauthenticated(has_any), scope)
                return
            record = scope.get(RECORD)
            if isinstance(record, RequestRecord):
                record.key_index = index
                record.cache_salt = self._keys.cache_salt(index)
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[int | None, bool]:
        """The key of `Authorization`, or of `x-api-key`; and whether either came. A header that comes twice is none."""
        found: list[int | None] = []
        tokens = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(tokens) == 1 and tokens[0][: len(BEARER)].lower() == BEARER:
            found.append(self._keys.find(tokens[0][len(BEARER) :].strip()))
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(keys) == 1:
            found.append(self._keys.find(keys[0].strip()))
        return next((index for index in found if index is not None), None), bool(tokens or keys)


def _unauthenticated(has_any: bool) -> ApiError:
    has = "this one does not open it" if has_any else "none came"
    return ApiError(
        401,
        f"an API key was expected; {has}; send Authorization: Bearer and the key, or x-api-key and the key",
        UNAUTHENTICATED,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class StateGuard:
    """New requests are refused while the server ends, and when its engine has died."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = self._service.state == "ready" or scope["type"] != "http" or scope["path"] in OPEN_WHILE_DRAINING
        if not is_open:
            error = ApiError(503, DRAINING_MESSAGE, UNAVAILABLE, code="draining", headers={"Retry-After": "5"})
            error.headers["Connection"] = "close"
            await answer(send, error, scope)
            return
        await self._app(scope, receive, send)


async def end_early(send: Send, error: ApiError, record: RequestRecord, is_stream: bool) -> None:
    """End an answer that has begun: a stream with one more piece; another body stays cut."""
    if is_stream:
        await send({"type": "http.response.body", "body": error_piece(error, record.path, record.request_id)})


async def answer(send: Send, error: ApiError, scope: Mapping[str, Any]) -> None:
    """Answer with an error."""
    record = scope.get(RECORD)
    request_id = ""
    if isinstance(record, RequestRecord):
        record.error = error.code or error.kind
        request_id = record.request_id
    body = error_body(error, scope["path"], request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name."""
    return next((value for key, value in scope["headers"] if key == name), None)

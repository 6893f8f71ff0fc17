"""ASGI middleware before every endpoint: request id and log, Host and Origin, API key, drain; no torch.

All decide by `scope["path"]` and raw headers, never by a URL that was assembled from them.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.observability.log import get_logger
from holdfast.server import page
from holdfast.server.errors import ApiError, dialect_of, from_exception, is_our_fault
from holdfast.server.keys import Keys
from holdfast.server.logs import RECORD, RequestLog, RequestRecord, cleaned_request_id
from holdfast.server.service import Service
from holdfast.server.traces import Traces

PUBLIC_PATHS = frozenset({"/health", "/ready"}) | page.PUBLIC_PATHS
"""Paths that need no key: health and the page. The page's own calls need one."""
OPEN_WHILE_DRAINING = frozenset({"/health", "/ready", "/metrics"})
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}))(?::([0-9]{1,5}))?")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
BEARER = b"bearer "
TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STREAMS = (b"text/event-stream", b"application/x-ndjson")
_log = get_logger("holdfast.server")


class RecordGuard:
    """Outermost: gives a request its id and record, adds the id to the answer, logs a line, and catches every exception."""

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

        async def send_named(message: Message) -> None:
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
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            record.error = "client_gone"
        except (Exception, asyncio.CancelledError) as error:
            # Cancelled: the server stopped before this answer ended.
            is_cut = isinstance(error, asyncio.CancelledError)
            if not is_cut:
                log_failure(record, error)
            if not is_over:
                found = ApiError("http.cut_while_draining") if is_cut else from_exception(error)
                record.error = found.public_code
                if not record.status:
                    await answer(send_named, found, scope)
                elif is_stream:  # add an event; any other body stays truncated
                    piece = found.to_event(record.path, record.request_id)
                    await send_named({"type": "http.response.body", "body": piece})
        finally:
            record.is_cut = not is_over
            record.route = getattr(scope.get("route"), "path", record.route)
            self._metrics.response(record.status, record.route)
            if self._log is not None:
                self._log.write(record)
            if self._traces is not None:
                given = header(scope, b"traceparent")
                record.trace_parent = given.decode() if given is not None and TRACE_PARENT.fullmatch(given) else None
                self._traces.write(record)


def log_failure(record: RequestRecord, error: BaseException) -> None:
    """Log an exception that is our fault, with its traceback."""
    if is_our_fault(error):
        _log.error("request %s failed: %s", record.request_id, type(error).__name__, exc_info=error)


class Guard:
    """Answers with the error that `fault` returns, or passes the request on."""

    def __init__(self, app: ASGIApp, fault: Callable[[Scope], ApiError | None]) -> None:
        self._app = app
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._fault(scope) if scope["type"] == "http" else None
        if found is not None:
            await answer(send, found, scope)
        else:
            await self._app(scope, receive, send)


class HostRule:
    """Refuses unknown host names (DNS rebinding) and unknown origins of requests that may change state.

    Accepts every IP address, because DNS cannot rebind an address.
    """

    def __init__(self, allowed_hosts: Iterable[str] = (), allowed_origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(host.lower() for host in (*allowed_hosts, "localhost", socket.gethostname()))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    def fault(self, scope: Scope) -> ApiError | None:
        """Return the error for a refused request; its connection closes."""
        ends = {"Connection": "close"}
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope.get("http_version") == "1.0" and scope["path"] in PUBLIC_PATHS:
            return None  # a load balancer's probe
        match = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return ApiError("http.bad_host", headers=ends, value=b", ".join(hosts))
        name = match[1].decode().lower()
        if not self._allows(name):
            return ApiError("http.host_not_allowed", headers=ends, host=name)
        origin = header(scope, b"origin")
        if origin is not None and scope["method"] not in SAFE_METHODS:
            given = origin.decode("latin-1").lower().rstrip("/")
            is_own = given.partition("://")[2] == hosts[0].decode().lower()
            if not is_own and given not in self._origins and "*" not in self._origins:
                return ApiError("http.origin_not_allowed", headers=ends, origin=given)
        return None

    def _allows(self, name: str) -> bool:
        if "*" in self._hosts or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def key_fault(keys: Keys, scope: Scope) -> ApiError | None:
    """Refuse a request without a known key. Every path outside PUBLIC_PATHS needs one."""
    if not len(keys) or scope["path"] in PUBLIC_PATHS:
        return None
    index, has_any = _find_key(keys, scope)
    if index is None:
        has = "the given one is unknown" if has_any else "but none was sent"
        return ApiError("http.invalid_api_key", headers={"WWW-Authenticate": "Bearer"}, has=has)
    record = scope.get(RECORD)
    if isinstance(record, RequestRecord):
        record.key_index = index
        record.cache_salt = keys.cache_salt(index)
    return None


def _find_key(keys: Keys, scope: Scope) -> tuple[int | None, bool]:
    """Return the key index of `Authorization` or `x-api-key`, and if either was sent. Skips a repeated header."""
    found: list[int | None] = []
    tokens = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(tokens) == 1 and tokens[0][: len(BEARER)].lower() == BEARER:
        found.append(keys.find(tokens[0][len(BEARER) :].strip()))
    own = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(own) == 1:
        found.append(keys.find(own[0].strip()))
    return next((index for index in found if index is not None), None), bool(tokens or own)


def state_fault(service: Service, scope: Scope) -> ApiError | None:
    """Refuse new requests while the server drains, and after its engine has died."""
    if service.state == "ready" or scope["path"] in OPEN_WHILE_DRAINING:
        return None
    return ApiError("http.draining", headers={"Retry-After": "5", "Connection": "close"})


async def answer(send: Send, error: ApiError, scope: Mapping[str, Any]) -> None:
    """Answer with an error."""
    record = scope.get(RECORD)
    request_id = ""
    if isinstance(record, RequestRecord):
        record.error = error.public_code
        request_id = record.request_id
    body = error.to_json(scope["path"], request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of that name."""
    return next((value for key, value in scope["headers"] if key == name), None)

"""A server in a thread, over endpoints without a model; and bytes sent to it as they are."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from holdfast.server.app import make_app
from holdfast.server.bodies import read_json
from holdfast.server.keys import Keys
from holdfast.server.logs import RequestLog
from holdfast.server.run import Server, bind_socket
from holdfast.server.service import ServerLimits, Service, service_of

SHORT = ServerLimits(
    max_body_bytes=2**16,
    header_seconds=0.5,
    body_seconds=0.5,
    write_seconds=0.6,
    keep_alive_seconds=0.8,
    drain_seconds=1.0,
)


class StubLLM:
    """What a server asks of an engine that it only watches."""

    is_alive = True

    def health(self) -> SimpleNamespace:
        return SimpleNamespace(is_alive=self.is_alive)

    def raise_if_dead(self) -> None:
        return

    def shutdown(self) -> None:
        return


class Seen:
    """What endpoints have seen."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_ended = 0


def make_router(seen: Seen) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return PlainTextResponse("ok")

    @router.post("/echo")
    async def echo(request: Request) -> Response:
        value = await read_json(request, service_of(request).limits)
        return Response(json.dumps(value), media_type="application/json")

    @router.get("/stream")
    async def stream(request: Request) -> Response:
        piece = b"data: " + b"x" * int(request.query_params.get("size", 10)) + b"\n\n"
        seconds = float(request.query_params.get("seconds", 0.02))

        async def events() -> AsyncIterator[bytes]:
            seen.num_running += 1
            try:
                for _ in range(int(request.query_params.get("count", 10))):
                    yield piece
                    await asyncio.sleep(seconds)
                yield b"data: [DONE]\n\n"
            finally:
                seen.num_running -= 1
                seen.num_ended += 1

        return StreamingResponse(events(), media_type="text/event-stream")

    @router.get("/boom")
    async def boom() -> Response:
        raise KeyError("/home/user/secret at 0xdeadbeef00")

    return router


class Running(NamedTuple):
    port: int
    server: Server
    service: Service
    seen: Seen


@contextmanager
def running(
    limits: ServerLimits = SHORT, keys: Keys | None = None, log: RequestLog | None = None, **options: object
) -> Iterator[Running]:
    """A server in a thread, until the end of the context."""
    seen = Seen()
    service = Service(StubLLM(), ("tiny",), limits)  # type: ignore[arg-type]
    app = make_app(service, keys, routers=[make_router(seen)], log=log, **options)  # type: ignore[arg-type]
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    is_ready = threading.Event()
    server = Server(app, service, is_ready.set, owns_process=False)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    assert is_ready.wait(20), "the server did not start"
    try:
        yield Running(port, server, service, seen)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def read_to_end(connection: socket.socket, seconds: float = 10.0) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    end = time.monotonic() + seconds
    while True:
        connection.settimeout(max(end - time.monotonic(), 0.01))
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def talk(port: int, *pieces: bytes, seconds: float = 10.0) -> bytes:
    """Send pieces, and read until the other side closes; TimeoutError where it never does."""
    with connect(port) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
        return read_to_end(connection, seconds)


def status_of(answer: bytes) -> int:
    """Status of the first answer; 0 if none came."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def get(path: str, *lines: str, close: bool = True) -> bytes:
    ending = ["Connection: close"] if close else []
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, *ending, "", ""]).encode()


def post(path: str, body: bytes, *lines: str, close: bool = True) -> bytes:
    ending = ["Connection: close"] if close else []
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, *ending, "", ""]
    return "\r\n".join(head).encode() + body

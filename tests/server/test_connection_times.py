"""Time limits: which one ends a connection in each of its phases, by a clock that the test moves."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.server import ServerState

from for_each import for_each
from holdfast.server import bodies
from holdfast.server.bodies import read_json
from holdfast.server.connections import (
    GRACE_SECONDS,
    LINGER_BYTES,
    LINGER_SECONDS,
    PATIENCE,
    SURPLUS_CONNECTIONS,
    GuardedConfig,
    GuardedProtocol,
)
from holdfast.server.errors import ApiError
from holdfast.server.service import ServerLimits
from holdfast.server.status import trouble
from server.test_bodies import request_of

HEADER, BODY, WRITE, KEEP_ALIVE = 10.0, 40.0, 70.0, 25.0
LIMITS = ServerLimits(header_seconds=HEADER, body_seconds=BODY, write_seconds=WRITE, keep_alive_seconds=KEEP_ALIVE)
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n"
ASK = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"


class ClockLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.num_unread = 0
        self.is_closed = self.is_aborted = self.has_ended = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


class World:
    """One connection, its endpoint and its clock."""

    def __init__(self) -> None:
        self.loop = ClockLoop()
        self.go = asyncio.Event()
        self.wire = Wire()
        config = GuardedConfig(self._answer, LIMITS)
        self.connection = GuardedProtocol(config, ServerState(), {}, self.loop)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] == "/echo" and (await receive()).get("more_body", False):
            pass
        if scope["path"] == "/wait":
            await self.go.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/begun":
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await self.go.wait()
            await send({"type": "http.response.body", "body": b"k"})
            return
        await send({"type": "http.response.body", "body": b"ok"})

    def spin(self) -> None:
        for _ in range(8):
            self.loop.run_until_complete(asyncio.sleep(0))

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)
        self.spin()

    def later(self, seconds: float) -> None:
        self.loop.now += seconds

    def is_overdue(self) -> bool:
        return self.connection.is_overdue(self.loop.now)

    def ends_after(self, seconds: float) -> None:
        """Not overdue for so long, and overdue then."""
        began = self.loop.now
        for part in (0.0, seconds / 2, seconds):
            assert not self.connection.is_overdue(began + part), f"overdue after {part} s"
        assert self.connection.is_overdue(began + seconds + 0.01), f"not overdue after {seconds} s"
        self.later(seconds + 0.01)
        self.connection.cut()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.go.set()
    made.connection.connection_lost(None)
    made.spin()
    made.loop.close()


def test_connection_silent_ends_at_the_header_limit(world: World):
    world.ends_after(HEADER)
    assert (world.wire.sent, world.wire.is_closed) == (b"", True)


def test_headers_end_by_the_header_limit(world: World):
    """From their first byte; later ones prolong nothing."""
    world.later(HEADER - 1)
    world.send(b"GE")
    world.later(HEADER - 1)
    world.send(b"T /ech")
    world.ends_after(1)
    assert world.wire.sent.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("num_answers", [1, 2])
def test_connection_idle_ends_at_the_keep_alive_limit(world: World, num_answers):
    """From its last answer."""
    for _ in range(num_answers):
        world.later(HEADER - 1)
        world.send(ASK)
    assert world.wire.sent.count(b"HTTP/1.1 200") == num_answers
    world.ends_after(KEEP_ALIVE)
    assert (world.wire.sent.count(b"HTTP/1.1 "), world.wire.is_closed) == (num_answers, True)


def test_connection_second_headers_end_at_the_header_limit(world: World):
    world.send(ASK)
    world.later(KEEP_ALIVE - 1)
    world.send(b"GET /ech")
    world.ends_after(HEADER)
    assert b"HTTP/1.1 408 " in world.wire.sent


@pytest.mark.parametrize("num_before", [0, 1], ids=["first request", "second request"])
def test_connection_body_pause_ends_at_the_body_limit(world: World, num_before):
    world.send(*[ASK] * num_before)
    world.send(HEAD)
    world.later(BODY)
    assert not world.is_overdue()
    world.send(b"1")
    world.ends_after(BODY + GRACE_SECONDS)
    assert b"HTTP/1.1 408 " in world.wire.sent


def test_connection_slow_body_ends_at_its_total_limit(world: World):
    world.send(HEAD.replace(b"6", b"99"))
    for _ in range(PATIENCE):
        world.later(BODY)
        assert not world.is_overdue()
        world.send(b"1")
    world.ends_after(GRACE_SECONDS)


def test_connection_body_not_read_by_its_endpoint_may_pause(world: World):
    world.send(HEAD)
    world.connection.flow.read_paused = True
    world.ends_after(PATIENCE * BODY + GRACE_SECONDS)


def test_connection_answer_has_no_time_limit(world: World):
    world.send(WAIT)
    world.later(1e6)
    assert not world.is_overdue()
    # The head of a next request waits as long as the answer does.
    world.send(b"GET /ech")
    world.later(1e6)
    assert not world.is_overdue()
    world.go.set()
    world.spin()
    assert world.wire.sent.startswith(b"HTTP/1.1 200")


def test_connection_unread_answer_ends_at_the_write_limit(world: World):
    """From the last byte that was read."""
    world.send(WAIT)
    world.wire.num_unread = 100
    assert not world.is_overdue()
    world.later(WRITE - 1)
    world.wire.num_unread = 99
    assert not world.is_overdue()
    world.ends_after(WRITE)
    assert world.wire.is_aborted


def test_connection_slow_reader_ends_at_the_total_write_limit(world: World):
    world.send(WAIT)
    world.wire.num_unread = 1000
    for _ in range(PATIENCE * 2):
        assert not world.is_overdue()
        world.later(WRITE / 2)
        world.wire.num_unread -= 1
    assert not world.is_overdue()
    world.later(0.01)
    assert world.is_overdue()


def test_connection_read_answer_restarts_the_write_limit(world: World):
    world.send(WAIT)
    for num_unread in (100, 100, 0, 300, 300):
        world.wire.num_unread = num_unread
        assert not world.is_overdue()
        world.later(WRITE * 0.75)
    world.later(WRITE)
    assert world.is_overdue()


def test_connection_lingering_ends_at_its_own_limit(world: World):
    world.send(b"GET /\x00 HTTP/1.1\r\n\r\n")
    assert (world.wire.sent[:13], world.wire.has_ended) == (b"HTTP/1.1 400 ", True)
    world.later(1)
    world.send(b"more")
    world.ends_after(LINGER_SECONDS - 1)
    assert world.wire.is_aborted


@pytest.mark.parametrize(
    ("num_before", "status", "is_aborted"),
    [
        (LIMITS.max_connections - 1, b"", False),
        (LIMITS.max_connections, b"HTTP/1.1 503 ", False),
        (LIMITS.max_connections + SURPLUS_CONNECTIONS - 1, b"HTTP/1.1 503 ", False),
        (LIMITS.max_connections + SURPLUS_CONNECTIONS, b"", True),
    ],
)
def test_connection_beyond_the_limit_is_refused_or_dropped(world: World, num_before, status, is_aborted):
    state, wire = ServerState(), Wire()
    state.connections |= set(range(num_before))  # type: ignore[arg-type]
    late = GuardedProtocol(world.connection.config, state, {}, world.loop)  # type: ignore[arg-type]
    late.connection_made(wire)  # type: ignore[arg-type]
    assert (wire.sent[: len(b"HTTP/1.1 503 ")], wire.is_aborted) == (status, is_aborted)


def test_connection_whose_request_was_whole_is_closed_at_once(world: World):
    """Nothing is left to be read, so there is nothing to linger for."""
    world.send(ASK[:-2] + b"Connection: close\r\n\r\n")
    assert world.wire.sent.endswith(b"ok")
    assert (world.wire.is_closed, world.wire.has_ended) == (True, False)


def test_connection_whose_request_was_refused_early_lingers(world: World):
    world.send(HEAD.replace(b"/echo", b"/now"))
    assert world.wire.sent.endswith(b"ok")
    assert b"connection: close" in world.wire.sent.lower()
    assert (world.wire.is_closed, world.wire.has_ended) == (False, True)


@pytest.mark.parametrize("before", [ASK.replace(b"/echo", b"/begun"), WAIT + WAIT], ids=["begun", "two waiting"])
def test_connection_refusal_is_not_written_into_an_answer(world: World, before):
    world.send(before)
    sent = world.wire.sent
    world.send(b"\x00garbage\r\n\r\n")
    assert (world.wire.sent, world.wire.is_aborted) == (sent, True)


def test_connection_refusal_ends_a_request_without_its_body(world: World):
    world.send(HEAD.replace(b"Content-Length: 6", b"Transfer-Encoding: chunked") + b"xyz\r\n")
    assert world.wire.sent.startswith(b"HTTP/1.1 400 ")
    assert world.wire.sent.count(b"HTTP/1.1 ") == 2  # once in its own words
    assert world.wire.has_ended


def test_connection_shutdown_closes_only_idle_connections(world: World):
    world.send(WAIT)
    world.connection.shutdown()
    assert not world.wire.is_closed
    world.go.set()
    world.spin()
    assert b"connection: close" in world.wire.sent.lower()
    assert world.wire.is_closed


def test_connection_shutdown_closes_after_pipelined_requests(world: World):
    world.send(WAIT + WAIT)
    world.connection.shutdown()
    world.go.set()
    world.spin()
    assert world.wire.is_closed


def test_connection_lost_disconnects_waiting_requests(world: World):
    """Also the one in front of it."""
    gone: list[str] = []

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.append(scope["path"])

    world.connection.app = wait  # type: ignore[assignment]
    world.send(WAIT + ASK)
    world.connection.connection_lost(None)
    world.spin()
    assert gone[:1] == ["/wait"]


def test_connection_lingering_reads_bounded_bytes(world: World):
    world.send(b"GET /\x00 HTTP/1.1\r\n\r\n")
    world.send(b"x" * LINGER_BYTES)
    assert not world.wire.is_aborted
    world.send(b"x")
    assert world.wire.is_aborted


@pytest.mark.parametrize("num_more", [0, 1])
def test_connection_pipelined_requests_are_bounded(world: World, num_more):
    world.send(WAIT * (LIMITS.max_pipelined + num_more))
    assert world.wire.is_aborted == bool(num_more)


@pytest.mark.parametrize("num_more", [0, 1])
def test_headers_are_bounded_in_number(world: World, num_more):
    """The host is one of them."""
    lines = b"X: a\r\n" * (LIMITS.max_headers - 1 + num_more)
    world.send(ASK[:-2] + lines + b"\r\n")
    assert world.wire.sent.startswith(b"HTTP/1.1 431 " if num_more else b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("num_pieces", "is_late"), [(8, False), (20, True)])
def test_read_json_slow_body_ends_at_its_total_limit(monkeypatch: pytest.MonkeyPatch, num_pieces, is_late):
    """Each piece comes in time."""
    now = iter(range(0, 10_000, 8))
    monkeypatch.setattr(bodies, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    reading = read_json(request_of([b"{", *[0.0, b" "] * num_pieces, b"}"]), ServerLimits(body_seconds=10))
    if not is_late:
        assert asyncio.run(reading) == {}
        return
    with pytest.raises(ApiError) as caught:
        asyncio.run(reading)
    assert caught.value.status == 408


WELL = {"is_alive": True, "core_silence_seconds": 1.9, "seconds_in_step": 4.9, "seconds_since_progress": 4.9}


@for_each(
    "health, state, words",
    [
        ({}, "ready", None),
        ({}, "draining", None),
        ({}, "dead", "has stopped"),
        ({"is_alive": False}, "ready", "has stopped"),
        ({"core_silence_seconds": 2.0}, "ready", "no heartbeat for 2.0 seconds"),
        ({"seconds_in_step": 5.0}, "ready", "has run for 5 seconds; the limit is 5"),
        ({"seconds_since_progress": 7.0}, "ready", "has run for 7 seconds"),
    ],
)
def test_trouble_names_the_limit_exceeded(health: dict[str, Any], state, words):
    llm = SimpleNamespace(health=lambda: SimpleNamespace(**{**WELL, **health}))
    limits = ServerLimits(silence_seconds=2.0, step_seconds=5.0)
    found = trouble(SimpleNamespace(llm=llm, limits=limits, state=state))  # type: ignore[arg-type]
    assert (found is None) if words is None else words in (found or "")

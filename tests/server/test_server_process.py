"""A server's life in processes of its own: it drains, notices death, leaves nothing behind; no torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.server.run import bind_socket
from server.raw_server import connect, get, post, read_to_end, status_of, talk

TESTS = Path(__file__).parent.parent


class Process:
    """A server process, and what it said."""

    def __init__(self, kind: str, drain_seconds: float) -> None:
        others = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), others)))}
        command = [sys.executable, "-P", "-m", "server.faked_process", kind, str(drain_seconds)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["ready"], self.process.communicate()
        self.port, self.core = int(words[1]), int(words[2])

    def end(self, seconds: float) -> tuple[int, str]:
        """How it ended, within some seconds."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


@contextmanager
def started(kind: str = "slow", drain_seconds: float = 20.0) -> Iterator[Process]:
    process = Process(kind, drain_seconds)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


def is_gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def ask(max_tokens: int, stream: bool = True) -> bytes:
    body = {"model": "fake", "prompt": "go on", "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    return post("/v1/completions", data, f"Content-Length: {len(data)}", close=False)


def streams(process: Process, count: int, max_tokens: int) -> list:
    """Connections whose answers have begun."""
    connections = [connect(process.port) for _ in range(count)]
    for connection in connections:
        connection.sendall(ask(max_tokens))
    for connection in connections:
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
    return connections


def test_sigterm_lets_running_requests_finish() -> None:
    """Eight streams end as they would; a slow-header and an idle connection are not waited for; a new request gets 503."""
    with started(drain_seconds=20.0) as process:
        half_open, idle = connect(process.port), connect(process.port)
        half_open.sendall(b"GET /v1/models HTTP/1.1\r\nHost: loc")
        idle.sendall(get("/v1/models", close=False))
        assert idle.recv(15).startswith(b"HTTP/1.1 200")
        running = streams(process, 8, 40)
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = talk(process.port, get("/v1/models", close=False))
        assert status_of(refused) == 503
        assert b"connection: close" in refused
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(read_to_end, running))
        assert all(b"[DONE]" in answer and b"error" not in answer for answer in answers)
        code, errors = process.end(5)
        assert code == 0, errors
        assert is_gone(process.core, 2)
        assert not read_to_end(half_open, 1)
        for connection in (half_open, idle, *running):
            connection.close()


def test_drain_timeout_ends_requests_with_an_error() -> None:
    with started(drain_seconds=0.5) as process:
        running = streams(process, 8, 240)
        whole = connect(process.port)
        whole.sendall(ask(240, stream=False))
        half_open = connect(process.port)
        half_open.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        time.sleep(0.2)
        started_at = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        answers = [read_to_end(connection) for connection in running]
        assert status_of(read_to_end(whole)) == 503
        code, errors = process.end(5)
        assert time.monotonic() - started_at < 0.5 + 2
        assert code == 0, errors
        assert "running requests may finish within 0.5 s" in errors
        for answer in answers:
            last = [line for line in answer.split(b"\n") if line.startswith(b"data: ")][-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert is_gone(process.core, 2)
        for connection in (whole, half_open, *running):
            connection.close()


@pytest.mark.slow
def test_second_signal_ends_the_server_at_once() -> None:
    with started(drain_seconds=60.0) as process:
        running = streams(process, 2, 240)
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.process.poll() is None
        started_at = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        code, errors = process.end(5)
        assert code == 0, errors
        assert time.monotonic() - started_at < 2
        for connection in running:
            connection.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_server_killed_core_ends_streams_and_process(number: signal.Signals) -> None:
    """Clients get an error event in 2 s, the process ends by itself with one line, and the port is free."""
    with started() as process:
        running = streams(process, 4, 240)
        started_at = time.monotonic()
        os.kill(process.core, number)
        answers = [read_to_end(connection) for connection in running]
        assert time.monotonic() - started_at < 2.5
        for answer in answers:
            assert b'"engine_dead"' in answer or b'"error"' in answer
        code, errors = process.end(5)
        assert time.monotonic() - started_at < 5
        assert code == 1
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert number.name in lines[0]
        assert "Traceback" not in errors
        for connection in running:
            connection.close()
        bind_socket("127.0.0.1", process.port).close()


@pytest.mark.slow
def test_server_notices_the_death_of_an_idle_core() -> None:
    with started() as process:
        os.kill(process.core, signal.SIGKILL)
        code, _ = process.end(5)
        assert code == 1


def test_server_killed_ends_its_core() -> None:
    """Its core does not outlive it, and clients see the end."""
    with started() as process:
        running = streams(process, 2, 240)
        process.process.kill()
        for connection in running:
            assert b"[DONE]" not in read_to_end(connection)
            connection.close()
        assert is_gone(process.core, 5)


@pytest.mark.slow
def test_server_health_follows_a_stopped_and_continued_core() -> None:
    """Red within 2 s of silence, green again when it goes on; nothing of an answer is lost."""
    with started() as process:
        assert status_of(talk(process.port, get("/health"))) == 200
        running = streams(process, 1, 20)[0]
        os.kill(process.core, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            wait_until(lambda: status_of(talk(process.port, get("/health"))) == 503, 3)
            assert time.monotonic() - stopped_at < 2.8
            assert status_of(talk(process.port, get("/v1/models"))) == 200
        finally:
            os.kill(process.core, signal.SIGCONT)
        wait_until(lambda: status_of(talk(process.port, get("/health"))) == 200, 3)
        assert b"[DONE]" in read_to_end(running_end(process, running))
        running.close()


def running_end(process: Process, connection: socket.socket) -> socket.socket:
    """A kept-alive connection that is closed when its answer is over, since the server shuts down."""
    process.process.send_signal(signal.SIGTERM)
    return connection


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.05)

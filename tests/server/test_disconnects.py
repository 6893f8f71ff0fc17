"""Clients that go: their requests end in the engine, streaming or not, waiting or running, and nothing is left behind."""

import json
import socket
import time

import httpx
import pytest

from engine.fakes import Gate, assert_at_rest
from for_each import for_each
from server.served import MODEL, Served, said, served, until, user

CHAT = {"model": MODEL, "messages": user("Hello"), "max_tokens": 200}
COMPLETION = {"model": MODEL, "prompt": ["Hello", "there"], "max_tokens": 200}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": MODEL, "input": "Hello", "max_output_tokens": 200},
    "/v1/messages": CHAT,
    "/api/chat": {"model": MODEL, "messages": user("Hello"), "options": {"num_predict": 200}},
}


@pytest.fixture(scope="module")
def held():
    """A server whose model runs one step at a time, when the test says so."""
    with served(max_num_seqs=2) as running:
        yield running, Gate(running.engine)


def connect(running: Served, path: str, body: dict) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def num_live(running: Served) -> int:
    return running.service.llm.health().num_unfinished_requests


@for_each("path", BODIES)
@for_each("stream", [False, True])
@for_each("num_steps", [0, 3])
def test_client_disconnect_aborts_its_requests(held, path, stream, num_steps):
    running, gate = held
    num_requests = 2 if path == "/v1/completions" else 1
    gate.allowed = type(gate.allowed)(0)
    metrics = running.service.metrics
    aborted = metrics.finished["abort"] + num_requests
    connection = connect(running, path, {**BODIES[path], "stream": stream})
    # The step in progress is held, and what it computes belongs to a request without a client.
    assert gate.started.acquire(timeout=20)
    for _ in range(num_steps):
        gate.allowed.release()
        assert gate.started.acquire(timeout=20)
    if num_steps:
        until(lambda: num_live(running) == num_requests, "the requests did not come")
    connection.close()
    until(lambda: running.service.llm.health().num_commands >= 1, "the engine got no command")
    gate.open()
    until(lambda: num_live(running) == 0, "the request goes on")
    until(lambda: not running.engine.has_unfinished(), "the engine goes on")
    until(
        lambda: metrics.finished["abort"] == aborted and metrics.num_open == 0, f"{metrics.finished} {metrics.num_open}"
    )
    stats = running.service.llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
    while gate.started.acquire(blocking=False):
        pass


def test_client_disconnect_while_waiting_leaves_others_alone(held):
    running, gate = held
    gate.open()
    alone = httpx.post(f"{running.url}/v1/chat/completions", json={**CHAT, "temperature": 0, "max_tokens": 40}).json()
    until(lambda: num_live(running) == 0, "the request goes on")
    gate.allowed = type(gate.allowed)(0)
    kept = connect(running, "/v1/chat/completions", {**CHAT, "temperature": 0, "max_tokens": 40})
    others = [connect(running, path, {**body, "stream": True}) for path, body in BODIES.items() for _ in range(2)]
    num_all = len(others) + 3  # one is kept, and each of two holds two prompts
    for _ in range(30):  # a request is taken between two steps
        if num_live(running) == num_all:
            break
        gate.allowed.release()
        time.sleep(0.02)
    assert num_live(running) == num_all
    for connection in others:
        connection.close()
    gate.open()
    with kept, kept.makefile("rb") as reader:
        answer = b""
        while b"}}" not in answer.rpartition(b"\r\n\r\n")[2]:
            answer += reader.read1()
    text = json.loads(answer.rpartition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
    assert text == alone["choices"][0]["message"]["content"]
    until(lambda: num_live(running) == 0, "a request goes on")
    until(lambda: not running.engine.has_unfinished(), "the engine goes on")


def test_finished_requests_leave_nothing_in_the_engine(held):
    running, gate = held
    gate.open()
    httpx.post(f"{running.url}/v1/completions", json={"model": MODEL, "prompt": said("abc")})
    until(lambda: not running.engine.has_unfinished(), "the engine goes on")
    assert_at_rest(running.engine)

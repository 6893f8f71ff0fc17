"""Before and around a server's life: ports, the door while a model loads, the limit on open files."""

import socket
import time

import pytest

from error_codes import raises_code
from holdfast.errors import HoldfastError
from holdfast.server import run as module
from holdfast.server.run import Server, WaitingDoor, address_of, bind_socket, raise_file_limit
from server.raw_server import StubLLM, connect, get, running, status_of, talk


def test_bind_socket_second_owner_of_a_port_is_refused() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with raises_code("http.cannot_listen", reason="another program uses the port"):
            bind_socket("127.0.0.1", port)
    bind_socket("127.0.0.1", port).close()


def test_bind_socket_unknown_host_is_refused() -> None:
    for host in ("nowhere.invalid", "192.0.2.1", "a" * 300):
        with raises_code("http.cannot_listen"):
            bind_socket(host, 0)


@pytest.mark.parametrize(
    ("host", "start"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
def test_address_of_listener_is_a_url_to_open(host: str, start: str) -> None:
    try:
        listener = bind_socket(host, 0)
    except HoldfastError:
        pytest.skip("no IPv6 here")
    with listener:
        assert address_of(listener).startswith(start)


def test_waiting_door_answers_503_while_a_model_loads() -> None:
    """Every client gets 503 at once, even next to a silent one; afterwards the port is the server's."""
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with WaitingDoor(listener):
            silent = connect(port)
            started = time.monotonic()
            for _ in range(5):
                answer = talk(port, get("/v1/models"))
                assert status_of(answer) == 503
                assert b"Retry-After" in answer
                assert b"still loading" in answer
            assert time.monotonic() - started < 3
            silent.close()
        with socket.create_connection(("127.0.0.1", port)):
            listener.setblocking(True)
            listener.accept()[0].close()


def test_raise_file_limit_warns_if_the_hard_limit_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, value: limits.update(now=value))
    assert raise_file_limit(1000) is None
    assert limits["now"] == (4096, 4096)
    warning = raise_file_limit(100_000)
    assert warning is not None
    assert "may open only 4096 files" in warning
    assert "about 4032 connections" in warning


def test_server_dead_engine_ends_the_server() -> None:
    with running() as server:
        assert status_of(talk(server.port, get("/health"))) == 200
        StubLLM.is_alive = False
        try:
            end = time.monotonic() + 5
            while server.server.death is None and time.monotonic() < end:
                time.sleep(0.02)
            assert server.server.death is not None
            assert server.service.state == "dead"
        finally:
            StubLLM.is_alive = True


def test_server_stop_twice_forces_the_exit() -> None:
    with running() as started:
        server = Server(started.server.config.app, started.service, lambda: None, owns_process=False)  # type: ignore[arg-type]
    assert (server.should_exit, server.force_exit) == (False, False)
    server.stop()
    assert (server.should_exit, server.force_exit, server.end_by) == (True, False, float("inf"))
    server.stop()
    assert server.force_exit
    assert server.end_by <= time.monotonic()


def test_end_engine_does_not_wait_for_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(module, "ENGINE_END_SECONDS", (0.1, 3.0))
    started = time.monotonic()
    module.end_engine(SimpleNamespace(llm=SimpleNamespace(shutdown=lambda: time.sleep(1))), -5.0)  # type: ignore[arg-type]
    assert time.monotonic() - started < 0.8

"""Ranks of a launcher: what it says is checked, strangers are turned away, and one that never comes is named."""

import contextlib
import os
import select
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.engine import launched, life_line, vital_signs
from holdfast.engine.launched import Launched, accept_ranks, find_launcher, node_name
from holdfast.engine.life_line import LifeLine, ZeroSigns, own_place
from holdfast.errors import ConfigError, EngineDeadError

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO = EngineConfig(tensor_parallel_size=2, device="cuda")


def test_launcher_is_found_for_several_ranks():
    assert find_launcher(TWO, ENVIRONMENT) == Launched(1, 2, "127.0.0.1", 29500, False, 1, 2)
    assert find_launcher(EngineConfig(), ENVIRONMENT) is None
    assert find_launcher(TWO, {}) is None
    assert find_launcher(TWO, ENVIRONMENT | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (TWO, {"WORLD_SIZE": "3"}, "WORLD_SIZE=3"),
        (TWO, {"RANK": "2"}, "RANK=2"),
        (TWO, {"RANK": "-1"}, "RANK=-1"),
        (TWO, {"MASTER_PORT": "high"}, "MASTER_PORT=high"),
        (TWO, {"MASTER_PORT": "0"}, "MASTER_PORT=0. Ranks are 0 to 1, and a port is 1 to 65535"),
        (TWO, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        (TWO, {"MASTER_PORT": ""}, "but not MASTER_PORT"),
        (TWO, {"MASTER_PORT": "", "MASTER_ADDR": ""}, "but not MASTER_ADDR and MASTER_PORT"),
        (TWO, {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=None and LOCAL_WORLD_SIZE=1. A node has 1 to 2 ranks"),
        (TWO, {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE=3"),
        (TWO, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1"),
        (TWO, {"LOCAL_RANK": "first"}, "LOCAL_RANK=first"),
        (EngineConfig(tensor_parallel_size=2, core_process=True), {}, "core_process=True"),
    ],
)
def test_find_launcher_refuses_wrong_environment(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        find_launcher(config, ENVIRONMENT | changes)


@pytest.mark.parametrize(
    ("reported", "place"),
    [
        ({}, (1, 2)),
        ({"LOCAL_WORLD_SIZE": "2"}, (1, 2)),
        ({"LOCAL_RANK": "0"}, (0, 1)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_find_launcher_reads_place_in_node(reported, place):
    found = find_launcher(TWO, ENVIRONMENT | reported)
    assert found is not None
    assert (found.local_rank, found.num_local) == place


def test_node_name_differs_by_group_rank():
    names = [node_name({"GROUP_RANK": group} if group else {}) for group in ("", "0", "1")]
    assert len(set(names)) == 3
    assert names == [node_name({"GROUP_RANK": group} if group else {}) for group in ("", "0", "1")]


class FakeStore:
    """Words that ranks leave each other."""

    def __init__(self) -> None:
        self.reported: dict[str, str] = {}
        self.is_set = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.reported[key] = value
        self.is_set.set()


@pytest.fixture
def store(monkeypatch) -> FakeStore:
    made = FakeStore()
    monkeypatch.setattr(launched, "_store", lambda reported: made)
    monkeypatch.setattr(launched, "PEER_SECONDS", 5.0)
    return made


def address(store: FakeStore) -> tuple[int, bytes]:
    assert store.is_set.wait(10)
    (reported,) = store.reported.values()
    port, _, secret = reported.partition(":")
    return int(port), bytes.fromhex(secret)


def connect(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(data)
    return connection


def test_strangers_are_turned_away_and_ranks_are_not(store):
    found: list = []
    meeting = threading.Thread(target=lambda: found.extend(accept_ranks(Launched(0, 3, "127.0.0.1", 1, True))))
    meeting.start()
    port, secret = address(store)
    connections = []
    place = own_place()
    web = b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\n\r\n".ljust(80)
    for data in (bytes(60), web, secret + b"\7\0\0\0" + place, secret + bytes(4) + place):
        connections.append(connect(port, data))
        with contextlib.suppress(ConnectionResetError):
            assert connections[-1].recv(1) == b"", "it was hung up on"
    connections += [connect(port, secret + bytes([rank, 0, 0, line]) + place) for rank in (2, 1) for line in (128, 0)]
    meeting.join(10)
    assert [peer.process.pid for peer in found] == [os.getpid()] * 2
    for peer in found:
        peer.channel.close()
        peer.process.kill()
    for connection in connections:
        connection.close()


def test_silent_connections_delay_no_rank(store):
    """More of them than two seconds each would leave time for; some have begun to speak, one has gone."""
    found: list = []
    meeting = threading.Thread(target=lambda: found.extend(accept_ranks(Launched(0, 2, "127.0.0.1", 1, True))))
    begin = time.monotonic()
    meeting.start()
    port, secret = address(store)
    connections = [connect(port, secret[: number % 3]) for number in range(20)]
    connections[5].close()
    connections += [connect(port, secret + bytes([1, 0, 0, line]) + own_place()) for line in (0, 128)]
    meeting.join(10)
    assert len(found) == 1
    assert time.monotonic() - begin < 2 * launched.HELLO_SECONDS
    with contextlib.suppress(ConnectionResetError):
        assert connections[0].recv(1) == b"", "it was hung up on"
    for peer in found:
        peer.channel.close()
        peer.process.kill()
    for connection in connections:
        connection.close()


def test_accept_ranks_foreign_address_is_refused(store):
    with raises_code("rank.cannot_listen", ConfigError):
        accept_ranks(Launched(0, 2, "203.0.113.7", 1, True))
    assert not store.reported


class Launch:
    """A store in which rank 0 has left its word, or never does."""

    def __init__(self, word: str | None) -> None:
        self.word = word
        self.key = ""

    def get(self, key: str) -> bytes:
        self.key = key
        if self.word is None:
            raise RuntimeError("wait timeout after 30000ms\nand a stack of frames")
        return self.word.encode()


def serve(word: str | None, monkeypatch, attempt: str = "0") -> Launch:
    """Run rank 1 of two with this entry in the store; it fails."""
    reported = Launch(word)
    monkeypatch.setattr(launched, "_store", lambda place: reported)
    monkeypatch.setattr(launched, "_beat", lambda *_: None)  # which ends the process where rank 0 is gone
    monkeypatch.setattr(launched.signal, "signal", lambda *_: None)
    with pytest.raises(EngineDeadError) as refused:
        launched.serve_launched(
            Launched(1, 2, "127.0.0.1", 29500, True, attempt=attempt), lambda start, server: pytest.fail("no start")
        )
    reported.word = str(refused.value)
    return reported


def test_missing_rank_0_raises(monkeypatch):
    assert "no address within 30 seconds" in str(serve(None, monkeypatch).word)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert f"no answer at its port {port}" in str(serve(f"{port}:{'00' * 32}", monkeypatch).word)


def test_unreachable_store_raises(monkeypatch):
    monkeypatch.setattr(launched, "PEER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with raises_code("rank.store_unreachable", EngineDeadError):
        launched.serve_launched(Launched(1, 2, "127.0.0.1", port, True), lambda start, server: pytest.fail("no start"))


def test_serve_rejected_rank_suspects_duplicate_rank(monkeypatch):
    """A process with the number of another would else end as one that has served."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hanging_up = threading.Thread(target=lambda: [listening.accept()[0].close() for _ in range(2)])
        hanging_up.start()
        words = serve(f"{listening.getsockname()[1]}:{'00' * 32}", monkeypatch).word
        hanging_up.join(10)
    assert "Another process may have the same RANK" in str(words)


def test_restarted_ranks_ignore_the_old_address(monkeypatch):
    """torchrun --max-restarts keeps its store."""
    keys = set()
    for attempt in ("0", "1"):
        found = find_launcher(TWO, ENVIRONMENT | {"TORCHELASTIC_RESTART_COUNT": attempt})
        assert found is not None
        keys.add(serve(None, monkeypatch, found.attempt).key)
    assert len(keys) == 2


def life_line_of_pair() -> tuple[LifeLine, ZeroSigns]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), 10)
        ours, _ = listening.accept()
    return LifeLine(ours), ZeroSigns(theirs)


@pytest.mark.parametrize("is_here", [True, False])
def test_silence_of_rank_0_is_counted_by_where_it_is(is_here, monkeypatch):
    """Here the system says that it is not stopped; from elsewhere silence during a step is a death, and not while it loads."""
    now = [100.0]
    if not is_here:
        monkeypatch.setattr(life_line, "machine_mark", lambda: os.urandom(16))
    line, zero = life_line_of_pair()
    assert zero.is_here == is_here
    monkeypatch.setattr(vital_signs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(vital_signs, "process_state", lambda pid: ("S", 0))
    zero.look(True, 1)

    def looks(count: int, *, in_step: bool, beats: bool = False, num_messages: int = 1) -> bool:
        is_dead = False
        for _ in range(count):
            now[0] += 0.25
            if beats:
                line.beat()
                assert select.select([zero._connection], [], [], 10)[0], "it came"
            is_dead = zero.look(in_step, num_messages)
        return is_dead

    assert not looks(40, in_step=True, beats=True)
    assert not looks(5, in_step=True)
    assert looks(1, in_step=True) != is_here
    assert not looks(1, in_step=True, beats=True)
    assert not looks(100, in_step=False), "it loads, or its program does something else"
    assert not looks(1, in_step=True, num_messages=2), "a step has come, which is a sign of life"
    assert not looks(5, in_step=True, num_messages=2)
    assert not looks(10, in_step=False, num_messages=3)
    assert looks(112, in_step=False, num_messages=3)
    line.close()
    zero._connection.close()


def test_machine_mark_is_stable_on_one_machine():
    assert life_line.machine_mark() == life_line.machine_mark()
    assert len(life_line.machine_mark()) == 16


def test_accept_ranks_missing_rank_is_named(store, monkeypatch):
    monkeypatch.setattr(launched, "PEER_SECONDS", 1.0)
    with raises_code("rank.missing_peer", EngineDeadError):
        accept_ranks(Launched(0, 2, "127.0.0.1", 1, True, 0, 2))
    monkeypatch.setattr(launched, "PEER_SECONDS", 0.2)
    with pytest.raises(
        EngineDeadError, match=r"seconds \(MASTER_ADDR=localhost is \S+ on this node, unreachable from others"
    ):
        accept_ranks(Launched(0, 2, "localhost", 1, True, 0, 1))

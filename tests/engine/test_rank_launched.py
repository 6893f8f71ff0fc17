"""Ranks of a launcher: what it says is checked, strangers are turned away, and one that never comes is named."""

import contextlib
import os
import select
import socket
import threading
from types import SimpleNamespace

import pytest

from holdfast.config import EngineConfig
from holdfast.engine import launched, life_line, vital_signs
from holdfast.engine.launched import Launched, find_launcher, meet_ranks, node_name
from holdfast.engine.life_line import LifeLine, ZeroSigns, own_place
from holdfast.errors import ConfigError, EngineDeadError

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO = EngineConfig(tensor_parallel_size=2, device="cuda")


def test_a_launcher_is_found_where_ranks_are_asked():
    assert find_launcher(TWO, TOLD) == Launched(1, 2, "127.0.0.1", 29500, False, 1, 2)
    assert find_launcher(EngineConfig(), TOLD) is None
    assert find_launcher(TWO, {}) is None
    assert find_launcher(TWO, TOLD | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (TWO, {"WORLD_SIZE": "3"}, "WORLD_SIZE=3"),
        (TWO, {"RANK": "2"}, "RANK=2"),
        (TWO, {"RANK": "-1"}, "RANK=-1"),
        (TWO, {"MASTER_PORT": "high"}, "MASTER_PORT=high"),
        (TWO, {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=None and LOCAL_WORLD_SIZE=1; a node has 1 to 2 of the 2 ranks"),
        (TWO, {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE=3"),
        (TWO, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1"),
        (TWO, {"LOCAL_RANK": "first"}, "LOCAL_RANK=first"),
        (EngineConfig(tensor_parallel_size=2, core_process=True), {}, "core_process=True"),
    ],
)
def test_what_a_launcher_says_is_checked(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        find_launcher(config, TOLD | changes)


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({}, (1, 2)),
        ({"LOCAL_WORLD_SIZE": "2"}, (1, 2)),
        ({"LOCAL_RANK": "0"}, (0, 1)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_a_rank_has_the_device_of_its_place_in_its_node(told, place):
    found = find_launcher(TWO, TOLD | told)
    assert found is not None
    assert (found.local_rank, found.num_local) == place


def test_what_a_launcher_takes_for_two_nodes_is_two():
    names = [node_name({"GROUP_RANK": group} if group else {}) for group in ("", "0", "1")]
    assert len(set(names)) == 3
    assert names == [node_name({"GROUP_RANK": group} if group else {}) for group in ("", "0", "1")]


class FakeStore:
    """Words that ranks leave each other."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        self.is_told = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.told[key] = value
        self.is_told.set()


@pytest.fixture
def store(monkeypatch) -> FakeStore:
    made = FakeStore()
    monkeypatch.setattr(launched, "_store", lambda told: made)
    monkeypatch.setattr(launched, "PEER_SECONDS", 5.0)
    return made


def address(store: FakeStore) -> tuple[int, bytes]:
    assert store.is_told.wait(10)
    (told,) = store.told.values()
    port, _, secret = told.partition(":")
    return int(port), bytes.fromhex(secret)


def connect(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10)
    connection.sendall(data)
    return connection


def test_strangers_are_turned_away_and_ranks_are_not(store):
    found: list = []
    meeting = threading.Thread(target=lambda: found.extend(meet_ranks(Launched(0, 3, "127.0.0.1", 1, True))))
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


def test_processes_of_one_machine_know_it():
    assert life_line.machine_mark() == life_line.machine_mark()
    assert len(life_line.machine_mark()) == 16


def test_a_rank_that_never_comes_is_named(store, monkeypatch):
    monkeypatch.setattr(launched, "PEER_SECONDS", 1.0)
    with pytest.raises(EngineDeadError, match="rank 1 did not come within 1 seconds"):
        meet_ranks(Launched(0, 2, "127.0.0.1", 1, True))

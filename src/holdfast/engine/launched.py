"""Ranks that a launcher (torchrun) started, on one node or several: every process runs the same program; no torch until one connects.

    rank 0       listens, and writes its address and a secret to the launcher's store
    other ranks  read both there, connect, and serve rank 0 until it ends: for them `LLM(...)` does not return

Rank 0 closes connections without the secret. Ranks send heartbeats over the connection, and rank 0 over a second one
(engine/life_line.py). The launcher ends processes on other nodes: all of them if one fails. Ranks on several nodes exchange by
NCCL, on CPUs by gloo.
"""

import contextlib
import ipaddress
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

from holdfast.config import EngineConfig
from holdfast.engine.channel import Channel, ChannelClosedError
from holdfast.engine.child_process import GRACE_SECONDS
from holdfast.engine.life_line import PLACE_BYTES, LifeLine, ZeroSigns, own_place, pid_at
from holdfast.engine.messages import Heartbeat
from holdfast.engine.pulse import Pulse
from holdfast.engine.rank_server import OpenRank, RankServer
from holdfast.engine.ranks import PEER_SECONDS, check_world
from holdfast.engine.vital_signs import LOOK_SECONDS
from holdfast.errors import ConfigError, EngineDeadError
from holdfast.observability.log import get_logger

log = get_logger(__name__)

UNANSWERED_SECONDS = 2.0
"""Timeout for TCP acknowledgements of the other node."""
HELLO_SECONDS = 2.0
"""Timeout for a new connection to identify itself."""
SECRET_BYTES = 32
MAX_PORT = 2**16 - 1
_HELLO = struct.Struct(f"<{SECRET_BYTES}sI{PLACE_BYTES}s")
_LIFE_LINE = 2**31
"""Added to the rank for its second connection."""


class Launched(NamedTuple):
    """The environment of a launched process."""

    rank: int
    num_ranks: int
    host: str
    port: int
    has_store: bool
    """True if the launcher keeps the store; otherwise rank 0 does."""
    local_rank: int = 0
    """Rank within its node, which selects its GPU."""
    num_local: int = 1
    attempt: str = "0"
    """Number of restarts; the store survives them."""


def find_launcher(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the launcher's settings; None without a launcher or for one rank."""
    if config.num_ranks == 1 or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    num_ranks = check_world(config, environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:  # otherwise each of its processes would start all ranks
        rank = environment["RANK"]
        raise ConfigError("rank.launcher_incomplete", rank=rank, size=num_ranks, missing=" and ".join(missing))
    rank, port = environment["RANK"], environment["MASTER_PORT"]
    if not rank.isdecimal() or int(rank) >= num_ranks or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        largest = num_ranks - 1
        raise ConfigError("rank.launcher_values", rank=rank, port=port, largest=largest, largest_port=MAX_PORT)
    if config.core_process:
        raise ConfigError("rank.launcher_core_process")
    local_rank, num_local = _local(environment, int(rank), num_ranks)
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = environment["MASTER_ADDR"], int(port)
    return Launched(int(rank), num_ranks, *place, has_store, local_rank, num_local, attempt)


def _local(environment: Mapping[str, str], rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the rank within its node and their number; without both all ranks are on one node."""
    own, size = environment.get("LOCAL_RANK"), environment.get("LOCAL_WORLD_SIZE")
    if own is None and size in (None, str(num_ranks)):
        return rank, num_ranks
    if own is not None and own.isdecimal():
        known = int(own) + 1 if size is None else int(size) if size.isdecimal() else 0
        if int(own) < known <= num_ranks:
            return int(own), known
    raise ConfigError("rank.local_rank", own=own, size=size, num_ranks=num_ranks)


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Name the node of this process; the launcher's group counts as a node."""
    boot = ""
    with contextlib.suppress(OSError):  # not on Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "-".join(filter(None, (socket.gethostname(), boot, environment.get("GROUP_RANK"))))


class RemoteProcess:
    """Stands for a process of the launcher: `kill` closes its connections."""

    def __init__(self, connection: socket.socket, line: LifeLine, pid: int) -> None:
        self.pid = pid
        """0 if it is on another machine."""
        self._connection = connection
        self._line = line

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._line.close()


class _NoLines:
    """Its output goes to the launcher."""

    def join(self, timeout: float) -> None: ...

    def last(self) -> str:
        return ""


class Peer:
    """A rank at the other end of two connections, like a `Child`."""

    def __init__(self, connection: socket.socket, line: socket.socket, pid: int) -> None:
        _prepare(connection)
        self.channel = Channel(connection, silence_seconds=PEER_SECONDS)
        self.life_line = LifeLine(line)
        self.process = RemoteProcess(connection, self.life_line, pid)
        self.last_lines = _NoLines()
        self.pulse = Pulse.of_this_process()
        self.pulse.beat()


def _prepare(connection: socket.socket) -> None:
    """Send small frames at once, and close the connection to a node that stops acknowledging."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNANSWERED_SECONDS))


def accept_ranks(launched: Launched) -> list[Peer]:
    """Return connections to ranks 1, 2, ... once all have arrived. Rank 0."""
    secret = secrets.token_bytes(SECRET_BYTES)
    found: dict[int, tuple[socket.socket, int]] = {}
    due = [line + rank for line in (0, _LIFE_LINE) for rank in range(1, launched.num_ranks)]
    until = time.monotonic() + PEER_SECONDS
    with _listen(launched.host) as listening, contextlib.closing(_Door(listening)) as door:
        port = listening.getsockname()[1]
        store = _store(launched)  # rank 0's own store serves the others until they have arrived
        store.set(_key(launched), f"{port}:{secret.hex()}")
        while len(found) < len(due):
            left_seconds = until - time.monotonic()
            if left_seconds <= 0:
                missing = [number % _LIFE_LINE for number in due if number not in found]
                raise EngineDeadError(
                    "rank.missing_peer",
                    rank=missing[0],
                    num_ranks=launched.num_ranks,
                    place=f"{launched.host}:{port}",
                    seconds=f"{PEER_SECONDS:.0f}",
                    detail=_unreachable(launched, listening),
                )
            for connection, hello in door.callers(min(left_seconds, LOOK_SECONDS)):
                given, number, place = _HELLO.unpack(hello)
                if not secrets.compare_digest(given, secret) or number not in due or number in found:
                    connection.close()  # a foreign process, or a second one with this rank
                else:
                    found[number] = connection, pid_at(place)
    _served.add(launched)
    return [Peer(found[rank][0], *found[_LIFE_LINE + rank]) for rank in range(1, launched.num_ranks)]


def _unreachable(launched: Launched, listening: socket.socket) -> str:
    """Explain an address that other nodes cannot reach: a machine's own name may resolve to loopback."""
    address = listening.getsockname()[0]
    if launched.num_local == launched.num_ranks or not ipaddress.ip_address(address).is_loopback:
        return ""
    return f" (MASTER_ADDR={launched.host} is {address} on this node, unreachable from others)"


class _Door:
    """New connections to rank 0 and their hellos, read concurrently, so that a silent one delays none."""

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, tuple[bytearray, float]] = {}
        """Bytes received and deadline by connection."""

    def callers(self, seconds: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Yield connections with a whole hello, for at most `seconds`."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listening:
                with contextlib.suppress(OSError):  # it has closed again
                    self._open(self._listening.accept()[0])
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket), f"{connection} is no socket"
            heard, _ = self._waiting[connection]
            try:
                more = connection.recv(_HELLO.size - len(heard))
            except OSError:
                more = b""
            heard += more
            if len(heard) == _HELLO.size:
                self._forget(connection)
                yield connection, bytes(heard)
            elif not more:
                self._forget(connection).close()
        now = time.monotonic()
        for connection in [one for one, (_, until) in self._waiting.items() if until < now]:
            self._forget(connection).close()

    def close(self) -> None:
        """Close connections without a whole hello."""
        for connection in list(self._waiting):
            self._forget(connection).close()
        self._selector.close()

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._waiting[connection] = bytearray(), time.monotonic() + HELLO_SECONDS
        self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._waiting[connection]
        return connection


def _listen(host: str) -> socket.socket:
    """Listen at a free port of the launcher's address. Rank 0."""
    from holdfast.distributed.rendezvous import serve_at  # torch comes with it

    try:
        return serve_at(host, 0)
    except OSError as error:
        raise ConfigError("rank.cannot_listen", place=f"MASTER_ADDR={host}", reason=error.strerror or error) from error


def serve_launched(launched: Launched, open_rank: OpenRank) -> NoReturn:
    """Serve rank 0 until it ends, then end this program. Every other rank."""
    connection, line = _connect_to_rank_zero(launched)
    with connection, line:
        channel = Channel(connection)
        server = RankServer(channel, Pulse.of_this_process())
        threading.Thread(target=_beat, args=(server, channel, line), name="holdfast-pulse", daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        server.run(open_rank)
    if not server.num_received:
        raise EngineDeadError("rank.turned_away", rank=launched.rank)
    if not server.got_shutdown:
        log.error("rank 0 is gone: this rank ends")
    sys.exit(0 if server.got_shutdown else 1)  # 1 lets the launcher restart all


def _connect_to_rank_zero(launched: Launched) -> tuple[socket.socket, socket.socket]:
    """Connect twice to rank 0's address from the store: for messages and for heartbeats."""
    looking = {"rank": launched.rank, "place": f"{launched.host}:{launched.port}"}
    store = _store(launched)
    try:
        port, _, secret = store.get(_key(launched)).decode().partition(":")
    except RuntimeError as error:
        reason = f"no address within {PEER_SECONDS:.0f} seconds, or it ended: {_first_line(error)}"
        raise EngineDeadError("rank.rank_zero_not_found", reason=reason, **looking) from error
    found = []
    try:
        for number in (launched.rank, _LIFE_LINE + launched.rank):
            connection = socket.create_connection((launched.host, int(port)), PEER_SECONDS)
            found.append(connection)
            connection.sendall(_HELLO.pack(bytes.fromhex(secret), number, own_place()))
    except OSError as error:
        for connection in found:
            connection.close()
        reason = f"no answer at its port {port}: {error.strerror or error}"
        raise EngineDeadError("rank.rank_zero_not_found", reason=reason, **looking) from error
    found[0].settimeout(None)
    _prepare(found[0])
    return found[0], found[1]


def _beat(server: RankServer, channel: Channel, line: socket.socket) -> None:
    """Watchdog thread: send heartbeats, and end this process if rank 0 is dead."""
    with contextlib.suppress(ChannelClosedError, OSError):
        zero = ZeroSigns(line)  # rank 0 starts it once all ranks have arrived
        while not channel.is_other_side_gone():
            channel.try_send(lambda: server.encoded(Heartbeat(0.0)))
            if zero.look(server.pulse.look().step_seconds > 0, server.num_received):
                log.error("rank 0 was silent for %.1f seconds: this rank ends", zero.silent_seconds)
                os._exit(1)
            channel.wait_for_end(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    if not channel.is_closed:
        os._exit(1)


_served: set[Launched] = set()
"""Launches whose ranks already serve an engine of this process."""


def refuse_second(launched: Launched) -> None:
    """Raise ConfigError: a launcher's ranks serve one engine."""
    if launched in _served:
        raise ConfigError("rank.second_engine", num_ranks=launched.num_ranks)


def _key(launched: Launched) -> str:
    """Key of rank 0's address; the store survives restarts."""
    return f"holdfast/{launched.attempt}/{launched.num_ranks}"


def _store(launched: Launched):  # noqa: ANN202 torch's, whose stubs leave it out
    """Open the launcher's store."""
    from holdfast.distributed.rendezvous import c10d  # torch comes with it

    is_master = launched.rank == 0 and not launched.has_store
    patience = timedelta(seconds=PEER_SECONDS)
    try:
        if not is_master:
            _await_store(launched)
        return c10d.TCPStore(
            launched.host, launched.port, is_master=is_master, wait_for_workers=False, timeout=patience
        )
    except (RuntimeError, OSError) as error:
        place = f"{launched.host}:{launched.port}"
        reason = _first_line(error)
        raise EngineDeadError("rank.store_unreachable", rank=launched.rank, place=place, reason=reason) from error


def _await_store(launched: Launched) -> None:
    """Wait until the store listens; raise OSError on timeout. Torch would wait longer and print stack frames."""
    until = time.monotonic() + PEER_SECONDS
    while True:
        try:
            socket.create_connection((launched.host, launched.port), PEER_SECONDS).close()
            return
        except OSError:
            if time.monotonic() >= until:
                raise
        time.sleep(LOOK_SECONDS)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:160]

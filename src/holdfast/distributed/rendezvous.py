"""Rendezvous of the ranks of one engine: rank 0 listens at a free port, and the others get its address.

It uses no global state of torch.distributed, so several engines may live in one process.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, EngineDeadError

c10d: Any = torch.distributed
"""torch.distributed, whose stubs lack groups and stores."""
Store = Any
LOOPBACK = "127.0.0.1"
OPEN_SECONDS = 30.0
POLL_SECONDS = 0.02
Check = Callable[[], None]
"""Raises if waiting is useless."""
Place = socket.socket | tuple[str, int]
"""Rank 0 has its listening socket, every other rank its address."""


def listen_for_ranks(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Listen on rank 0; `getsockname()` returns host and port."""
    try:
        return serve_at(host, port)
    except OSError as error:
        raise ConfigError("rank.cannot_listen", place=f"{host}:{port}", reason=error.strerror or error) from error


def serve_at(host: str, port: int) -> socket.socket:
    """Listen at the first address of that name, IPv4 or IPv6; raise OSError if impossible."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)


def open_store(
    place: Place, mesh: Mesh, timeout_s: float = OPEN_SECONDS, secret: str = "", check: Check | None = None
) -> Store:
    """Open the store once every rank has arrived, or name the missing ones. The store owns the socket from then on.

    Other users of the machine can connect, but without the secret they find nothing.
    """
    patience = timedelta(seconds=timeout_s)
    is_first = isinstance(place, socket.socket)
    host, port = place.getsockname()[:2] if isinstance(place, socket.socket) else place
    try:
        server = c10d.TCPStore(
            host,
            port,
            is_master=is_first,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=place.detach() if isinstance(place, socket.socket) else None,
        )
        store = c10d.PrefixStore(f"holdfast-{secret}", server)
        store.set(_key(mesh.rank), "here")
    except RuntimeError as error:
        found = {"place": f"{host}:{port}", "seconds": f"{timeout_s:g}", "reason": first_line(error)}
        raise EngineDeadError("rank.rank_zero_silent", rank=mesh.rank, **found) from error
    _wait_for_all(store, mesh, timeout_s, check)
    return store


def make_gloo(store: Store, name: str, rank: int, size: int, timeout_s: float) -> Any:  # noqa: ANN401 no stub has it
    """Make a connected gloo group, over the network by which this rank reaches the store."""
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    server = store
    while isinstance(server, c10d.PrefixStore):
        server = server.underlying_store
    own = own_address(server.host, server.port)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, options)


def own_address(host: str, port: int) -> str:
    """Return the address of this machine as seen from that place: its name often resolves to loopback."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as way:
            way.connect(address)  # datagrams: nothing is sent
            return way.getsockname()[0]
    return LOOPBACK


QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Disable torch's own watchdog, since engine/ranks.py watches peers: torch would end this process if one is gone, poll the store, log
that, and delay the end of a group for a minute. It reads these when a group is created."""


def make_nccl(store: Store, name: str, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:  # noqa: ANN401 no stub has it
    """Make a connected NCCL group: one communicator for collectives, sends and receives."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _with_environment(QUIET, os.environ):
        group = c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _with_environment(values: Mapping[str, str], environment: MutableMapping[str, str]) -> Iterator[None]:
    before = {key: value for key, value in environment.items() if key in values}
    environment.update(values)
    try:
        yield
    finally:
        for key in values:
            environment.pop(key, None)
        environment.update(before)


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _wait_for_all(store: Store, mesh: Mesh, timeout_s: float, check: Check | None) -> None:
    missing, end = set(range(mesh.num_ranks)), time.monotonic() + timeout_s
    with lost_peers(f"the rendezvous of {mesh.num_ranks} ranks"):
        while True:
            missing = {rank for rank in missing if not store.check([_key(rank)])}
            if not missing or time.monotonic() > end:
                break
            if check is not None:
                check()
            time.sleep(POLL_SECONDS)
    if missing:
        found = {"num_ranks": mesh.num_ranks, "seconds": f"{timeout_s:g}"}
        raise EngineDeadError("rank.missing_ranks", missing=named(missing), **found)


@contextmanager
def lost_peers(doing: str) -> Iterator[None]:
    """Turn RuntimeError of torch.distributed into EngineDeadError."""
    try:
        yield
    except RuntimeError as error:
        raise EngineDeadError("rank.lost_peer", doing=doing, reason=first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return a library's message in one line, without its advice."""
    text = str(error).partition("\n")[0].partition(". This is")[0]
    return text if len(text) <= 200 else f"{text[:197]}..."


def named(ranks: set[int]) -> str:
    """Name one rank or several."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))

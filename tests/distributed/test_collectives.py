"""Exchanges by gloo: the same answers as lock-step threads to the bit, memory as planned, and peers that die or never come."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributed.exchange_steps import NEEDS, all_calls, some_steps
from distributed.gloo_ranks import CPU, run_gloo
from distributed.lock_step import LockStep
from error_codes import raises_code
from holdfast.distributed import collectives
from holdfast.distributed.collectives import CollectiveExchange, NcclPeers, open_collectives
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import exchange_terms, in_stage
from holdfast.distributed.linked import LinkedExchange
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.distributed.rendezvous import listen_for_ranks, make_gloo
from holdfast.errors import ConfigError, EngineDeadError
from holdfast.memory.ledger import Ledger

PROGRAM = Path(__file__).parent / "gloo_ranks.py"


def two_steps(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
    return some_steps(mesh, exchange)


@pytest.mark.parametrize(
    "ranks",
    [meshes(2), meshes(4), meshes(1, [(0, 1), (1, 2)]), meshes(2, [(0, 1), (1, 2), (2, 3)])],
    ids=["tensor2", "tensor4", "stages2", "tensor2-stages3"],
)
def test_gloo_collectives_equal_lock_step_within_plan(ranks: tuple[Mesh, ...]) -> None:
    ledgers = [Ledger() for _ in ranks]
    held: dict[int, dict[str, int]] = {}

    def work(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
        held[mesh.rank] = {entry.owner: entry.num_bytes for entry in ledgers[mesh.rank]}
        return two_steps(mesh, exchange)

    found = run_gloo(ranks, NEEDS, work, ledgers)
    wanted = LockStep(ranks, NEEDS).run(two_steps)
    for mesh, one, other in zip(ranks, found, wanted, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), mesh
        terms = exchange_terms(NEEDS, mesh, "gloo")
        planned = {term.owner: term.num_bytes for term in terms if not term.owner.startswith("sampling/")}
        assert held[mesh.rank] == planned
    assert all(ledger.total_bytes == 0 for ledger in ledgers)


class NcclOverGloo:
    """In the place of ProcessGroupNCCL: calls between start and end of coalescing run when their end is waited for."""

    def __init__(self, store: object, name: str, rank: int, size: int, timeout_s: float, device: torch.device) -> None:
        self._group = make_gloo(store, name, rank, size, timeout_s)
        self._together: list[tuple[str, torch.Tensor, int]] | None = None

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> SimpleNamespace:
        calls, self._together = self._together or [], None

        def wait() -> None:
            works = [getattr(self._group, verb)([tensor], rank, 0) for verb, tensor, rank in calls]
            for work in works:
                work.wait()

        return SimpleNamespace(wait=wait)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> object:
        return self._call("send", tensors, rank)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> object:
        return self._call("recv", tensors, rank)

    def _call(self, verb: str, tensors: list[torch.Tensor], rank: int) -> object:
        if self._together is not None:
            return self._together.append((verb, tensors[0], rank))
        return getattr(self._group, verb)(tensors, rank, 0)

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)


@pytest.mark.parametrize("ranks", [meshes(2), meshes(2, [(0, 1), (1, 2), (2, 3)])], ids=["tensor2", "tensor2-stages3"])
def test_nccl_calls_equal_lock_step(monkeypatch, ranks: tuple[Mesh, ...]) -> None:
    """Among stages NCCL has no collectives of a stage: sends and receives in one group stand for them."""
    monkeypatch.setattr(collectives, "make_nccl", NcclOverGloo)
    monkeypatch.setattr(collectives, "open_peers", lambda *arguments: (NcclPeers(*arguments), 0))
    found = run_gloo(ranks, NEEDS, two_steps)
    for mesh, one, other in zip(ranks, found, LockStep(ranks, NEEDS).run(two_steps), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), mesh


class LateSends:
    """In the place of peers: a send is under way until it was waited for, and its memory has to stay as it is."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, rank: int) -> SimpleNamespace:
        number, given = len(self.sent), tensor.clone()
        self.sent.append(given)

        def wait() -> None:
            assert torch.equal(tensor, given), f"the memory of send {number} was written before it ended"
            self.waited.append(number)

        return SimpleNamespace(wait=wait)

    def close(self) -> None:
        """Nothing."""


def test_send_rows_waits_for_the_send_whose_slot_it_takes() -> None:
    mesh, peers = meshes(1, [(0, 1), (1, 2), (2, 3)])[0], LateSends()
    exchange = CollectiveExchange(mesh, NEEDS, peers, CPU, Ledger())  # type: ignore[arg-type]
    for number in range(8):
        rows = torch.full((1 + number % 2, 4), float(number))
        exchange.send_rows(rows)
        rows.fill_(-1.0)
        assert peers.waited == list(range(number - 2))
    assert [float(rows[0, 0]) for rows in peers.sent] == list(range(8))
    exchange.close()


def test_linked_stages_equal_lock_step_within_their_plan() -> None:
    """Each stage with an exchange of its own, here over gloo in the place of symmetric memory."""
    ranks = meshes(2, [(0, 1), (1, 2), (2, 3)])
    ledgers, held = [Ledger() for _ in ranks], {}
    places = [listen_for_ranks() for _ in range(3)]
    addresses = [place.getsockname()[:2] for place in places]

    def work(mesh: Mesh, whole: Exchange) -> list[torch.Tensor]:
        own_needs, own_mesh = in_stage(NEEDS, mesh)
        place = addresses[mesh.stage] if own_mesh.rank else places[mesh.stage]
        own_ledger, abandoned = Ledger(), []
        stage = open_collectives(own_mesh, own_needs, place, CPU, own_ledger, timeout_s=20)
        stage.abandon = lambda: abandoned.append(mesh.rank)  # type: ignore[method-assign]
        assert isinstance(whole, CollectiveExchange)
        linked = LinkedExchange(mesh, NEEDS, stage, whole.peers, CPU, ledgers[mesh.rank])
        linked.warm()
        held[mesh.rank] = {entry.owner: entry.num_bytes for entry in ledgers[mesh.rank]}
        found = two_steps(mesh, linked)
        linked.abandon()
        linked.close()
        linked.close()
        assert abandoned == [mesh.rank]
        assert own_ledger.peak_bytes > own_ledger.total_bytes == 0, "the exchange of the stage stays open"
        return found

    for mesh, one, other in zip(
        ranks, run_gloo(ranks, NEEDS, work), LockStep(ranks, NEEDS).run(two_steps), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), mesh
        stages_own = ("exchange/rows", "exchange/signals", "exchange/rounding", "collectives/nccl", "sampling/shares")
        terms = {term.owner: term.num_bytes for term in exchange_terms(NEEDS, mesh, "linked")}
        assert held[mesh.rank] == {owner: count for owner, count in terms.items() if owner not in stages_own}
    assert all(ledger.total_bytes == 0 for ledger in ledgers)


def test_collectives_of_two_engines_interleave_in_one_process() -> None:
    ranks = meshes(2)

    def inner(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
        return two_steps(mesh, exchange)

    def outer(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
        first = all_calls(mesh, exchange, seed=0)
        if mesh.rank == 0:
            run_gloo(ranks, NEEDS, inner)
        return [*first, *all_calls(mesh, exchange, seed=1)]

    for one, other in zip(run_gloo(ranks, NEEDS, outer), LockStep(ranks, NEEDS).run(two_steps), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_open_collectives_names_missing_ranks() -> None:
    place = listen_for_ranks()
    with raises_code("rank.missing_ranks", EngineDeadError):
        open_collectives(meshes(3)[0], NEEDS, place, CPU, Ledger(), timeout_s=0.2)


def test_open_collectives_failed_check_ends_the_wait() -> None:
    def give_up() -> None:
        raise EngineDeadError("rank.dead", reason="rank 1 ended")

    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 ended"):
        open_collectives(meshes(2)[0], NEEDS, listen_for_ranks(), CPU, Ledger(), timeout_s=30, check=give_up)
    assert time.monotonic() - began < 10


def test_open_collectives_ignores_foreign_processes() -> None:
    place = listen_for_ranks()
    address = place.getsockname()[:2]
    strangers = []

    def come() -> None:
        with pytest.raises(EngineDeadError) as caught:
            open_collectives(meshes(2)[1], NEEDS, address, CPU, Ledger(), timeout_s=0.5, secret="guessed")
        strangers.append(str(caught.value))

    thread = threading.Thread(target=come)
    thread.start()
    with raises_code("rank.missing_ranks", EngineDeadError):
        open_collectives(meshes(2)[0], NEEDS, place, CPU, Ledger(), timeout_s=0.5, secret="known")
    thread.join()
    assert len(strangers) == 1


def test_open_collectives_without_rank_0_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with raises_code("rank.cannot_listen", ConfigError):
            listen_for_ranks(port=port)
    ledger = Ledger()
    with raises_code("rank.rank_zero_silent", EngineDeadError):
        open_collectives(meshes(2)[1], NEEDS, ("127.0.0.1", port), CPU, ledger, timeout_s=0.3)
    assert not ledger.peak_bytes


@pytest.mark.slow
def test_collectives_killed_peer_raises_within_a_second() -> None:
    command = [sys.executable, str(PROGRAM)]
    first = subprocess.Popen([*command, "0", "3", "0"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    others = [subprocess.Popen([*command, str(rank), "3", port], stdout=subprocess.PIPE, text=True) for rank in (1, 2)]
    assert first.stdout.readline().startswith("sums")
    killed = time.monotonic()
    others[1].send_signal(signal.SIGKILL)
    for process in (first, others[0], others[1]):
        said, _ = process.communicate(timeout=60)
        if process is others[1]:
            break
        reported, kind, code, doing = json.loads(said.splitlines()[-1])
        assert reported - killed < 1.0
        assert kind == "EngineDeadError"
        assert code == "rank.lost_peer"
        assert doing.startswith("sum_rows of [1, 4]")


def test_open_collectives_without_memory_closes_connections(monkeypatch) -> None:
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(collectives, "allocate_held", refuse)
    monkeypatch.setattr(collectives.GlooPeers, "close", lambda self: closed.append("closed"))
    with pytest.raises(MemoryError, match="no room"):
        open_collectives(meshes(1)[0], NEEDS, listen_for_ranks(), CPU, Ledger())
    assert closed == ["closed"]

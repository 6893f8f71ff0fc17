"""Exchanges over symmetric memory, with kernels and signals in the interpreter: the answers of lock-step threads, to the bit."""

import json
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import InterpreterError

from distributed.exchange_steps import NEEDS, some_steps
from distributed.interpreted_ranks import InterpretedRanks
from distributed.lock_step import LockStep
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import exchange_terms
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.distributed.rendezvous import c10d
from holdfast.distributed.symmetric import agree_blocks
from holdfast.kernels.exchange import links, signals, sum_rows
from holdfast.kernels.exchange.signals import MAX_BLOCKS
from holdfast.kernels.triton_compat import kernel_constant
from holdfast.memory.ledger import Ledger

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
FLOATS = (torch.float32, torch.float16)
"""The interpreter truncates what it stores as bfloat16."""


def steps(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
    """More than there are slots between stages."""
    return some_steps(mesh, exchange, 2 + mesh.num_stages // 2, dtypes=FLOATS)


@pytest.mark.parametrize(
    "ranks",
    [meshes(2), meshes(3), meshes(1, [(0, 1), (1, 2)]), meshes(2, [(0, 1), (1, 2)])],
    ids=["tensor2", "tensor3", "stages2", "tensor2-stages2"],
)
def test_symmetric_steps_equal_lock_step(monkeypatch, ranks: tuple[Mesh, ...]) -> None:
    ledgers, held = [Ledger() for _ in ranks], {}
    monkeypatch.setattr(sum_rows, "TWO_PASS_BYTES", 1)  # three ranks add up shares

    def work(mesh: Mesh, exchange: Exchange) -> list[torch.Tensor]:
        held[mesh.rank] = {entry.owner: entry.num_bytes for entry in ledgers[mesh.rank]}
        return steps(mesh, exchange)

    found = InterpretedRanks(ranks, monkeypatch).run(NEEDS, work, ledgers)
    for mesh, one, other in zip(ranks, found, LockStep(ranks, NEEDS).run(steps), strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), mesh
        terms = exchange_terms(NEEDS, mesh, "symmetric")
        assert held[mesh.rank] == {term.owner: term.num_bytes for term in terms if term.owner != "sampling/shares"}
    assert all(ledger.total_bytes == 0 for ledger in ledgers)


@pytest.mark.parametrize("ranks", [meshes(2), meshes(1, [(0, 1), (1, 2)])], ids=["tensor2", "stages2"])
def test_symmetric_waits_end_when_a_peer_abandons(monkeypatch, ranks: tuple[Mesh, ...]) -> None:
    """All that follow end too: the peer comes to none of them."""

    def work(mesh: Mesh, exchange: Exchange) -> bool:
        if mesh.rank:
            exchange.abandon()
            return True
        for _ in range(3):
            if mesh.tensor_size > 1:
                exchange.sum_rows(exchange.room(2, 8, torch.float32).fill_(1.0), torch.empty(2, 8))
                exchange.end_step()
            else:
                exchange.send_rows(torch.ones(2, 8))
                exchange.gather_logits(None, exchange.whole_logits(2))
        return True

    assert InterpretedRanks(ranks, monkeypatch).run(NEEDS, work) == [True, True]


@pytest.mark.parametrize(
    ("devices", "num_processors", "num_blocks"),
    [("ab", 132, MAX_BLOCKS), ("aa", 132, 16), ("aabbb", 132, 11), ("aaaa", 8, 1)],
    ids=["one each", "two on one", "three on one", "few processors"],
)
def test_symmetric_ranks_on_one_device_agree_on_few_blocks(
    monkeypatch, devices: str, num_processors: int, num_blocks: int
) -> None:
    """All that can wait at once take one processor in four."""
    store, found = c10d.HashStore(), []
    for rank, device in enumerate(devices):
        own = {"device": device, "num_processors": num_processors}
        store.set(f"device/{rank}", json.dumps(own))
    for mesh, device in zip(meshes(len(devices)), devices, strict=True):
        properties = SimpleNamespace(uuid=device, multi_processor_count=num_processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        found.append(agree_blocks(store, mesh, torch.device("cpu"), 4))
    assert found == [num_blocks] * len(devices)


@pytest.mark.parametrize("call", ["sum", "end", "fetch", "offer"])
def test_symmetric_ranks_wait_for_a_peer_one_call_late(monkeypatch, call: str) -> None:
    """Rank 1 makes the first call and not the second: rank 0 may not take what lies there."""
    ranks = meshes(2) if call in ("sum", "end") else meshes(1, [(0, 1), (1, 2)])
    waiting = InterpretedRanks(ranks, monkeypatch)
    for module in (signals, links):
        monkeypatch.setattr(module, "MAX_POLLS", kernel_constant(20))
    ended = []

    def work(mesh: Mesh, exchange: Exchange) -> None:
        rows = torch.ones(2, 8)
        for number in range(2):
            if call in ("sum", "end"):
                exchange.sum_rows(exchange.room(2, 8, torch.float32).fill_(1.0), rows)
                if call == "end" and number == 0:
                    exchange.end_step()
                if mesh.rank:
                    return
            elif call == "fetch" and mesh.rank == 0:
                exchange.send_rows(rows)
                return
            elif call == "fetch":
                exchange.receive_rows(rows)
            elif mesh.rank == 0:
                for _ in range(2 - number):  # as many as there are slots, and one more
                    exchange.send_rows(rows)
            else:
                return
            ended.append(call)

    with pytest.raises(InterpreterError, match="a signal that does not come"):
        waiting.run(NEEDS, work)
    assert ended == [call]

"""Exchanges over calls that end late: each is waited for before its memory is used again, and no earlier."""

from typing import Any

import pytest
import torch

from distributed.exchange_steps import HIDDEN, NEEDS, ROWS, VOCAB
from distributed.late_group import LateGroup
from holdfast.distributed import collectives
from holdfast.distributed.collectives import CollectiveExchange, GlooPeers, NcclPeers
from holdfast.distributed.linked import LinkedExchange
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.memory.ledger import Ledger

CPU = torch.device("cpu")
STAGES = meshes(2, [(0, 1), (1, 2), (2, 3)])
RANKS = [*meshes(2), *STAGES]
WITH_LOGITS = [mesh for mesh in RANKS if mesh.is_last_stage or mesh.rank == 0]
KINDS = ("gloo", "nccl")


def given(verb: str, rank: int) -> float:
    """What a peer sends."""
    return {"recv": 10.0, "broadcast": 20.0, "gather": 30.0}[verb] + rank


def open_late(monkeypatch: pytest.MonkeyPatch, kind: str, mesh: Mesh) -> tuple[CollectiveExchange, list[LateGroup]]:
    """The exchange of one rank, and the groups of its calls."""
    groups: list[LateGroup] = []

    def make(store: object, name: str, rank: int, size: int, *_: object) -> Any:
        groups.append(LateGroup(rank, given))
        return groups[-1]

    monkeypatch.setattr(collectives, "make_gloo", make)
    monkeypatch.setattr(collectives, "make_nccl", make)
    store: Any = object()
    peers = GlooPeers(store, mesh, 1.0) if kind == "gloo" else NcclPeers(store, mesh, 1.0, CPU)
    return CollectiveExchange(mesh, NEEDS, peers, CPU, Ledger()), groups


def check_ended(groups: list[LateGroup], most: int = 0) -> None:
    for group in groups:
        group.look()
        assert len(group.under_way) <= most, "a call was not waited for"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", RANKS, ids=lambda mesh: f"rank {mesh.rank} of {mesh.num_ranks}")
def test_exchange_calls_of_a_stage_end_before_they_return(monkeypatch, kind, mesh):
    exchange, groups = open_late(monkeypatch, kind, mesh)
    is_link = kind == "nccl" and mesh.num_stages > 1
    verb, first = ("recv", mesh.stage * mesh.tensor_size) if is_link else ("gather", 0)
    other = given(verb, first + 1 - mesh.tensor_rank)
    for number in range(3):
        own = float(number + 1)
        room = exchange.room(ROWS, HIDDEN, torch.float32).fill_(own)
        summed = exchange.sum_rows(room, torch.empty(ROWS, HIDDEN))
        assert summed.eq(own + other).all()
        room = exchange.room(ROWS, 3, torch.float32).fill_(own)
        both = [other, own] if mesh.tensor_rank else [own, other]
        columns = exchange.gather_columns(room, torch.empty(ROWS, 6))
        assert columns[0].tolist() == [both[0]] * 3 + [both[1]] * 3
        ids = torch.full((ROWS,), 7 + number)
        exchange.share_tokens(ids)
        shared = 7 + number if mesh.tensor_rank == 0 else given("recv", first) if is_link else given("broadcast", 0)
        assert ids.eq(shared).all()
        check_ended(groups)
        exchange.end_step()
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", WITH_LOGITS, ids=lambda mesh: f"rank {mesh.rank} of {mesh.num_ranks}")
def test_exchange_of_logits_ends_before_it_returns(monkeypatch, kind, mesh):
    exchange, groups = open_late(monkeypatch, kind, mesh)
    share = NEEDS.vocab_share(mesh)
    width = max(0, min(share, VOCAB - mesh.tensor_rank * share))
    for number in range(2):
        # A part of a wider buffer goes through memory of the exchange.
        wide = torch.full((ROWS, width + 1), float(number))
        part = wide[:, :width] if mesh.is_last_stage else None
        whole = exchange.whole_logits(ROWS).fill_(float("nan")) if mesh.rank == 0 else None
        exchange.gather_logits(part, whole)
        wide.fill_(float("nan"))
        if whole is not None:
            assert not whole.isnan().any()
            assert len(whole.unique()) == 2, "a share from each rank"
        small = torch.full((ROWS, 2), float(number)) if mesh.is_last_stage else None
        assert not exchange.gather_small(small, torch.empty(exchange.size, ROWS, 2)).isnan().any()
        check_ended(groups)
    if mesh.num_stages > 1 and mesh.is_last_stage:
        head = [tensor for group in groups for rank, tensor in group.sent if rank == 0]
        assert head
        assert not any(tensor.isnan().any() for tensor in head)


@pytest.mark.parametrize("is_linked", [False, True], ids=["collectives", "linked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", STAGES, ids=lambda mesh: f"rank {mesh.rank}")
def test_exchange_keeps_sent_rows_until_they_have_gone(monkeypatch, kind, mesh, is_linked):
    """As many are under way as there are stages; the oldest is waited for before its slot is written again."""
    exchange, groups = open_late(monkeypatch, kind, mesh)
    if is_linked:
        stage, _ = open_late(monkeypatch, kind, meshes(2)[mesh.tensor_rank])
        exchange = LinkedExchange(mesh, NEEDS, stage, exchange.peers, CPU, Ledger())
    x_TH, sent = torch.empty(ROWS, HIDDEN), []
    for number in range(8 if not mesh.is_last_stage else 0):
        rows_TH = x_TH[: 1 + number % ROWS].fill_(float(number))
        exchange.send_rows(rows_TH)
        sent.append(rows_TH.clone())
        x_TH.fill_(float("nan"))
        check_ended(groups, most=mesh.num_stages)
        num_waits = sum(group.num_waits for group in groups)
        assert num_waits == max(0, number + 1 - mesh.num_stages), "no send waits for the last one"
    found = [(rank, tensor) for group in groups for rank, tensor in group.sent]
    assert [rank for rank, _ in found] == [mesh.rank + mesh.tensor_size] * len(sent)
    assert all(torch.equal(one, other) for (_, one), other in zip(found, sent, strict=True))
    if not mesh.is_first_stage:
        for _ in range(2):
            got_TH = exchange.receive_rows(torch.empty(ROWS, HIDDEN))
            assert got_TH.eq(given("recv", mesh.rank - mesh.tensor_size)).all()
        check_ended(groups, most=mesh.num_stages)

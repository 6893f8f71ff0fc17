"""NCCL's groups without a GPU: settings of torch while one is made, which of them a call takes, and how they end."""

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from holdfast.distributed import rendezvous
from holdfast.distributed.collectives import NcclPeers
from holdfast.distributed.mesh import Mesh, meshes

STAGES = meshes(2, [(0, 1), (1, 2), (2, 3)])
X = torch.zeros(4)


class FakeGroup:
    """Stands for ProcessGroupNCCL: records its calls."""

    made: ClassVar["list[FakeGroup]"] = []

    def __init__(self, store: str, rank: int, size: int, options: object) -> None:
        self.name, self.rank, self.size = store, rank, size
        self.environment = dict(os.environ)
        self.calls: list[tuple[Any, ...]] = []
        FakeGroup.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("connect",))

    def __getattr__(self, name: str) -> Any:
        def call(*reported: Any) -> Any:
            self.calls.append((name, *(one for one in reported if isinstance(one, int))))
            return SimpleNamespace(wait=lambda: self.calls.append(("wait",)))

        return call


@pytest.fixture(autouse=True)
def groups(monkeypatch) -> list[FakeGroup]:
    FakeGroup.made = []
    making = type("Making", (FakeGroup,), {"Options": SimpleNamespace})
    fake = SimpleNamespace(PrefixStore=lambda name, store: name, ProcessGroupNCCL=making)
    monkeypatch.setattr(rendezvous, "c10d", fake)
    return FakeGroup.made


def peers_of(mesh: Mesh) -> NcclPeers:
    return NcclPeers(object(), mesh, 1.0, torch.device("cpu"))


def test_nccl_groups_disable_torch_watchdog_and_restore_settings(monkeypatch, groups) -> None:
    kept, given = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(kept, "1")
    monkeypatch.delenv(given, raising=False)
    peers_of(meshes(2)[0])
    (group,) = groups
    assert {key: group.environment[key] for key in rendezvous.QUIET} == rendezvous.QUIET
    assert os.environ[kept] == "1"
    assert given not in os.environ
    assert group.calls == [("connect",)]


@pytest.mark.parametrize("mesh", STAGES, ids=lambda mesh: f"rank {mesh.rank}")
def test_nccl_groups_last_stage_and_rank_0_share_a_head_group(mesh: Mesh, groups) -> None:
    peers_of(mesh)
    made = [(group.name, group.rank, group.size) for group in groups]
    head = {0: 0, 4: 1, 5: 2}.get(mesh.rank)
    assert made == [("nccl", mesh.rank, 6), *([] if head is None else [("nccl-head", head, 3)])]


def test_nccl_groups_separate_rows_from_logits(groups) -> None:
    """Rank 0 sends rows of a step before it asks for the logits of an earlier one: a group has one order of calls."""
    first, last = peers_of(STAGES[0]), peers_of(STAGES[5])
    rows, head, rows_of_last, head_of_last = groups
    first.send(X, 2)
    first.receive_head(X, 1)
    last.receive(X, 3)
    last.send_head(X)
    assert rows.calls[1:] == [("send", 2, 0)]
    assert head.calls[1:] == [("recv", 2, 0), ("wait",)]
    assert rows_of_last.calls[1:] == [("recv", 3, 0), ("wait",)]
    assert head_of_last.calls[1:] == [("send", 0, 0), ("wait",)]


def test_nccl_group_is_aborted_once(groups) -> None:
    peers = peers_of(STAGES[4])
    peers.abandon()
    peers.abandon()
    peers.close()
    assert [group.calls.count(("abort",)) for group in groups] == [1, 1]
    alone = peers_of(meshes(2)[1])
    alone.close()
    assert groups[-1].calls.count(("abort",)) == 1

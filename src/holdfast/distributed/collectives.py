"""CollectiveExchange: collectives by torch.distributed: gloo among CPUs, NCCL between nodes.

S ranks that share layers; T, H, X, Y, R, V, W as in distributed/exchange.py

Sums are an all-gather and an addition in float32, in rank order: the order of a library's all-reduce depends on the
size. So every rank has the same bits, and the same as over symmetric memory.

Gloo has a group for the ranks of a stage and one for all, without global state. NCCL has one communicator for all;
calls among some of its ranks are grouped sends and receives. On a GPU calls are enqueued and awaited in the stream,
never by the host, in preallocated memory: a graph of one stage's steps may capture them.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.distributed.exchange_plan import NCCL_REASON, ExchangeNeeds, exchange_specs, nccl_bytes
from holdfast.distributed.held_memory import HeldExchange, HeldMemory, allocate_held
from holdfast.distributed.mesh import Mesh
from holdfast.distributed.rendezvous import (
    OPEN_SECONDS,
    Check,
    Place,
    Store,
    lost_peers,
    make_gloo,
    make_nccl,
    open_store,
)
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows
from holdfast.kernels.exchange.gather_rows import gather_columns_reference
from holdfast.kernels.exchange.sum_rows import add_parts
from holdfast.memory.ledger import Ledger
from holdfast.memory.sizes import format_bytes
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.observability.log import get_logger

log = get_logger(__name__)
CALL_SECONDS = 120.0
"""Timeout of a call. A dead peer is detected sooner, by its connection and heartbeat."""


class PeersOfAll:
    """Sends and receives among all ranks. Calls but `send` wait, on a GPU in its stream."""

    _all: Any
    """Group of all ranks."""

    def send(self, tensor: torch.Tensor, rank: int) -> Any:  # noqa: ANN401 a Work
        return self._all.send([tensor], rank, 0)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._all.recv([tensor], rank, 0).wait()


class GlooPeers(PeersOfAll):
    """Two groups: the stage's (by tensor rank), and, with several stages, all ranks' (by rank).

    A tensor that `send` takes must not change until the returned work is awaited. Other calls wait, on a GPU in its
    stream.
    """

    def __init__(self, store: Store, mesh: Mesh, timeout_s: float) -> None:
        self._store = store  # rank 0's serves the others
        self._first_of_last = (mesh.num_stages - 1) * mesh.tensor_size
        self._stage = make_gloo(store, f"stage{mesh.stage}", mesh.tensor_rank, mesh.tensor_size, timeout_s)
        self._all = (
            make_gloo(store, "all", mesh.rank, mesh.num_ranks, timeout_s) if mesh.num_stages > 1 else self._stage
        )

    def gather(self, part_N: torch.Tensor, out_SN: torch.Tensor) -> None:
        """All-gather in the stage; the part may be its own place in the output."""
        self._stage._allgather_base(out_SN.view(-1), part_N.view(-1)).wait()

    def share(self, tensor: torch.Tensor) -> None:
        """Broadcast from the first rank of the stage."""
        self._stage.broadcast(tensor, 0).wait()

    def send_head(self, tensor: torch.Tensor) -> None:
        """Send from a rank of the last stage to rank 0."""
        self.send(tensor, 0).wait()

    def receive_head(self, tensor: torch.Tensor, place: int) -> None:
        self.receive(tensor, self._first_of_last + place)

    def abandon(self) -> None:
        """Do nothing: the connection to a dead peer closes, and so does every wait for it."""

    def close(self) -> None:
        for group in {self._stage, self._all}:
            group.abort()


class NcclPeers(PeersOfAll):
    """One communicator among all; with stages another between the last one and rank 0.

    Calls of a communicator run in order, and a send ends when it is received. Rank 0 sends the rows of a step before
    it receives the logits of an earlier one, and the last stage sends those before it receives the rows: one
    communicator would deadlock.
    """

    def __init__(self, store: Store, mesh: Mesh, timeout_s: float, device: torch.device) -> None:
        self._mesh = mesh
        self._store = store
        self._first = mesh.stage * mesh.tensor_size
        self._all = make_nccl(store, "nccl", mesh.rank, mesh.num_ranks, timeout_s, device)
        self._head = self._all
        if mesh.num_stages > 1 and (mesh.rank == 0 or mesh.is_last_stage):
            place = 0 if mesh.rank == 0 else 1 + mesh.tensor_rank
            self._head = make_nccl(store, "nccl-head", place, 1 + mesh.tensor_size, timeout_s, device)
        self._ending = threading.Lock()
        self._open_groups = [self._head, self._all]

    def gather(self, part_N: torch.Tensor, out_SN: torch.Tensor) -> None:
        if self._mesh.num_stages == 1:
            self._all._allgather_base(out_SN.view(-1), part_N.view(-1)).wait()
            return
        own = out_SN[self._mesh.tensor_rank]
        if own.data_ptr() != part_N.data_ptr():
            own.copy_(part_N.view(own.shape))
        self._all._start_coalescing()
        for place in self._others():
            self._all.send([own], self._first + place, 0)
            self._all.recv([out_SN[place]], self._first + place, 0)
        self._all._end_coalescing().wait()

    def share(self, tensor: torch.Tensor) -> None:
        if self._mesh.num_stages == 1:
            self._all.broadcast(tensor, 0).wait()
        elif self._mesh.tensor_rank:
            self.receive(tensor, self._first)
        elif self._mesh.tensor_size > 1:
            self._all._start_coalescing()
            for place in self._others():
                self._all.send([tensor], self._first + place, 0)
            self._all._end_coalescing().wait()

    def send_head(self, tensor: torch.Tensor) -> None:
        self._head.send([tensor], 0, 0).wait()

    def receive_head(self, tensor: torch.Tensor, place: int) -> None:
        first = 0 if self._head is self._all else 1
        self._head.recv([tensor], first + place, 0).wait()

    def abandon(self) -> None:
        """Abort every call. NCCL then waits for graphs that have captured it, and so does the caller."""
        with self._ending:
            for group in dict.fromkeys(self._open_groups):
                group.abort()
            self._open_groups.clear()

    def close(self) -> None:
        self.abandon()

    def _others(self) -> list[int]:
        return [place for place in range(self._mesh.tensor_size) if place != self._mesh.tensor_rank]


Peers = GlooPeers | NcclPeers


class CollectiveExchange(HeldExchange):
    """The exchange of one rank; see distributed/exchange.py. A peer that dies makes every call an EngineDeadError."""

    def __init__(
        self,
        mesh: Mesh,
        needs: ExchangeNeeds,
        peers: Peers,
        device: torch.device,
        ledger: Ledger,
        specs: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        """`specs`: the tensors it holds, if not all of the plan."""
        kind = "gloo" if device.type == "cpu" else "nccl"
        specs = exchange_specs(needs, mesh, kind) if specs is None else specs
        tensors, self._arenas = allocate_held(specs, device, ledger, f"exchange of {mesh.num_ranks} ranks by {kind}")
        super().__init__(HeldMemory(tensors, needs, mesh))
        self._wide_F = tensors["exchange/signals"].view(torch.float32) if "exchange/signals" in tensors else None
        self._device = device
        self._peers: Peers | None = peers
        self._ledger = ledger
        self._nccl_owner = "collectives/nccl" if kind == "nccl" else None
        if self._nccl_owner is not None:
            ledger.record(self._nccl_owner, nccl_bytes(mesh), NCCL_REASON)
        self._num_sent = 0
        self._under_way: list[Any] = [None] * mesh.num_stages

    @property
    def peers(self) -> Peers:
        assert self._peers is not None, "the exchange is closed"
        return self._peers

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        assert out_TH.is_contiguous(), f"{out_TH.stride()=}: a sum is dense"
        parts_STH = self._gather("sum_rows", part_TH)
        assert self._wide_F is not None, "the exchange is closed"
        return add_parts(parts_STH.unbind(), out_TH, self._wide_F)

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        parts_STH = self._gather("add_rows", part_TH)
        return add_rows(parts_STH.unbind(), onto)

    def _gather(self, verb: str, part: torch.Tensor) -> torch.Tensor:
        """All-gather the parts of all ranks."""
        self._held.take(part)
        if self.size == 1 or not part.numel():
            return part.unsqueeze(0).expand(self.size, *part.shape)
        gathered = self._held.tensors["exchange/gathered"].view(-1)[: self.size * part.nbytes]
        parts = gathered.view(part.dtype).view(self.size, *part.shape)
        with lost_peers(f"{verb} of {list(part.shape)} on rank {self.mesh.rank}"):
            self.peers.gather(part, parts)
        return parts

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        assert out_TY.shape == (part_TX.shape[0], self.size * part_TX.shape[1]), f"{part_TX.shape=} {out_TY.shape=}"
        return gather_columns_reference(self._gather("gather_columns", part_TX).unbind(), out_TY)

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        assert (out_RW is not None) == (self.mesh.rank == 0), f"rank {self.mesh.rank} passes {out_RW=}"
        with lost_peers(f"the gather of logits on rank {self.mesh.rank}"):
            if out_RW is None:
                assert part_RV is not None, "a rank of the last stage has a part"
                dense = part_RV if part_RV.is_contiguous() else self._held.share_room(*part_RV.shape).copy_(part_RV)
                if dense.numel():
                    self.peers.send_head(dense)
                return
            for place, slot_RV in enumerate(self._shares(out_RW)):
                if part_RV is not None and place == self.rank:
                    slot_RV.copy_(part_RV)
                elif slot_RV.numel():
                    given_RV = self._held.share_room(*slot_RV.shape)
                    self.peers.receive_head(given_RV, place)
                    slot_RV.copy_(given_RV)

    def _shares(self, out_RW: torch.Tensor) -> list[torch.Tensor]:
        assert out_RW.shape[1] == self._held.needs.vocab_size, f"{out_RW.shape=} {self._held.needs=}"
        return list(out_RW.split([self._held.share_width(place) for place in range(self.size)], dim=1))

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        with lost_peers(f"the gather of {list(out_SRX.shape)} on rank {self.mesh.rank}"):
            if part_RX is not None:
                out_SRX[self.rank].copy_(part_RX)
                if self.size > 1:
                    self.peers.gather(out_SRX[self.rank], out_SRX)
                if self.mesh.num_stages > 1 and self.rank == 0:
                    self.peers.send_head(out_SRX)
            else:
                self.peers.receive_head(out_SRX, 0)
        return out_SRX

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        if self.size > 1:
            with lost_peers(f"the broadcast of {ids_T.shape[0]} tokens on rank {self.mesh.rank}"):
                self.peers.share(ids_T)

    def send_rows(self, x_TH: torch.Tensor) -> None:
        slot = self._num_sent % self.mesh.num_stages
        self._num_sent += 1
        with lost_peers(f"the send of rows on rank {self.mesh.rank}"):
            if self._under_way[slot] is not None:
                self._under_way[slot].wait()
            sent_TH = self._held.hidden_slot(slot, x_TH).copy_(x_TH)
            self._under_way[slot] = self.peers.send(sent_TH, self.mesh.rank + self.size)

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        assert out_TH.is_contiguous(), f"{out_TH.stride()=}: rows between stages are dense"
        with lost_peers(f"the receive of rows on rank {self.mesh.rank}"):
            self.peers.receive(out_TH, self.mesh.rank - self.size)
        return out_TH

    def end_step(self) -> None:
        self._held.turn = 0  # each call copies its part, so no peer reads a buffer

    def abandon(self) -> None:
        peers = self._peers
        if peers is not None:
            peers.abandon()

    def close(self) -> None:
        if self._peers is None:
            return
        self._peers.close()
        self._peers = None
        self._held.tensors.clear()
        self._under_way.clear()
        self._wide_F = None
        for arena in self._arenas:
            arena.release()
        if self._nccl_owner is not None:
            self._ledger.release(self._nccl_owner)

    def warm(self) -> None:
        """Make every kind of call once, so that nothing connects or allocates later.

        NCCL connects an algorithm at its first use, by size. So call with the smallest and the largest size.
        """
        is_nccl = self._nccl_owner is not None
        if "exchange/rows" in self._held.tensors:
            room_bytes = self._held.tensors["exchange/rows"][0].nbytes
            for num_elements in {1, room_bytes // 4} if is_nccl else {1}:
                self._warm_rows(num_elements)
        if "exchange/logits" in self._held.tensors:
            for num_rows in {1, self._held.needs.num_logit_rows} if is_nccl else {1}:
                self._warm_head(num_rows)
        if self.mesh.num_stages > 1:
            hidden_bytes = self._held.tensors["pipeline/hidden"][0].nbytes
            for num_elements in {1, hidden_bytes // 4} if is_nccl else {1}:
                row_1H = self._held.tensors["pipeline/hidden"][-1][: 4 * num_elements].view(torch.float32).view(1, -1)
                if not self.mesh.is_first_stage:
                    self.receive_rows(row_1H)
                if not self.mesh.is_last_stage:
                    self.send_rows(row_1H)
        self.end_step()

    def _warm_rows(self, num_elements: int) -> None:
        room, other = (self._held.room_at(turn, 1, num_elements, torch.float32) for turn in (0, 1))
        self._held.turn = 0
        self.sum_rows(room.fill_(1.0), other)
        room = self.room(1, 1, torch.float32).fill_(1.0)
        self.gather_columns(room, torch.empty(1, self.size, device=self._device))
        self.share_tokens(torch.zeros(1, dtype=torch.int64, device=self._device))

    def _warm_head(self, num_rows: int) -> None:
        device = self._device
        is_last, width = self.mesh.is_last_stage, self._held.share_width(self.rank)
        part_RV = self._held.share_room(num_rows, width) if is_last else None
        self.gather_logits(part_RV, self.whole_logits(num_rows) if self.mesh.rank == 0 else None)
        part_RX = torch.zeros(num_rows, 2, device=device) if is_last else None
        self.gather_small(part_RX, torch.zeros(self.size, num_rows, 2, device=device))


def open_collectives(
    mesh: Mesh,
    needs: ExchangeNeeds,
    place: Place,
    device: torch.device,
    ledger: Ledger,
    *,
    timeout_s: float = OPEN_SECONDS,
    secret: str = "",
    check: Check | None = None,
    call_timeout_s: float = CALL_SECONDS,
) -> CollectiveExchange:
    """Connect all ranks of the mesh, which call this together, then allocate."""
    store = open_store(place, mesh, timeout_s, secret, check)
    with lost_peers(f"connecting rank {mesh.rank} to {mesh.num_ranks - 1} others"):
        peers, connected_bytes = open_peers(store, mesh, call_timeout_s, device)
    try:
        exchange = CollectiveExchange(mesh, needs, peers, device, ledger)
    except BaseException:
        peers.close()
        raise
    warm_up(exchange, device, connected_bytes)
    return exchange


def open_peers(store: Store, mesh: Mesh, timeout_s: float, device: torch.device) -> tuple[Peers, int]:
    """Connect all ranks; return them and the GPU memory that it took."""
    if device.type == "cpu":
        return GlooPeers(store, mesh, timeout_s), 0
    before = _used_bytes(device)
    peers = NcclPeers(store, mesh, timeout_s, device)
    return peers, _used_bytes(device) - before


def warm_up(exchange: CollectiveExchange, device: torch.device, connected_bytes: int) -> None:
    """Warm up the exchange, or close it; log the GPU memory of NCCL."""
    try:
        before = _used_bytes(device)
        exchange.warm()
        called_bytes = _used_bytes(device) - before
    except BaseException:
        exchange.close()
        raise
    if device.type == "cuda":
        log.info(
            "NCCL took %s when it connected and %s at its first calls; %s are planned",
            *(format_bytes(max(0, num_bytes)) for num_bytes in (connected_bytes, called_bytes)),
            format_bytes(nccl_bytes(exchange.mesh)),
        )


def _used_bytes(device: torch.device) -> int:
    """Used memory of the whole device after this process's work; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes

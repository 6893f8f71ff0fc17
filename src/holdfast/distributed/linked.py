"""LinkedExchange: one stage a node: symmetric memory within a stage, NCCL for rows and logits between stages.

R, X, S as in distributed/exchange.py

Calls among the ranks of a stage go to its own exchange (distributed/symmetric.py), the others to distributed/collectives.py.
"""

from contextlib import ExitStack
from typing import Any

import torch

from holdfast.distributed.collectives import CALL_SECONDS, CollectiveExchange, Peers, open_peers, warm_up
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import ExchangeNeeds, exchange_specs, in_stage, shared_specs
from holdfast.distributed.mesh import Mesh
from holdfast.distributed.rendezvous import OPEN_SECONDS, Check, Place, c10d, lost_peers, open_store
from holdfast.kernels.exchange.add_rows import DeferredStream
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec


class LinkedExchange(CollectiveExchange):
    """The exchange of one rank; see distributed/exchange.py."""

    def __init__(
        self, mesh: Mesh, needs: ExchangeNeeds, stage: Exchange, peers: Peers, device: torch.device, ledger: Ledger
    ) -> None:
        """`stage`: the exchange of the ranks that share these layers."""
        assert stage.size == mesh.tensor_size > 1, f"{stage.size=} {mesh=}"
        super().__init__(mesh, needs, peers, device, ledger, link_specs(needs, mesh))
        self._stage = stage

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self._stage.room(num_rows, width, dtype)

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        return self._stage.sum_rows(part_TH, out_TH)

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        return self._stage.add_rows(part_TH, onto)

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        return self._stage.gather_columns(part_TX, out_TY)

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        if part_RX is not None:
            self._stage.gather_small(part_RX, out_SRX)
        with lost_peers(f"the gather of {list(out_SRX.shape)} on rank {self.mesh.rank}"):
            if part_RX is None:
                self.peers.receive_head(out_SRX, 0)
            elif self.rank == 0:
                self.peers.send_head(out_SRX)
        return out_SRX

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        self._stage.share_tokens(ids_T)

    def end_step(self) -> None:
        self._stage.end_step()

    def abandon(self) -> None:
        self._stage.abandon()
        super().abandon()

    def close(self) -> None:
        super().close()
        self._stage.close()


def link_specs(needs: ExchangeNeeds, mesh: Mesh) -> dict[str, TensorSpec]:
    """Return the tensors beside the memory of the stage: logits and rows between stages."""
    shared = shared_specs(*in_stage(needs, mesh))
    return {owner: spec for owner, spec in exchange_specs(needs, mesh, "linked").items() if owner not in shared}


def open_linked(
    mesh: Mesh,
    needs: ExchangeNeeds,
    place: Place,
    device: torch.device,
    ledger: Ledger,
    *,
    timeout_s: float = OPEN_SECONDS,
    secret: str = "",
    check: Check | None = None,
    **options: Any,  # noqa: ANN401 those of SymmetricExchange
) -> LinkedExchange:
    """Connect all ranks of the mesh, which call this together; a stage is on one node."""
    from holdfast.distributed.symmetric import SymmetricExchange  # its kernels are for GPUs

    store = open_store(place, mesh, timeout_s, secret, check)
    with lost_peers(f"connecting rank {mesh.rank} to {mesh.num_ranks - 1} others"):
        peers, connected_bytes = open_peers(store, mesh, CALL_SECONDS, device)
        own_needs, own_mesh = in_stage(needs, mesh)
        own_store = c10d.PrefixStore(f"stage{mesh.stage}", store)
        with ExitStack() as opened:
            opened.callback(peers.close)
            stage = SymmetricExchange(own_mesh, own_needs, own_store, device, ledger, **options)
            opened.callback(stage.close)
            exchange = LinkedExchange(mesh, needs, stage, peers, device, ledger)
            opened.pop_all()  # the exchange owns all of it now
    warm_up(exchange, device, connected_bytes)
    return exchange

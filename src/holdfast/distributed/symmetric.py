"""SymmetricExchange: GPUs of one node read each other's memory (torch symmetric memory); own kernels, in graphs.

S ranks that share layers; T, H, X, Y, R, V, W as in distributed/exchange.py

Buffers, logits and signals lie in one symmetric allocation of equal size on every rank, so products write where peers
read. A call launches one kernel (kernels/exchange) and neither allocates nor synchronizes with the host.
kernels/exchange/signals.py explains why one barrier per call suffices; kernels/exchange/links.py sends rows between
stages.
"""

import json
import secrets
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from holdfast.distributed.exchange_plan import ExchangeNeeds, exchange_specs, rounding_bytes, shared_specs
from holdfast.distributed.held_memory import HeldExchange, HeldMemory, allocate_held
from holdfast.distributed.mesh import Mesh
from holdfast.distributed.rendezvous import OPEN_SECONDS, Check, Place, Store, c10d, lost_peers, make_gloo, open_store
from holdfast.errors import ConfigError
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows_triton
from holdfast.kernels.exchange.gather_rows import (
    gather_columns_triton,
    gather_small_triton,
    rendezvous_triton,
    share_first_triton,
)
from holdfast.kernels.exchange.links import (
    HEAD_LINK,
    ROWS_LINK,
    fetch_end,
    fetch_rows,
    offer_end,
    offer_rows,
    release_links,
)
from holdfast.kernels.exchange.signals import EPOCHS_WORD, MAX_BLOCKS, MAX_RANKS, TABLES_WORD, release_waits
from holdfast.kernels.exchange.sum_rows import Ranks, may_take_two_passes, sum_rows_triton, tile_forms
from holdfast.kernels.triton_compat import supports_pdl
from holdfast.memory.arena import has_failed, keep_with_process, views_of
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes

natives: Any = getattr(torch._C, "_distributed_c10d", None)
"""Torch's C++ groups; its stubs lack them."""
GROUP_KEY = "group"
WAITING_SHARE = 4
WARM_ELEMENTS = 16
"""Triton specializes on divisibility by 16."""


class SymmetricMemory:
    """One allocation of equal size on every rank, and views of all of them."""

    def __init__(self, specs: dict[str, TensorSpec], store: Store, mesh: Mesh, device: torch.device) -> None:
        num_bytes = arena_bytes(specs.values())
        symmetric = natives._SymmetricMemory
        self.name, self._group = register_group(store, mesh)
        self.own = symmetric.empty_strided_p2p((num_bytes,), [1], torch.uint8, device, self.name)
        # Load the kernels of `abandon` now: they cannot be loaded while a kernel waits.
        _release_all(named_views(self.own, specs)["exchange/signals"].view(torch.int32))
        # Zero the signals before the rendezvous maps this memory on peers.
        self.own.zero_()
        torch.cuda.synchronize(device)
        self._handle = symmetric.rendezvous(self.own, self.name)
        self.all_ranks = [
            self.own if rank == mesh.rank else self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(mesh.num_ranks)
        ]

    def close(self) -> None:
        """Free the memory with its last view; on a failed device, with this process."""
        device = self.own.device
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
        if has_failed(device):
            for held in (*self.all_ranks, self._handle):
                keep_with_process(held)
        self.all_ranks.clear()
        natives._unregister_process_group(self.name)
        del self._handle, self.own, self._group


def register_group(store: Store, mesh: Mesh) -> tuple[str, object]:
    """Register a group for symmetric memory under a unique name; it lives as long as the returned object."""
    if mesh.rank == 0:
        store.set(GROUP_KEY, f"holdfast-{secrets.token_hex(8)}")
    name = store.get(GROUP_KEY).decode()
    own_store = c10d.PrefixStore("symmetric", store)
    group = c10d.ProcessGroup(own_store, mesh.rank, mesh.num_ranks)
    gloo = make_gloo(store, "symmetric-gloo", mesh.rank, mesh.num_ranks, OPEN_SECONDS)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    natives._register_process_group(name, group)
    natives._SymmetricMemory.set_group_info(name, mesh.rank, mesh.num_ranks, own_store)
    return name, group


def agree_blocks(store: Store, mesh: Mesh, device: torch.device, share: int) -> int:
    """Agree on the programs of a waiting kernel: equal on all ranks, and few if several ranks share a GPU.

    There they wait for a peer whose own kernels need SMs: a product may need several whole SMs at once (a cluster). So
    all kernels that wait at once take one SM in `share`.
    """
    properties = torch.cuda.get_device_properties(device)
    own = {"device": str(properties.uuid), "num_processors": properties.multi_processor_count}
    store.set(f"device/{mesh.rank}", json.dumps(own))
    found = [json.loads(store.get(f"device/{rank}")) for rank in range(mesh.num_ranks)]
    num_on = Counter(entry["device"] for entry in found)
    shares = [
        entry["num_processors"] // (num_on[entry["device"]] * share) for entry in found if num_on[entry["device"]] > 1
    ]
    return max(1, min([MAX_BLOCKS, *shares]))


class SymmetricExchange(HeldExchange):
    """The exchange of one rank; see distributed/exchange.py."""

    def __init__(
        self,
        mesh: Mesh,
        needs: ExchangeNeeds,
        store: Store,
        device: torch.device,
        ledger: Ledger,
        waiting_share: int = WAITING_SHARE,
    ) -> None:
        specs, shared = exchange_specs(needs, mesh, "symmetric"), shared_specs(needs, mesh)
        reason = f"exchange of {mesh.num_ranks} ranks over symmetric memory"
        self._memory: SymmetricMemory | None = SymmetricMemory(shared, store, mesh, device)
        own = {owner: spec for owner, spec in specs.items() if owner not in shared}
        tensors, self._arenas = allocate_held(own, device, ledger, reason)
        all_ranks = [named_views(buffer, shared) for buffer in self._memory.all_ranks]
        held_bytes = {owner: spec.aligned_bytes for owner, spec in shared.items()}
        held_bytes["exchange/rounding"] = rounding_bytes(needs, mesh)
        self._owners = list(held_bytes)
        self._ledger = ledger
        for owner, num_bytes in held_bytes.items():
            ledger.record(owner, num_bytes, reason)
        self._store = store
        super().__init__(HeldMemory(tensors | all_ranks[mesh.rank], needs, mesh))
        first, last = mesh.stage * mesh.tensor_size, (mesh.num_stages - 1) * mesh.tensor_size
        stage = all_ranks[first : first + mesh.tensor_size]
        self._peer_rooms = [views["exchange/rows"] for views in stage if mesh.tensor_size > 1]
        self._peer_logits = [views["exchange/logits"] for views in all_ranks[last:] if "exchange/logits" in views]
        self._all_ranks = all_ranks
        self._typed_rooms: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self.ranks = self._make_ranks(stage, agree_blocks(store, mesh, device, waiting_share))
        self._is_at_rest = True
        self._rescue = torch.cuda.Stream(device)
        self._closing = threading.Lock()
        self._warmed_sums: set[tuple[torch.dtype, torch.dtype]] = set()

    def _make_ranks(self, stage: list[dict[str, torch.Tensor]], max_blocks: int) -> Ranks:
        """Make the signals of this stage's ranks, with a table of their addresses after this rank's own."""
        signals = stage[self.mesh.tensor_rank]["exchange/signals"].view(torch.int32)
        peers = signals[TABLES_WORD : TABLES_WORD + 2 * MAX_RANKS].view(torch.int64)
        addresses = [views["exchange/signals"].data_ptr() for views in stage]
        peers[: len(addresses)].copy_(torch.tensor(addresses, dtype=torch.int64))
        return Ranks(self.mesh.tensor_rank, self.mesh.tensor_size, signals, peers, max_blocks)

    def epochs(self) -> str:
        """Describe the epochs of this rank and its peers, to debug a hang; in a separate stream."""
        with torch.cuda.stream(self._rescue):
            words = self._signals(self.mesh.rank)[: EPOCHS_WORD + 1].to("cpu")
        return f"own epoch {int(words[EPOCHS_WORD])}, peers at {words[: self.size].tolist()} (its own place is unused)"

    @property
    def group_name(self) -> str:
        """Name of torch's group."""
        assert self._memory is not None, "the exchange is closed"
        return self._memory.name

    def peer_rooms(self, turn: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return one of the two buffers of every rank as `dtype`; views are cached."""
        found = self._typed_rooms.get((turn, dtype))
        if found is None:
            found = tuple(rooms[turn].view(dtype) for rooms in self._peer_rooms)
            self._typed_rooms[turn, dtype] = found
        return found

    def _take(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._is_at_rest = False
        return self.peer_rooms(self._held.take(part), part.dtype)

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        assert part_TH.shape == out_TH.shape, f"{part_TH.shape=} {out_TH.shape=}"
        if (part_TH.dtype, out_TH.dtype) not in self._warmed_sums:
            self._warm_sums(part_TH.dtype, out_TH)
        return sum_rows_triton(self._take(part_TH), out_TH, self.ranks)

    def _warm_sums(self, dtype: torch.dtype, out_TH: torch.Tensor) -> None:
        """Warm up every specialization of a sum of these types, on a few elements of the free buffer. So the warm-up of
        steps need not know which row counts change specialization."""
        self._warmed_sums.add((dtype, out_TH.dtype))
        few_N, rooms = out_TH.view(-1)[:WARM_ELEMENTS], self.peer_rooms(1 - self._held.turn, dtype)
        for tiles in tile_forms(supports_pdl(out_TH)):
            sum_rows_triton(rooms, few_N, self.ranks, tiles, two_passes=False)
            if may_take_two_passes(dtype, out_TH.dtype, self.size):
                sum_rows_triton(rooms, few_N, self.ranks, tiles, two_passes=True)

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        assert part_TH.shape == onto.x_TH.shape, f"{part_TH.shape=} {onto.x_TH.shape=}"
        return add_rows_triton(self._take(part_TH), onto, self.ranks)

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = out_TY.shape
        assert part_TX.shape == (num_rows, num_columns // self.size), f"{part_TX.shape=} {out_TY.shape=}"
        assert part_TX.dtype == out_TY.dtype, f"{part_TX.dtype=} {out_TY.dtype=}"
        gather_columns_triton(self._take(part_TX), out_TY, num_rows, num_columns, self.ranks)
        return out_TY

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        assert (part_RV is not None) == self.mesh.is_last_stage, f"rank {self.mesh.rank} passes {part_RV=}"
        assert (out_RW is not None) == (self.mesh.rank == 0), f"rank {self.mesh.rank} passes {out_RW=}"
        if self.mesh.num_stages > 1:
            if part_RV is not None:
                self._offer_head(part_RV)
            else:
                assert out_RW is not None, "only rank 0 has no part"
                widths = [self._held.share_width(place) for place in range(self.size)]
                for place, slot_RV in enumerate(out_RW.split(widths, dim=1)):
                    self._fetch_head(place, slot_RV)
            return
        assert part_RV is not None, "every rank of one stage has a part"
        self._is_at_rest = False
        self._held.share_room(*part_RV.shape).copy_(part_RV)
        num_columns = self._held.needs.vocab_size
        gather_columns_triton(self._peer_logits, out_RW, part_RV.shape[0], num_columns, self.ranks)

    def _offer_head(self, x_TH: torch.Tensor) -> None:
        """Offer to rank 0, through the logits of this rank."""
        slots_LN = self._held.tensors["exchange/logits"].view(x_TH.dtype).unsqueeze(0)
        offer_rows(x_TH, slots_LN, offer_end(self._signals(self.mesh.rank), self._signals(0), HEAD_LINK, 1 + self.rank))

    def _fetch_head(self, place: int, out_TH: torch.Tensor) -> None:
        """Fetch from a rank of the last stage."""
        slots_LN = self._peer_logits[place].view(out_TH.dtype).unsqueeze(0)
        from_rank = (self.mesh.num_stages - 1) * self.size + place
        end = fetch_end(self._signals(self.mesh.rank), self._signals(from_rank), HEAD_LINK, 1 + place)
        fetch_rows(slots_LN, out_TH, end)

    def _signals(self, rank: int) -> torch.Tensor:
        return self._all_ranks[rank]["exchange/signals"].view(torch.int32)

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        assert (part_RX is not None) == self.mesh.is_last_stage, f"rank {self.mesh.rank} passes {part_RX=}"
        if part_RX is None:
            self._fetch_head(0, out_SRX.view(1, -1))
            return out_SRX
        if self.size == 1:
            out_SRX[0].copy_(part_RX)
        else:
            gather_small_triton(part_RX, self._take_any(part_RX), out_SRX, self.ranks)
        if self.mesh.num_stages > 1 and self.rank == 0:
            self._offer_head(out_SRX.view(1, -1))
        return out_SRX

    def share_tokens(self, ids_T: torch.Tensor) -> None:
        if self.size > 1:
            share_first_triton(ids_T, self._take_any(ids_T), self.ranks)

    def _take_any(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take the next buffer for a part that lies elsewhere; a kernel copies it."""
        return self._take(self._held.room(1, part.numel(), part.dtype))

    def send_rows(self, x_TH: torch.Tensor) -> None:
        assert not self.mesh.is_last_stage, "the last stage has no next one"
        target = self._signals(self.mesh.rank + self.size)
        slots_LN = self._held.tensors["pipeline/hidden"].view(x_TH.dtype)
        offer_rows(x_TH, slots_LN, offer_end(self._signals(self.mesh.rank), target, ROWS_LINK, 0))

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        assert not self.mesh.is_first_stage, "the first stage has none before it"
        from_rank = self.mesh.rank - self.size
        slots_LN = self._all_ranks[from_rank]["pipeline/hidden"].view(out_TH.dtype)
        return fetch_rows(
            slots_LN, out_TH, fetch_end(self._signals(self.mesh.rank), self._signals(from_rank), ROWS_LINK, 0)
        )

    def end_step(self) -> None:
        if not self._is_at_rest:
            rendezvous_triton(self.ranks)
        self._is_at_rest = True
        self._held.turn = 0

    def abandon(self) -> None:
        # Use a separate stream, because the step stream waits. Release other ranks too: they are about to be killed,
        # and under MPS a kernel that never ends breaks the device for all.
        with self._closing:
            if self._memory is None:
                return
            ranks = range(self.mesh.num_ranks)
            with torch.cuda.stream(self._rescue):
                for rank in sorted(ranks, key=self.mesh.rank.__ne__):
                    _release_all(self._signals(rank))

    def close(self) -> None:
        with self._closing:
            if self._memory is not None:
                self._close(self._memory)

    def _close(self, memory: SymmetricMemory) -> None:
        self._typed_rooms.clear()
        self._peer_rooms.clear()
        self._peer_logits.clear()
        self._all_ranks.clear()
        self._held.tensors.clear()
        del self.ranks
        memory.close()
        self._memory = None
        for arena in self._arenas:
            arena.release()
        while self._owners:
            self._ledger.release(self._owners.pop())


def _release_all(signals: torch.Tensor) -> None:
    release_waits(signals)
    release_links(signals)


def named_views(buffer: torch.Tensor, specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return dict(zip(specs, views_of(buffer, tuple(specs.values())), strict=True))


def open_symmetric(
    mesh: Mesh,
    needs: ExchangeNeeds,
    place: Place,
    device: torch.device,
    ledger: Ledger,
    *,
    timeout_s: float = OPEN_SECONDS,
    secret: str = "",
    check: Check | None = None,
    waiting_share: int = WAITING_SHARE,
) -> SymmetricExchange:
    """Connect all ranks of the mesh, which call this together, each with a GPU of this node.

    If several share a GPU, waiting kernels take at most one SM in `waiting_share`.
    """
    if mesh.tensor_size > MAX_RANKS:
        raise ConfigError("rank.too_many_for_signals", size=mesh.tensor_size, maximum=MAX_RANKS)
    store = open_store(place, mesh, timeout_s, secret, check)
    with lost_peers(f"opening symmetric memory on rank {mesh.rank} of {mesh.num_ranks}"):
        return SymmetricExchange(mesh, needs, store, device, ledger, waiting_share)

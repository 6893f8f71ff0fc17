"""PageStorage: planes of every layer in one arena; StateStorage: places of states. Both are allocated once.

With one group of layers, each plane of each layer is a tensor. With several, each plane of each kind is one tensor over
all columns of a page. A layer has the slots of its own columns, which layers of different groups share page by page.
Near planes are views of the codes' columns in another type (cache/near.py).

P places of states (cache/places.py), K entries in progress, D channels (cache/compressed.py), X the shape of a state
"""

from collections.abc import Sequence

import torch

from holdfast.cache.compressed import ENTRIES
from holdfast.cache.near import NEAR_PLANES, NearLayout
from holdfast.cache.places import STATE_OWNER, PlaceKind
from holdfast.cache.spec import CacheSpec
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import KV_OWNER


class PageStorage:
    """All pages of all layers. Slot s of a plane is token s % page_tokens of chunk s // page_tokens (cache/spec.py)."""

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device, ledger: Ledger) -> None:
        self.spec = spec
        self.num_pages = num_pages
        num_slots = num_pages * spec.page_tokens
        planes = spec.stored_planes()
        specs = tuple(plane.tensor(num_slots) for plane in planes)
        tokens = f"{num_slots} tokens" if len(spec.groups) == 1 else f"{num_pages} pages"
        self._arena = Arena(KV_OWNER, specs, device, ledger, tokens)
        self._planes: list[dict[str, torch.Tensor]] = [{} for _ in spec.layers]
        self._columns: list[torch.Tensor] = []
        """Every plane as [columns, pages, bytes of a chunk]."""
        for plane in planes:
            whole_SX = self._arena.tensors[plane.name]
            self._columns.append(whole_SX.view(torch.uint8).view(plane.num_columns, num_pages, -1))
            for layer, columns in plane.columns.items():
                first, num_columns = columns
                self._planes[layer][plane.plane.name] = whole_SX.narrow(0, first * num_slots, num_columns * num_slots)
        if spec.near is not None:
            self._add_near(spec.near)

    def _add_near(self, near: NearLayout) -> None:
        """Add the near planes: [slots, K, D] from their first chunk on, to the end of the column of their host."""
        group = self.spec.near_group
        assert group is not None and group.near is not None, f"{self.spec} has no near group"  # noqa: PT018
        stored = ((kind, plane) for kind in self.spec.columns for plane in kind)
        columns = dict(zip(stored, self._columns, strict=True))
        dtype: torch.dtype = getattr(torch, group.near.dtype)
        for layer, places in near.places.items():
            heads = self.spec.layers[layer].num_kv_heads, self.spec.layers[layer].head_dim
            for name, place in zip(NEAR_PLANES, places, strict=True):
                own_SKD = columns[place.kind, place.plane][place.column].reshape(-1).view(dtype).view(-1, *heads)
                self._planes[layer][name] = own_SKD[place.nth * near.page_tokens :]

    def plane(self, index: int, name: str) -> torch.Tensor:
        """Return a plane of `CacheSpec.layers[index]`: [num_slots, *token_shape], for all its possible chunks."""
        return self._planes[index][name]

    def planes(self, index: int) -> dict[str, torch.Tensor]:
        """Return all planes of `CacheSpec.layers[index]` by name, each [num_slots, *token_shape]."""
        return dict(self._planes[index])

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of all columns, each pair from the first to the second, without allocating."""
        for source, target in pairs:
            # One call for all planes: a model of 64 layers has hundreds, and each would be a launch.
            targets = [own[:, target] for own in self._columns]
            torch._foreach_copy_(targets, [own[:, source] for own in self._columns])  # pyright: ignore[reportPrivateImportUsage]

    def release(self) -> None:
        """Release the pages; nothing can be read afterwards."""
        self._planes.clear()
        self._columns.clear()
        self._arena.release()


class StateStorage:
    """All states of all layers. Positions alone decide which values of a place count, so none is ever cleared."""

    def __init__(self, kinds: Sequence[PlaceKind], num_places: int, device: torch.device, ledger: Ledger) -> None:
        self.kinds = tuple(kinds)
        self.num_places, self.device = num_places, device
        specs = tuple(kind.tensor(num_places) for kind in kinds)
        self._arena = Arena(STATE_OWNER, specs, device, ledger, f"{num_places} places")
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        for kind, spec in zip(kinds, specs, strict=True):
            # Finite values, so that ignored ones are never NaN.
            whole_LPX = self._arena.tensors[spec.name].zero_()
            for place, layer in enumerate(kind.layers):
                self._states[kind.name, layer] = whole_LPX[place]

    def state(self, layer: int, name: str = ENTRIES) -> torch.Tensor:
        """Return a layer's states, [P, X].

        Those of ENTRIES or INDEX are float32 [P, K, 3, D]: largest gate, sum of weights, weighted sum."""
        return self._states[name, layer]

    def copy_place(self, source: int, target: int) -> None:
        """Copy the states of one place to another, without allocating."""
        for whole_LPX in self._arena.tensors.values():
            whole_LPX[:, target].copy_(whole_LPX[:, source])

    def release(self) -> None:
        """Release the states; nothing can be read afterwards."""
        self._states.clear()
        self._arena.release()

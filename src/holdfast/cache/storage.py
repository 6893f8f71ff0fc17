"""The tensors behind page ids: a plane for each layer and kind, all in one arena that is allocated once."""

import torch

from holdfast.cache.spec import CacheSpec
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import KV_OWNER
from holdfast.memory.workspace_plan import TensorSpec


class PageStorage:
    """All pages of all layers. Slot s of a plane is token s % page_tokens of page s // page_tokens."""

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device, ledger: Ledger) -> None:
        self.spec = spec
        self.num_pages = num_pages
        num_slots = num_pages * spec.page_tokens
        names = [
            {plane.name: f"{layer.layer}.{layer.name}.{plane.name}" for plane in layer.planes} for layer in spec.layers
        ]
        specs = tuple(
            TensorSpec(planes[plane.name], (num_slots, *plane.token_shape), plane.dtype)
            for layer, planes in zip(spec.layers, names, strict=True)
            for plane in layer.planes
        )
        self._arena = Arena(KV_OWNER, specs, device, ledger, f"{num_slots} tokens")
        self._planes = [{name: self._arena.tensors[path] for name, path in planes.items()} for planes in names]

    def plane(self, index: int, name: str) -> torch.Tensor:
        """A plane of the index-th entry of the spec: [num_slots, *token_shape]."""
        return self._planes[index][name]

    def planes(self, index: int) -> dict[str, torch.Tensor]:
        """All planes of the index-th entry by name, each [num_slots, *token_shape]."""
        return dict(self._planes[index])

    def release(self) -> None:
        """Give the pages back; nothing can be read afterwards."""
        self._planes.clear()
        self._arena.release()

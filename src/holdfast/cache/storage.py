"""The tensors behind page ids: one per plane and layer, allocated once, entered in the ledger."""

import torch

from holdfast.cache.spec import CacheSpec
from holdfast.memory.ledger import Ledger


class PageStorage:
    """All pages of all layers. Slot s of a plane is token s % page_tokens of page s // page_tokens."""

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device, ledger: Ledger) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self._planes: list[dict[str, torch.Tensor]] = []
        num_slots = num_pages * spec.page_tokens
        for layer in spec.layers:
            planes: dict[str, torch.Tensor] = {}
            for plane in layer.planes:
                tensor = torch.empty((num_slots, *plane.token_shape), dtype=getattr(torch, plane.dtype), device=device)
                ledger.record(f"kv pages/{layer.layer}.{layer.name}.{plane.name}", tensor.nbytes, f"{num_slots} tokens")
                planes[plane.name] = tensor
            self._planes.append(planes)

    def plane(self, index: int, name: str) -> torch.Tensor:
        """A plane of the index-th entry of the spec: [num_slots, *token_shape]."""
        return self._planes[index][name]

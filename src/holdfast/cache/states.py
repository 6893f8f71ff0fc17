"""StateStorage: the tensors of unfinished entries (cache/compressed.py), one place for each slot of a runner, allocated once.

P places, K entries under way, D channels
"""

from collections.abc import Sequence

import torch

from holdfast.cache.compressed import ENTRIES, STATE_OWNER, StateKind
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger


class StateStorage:
    """All states of all layers. What of a place counts follows from positions alone, so that none is ever cleared."""

    def __init__(self, kinds: Sequence[StateKind], num_places: int, device: torch.device, ledger: Ledger) -> None:
        self.kinds = tuple(kinds)
        self.num_places = num_places
        specs = tuple(kind.tensor(num_places) for kind in kinds)
        self._arena = Arena(STATE_OWNER, specs, device, ledger, f"{num_places} places")
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        for kind, spec in zip(kinds, specs, strict=True):
            # Numbers, so that nothing that is passed over can be NaN.
            whole_LPK3D = self._arena.tensors[spec.name].zero_()
            for place, layer in enumerate(kind.layers):
                self._states[kind.name, layer] = whole_LPK3D[place]

    def state(self, layer: int, name: str = ENTRIES) -> torch.Tensor:
        """float32 [P, K, 3, D] of a layer's entries, or of its INDEX: largest gate, sum of weights, weighted sum."""
        return self._states[name, layer]

    def release(self) -> None:
        """Give them back; nothing can be read afterwards."""
        self._states.clear()
        self._arena.release()

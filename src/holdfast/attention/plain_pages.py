"""PlainPages: what backends over plain keys and values share: a pair of planes a layer, and the write into them."""

from collections.abc import Sequence

import torch

from holdfast.attention.batch import Batch
from holdfast.attention.spec import AttentionSpec
from holdfast.cache.storage import PageStorage
from holdfast.kernels.write_heads import HeadNorm, Rotary, write_heads


class PlainPages:
    """`specs[i]` and the planes of the storage's i-th entry belong to layer i."""

    def __init__(self, specs: Sequence[AttentionSpec], storage: PageStorage) -> None:
        self._specs = specs
        self._planes = [(storage.plane(layer, "k"), storage.plane(layer, "v")) for layer in range(len(specs))]
        self._page_tokens = storage.spec.page_tokens

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        layer: int,
        out_THD: torch.Tensor,
    ) -> None:
        """Keys and values to their slots, queries to `out_THD`, all in one pass."""
        write_heads(qkv_TX, batch.positions_T, batch.slots_T, *self._planes[layer], head_norm, rotary, out_THD)

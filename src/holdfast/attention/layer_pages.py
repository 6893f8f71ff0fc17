"""LayerPages: the pages of every layer, each of its own kind, and what all backends do with them: the write."""

from collections.abc import Sequence

import torch

from holdfast.attention.batch import Batch
from holdfast.attention.code_reader import CodeReader
from holdfast.attention.coded_pages import CodedPages
from holdfast.attention.declarations import rotated_head_dims
from holdfast.attention.plain_pages import PlainPages
from holdfast.attention.spec import AttentionSpec
from holdfast.cache.storage import PageStorage
from holdfast.kernels.pages.coded_planes import CodedPlanes
from holdfast.kernels.pages.write_heads import HeadNorm, Rotary
from holdfast.quant.rotation import rotation_table

KeyMeans = Sequence[torch.Tensor | None]
"""Of each coded layer [K, D] in float32, rotated like its keys; None: nothing is subtracted from them."""


class LayerPages:
    """`specs[i]` and the planes of the storage's i-th entry belong to layer i."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        storage: PageStorage,
        k_means: KeyMeans | None = None,
        is_read: bool = False,
    ) -> None:
        """`is_read`: coded pages are read in plain torch, which takes tables."""
        self._specs = specs
        self._device = storage.plane(0, specs[0].cache.planes[0].name).device
        dtype: torch.dtype = getattr(torch, specs[0].dtype)
        self._rotations = {dim: rotation_table(dim, dtype, self._device) for dim in rotated_head_dims(specs)}
        self._no_rotation = torch.empty(0, 0, dtype=dtype, device=self._device)
        self._readers: dict[tuple[int, int, int], CodeReader] = {}
        means = k_means or (None,) * len(specs)
        self._pages = [
            self._coded(layer, storage, k_mean_KD, is_read)
            if spec.cache.format.is_coded
            else PlainPages(storage.plane(layer, "k"), storage.plane(layer, "v"), storage.spec.page_tokens)
            for layer, (spec, k_mean_KD) in enumerate(zip(specs, means, strict=True))
        ]

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
        self._pages[layer].write(qkv_TX, batch, head_norm, rotary, out_THD)

    def held_bytes(self) -> dict[str, int]:
        """What coded pages take beside the storage."""
        held: dict[str, int] = {}
        if self._readers:
            held["attention/dequantize"] = sum(reader.num_bytes for reader in self._readers.values())
        if self._rotations:
            held["attention/rotation"] = sum(rotation_DD.nbytes for rotation_DD in self._rotations.values())
        return held

    def _coded(self, layer: int, storage: PageStorage, k_mean_KD: torch.Tensor | None, is_read: bool) -> CodedPages:
        cache = self._specs[layer].cache
        key_bits, value_bits, head_dim = cache.format.key_bits, cache.format.value_bits, cache.head_dim
        assert key_bits is not None and value_bits is not None, f"{cache.format.name} codes only one of both"  # noqa: PT018
        planes = CodedPlanes.of(
            lambda name: storage.plane(layer, name),
            key_bits,
            value_bits,
            head_dim,
            storage.spec.page_tokens,
            self._rotations[head_dim] if min(key_bits, value_bits) < 8 else self._no_rotation,
            k_mean_KD,
        )
        if not is_read:
            return CodedPages(planes)
        kind = (key_bits, value_bits, head_dim)
        if kind not in self._readers:
            self._readers[kind] = CodeReader(*kind, self._device)
        return CodedPages(planes, self._readers[kind])

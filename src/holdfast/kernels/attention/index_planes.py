"""IndexPlanes: the index beside the latents of a layer (DSA) as kernels read and write it: plain, or e4m3 with a scale a token.

S slots, D elements of an index key
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class IndexPlanes(NamedTuple):
    """One layer's index: slot s is token s % page_tokens of page s // page_tokens, as that of its latent."""

    page_tokens: int
    rows_SD: torch.Tensor
    """In the type that it is kept in; float8_e4m3fn with `scales_S1`."""
    scales_S1: torch.Tensor | None = None
    """float32, powers of two: 2 ** ceil(log2(max(amax, 1e-4) / 448)). A key is its codes times its scale."""

    @classmethod
    def of(cls, planes: Mapping[str, torch.Tensor], page_tokens: int) -> "IndexPlanes":
        """From the storage's planes of a layer, by name (`index_planes` of quant/formats.py)."""
        return cls(page_tokens, planes["index"], planes.get("index_scale"))

    @property
    def is_quantized(self) -> bool:
        return self.scales_S1 is not None


class SparseRows(NamedTuple):
    """Which rows of a step choose their tokens, on the device, in memory that stays where it is."""

    table_rows_T: torch.Tensor
    """int32: the row of the page table of each row's sequence."""
    num_tokens_T: torch.Tensor
    """int32: tokens that a row sees, its own included; 0: it does not choose (its context is short, or it is padding)."""

"""CodedPlanes: one layer's compressed keys and values as its kernels take them.

P pages, K key/value heads, t tokens of a page, B bytes of a head's codes, S bytes of its sign bits, D head dim

A page is laid out head by head, so that the tokens of a head are neighbours and a tile of them is one run of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.quant.head_codes import CodedHeads


@dataclass(frozen=True, slots=True)
class CodedPlanes:
    """Views of the page storage, and what the rotation needs."""

    key_bits: int
    value_bits: int
    head_dim: int
    k_codes_PKtB: torch.Tensor
    k_signs_PKtS: torch.Tensor | None
    k_scale_PKt: torch.Tensor
    v_codes_PKtB: torch.Tensor
    v_signs_PKtS: torch.Tensor | None
    v_scale_PKt: torch.Tensor
    rotation_DD: torch.Tensor
    """The table of quant/rotation.py, [D + 1, D], in the type that is computed in; one for all layers of a head dim."""
    k_mean_KD: torch.Tensor | None = None
    """float32, rotated like the keys: subtracted from every key before it is coded. Softmax does not see it."""

    @classmethod
    def of(
        cls,
        plane: Callable[[str], torch.Tensor],
        key_bits: int,
        value_bits: int,
        head_dim: int,
        page_tokens: int,
        rotation_DD: torch.Tensor,
        k_mean_KD: torch.Tensor | None = None,
    ) -> "CodedPlanes":
        """From planes by name as the storage has them, [slots, K, bytes] and [slots, K]: the same bytes, head by head."""

        def by_head(name: str) -> torch.Tensor:
            plane_SK = plane(name)
            num_pages, num_heads = plane_SK.shape[0] // page_tokens, plane_SK.shape[1]
            return plane_SK.view(num_pages, num_heads, page_tokens, *plane_SK.shape[2:])

        return cls(
            key_bits,
            value_bits,
            head_dim,
            by_head("k_codes"),
            by_head("k_signs") if key_bits == 3 else None,
            by_head("k_scale"),
            by_head("v_codes"),
            by_head("v_signs") if value_bits == 3 else None,
            by_head("v_scale"),
            rotation_DD,
            k_mean_KD,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.k_scale_PKt.shape[1]

    @property
    def page_tokens(self) -> int:
        return self.k_scale_PKt.shape[2]

    @property
    def rotates_keys(self) -> bool:
        """Whether keys, and so queries, are rotated."""
        return self.key_bits < 8

    @property
    def rotates_values(self) -> bool:
        """Whether values are rotated, so that outputs must be rotated back."""
        return self.value_bits < 8

    def keys_at(self, pages_X: torch.Tensor, tokens_X: torch.Tensor) -> CodedHeads:
        """The coded keys of some tokens: [X, K, ...]."""
        signs = None if self.k_signs_PKtS is None else self.k_signs_PKtS[pages_X, :, tokens_X]
        return CodedHeads(self.k_codes_PKtB[pages_X, :, tokens_X], signs, self.k_scale_PKt[pages_X, :, tokens_X])

    def values_at(self, pages_X: torch.Tensor, tokens_X: torch.Tensor) -> CodedHeads:
        """The coded values of some tokens: [X, K, ...]."""
        signs = None if self.v_signs_PKtS is None else self.v_signs_PKtS[pages_X, :, tokens_X]
        return CodedHeads(self.v_codes_PKtB[pages_X, :, tokens_X], signs, self.v_scale_PKt[pages_X, :, tokens_X])

    def store(self, pages_X: torch.Tensor, tokens_X: torch.Tensor, keys: CodedHeads, values: CodedHeads) -> None:
        """Put the coded keys and values of some tokens into their places."""
        for plane, coded in (
            (self.k_codes_PKtB, keys.codes_XB),
            (self.k_signs_PKtS, keys.signs_XS),
            (self.k_scale_PKt, keys.scale_X),
            (self.v_codes_PKtB, values.codes_XB),
            (self.v_signs_PKtS, values.signs_XS),
            (self.v_scale_PKt, values.scale_X),
        ):
            if plane is not None and coded is not None:
                plane[pages_X, :, tokens_X] = coded

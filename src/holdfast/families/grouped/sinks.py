"""Attention sinks: float32 copies of the loaded ones, one row per layer, which the attention backend holds.

L layers, H query heads
"""

from collections.abc import Mapping, Sequence

import torch

from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.quant.packed_weight import AnyWeight


def sinks_name(layer: int) -> str:
    """Name the weight of a layer's sinks, [H] in any type."""
    return f"layers.{layer}.sinks"


def copy_sinks(
    weights: Mapping[str, AnyWeight], specs: Sequence[GroupedAttentionSpec]
) -> tuple[torch.Tensor | None, ...]:
    """Copy the sinks of each layer that has them; None for the others.

    Kernels add exp(sink) to a float32 sum, and other runners may share the weights, so these are copies.
    """
    found: list[torch.Tensor | None] = [None] * len(specs)
    layers = [layer for layer, spec in enumerate(specs) if spec.has_sinks]
    if not layers:
        return tuple(found)
    loaded = [weights[sinks_name(layer)] for layer in layers]
    sinks_LH = torch.empty(
        len(layers), specs[layers[0]].num_heads, dtype=torch.float32, device=_plain(loaded[0]).device
    )
    for row_H, layer, one in zip(sinks_LH, layers, loaded, strict=True):
        found[layer] = row_H.copy_(_plain(one))
    return tuple(found)


def _plain(sinks: AnyWeight) -> torch.Tensor:
    assert isinstance(sinks, torch.Tensor), "sinks are quantized"
    return sinks

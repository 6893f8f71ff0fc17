"""Weights of layers that keep latents rotated (TurboQuant): folded once; kv_b (MLA), so that neither queries nor outputs are rotated in a step, o_a (DeepSeek-V4), so that outputs are not.

N query heads, X = P + V rows of a head, L latent

A page holds R c in the place of c, where R is the Hadamard rotation of quant/kv_quantize.py and R R = 1. Keys and values are
W c = (W R) (R c), so kv_b times R reads the pages as they are. kv_b is never quantized, so that the fold comes after loading and
the cache of quantized weights has kv_b as the checkpoint does: it serves every format of pages.

Where a vector is key and value of all heads at once (DeepSeek-V4), queries are rotated as they are written
(kernels/latent/write_window.py), and what a head has attended to goes back through o_a, which is never quantized either.
"""

from collections.abc import Mapping, Sequence

import torch

from holdfast.attention.declarations import AttentionSpec
from holdfast.quant.kv_quantize import hadamard_block, hadamard_signs
from holdfast.quant.quantized_weight import QuantizedWeight

ROWS_AT_ONCE = 512
"""Rows that are rotated together, in float32 beside the weight: what a plan has no line for must be small."""


def kv_b_name(layer: int) -> str:
    """The weight through which queries and values of a layer meet its latents, [N * X, L]."""
    return f"layers.{layer}.kv_b.weight"


def o_a_name(layer: int) -> str:
    """The weight through which outputs of heads with compressed attention go first: rows of some heads' elements."""
    return f"layers.{layer}.o_a.weight"


def fold_rotation(
    weights: Mapping[str, torch.Tensor | QuantizedWeight], specs: Sequence[AttentionSpec], is_shared: bool
) -> dict[str, torch.Tensor]:
    """kv_b or o_a of every layer whose latents are kept rotated: folded where it lies, or as copies where others read the weights too."""
    folded: dict[str, torch.Tensor] = {}
    for layer, spec in enumerate(specs):
        if not spec.cache.format.rotates_latents:
            continue
        name = o_a_name(layer) if spec.is_compressed else kv_b_name(layer)
        weight_XL = weights[name]
        assert isinstance(weight_XL, torch.Tensor), f"{name} is quantized"
        folded[name] = weight_XL.clone() if is_shared else weight_XL
        if spec.is_compressed:
            rotate_rows(folded[name].view(-1, spec.cache.head_dim)[:, : spec.cache.latent_dim])
        else:
            rotate_rows(folded[name])
    return folded


def rotate_rows(weight_XL: torch.Tensor) -> torch.Tensor:
    """Every row times R, in place and in float32, a few rows at a time."""
    latent_dim = weight_XL.shape[1]
    rotation_LL = hadamard_signs(latent_dim).mul_(hadamard_block(latent_dim) ** -0.5).to(weight_XL.device)
    for rows_XL in weight_XL.split(ROWS_AT_ONCE):
        rows_XL.copy_(rows_XL.float() @ rotation_LL)
    return weight_XL

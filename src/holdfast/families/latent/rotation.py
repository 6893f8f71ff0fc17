"""Folding the rotation of stored latents (TurboQuant) into the weights around them, once, so that no step rotates.

N query heads, X = P + V rows of a head, L latent

A page holds R c instead of c, where R is the Hadamard rotation of quant/kv_quantize.py and R R = 1. Keys and values are
W c = (W R) (R c), so kv_b times R reads the pages as they are. kv_b is never quantized. The fold comes after loading, so the
cache of quantized weights has kv_b as the checkpoint does and serves every format of pages.

If one vector is key and value of all heads (DeepSeek-V4), queries are rotated as they are written
(kernels/latent/write_window.py), and outputs go back through o_a, which is never quantized either.
"""

from collections.abc import Mapping, Sequence

import torch

from holdfast.attention.declarations import AttentionSpec
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.quant.kv_quantize import hadamard_block, hadamard_signs
from holdfast.quant.packed_weight import AnyWeight

FOLDED_ROWS = 512
"""Rows that are rotated together, in float32 beside the weight. No plan has a line for this copy, so it is small."""


def kv_b_name(layer: int) -> str:
    """Name the weight through which queries and values of a layer meet its latents, [N * X, L]."""
    return f"layers.{layer}.kv_b.weight"


def o_a_name(layer: int) -> str:
    """Name the first output weight of compressed attention: rows of some heads' elements."""
    return f"layers.{layer}.o_a.weight"


def fold_rotation(
    weights: Mapping[str, AnyWeight], specs: Sequence[AttentionSpec], is_shared: bool
) -> dict[str, torch.Tensor]:
    """Fold kv_b or o_a of every layer with rotated latents: in place, or as copies if other runners read the weights."""
    folded: dict[str, torch.Tensor] = {}
    for layer, spec in enumerate(specs):
        if not spec.cache.format.rotates_latents:
            continue
        is_latent = isinstance(spec, LatentAttentionSpec)
        name = kv_b_name(layer) if is_latent else o_a_name(layer)
        weight_XL = weights[name]
        assert isinstance(weight_XL, torch.Tensor), f"{name} is quantized"
        folded[name] = weight_XL.clone() if is_shared else weight_XL
        whole = folded[name]
        rotate_rows(whole if is_latent else whole.view(-1, spec.cache.head_dim)[:, : spec.cache.latent_dim])
    return folded


def rotate_rows(weight_XL: torch.Tensor) -> torch.Tensor:
    """Multiply every row by R, in place and in float32, a few rows at a time."""
    latent_dim = weight_XL.shape[1]
    rotation_LL = hadamard_signs(latent_dim).mul_(hadamard_block(latent_dim) ** -0.5).to(weight_XL.device)
    for rows_XL in weight_XL.split(FOLDED_ROWS):
        rows_XL.copy_(rows_XL.float() @ rotation_LL)
    return weight_XL

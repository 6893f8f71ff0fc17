"""Keys without their bias: what a runner holds so that quantized layers store such keys, and scores get the bias.

K key/value heads, D head dim, X width of the fused QKV projection

Other runners may share a loaded bias, so it never changes: a quantized layer gets a copy whose key part is zero. Copy
and key bias depend on the weights alone, and so do the codes. A page means the same to every step of a runner; neither
the prefix cache (of one runner) nor the cache of quantized weights (which has the loaded bias) needs another key.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.distributed.exchange import Exchange
from holdfast.families.grouped.spec import GroupedAttentionSpec
from holdfast.kernels.attention.key_bias import KeyBias, KeyTurns
from holdfast.kernels.attention.write_kv import in_pair_order
from holdfast.quant.packed_weight import AnyWeight

Weights = Mapping[str, AnyWeight]


class SplitBiases(NamedTuple):
    """The biases of quantized layers, in two parts."""

    qkv: dict[str, torch.Tensor]
    """By the name of the replaced weight: biases of the projection with zeros for the keys."""
    keys: tuple[KeyBias | None, ...]
    """By layer: what its scores get; None for nothing."""

    @property
    def by_layer(self) -> dict[int, torch.Tensor]:
        """`qkv` by layer number."""
        return {layer: self.qkv[bias_name(layer)] for layer in range(len(self.keys)) if bias_name(layer) in self.qkv}

    @property
    def qkv_bytes(self) -> int:
        return sum(bias_X.nbytes for bias_X in self.qkv.values())


def split_biases(
    weights: Weights, specs: Sequence[GroupedAttentionSpec], is_separable: bool, turns: KeyTurns | None, rope_dim: int
) -> SplitBiases:
    """Split the bias of every quantized layer if the model's keys are a sum of two parts (`is_separable`).

    RoPE turns `rope_dim` elements of a head; scores take key biases in pair order, like keys. `turns` is None without RoPE. Then the bias adds one number to all scores of a row, which a plain softmax ignores,
    so nothing is added. Layers with sinks or a cap do not ignore it, so their keys keep the bias.
    """
    layers = [
        layer
        for layer, own in enumerate(specs)
        if own.cache.format.is_quantized and (turns is not None or own.is_plain_softmax)
    ]
    if not is_separable or not layers:
        return SplitBiases({}, (None,) * len(specs))
    biases = {layer: plain_bias(weights, layer) for layer in layers}
    like_X, cache, keys = biases[layers[0]], specs[0].cache, specs[0].key_part
    qkv_NX = like_X.new_empty(len(layers), len(like_X))
    found: list[KeyBias | None] = [None] * len(specs)
    bias_NKD = None
    if turns is not None:
        shape = len(layers), cache.num_kv_heads, cache.head_dim
        bias_NKD = torch.empty(shape, dtype=torch.float32, device=like_X.device)
    for place, layer in enumerate(layers):
        bias_X = biases[layer]
        qkv_NX[place].copy_(bias_X)
        qkv_NX[place, keys] = 0
        if bias_NKD is not None and turns is not None:
            bias_KD = bias_X[keys].view(cache.num_kv_heads, cache.head_dim)
            bias_NKD[place].copy_(in_pair_order(bias_KD, rope_dim))
            found[layer] = KeyBias(bias_NKD[place], turns)
    return SplitBiases({bias_name(layer): qkv_NX[place] for place, layer in enumerate(layers)}, tuple(found))


def key_bias_norms(
    weights: Weights,
    specs: Sequence[GroupedAttentionSpec],
    exchange: Exchange | None = None,
    num_kv_heads: int | None = None,
) -> list[float]:
    """Return the norm of each layer's key bias; RoPE does not change it.

    With `exchange`, weights and specs are those of a rank, and each rank all-gathers the heads of all: `num_kv_heads` is the
    whole model's. So every rank computes the result of one rank alone, to the bit.
    """
    keys = specs[0].key_part
    # On the host: the device's memory is planned to the last byte.
    biases = (plain_bias(weights, layer)[keys] for layer in range(len(specs)))
    if exchange is not None and exchange.size > 1:
        assert num_kv_heads is not None, "the number of key heads of all ranks is unknown"
        biases = (_gathered(bias_X, specs[0].cache.head_dim, exchange, num_kv_heads) for bias_X in biases)
    norms = [torch.linalg.vector_norm(bias_X.cpu(), dtype=torch.float64).item() for bias_X in biases]
    if exchange is not None and exchange.size > 1:
        exchange.end_step()
    return norms


def _gathered(bias_X: torch.Tensor, head_dim: int, exchange: Exchange, num_kv_heads: int) -> torch.Tensor:
    """All-gather the key bias, each head once: if there are fewer heads than ranks, neighbours have the same."""
    part_1X = exchange.room(1, len(bias_X), bias_X.dtype).copy_(bias_X)
    whole_1X = exchange.gather_columns(part_1X, bias_X.new_empty(1, exchange.size * len(bias_X)))
    heads_KD = whole_1X.view(-1, head_dim)
    return heads_KD[:: max(1, len(heads_KD) // num_kv_heads)].flatten()


def bias_name(layer: int) -> str:
    return f"layers.{layer}.qkv.bias"


def plain_bias(weights: Weights, layer: int) -> torch.Tensor:
    """Return a bias of the fused projection, which is never quantized."""
    bias_X = weights[bias_name(layer)]
    assert isinstance(bias_X, torch.Tensor), f"the biases of layer {layer} are quantized"
    return bias_X

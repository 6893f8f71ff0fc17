"""Keys without their bias: what a runner holds beside its weights so that quantized layers compute such keys, and scores get the rest.

K key/value heads, D head dim, X width of the fused QKV projection

A loaded bias may be shared with other runners, so it is never changed: a quantized layer gets a copy whose key part is zero.
Copy and key bias are functions of the weights alone. So codes are too: a page means the same to every step of a runner, and
neither the prefix cache (of one runner) nor the cache of quantized weights (which has the bias as it was loaded) needs to
tell more apart than it does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.attention.declarations import AttentionSpec
from holdfast.distributed.exchange import Exchange
from holdfast.kernels.attention.key_bias import KeyBias, KeyTurns
from holdfast.models.spec import ModelSpec
from holdfast.quant.quantized_weight import QuantizedWeight

Weights = Mapping[str, torch.Tensor | QuantizedWeight]


class SplitBiases(NamedTuple):
    """The biases of quantized layers, in two parts."""

    qkv: dict[str, torch.Tensor]
    """By the name of the weight that each stands for: biases of the projection with zeros for the keys."""
    keys: tuple[KeyBias | None, ...]
    """Of each layer: what its scores get; None where they get nothing."""

    @property
    def by_layer(self) -> dict[int, torch.Tensor]:
        """The same by number."""
        return {layer: self.qkv[bias_name(layer)] for layer in range(len(self.keys)) if bias_name(layer) in self.qkv}

    @property
    def qkv_bytes(self) -> int:
        return sum(bias_X.nbytes for bias_X in self.qkv.values())


def split_biases(
    weights: Weights, spec: ModelSpec, attention_specs: Sequence[AttentionSpec], turns: KeyTurns | None
) -> SplitBiases:
    """For every quantized layer whose keys are a sum of two parts; `turns` is None where the model has no rope.

    Without rope the bias adds the same number to all scores of a row, which a plain softmax does not see: nothing is added.
    Where there are sinks or a cap, which do, such keys keep their bias.
    """
    layers = [
        layer
        for layer, own in enumerate(attention_specs)
        if own.cache.format.is_quantized and (turns is not None or own.is_plain_softmax)
    ]
    if not spec.has_separable_key_bias or not layers:
        return SplitBiases({}, (None,) * len(attention_specs))
    biases = {layer: plain_bias(weights, layer) for layer in layers}
    like_X, keys = biases[layers[0]], key_part(spec)
    qkv_NX = like_X.new_empty(len(layers), spec.qkv_size)
    found: list[KeyBias | None] = [None] * len(attention_specs)
    bias_NKD = None
    if turns is not None:
        shape = len(layers), spec.num_kv_heads, spec.head_dim
        bias_NKD = torch.empty(shape, dtype=torch.float32, device=like_X.device)
    for place, layer in enumerate(layers):
        bias_X = biases[layer]
        qkv_NX[place].copy_(bias_X)
        qkv_NX[place, keys] = 0
        if bias_NKD is not None and turns is not None:
            bias_NKD[place].copy_(bias_X[keys].view(spec.num_kv_heads, spec.head_dim))
            found[layer] = KeyBias(bias_NKD[place], turns)
    return SplitBiases({bias_name(layer): qkv_NX[place] for place, layer in enumerate(layers)}, tuple(found))


def key_bias_norms(
    weights: Weights, spec: ModelSpec, exchange: Exchange | None = None, num_kv_heads: int | None = None
) -> list[float]:
    """The norm of each layer's key bias, by layer; rotary positions do not change it.

    With `exchange` weights and spec are those of a rank, and each gathers the heads of all: `num_kv_heads` is the whole
    model's. So every rank finds what one alone would find, to the bit.
    """
    assert spec.qkv_bias, f"{spec.architecture} has no key biases"
    keys = key_part(spec)
    # On the host: the device's memory is spoken for.
    biases = (plain_bias(weights, layer)[keys] for layer in range(spec.num_layers))
    if exchange is not None and exchange.size > 1:
        assert num_kv_heads is not None, "how many key heads all ranks have together is not said"
        biases = (_gathered(bias_X, spec, exchange, num_kv_heads) for bias_X in biases)
    norms = [torch.linalg.vector_norm(bias_X.cpu(), dtype=torch.float64).item() for bias_X in biases]
    if exchange is not None and exchange.size > 1:
        exchange.end_step()
    return norms


def _gathered(bias_X: torch.Tensor, spec: ModelSpec, exchange: Exchange, num_kv_heads: int) -> torch.Tensor:
    """The key bias of all heads, each once: where there are fewer than ranks, neighbours have the same."""
    part_1X = exchange.room(1, len(bias_X), bias_X.dtype).copy_(bias_X)
    whole_1X = exchange.gather_columns(part_1X, bias_X.new_empty(1, exchange.size * len(bias_X)))
    heads_KD = whole_1X.view(-1, spec.head_dim)
    return heads_KD[:: max(1, len(heads_KD) // num_kv_heads)].flatten()


def key_part(spec: ModelSpec) -> slice:
    """Where keys lie in the fused projection."""
    return slice(spec.query_size, spec.query_size + spec.kv_size)


def bias_name(layer: int) -> str:
    return f"layers.{layer}.qkv.bias"


def plain_bias(weights: Weights, layer: int) -> torch.Tensor:
    """A bias of the fused projection, which is never quantized."""
    bias_X = weights[bias_name(layer)]
    assert isinstance(bias_X, torch.Tensor), f"the biases of layer {layer} are quantized"
    return bias_X

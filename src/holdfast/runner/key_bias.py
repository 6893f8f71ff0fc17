"""How large the key bias of each layer is: what few codes have to hold beside what tells keys apart."""

from collections.abc import Mapping

import torch

from holdfast.models.spec import ModelSpec
from holdfast.quant.quantized_weight import QuantizedWeight


def key_bias_norms(weights: Mapping[str, torch.Tensor | QuantizedWeight], spec: ModelSpec) -> list[float]:
    """The norm of each layer's key bias, by layer; rotary positions do not change it."""
    assert spec.qkv_bias, f"{spec.architecture} has no key biases"
    keys = slice(spec.query_size, spec.query_size + spec.kv_size)
    # On the host: the device's memory is spoken for.
    norms = []
    for layer in range(spec.num_layers):
        bias = weights[f"layers.{layer}.qkv.bias"]
        assert isinstance(bias, torch.Tensor), f"the biases of layer {layer} are codes"
        norms.append(torch.linalg.vector_norm(bias[keys].cpu(), dtype=torch.float64).item())
    return norms

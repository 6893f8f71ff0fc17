"""How large the key bias of each layer is: what few codes have to hold beside what tells keys apart."""

from collections.abc import Mapping

import torch

from holdfast.models.spec import ModelSpec


def key_bias_norms(weights: Mapping[str, torch.Tensor], spec: ModelSpec) -> list[float]:
    """The norm of each layer's key bias, by layer; rotary positions do not change it."""
    assert spec.qkv_bias, f"{spec.architecture} has no key biases"
    keys = slice(spec.query_size, spec.query_size + spec.kv_size)
    # On the host: the device's memory is spoken for.
    biases = (weights[f"layers.{layer}.qkv.bias"][keys].cpu() for layer in range(spec.num_layers))
    return [torch.linalg.vector_norm(bias, dtype=torch.float64).item() for bias in biases]

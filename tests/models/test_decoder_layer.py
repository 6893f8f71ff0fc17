"""Layers from names: each finds its own weights, experts where the spec has them, and nothing quantized that cannot be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.layers.mlp import GatedMLP, LayerNorm, PlainMLP, RMSNorm
from holdfast.layers.moe import ExpertLayer
from holdfast.models.decoder_layer import LayerBuilder
from holdfast.models.families import parameters, read_spec
from holdfast.models.spec import ModelSpec
from holdfast.quant.quantized_weight import QuantizedWeight, quantize
from holdfast.quant.weight_schemes import INT8
from loading.tiny_models import FAMILIES
from models.tiny_experts import EXPERT_MODELS


def make(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    prefix, settings = (FAMILIES | EXPERT_MODELS)[name]
    spec = read_spec({"architectures": [f"{prefix}ForCausalLM"]} | settings)
    return spec, {parameter.name: torch.zeros(parameter.shape) for parameter in parameters(spec)}


def builder(spec: ModelSpec, weights: dict[str, Any]) -> LayerBuilder:
    backend: Any = object()
    return LayerBuilder(spec, weights, backend, None)


def test_a_layer_has_the_weights_of_its_number() -> None:
    spec, weights = make("qwen3")
    layer = builder(spec, weights).layer(2)
    assert layer.attention.qkv.weight_NK is weights["layers.2.qkv.weight"]
    assert layer.attention.o.weight_NK is weights["layers.2.o.weight"]
    assert layer.attention.qkv.bias_N is None
    assert isinstance(layer.attn_norm, RMSNorm)
    assert layer.attn_norm.weight_H is weights["layers.2.attn_norm.weight"]
    assert isinstance(layer.mlp, GatedMLP)
    assert layer.mlp.down.weight_NK is weights["layers.2.down.weight"]


def test_biases_and_plain_mlps() -> None:
    spec, weights = make("opt")
    layer = builder(spec, weights).layer(1)
    assert layer.attention.qkv.bias_N is weights["layers.1.qkv.bias"]
    assert isinstance(layer.attn_norm, LayerNorm)
    assert isinstance(layer.mlp, PlainMLP)


def test_experts_where_the_spec_has_them() -> None:
    spec, weights = make("qwen2_moe normalized, every second layer")
    layers = [builder(spec, weights).layer(index) for index in range(4)]
    assert [isinstance(layer.mlp, ExpertLayer) for layer in layers] == [False, True, False, True]
    experts = layers[3].mlp
    assert isinstance(experts, ExpertLayer)
    assert experts.router_EH is weights["layers.3.router.weight"]
    assert experts.gate_up is weights["layers.3.experts.gate_up.weight"]
    assert experts.down is weights["layers.3.experts.down.weight"]
    assert experts.shared is not None
    assert experts.shared.gate_1H is weights["layers.3.shared.gate.weight"]
    assert experts.shared.mlp.gate_up.weight_NK is weights["layers.3.shared.gate_up.weight"]
    assert spec.experts is not None
    ungated = replace(spec, experts=replace(spec.experts, has_shared_gate=False))
    layer = builder(ungated, weights).layer(1).mlp
    assert isinstance(layer, ExpertLayer)
    assert layer.shared is not None
    assert layer.shared.gate_1H is None


def test_without_a_shared_expert() -> None:
    spec, weights = make("qwen3_moe")
    experts = builder(spec, weights).layer(0).mlp
    assert isinstance(experts, ExpertLayer)
    assert experts.shared is None


def test_codes_go_where_they_can_and_nowhere_else() -> None:
    spec, weights = make("qwen3_moe")
    for name in ("layers.0.qkv.weight", "layers.0.experts.down.weight", "layers.0.router.weight"):
        values = weights[name]
        codes, scales = quantize(values.reshape(-1, values.shape[-1]), INT8)
        shape = tuple(values.shape)
        weights[name] = QuantizedWeight(INT8, shape, codes.view(shape), scales.view(shape[:-1]))
    with pytest.raises(AssertionError, match=r"layers\.0\.router\.weight is quantized"):
        builder(spec, weights).layer(0)
    weights["layers.0.router.weight"] = torch.zeros(weights["layers.0.router.weight"].shape)
    layer = builder(spec, weights).layer(0)
    assert layer.attention.qkv.weight_NK is weights["layers.0.qkv.weight"]

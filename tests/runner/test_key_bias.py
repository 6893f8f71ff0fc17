"""Norms of key biases: of the keys alone, in any type."""

from dataclasses import replace

import pytest
import torch

from holdfast.models.spec import ModelSpec
from holdfast.runner.build import key_bias_norms
from runner.plan_cases import blueprint


def spec(**changes: object) -> ModelSpec:
    found = blueprint("Qwen2.5-7B-Instruct").spec
    assert found is not None
    return replace(found, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_only_keys_count(dtype: torch.dtype) -> None:
    weights = {}
    for layer, size in enumerate((0.0, 2.0, 300.0)):
        bias = torch.full((6 * 16 + 2 * 2 * 16,), 1e4, dtype=dtype)
        bias[96:128] = size
        weights[f"layers.{layer}.qkv.bias"] = bias
    assert key_bias_norms(weights, spec()) == pytest.approx([0.0, 2.0 * 32**0.5, 300.0 * 32**0.5])


def test_large_biases_do_not_overflow() -> None:
    weights = {f"layers.{layer}.qkv.bias": torch.full((160,), 6e4, dtype=torch.float16) for layer in range(3)}
    assert key_bias_norms(weights, spec()) == pytest.approx([float(torch.tensor(6e4).half()) * 32**0.5] * 3)


def test_a_model_without_biases_has_none_to_read() -> None:
    with pytest.raises(AssertionError, match="has no key biases"):
        key_bias_norms({}, spec(qkv_bias=False))

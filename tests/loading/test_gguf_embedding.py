"""An embedding that a GGUF file has quantized is quantized with --quantization: plan, load, dummies and ledger agree."""

import pytest
import torch

from for_each import for_each
from holdfast.config import EngineConfig
from holdfast.loading.declared import open_declared
from holdfast.loading.model_files import open_model
from holdfast.memory.devices import GIB
from holdfast.memory.ledger import Ledger
from holdfast.planning.resolve import Choice, PlanRequest, resolve
from holdfast.planning.target import Target
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.runner.build import plan_model
from loading import test_gguf_model as tiny

CPU = Target("cpu", "cpu", 16 * GIB, 16 * GIB, 0, "a test")
SCHEMES = ("int8", "fp8", "fp8_tensor", "fp8_block", "mxfp4")
CHOICE = Choice("quantized_embeddings", "all", "the file stores the embedding as Q8_0; it is int8 by rows here")


def config(path, **options) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", max_model_len=64, weight_cache="off", **options)


@pytest.fixture
def untied(tmp_path):
    """A tiny Qwen 2 with a head of its own, and its embedding as Q8_0."""
    path = tmp_path / "tiny.gguf"
    return path, tiny.write_model(path, "qwen2", tied=False)


@for_each("scheme", SCHEMES)
def test_plan_load_and_dummies_agree_to_the_byte(untied, scheme):
    path, expected = untied
    declared = open_declared(str(path))
    resolved = resolve(PlanRequest(config(path, quantization=scheme), declared, CPU))
    assert (resolved.recipe.embeddings, CHOICE in resolved.choices) == ("all", True)
    planned_bytes = declared.weight_bytes("float32", resolved.recipe)
    for load_format in ("auto", "dummy"):
        opened = open_model(str(path), load_format)
        load, plan = plan_model(config(path, quantization=scheme, load_format=load_format), opened, CPU)
        assert plan.resolved.recipe == resolved.recipe
        ledger = Ledger()
        weights = load.run("cpu", ledger, lambda done, total: None).weights
        assert load.plan.final_bytes == planned_bytes == ledger.group_bytes()["weights"]
        for name in ("embed.weight", "lm_head.weight"):
            weight = weights[name]
            assert isinstance(weight, QuantizedWeight)
            assert weight.scheme.name == "int8"
        if load_format == "auto":
            embedding = weights["embed.weight"]
            values = embedding.codes.float() * embedding.scales[:, None]
            stored = expected["model.embed_tokens.weight"]
            assert torch.all((values - stored).abs() <= embedding.scales[:, None] / 2 * 1.0001)


@pytest.mark.parametrize("option", ["head", "none", "all"])
def test_embedding_option_comes_first(untied, option):
    path, _ = untied
    chosen = config(path, quantization="int8", quantized_embeddings=option)
    resolved = resolve(PlanRequest(chosen, open_declared(str(path)), CPU))
    assert resolved.recipe.embeddings == option
    assert CHOICE not in resolved.choices


def test_gguf_embedding_stored_wide_stays_unquantized(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "KINDS", ("F16", "Q8_0"))
    tiny.write_model(tmp_path / "tiny.gguf", "qwen2", tied=False)
    declared = open_declared(str(tmp_path / "tiny.gguf"))
    assert declared.on_disk is not None
    assert declared.on_disk.embedding_type is None
    resolved = resolve(PlanRequest(config(tmp_path, quantization="int8"), declared, CPU))
    assert resolved.recipe.embeddings == "head"


def test_gguf_embedding_without_quantization_stays_plain(untied):
    path, _ = untied
    resolved = resolve(PlanRequest(config(path), open_declared(str(path)), CPU))
    assert resolved.recipe.scheme is None
    assert CHOICE not in resolved.choices

"""Dummy weights by name: packed as the name says, of unit gain, and what a plan of that name counts."""

from typing import Any

import pytest
import torch

from holdfast import LLM, SamplingParams
from holdfast.loading import named_dummy
from holdfast.loading.declared import declare_opened, open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import open_model
from holdfast.loading.named_dummy import SAMPLE_ROWS
from holdfast.loading.planning.plan import plan_load
from holdfast.memory.ledger import Ledger
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedWeight
from holdfast.quant.weight_schemes import PackedPolicy, WeightRecipe
from loading.test_convert import silent
from models.tiny_states import EXPERTS, SMALL

KEPT = WeightRecipe(packed=PackedPolicy("all", "cuda"))
STATES: dict[str, Any] = SMALL | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "states": STATES | {"architectures": ["Qwen3_5ForCausalLM"]},
    "states and experts": STATES | EXPERTS | {"moe_intermediate_size": 256, "architectures": ["Qwen3_5MoeForCausalLM"]},
    "tied": STATES | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
}
NAME = "owner/Tiny-1B"


@pytest.fixture(params=MODELS)
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a model that the catalogue knows for now."""
    config = MODELS[request.param]
    monkeypatch.setattr(named_dummy, "is_known", lambda name: True)
    monkeypatch.setattr(named_dummy, "find_model", lambda name: ("Tiny-1B", config))
    return config


def loaded(name: str, recipe: WeightRecipe = KEPT) -> dict[str, Any]:
    model = open_model(name, "dummy")
    plan = plan_load(model.parameters, model.source, "float32", recipe)
    found = load_weights(plan, model.source, "cpu", Ledger(), silent)
    model.source.close()
    return dict(found.weights)


@pytest.mark.usefixtures("tiny")
def test_named_dummy_packed_parts_repeat_rows_of_unit_gain() -> None:
    kept = {name: weight for name, weight in loaded(f"{NAME}:Q4_K_M").items() if isinstance(weight, PackedWeight)}
    assert any("qkv" in name or "in_proj" in name for name in kept)
    for name, weight in kept.items():
        for part in weight.parts:
            rows = dequantize_rows(part, 0, (0, part.num_rows), torch.zeros(part.num_rows, part.shape[-1]))
            assert float(rows.std()) * part.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1), name
            assert not torch.equal(rows[0], rows[1]), name
    (down,) = kept["layers.0.o.weight"].parts
    rows = dequantize_rows(down, 0, (0, down.num_rows), torch.zeros(down.num_rows, down.shape[-1]))
    assert torch.equal(rows[:SAMPLE_ROWS], rows[SAMPLE_ROWS : 2 * SAMPLE_ROWS])


@pytest.mark.usefixtures("tiny")
def test_named_dummy_chunks_do_not_change_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded(f"{NAME}:Q4_K_M")
    monkeypatch.setattr("holdfast.loading.planning.plan.CPU_CHUNK_BYTES", 2**16)
    for name, weight in loaded(f"{NAME}:Q4_K_M").items():
        if isinstance(weight, PackedWeight):
            for one, other in zip(weight.planes(), whole[name].planes(), strict=True):
                assert torch.equal(one, other), name


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("packed_weights", ["as_stored", "expanded"])
def test_named_dummy_answers(packed_weights: str) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "tokenizer": "none", "max_model_len": 64, "device": "cpu"}
    with LLM(f"{NAME}:Q4_K_M", packed_weights=packed_weights, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": [3, 14, 15]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.usefixtures("tiny")
def test_named_dummy_without_release_is_plain() -> None:
    model = open_model(NAME, "dummy")
    assert all(entry.packed is None for entry in model.source.entries.values())


@pytest.mark.parametrize("name", ["Qwen/Qwen3.6-27B:Q4_K_M", "Qwen/Qwen3-8B-GGUF:Q8_0", "openai/gpt-oss-20b"])
def test_named_dummy_weights_take_what_the_plan_says(name: str) -> None:
    model, declared = open_model(name, "dummy"), open_declared(name)
    plan = plan_load(model.parameters, model.source, "bfloat16", KEPT, stored=model.stored)
    assert plan.final_bytes == declared.weight_bytes("bfloat16", KEPT)
    assert declare_opened(model, model.name).packed == declared.packed


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
def test_named_dummy_gpu_writes_the_rows_of_the_cpu() -> None:
    host = loaded(f"{NAME}:Q4_K_M")
    model = open_model(f"{NAME}:Q4_K_M", "dummy")
    plan = plan_load(model.parameters, model.source, "float32", KEPT)
    device = load_weights(plan, model.source, "cuda", Ledger(), silent).weights
    model.source.close()
    for name, weight in device.items():
        if isinstance(weight, PackedWeight):
            for one, other in zip(weight.planes(), host[name].planes(), strict=True):
                assert torch.equal(one.cpu(), other), name

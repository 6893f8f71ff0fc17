import dataclasses

import pytest

from holdfast.models.families import parameters, read_spec
from holdfast.models.parameters import LLAMA_NAMES, list_parameters
from loading.tiny_models import FAMILIES, save_tiny
from models.tiny_experts import EXPERT_MODELS, config_of, make_tiny, tensors_of

LAYER = {"attn_norm.weight", "qkv.weight", "o.weight", "mlp_norm.weight", "gate_up.weight", "down.weight"}
OUTSIDE = {"embed.weight", "final_norm.weight", "lm_head.weight"}


def names(**config) -> set[str]:
    base = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return {parameter.name.removeprefix("layers.0.") for parameter in parameters(read_spec(base | config))}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_model_is_used_exactly_once(family, tmp_path):
    model = save_tiny(family, tmp_path)
    spec = read_spec(model.config.to_dict())
    listed = parameters(spec)
    parts = [part for parameter in listed for part in parameter.parts]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if spec.tied_embeddings:
        del shapes["lm_head.weight"]
    assert {part.tensor: part.shape for part in parts} == shapes
    assert len(parts) == len(shapes)
    for parameter in listed:
        parameter.check()


def test_names_are_those_that_the_decoder_asks_for():
    assert names() == LAYER | OUTSIDE
    assert names(tie_word_embeddings=True) == (LAYER | OUTSIDE) - {"lm_head.weight"}
    biases = {"qkv.bias", "o.bias", "gate_up.bias", "down.bias"}
    assert names(attention_bias=True, mlp_bias=True) == LAYER | OUTSIDE | biases
    assert names(architectures=["Qwen3ForCausalLM"]) == LAYER | OUTSIDE | {"q_norm.weight", "k_norm.weight"}
    opt = {name.replace("gate_up", "up") for name in LAYER} | {"embed.weight", "final_norm.weight", "positions.weight"}
    opt |= {name.replace("weight", "bias") for name in opt - {"embed.weight", "positions.weight"}}
    assert names(architectures=["OPTForCausalLM"]) == opt


def test_experts_take_the_place_of_the_mlp_in_sparse_layers():
    sparse = (LAYER - {"gate_up.weight", "down.weight"}) | {
        "router.weight",
        "experts.gate_up.weight",
        "experts.down.weight",
    }
    qwen3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1}
    norms = {"q_norm.weight", "k_norm.weight"}
    assert names(**qwen3) == sparse | OUTSIDE | norms
    assert names(**qwen3, mlp_only_layers=[0]) == LAYER | OUTSIDE | norms
    shared = {"shared.gate_up.weight", "shared.down.weight", "shared.gate.weight", "qkv.bias"}
    qwen2 = qwen3 | {"architectures": ["Qwen2MoeForCausalLM"]}
    assert names(**qwen2) == sparse | OUTSIDE | shared


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_every_tensor_of_a_mixture_is_used_exactly_once(name):
    model = make_tiny(name)
    listed = parameters(read_spec(config_of(model)))
    parts = [part for parameter in listed for part in parameter.parts]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(model, "separate").items()}
    assert {part.tensor: part.shape for part in parts} == shapes
    assert len(parts) == len(shapes)
    for parameter in listed:
        parameter.check()


ROWS = {"embed", "lm_head", "qkv", "gate_up", "up"}
COLUMNS = {"o", "down"}


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_MODELS])
def test_kinds_and_splits(family):
    prefix, settings = (FAMILIES | EXPERT_MODELS)[family]
    spec = read_spec({"architectures": [f"{prefix}ForCausalLM"]} | settings)
    for parameter in parameters(spec):
        *path, module, end = parameter.name.split(".")
        split = "rows" if module in ROWS else "columns" if module in COLUMNS else "none"
        if end == "bias":
            assert (parameter.kind, parameter.split) == ("bias", "rows" if split == "rows" else "none")
            continue
        kind = "linear"
        if module == "lm_head" or (module == "embed" and spec.tied_embeddings):
            kind = "head"
        elif module in ("embed", "positions"):
            kind = "embedding"
        elif module.endswith("norm"):
            kind = "norm"
        elif module == "router" or (path[-1:] == ["shared"] and module == "gate"):
            kind = "router"
        elif path[-1:] == ["experts"]:
            kind = "expert"
        assert (parameter.kind, parameter.split) == (kind, split), parameter.name


def test_fused_rows_are_query_key_value_and_gate_up():
    spec = read_spec(
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 100, "num_hidden_layers": 1}
    )
    by_name = {parameter.name: parameter for parameter in parameters(spec)}
    qkv = by_name["layers.0.qkv.weight"]
    assert qkv.shape == (64 + 32 + 32, 64)
    assert [(part.tensor.split(".")[-2], part.row_start) for part in qkv.parts] == [
        ("q_proj", 0),
        ("k_proj", 64),
        ("v_proj", 96),
    ]
    gate_up = by_name["layers.0.gate_up.weight"]
    assert [(part.tensor.split(".")[-2], part.row_start) for part in gate_up.parts] == [
        ("gate_proj", 0),
        ("up_proj", 100),
    ]


def test_layers_are_numbered_in_order():
    spec = dataclasses.replace(read_spec({"architectures": ["LlamaForCausalLM"]}), num_layers=12)
    order = [parameter.name.split(".")[1] for parameter in list_parameters(spec, LLAMA_NAMES)[1:-2]]
    assert list(dict.fromkeys(order)) == [str(layer) for layer in range(12)]

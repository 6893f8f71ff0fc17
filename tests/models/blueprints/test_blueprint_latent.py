"""Latent attention: parameters against transformers, rows and ranks by hand."""

from math import prod
from typing import Any

import pytest

from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel
from models.meta_models import count_elements

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
V2 = TINY | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy"}
V3 = TINY | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
STEP = StepShape(num_rows=5000, num_logit_rows=64, max_model_len=4096, dtype="bfloat16")


def elements(declared: DeclaredModel, num_ranks: int = 1) -> int:
    return sum(prod(weight.shape) for weight in declared.parameters(num_ranks))


@pytest.mark.parametrize(
    ("family", "config", "more"),
    [
        ("DeepseekV2", V2, {}),
        ("DeepseekV2", V2 | {"q_lora_rank": None}, {}),
        ("DeepseekV2", V2 | {"first_k_dense_replace": 0, "tie_word_embeddings": True}, {}),
        ("DeepseekV3", V3, {"topk_method": "noaux_tc"}),
    ],
    ids=["v2", "v2 without a query latent", "v2 all experts", "v3"],
)
def test_as_many_parameters_as_transformers_has(family: str, config: dict[str, Any], more: dict[str, Any]) -> None:
    counted = count_elements(family, config, ("e_score_correction_bias",))
    assert elements(declare_config(config | more, "tiny")) == counted


def test_the_draft_layer_is_a_layer_with_an_embedding_and_a_head() -> None:
    plain = declare_config(V3 | {"first_k_dense_replace": 0}, "tiny")
    drafting = declare_config(V3 | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}, "tiny")
    one_layer = sum(prod(weight.shape) for weight in plain.parameters() if weight.name.startswith("layers.0."))
    assert elements(drafting) - elements(plain) == one_layer + 2 * 97 * 64 + 64 * 128 + 3 * 64
    assert drafting.group_bytes("bfloat16").keys() - plain.group_bytes("bfloat16").keys() == {"mtp"}


def test_one_row_a_token_is_on_every_rank() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    for ranks in (1, 2, 8, 128):
        assert declared.kv_bytes_per_token("bfloat16", ranks) == 61 * 1152
        assert declared.kv_bytes_per_token("fp8", ranks) == 61 * 656
        assert declared.kv_bytes_per_sequence("fp8", ranks) == 0


def test_ranks_share_heads_and_experts() -> None:
    declared = declare_config(V3, "tiny")
    whole = {weight.name: prod(weight.shape) for weight in declared.parameters()}
    for weight in declared.parameters(4):
        module = weight.name.split(".")[-2]
        shared = module in ("q_a", "kv_a") or weight.kind in ("norm", "router", "bias")
        padded = module in ("embed", "lm_head")  # 97 rows among four
        assert prod(weight.shape) == (whole[weight.name] if shared else 25 * 64 if padded else whole[weight.name] // 4)


@pytest.mark.parametrize(("ranks", "reason"), [(3, "4 query heads"), (16, "4 query heads"), (5, "4 query heads")])
def test_ranks_that_do_not_divide(ranks: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason} do not divide into {ranks} equal parts; try 1, 2, 4"):
        declare_config(V3, "tiny").parameters(ranks)


def test_scratch_of_wide_queries_does_not_grow_with_the_rows() -> None:
    declaration = declare_config(CATALOGUE["DeepSeek-R1"], "r1").declaration
    by_rows = []
    for rows in (2000, 50_000):
        requests = {request.owner: request for request in declaration.requests(STEP._replace(num_rows=rows), 1, ())}
        shapes = {spec.name: spec.shape for spec in requests["attention"].specs}
        by_rows.append((shapes["absorbed"], shapes["partial"]))
    assert by_rows[0] == by_rows[1]


@pytest.mark.parametrize("key", ["kv_lora_rank", "num_hidden_layers", "v_head_dim", "n_routed_experts", "vocab_size"])
def test_a_number_that_is_missing_is_not_guessed(key: str) -> None:
    config = {name: value for name, value in V3.items() if name != key}
    with pytest.raises(ModelFormatError, match=f"config.json has no {key}; a plan would be a guess without it"):
        declare_config(config, "tiny")


@pytest.mark.parametrize("value", [0, -3, "4", 2**40, True, 1.5])
def test_numbers_out_of_bounds(value) -> None:
    with pytest.raises(ModelFormatError, match="num_attention_heads"):
        declare_config(V3 | {"num_attention_heads": value}, "tiny")


def test_sparse_steps_are_declined() -> None:
    with pytest.raises(UnsupportedModelError, match="moe_layer_freq = 2"):
        declare_config(V2 | {"moe_layer_freq": 2}, "tiny")

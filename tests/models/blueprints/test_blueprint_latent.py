"""DeepSeek-V3.2: what an index adds to a model with latent attention, by hand and against transformers."""

from math import prod
from typing import Any

import pytest

from holdfast.errors import ConfigError, ModelFormatError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declaration import StepShape
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
    "qk_rope_head_dim": 16,
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
V3 = TINY | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
INDEX = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 40}
V32 = TINY | INDEX | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
STEP = StepShape(num_rows=5000, num_logit_rows=64, max_model_len=4096, dtype="bfloat16")


def test_as_many_parameters_as_transformers_has() -> None:
    weights = declare_config(V32, "tiny").parameters()
    counted = count_elements("DeepseekV32", V32, ("e_score_correction_bias",))
    assert sum(prod(weight.shape) for weight in weights) == counted


def test_the_index_is_whole_on_every_rank_and_the_rest_is_that_of_v3() -> None:
    indexed, plain = declare_config(V32, "tiny"), declare_config(V3, "tiny")
    for ranks in (1, 2, 4):
        own = [weight for weight in indexed.parameters(ranks) if ".index_" in weight.name]
        assert sum(prod(weight.shape) for weight in own) == 3 * (8 * 32 * 24 + 32 * 64 + 2 * 32 + 8 * 64)
        assert [weight for weight in indexed.parameters(ranks) if weight not in own] == [*plain.parameters(ranks)]
    with pytest.raises(ConfigError, match="4 query heads do not divide into 3 equal parts; try 1, 2, 4"):
        indexed.parameters(3)


def test_a_row_of_the_index_lies_beside_every_latent() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-V3.2"], "v3.2")
    for ranks in (1, 8, 128):
        assert declared.kv_bytes_per_token("bfloat16", ranks) == 61 * (1152 + 256)
        assert declared.kv_bytes_per_token("fp8", ranks) == 61 * (656 + 132)
        assert declared.kv_bytes_per_sequence("fp8", ranks) == 0
    assert declared.check_format("fp8").name == "fp8_ds_mla"
    assert declared.keeps_latents
    assert declared.spec is None


def test_scratch_of_wide_queries_does_not_grow_with_the_rows() -> None:
    declaration = declare_config(CATALOGUE["DeepSeek-V3.2"], "v3.2").declaration
    assert declaration.heads(1) is None
    by_rows = []
    for rows in (2000, 50_000):
        requests = {request.owner: request for request in declaration.requests(STEP._replace(num_rows=rows), 1, ())}
        shapes = {spec.name: spec.shape for spec in requests["attention"].specs}
        by_rows.append([shapes[name] for name in ("absorbed", "attended_latent", "partial", "index_q")])
        assert shapes["index_scores"][0] <= 2**27
    assert by_rows[0] == by_rows[1]


@pytest.mark.parametrize("key", INDEX)
def test_a_number_of_the_index_that_is_missing_is_not_guessed(key: str) -> None:
    config = {name: value for name, value in V32.items() if name != key}
    with pytest.raises(ModelFormatError, match=f"config.json has no {key}; a plan would be a guess without it"):
        declare_config(config, "tiny")


def test_an_index_needs_the_latent_of_queries() -> None:
    with pytest.raises(ModelFormatError, match="has no q_lora_rank; an index takes its queries from there"):
        declare_config(V32 | {"q_lora_rank": None}, "tiny")


@pytest.mark.parametrize("value", [0, -3, "4", 2**40, True, 1.5])
def test_numbers_out_of_bounds(value) -> None:
    with pytest.raises(ModelFormatError, match="index_n_heads"):
        declare_config(V32 | {"index_n_heads": value}, "tiny")

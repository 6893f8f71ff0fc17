"""DeepSeek-V4: parameters against transformers, entries, windows and states by hand."""

from fractions import Fraction
from math import prod
from typing import Any

import pytest

from holdfast.errors import ConfigError, ModelFormatError
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel
from models.meta_models import count_elements

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 64,
    "index_head_dim": 16,
    "index_topk": 3,
    "compress_ratios": [0, 128, 4, 128, 4],
    "sliding_window": 8,
    "hc_mult": 4,
    "num_hash_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
FLASH, PRO = (declare_config(CATALOGUE[name], name) for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"))


def elements(declared: DeclaredModel, num_ranks: int = 1) -> int:
    return sum(prod(weight.shape) for weight in declared.parameters(num_ranks))


def test_as_many_parameters_as_transformers_has() -> None:
    counted = count_elements("DeepseekV4", TINY, ("e_score_correction_bias", "tid2eid"))
    assert elements(declare_config(TINY, "tiny")) == counted


def test_published_numbers_of_parameters() -> None:
    plain = {
        name: sum(prod(w.shape) for w in model.parameters() if not w.name.startswith("mtp"))
        for name, model in (("flash", FLASH), ("pro", PRO))
    }
    assert round(plain["flash"] / 1e9) == 284
    assert round(plain["pro"] / 1e12, 1) == 1.6


def test_layers_of_each_kind() -> None:
    rows = {row.name: row.num_layers for row in FLASH.declaration.cache_rows(FLASH.check_format("fp8"), 1)}
    assert rows == {"compressed by 4": 21, "index": 21, "compressed by 128": 20}
    rows = {row.name: row.num_layers for row in PRO.declaration.cache_rows(PRO.check_format("fp8"), 1)}
    assert rows == {"compressed by 4": 30, "index": 30, "compressed by 128": 31}


def test_a_million_tokens() -> None:
    assert round(float(FLASH.kv_bytes_per_token("fp8") * 2**20 / 2**30), 2) == 3.76
    assert round(float(PRO.kv_bytes_per_token("fp8") * 2**20 / 2**30), 2) == 5.38
    assert round(float(PRO.kv_bytes_per_token("bfloat16") * 2**20 / 2**30), 2) == 9.62


def test_a_sequence_keeps_windows_and_unfinished_entries() -> None:
    flash_state = 21 * (8 * 8192 + 8 * 2048) + 20 * 128 * 4096
    assert FLASH.kv_bytes_per_sequence("fp8") == 43 * 128 * 584 + flash_state
    assert FLASH.kv_bytes_per_sequence("bfloat16") == 43 * 128 * 1024 + flash_state
    assert round(flash_state / 1e6, 1) == 12.2
    assert round((PRO.kv_bytes_per_sequence("fp8") - 61 * 128 * 584) / 1e6, 1) == 18.7


def test_nothing_of_the_cache_is_divided_among_ranks() -> None:
    for ranks in (1, 2, 8):
        assert FLASH.kv_bytes_per_token("fp8", ranks) == Fraction(15401, 4)
        assert FLASH.kv_bytes_per_sequence("fp8", ranks) == FLASH.kv_bytes_per_sequence("fp8")


def test_ranks_share_heads_groups_and_experts() -> None:
    assert elements(FLASH, 8) < elements(FLASH) / 7
    with pytest.raises(ConfigError, match="8 output groups do not divide into 16 equal parts; try 1, 2, 4, 8"):
        FLASH.parameters(16)


def test_experts_in_fp4_and_the_rest_in_fp8() -> None:
    natives = {
        (weight.kind, weight.native) for weight in FLASH.parameters() if weight.kind in ("linear", "expert", "head")
    }
    assert natives == {("linear", "fp8_block_e8m0"), ("expert", "mxfp4"), ("head", None)}
    base = {key: value for key, value in CATALOGUE["DeepSeek-V4-Flash"].items() if key != "expert_dtype"}
    assert {weight.native for weight in declare_config(base, "base").parameters() if weight.kind == "expert"} == {
        "fp8_block_e8m0"
    }


def test_scores_of_the_index_do_not_grow_with_the_context() -> None:
    step = StepShape(8192, 64, 2**20, "bfloat16")
    bytes_by_length = []
    for length in (2**17, 2**20):
        requests = FLASH.declaration.requests(step._replace(max_model_len=length), 1, ())
        bytes_by_length.append(sum(spec.num_bytes for request in requests for spec in request.specs))
    assert bytes_by_length[0] == bytes_by_length[1]


@pytest.mark.parametrize("ratios", [[0, 4], [0, 128, 4, 128, 5], "44444", [0, 128, 4, 128, "4"], {}])
def test_ratios_that_make_no_sense(ratios) -> None:
    with pytest.raises(ModelFormatError, match="compress_ratios"):
        declare_config(TINY | {"compress_ratios": ratios}, "tiny")


@pytest.mark.parametrize("key", ["compress_ratios", "o_groups", "hc_mult", "sliding_window", "index_n_heads"])
def test_a_number_that_is_missing_is_not_guessed(key: str) -> None:
    config = {name: value for name, value in TINY.items() if name != key}
    with pytest.raises(ModelFormatError, match=f"config.json has no {key}"):
        declare_config(config, "tiny")


def test_groups_must_divide_heads() -> None:
    with pytest.raises(ModelFormatError, match="o_groups = 3; a divisor of num_attention_heads = 4"):
        declare_config(TINY | {"o_groups": 3}, "tiny")

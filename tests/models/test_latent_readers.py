"""Families with latent attention: config.json to spec as transformers reads it; numbers beyond any model refused in a sentence."""

import json
from typing import Any

import pytest
import torch

from holdfast.errors import ModelError, ModelFormatError, UnsupportedModelError
from holdfast.kernels.attention.rope_rows import fill_rope_rows
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.grouped_readers import FAMILIES, read_spec, unread_tensors
from holdfast.models.rope import make_step_rope
from holdfast.models.spec import ExpertsSpec, IndexSpec, LatentSpec, ModelSpec
from models.tiny_experts import make_random
from models.tiny_latents import LATENT_MODELS, YARN

PREFIXES = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa")


def theirs_config(prefix: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{prefix}Config")(**settings)


def check_same(spec: ModelSpec, config: Any) -> None:
    """Every number that the spec has of a config of transformers."""
    latent, experts = spec.latent, spec.experts
    index = None
    if config.model_type == "deepseek_v32":
        index = IndexSpec(config.index_n_heads, config.index_head_dim, config.index_topk)
    if config.model_type == "glm_moe_dsa":
        shared = frozenset(layer for layer, kind in enumerate(config.indexer_types) if kind == "shared")
        sizes = config.index_n_heads, config.index_head_dim, config.index_topk
        index = IndexSpec(*sizes, turns_neighbours=True, shared_layers=shared)
    assert latent == LatentSpec(
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        index=index,
    )
    assert (spec.num_kv_heads, spec.head_dim) == (1, config.kv_lora_rank + config.qk_rope_head_dim)
    for ours, name in (
        (spec.vocab_size, "vocab_size"),
        (spec.hidden_size, "hidden_size"),
        (spec.intermediate_size, "intermediate_size"),
        (spec.num_layers, "num_hidden_layers"),
        (spec.num_heads, "num_attention_heads"),
        (spec.norm_eps, "rms_norm_eps"),
        (spec.qkv_bias, "attention_bias"),
        (spec.o_bias, "attention_bias"),
        (spec.tied_embeddings, "tie_word_embeddings"),
    ):
        assert ours == getattr(config, name), name
    assert spec.rope is not None
    assert (spec.rope.theta, spec.rope.kind) == (
        config.rope_parameters["rope_theta"],
        config.rope_parameters["rope_type"],
    )
    assert isinstance(experts, ExpertsSpec)
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is None:
        kinds = ["dense"] * config.first_k_dense_replace + ["sparse"] * config.num_hidden_layers
    assert experts.dense_layers == {layer for layer in range(spec.num_layers) if kinds[layer] == "dense"}
    assert experts.num_experts == config.n_routed_experts
    assert experts.intermediate_size == config.moe_intermediate_size
    assert experts.shared_size == config.n_shared_experts * config.moe_intermediate_size
    assert (experts.share_scale, experts.normalizes) == (config.routed_scaling_factor, config.norm_topk_prob)
    assert experts.top_k == config.num_experts_per_tok
    is_v2 = config.model_type == "deepseek_v2"
    assert experts.scoring == ("softmax" if is_v2 else "sigmoid")
    assert experts.has_score_bias is not is_v2
    assert experts.group_score == ("largest" if is_v2 else "two_largest")
    if not is_v2 or config.topk_method != "greedy":
        assert (experts.num_groups, experts.groups_taken) == (config.n_group, config.topk_group)
    else:
        assert (experts.num_groups, experts.groups_taken) == (1, 1)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_read_spec_absent_keys_default_as_in_transformers(prefix):
    architecture, more = f"{prefix}ForCausalLM", {}
    if prefix == "DeepseekV2":
        with pytest.raises(ModelFormatError, match="has no num_experts_per_tok"):
            read_spec({"architectures": [architecture]})
        more = {"num_experts_per_tok": 6}
    spec, config = read_spec({"architectures": [architecture], **more}), theirs_config(prefix, **more)
    check_same(spec, config)
    assert spec.max_position == config.max_position_embeddings
    family = FAMILIES[architecture]
    assert (family.bos_token_id, family.eos_token_ids) == (config.bos_token_id, (config.eos_token_id,))
    drafts = prefix in ("DeepseekV32", "Glm4MoeLite", "GlmMoeDsa")
    assert spec.num_draft_layers == getattr(config, "num_nextn_predict_layers", drafts)


@pytest.mark.parametrize("case", LATENT_MODELS)
def test_configs_that_transformers_writes_mean_the_same_here(case):
    prefix, settings = LATENT_MODELS[case]
    config = theirs_config(prefix, **settings, architectures=[f"{prefix}ForCausalLM"], dtype="bfloat16")
    spec = read_spec(json.loads(config.to_json_string(use_diff=False)))
    check_same(spec, config)
    assert spec.checkpoint_dtype == "bfloat16"


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 700.0},
    "yarn": YARN,
    "yarn with equal scales": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn without scales": {key: value for key, value in YARN.items() if not key.startswith("mscale")},
    "yarn with a scale of zero": YARN | {"mscale_all_dim": 0},
    "yarn with a factor below one": YARN | {"factor": 0.5},
    "yarn in the older spelling": {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
}


@pytest.mark.each_value
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("rope", ROPES)
def test_scale_and_rotation_are_those_of_transformers(rope, prefix):
    settings = next(settings for own, settings in LATENT_MODELS.values() if own == prefix)
    theirs = make_random(prefix, settings | {"rope_parameters": dict(ROPES[rope]), "num_hidden_layers": 1})
    scaling = {key: value for key, value in ROPES[rope].items() if key != "rope_theta"}
    older = {"rope_scaling": scaling, "rope_theta": ROPES[rope]["rope_theta"]}
    for spelling in ({"rope_parameters": ROPES[rope]}, older):
        one = {"num_hidden_layers": 1, "mlp_layer_types": None, "indexer_types": None}
        spec = read_spec({"architectures": [f"{prefix}ForCausalLM"], **settings, **one, **spelling})
        assert spec.score_scale == pytest.approx(theirs.model.layers[0].self_attn.scaling, rel=1e-12)
        step = make_step_rope(spec, 90, 90, torch.float32, torch.device("cpu"))
        assert step.rows is not None
        fill_rope_rows(torch.arange(90), step.rows)
        (rotary,) = step.rotaries
        assert rotary is not None
        table = theirs.model.rotary_emb(torch.zeros(1), torch.arange(90).unsqueeze(0))
        cos, sin = (table.real, table.imag) if prefix == "DeepseekV2" else (part[..., :8] for part in table)
        torch.testing.assert_close(rotary.cos_TP, cos[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(rotary.sin_TP, sin[0], rtol=0, atol=2e-6)


def test_models_that_were_released():
    r1, lite, kimi, flash = (
        read_spec({**CATALOGUE[name], "quantization_config": None})
        for name in ("DeepSeek-R1", "DeepSeek-V2-Lite", "Kimi-K2-Instruct", "GLM-4.7-Flash")
    )
    assert r1.score_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert lite.score_scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)
    assert flash.score_scale == 256**-0.5
    assert lite.latent == LatentSpec(None, 512, 128, 64, 128)
    assert flash.latent == LatentSpec(768, 512, 192, 64, 256)
    assert (r1.max_position, kimi.max_position, flash.max_position) == (163840, 131072, 202752)
    assert (r1.family, kimi.family) == ("deepseek_v3", "deepseek_v3")
    assert kimi.experts is not None
    assert (kimi.experts.num_groups, kimi.experts.share_scale, kimi.experts.num_experts) == (1, 2.827, 384)


def test_layers_that_draft_tokens_are_left_unread():
    r1 = read_spec({**CATALOGUE["DeepSeek-R1"], "quantization_config": None})
    assert unread_tensors(r1) == (("model.layers.61.",), "drafts of tokens")
    two = read_spec(config_with(num_nextn_predict_layers=2))
    assert unread_tensors(two)[0] == ("model.layers.3.", "model.layers.4.")
    assert unread_tensors(read_spec(config_with(num_nextn_predict_layers=0))) == ((), "")
    assert unread_tensors(read_spec({"architectures": ["LlamaForCausalLM"]})) == ((), "")


def config_with(**changes: Any) -> dict[str, Any]:
    prefix, settings = LATENT_MODELS["v3 like R1"]
    return {"architectures": [f"{prefix}ForCausalLM"], **settings, **changes}


V2 = {"architectures": ["DeepseekV2ForCausalLM"]}
LIMITED = V2 | {"topk_method": "group_limited_greedy"}
V32 = {"architectures": ["DeepseekV32ForCausalLM"]}
GLM_DSA = {"architectures": ["GlmMoeDsaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank = 24.* a multiple of 16 up to 512, which kernels support"),
        ({"kv_lora_rank": 528}, "kv_lora_rank = 528.* a multiple of 16 up to 512"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0.* a whole number from 1"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8.* 16 or 32 or 64, which kernels support"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim = 128.* 16 or 32 or 64"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0.* a whole number from 1"),
        ({"n_group": 3}, "n_group = 3.* a divisor of n_routed_experts = 8"),
        ({"n_group": 8}, "n_group = 8.* groups of 2 experts and more out of 8"),
        ({"n_group": None}, "n_group = None.* a whole number from 1"),
        ({"topk_group": 5}, "topk_group = 5.* at most n_group = 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5.* at most the 4 experts of 2 groups"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9.* a whole number from 1 to 8"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'.* scores of deepseek_v3 are a sigmoid of logits"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'.* experts of deepseek_v3 are chosen by noaux_tc"),
        (V2 | {"topk_method": "noaux_tc"}, "chosen by greedy or group_limited_greedy"),
        (V2 | {"scoring_func": "sigmoid"}, "scores of deepseek_v2 are a softmax of logits"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob = True.* shares of this family are scores as they are"),
        (LIMITED | {"n_group": None}, "has no n_group.* experts are chosen by groups"),
        (LIMITED | {"n_group": 5}, "n_group = 5.* a divisor of n_routed_experts = 8"),
        (LIMITED | {"n_group": 8, "topk_group": 2}, "num_experts_per_tok = 3.* at most the 2 experts of 2 groups"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "has no rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "has no rope_scaling.factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "has no rope_parameters.original_max_position_embeddings.* scores and rotations of yarn follow from it",
        ),
        ({"rope_parameters": YARN | {"mscale_all_dim": -1.0}}, "rope_parameters.mscale_all_dim = -1.0"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_interleave": False}, "rope_interleave = False.* rope turns neighbouring elements"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2.* every layer behind the first dense ones"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types = .* sparse or dense for each of 3 layers"),
        ({"mlp_layer_types": ["dense", "sparse", "none"]}, "mlp_layer_types = .* sparse or dense"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2.* all query heads share one latent here"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.* experts are gated with silu here"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1"),
        (
            {"n_routed_experts": 2**16, "num_hidden_layers": 100},
            "n_routed_experts = 65536.* at most 1323 in each of 99",
        ),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor = 0.* a number above 0"),
        ({"v_head_dim": 0}, "v_head_dim = 0"),
        (V32 | {"q_lora_rank": None}, "has no q_lora_rank.* an index takes its queries from there"),
        (V32 | {"index_n_heads": 65}, "index_n_heads = 65.* up to 64 heads, which kernels support"),
        (V32 | {"index_n_heads": 0}, "index_n_heads = 0.* a whole number from 1"),
        (
            V32 | {"index_head_dim": 40},
            "index_head_dim = 40.* a multiple of 16 up to 128, which kernels support",
        ),
        (V32 | {"index_head_dim": 144}, "index_head_dim = 144.* a multiple of 16 up to 128"),
        (
            V32 | {"index_head_dim": 32, "qk_rope_head_dim": 64},
            "index_head_dim = 32.* at least qk_rope_head_dim = 64, since so many of its elements are rotated",
        ),
        (V32 | {"index_topk": 257}, "index_topk = 257.* at most the 256 tokens of the longest context"),
        (V32 | {"index_topk": 0}, "index_topk = 0.* a whole number from 1"),
        (V32 | {"index_topk": True}, "index_topk = True.* a whole number from 1"),
        (V32 | {"index_topk": 2.5}, "index_topk = 2.5.* a whole number from 1"),
        (
            V32 | {"index_topk_freq": 2},
            "index_topk_freq = 2.* every layer of deepseek_v32 chooses its tokens itself",
        ),
        (
            V32 | {"indexer_rope_interleave": True},
            "indexer_rope_interleave = True.* rope turns halves of this family's index",
        ),
        (
            GLM_DSA | {"indexer_rope_interleave": False},
            "indexer_rope_interleave = False.* rope turns neighbouring elements",
        ),
        (GLM_DSA | {"index_n_heads": 65}, "index_n_heads = 65.* up to 64 heads"),
        (
            GLM_DSA | {"indexer_types": ["full", "shared"]},
            "indexer_types = .*.* full or shared for each of 3 layers",
        ),
        (
            GLM_DSA | {"indexer_types": ["full", "shared", "none"]},
            "indexer_types = .*.* full or shared for each of 3 layers",
        ),
        (GLM_DSA | {"indexer_types": "full"}, "indexer_types = 'full'.* a list of strings"),
        (
            GLM_DSA | {"indexer_types": ["shared", "full", "full"]},
            "indexer_types = .*.* full for the first layer, before which nothing is chosen",
        ),
        (GLM_DSA | {"index_topk_pattern": "FSX"}, "index_topk_pattern = 'FSX'.* full or shared for each of 3 layers"),
        (GLM_DSA | {"index_topk_pattern": "FS"}, "index_topk_pattern = 'FS'.* full or shared for each of 3 layers"),
        (GLM_DSA | {"index_topk_pattern": 3}, "index_topk_pattern = 3.* a list of strings"),
        (GLM_DSA | {"index_topk_freq": -1}, "index_topk_freq = -1.* a whole number from 0"),
        (
            GLM_DSA | {"index_topk_freq": 2, "index_skip_topk_offset": 0},
            "index_topk_freq = 2.* full for the first layer",
        ),
        ({"model_type": "llama"}, "model_type = 'llama'.* 'deepseek_v3', the type of DeepseekV3ForCausalLM"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(changes, sentence):
    config = config_with(**({"rope_parameters": None} if "rope_scaling" in changes else {}))
    with pytest.raises(ModelError, match=sentence) as caught:
        read_spec(config | changes)
    assert "\n" not in str(caught.value)


def test_read_spec_accepts_absent_and_empty_values():
    assert read_spec(config_with(n_shared_experts=None)).experts == read_spec(config_with(n_shared_experts=0)).experts
    assert read_spec(config_with(first_k_dense_replace=7)).experts is None
    assert read_spec(config_with(num_key_value_heads=1)) == read_spec(config_with(num_key_value_heads=None))
    assert read_spec(config_with(model_type="kimi_k2")).family == "deepseek_v3"
    assert read_spec(config_with(rope_interleave=True, moe_layer_freq=1)) == read_spec(config_with())


def test_read_spec_index_top_k_is_capped_by_context():
    for top_k in (1, 7, 256):
        latent = read_spec(config_with(**V32, index_topk=top_k)).latent
        assert latent is not None
        assert latent.index == IndexSpec(64, 128, top_k)
    short = read_spec(config_with(**V32)).latent
    assert short is not None
    assert short.index is not None
    assert short.index.top_k == 256, "what is left out is no more than a context has"


SHARING: dict[str, dict[str, Any]] = {
    "listed": {"indexer_types": ["full", "shared", "shared", "full", "shared", "full", "full"]},
    "letters": {"index_topk_pattern": "FSSFSFF"},
    "a list of words": {"index_topk_pattern": ["full", "shared", "shared", "full", "shared", "full", "full"]},
    "every third": {"index_topk_freq": 3},
    "every fourth behind the first": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "every other behind many": {"index_topk_freq": 2, "index_skip_topk_offset": 9},
    "none": {"index_topk_freq": 0},
    "a list before all": {
        "indexer_types": ["full"] * 6 + ["shared"],
        "index_topk_freq": 2,
        "index_topk_pattern": "FSFSFSF",
    },
}


@pytest.mark.parametrize("case", SHARING)
def test_layers_that_take_a_choice_are_those_of_transformers(case):
    config = theirs_config("GlmMoeDsa", num_hidden_layers=7, **SHARING[case])
    spec = read_spec(GLM_DSA | {"num_hidden_layers": 7} | SHARING[case])
    kinds = ["full" if spec.layer_index(layer) is not None else "shared" for layer in range(7)]
    assert kinds == config.indexer_types
    assert spec.shares_choices == ("shared" in kinds)


def test_read_spec_indexer_types_may_include_draft_layers():
    kinds = ["full", "shared", "full", "shared"]
    spec = read_spec(GLM_DSA | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "indexer_types": kinds})
    assert spec.latent is not None
    assert spec.latent.index is not None
    assert spec.latent.index.shared_layers == {1}


@pytest.mark.parametrize("architecture", ["MiniCPM3ForCausalLM"])
def test_other_models_with_latents_do_not_run(architecture):
    with pytest.raises(UnsupportedModelError, match=f"describes a {architecture}, which does not run in this version"):
        read_spec(config_with(architectures=[architecture]))

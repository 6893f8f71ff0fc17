"""Every setting that a family reads: where it goes in the ModelSpec, and that no setting is read in vain."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from holdfast.errors import ModelError, UnsupportedModelError
from holdfast.families.state.spec import StateSpec
from holdfast.models.grouped_readers import FAMILIES, NEUTRAL, model_settings, read_spec
from holdfast.models.settings import Settings, read_rope
from holdfast.models.spec import (
    CompressedSpec,
    CompressorSpec,
    ExpertsSpec,
    IndexSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    StreamsSpec,
)

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "max_position_embeddings": 300,
    "torch_dtype": "float16",
    "rms_norm_eps": 3e-4,
    "rope_theta": 777.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
}
"""None of these numbers is a default, and no two are alike."""
GELU = {"hidden_act": "gelu"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 90,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.25,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}
YARN_ROPE = RopeSpec(777.0, "yarn", 3.0, 90, 1.0, 4.0, 16.0, 2.0, 1.25, 0.7, 0.9, False)
LINEAR_ROPE = RopeSpec(777.0, "linear", factor=2.0)
BASE = ModelSpec(
    architecture="",
    family="",
    vocab_size=101,
    hidden_size=96,
    intermediate_size=56,
    num_layers=4,
    num_heads=6,
    num_kv_heads=3,
    head_dim=24,
    max_position=600,
    checkpoint_dtype="float16",
    norm_eps=3e-4,
    rope=LINEAR_ROPE,
    tied_embeddings=True,
)


def rotary(architecture: str, **fields: Any) -> ModelSpec:
    """BASE as a family has it."""
    return replace(BASE, architecture=architecture, family=FAMILIES[architecture].name, **fields)


GEMMA: dict[str, Any] = {
    **SIZES,
    "tie_word_embeddings": False,
    "hidden_activation": "silu",
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 333.0,
    "query_pre_attn_scalar": 50.0,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "attention_bias": True,
}
GEMMA_FIELDS: dict[str, Any] = {
    "max_position": 300,
    "tied_embeddings": False,
    "activation": "silu",
    "sliding_windows": (7, 7, None, 7),
    "local_rope": RopeSpec(333.0),
    "attention_scale": 50.0**-0.5,
    "attention_softcap": 20.0,
    "logit_softcap": 15.0,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": True,
    "norm_offset": 1.0,
    "float32_norms": True,
    "has_output_norms": True,
    "embedding_scale": 96**0.5,
}
OPT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "ffn_dim": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 300,
    "torch_dtype": "float16",
    "activation_function": "gelu",
    "word_embed_proj_dim": 32,
    "enable_bias": False,
    "tie_word_embeddings": False,
}
OPT_SPEC = rotary(
    "OPTForCausalLM",
    num_kv_heads=6,
    head_dim=16,
    max_position=300,
    norm_eps=1e-5,
    norm="layer",
    rope=None,
    activation="gelu",
    gated_mlp=False,
    position_offset=2,
    embedding_size=32,
    tied_embeddings=False,
)
LATENT: dict[str, Any] = {
    **{key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim", "rope_scaling")},
    "rope_scaling": YARN,
    "attention_bias": True,
    "q_lora_rank": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 28,
    "n_routed_experts": 12,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "n_group": 4,
    "topk_group": 3,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 2,
}
LATENT_SPEC = replace(
    BASE,
    num_kv_heads=1,
    head_dim=80,
    max_position=300,
    rope=YARN_ROPE,
    qkv_bias=True,
    o_bias=True,
    attention_scale=36**-0.5 * (0.1 * 0.9 * 1.0986122886681098 + 1.0) ** 2,
    latent=LatentSpec(40, 64, 20, 16, 28),
    num_draft_layers=2,
    experts=ExpertsSpec(
        num_experts=12,
        top_k=2,
        intermediate_size=44,
        shared_size=132,
        normalizes=True,
        dense_layers=frozenset({0, 1}),
        scoring="sigmoid",
        num_groups=4,
        groups_taken=3,
        group_score="two_largest",
        has_score_bias=True,
        share_scale=1.75,
    ),
)
INDEX = {"index_n_heads": 6, "index_head_dim": 48, "index_topk": 11}


def latent(architecture: str, index: IndexSpec | None = None, **experts: Any) -> ModelSpec:
    """LATENT_SPEC as a family has it."""
    assert LATENT_SPEC.latent is not None
    assert LATENT_SPEC.experts is not None
    return replace(
        LATENT_SPEC,
        architecture=architecture,
        family=FAMILIES[architecture].name,
        latent=replace(LATENT_SPEC.latent, index=index),
        experts=replace(LATENT_SPEC.experts, **experts),
    )


V4: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")},
    **{key: SIZES[key] for key in ("torch_dtype", "rms_norm_eps", "rope_theta", "tie_word_embeddings")},
    **INDEX,
    "num_hidden_layers": 4,
    "head_dim": 48,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 40,
    "o_groups": 3,
    "o_lora_rank": 20,
    "compress_ratios": [4, 0, 128, 4],
    "compress_rate_csa": 8,
    "compress_rate_hca": 16,
    "compress_rope_theta": 555.0,
    "rope_scaling": {key: YARN[key] for key in YARN if key != "attention_factor"},
    "sliding_window": 7,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "hc_eps": 2e-3,
    "n_routed_experts": 12,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "routed_scaling_factor": 1.75,
    "swiglu_limit": 6.0,
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 2,
}
V4_SPEC = rotary(
    "DeepseekV4ForCausalLM",
    intermediate_size=44,
    num_kv_heads=1,
    head_dim=48,
    max_position=300,
    rope=replace(YARN_ROPE, theta=555.0, attention_factor=1.0),
    local_rope=RopeSpec(777.0),
    sliding_windows=(7,) * 4,
    has_sinks=True,
    num_draft_layers=2,
    compressed=CompressedSpec(
        q_rank=40,
        rope_dim=16,
        window=7,
        compressors=(CompressorSpec(8, True), None, CompressorSpec(16, False), CompressorSpec(8, True)),
        num_output_groups=3,
        output_rank=20,
        index=IndexSpec(6, 48, 11, turns_neighbours=True),
    ),
    streams=StreamsSpec(3, 5, 2e-3),
    experts=ExpertsSpec(
        num_experts=12,
        top_k=2,
        intermediate_size=44,
        shared_size=132,
        normalizes=True,
        scoring="sqrtsoftplus",
        has_score_bias=True,
        share_scale=1.75,
        silu_limit=6.0,
        table_layers=frozenset({0, 1}),
        table_size=101,
    ),
)
QWEN_EXPERTS = ExpertsSpec(8, 3, 40, normalizes=True, dense_layers=frozenset({0, 1, 2}))
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 15,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 28,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
    "output_gate_type": "sigmoid",
    "attn_output_gate": False,
    "mtp_num_hidden_layers": 2,
}
DELTA_STATE = StateSpec(frozenset({0, 3}), 5, 15, 20, 28, 3, output_gate="sigmoid")
DELTA_FIELDS: dict[str, Any] = {
    "qk_norm": True,
    "norm_offset": 1.0,
    "rotary_dim": 12,
    "has_output_gate": False,
    "num_draft_layers": 2,
}
CASES: dict[str, tuple[dict[str, Any], ModelSpec]] = {
    "llama": (
        SIZES | GELU | {"attention_bias": True, "mlp_bias": True},
        rotary("LlamaForCausalLM", activation="gelu", qkv_bias=True, o_bias=True, mlp_bias=True),
    ),
    "mistral": (
        SIZES | GELU | {"sliding_window": 7},
        rotary("MistralForCausalLM", activation="gelu", sliding_windows=(7,) * 4),
    ),
    "qwen2": (
        SIZES | GELU | WINDOWS | {"max_window_layers": 3},
        rotary("Qwen2ForCausalLM", activation="gelu", qkv_bias=True, sliding_windows=(None, None, None, 7)),
    ),
    "qwen2 by kind": (
        SIZES | WINDOWS | {"layer_types": ["sliding_attention", "full_attention", "attention", "sliding_attention"]},
        rotary("Qwen2ForCausalLM", qkv_bias=True, sliding_windows=(7, None, None, 7)),
    ),
    "qwen3": (
        SIZES | GELU | WINDOWS | {"max_window_layers": 1, "attention_bias": True},
        rotary(
            "Qwen3ForCausalLM",
            activation="gelu",
            qkv_bias=True,
            o_bias=True,
            qk_norm=True,
            sliding_windows=(None, 7, 7, 7),
        ),
    ),
    "qwen2_moe": (
        SIZES
        | (WINDOWS | EXPERTS | SPARSE)
        | {"max_window_layers": 2, "qkv_bias": False, "shared_expert_intermediate_size": 72},
        rotary(
            "Qwen2MoeForCausalLM",
            sliding_windows=(7, None, None, None),
            experts=replace(QWEN_EXPERTS, shared_size=72, has_shared_gate=True),
        ),
    ),
    "qwen3_moe": (
        SIZES | WINDOWS | EXPERTS | SPARSE | {"attention_bias": True},
        rotary(
            "Qwen3MoeForCausalLM",
            qkv_bias=True,
            o_bias=True,
            qk_norm=True,
            sliding_windows=(7,) * 4,
            experts=QWEN_EXPERTS,
        ),
    ),
    "gemma3": (GEMMA, rotary("Gemma3ForCausalLM", **GEMMA_FIELDS)),
    "qwen3_next": (
        SIZES | DELTA | EXPERTS | SPARSE | {"norm_topk_prob": False, "shared_expert_intermediate_size": 72},
        rotary(
            "Qwen3NextForCausalLM",
            **DELTA_FIELDS,
            state=replace(DELTA_STATE, is_joined=True, joins_gates=True),
            experts=replace(QWEN_EXPERTS, normalizes=False, shared_size=72, has_shared_gate=True),
        ),
    ),
    "qwen3_5": (SIZES | DELTA, rotary("Qwen3_5ForCausalLM", **DELTA_FIELDS, state=DELTA_STATE)),
    "qwen3_5 by interval": (
        SIZES
        | {key: value for key, value in DELTA.items() if key != "layer_types"}
        | {"full_attention_interval": 2, "partial_rotary_factor": 0.75},
        rotary(
            "Qwen3_5ForCausalLM",
            **(DELTA_FIELDS | {"rotary_dim": 18}),
            state=replace(DELTA_STATE, layers=frozenset({0, 2})),
        ),
    ),
    "qwen3_5_moe": (
        SIZES
        | DELTA
        | {key: value for key, value in EXPERTS.items() if key != "norm_topk_prob"}
        | {"shared_expert_intermediate_size": 72},
        rotary(
            "Qwen3_5MoeForCausalLM",
            **DELTA_FIELDS,
            state=DELTA_STATE,
            experts=replace(QWEN_EXPERTS, dense_layers=frozenset(), shared_size=72, has_shared_gate=True),
        ),
    ),
    "gpt_oss": (
        SIZES
        | {
            "rope_scaling": YARN,
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 5.0,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        },
        rotary(
            "GptOssForCausalLM",
            max_position=300,
            rope=YARN_ROPE,
            has_sinks=True,
            sliding_windows=(None, 7, None, None),
            experts=ExpertsSpec(
                num_experts=8,
                top_k=3,
                intermediate_size=56,
                normalizes=True,
                has_router_bias=True,
                has_bias=True,
                is_interleaved=True,
                swiglu_limit=5.0,
            ),
        ),
    ),
    "opt with norms last": (
        OPT | {"do_layer_norm_before": False},
        replace(OPT_SPEC, norm_first=False, has_final_norm=False),
    ),
    "opt without a last norm": (OPT | {"_remove_final_layer_norm": True}, replace(OPT_SPEC, has_final_norm=False)),
    "deepseek_v2": (
        LATENT | {"topk_method": "group_limited_greedy"},
        latent(
            "DeepseekV2ForCausalLM", scoring="softmax", normalizes=False, group_score="largest", has_score_bias=False
        ),
    ),
    "deepseek_v3": (
        LATENT | {"norm_topk_prob": False},
        latent("DeepseekV3ForCausalLM", normalizes=False),
    ),
    "deepseek_v32": (LATENT | INDEX, latent("DeepseekV32ForCausalLM", IndexSpec(6, 48, 11))),
    "glm4_moe_lite": (LATENT, latent("Glm4MoeLiteForCausalLM")),
    "glm_moe_dsa": (
        LATENT | INDEX | {"indexer_types": ["full", "shared", "full", "shared"]},
        latent(
            "GlmMoeDsaForCausalLM",
            IndexSpec(6, 48, 11, turns_neighbours=True, shared_layers=frozenset({1, 3})),
        ),
    ),
    "deepseek_v4": (V4, V4_SPEC),
}
"""A config.json in which no value is a default, and all that it means."""
EACH_CASE = pytest.mark.parametrize("name", CASES)


def config_of(name: str) -> dict[str, Any]:
    config, spec = CASES[name]
    return {"architectures": [spec.architecture], **config}


def test_cases_cover_every_family() -> None:
    images = {name for name, family in FAMILIES.items() if family.text_key}
    assert {spec.architecture for _, spec in CASES.values()} == set(FAMILIES) - images


@EACH_CASE
def test_family_reads_every_setting_into_its_field(name: str) -> None:
    assert read_spec(config_of(name)) == CASES[name][1]


@EACH_CASE
def test_family_without_a_setting_reads_another_spec(name: str) -> None:
    """A setting that is left out takes a default, and no value above is one: else nothing reads it."""
    config, unread = config_of(name), []
    spec = read_spec(config)
    for key in CASES[name][0]:
        try:
            other = read_spec({kept: value for kept, value in config.items() if kept != key})
        except ModelError:
            continue
        unread += [key] if other == spec else []
    assert unread == []


DERIVED = {"num_key_value_heads", "head_dim", "layer_types", "sliding_window", "word_embed_proj_dim"}
"""Settings whose default follows from others: transformers writes down what it derived from the sizes of its own default."""


@EACH_CASE
def test_setting_left_out_takes_the_default_of_transformers(name: str) -> None:
    """What transformers fills in for a missing key, given in so many words, reads as the same spec."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[CASES[name][1].architecture]
    if family.name not in CONFIG_MAPPING:
        pytest.skip(f"transformers does not know {family.name}")
    defaults, small, other = CONFIG_MAPPING[family.name]().to_dict(), config_of(name), []
    deep = {key: value for key, value in small.items() if key != "layer_types"} | {"num_hidden_layers": 40}
    keys = {*CASES[name][0], "max_window_layers"} & defaults.keys() - DERIVED
    for key, config in product(keys, (small, deep)):  # some defaults are numbers of layers
        try:
            spec = read_spec({kept: value for kept, value in config.items() if kept != key})
            expected = read_spec(config | {key: defaults[key]})
        except ModelError:
            continue  # the key is needed, or its default is too much for so small a model
        other += [(key, defaults[key])] if spec != expected else []
    assert other == []


class Watched(dict[str, Any]):
    """A config.json that notes which of its keys are looked up."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


SPELLINGS = {"architectures", "model_type", "dtype", "rope_parameters", "mlp_layer_types", "compress_rates"}
WINDOW_SPELLINGS = {"_sliding_window_pattern", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"}
ROPE_SPELLINGS = {"partial_rotary_factor", "original_max_position_embeddings"}
DECLINED = {"rope_interleave", "moe_layer_freq", "scoring_func", "indexer_rope_interleave", "swiglu_alpha"}
ELSEWHERE = SPELLINGS | WINDOW_SPELLINGS | ROPE_SPELLINGS | DECLINED | {"layer_norm_elementwise_affine"} | set(NEUTRAL)
"""Other spellings of the same, and what families decline: held by the tests of each family."""


def test_families_look_up_only_settings_that_some_case_has() -> None:
    """A new setting comes with a case."""
    seen: set[str] = set()
    for name in CASES:
        config = Watched(config_of(name))
        read_spec(config)
        seen |= config.seen
    assert seen - ELSEWHERE - {key for config, _ in CASES.values() for key in config} == set()


def test_images_read_the_settings_of_the_text_part() -> None:
    """What all parts share stands outside, and its word on ties counts."""
    text = {key: value for key, value in GEMMA.items() if key not in ("torch_dtype", "tie_word_embeddings")}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "float16"}
    spec = read_spec(outer | {"text_config": text, "tie_word_embeddings": False})
    wanted = rotary("Gemma3ForConditionalGeneration", **GEMMA_FIELDS)
    assert spec == wanted
    tied = read_spec(outer | {"text_config": text | {"tie_word_embeddings": False}})
    assert tied == replace(wanted, tied_embeddings=True)
    own = read_spec(outer | {"text_config": text | {"torch_dtype": "bfloat16"}, "tie_word_embeddings": False})
    assert own.checkpoint_dtype == "bfloat16"


def test_settings_of_a_part_yield_to_those_of_the_whole() -> None:
    """Ends of text and quantization are said outside for all parts; a type outside is a default."""
    whole = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": {"a": 1},
        "dtype": "outer",
        "torch_dtype": "o",
    }
    part = {"bos_token_id": 8, "eos_token_id": 9, "quantization_config": {"b": 2}, "vocab_size": 7}
    name = {"architectures": ["Gemma3ForConditionalGeneration"]}
    found = model_settings(Settings(name | whole | {"text_config": part}, "config.json")).values
    assert found == whole | {"vocab_size": 7, "tie_word_embeddings": True}
    own = {"dtype": "inner", "torch_dtype": "i"}
    assert model_settings(Settings(name | whole | {"text_config": own}, "config.json")).values == (
        whole | own | {"tie_word_embeddings": True}
    )


@pytest.mark.parametrize("key", NEUTRAL)
def test_family_declines_what_it_does_not_compute(key: str) -> None:
    for name, (_, spec) in CASES.items():
        if key in FAMILIES[spec.architecture].reads:
            continue
        for neutral in NEUTRAL[key]:
            assert read_spec(config_of(name) | {key: neutral}) == spec
        with pytest.raises(UnsupportedModelError, match=key):
            read_spec(config_of(name) | {key: 9})


ROPES: dict[str, tuple[dict[str, Any], RopeSpec]] = {
    "linear": ({"rope_type": "linear", "factor": 2.0}, LINEAR_ROPE),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        RopeSpec(777.0, "dynamic", factor=2.0, original_max_position=300),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 90,
        },
        RopeSpec(777.0, "llama3", 2.0, 90, 1.5, 5.0),
    ),
    "yarn": (YARN, YARN_ROPE),
    "longrope": (
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 90,
            "attention_factor": 1.25,
            "short_factor": [1.5, 2.5],
            "long_factor": [3.5, 4.5],
        },
        RopeSpec(
            777.0,
            "longrope",
            2.0,
            90,
            attention_factor=1.25,
            short_factor=(1.5, 2.5),
            long_factor=(3.5, 4.5),
        ),
    ),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_reads_every_setting_of_its_kind(kind: str, spelling: str) -> None:
    settings, wanted = ROPES[kind]

    def read(rope: dict[str, Any]) -> RopeSpec:
        return read_rope(Settings({"rope_theta": 777.0, spelling: rope}, "config.json"), 4, 300)

    assert read(settings) == wanted
    assert read(settings | {"rope_theta": 888.0}) == replace(wanted, theta=888.0)
    for key in settings:
        try:
            other = read({kept: value for kept, value in settings.items() if kept != key})
        except ModelError:
            continue
        assert other != wanted, f"nothing reads {key}"

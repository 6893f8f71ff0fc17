"""Families: every config.json to its spec as transformers reads it, and what is declined."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ModelError, ModelFormatError, UnsupportedModelError
from holdfast.models.grouped_readers import FAMILIES, parameters, read_spec
from holdfast.models.spec import ModelSpec
from loading.tiny_models import FAMILIES as TINY
from models.tiny_experts import EXPERT_MODELS

CONFIG_CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3TextConfig",
    "OPTForCausalLM": "OPTConfig",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeTextConfig",
}
LATENT = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)
"""test_latent_readers.py checks what these read."""
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}
"""What transformers calls otherwise."""
ACTIVATION_KEYS = ("activation_function", "hidden_activation", "hidden_act")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 4}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2}
OPT = {"architectures": ["OPTForCausalLM"]}

REAL: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        LLAMA
        | {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 49152,
        },
        134_515_008,
    ),
    "Llama-2-7b": (LLAMA | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, 6_738_415_616),
    "Llama-3.1-8B": (
        LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 7_241_732_096),
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "vocab_size": 152064,
            "rope_theta": 1000000.0,
        },
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "mlp_only_layers": [],
            "max_window_layers": 21,
            "use_sliding_window": False,
            "norm_topk_prob": False,
        },
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 128,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
        30_532_122_624,
    ),
    "gpt-oss-20b": (GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS, 116_829_156_672),
    "opt-125m": (OPT, 125_239_296),
    "opt-350m": (
        OPT
        | {
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
}


def expected_from(config: Any, architecture: str) -> dict[str, Any]:
    """Facts of a config as transformers' own config object states them."""
    is_opt = architecture == "OPTForCausalLM"
    kinds = getattr(config, "layer_types", None)
    windows: tuple[int | None, ...] = ()
    whole = ("MistralForCausalLM", "Qwen3MoeForCausalLM")
    if architecture in whole and config.sliding_window is not None:
        windows = (config.sliding_window,) * config.num_hidden_layers
    elif kinds and "sliding_attention" in kinds:
        windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    activation = next(getattr(config, key) for key in ACTIVATION_KEYS if hasattr(config, key))
    facts = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_dim if is_opt else getattr(config, "intermediate_size", 5632),
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_attention_heads if is_opt else config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "norm_eps": 1e-5 if is_opt else config.rms_norm_eps,
        "activation": ACTIVATIONS.get(activation, activation),
        "tied_embeddings": config.tie_word_embeddings,
        "sliding_windows": windows,
        "qk_norm": architecture.startswith(("Qwen3", "Gemma3")),
        "qkv_bias": {
            "OPTForCausalLM": getattr(config, "enable_bias", None),
            "Qwen2ForCausalLM": True,
            "Qwen2MoeForCausalLM": getattr(config, "qkv_bias", None),
        }.get(architecture, getattr(config, "attention_bias", False)),
        "o_bias": getattr(config, "enable_bias", getattr(config, "attention_bias", False)),
        "norm_first": getattr(config, "do_layer_norm_before", True),
    }
    if "Moe" in architecture or "Next" in architecture:
        facts["experts.num_experts"] = config.num_experts
        facts["experts.top_k"] = config.num_experts_per_tok
        facts["experts.intermediate_size"] = config.moe_intermediate_size
        facts["experts.shared_size"] = getattr(config, "shared_expert_intermediate_size", 0)
        facts["experts.normalizes"] = getattr(config, "norm_topk_prob", True)
        facts["experts.dense_layers"] = {
            layer
            for layer in range(config.num_hidden_layers)
            if layer in getattr(config, "mlp_only_layers", [])
            or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
        }
    elif architecture == "GptOssForCausalLM":
        facts["experts.num_experts"] = config.num_local_experts
        facts["experts.top_k"] = config.num_experts_per_tok
        facts["experts.intermediate_size"] = config.intermediate_size
        facts["experts.swiglu_limit"] = config.swiglu_limit
        facts["rope.truncate"] = config.rope_parameters["truncate"]
        for fact in ("normalizes", "has_router_bias", "has_bias", "is_interleaved"):
            facts[f"experts.{fact}"] = True
        facts["has_sinks"] = True
    else:
        facts["experts"] = None
    if architecture.startswith("Gemma3"):
        facts["attention_scale"] = config.query_pre_attn_scalar**-0.5
        facts["local_rope.theta"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if not is_opt:
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        facts["rope.theta"] = rope["rope_theta"]
        facts["rope.kind"] = rope["rope_type"]
        facts["rope.factor"] = rope.get("factor", 1.0)
        if "original_max_position_embeddings" in rope:
            facts["rope.original_max_position"] = rope["original_max_position_embeddings"]
    return facts


def stated_by(spec: ModelSpec, fact: str) -> Any:
    value: Any = spec
    for name in fact.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_read_spec_absent_keys_default_as_in_transformers(architecture):
    import transformers

    theirs = getattr(transformers, CONFIG_CLASSES[architecture])()
    spec = read_spec({"architectures": [architecture]})
    for fact, value in expected_from(theirs, architecture).items():
        assert stated_by(spec, fact) == value, fact
    assert spec.max_position == theirs.max_position_embeddings
    assert FAMILIES[architecture].bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert FAMILIES[architecture].eos_token_ids == (() if eos is None else (eos,))


@pytest.mark.parametrize("name", [*TINY, *EXPERT_MODELS])
def test_configs_that_transformers_writes_mean_the_same_here(name):
    import transformers

    prefix, overrides = (TINY | EXPERT_MODELS)[name]
    architecture = f"{prefix}ForCausalLM"
    theirs = getattr(transformers, CONFIG_CLASSES[architecture])(
        **overrides, architectures=[architecture], dtype="bfloat16"
    )
    spec = read_spec(json.loads(theirs.to_json_string(use_diff=False)))
    for fact, value in expected_from(theirs, architecture).items():
        assert stated_by(spec, fact) == value, fact
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.max_position >= theirs.max_position_embeddings


def test_families_lists_every_supported_architecture():
    assert set(FAMILIES) == {*CONFIG_CLASSES, *LATENT, "DeepseekV4ForCausalLM"}


@pytest.mark.parametrize("name", REAL)
def test_known_models_have_their_published_number_of_parameters(name):
    config, num_parameters = REAL[name]
    listed = parameters(read_spec(config))
    for parameter in listed:
        parameter.check()
    assert sum(parameter.num_elements for parameter in listed) == num_parameters
    assert len({parameter.name for parameter in listed}) == len(listed)


def test_llama_3_and_smollm2_settings_arrive():
    spec = read_spec(REAL["Llama-3.1-8B"][0])
    assert spec.rope is not None
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor) == ("llama3", 500000.0, 8.0)
    assert (spec.rope.original_max_position, spec.max_position) == (8192, 131072)
    small = read_spec(REAL["SmolLM2-135M"][0])
    assert (small.tied_embeddings, small.head_dim, small.checkpoint_dtype) == (True, 64, "bfloat16")
    assert small.family == "llama"


def test_opt_350m_projects_its_embedding_and_norms_last():
    spec = read_spec(REAL["opt-350m"][0])
    assert (spec.norm_first, spec.has_final_norm, spec.embedding_size, spec.position_offset) == (False, False, 512, 2)
    shapes = {parameter.name: parameter.shape for parameter in parameters(spec)}
    assert shapes["embed.weight"] == (50272, 512)
    assert shapes["embed_in.weight"] == (1024, 512)
    assert shapes["embed_out.weight"] == (512, 1024)
    assert shapes["positions.weight"] == (2050, 1024)
    assert "final_norm.weight" not in shapes
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (QWEN2, ()),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        (QWEN2 | {"layer_types": ["full_attention", "full_attention"]}, ()),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        (QWEN2_MOE | {"sliding_window": 0}, ()),
        (QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (8, None, 8, None)),
        (QWEN2_MOE | {"use_sliding_window": True, "max_window_layers": 0}, ()),
        (
            QWEN2_MOE
            | {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
            },
            (None, 8, None, None),
        ),
        (QWEN3_MOE | {"sliding_window": 8}, ()),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 8}, (8, 8)),
        ({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "sliding_window": None}, ()),
    ],
)
def test_sliding_windows_by_layer(config, windows):
    assert read_spec(config).sliding_windows == windows


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["Llama\nForCausalLM"]}, "Llama\\nForCausalLM"),
        (LLAMA | {"hidden_act": "mish"}, "mish"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved"),
        (QWEN2 | {"is_causal": False}, "is_causal"),
        (QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        (LLAMA | {"sliding_window": 128}, "sliding_window"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (QWEN2 | {"num_experts": 8}, "num_experts"),
        (QWEN3_MOE | {"hidden_act": "gelu"}, "experts are gated with silu"),
        (GPT_OSS | {"hidden_act": "gelu"}, "a gate of their own"),
        (GPT_OSS | {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 36}, "'linear_attention' are not supported"),
        (QWEN3_MOE | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2 | {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_read_spec_unsupported_setting_is_declined_by_name(config, word):
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(config)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("left_out", [{}, {"architectures": None}, {"architectures": []}])
def test_read_spec_without_architectures_uses_model_type(architecture, left_out):
    config = {"model_type": FAMILIES[architecture].name, "num_hidden_layers": 4, "num_experts_per_tok": 2, **left_out}
    config |= {"compress_ratios": [4, 128, 4, 128]} if architecture == "DeepseekV4ForCausalLM" else {}
    assert read_spec(config) == read_spec(config | {"architectures": [architecture]})


def test_read_spec_unknown_model_type_lists_known_ones():
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec({"model_type": "mamba"})
    assert "model_type = 'mamba' and names no architecture" in str(caught.value)
    for family in FAMILIES.values():
        assert family.name in str(caught.value)


def test_read_spec_unknown_architecture_lists_known_ones():
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec({"architectures": ["MambaForCausalLM"]})
    for architecture in FAMILIES:
        assert architecture in str(caught.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        (LLAMA | {"model_type": "mistral"}, "model_type"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        (LLAMA | {"num_hidden_layers": 10**5000}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA | {"hidden_size": 4096.0}, "hidden_size"),
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"vocab_size": -1}, "vocab_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA | {"num_attention_heads": 33}, "num_attention_heads"),
        (LLAMA | {"num_attention_heads": 1}, "num_attention_heads"),
        (LLAMA | {"head_dim": 63}, "head_dim"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        (QWEN3_MOE | {"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
        (GPT_OSS | {"num_local_experts": 0}, "num_local_experts"),
        (GPT_OSS | {"swiglu_limit": 0.0}, "swiglu_limit = 0.0. It must be a number above 0"),
        (GPT_OSS | {"swiglu_limit": -7.0}, "swiglu_limit"),
        (GPT_OSS | {"sliding_window": 0}, "sliding_window = 0. It must be a whole number from 1"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window"),
        (GPT_OSS | {"layer_types": ["full_attention"] * 35}, "one entry for each of 36 layers"),
        (QWEN2_MOE | {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        (OPT | {"max_position_embeddings": 2**40}, "max_position_embeddings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_values_are_refused_with_file_and_key(config, word):
    with pytest.raises(ModelFormatError) as caught:
        read_spec(config, "config.json")
    assert word in str(caught.value)
    assert "config.json" in str(caught.value)
    assert len(str(caught.value)) < 700


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**30, 2**80) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
KEYS = sorted(
    {key for config, _ in REAL.values() for key in config}
    | {"hidden_act", "rope_parameters", "layer_types", "enable_bias", "mlp_bias", "attention_bias", "dtype"}
)


@settings(max_examples=max(100, settings().max_examples), deadline=None)
@given(st.sampled_from(sorted(REAL)), st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, min_size=1, max_size=3))
def test_read_spec_any_json_gives_spec_or_one_line_error(name, changes):
    try:
        spec = read_spec(REAL[name][0] | changes)
    except ModelError as error:
        message = str(error)
    else:
        message = "fine"
        assert spec.num_layers <= 1024
        assert all(parameter.num_elements > 0 for parameter in parameters(spec))
    assert "\n" not in message
    assert len(message) < 600

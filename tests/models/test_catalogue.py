"""The catalogue: every model can be planned; its sizes are those that transformers and others find."""

from fractions import Fraction
from math import prod
from typing import Any

import pytest

from for_each import for_each
from holdfast.errors import ConfigError
from holdfast.models.blueprints.hybrids import READERS
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, find_model
from holdfast.quant.formats import COMPRESSED_NAMES
from models.meta_models import count_elements

FORMATS = ("bfloat16", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
KV_BYTES: dict[str, tuple[int | Fraction, ...]] = {
    "SmolLM2-135M": (23040, 11880, 9000, 6120, 5400, 4680),
    "SmolLM2-360M": (40960, 21120, 16000, 10880, 9600, 8320),
    "SmolLM2-1.7B": (196608, 101376, 76800, 52224, 46080, 39936),
    "OPT-125m": (36864, 19008, 14400, 9792, 8640, 7488),
    "Qwen3-0.6B": (114688, 58240, 43904, 29568, 25984, 22400),
    "Qwen3-1.7B": (114688, 58240, 43904, 29568, 25984, 22400),
    "Qwen3-4B": (147456, 74880, 56448, 38016, 33408, 28800),
    "Qwen3-8B": (147456, 74880, 56448, 38016, 33408, 28800),
    "Qwen3-14B": (163840, 83200, 62720, 42240, 37120, 32000),
    "Qwen3-32B": (262144, 133120, 100352, 67584, 59392, 51200),
    "Qwen3-30B-A3B": (98304, 49920, 37632, 25344, 22272, 19200),
    "Qwen2.5-0.5B-Instruct": (12288, 6336, 4800, 3264, 2880, 2496),
    "Qwen2.5-1.5B-Instruct": (28672, 14560, 10976, 7392, 6496, 5600),
    "Qwen2.5-3B-Instruct": (36864, 18720, 14112, 9504, 8352, 7200),
    "Qwen2.5-7B-Instruct": (57344, 29120, 21952, 14784, 12992, 11200),
    "Qwen2.5-14B-Instruct": (196608, 99840, 75264, 50688, 44544, 38400),
    "Qwen2.5-32B-Instruct": (262144, 133120, 100352, 67584, 59392, 51200),
    "Qwen2.5-72B-Instruct": (327680, 166400, 125440, 84480, 74240, 64000),
    "Qwen1.5-MoE-A2.7B": (196608, 99840, 75264, 50688, 44544, 38400),
    "Llama-3.2-1B": (32768, 16896, 12800, 8704, 7680, 6656),
    "Llama-3.2-3B": (114688, 58240, 43904, 29568, 25984, 22400),
    "Llama-3.1-8B": (131072, 66560, 50176, 33792, 29696, 25600),
    "Llama-3.1-70B": (327680, 166400, 125440, 84480, 74240, 64000),
    "Mistral-7B-v0.3": (131072, 66560, 50176, 33792, 29696, 25600),
    "DeepSeek-V4-Flash": (21 * (256 + 64) + 20 * 8, 21 * (146 + 33) + 20 * Fraction(584, 128)),
    "DeepSeek-V4-Pro": (30 * (256 + 64) + 31 * 8, 30 * (146 + 33) + 31 * Fraction(584, 128)),
}
"""By the columns above; compressed vectors are kept in the first two, and as in TURBO_BYTES. Latents have formats of their own: LATENT_BYTES."""
TURBO_BYTES = {"DeepSeek-V4-Flash": 21 * (Fraction(354, 4) + 33) + 20 * Fraction(354, 128)}
LATENT_FORMATS = ("bfloat16", "fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8")
LATENT_BYTES = {
    "DeepSeek-V2-Lite": (31_104, 17_712, 10_422, 8_748),
    "DeepSeek-V2": (60 * 1152, 60 * 656, 60 * 386, 60 * 324),
    "DeepSeek-V3": (70_272, 40_016, 23_546, 19_764),
    "DeepSeek-R1": (70_272, 40_016, 23_546, 19_764),
    "GLM-4.7-Flash": (47 * 1152, 47 * 656, 47 * 386, 47 * 324),
    "Moonlight-16B-A3B": (27 * 1152, 27 * 656, 27 * 386, 27 * 324),
    "Kimi-K2-Instruct": (70_272, 40_016, 23_546, 19_764),
    "DeepSeek-V3.2": (61 * (1152 + 256), 48_068, 61 * (386 + 132), 61 * (324 + 132)),
    "GLM-5": (78 * (1152 + 256), 78 * (656 + 132), 78 * (386 + 132), 78 * (324 + 132)),
    "GLM-5.2": (78 * 1152 + 21 * 256, 78 * 656 + 21 * 132, 78 * 386 + 21 * 132, 78 * 324 + 21 * 132),
}
"""Rows of 512 + 64 elements: 576 * 2, then 512 + 4 * 4 + 64 * 2, then 256 + 2 + 64 * 2 and 256 + 2 + 64 + 2; and of an index 128 * 2, or
128 + 4."""
CHECKPOINT_BYTES = {
    "Qwen1.5-MoE-A2.7B": 26.67 * 2**30,  # what vLLM logs once it is loaded
    "DeepSeek-R1": (642 - 14.2) * 2**30,  # its files, less the layer that drafts tokens, with an embedding and a head
    # Their files, as vLLM logs them and as a recipe for serving has them, less a layer that drafts tokens; and o_a takes two
    # bytes an element here and one there.
    "DeepSeek-V4-Flash": 148.66 * 2**30 - 3.627e9 + 1.443e9,
    "DeepSeek-V4-Pro": 865e9 - 14.02e9 + 4.094e9,
}
"""Sizes that others stated."""
ONLY_POSITIONS = ("max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps", "sliding_window")
COUNTED_BUFFERS = ("e_score_correction_bias", "tid2eid", "layer_scalar")
ONLY_STORED = ("quantization_config", "expert_dtype", "torch_dtype", "num_nextn_predict_layers")
"""Settings of a checkpoint that say nothing of the shapes which transformers builds."""


def test_catalogue_has_all_promised_models() -> None:
    promised = (
        "Qwen3-0.6B Qwen3-4B Qwen3-8B Qwen3-32B Qwen2.5-7B Qwen2.5-32B Llama-3.1-8B Llama-3.1-70B SmolLM2-135M OPT-125m "
        "Qwen1.5-MoE-A2.7B Qwen3-30B-A3B DeepSeek-V2-Lite DeepSeek-R1 DeepSeek-V4-Flash DeepSeek-V4-Pro"
    )
    for name in promised.split():
        assert find_model(name)[0] in CATALOGUE


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_per_token(name: str) -> None:
    declared = declare_config(CATALOGUE[name], name)
    exact = KV_BYTES[name]
    assert tuple(declared.kv_bytes_per_token(format) for format in FORMATS[: len(exact)]) == exact
    assert declared.kv_bytes_per_token("float16") == exact[0]
    assert declared.kv_bytes_per_token("float32") == 2 * exact[0]
    for format in FORMATS[len(exact) :]:
        if declared.is_compressed and format in COMPRESSED_NAMES:
            own = declared.kv_bytes_per_token(COMPRESSED_NAMES[format])
            assert declared.kv_bytes_per_token(format) == own < exact[1]
            continue
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={format} is not possible: .* this model keeps"):
            declared.kv_bytes_per_token(format)


@pytest.mark.parametrize("name", LATENT_BYTES)
def test_bytes_of_latents(name: str) -> None:
    declared = declare_config(CATALOGUE[name], name)
    exact = LATENT_BYTES[name]
    assert tuple(declared.kv_bytes_per_token(format) for format in LATENT_FORMATS) == exact
    assert declared.kv_bytes_per_token("fp8") == exact[1], "as the format of latents with eight bits"
    assert declared.kv_bytes_per_token("turboquant_4bit_nc") == exact[2]
    for format in ("turboquant_k8v4", "turboquant_k5v4", "turboquant_k3v4_nc", "turboquant_3bit_nc"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={format} is not possible: .* this model keeps latents"):
            declared.kv_bytes_per_token(format)


def test_four_bits_of_a_compressed_vector() -> None:
    """448 / 2 of codes, 2 of a scale, 64 * 2 of what is rotated; the index in e4m3."""
    for name, exact in TURBO_BYTES.items():
        assert declare_config(CATALOGUE[name], name).kv_bytes_per_token("turboquant_mla_4bit") == exact


def test_totals_that_others_published() -> None:
    bytes_per_token = {
        name: declare_config(CATALOGUE[name], name).kv_bytes_per_token("fp8")
        for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
    }
    assert {name: int(number) for name, number in bytes_per_token.items()} == {
        "DeepSeek-V4-Flash": 3_850,
        "DeepSeek-V4-Pro": 5_511,
    }


@pytest.mark.parametrize("name", CHECKPOINT_BYTES)
def test_weight_bytes_are_those_of_the_checkpoint(name: str) -> None:
    declared = declare_config(CATALOGUE[name], name)
    planned = declared.weight_bytes(declared.checkpoint_dtype)
    assert abs(planned / CHECKPOINT_BYTES[name] - 1) < (0.001 if "V4" in name else 0.01), f"{planned} bytes are planned"


def test_group_bytes_qwen3_32b_matches_bytes_read_per_step() -> None:
    groups = declare_config(CATALOGUE["Qwen3-32B"], "x").group_bytes("bfloat16")
    read = sum(group.num_bytes for name, group in groups.items() if name != "embed")
    assert round(read / 1e9, 2) == 63.97, "as measured on a GPU"


def shapes_of(name: str) -> str:
    return str({key: value for key, value in CATALOGUE[name].items() if key not in (*ONLY_STORED, *ONLY_POSITIONS)})


DISTINCT = {shapes_of(name): name for name in reversed(CATALOGUE)}
"""One name for all models of the same shapes."""
OF_ITS_KIND = {str(CATALOGUE[name]["architectures"]): name for name in DISTINCT.values()}
"""One of each architecture; the others are among the slow tests."""


def is_layered(name: str) -> bool:
    """Tiny models of these architectures are among the quick tests."""
    return str(CATALOGUE[name]["architectures"][0]) in READERS  # type: ignore[index]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_ITS_KIND.values() or is_layered(name)), id=name)
        for name in DISTINCT.values()
        if not name.startswith("Kimi-K2.5")  # that of transformers has no language model of its own
    ],
)
def test_catalogue_parameter_count_matches_transformers(name: str) -> None:
    config = {key: value for key, value in CATALOGUE[name].items() if key not in ONLY_STORED}
    counted = count_elements(str(CATALOGUE[name]["architectures"][0]), config, COUNTED_BUFFERS)  # type: ignore[index]
    weights = declare_config(CATALOGUE[name], name).parameters()
    assert sum(prod(weight.shape) for weight in weights) == counted


STATED = {
    "Qwen3-Next-80B-A3B-Instruct": 79.7,
    "Qwen3.5-9B": 9.0,
    "Qwen3.5-27B": 27.0,
    "Qwen3.5-35B-A3B": 35.0,
    "Qwen3.5-122B-A10B": 122.0,
    "Qwen3.5-397B-A17B": 397.0,
    "gemma-4-12B-it": 12.0,
    "gemma-4-26B-A4B-it": 25.2,
    "gemma-4-31B-it": 30.7,
    "Llama-4-Scout-17B-16E-Instruct": 109.0,
    "Llama-4-Maverick-17B-128E-Instruct": 400.0,
    "Devstral-Small-2507": 23.57,
    "Devstral-Small-2-24B-Instruct-2512": 24.0,
    "GLM-4.7": 355.0,
    "GLM-5": 744.0,
    "Kimi-K2.5": 1026.0,
    "MiniMax-M2.5": 229.0,
    "Nemotron-3-Nano-30B-A3B": 31.6,
    "Nemotron-3-Super-120B-A12B": 120.6,
    "Nemotron-3-Ultra-550B-A55B": 550.0,
}
"""Billions that makers state of the whole model, images included."""


def test_models_of_this_year_have_as_many_parameters_as_stated() -> None:
    for name, billions in STATED.items():
        weights = declare_config(CATALOGUE[name], name).parameters()
        assert abs(sum(prod(weight.shape) for weight in weights) / billions / 1e9 - 1) < 0.015, name


@for_each("name", CATALOGUE)
def test_catalogue_model_has_spec_or_reason(name: str) -> None:
    declared = declare_config(CATALOGUE[name], name)
    assert (declared.spec is None) == (declared.not_runnable is not None)
    planned = (
        "GLM-4-",
        "GLM-4.5",
        "GLM-4.6",
        "glm",
        "gemma-2",
        "phi",
        "Phi",
        "Mixtral",
        "Mistral-Small-3.",
        *(
            "GLM-4.7",
            "Qwen3-Next",
            "Qwen3.5",
            "Qwen3.6",
            "gemma-4",
            "Llama-4",
            "Devstral-Small-2-",
            "MiniMax",
            "Nemotron",
        ),
        "Kimi-K2.5",
    )
    assert (declared.spec is None) == (name.startswith(planned) and "Distill" not in name and name != "GLM-4.7-Flash")
    assert declared.not_runnable is None or declared.not_runnable.endswith(" is not in this version")


DELTA_NETS = {
    "Qwen3-Next-80B-A3B": (48, 2048, 16, 2, 16, 32, (512, 10, 512, 512), 151_936),
    "Qwen3.5-27B": (64, 5120, 24, 4, 16, 48, (17_408,), 248_320),
    "Qwen3.6-27B": (64, 5120, 24, 4, 16, 48, (17_408,), 248_320),
    "Qwen3.5-35B-A3B": (40, 2048, 16, 2, 16, 32, (256, 8, 512, 512), 248_320),
}
"""Layers, width, query and KV heads, key and value heads of a state, MLP or experts, vocabulary, as published."""


@for_each("name", DELTA_NETS)
def test_find_model_delta_net_has_published_settings(name: str) -> None:
    config: Any = find_model(name)[1]
    text = config.get("text_config", config)
    has_experts = "num_experts" in text
    mlp = ["intermediate_size"]
    if has_experts:
        mlp = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"]
    names += ["linear_num_key_heads", "linear_num_value_heads"]
    found = (*(text[key] for key in names), tuple(text[key] for key in mlp), text["vocab_size"])
    assert found == DELTA_NETS[name]
    assert (text["head_dim"], text["linear_key_head_dim"], text["linear_value_head_dim"]) == (256, 128, 128)
    assert (text["linear_conv_kernel_dim"], text["full_attention_interval"]) == (4, 4)
    rope = text.get("rope_parameters", text)
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (10_000_000, 0.25)
    assert (text["max_position_embeddings"], config["tie_word_embeddings"]) == (262_144, False)
    assert text.get("attn_output_gate", True) is text.get("norm_topk_prob", True) is True

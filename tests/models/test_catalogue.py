"""The catalogue: every model can be planned; its sizes are those that transformers and others find."""

from fractions import Fraction
from math import prod

import pytest

from holdfast.errors import ConfigError, ModelNotFoundError
from holdfast.models.blueprint import read_blueprint
from holdfast.models.catalogue import CATALOGUE, find_model
from models.meta_models import count_elements

FORMATS = ("bfloat16", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
KV_BYTES: dict[str, tuple[int | Fraction, ...]] = {
    "SmolLM2-135M": (23040, 11520, 9000, 6300, 5580, 4860),
    "SmolLM2-360M": (40960, 20480, 16000, 11200, 9920, 8640),
    "SmolLM2-1.7B": (196608, 98304, 76800, 53760, 47616, 41472),
    "OPT-125m": (36864, 18432, 14400, 10080, 8928, 7776),
    "Qwen3-0.6B": (114688, 57344, 43904, 30016, 26432, 22848),
    "Qwen3-1.7B": (114688, 57344, 43904, 30016, 26432, 22848),
    "Qwen3-4B": (147456, 73728, 56448, 38592, 33984, 29376),
    "Qwen3-8B": (147456, 73728, 56448, 38592, 33984, 29376),
    "Qwen3-14B": (163840, 81920, 62720, 42880, 37760, 32640),
    "Qwen3-32B": (262144, 131072, 100352, 68608, 60416, 52224),
    "Qwen3-30B-A3B": (98304, 49152, 37632, 25728, 22656, 19584),
    "Qwen2.5-0.5B-Instruct": (12288, 6144, 4800, 3360, 2976, 2592),
    "Qwen2.5-1.5B-Instruct": (28672, 14336, 10976, 7504, 6608, 5712),
    "Qwen2.5-3B-Instruct": (36864, 18432, 14112, 9648, 8496, 7344),
    "Qwen2.5-7B-Instruct": (57344, 28672, 21952, 15008, 13216, 11424),
    "Qwen2.5-14B-Instruct": (196608, 98304, 75264, 51456, 45312, 39168),
    "Qwen2.5-32B-Instruct": (262144, 131072, 100352, 68608, 60416, 52224),
    "Qwen2.5-72B-Instruct": (327680, 163840, 125440, 85760, 75520, 65280),
    "Qwen1.5-MoE-A2.7B": (196608, 98304, 75264, 51456, 45312, 39168),
    "Llama-3.2-1B": (32768, 16384, 12800, 8960, 7936, 6912),
    "Llama-3.2-3B": (114688, 57344, 43904, 30016, 26432, 22848),
    "Llama-3.1-8B": (131072, 65536, 50176, 34304, 30208, 26112),
    "Llama-3.1-70B": (327680, 163840, 125440, 85760, 75520, 65280),
    "Mistral-7B-v0.3": (131072, 65536, 50176, 34304, 30208, 26112),
    "DeepSeek-V2-Lite": (27 * 1152, 27 * 656),
    "DeepSeek-R1": (70_272, 40_016),
    "DeepSeek-V4-Flash": (21 * (256 + 64) + 20 * 8, 21 * (146 + 33) + 20 * Fraction(584, 128)),
    "DeepSeek-V4-Pro": (30 * (256 + 64) + 31 * 8, 30 * (146 + 33) + 31 * Fraction(584, 128)),
}
"""By the columns above; latents and compressed vectors are kept in the first two only."""
CHECKPOINT_BYTES = {
    "Qwen1.5-MoE-A2.7B": 26.67 * 2**30,  # what vLLM logs once it is loaded
    "DeepSeek-R1": 642 * 2**30,  # its files
    "DeepSeek-V4-Flash": 148.66 * 2**30,  # its files, as vLLM logs them
    "DeepSeek-V4-Pro": 865e9,  # its files, as a recipe for serving it has them
}
"""Sizes that others stated."""
ONLY_STORED = ("quantization_config", "expert_dtype", "torch_dtype", "num_nextn_predict_layers")
"""Settings of a checkpoint that say nothing of the shapes which transformers builds."""


def test_the_models_that_were_promised() -> None:
    promised = (
        "Qwen3-0.6B Qwen3-4B Qwen3-8B Qwen3-32B Qwen2.5-7B Qwen2.5-32B Llama-3.1-8B Llama-3.1-70B SmolLM2-135M OPT-125m "
        "Qwen1.5-MoE-A2.7B Qwen3-30B-A3B DeepSeek-V2-Lite DeepSeek-R1 DeepSeek-V4-Flash DeepSeek-V4-Pro"
    )
    for name in promised.split():
        assert find_model(name)[0] in CATALOGUE


@pytest.mark.parametrize("name", CATALOGUE)
def test_kv_bytes_per_token(name: str) -> None:
    blueprint = read_blueprint(CATALOGUE[name], name)
    exact = KV_BYTES[name]
    assert tuple(blueprint.kv_bytes_per_token(format) for format in FORMATS[: len(exact)]) == exact
    assert blueprint.kv_bytes_per_token("float16") == exact[0]
    assert blueprint.kv_bytes_per_token("float32") == 2 * exact[0]
    for format in FORMATS[len(exact) :]:
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={format} was asked; .* this model keeps"):
            blueprint.kv_bytes_per_token(format)


def test_totals_that_others_published() -> None:
    bytes_per_token = {
        name: read_blueprint(CATALOGUE[name], name).kv_bytes_per_token("fp8")
        for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
    }
    assert {name: int(number) for name, number in bytes_per_token.items()} == {
        "DeepSeek-V4-Flash": 3_850,
        "DeepSeek-V4-Pro": 5_511,
    }


@pytest.mark.parametrize("name", CHECKPOINT_BYTES)
def test_weight_bytes_are_those_of_the_checkpoint(name: str) -> None:
    blueprint = read_blueprint(CATALOGUE[name], name)
    planned = blueprint.weight_bytes(blueprint.checkpoint_dtype)
    assert abs(planned / CHECKPOINT_BYTES[name] - 1) < 0.01, f"{planned} bytes are planned"


def test_the_weights_that_a_step_of_qwen3_32b_reads() -> None:
    groups = read_blueprint(CATALOGUE["Qwen3-32B"], "x").group_bytes("bfloat16")
    read = sum(num_bytes for group, (_, num_bytes) in groups.items() if group != "embed")
    assert round(read / 1e9, 2) == 63.97, "as measured on a GPU"


@pytest.mark.parametrize("name", CATALOGUE)
def test_as_many_parameters_as_transformers_makes_of_the_same_settings(name: str) -> None:
    config = {key: value for key, value in CATALOGUE[name].items() if key not in ONLY_STORED}
    family = str(CATALOGUE[name]["architectures"][0]).removesuffix("ForCausalLM")  # type: ignore[index]
    counted = count_elements(family, config, ("e_score_correction_bias", "tid2eid"))
    weights = read_blueprint(CATALOGUE[name], name).parameters()
    assert sum(prod(weight.shape) for weight in weights if not weight.name.startswith("mtp.")) == counted


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_runs_has_a_spec_and_what_does_not_has_a_reason(name: str) -> None:
    blueprint = read_blueprint(CATALOGUE[name], name)
    assert (blueprint.spec is None) == (blueprint.not_runnable is not None)
    runs = not name.startswith("DeepSeek") and name not in ("Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B")
    assert (blueprint.spec is not None) == runs
    assert blueprint.not_runnable is None or "not in this version" in blueprint.not_runnable


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Qwen3-8B", "Qwen3-8B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("qwen2.5-7b", "Qwen2.5-7B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepSeek-V2-Lite"),
        (" HuggingFaceTB/SmolLM2-135M-Instruct ", "SmolLM2-135M"),
        ("facebook/opt-125m", "OPT-125m"),
    ],
)
def test_spellings(asked: str, name: str) -> None:
    assert find_model(asked) == (name, CATALOGUE[name])


@pytest.mark.parametrize(
    ("asked", "near"), [("Qwen3-9B", "Qwen3-8B"), ("Qwen/Qwen-3-8B", "Qwen3-8B"), ("deepseek-v4", "DeepSeek-V4-Pro")]
)
def test_the_nearest_is_suggested(asked: str, near: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"did you mean .*{near}"):
        find_model(asked)


@pytest.mark.parametrize("asked", ["", "/", "gpt-17", "x" * 100_000, "\x1b[31m", "../../etc/passwd"])
def test_nonsense_lists_what_there_is(asked: str) -> None:
    with pytest.raises(ModelNotFoundError, match="nor among the 28 models known by name") as caught:
        find_model(asked)
    assert "\x1b" not in str(caught.value)


def test_a_name_that_a_shell_completed_as_a_folder() -> None:
    assert find_model("Qwen/Qwen3-8B/")[0] == "Qwen3-8B"

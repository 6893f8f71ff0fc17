"""DeclaredModel: from a config.json to what a plan asks, what is refused, and answers that are kept."""

from dataclasses import replace

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, meshes
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.memory.workspace_plan import TensorSpec, arena_bytes
from holdfast.models.blueprints.read import PLANNED_FAMILIES, declare_config, refuse_planned_only
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declared_model import declare_decoder
from holdfast.models.grouped_readers import FAMILIES, parameters, read_spec
from holdfast.quant.formats import COMPRESSED_FORMATS, KV_FORMATS
from holdfast.quant.weight_schemes import AS_STORED, FP8, INT8, MXFP4, WeightRecipe
from models.test_family_fields import CASES

QWEN = CATALOGUE["Qwen3-8B"]
V4 = declare_config(CATALOGUE["DeepSeek-V4-Pro"], "x")
STORED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["Qwen3-0.6B", "OPT-125m", "Qwen2.5-0.5B-Instruct", "SmolLM2-135M", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B"],
)
def test_weight_bytes_are_those_of_the_arena_that_is_loaded_into(name: str, dtype: str) -> None:
    spec = read_spec(CATALOGUE[name])
    arena = arena_bytes(TensorSpec(parameter.name, parameter.shape, dtype) for parameter in parameters(spec))
    declared = declare_decoder(spec, name)
    assert declared.weight_bytes(dtype) == arena
    assert sum(group.num_bytes for group in declared.group_bytes(dtype).values()) == arena
    assert sum(group.num_tensors for group in declared.group_bytes(dtype).values()) == len(parameters(spec))


def test_numbers_of_a_decoder() -> None:
    declared = declare_config(QWEN, "Qwen3-8B")
    assert declared.spec == read_spec(QWEN)
    assert declared.not_runnable is None
    numbers = (declared.num_layers, declared.num_heads, declared.num_kv_heads, declared.head_dim)
    assert numbers == (36, 32, 8, 128)
    assert (declared.vocab_size, declared.hidden_size, declared.max_position) == (151936, 4096, 40960)
    assert declared.checkpoint_dtype == "bfloat16"
    assert not declared.has_learned_positions
    assert declare_config(CATALOGUE["OPT-125m"], "opt").has_learned_positions


def test_halves_and_quarters() -> None:
    declared = declare_config(QWEN, "x")
    plain = declared.weight_bytes("bfloat16")
    assert 0.53 < declared.weight_bytes("bfloat16", WeightRecipe(FP8)) / plain < 0.55, "the embedding stays"
    assert 0.33 < declared.weight_bytes("bfloat16", WeightRecipe(MXFP4)) / plain < 0.35, "the head has eight bits"
    assert declared.weight_bytes("bfloat16", AS_STORED) == plain
    tied = declare_config(CATALOGUE["Qwen3-4B"], "x")
    kept, quantized = (
        tied.group_bytes("bfloat16", WeightRecipe(MXFP4, own))["embed"].num_bytes for own in ("none", "head")
    )
    assert kept == 151936 * 2560 * 2
    assert quantized == 151936 * (2560 + 4), "an embedding that is the head is quantized as one"


def test_weight_bytes_default_to_stored_scheme_of_checkpoint() -> None:
    r1 = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    assert r1.weight_bytes("bfloat16") == r1.weight_bytes("bfloat16", AS_STORED, ALONE)
    assert abs(r1.weight_bytes("bfloat16") / 2**30 - 627.9) < 1
    unpacked = declare_config({**CATALOGUE["DeepSeek-R1"], "quantization_config": None}, "r1")
    assert abs(unpacked.weight_bytes("bfloat16") / r1.weight_bytes("bfloat16") - 2) < 0.02


def test_declare_config_quantized_checkpoint_keeps_stored_bytes() -> None:
    declared = declare_config({**QWEN, "quantization_config": STORED}, "Qwen3-8B-FP8")
    assert declared.spec == read_spec(QWEN)
    assert declared.not_runnable is None
    assert declared.weight_bytes("bfloat16") < 0.6 * declare_config(QWEN, "x").weight_bytes("bfloat16")
    assert declared.kv_bytes_per_token("bfloat16") == 147456


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method = 'awq'"),
        ({"bits": 4}, "quant_method = None"),
        (STORED | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        ([1], "quantization_config"),
    ],
)
def test_other_quantized_checkpoints_are_refused(settings, error: str) -> None:
    with pytest.raises((UnsupportedModelError, ModelFormatError), match=error):
        declare_config({**QWEN, "quantization_config": settings}, "x")


def test_declare_config_unknown_architecture_lists_accepted() -> None:
    with raises_code("architecture.not_planned", UnsupportedModelError, architecture="MambaForCausalLM") as caught:
        declare_config({"architectures": ["MambaForCausalLM"]}, "x")
    assert {"Qwen3ForCausalLM", "DeepseekV4ForCausalLM"} <= set(caught.value.values["accepted"])
    with pytest.raises(ModelFormatError, match="has no architectures"):
        declare_config({}, "x")
    assert not set(FAMILIES) & set(PLANNED_FAMILIES)


@pytest.mark.parametrize("name", ["Qwen3-8B", "OPT-125m", "DeepSeek-V2-Lite", "DeepSeek-R1", "DeepSeek-V4-Flash"])
def test_declare_config_without_architectures_uses_model_type(name: str) -> None:
    known = CATALOGUE[name]
    typed = declare_config({key: value for key, value in known.items() if key != "architectures"}, name)
    assert typed == declare_config(known, name)
    with raises_code("architecture.unknown_type", UnsupportedModelError, value="mamba") as caught:
        declare_config({"model_type": "mamba"}, "x")
    assert {"llama", "opt", "deepseek_v2", "deepseek_v4"} <= set(caught.value.values["accepted"])


def test_refuse_planned_only_refuses_families_without_spec() -> None:
    refuse_planned_only(QWEN, "config.json")
    refuse_planned_only({"architectures": ["MambaForCausalLM"]}, "config.json")
    for name in ("Mixtral-8x7B-v0.1", "gemma-4-31B-it", "Kimi-K2.5", "Nemotron-3-Nano-30B-A3B"):
        with raises_code("architecture.only_planned", UnsupportedModelError):
            refuse_planned_only(CATALOGUE[name], "config.json")


def test_formats_by_name_or_as_values() -> None:
    declared = declare_config(QWEN, "x")
    for name, value in KV_FORMATS.items():
        assert declared.kv_bytes_per_token(name) == declared.kv_bytes_per_token(value)
        assert declared.kv_bytes_per_sequence(name) == 0
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        declared.kv_bytes_per_token("fp4")


@pytest.mark.parametrize("name", KV_FORMATS)
def test_formats_that_a_model_cannot_be_kept_in(name: str) -> None:
    """The advice is one that works."""
    quantized, turbo = KV_FORMATS[name].is_quantized, name.startswith("turboquant")
    odd = declare_config({**QWEN, "head_dim": 72}, "x")
    for declared, declines, advice in (
        (odd, quantized, "head_dim is 72, and heads of a multiple of 16 elements can be quantized. Try bfloat16\\.$"),
        (
            V4,
            turbo and name != "turboquant_4bit_nc",
            "vectors of compressed attention. Try bfloat16 or fp8_ds_v4 or turboquant_mla_4bit\\.$",
        ),
    ):
        if declines:
            with pytest.raises(ConfigError, match=f"kv_cache_dtype={name} is not possible: .*{advice}"):
                declared.check_format(name)
        else:
            mine = COMPRESSED_FORMATS["turboquant_mla_4bit" if turbo else "fp8_ds_v4"]
            own = mine if declared is V4 and quantized else KV_FORMATS[name]
            assert declared.check_format(name) is own


@pytest.mark.parametrize("name", ["Qwen3-32B", "DeepSeek-R1", "DeepSeek-V4-Pro"])
def test_check_format_latent_formats_refused_without_latents(name: str) -> None:
    declared = declare_config(CATALOGUE[name], "x")
    if name == "Qwen3-32B":
        words = r"fp8_ds_mla keeps latents \(MLA\), and this model has none. Try bfloat16 or fp8\.$"
        with pytest.raises(ConfigError, match=f"kv_cache_dtype=fp8_ds_mla is not possible: {words}"):
            declared.check_format("fp8_ds_mla")
    if name == "DeepSeek-V4-Pro":
        assert declared.check_format("fp8_ds_mla").name == declared.check_format("fp8_ds_v4").name == "fp8_ds_v4"
        assert declared.check_format("turboquant_mla_4bit").bytes_per_token(1, 512, 64) == 354
        with pytest.raises(ConfigError, match=r"turboquant_mla_4bit_r8 keeps latents \(MLA\), and this model has none"):
            declared.check_format("turboquant_mla_4bit_r8")
    else:
        with pytest.raises(
            ConfigError, match="fp8_ds_v4 keeps vectors of compressed attention, and this model has none"
        ):
            declared.check_format("fp8_ds_v4")


def test_dtype_of_a_checkpoint_that_cannot_be_one() -> None:
    with pytest.raises(UnsupportedModelError, match="torch_dtype = 'int4'"):
        declare_config({**CATALOGUE["DeepSeek-V4-Pro"], "torch_dtype": "int4"}, "x")


def test_asking_twice_lists_once() -> None:
    declared = declare_config(QWEN, "x")
    assert declared.parameters() is declared.parameters()
    assert declared.group_bytes("bfloat16") is declared.group_bytes("bfloat16", AS_STORED)
    assert replace(declared, name="y").parameters() == declared.parameters()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "deepseek_v3"])
def test_declared_model_cached_answers_equal_fresh_ones(name: str) -> None:
    """Every answer that is kept, for other types, recipes, ranks and stages between: none is that of another question."""
    spec = CASES[name][1]
    spec = spec if spec.latent else replace(spec, num_kv_heads=6)
    recipes = (AS_STORED, WeightRecipe(FP8), WeightRecipe(FP8, "none"), WeightRecipe(INT8, ignore=("layers.0.*",)))
    ranks = (
        ALONE,
        *meshes(2),
        *meshes(2, is_exact=True),
        *meshes(2, has_expert_parallelism=True),
        *meshes(1, [(0, 1), (1, 4)]),
    )
    kept, found, wanted = declare_decoder(spec, name), [], []
    for model in (lambda: kept, lambda: declare_decoder(spec, name), lambda: kept):
        answers = [
            [model().group_bytes(dtype, recipe, mesh) for mesh in ranks if model().is_divisible(mesh)]
            for dtype in ("float32", "bfloat16")
            for recipe in recipes
        ]
        answers += [[model().parameters(mesh) for mesh in ranks if model().is_divisible(mesh)]]
        answers += [[model().review_recipe(recipe) for recipe in recipes[1:]]]
        (wanted if model() is not kept else found).append(answers)
    assert found[0] == found[1] == wanted[0]
    assert len({str(row) for row in wanted[0][0]}) > 2, "ranks and stages hold different weights"
    shapes = [dict(weight[:2] for weight in kept.parameters(mesh))["embed.weight"] for mesh in meshes(2)]
    assert shapes == [(51, 96), (50, 96)], "the last has what is left of 101 tokens"


def test_review_stored_other_embeddings_refused() -> None:
    """What was settled for one recipe does not answer for the next."""
    declared = declare_config({**QWEN, "quantization_config": STORED}, "x")
    assert declared.review_stored(AS_STORED) == declared.review_stored(AS_STORED)
    with pytest.raises(ConfigError, match="quantized_embeddings=all"):
        declared.review_stored(replace(AS_STORED, embeddings="all"))


def test_heads_of_every_family_are_those_of_its_spec() -> None:
    """What attention is planned with: a field that stays at its default shows."""
    for name, (_, spec) in CASES.items():
        heads = declare_decoder(spec, name).declaration.heads(ALONE)
        assert heads is not None
        assert heads.num_heads == spec.num_heads
        assert (heads.num_kv_heads, heads.head_dim) == (spec.num_kv_heads, spec.head_dim)
        assert heads.windows == tuple(spec.window(layer) for layer in range(4))
        assert (heads.scale, heads.softcap) == (spec.score_scale, spec.attention_softcap)
        assert (heads.has_sinks, heads.is_rotated) == (spec.has_sinks, spec.rope is not None)
        is_by_head = spec.latent is None and spec.compressed is None
        assert heads.has_key_bias == (spec.qkv_bias and is_by_head)
        assert heads.has_separable_key_bias == (spec.qkv_bias and not spec.qk_norm and is_by_head)
        index = next((own for layer in range(4) if (own := spec.layer_index(layer))), None)
        own = (heads.index_heads, heads.index_dim, heads.index_top_k, heads.index_turns_neighbours)
        assert own == ((0, 0, 0, False) if index is None else (6, 48, 11, index.turns_neighbours))
        if spec.latent is not None:
            assert (heads.rope_dim, heads.nope_dim, heads.value_dim) == (16, 20, 28)
        if index is not None and spec.latent is not None:
            assert heads.shared_layers == index.shared_layers
        ratios = [spec.entry_ratio(layer) for layer in range(4)]
        assert heads.ratios == (tuple(ratios) if spec.compressed is not None else ())
        assert heads.overlapped_layers == ({0, 3} if spec.compressed is not None else set())


def test_bytes_of_a_token_are_those_that_layers_keep() -> None:
    """Two bytes a number: keys and values of 3 heads, latents, an index in layers that have one, entries by ratio."""
    by_head, latent, index, entry = 2 * 3 * 24 * 2, 80 * 2, 48 * 2, 48 * 2
    wanted: dict[str, int] = dict.fromkeys(CASES, 4 * by_head)
    wanted |= dict.fromkeys(("opt with norms last", "opt without a last norm"), 4 * 2 * 6 * 16 * 2)
    wanted |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), 4 * latent)
    wanted |= {"deepseek_v32": 4 * (latent + index), "glm_moe_dsa": 4 * latent + 2 * index}
    wanted |= dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5 by interval", "qwen3_5_moe"), 2 * by_head)
    wanted["deepseek_v4"] = 2 * (entry + index) // 8 + entry // 16
    found = {name: declare_decoder(spec, name).kv_bytes_per_token("bfloat16") for name, (_, spec) in CASES.items()}
    assert found == wanted

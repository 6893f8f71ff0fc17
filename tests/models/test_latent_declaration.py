"""LatentDeclaration: parameters against transformers; rows, ranks and tensors of a step by hand."""

from dataclasses import replace
from math import prod

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.latent_declaration import LatentDeclaration
from holdfast.models.sharding import shard_parameters
from holdfast.quant.formats import KV_FORMATS, MLA_FORMATS
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, WeightRecipe
from models.meta_models import count_elements
from models.tiny_latents import LATENT_MODELS

STEP = StepShape(num_rows=70, num_logit_rows=9, max_model_len=4096, dtype="bfloat16")


def declared_of(case: str) -> DeclaredModel:
    prefix, settings = LATENT_MODELS[case]
    return declare_decoder(read_spec({"architectures": [f"{prefix}ForCausalLM"], **settings}), case)


def shapes_of(declared: DeclaredModel, step: StepShape, num_ranks: int = 1, scratch=()) -> dict[str, dict[str, tuple]]:
    requests = declared.declaration.requests(step, Mesh(tensor_size=num_ranks), scratch)
    return {request.owner: {spec.name: spec.shape for spec in request.specs} for request in requests}


@pytest.mark.parametrize("case", LATENT_MODELS)
def test_declaration_parameter_count_matches_transformers(case: str) -> None:
    prefix, settings = LATENT_MODELS[case]
    declared = declared_of(case)
    assert isinstance(declared.declaration, LatentDeclaration)
    assert declared.keeps_latents
    counted = count_elements(prefix, settings, ("e_score_correction_bias",))
    assert sum(prod(weight.shape) for weight in declared.parameters()) == counted


def test_layers_that_draft_tokens_are_no_part_of_a_plan() -> None:
    drafting = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    without = declare_config({**CATALOGUE["DeepSeek-R1"], "num_nextn_predict_layers": 0}, "r1")
    assert drafting.parameters() == without.parameters()
    assert drafting.group_bytes("bfloat16").keys() == {"embed", "layers", "experts", "final_norm", "lm_head"}


BYTES = {
    "bfloat16": 1152,
    "float32": 2304,
    "fp8_ds_mla": 656,
    "turboquant_mla_4bit": 386,
    "turboquant_mla_4bit_r8": 324,
}


@pytest.mark.parametrize(
    "name", ["DeepSeek-V2-Lite", "DeepSeek-V3", "DeepSeek-R1", "Kimi-K2-Instruct", "GLM-4.7-Flash"]
)
def test_kv_bytes_per_token_of_latents_equal_on_every_rank(name: str) -> None:
    declared = declare_config(CATALOGUE[name], name)
    for ranks in (1, 2, 4):
        for format, num_bytes in BYTES.items():
            assert declared.kv_bytes_per_token(format, Mesh(tensor_size=ranks)) == declared.num_layers * num_bytes, (
                format
            )
        assert declared.kv_bytes_per_sequence("bfloat16", Mesh(tensor_size=ranks)) == 0


INDEX_BYTES = {"bfloat16": 256, "float32": 512, "fp8_ds_mla": 132, "turboquant_mla_4bit": 132}


def test_kv_bytes_per_token_of_v32_include_index_row() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-V3.2"], "v3.2")
    assert declared.spec is not None
    declaration = declared.declaration
    assert isinstance(declaration, LatentDeclaration)
    for ranks in (1, 8, 16):
        for format, num_bytes in INDEX_BYTES.items():
            assert declared.kv_bytes_per_token(format, Mesh(tensor_size=ranks)) == 61 * (BYTES[format] + num_bytes), (
                format
            )
        assert declared.kv_bytes_per_token("fp8", Mesh(tensor_size=ranks)) == 61 * (656 + 132)
        assert declared.kv_bytes_per_sequence("fp8", Mesh(tensor_size=ranks)) == 0
    for index_dtype, num_bytes in (("fp8", 132), ("bfloat16", 256), ("float32", 512)):
        kv_format = replace(KV_FORMATS["bfloat16"], index_dtype=index_dtype)
        rows = {row.name: row for row in declaration.cache_rows(kv_format, Mesh(tensor_size=8))}
        assert (rows["latent"].row_bytes, rows["index"].row_bytes) == (1152, num_bytes)
        assert rows["index"].num_layers == 61


def test_v32_index_is_whole_on_every_rank_and_rest_equals_v3() -> None:
    prefix, settings = LATENT_MODELS["sparse like V3.2"]
    changes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    indexed, plain = (
        declare_decoder(read_spec({"architectures": [f"{name}ForCausalLM"], **settings, **changes}), name)
        for name in (prefix, "DeepseekV3")
    )
    for ranks in (1, 2, 4):
        own = [weight for weight in indexed.parameters(Mesh(tensor_size=ranks)) if ".index_" in weight.name]
        assert sum(prod(weight.shape) for weight in own) == 3 * (64 * 32 * 20 + 32 * 60 + 2 * 32 + 64 * 60)
        assert [weight for weight in indexed.parameters(Mesh(tensor_size=ranks)) if weight not in own] == [
            *plain.parameters(Mesh(tensor_size=ranks))
        ]
        heads = indexed.declaration.heads(Mesh(tensor_size=ranks))
        assert heads is not None
        assert (heads.num_heads, heads.index_heads, heads.index_dim, heads.index_top_k) == (4 // ranks, 64, 32, 5)
    v3 = plain.declaration.heads(ALONE)
    assert v3 is not None
    assert (v3.index_heads, v3.index_dim, v3.index_top_k) == (0, 0, 0)


def test_v32_index_weights_quantized_except_head_weights() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-V3.2"], "v3.2")
    weights = {weight.name: weight for weight in declared.parameters() if weight.name.startswith("layers.7.index")}
    stored = {name for name, weight in weights.items() if weight.stored_scheme is FP8_BLOCK}
    assert stored == {"layers.7.index_q.weight", "layers.7.index_k.weight"}
    assert stored == {name for name, weight in weights.items() if weight.scheme(WeightRecipe(FP8)) is not None}


@pytest.mark.parametrize("name", [*KV_FORMATS, *MLA_FORMATS])
def test_check_format_head_formats_map_to_latent_or_refused(name: str) -> None:
    declared = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    same = {"fp8": "fp8_ds_mla", "turboquant_4bit_nc": "turboquant_mla_4bit"}
    if name in KV_FORMATS and KV_FORMATS[name].is_quantized and name not in same:
        words = f"{name} is not possible: {name} keeps keys and values by head, and this model keeps latents. Try bfloat16 or"
        with pytest.raises(ConfigError, match=f"kv_cache_dtype={words} fp8_ds_mla or turboquant_mla_4bit"):
            declared.check_format(name)
    else:
        assert declared.check_format(name).name == same.get(name, name)


def test_heads_are_those_of_a_rank() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    for ranks in (1, 8):
        heads = declared.declaration.heads(Mesh(tensor_size=ranks))
        assert heads is not None
        assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (128 // ranks, 1, 576)
        assert (heads.rope_dim, heads.nope_dim, heads.value_dim) == (64, 128, 128)
        assert heads.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
        assert heads.windows == (None,) * 61
    assert declared.declaration.rope_pairs(ALONE) == 32


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_latent_rank_parameters_equal_loaded_shares(ranks: int) -> None:
    """Heads, MLPs and experts are shared; latents, norms and routers each rank has whole."""
    config = {**CATALOGUE["DeepSeek-V2-Lite"], "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    spec = read_spec(config)
    planned = {weight.name: weight.shape for weight in declare_decoder(spec, "x").parameters(Mesh(tensor_size=ranks))}
    shares = shard_parameters(parameters(spec), Mesh(0, ranks), spec.num_heads, spec.num_kv_heads)
    assert planned == {parameter.name: parameter.shape for parameter in shares}
    assert planned["layers.1.kv_b.weight"] == (16 // ranks * 256, 512)
    assert planned["layers.1.qkv_a.weight"] == (576, 2048)


@pytest.mark.parametrize(("ranks", "reason"), [(3, "5 query heads"), (16, "5 query heads"), (7, "5 query heads")])
def test_ranks_that_do_not_divide(ranks: int, reason: str) -> None:
    reason = f"{reason} do not divide into {ranks} equal parts"
    with raises_code("families.indivisible", ConfigError, reason=reason, fix="Try 1."):
        declared_of("v3 like R1").parameters(Mesh(tensor_size=ranks))


def test_tensors_of_a_step() -> None:
    extra = TensorSpec("partial", (3, 4), "float32")
    attention = shapes_of(declared_of("v3 like R1"), STEP, scratch=(extra,))["attention"]
    wide = {"qkv_a": (70, 20 + 48), "q_normed": (70, 20), "q": (70, 5 * 28), "attended": (70, 5 * 20)}
    assert attention == wide | {"partial": (3, 4)}
    sparse = declared_of("sparse like V3.2")
    index = {"index_q": (70, 64 * 32), "index_k": (70, 32), "index_weights": (70, 64)}
    assert shapes_of(sparse, STEP, scratch=(extra,))["attention"] == wide | index | {"partial": (3, 4)}
    requests = {request.owner: request for request in sparse.declaration.requests(STEP, ALONE, ())}
    assert {spec.name: spec.dtype for spec in requests["attention"].specs}["index_weights"] == "float32"
    plain = shapes_of(declared_of("v2 like V2-Lite"), STEP)
    assert plain["attention"] == {"qkv_a": (70, 48), "q": (70, 3 * 28), "attended": (70, 3 * 20)}
    assert {"stream", "mlp", "experts", "head"} <= plain.keys()
    assert "quantized_rows" not in plain


def test_ranks_share_the_tensors_of_a_step() -> None:
    declared = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    attention = shapes_of(declared, STEP, 8)["attention"]
    assert attention == {"qkv_a": (70, 1536 + 576), "q_normed": (70, 1536), "q": (70, 16 * 192), "attended": (70, 2048)}


@pytest.mark.parametrize("case", ["v3 like R1", "v2 like V2-Lite"])
def test_room_for_codes_is_that_of_the_widest_product(case: str) -> None:
    step = STEP._replace(recipe=WeightRecipe(FP8), device_kind="cuda")
    shapes = shapes_of(declared_of(case), step)
    # 70 rows of at most hidden = 60, and three experts of 24 a row.
    values = {"v3 like R1": 5 * 20, "v2 like V2-Lite": 3 * 20}[case]
    assert shapes["quantized_rows"]["codes"] == (70 * max(60, values, 3 * 24),)
    assert "row_scaled" in shapes


def test_kv_b_stays_as_wide_as_the_engine_computes() -> None:
    r1 = declare_config(CATALOGUE["DeepSeek-R1"], "r1")
    weights = {weight.name: weight for weight in r1.parameters()}
    assert weights["layers.7.kv_b.weight"].scheme(WeightRecipe()) is None
    assert weights["layers.7.q_b.weight"].stored_scheme is FP8_BLOCK
    quantized = {weight.name for weight in r1.parameters() if weight.scheme(WeightRecipe(FP8)) is not None}
    assert "layers.7.qkv_a.weight" in quantized
    assert not any("kv_b" in name or "norm" in name or "router" in name for name in quantized)

"""CompressedDeclaration: parameters against transformers; entries, states, ranks and tensors of a step by hand."""

from fractions import Fraction
from math import prod

import pytest

from error_codes import raises_code
from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE, find_model
from holdfast.models.compressed_declaration import CompressedDeclaration
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.sharding import shard_parameters
from holdfast.quant.weight_schemes import FP8_BLOCK, MXFP4
from models.meta_models import count_elements
from models.tiny_compressed import COMPRESSED_MODELS

FLASH, PRO, BASE = (declare_config(CATALOGUE[f"DeepSeek-V4-{name}"], name) for name in ("Flash", "Pro", "Flash-Base"))
ARCHITECTURE = "DeepseekV4ForCausalLM"
STEP = StepShape(num_rows=70, num_logit_rows=9, max_model_len=4096, dtype="bfloat16")


def elements(declared: DeclaredModel, num_ranks: int = 1) -> int:
    return sum(prod(weight.shape) for weight in declared.parameters(Mesh(tensor_size=num_ranks)))


@pytest.mark.parametrize("case", COMPRESSED_MODELS)
def test_declaration_parameter_count_matches_transformers(case: str) -> None:
    settings = COMPRESSED_MODELS[case]
    declared = declare_config({"architectures": [ARCHITECTURE], **settings}, "tiny")
    assert isinstance(declared.declaration, CompressedDeclaration)
    assert declared.spec is not None
    counted = count_elements("DeepseekV4", settings, ("e_score_correction_bias", "tid2eid"))
    assert elements(declared) == counted
    by_name = {parameter.name: parameter.shape for parameter in parameters(declared.spec)}
    assert {weight.name: weight.shape for weight in declared.parameters()} == by_name


def test_declared_v4_counts_match_published_numbers() -> None:
    assert round(elements(FLASH) / 1e9) == 284
    assert round(elements(PRO) / 1e12, 1) == 1.6
    assert elements(BASE) == elements(FLASH)
    assert find_model("deepseek-ai/DeepSeek-V4-Flash-Base")[0] == "DeepSeek-V4-Flash-Base"
    assert find_model("deepseek v4 flash")[0] == "DeepSeek-V4-Flash"
    assert round(float(FLASH.kv_bytes_per_token("fp8") * 2**20 / 2**30), 2) == 3.76
    assert round(float(PRO.kv_bytes_per_token("fp8") * 2**20 / 2**30), 2) == 5.38
    assert round(float(PRO.kv_bytes_per_token("bfloat16") * 2**20 / 2**30), 2) == 9.62


def test_layers_that_draft_tokens_are_no_part_of_a_plan() -> None:
    config = CATALOGUE["DeepSeek-V4-Flash"]
    ratios = config["compress_ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 44, "with that of the block that drafts"
    for other in ({"compress_ratios": ratios[:43]}, {}):
        without = declare_config({**config, "num_nextn_predict_layers": 0, **other}, "x")
        assert without.parameters() == FLASH.parameters()
    with pytest.raises(ModelFormatError, match="a list of 0 or 4 or 128 for each of 43 layers"):
        declare_config({**config, "compress_ratios": [*ratios, 0]}, "x")


def test_rows_of_entries_and_of_their_index() -> None:
    rows = {row.name: row for row in FLASH.declaration.cache_rows(FLASH.check_format("fp8"), Mesh(tensor_size=4))}
    assert {name: (row.num_layers, row.row_bytes, row.ratio) for name, row in rows.items()} == {
        "entries of 4": (21, 584, 4),
        "index": (21, 132, 4),
        "entries of 128": (20, 584, 128),
    }
    assert PRO.kv_bytes_per_token("bfloat16", Mesh(tensor_size=8)) == 30 * (256 + 64) + 31 * 8
    assert PRO.kv_bytes_per_token("fp8") == 30 * (146 + 33) + Fraction(31 * 584, 128)
    windows = declare_config({**CATALOGUE["DeepSeek-V4-Flash"], "compress_ratios": [0] * 43}, "x")
    assert windows.declaration.cache_rows(windows.check_format("fp8"), ALONE) == ()
    assert windows.kv_bytes_per_sequence("fp8") == 0


def test_states_of_a_sequence() -> None:
    """m, l and a sum for every channel, twice where entries overlap; less than half a megabyte."""
    for model, overlapped, heavy in ((FLASH, 21, 20), (PRO, 30, 31)):
        for format in ("fp8", "bfloat16"):
            own = overlapped * 2 * 3 * (512 + 128) * 4 + heavy * 3 * 512 * 4
            assert model.kv_bytes_per_sequence(format, Mesh(tensor_size=2)) == own
    assert FLASH.kv_bytes_per_sequence("fp8") <= 0.5 * 2**20


def test_formats_that_vectors_cannot_be_kept_in() -> None:
    narrow = declare_config({**CATALOGUE["DeepSeek-V4-Flash"], "head_dim": 480, "qk_rope_head_dim": 64}, "x")
    with pytest.raises(
        ConfigError,
        match=r"dtype=fp8 is not possible: 416 elements .* not rotated, and 64 of them share a scale. Try bfloat16 or",
    ):
        narrow.check_format("fp8")
    assert narrow.check_format("bfloat16").name == "bfloat16"


def test_heads_are_those_of_a_rank() -> None:
    for ranks in (1, 4, 8):
        heads = FLASH.declaration.heads(Mesh(tensor_size=ranks))
        assert heads is not None
        assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rope_dim) == (64 // ranks, 1, 512, 64)
        assert (heads.index_heads, heads.index_dim, heads.index_top_k) == (64, 128, 512)
        assert heads.windows == (128,) * 43
        assert heads.ratios[:5] == (0, 0, 4, 128, 4)
        assert heads.overlapped_layers == set(range(2, 43, 2))
        assert heads.has_sinks
        assert heads.scale == 512**-0.5


def test_stored_recipe_of_v4_is_that_of_its_checkpoint() -> None:
    kinds = {weight.name.partition(".")[2].partition(".")[2]: weight for weight in FLASH.parameters()}
    stored = {name: weight.stored_scheme for name, weight in kinds.items() if weight.stored_scheme is not None}
    linear = ("qkv_a", "q_b", "o_b", "index_q", "shared.gate_up", "shared.down")
    assert stored == {
        **{f"{module}.weight": FP8_BLOCK for module in linear},
        **{f"experts.{half}.weight": MXFP4 for half in ("gate_up", "down")},
    }
    recipe = FLASH.stored_recipe
    assert recipe is not None
    assert (recipe.scheme, recipe.expert_scheme, recipe.embeddings) == (FP8_BLOCK, MXFP4, "none")
    assert BASE.stored_recipe is not None
    assert BASE.stored_recipe.expert_scheme is None
    experts = [weight.stored_scheme for weight in BASE.parameters() if weight.kind == "expert"]
    assert set(experts) == {FP8_BLOCK}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_heads_groups_experts_and_vocabulary(ranks: int) -> None:
    changes = {"o_groups": 4, "num_attention_heads": 8, "vocab_size": 131}
    spec = read_spec({"architectures": [ARCHITECTURE], **COMPRESSED_MODELS["like V4-Flash"], **changes})
    declared = declare_decoder(spec, "x")
    planned = {weight.name: weight.shape for weight in declared.parameters(Mesh(tensor_size=ranks))}
    shares = shard_parameters(parameters(spec), Mesh(0, ranks), spec.num_heads, 1, num_groups=4)
    assert {share.name: share.shape for share in shares} == planned
    assert planned["layers.0.router.table"] == (131, 3)
    assert planned["layers.1.o_a.weight"] == (4 // ranks * 12, 8 * 32 // 4)
    assert planned["layers.1.pool.weight"] == (4 * 32 + 4 * 16 + 64, 48)


def test_numbers_of_ranks_that_do_not_work() -> None:
    reason = "8 groups of heads do not divide into 16 equal parts"
    with raises_code("families.indivisible", ConfigError, reason=reason, fix="Try 1, 2, 4, 8."):
        FLASH.parameters(Mesh(tensor_size=16))
    with pytest.raises(ConfigError, match="64 query heads do not divide into 3 equal parts"):
        FLASH.parameters(Mesh(tensor_size=3))
    (o_a,) = (one for one in parameters(FLASH.spec) if one.name == "layers.0.o_a.weight")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="are 8 heads, which do not divide by 16"):
        shard_parameters([o_a], Mesh(0, 16), 64, 1, num_groups=8)


def test_tensors_of_a_step() -> None:
    scratch = (TensorSpec("own", (3,), "float32"),)
    requests = FLASH.declaration.requests(STEP, Mesh(tensor_size=2), scratch)
    shapes = {request.owner: {spec.name: spec.shape for spec in request.specs} for request in requests}
    assert shapes.keys() == {"stream", "attention", "experts", "head"}
    attention = shapes["attention"]
    assert shapes["stream"]["x"] == (70, 4, 4096)
    assert attention["qkv_a"] == (70, 1024 + 512)
    assert attention["q"] == attention["attended"] == (70, 32 * 512)
    assert attention["grouped"] == (70, 4 * 1024)
    assert attention["pooled"] == (70 * (4 * 512 + 4 * 128 + 64),)
    assert attention["own"] == (3,)
    assert shapes["head"]["logits"] == (9, 129280 // 2)
    recipe = FLASH.stored_recipe
    assert recipe is not None
    (codes,) = (
        one for one in FLASH.declaration.requests(STEP._replace(recipe=recipe), ALONE, ()) if one.owner[:4] == "quan"
    )
    assert {spec.name: spec.shape for spec in codes.specs} == {"codes": (70 * 8192,), "scales": (70 * 64,)}

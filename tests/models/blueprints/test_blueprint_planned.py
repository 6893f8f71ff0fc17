"""Decoders that are planned and not run: parameters against transformers, windows, ranks and what is stored, by hand."""

from math import prod
from typing import Any

import pytest

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.models.blueprints.planned import READERS
from holdfast.models.blueprints.read import PLANNED_FAMILIES, declare_config
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel
from models.meta_models import count_elements

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
GLM_MOE = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
PIXTRAL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "head_dim": 12,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("Phi3ForCausalLM", TINY),
    "phi, tied": ("Phi3ForCausalLM", TINY | {"tie_word_embeddings": True, "partial_rotary_factor": 0.75}),
    "ministral 3": ("Ministral3ForCausalLM", TINY | {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", TINY | EXPERTS),
    "gemma 2": ("Gemma2ForCausalLM", TINY | {"head_dim": 16, "sliding_window": 32, "tie_word_embeddings": True}),
    "glm": ("GlmForCausalLM", TINY | {"head_dim": 16, "attention_bias": True}),
    "glm 4": ("Glm4ForCausalLM", TINY | {"head_dim": 16, "attention_bias": False}),
    "glm 4.5": ("Glm4MoeForCausalLM", TINY | GLM_MOE | {"attention_bias": True, "use_qk_norm": True}),
    "mistral with images": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": TINY | {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
            "vision_config": PIXTRAL | {"model_type": "pixtral"},
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
    ),
}
STEP = StepShape(num_rows=512, num_logit_rows=64, max_model_len=256, dtype="bfloat16")


def read(case: str, **more: object) -> DeclaredModel:
    architecture, config = CASES[case]
    return declare_config(config | {"architectures": [architecture]} | more, case)


def elements(declared: DeclaredModel, num_ranks: int = 1) -> int:
    return sum(prod(weight.shape) for weight in declared.parameters(Mesh(tensor_size=num_ranks)))


@pytest.mark.parametrize("case", CASES)
def test_declaration_parameter_count_matches_transformers(case: str) -> None:
    counted = count_elements(*CASES[case], ("e_score_correction_bias",))
    assert elements(read(case)) == counted


def test_planned_families_have_a_case_for_every_reader() -> None:
    assert {architecture for architecture, _ in CASES.values()} == READERS.keys()
    assert READERS.keys() <= set(PLANNED_FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_declare_config_planned_family_is_not_runnable(case: str) -> None:
    found = read(case)
    assert found.spec is None
    assert found.not_runnable == f"{CASES[case][0]} is not in this version"


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_all_that_is_not_a_norm_or_a_tower(case: str) -> None:
    found = read(case)
    names = [[weight.name for weight in found.parameters(Mesh(tensor_size=ranks))] for ranks in (1, 2)]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0]), "a name stands for one weight"
    for whole, half in zip(found.parameters(), found.parameters(Mesh(tensor_size=2)), strict=True):
        is_shared = whole.name.startswith("layers.") and whole.kind in ("linear", "expert")
        assert prod(half.shape) * 2 == prod(whole.shape) or not is_shared, whole.name
    assert found.kv_bytes_per_token("bfloat16", Mesh(tensor_size=2)) * 2 == found.kv_bytes_per_token("bfloat16")
    assert found.declaration.indivisible(Mesh(tensor_size=3)) is not None


@pytest.mark.parametrize(
    ("case", "num_full", "num_windowed"),
    [("gemma 2", 3, 3), ("phi", 6, 0)],
)
def test_layers_with_a_window_keep_that_and_no_more(case: str, num_full: int, num_windowed: int) -> None:
    found, row_bytes = read(case), 2 * 2 * (8 if case == "phi" else 16) * 2
    assert found.kv_bytes_per_token("bfloat16") == num_full * row_bytes
    assert found.kv_bytes_per_sequence("bfloat16") == num_windowed * 32 * row_bytes
    assert (found.declaration.heads(ALONE) is None) == (num_windowed > 0)


def test_windows_are_those_that_are_listed() -> None:
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    assert read("gemma 2", layer_types=kinds).kv_bytes_per_token("bfloat16") == 5 * 2 * 2 * 16 * 2
    with pytest.raises(ModelFormatError, match="one entry for each of 6 layers"):
        read("gemma 2", layer_types=kinds[:-1])
    with pytest.raises(UnsupportedModelError, match="layers of kind 'linear_attention'"):
        read("gemma 2", layer_types=["linear_attention"] * 6)


def test_window_as_long_as_context_counts_as_full_attention() -> None:
    assert read("phi", sliding_window=256).kv_bytes_per_sequence("bfloat16") == 0
    assert read("phi", sliding_window=255).kv_bytes_per_token("bfloat16") == 0
    assert read("gemma 2", sliding_window=None).kv_bytes_per_sequence("bfloat16") == 0


def test_draft_layers_are_named_and_not_counted() -> None:
    drafted = read("glm 4.5", num_nextn_predict_layers=1)
    assert elements(drafted) == elements(read("glm 4.5"))
    (note,) = drafted.notes
    assert note == "layers that draft tokens (multi-token prediction: 1) are neither planned nor loaded"


def test_mxfp4_is_not_of_all_families() -> None:
    with pytest.raises(UnsupportedModelError, match="quant_method = 'mxfp4'"):
        read("mixtral", quantization_config={"quant_method": "mxfp4"})


def test_half_of_a_head_is_rotated() -> None:
    assert read("glm").declaration.rope_pairs(ALONE) == read("glm 4.5").declaration.rope_pairs(ALONE) == 4
    assert read("phi, tied").declaration.rope_pairs(ALONE) == 3
    assert read("phi").declaration.rope_pairs(ALONE) == 4


@pytest.mark.parametrize("case", CASES)
def test_declaration_requests_cover_every_part_of_a_step(case: str) -> None:
    requests = {request.owner: request for request in read(case).declaration.requests(STEP, ALONE, ())}
    assert {"stream", "attention", "head"} <= requests.keys()
    assert ("experts" in requests) == (case in ("mixtral", "glm 4.5"))
    assert ("mlp" in requests) == (case != "mixtral")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_declare_config_missing_number_refused_as_guess(key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"{key}: a plan would be a guess"):
        read("mixtral", **{key: None})
    with pytest.raises(ModelFormatError, match="no text_config: a plan would be a guess"):
        read("mistral with images", text_config=None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads = 8"),
        ({"torch_dtype": "int3"}, "one of float32"),
        ({"num_experts_per_tok": 9}, "a whole number from 1 to 8"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        read("mixtral", **settings)

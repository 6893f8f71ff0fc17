"""Decoders of several kinds of layers: parameters against transformers, KV and states by hand, shares of ranks, refusals."""

from math import prod
from typing import Any

import pytest

from holdfast.distributed.mesh import ALONE, Mesh
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.models.blueprints.hybrids import READERS
from holdfast.models.blueprints.read import PLANNED_FAMILIES, declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.declaration import StepShape
from holdfast.models.declared_model import DeclaredModel
from models.meta_models import count_elements

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
GEMMA = TINY | {"global_head_dim": 32, "sliding_window": 32, "num_hidden_layers": 12, "tie_word_embeddings": True}
SMALL_GEMMA = {
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
}
LARGE_GEMMA = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
LLAMA4 = TINY | {
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 2,
}
NEMOTRON = TINY | {
    "hybrid_override_pattern": "MEM*-ME*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "expand": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}


def images(config: dict[str, Any], kind: str, vision: dict[str, Any]) -> dict[str, Any]:
    text = {**config, "model_type": kind}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": config["tie_word_embeddings"]}


LLAMA_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
GEMMA_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA_EYES |= {"num_key_value_heads": 2, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma, small": ("Gemma4ForCausalLM", GEMMA | SMALL_GEMMA),
    "gemma, large": ("Gemma4ForConditionalGeneration", images(GEMMA | LARGE_GEMMA, "gemma4_text", GEMMA_EYES)),
    "gemma, unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {
            "text_config": GEMMA
            | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "tie_word_embeddings": True,
        },
    ),
    "llama 4": ("Llama4ForCausalLM", LLAMA4),
    "llama 4 with images": ("Llama4ForConditionalGeneration", images(LLAMA4, "llama4_text", LLAMA_EYES)),
    "minimax": ("MiniMaxM2ForCausalLM", TINY | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronHForCausalLM", NEMOTRON),
    "nemotron, latent": ("NemotronHForCausalLM", NEMOTRON | {"moe_latent_size": 32}),
}
BUFFERS = ("e_score_correction_bias", "layer_scalar")
STEP = StepShape(num_rows=512, num_logit_rows=64, max_model_len=256, dtype="bfloat16")


def read(case: str, **more: object) -> DeclaredModel:
    architecture, config = CASES[case]
    return declare_config(config | {"architectures": [architecture]} | more, case)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_a_tiny_model_count_as_transformers_does(case: str) -> None:
    counted = count_elements(*CASES[case], BUFFERS)
    assert sum(prod(weight.shape) for weight in read(case).parameters()) == counted


def test_readers_are_all_tried_and_planned() -> None:
    assert {architecture for architecture, _ in CASES.values()} == READERS.keys()
    assert READERS.keys() <= set(PLANNED_FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_hybrid_ranks_share_matrices_and_refuse_odd_splits(case: str) -> None:
    found, half = read(case), Mesh(tensor_size=2)
    assert found.spec is None
    assert found.not_runnable == f"{CASES[case][0]} is not in this version"
    names = [weight.name for weight in found.parameters()]
    assert len(set(names)) == len(names)
    whole_names = ("latent_in", "latent_out", "per_layer_gate", "per_layer_out")
    for whole, part in zip(found.parameters(), found.parameters(half), strict=True):
        is_whole = any(name in whole.name for name in whole_names) or "embed_per_layer" in whole.name
        if whole.kind in ("linear", "expert") and not is_whole:
            one_head = whole.shape[0] == part.shape[0] and ".k." in whole.name  # a single KV head is shared
            assert prod(part.shape) * 2 == prod(whole.shape) or one_head, whole.name
    assert found.declaration.indivisible(Mesh(tensor_size=3)) is not None
    assert found.declaration.indivisible(Mesh(num_stages=2, layers=(0, 4))) is not None
    assert found.declaration.requests(STEP, ALONE, ())


@pytest.mark.parametrize(
    ("name", "kv_bytes", "sequence_bytes"),
    [
        # full layers of their own KV * heads * 512 * K and V * 2 bytes; windows * layers * heads * 256 * 2 * 2
        ("gemma-4-E2B-it", 3 * 512 * 4, 12 * 512 * 256 * 4),
        ("gemma-4-E4B-it", 4 * 2 * 512 * 4, 20 * 512 * 2 * 256 * 4),
        ("gemma-4-12B-it", 8 * 512 * 4, 40 * 1024 * 8 * 256 * 4),
        ("gemma-4-26B-A4B-it", 5 * 2 * 512 * 4, 25 * 1024 * 8 * 256 * 4),
        ("gemma-4-31B-it", 10 * 4 * 512 * 4, 50 * 1024 * 16 * 256 * 4),
        ("Llama-4-Scout-17B-16E-Instruct", 12 * 8 * 128 * 4, 36 * 8192 * 8 * 128 * 4),
        ("MiniMax-M2.5", 62 * 8 * 128 * 4, 0),
        ("Nemotron-3-Nano-30B-A3B", 6 * 2 * 128 * 4, 23 * 2_134_016),
        ("Kimi-K2.5", 61 * 576 * 2, 0),
    ],
)
def test_published_models_keep_what_is_by_hand(name: str, kv_bytes: int, sequence_bytes: int) -> None:
    found = declare_config(CATALOGUE[name], name)
    assert found.kv_bytes_per_token("bfloat16") == kv_bytes
    assert found.kv_bytes_per_sequence("bfloat16") == sequence_bytes


def test_states_of_two_ranks_are_half_as_large() -> None:
    name = "Nemotron-3-Nano-30B-A3B"
    found = declare_config(CATALOGUE[name], name)
    assert found.kv_bytes_per_sequence("bfloat16", Mesh(tensor_size=2)) * 2 == found.kv_bytes_per_sequence("bfloat16")


def test_fp8_of_a_checkpoint_holds_for_its_matrices() -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = read("minimax", quantization_config=stored)
    natives = {weight.kind: weight.native for weight in found.parameters()}
    assert (natives["linear"], natives["expert"]) == ("fp8_block", "fp8_block")
    assert {natives[kind] for kind in ("norm", "router", "head", "embedding")} == {None}


def test_notes_name_parts_that_are_left_out() -> None:
    assert read("minimax", num_mtp_modules=1).notes == (
        "layers that draft tokens (multi-token prediction: 1) are neither planned nor loaded",
    )
    assert read("llama 4").notes == ()
    (note,) = read("llama 4 with images").notes
    assert note.startswith("the text model alone is planned")


@pytest.mark.parametrize("model_type", ["nemotron_h", "minimax_m2", "gemma4_text", "llama4_text"])
def test_declare_config_accepts_model_type_without_architecture(model_type: str) -> None:
    case = {"gemma4_text": "gemma, small", "llama4_text": "llama 4"}
    config = CASES[case.get(model_type, model_type.partition("_")[0])][1] | {"model_type": model_type}
    assert declare_config(config, "x").not_runnable is not None


@pytest.mark.parametrize(
    ("case", "more", "words"),
    [
        ("nemotron", {"hybrid_override_pattern": "MX"}, "mamba, moe, attention, mlp"),
        ("nemotron", {"hybrid_override_pattern": ""}, "mamba, moe, attention, mlp"),
        ("nemotron", {"ssm_state_size": None}, "has no ssm_state_size"),
        ("llama 4", {"moe_layers": [9]}, "a list of layers from 0 to 7"),
        ("gemma, small", {"num_kv_shared_layers": 12}, "from 0 to 11"),
        ("minimax", {"num_local_experts": 0}, "num_local_experts = 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(case: str, more: dict[str, object], words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        read(case, **more)


def test_kimi_stores_experts_in_int4_and_nothing_else() -> None:
    found = declare_config(CATALOGUE["Kimi-K2.5"], "Kimi-K2.5")
    dense = declare_config(CATALOGUE["Kimi-K2-Instruct"], "Kimi-K2-Instruct")
    assert [w.shape for w in found.parameters()] == [w.shape for w in dense.parameters()]
    experts = sum(prod(weight.shape) for weight in found.parameters() if weight.kind == "expert")
    group = found.group_bytes("bfloat16")["experts"]
    assert group.num_bytes == experts // 2 + experts // 32 * 2, "four bits each, and two bytes for 32"
    assert abs(found.weight_bytes("bfloat16") / 594e9 - 1) < 0.01, "as large as its files"
    eight = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    with pytest.raises(UnsupportedModelError, match="experts in int4"):
        declare_config({**CATALOGUE["Kimi-K2.5"], "quantization_config": eight}, "x")

"""Settings of Qwen3-Next, 3.5 and 3.6: specs, parameters against transformers, states of published models, folders with images."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.distributed.mesh import Mesh
from holdfast.errors import ModelError, ModelFormatError, UnsupportedModelError
from holdfast.loading.model_files import open_model
from holdfast.models.blueprints.read import declare_config
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.spec import ModelSpec, RopeSpec
from models.meta_models import count_elements
from models.tiny_experts import assembled
from models.tiny_states import EXPERTS, FULL, LINEAR, SMALL, STATE_MODELS, TOWER, save_state_model, save_with_images

TEXT: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
NEXT: dict[str, Any] = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
MOE: dict[str, Any] = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}


def read(base: dict[str, Any] = TEXT, **settings: Any) -> ModelSpec:
    return read_spec(base | settings)


def test_read_spec_defaults_of_absent_keys() -> None:
    spec = read()
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (248320, 4096, 12288)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 16, 4, 256)
    assert (spec.norm_offset, spec.qk_norm, spec.has_output_gate, spec.rotary_dim) == (1.0, True, True, 64)
    assert (spec.rope, spec.experts, spec.tied_embeddings) == (RopeSpec(10_000.0), None, False)
    state = spec.state
    assert state is not None, "no layer has a state"
    assert state.layers == frozenset(layer for layer in range(32) if (layer + 1) % 4)
    assert (state.shape, state.output_gate, state.is_joined) == ((16, 32, 128, 128, 4), "silu", False)


def test_read_spec_experts_of_both_families() -> None:
    following, moe = read(NEXT), read(MOE)
    assert following.experts is not None and moe.experts is not None  # noqa: PT018
    assert (following.experts.num_experts, following.experts.top_k, following.experts.normalizes) == (512, 10, True)
    assert (moe.experts.num_experts, moe.experts.top_k, moe.experts.normalizes) == (256, 8, True)
    assert following.experts.has_shared_gate and moe.experts.has_shared_gate  # noqa: PT018
    assert following.state is not None and following.state.is_joined  # noqa: PT018
    plain = read(NEXT, norm_topk_prob=False).experts
    assert plain is not None and not plain.normalizes  # noqa: PT018
    always = read(MOE, norm_topk_prob=False).experts
    assert always is not None and always.normalizes  # noqa: PT018


@pytest.mark.parametrize(
    "settings",
    [
        {"partial_rotary_factor": 0.5, "rope_theta": 1e7},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            }
        },
    ],
)
def test_rotated_elements_in_every_spelling(settings: dict[str, Any]) -> None:
    spec = read(**settings)
    assert (spec.rotary_dim, spec.rope_dim, spec.rope) == (128, 128, RopeSpec(1e7))


def test_whole_heads_and_other_values() -> None:
    assert read(partial_rotary_factor=1.0).rotary_dim is None
    state = read(output_gate_type="sigmoid", linear_conv_kernel_dim=2, full_attention_interval=2).state
    assert state is not None, "no layer has a state"
    assert (state.output_gate, state.conv_width, len(state.layers)) == ("sigmoid", 2, 16)
    assert read(num_hidden_layers=2, layer_types=[FULL, FULL]).state is None
    assert read(attn_output_gate=False).has_output_gate is False


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few kinds": ({"num_hidden_layers": 3, "layer_types": [LINEAR]}, "for each of 3 layers"),
    "another kind": ({"num_hidden_layers": 2, "layer_types": ["mamba", FULL]}, "for each of 2 layers"),
    "states alone": ({"num_hidden_layers": 2, "layer_types": [LINEAR] * 2}, "at least one full_attention"),
    "heads that do not divide": ({"linear_num_value_heads": 20}, "a multiple of linear_num_key_heads = 16"),
    "no key heads": ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
    "keys too wide for kernels": ({"linear_key_head_dim": 257}, "take up to 256 elements of a head"),
    "values too wide for kernels": (
        {"linear_value_head_dim": 512},
        "linear_value_head_dim = 512, which is not supported",
    ),
    "interval beyond the layers": ({"num_hidden_layers": 3}, "full_attention_interval = 4. It must be at most 3"),
    "elements of text": ({"linear_key_head_dim": "128"}, "linear_key_head_dim"),
    "one tap": ({"linear_conv_kernel_dim": 1}, "a whole number from 2 to 8"),
    "nine taps": ({"linear_conv_kernel_dim": 9}, "a whole number from 2 to 8"),
    "rotation of nothing": ({"partial_rotary_factor": 0.001}, "an even number of the 256 elements"),
    "rotation of more": ({"partial_rotary_factor": 1.5}, "an even number of the 256 elements"),
    "interval 0": ({"full_attention_interval": 0}, "full_attention_interval"),
    "another gate": ({"output_gate_type": "tanh"}, "output gates are silu or sigmoid"),
    "biases": ({"attention_bias": True}, "projections of this family have no biases"),
    "another activation": ({"hidden_act": "gelu"}, "go by silu"),
    "unknown rotation": ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_spec_invalid_settings_are_refused_in_one_line(case: str) -> None:
    settings, words = REFUSED[case]
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=words) as caught:
        read(**settings)
    assert "\n" not in str(caught.value)


def wrapped(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": settings | {"model_type": kind}, "vision_config": TOWER, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Qwen3NextForCausalLM", SMALL | EXPERTS),
        ("Qwen3NextForCausalLM", SMALL | EXPERTS | {"mlp_only_layers": [1]}),
        ("Qwen3_5ForCausalLM", SMALL),
        ("Qwen3_5MoeForCausalLM", SMALL | EXPERTS),
        ("Qwen3_5ForConditionalGeneration", wrapped("qwen3_5_text", SMALL)),
        ("Qwen3_5MoeForConditionalGeneration", wrapped("qwen3_5_moe_text", SMALL | EXPERTS)),
    ],
)
def test_weights_of_a_tiny_model_count_as_transformers_does(architecture: str, settings: dict[str, Any]) -> None:
    found = declare_config(settings | {"architectures": [architecture]}, "tiny")
    assert sum(prod(weight.shape) for weight in found.parameters()) == count_elements(architecture, settings, ())
    assert found.not_runnable is None


@pytest.mark.parametrize("name", STATE_MODELS)
def test_parts_fill_every_weight_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """The joined rows of Qwen3-Next, by key head, become all queries, all keys, all values and all gates."""
    model = save_state_model(name, tmp_path)
    spec = read_spec(json.loads((tmp_path / "config.json").read_text()))
    weights = assembled(parameters(spec), load_file(tmp_path / "model.safetensors"))
    state, layer = spec.state, model.model.layers[min(spec.state.layers)].linear_attn  # type: ignore[union-attr]
    assert state is not None, "no layer has a state"
    x_TH = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    prefix = f"layers.{min(state.layers)}"
    ours = (x_TH @ weights[f"{prefix}.in_proj.weight"].T).split(state.part_sizes, dim=1)
    b_TH, a_TH = (x_TH @ weights[f"{prefix}.in_gates.weight"].T).chunk(2, dim=1)
    with torch.no_grad():
        if state.is_joined:
            q, k, v, z, b, a = layer.fix_query_key_value_ordering(
                layer.in_proj_qkvz(x_TH[None]), layer.in_proj_ba(x_TH[None])
            )
            theirs = [own.reshape(3, -1) for own in (q, k, v, z)]
            b, a = b[0], a[0]
        else:
            theirs = [*layer.in_proj_qkv(x_TH).split(state.part_sizes[:3], dim=1), layer.in_proj_z(x_TH)]
            b, a = layer.in_proj_b(x_TH), layer.in_proj_a(x_TH)
    for mine, other in zip((*ours, b_TH, a_TH), (*theirs, b, a), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "sequence_bytes"),
    [
        # state = 4 * Hv * 128 * 128 + 2 * 3 * (2 * Hk * 128 + Hv * 128), times layers without full attention
        ("Qwen3-Next-80B-A3B-Instruct", 24_576, 36 * 2_146_304),
        ("Qwen3.5-27B", 65_536, 48 * 3_207_168),
        ("Qwen3.6-35B-A3B", 20_480, 30 * 2_146_304),
        ("Qwen3.5-122B-A10B", 24_576, 36 * 4_268_032),
        ("Qwen3.5-397B-A17B", 30_720, 45 * 4_268_032),
    ],
)
def test_published_models_keep_what_is_by_hand(name: str, kv_bytes: int, sequence_bytes: int) -> None:
    found = declare_config(CATALOGUE[name], name)
    assert found.not_runnable is None
    assert found.kv_bytes_per_token("bfloat16") == kv_bytes
    assert found.kv_bytes_per_sequence("bfloat16") == sequence_bytes
    assert found.kv_bytes_per_sequence("bfloat16", Mesh(tensor_size=2)) * 2 == sequence_bytes


def test_notes_name_what_is_left_out() -> None:
    assert declare_config(TEXT | {"mtp_num_hidden_layers": 1}, "x").notes == (
        "layers that draft tokens (multi-token prediction: 1) are neither planned nor loaded",
    )
    images = wrapped("qwen3_5_text", SMALL) | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    assert declare_config(images, "x").notes == (
        "the text model alone is planned and run: weights for images are left unread",
    )


@pytest.mark.parametrize("moe", [False, True])
def test_text_opens_out_of_a_folder_with_images(tmp_path: Path, moe: bool) -> None:
    save_with_images(tmp_path, moe=moe)
    opened = open_model(str(tmp_path), "auto")
    opened.source.close()
    assert opened.spec.state is not None
    assert opened.spec.num_draft_layers == 1
    named = {name for name in opened.source.entries if name.startswith(("model.visual.", "mtp."))}
    assert opened.source.ignorable >= named >= {"mtp.fc.weight", "model.visual.pos_embed.weight"}


def test_folder_of_image_tensors_alone_is_refused(tmp_path: Path) -> None:
    from holdfast.loading.planning.plan import plan_load

    save_with_images(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: own for name, own in tensors.items() if "visual" in name}, tmp_path / "model.safetensors")
    opened = open_model(str(tmp_path), "auto")
    try:
        with pytest.raises(ModelError) as caught:
            plan_load(opened.parameters, opened.source, opened.spec.checkpoint_dtype)
    finally:
        opened.source.close()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_state_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    from holdfast.loading.planning.plan import plan_load

    save_state_model("3.5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.linear_attn.conv1d.weight"
    tensors[name] = tensors[name][:, :, :3].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_model(str(tmp_path), "auto")
    try:
        with pytest.raises(ModelError, match="conv1d"):
            plan_load(opened.parameters, opened.source, opened.spec.checkpoint_dtype)
    finally:
        opened.source.close()

"""Gemma 3 in GGUF files: logits of transformers, and settings that the metadata leaves out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from for_each import for_each
from holdfast.errors import ModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.model_files import open_gguf
from holdfast.models.spec import ModelSpec, RopeSpec
from kernels.exactness import require_native
from loading.tiny_models import save_tiny
from models.test_decoder import judge, make_drive, make_requests
from runner.drive import load_model

gguf = pytest.importorskip("gguf")

MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BASE: dict[str, Any] = {
    "block_count": 4,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 112,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False, True],
    "rope.freq_base": 1_000_000.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}


def file_name(name: str) -> str:
    """The name that a conversion gives a tensor."""
    module, _, kind = name.rpartition(".")
    if module in ENDS:
        return f"{ENDS[module]}.{kind}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{MODULES[rest]}.{kind}"


def write(path: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """The file that a conversion makes: norms have 1 added, and say so nowhere."""
    writer = gguf.GGUFWriter(path, "gemma3")
    values = {f"gemma3.{key}": value for key, value in (BASE | changes).items() if value is not None}
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    writer.add_token_list([f"token{index}" for index in range(len(tensors["model.embed_tokens.weight"]))])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 106)
    for name, tensor in tensors.items():
        values = tensor.float() + 1.0 if name.endswith("norm.weight") else tensor.float()
        writer.add_tensor(file_name(name), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save(folder: Path, overrides: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Path]:
    theirs = save_tiny("gemma3", folder / "folder", query_pre_attn_scalar=32, **(overrides or {}))
    tensors = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    return theirs, write(folder / "tiny.gguf", tensors, **changes)


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    tensors = {"model.embed_tokens.weight": torch.zeros(8, 64), "model.norm.weight": torch.zeros(64)}
    opened = open_gguf(write(folder / "tiny.gguf", tensors, **changes))
    opened.source.close()
    return opened.spec


@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 4.0}], ids=["plain", "capped"])
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    require_native()
    theirs, path = save(tmp_path, changes, **changes)
    ours = load_model(path)
    assert (ours.spec.norm_offset, ours.spec.float32_norms) == (0.0, True)
    requests = make_requests((33, 90))
    drive = make_drive(ours, "native_paged", 24)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)
    assert {weight.name for weight in open_declared(str(path)).parameters()} == set(ours.weights)


def test_gguf_gemma3_end_tokens_include_end_of_turn(tmp_path: Path) -> None:
    _, path = save(tmp_path)
    opened = open_gguf(path)
    assert opened.generation.eos_token_ids == (1, 106)
    opened.source.close()


def test_gguf_gemma3_missing_settings_get_defaults(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **{"attention.sliding_window_pattern": None, "block_count": 12})
    assert spec.sliding_windows == (*[8] * 5, None) * 2
    assert spec.local_rope == RopeSpec(10_000.0)
    assert spec.rope == RopeSpec(1_000_000.0, "linear", factor=8.0)
    assert spec.max_position == 256, "the longest context is stretched already"
    assert spec.attention_scale == 32**-0.5
    assert spec.embedding_scale == 8.0
    assert (spec.attention_softcap, spec.logit_softcap) == (None, None)


def test_scores_of_the_largest_are_scaled_by_its_width(tmp_path: Path) -> None:
    more = {"block_count": 62, "attention.sliding_window_pattern": 6}
    assert spec_of(tmp_path, **more).attention_scale == (64 / 4) ** -0.5
    assert spec_of(tmp_path, **more, **{"attention.scale": 0.25}).attention_scale == 0.25


def test_gguf_gemma3_optional_settings_are_read(tmp_path: Path) -> None:
    more = {"rope.freq_base_swa": 20_000.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 0.0}
    spec = spec_of(tmp_path, **more, **{"attention.sliding_window_pattern": 2})
    assert spec.local_rope == RopeSpec(20_000.0)
    assert (spec.attention_softcap, spec.logit_softcap) == (50.0, None)
    assert spec.sliding_windows == (8, None, 8, None)


@for_each(
    "changes, word",
    [
        ({"attention.sliding_window": 0}, "sliding_window"),
        ({"attention.sliding_window": None}, "sliding_window"),
        ({"attention.sliding_window_pattern": [True, False]}, "for each of 4 layers"),
        ({"attention.sliding_window_pattern": [1, 2, 3, 4]}, "for each of 4 layers"),
        ({"attention.sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"attn_logit_softcapping": -1.0}, "a number above 0"),
        ({"rope.scaling.type": "spiral"}, "rope.scaling.type"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"rope.freq_base_swa": 0.0}, "rope.freq_base_swa"),
    ],
)
def test_gguf_gemma3_invalid_setting_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        spec_of(tmp_path, **changes)
    assert "\n" not in str(caught.value)

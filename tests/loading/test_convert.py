"""Models quantized into files and folders: the same model when it is opened again, values of independent formulas, errors."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.cli_models import make_model
from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError
from holdfast.loading import convert
from holdfast.loading.convert import TokenizerForms, plan_conversion, write_conversion
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.model_files import open_directory, open_gguf, open_model
from holdfast.loading.planning.open_model import OpenModel
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.writing.written import WritePlan
from holdfast.memory.ledger import Ledger
from loading.block_files import model_tensors, write_tensors
from loading.latent_models import config_of, tensors_of, write_folder
from loading.packed.packed_models import MODELS, make_packed, plain_of
from loading.packed.packed_models import MOE as PACKED_MOE
from loading.stored_models import make_stored

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
MOE: dict[str, Any] = WIDE | PACKED_MOE | {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
FORMULA_TYPES = {"q4_0": "Q4_0", "q8_0": "Q8_0"}


NO_TOKENIZER = TokenizerForms(dict, dict)


def silent(num_done: int, num_total: int) -> None:
    """No progress."""


def quantized(source: Path, out: Path, target: str) -> WritePlan:
    """Quantize a model without a tokenizer."""
    model = open_model(str(source), "auto")
    conversion = plan_conversion(model, target, NO_TOKENIZER)
    write_conversion(conversion, out, silent)
    assert sum(path.stat().st_size for path in weight_files(out)) == conversion.num_bytes
    return conversion.plan


def weight_files(out: Path) -> list[Path]:
    return sorted(out.glob("*.safetensors")) if out.is_dir() else [out]


def weights_of(model: OpenModel) -> dict[str, torch.Tensor]:
    plan = plan_load(model.parameters, model.source, "float32", stored=model.stored)
    loaded = load_weights(plan, model.source, "cpu", Ledger(), silent).weights
    model.source.close()
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def gguf_values(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in float32, as the package reads them."""
    tensors = gguf.GGUFReader(path).tensors
    return {
        one.name: gguf.quants.dequantize(one.data, one.tensor_type).reshape(one.shape.tolist()[::-1]) for one in tensors
    }


def near(one: torch.Tensor, other: torch.Tensor, most: float) -> bool:
    return float((one - other).norm()) <= most * float(other.norm())


LOSS = {"q8_0": 0.007, "q4_0": 0.11, "q4_k": 0.09, "int4": 0.13, "nvfp4": 0.12}
"""Relative error of a matrix of normal numbers, as measured for blocks alone, with room."""
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama of narrow heads": {"num_attention_heads": 8, "head_dim": 24, "num_key_value_heads": 2},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": QWEN3,
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3 of other windows": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "qwen3 moe": {key: MOE[key] for key in ("architectures", "model_type", "num_experts", "num_experts_per_tok")}
    | {"moe_intermediate_size": 64, "norm_topk_prob": True},
    "qwen2 moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
    },
}


@for_each("name", LLAMAS)
def test_convert_folder_to_gguf_and_back_opens_as_the_same_model(tmp_path_factory, name):
    """Every weight by its name, permuted and back, norms with their offset and without; every setting."""
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **(WIDE | {"vocab_size": 259} | LLAMAS[name]))
    quantized(source, folder / "m.gguf", "q8_0")
    plan = quantized(folder / "m.gguf", folder / "q", "nvfp4")
    theirs, ours, back = open_directory(source), open_gguf(folder / "m.gguf"), open_directory(folder / "q")
    assert {row.before_type for row in plan.rows} == {"Q8_0", "float32"}
    is_mistral = name == "mistral"  # files name it a Llama
    assert (back.spec.architecture, back.spec.family) == (theirs.spec.architecture, theirs.spec.family) or is_mistral
    offset = theirs.spec.norm_offset - ours.spec.norm_offset
    wanted, found, returned = weights_of(theirs), weights_of(ours), weights_of(back)
    assert wanted.keys() == found.keys() == returned.keys()
    for weight, values in wanted.items():
        if values.dim() == 1 or weight.endswith(("router.weight", "shared.gate.weight")):
            assert torch.equal(found[weight], values + offset if "norm" in weight else values), weight
            assert torch.allclose(returned[weight], values, rtol=0, atol=1e-6), weight
        else:
            assert near(found[weight], values, LOSS["q8_0"]), weight
            assert near(returned[weight], values, LOSS["q8_0"] + LOSS["nvfp4"]), weight
            assert not torch.equal(found[weight], values), weight


def test_convert_llama_rows_are_interleaved_as_published(tmp_path):
    """reference: w.view(heads, 2, half, K).transpose(1, 2), for queries and keys of a Llama only."""
    for folder, settings in (("llama", WIDE), ("qwen3", WIDE | QWEN3)):
        source = make_model(tmp_path / folder, **settings)
        quantized(source, tmp_path / f"{folder}.gguf", "q8_0")
        found = gguf_values(tmp_path / f"{folder}.gguf")
        theirs = load_file(source / "model.safetensors")
        for part, heads in (("q", 4), ("k", 2), ("v", 2)):
            values = theirs[f"model.layers.1.self_attn.{part}_proj.weight"]
            if part != "v" and folder == "llama":
                values = values.view(heads, 2, 8, -1).transpose(1, 2).reshape(values.shape)
            assert near(torch.from_numpy(found[f"blk.1.attn_{part}.weight"].copy()), values, LOSS["q8_0"]), (
                folder,
                part,
            )


@for_each("target", ["q4_k", "q4_0", "q8_0"])
def test_convert_blocks_equal_the_quantizers_of_the_package(tmp_path_factory, target):
    """Bytes of every tensor: q4_0 and q8_0 by the package itself, rows of 64 of q4_k by its Q5_0 and Q8_0."""
    folder = tmp_path_factory.mktemp("m")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    source = make_model(folder / "m", **QWEN3, **sizes)
    quantized(source, folder / "m.gguf", target)
    theirs = load_file(source / "model.safetensors")
    kinds: dict[str, int] = {}
    for tensor in gguf.GGUFReader(folder / "m.gguf").tensors:
        kind = tensor.tensor_type
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
        if tensor.name == "blk.1.ffn_down.weight":
            values = theirs["model.layers.1.mlp.down_proj.weight"].numpy()
        elif tensor.name == "output.weight":
            values = theirs["lm_head.weight"].numpy()
        elif tensor.name == "blk.2.attn_v.weight":
            values = theirs["model.layers.2.self_attn.v_proj.weight"].numpy()
        else:
            continue
        np.testing.assert_array_equal(tensor.data.reshape(-1), gguf.quants.quantize(values, kind).reshape(-1))
    assert kinds.keys() - {"F32"} == {"q4_k": {"Q5_0", "Q8_0"}, "q4_0": {"Q4_0", "Q8_0"}, "q8_0": {"Q8_0"}}[target]


@for_each("layout", ["separate", "fused", "transposed", "by kind"])
def test_convert_experts_of_every_layout_are_stacked(tmp_path_factory, layout):
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **MOE | {"moe_intermediate_size": 64})
    tensors = load_file(source / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    each = {
        half: torch.stack([tensors.pop(f"{prefix}{expert}.{half}_proj.weight") for expert in range(4)])
        for half in ("gate", "up", "down")
    }
    both = torch.cat((each["gate"], each["up"]), dim=1)
    if layout == "separate":
        tensors |= {f"{prefix}{e}.{half}_proj.weight": own[e].clone() for half, own in each.items() for e in range(4)}
    elif layout == "by kind":
        tensors |= {f"{prefix}{half}_proj.weight": own for half, own in each.items()}
    else:
        fused = {f"{prefix}gate_up_proj": both, f"{prefix}down_proj": each["down"]}
        is_turned = layout == "transposed"
        tensors |= {name: (own.transpose(1, 2) if is_turned else own).contiguous() for name, own in fused.items()}
    save_file(tensors, source / "model.safetensors")
    for target in ("q8_0", "int4"):
        out = folder / ("m.gguf" if target == "q8_0" else "m-int4")
        quantized(source, out, target)
    found = gguf_values(folder / "m.gguf")
    for half, values in each.items():
        stacked = found[f"blk.0.ffn_{half}_exps.weight"]
        assert stacked.shape == tuple(values.shape)
        assert near(torch.from_numpy(stacked.copy()), values, LOSS["q8_0"]), half
    held = load_file(folder / "m-int4" / "model.safetensors")
    for half in ("gate", "up"):  # down has rows of 64
        for expert in range(4):
            values = int4_values(held, f"{prefix}{expert}.{half}_proj")
            assert near(values, each[half][expert], LOSS["int4"])
    assert torch.equal(held[f"{prefix}1.down_proj.weight"], each["down"][1])


def int4_values(held: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """compressed-tensors' formula: (code - 8) * scale, eight codes in a word from the low bits, groups of 128."""
    packed = held[f"{module}.weight_packed"]
    codes = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1) - 8
    scales = held[f"{module}.weight_scale"]
    assert held[f"{module}.weight_shape"].tolist() == list(codes.shape)
    return codes.float() * scales.float().repeat_interleave(128, dim=1)


def nvfp4_values(held: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """compressed-tensors' formula: e2m1 * (e4m3 scale / global scale), the low half of a byte first, groups of 16."""
    packed = held[f"{module}.weight_packed"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((numbers, -numbers))[codes]
    scales = held[f"{module}.weight_scale"].float() / held[f"{module}.weight_global_scale"]
    return numbers * scales.repeat_interleave(16, dim=1)


@for_each("target, sizes", [("int4", WIDE), ("int4", MOE), ("nvfp4", WIDE), ("nvfp4", MOE)])
def test_convert_folder_holds_what_it_declares_and_opens(tmp_path_factory, target, sizes):
    """Values by the publisher's formulas, our reader's values equal them to the bit, and plain modules are listed."""
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **sizes)
    plan = quantized(source, folder / "q", target)
    theirs, held = load_file(source / "model.safetensors"), load_file(folder / "q" / "model.safetensors")
    config = json.loads((folder / "q" / "config.json").read_text())
    declared = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    formula = int4_values if target == "int4" else nvfp4_values
    plain = dict[str, torch.Tensor]()
    for name, values in theirs.items():
        module = name.removesuffix(".weight")
        if name in held:
            assert torch.equal(held[name], values), name
            assert values.dim() == 1 or module in declared["ignore"], name
            plain[name] = values
        else:
            assert module not in declared["ignore"]
            plain[name] = formula(held, module)
            assert near(plain[name], values, LOSS[target]), name
    quantized_names = {tensor.name for tensor in plan.tensors if tensor.encoding == target}
    assert quantized_names == theirs.keys() - held.keys()
    assert all(".layers." in name and name.endswith("_proj.weight") for name in quantized_names)
    group = declared["config_groups"]["group_0"]
    assert (declared["quant_method"], declared["format"]) == ("compressed-tensors", plan_format(target))
    assert group["weights"]["group_size"] == (128 if target == "int4" else 16)
    assert group["input_activations"] is None
    (folder / "plain").mkdir()
    save_file(plain, folder / "plain" / "model.safetensors")
    shutil.copy(source / "config.json", folder / "plain" / "config.json")
    ours, expected = weights_of(open_directory(folder / "q")), weights_of(open_directory(folder / "plain"))
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(ours[name], values), name


def plan_format(target: str) -> str:
    return {"int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}[target]


def test_convert_nvfp4_parts_that_are_multiplied_as_one_share_a_scale(tmp_path):
    """Engines that fuse them take one scale for all: of query, key and value, and of gate and up."""
    source = make_model(tmp_path / "m", **MOE | {"num_hidden_layers": 2})
    quantized(source, tmp_path / "q", "nvfp4")
    theirs, held = load_file(source / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    attention, expert = "model.layers.1.self_attn.{}_proj", "model.layers.1.mlp.experts.2.{}_proj"
    for modules in ([attention.format(part) for part in "qkv"], [expert.format(part) for part in ("gate", "up")]):
        scales = {held[f"{module}.weight_global_scale"].item() for module in modules}
        amax = max(float(theirs[f"{module}.weight"].abs().max()) for module in modules)
        assert scales == {np.float32(2688) / np.float32(amax)}
    others = [expert.format("down"), attention.format("o"), expert.format("gate")]
    assert len({held[f"{module}.weight_global_scale"].item() for module in others}) == 3


@for_each("kind", ["awq", "gptq", "nvfp4", "mxfp4"])
def test_convert_packed_folder_equals_that_of_its_values(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("m")
    source = make_packed(folder / "m", *MODELS[kind], hidden_size=128)
    for target, ending in (("q8_0", ".gguf"), ("int4", "")):
        outs = [folder / f"{name}-{target}{ending}" for name in ("packed", "plain")]
        plans = [quantized(one, out, target) for one, out in zip((source, plain_of(source)), outs, strict=True)]
        files = [
            weight_files(out)[0].read_bytes()[-plan.num_bytes // 2 :] for out, plan in zip(outs, plans, strict=True)
        ]
        assert files[0] == files[1]
        assert plans[0].before_bytes < plans[1].before_bytes


@for_each("scheme", ["fp8", "fp8_block"])
def test_convert_fp8_folder_is_expanded(tmp_path_factory, scheme):
    folder = tmp_path_factory.mktemp("m")
    source = make_stored(folder / "m", scheme, **QWEN3, **WIDE)
    model = open_directory(source)
    assert model.stored is not None
    quantized(source, folder / "m.gguf", "q8_0")
    held = load_file(source / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    codes = held[f"{module}.weight"].float()
    scales = held.get(f"{module}.weight_scale_inv", held.get(f"{module}.weight_scale"))
    assert scales is not None
    if scheme == "fp8_block":
        scales = scales.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    values = codes * scales.float().view(len(codes), -1)
    found = torch.from_numpy(gguf_values(folder / "m.gguf")["blk.1.ffn_down.weight"].copy())
    assert near(found, values, LOSS["q8_0"])


@for_each("kind", ["IQ2_S", "NVFP4"])
@for_each("arch", ["qwen3", "qwen3moe"])
def test_convert_gguf_of_any_type_keeps_names_metadata_and_values(tmp_path_factory, kind, arch):
    """Factors beside NVFP4 weights enter the values, and their tensors go."""
    folder = tmp_path_factory.mktemp("m")
    source, out = folder / "m.gguf", folder / "q.gguf"
    write_tensors(source, model_tensors(kind, arch), arch, split__count=1)
    quantized(source, out, "q8_0")
    theirs, ours = read_gguf(source), read_gguf(out)
    assert [name for name in theirs.tensors if not name.endswith("scale")] == list(ours.tensors)
    own = {"general.file_type": 7, "general.quantization_version": 2}
    assert ours.metadata == {key: value for key, value in theirs.metadata.items() if key != "split.count"} | own
    wanted, found = weights_of(open_gguf(source)), weights_of(open_gguf(out))
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        is_plain = values.dim() == 1 or "router" in name
        assert torch.equal(found[name], values) if is_plain else near(found[name], values, 2 * LOSS["q8_0"]), name


def test_convert_gguf_blocks_of_the_target_are_copied(tmp_path):
    source = make_model(tmp_path / "m", **QWEN3, **WIDE)
    first, second, third = (tmp_path / f"{name}.gguf" for name in ("first", "second", "third"))
    quantized(source, first, "q4_k")
    plan = quantized(first, second, "q4_k")
    assert first.read_bytes() == second.read_bytes()
    assert {tensor.encoding for tensor in plan.tensors} == {"copy", "F32"}
    quantized(first, third, "q4_0")
    assert read_gguf(third).tensors["output.weight"].type.name == "Q6_K"
    assert {one.type.name for one in read_gguf(third).tensors.values()} == {"Q4_0", "Q6_K", "F32"}


def test_convert_tied_head_is_written_once(tmp_path):
    source = make_model(tmp_path / "m", **WIDE, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    quantized(source, tmp_path / "m.gguf", "q4_k")
    found = read_gguf(tmp_path / "m.gguf").tensors
    assert "output.weight" not in found
    assert found["token_embd.weight"].type.name == "Q6_K"
    quantized(source, tmp_path / "q", "int4")
    held = load_file(tmp_path / "q" / "model.safetensors")
    assert torch.equal(held["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert not any(name.startswith("lm_head") for name in held)
    assert "lm_head" in json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]


def test_convert_several_files_have_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "MAX_FILE_BYTES", 100_000)
    source = make_model(tmp_path / "m", **WIDE)
    quantized(source, tmp_path / "q", "int4")
    names = [path.name for path in weight_files(tmp_path / "q")]
    assert len(names) > 3
    assert names[-1] == f"model-{len(names):05}-of-{len(names):05}.safetensors"
    monkeypatch.undo()
    quantized(source, tmp_path / "one", "int4")
    ours, theirs = (weights_of(open_directory(tmp_path / name)) for name in ("q", "one"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_write_plan_rows_sum_up(tmp_path):
    source = make_model(tmp_path / "m", **QWEN3, **WIDE | {"intermediate_size": 320})
    plan = quantized(source, tmp_path / "m.gguf", "q4_k")
    rows = plan.rows
    assert sum(row.num_tensors for row in rows) == len(plan.tensors)
    assert (
        sum(row.before_bytes for row in rows)
        == plan.before_bytes
        == (source / "model.safetensors").stat().st_size
        - (int.from_bytes((source / "model.safetensors").read_bytes()[:8], "little") + 8)
    )
    assert sum(row.num_bytes for row in rows) == plan.num_bytes
    assert [row.stored_as for row in rows if not row.reason] == ["Q4_K"]
    assert "rows of 320 are no blocks of 256" in {row.reason for row in rows}
    assert len(plan.notes) == 1
    assert plan.notes[0].startswith("4 of 25 tensors")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a window": ("quantize.setting", {**LLAMAS["mistral"], "sliding_window": 8}, "q8_0"),
    "a rotation by length": ("quantize.setting", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "q8_0"),
    "shares of experts": ("quantize.setting", {**LLAMAS["qwen3 moe"], "norm_topk_prob": False}, "q8_0"),
    "an activation": ("quantize.setting", {"hidden_act": "gelu_pytorch_tanh"}, "q8_0"),
    "a scale of scores": ("quantize.setting", {**LLAMAS["gemma3"], "query_pre_attn_scalar": 24}, "q8_0"),
    "no matrix that divides": ("quantize.nothing", {"hidden_size": 64, "intermediate_size": 96}, "int4"),
}


@for_each("what", REFUSED)
def test_convert_refuses_by_name_and_leaves_nothing(tmp_path_factory, what):
    code, settings, target = REFUSED[what]
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **(WIDE | settings))
    with raises_code(code, UnsupportedModelError):
        quantized(source, folder / "out", target)
    assert os.listdir(folder) == ["m"]


def test_convert_latent_attention_is_written_as_a_folder_only(tmp_path):
    """GGUF files are not written for its architecture. In a folder kv_b stays plain: heads multiply it apart."""
    config = config_of()
    source = write_folder(tmp_path / "m", config, tensors_of(config))
    with raises_code("quantize.architecture", UnsupportedModelError, architecture="DeepseekV3ForCausalLM"):
        quantized(source, tmp_path / "m.gguf", "q8_0")
    plan = quantized(source, tmp_path / "q", "nvfp4")
    plain = {tensor.name: tensor.reason for tensor in plan.tensors if tensor.encoding == "plain"}
    assert plain["model.layers.1.self_attn.kv_b_proj.weight"] == "the up-projection of latents"
    assert plain["model.layers.1.self_attn.q_b_proj.weight"] == "rows of 200 are no groups of 16"
    assert plain["model.layers.1.mlp.gate.weight"] == "a router"
    held = load_file(tmp_path / "q" / "model.safetensors")
    found = weights_of(open_directory(tmp_path / "q"))
    for name, values in weights_of(open_directory(source)).items():
        assert near(found[name], values, LOSS["nvfp4"]), name
    assert "model.layers.0.mlp.up_proj.weight_packed" in held


def test_convert_refuses_sources_of_other_kinds(tmp_path):
    source = make_stored(tmp_path / "m", "mxfp4", **PACKED_MOE)
    with raises_code("quantize.stored", UnsupportedModelError, stored="mxfp4"):
        quantized(source, tmp_path / "out", "q8_0")


def test_convert_refuses_an_output_that_exists(tmp_path):
    source = make_model(tmp_path / "m", **WIDE)
    (tmp_path / "m.gguf").touch()
    for out in (tmp_path / "m.gguf", tmp_path / "m"):
        with raises_code("quantize.exists", ConfigError):
            quantized(source, out, "q8_0")
    with raises_code("quantize.no_parent", ConfigError):
        quantized(source, tmp_path / "none" / "m.gguf", "q8_0")
    assert (tmp_path / "m.gguf").stat().st_size == 0


@for_each("target", ["q8_0", "int4"])
@for_each("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_convert_removes_what_it_wrote_before_an_error(tmp_path_factory, monkeypatch, target, error):
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **WIDE)
    conversion = plan_conversion(open_directory(source), target, NO_TOKENIZER)

    def fail(num_done: int, num_total: int) -> None:
        if num_done > num_total // 2:
            assert len(os.listdir(folder)) == 2, "the partial output"
            raise error

    if isinstance(error, OSError):
        with raises_code("quantize.not_written", ConfigError, reason="No space left on device"):
            write_conversion(conversion, folder / "out", fail)
    else:
        with pytest.raises(KeyboardInterrupt):
            write_conversion(conversion, folder / "out", fail)
    assert os.listdir(folder) == ["m"]


def test_convert_an_output_made_meanwhile_is_not_replaced(tmp_path):
    source = make_model(tmp_path / "m", **WIDE)
    conversion = plan_conversion(open_directory(source), "q8_0", NO_TOKENIZER)

    def interfere(num_done: int, num_total: int) -> None:
        (tmp_path / "out").write_text("mine")

    with raises_code("quantize.exists", ConfigError):
        write_conversion(conversion, tmp_path / "out", interfere)
    assert (tmp_path / "out").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["m", "out"]


def test_convert_without_space_writes_nothing(tmp_path, monkeypatch):
    source = make_model(tmp_path / "m", **WIDE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with raises_code("quantize.no_space", ConfigError):
        quantized(source, tmp_path / "out", "q8_0")
    assert os.listdir(tmp_path) == ["m"]


@for_each(
    "value, code",
    [(float("nan"), "weights.not_finite"), (float("inf"), "weights.not_finite"), (1e6, "quantize.too_large")],
)
def test_convert_refuses_numbers_that_blocks_do_not_hold(tmp_path_factory, value, code):
    folder = tmp_path_factory.mktemp("m")
    source = make_model(folder / "m", **WIDE)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = value
    save_file(tensors, source / "model.safetensors")
    kind = ModelFormatError if code == "weights.not_finite" else UnsupportedModelError
    with raises_code(code, kind, tensor="model.layers.1.mlp.up_proj.weight"):
        quantized(source, folder / "out", "q4_0")
    assert os.listdir(folder) == ["m"]

"""Mixtures of experts in GGUF files: logits of transformers, values of the gguf package, codes of safetensors files."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from counted_work import num_lines
from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelError, ModelFormatError, ModelNotFoundError
from holdfast.loading.declared import open_declared
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.model_files import OpenModel, find_default_model, open_gguf, open_model
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.source import read_rows
from holdfast.memory.ledger import Ledger
from holdfast.models.grouped_readers import read_spec
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import AS_STORED, FP8, WeightRecipe
from kernels.exactness import same_bits
from models.test_decoder import judge, make_drive, make_requests
from models.tiny_experts import assembled, config_of, make_tiny, tensors_of
from runner.drive import LoadedModel

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 64, 96, 2, 4, 2, 160, 512
HEAD_DIMS = {"llama": 16, "qwen2": 16, "qwen3": 32}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = ("Q8_0", "F16", "Q4_1", "BF16", "Q5_0")
"""Taken in turn by the matrices of a file, so that one parameter is made of several types."""


def config(arch: str, tied: bool) -> dict[str, object]:
    """config.json of the tiny model."""
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIMS[arch],
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
    }


def state_dict(arch: str, tied: bool) -> dict[str, np.ndarray]:
    """The weights of the tiny model under Hugging Face names."""
    rng = np.random.default_rng(7)
    query, key = HEADS * HEAD_DIMS[arch], KV_HEADS * HEAD_DIMS[arch]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if arch == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if arch == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (HEAD_DIMS[arch],) for name in "qk"}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, query)
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def file_name(name: str) -> str:
    """The name that a conversion gives a tensor."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    if name == "lm_head.weight":
        return "output.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What a conversion of a Llama does to query and key rows."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_model(path, arch: str, tied: bool = False, drop: str = "", **extra) -> dict[str, torch.Tensor]:
    """Write the tiny model; returns what its tensors are worth after quantization, under Hugging Face names."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIMS[arch])
    writer.add_value_length(HEAD_DIMS[arch])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_scaling_factor(extra.pop("rope_factor", 1.0))
    writer.add_token_list([f"token{index}" for index in range(VOCAB)])
    for key, value in extra.pop("token_ids", {"eos": 3}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    expected: dict[str, torch.Tensor] = {}
    for index, (name, numbers) in enumerate(state_dict(arch, tied).items()):
        kind = "F32" if numbers.ndim == 1 else KINDS[index % len(KINDS)]
        number = getattr(gguf.GGMLQuantizationType, kind)
        worth = gguf.quants.dequantize(gguf.quants.quantize(numbers, number), number)
        expected[name] = torch.from_numpy(np.ascontiguousarray(worth))
        if arch == "llama" and ".q_proj." in name:
            numbers = interleave(numbers, HEADS)
        if arch == "llama" and ".k_proj." in name:
            numbers = interleave(numbers, KV_HEADS)
        if file_name(name) != drop:
            writer.add_tensor(file_name(name), gguf.quants.quantize(numbers, number), raw_dtype=number)
    for name, numbers in extra.items():
        writer.add_tensor(name.replace("__", "."), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@for_each("tied", [False, True])
@for_each("arch", ARCHITECTURES)
def test_open_gguf_parameters_match_hugging_face_checkpoint(tmp_path, arch, tied):
    expected = write_model(tmp_path / "tiny.gguf", arch, tied)
    opened = open_gguf(tmp_path / "tiny.gguf")
    assert opened.spec == replace(read_spec(config(arch, tied)), checkpoint_dtype="bfloat16")
    assert (opened.kind, opened.path) == ("gguf", tmp_path / "tiny.gguf")
    plan = plan_load(opened.parameters, opened.source, "float32")
    assert {move.tensor for move in plan.moves} == set(expected)
    for parameter in opened.parameters:
        rows = []
        for part in parameter.parts:
            for start in range(0, part.shape[0], 11):
                chunk = read_rows(opened.source, part.tensor, start, min(start + 11, part.shape[0]))
                rows.append(chunk.float().clone())
        wanted = torch.cat([expected[part.tensor] for part in parameter.parts])
        assert torch.equal(torch.cat(rows), wanted), parameter.name
    opened.source.close()


def test_open_gguf_llama_biases_are_reordered_as_rows(tmp_path):
    """Biases of queries and keys are interleaved like their rows."""
    bias = np.arange(HEADS * 16, dtype=np.float32)
    biases = {f"blk__{layer}__attn_q__bias": interleave(bias, HEADS) for layer in range(LAYERS)}
    key_bias = np.arange(KV_HEADS * 16, dtype=np.float32)
    biases |= {f"blk__{layer}__attn_k__bias": interleave(key_bias, KV_HEADS) for layer in range(LAYERS)}
    biases |= {f"blk__{layer}__attn_v__bias": key_bias for layer in range(LAYERS)}
    write_model(tmp_path / "tiny.gguf", "llama", **biases)
    opened = open_gguf(tmp_path / "tiny.gguf")
    assert (opened.spec.qkv_bias, opened.spec.o_bias, opened.spec.mlp_bias) == (True, False, False)
    plan_load(opened.parameters, opened.source, "float32")
    read = partial(read_rows, opened.source)
    assert torch.equal(read("model.layers.1.self_attn.q_proj.bias", 0, 64), torch.from_numpy(bias))
    assert torch.equal(read("model.layers.1.self_attn.k_proj.bias", 3, 20), torch.from_numpy(key_bias[3:20]))
    assert torch.equal(read("model.layers.1.self_attn.v_proj.bias", 0, 32), torch.from_numpy(key_bias))
    opened.source.close()


@pytest.mark.parametrize("factor", [1.0, 4.0], ids=["plain", "linear"])
def test_open_gguf_rope_freqs_become_longrope_factors(tmp_path, factor):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    write_model(tmp_path / "tiny.gguf", "llama", rope_factor=factor, rope_freqs__weight=divisors)
    opened = open_gguf(tmp_path / "tiny.gguf")
    rope = opened.spec.rope
    assert rope is not None
    assert (rope.theta, rope.kind, rope.attention_factor) == (50_000.0, "longrope", 1.0)
    assert rope.original_max_position == opened.spec.max_position == CONTEXT
    assert rope.short_factor == rope.long_factor == tuple((divisors * np.float32(factor)).tolist())
    assert opened.source.ignorable == {"rope_freqs.weight"}
    plan_load(opened.parameters, opened.source, "float32")


@pytest.mark.parametrize("divisors", [np.ones(7, np.float32), np.ones(8, np.float16), np.zeros(8, np.float32)])
def test_open_gguf_wrong_rope_freqs_are_refused(tmp_path, divisors):
    write_model(tmp_path / "tiny.gguf", "llama", rope_freqs__weight=divisors)
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf"):
        open_gguf(tmp_path / "tiny.gguf")


def test_plan_load_gguf_missing_or_unknown_tensor_is_refused(tmp_path):
    write_model(tmp_path / "tiny.gguf", "llama", drop="blk.1.ffn_up.weight")
    opened = open_gguf(tmp_path / "tiny.gguf")
    with raises_code("weights.missing_tensors", ModelFormatError):
        plan_load(opened.parameters, opened.source, "float32")
    write_model(tmp_path / "tiny.gguf", "llama", blk__0__attn_sinks__weight=np.ones(4, np.float32))
    opened = open_gguf(tmp_path / "tiny.gguf")
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        plan_load(opened.parameters, opened.source, "float32")


def test_open_declared_gguf_headers_must_match_parameters(tmp_path, monkeypatch):
    """What an engine would refuse has no plan: a stray tensor, a layer that is not announced, and another width."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "llama")
    assert open_declared(str(path)).num_layers == LAYERS
    write_model(path, "llama", blk__0__attn_sinks__weight=np.ones(4, np.float32))
    with raises_code("weights.unexpected_tensors", ModelFormatError):
        open_declared(str(path))
    numbers = state_dict("llama", tied=False)
    monkeypatch.setattr(f"{__name__}.state_dict", lambda arch, tied: numbers)
    for name, announced, found in (("LAYERS", 1, r"too many: model\.layers\.1\."), ("INNER", 97, r"_proj\.weight")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.{name}", announced)
            write_model(path, "llama")
        with pytest.raises(ModelFormatError, match=found):
            open_declared(str(path))


def test_open_gguf_generation_defaults_come_from_metadata(tmp_path, caplog):
    ids = {"bos": 1, "eos": 3, "eot": 5, "eom": 3}
    write_model(tmp_path / "tiny.gguf", "qwen2", token_ids=ids)
    generation = open_gguf(tmp_path / "tiny.gguf").generation
    assert generation.eos_token_ids == (3, 5)
    assert generation.bos_token_id == 1
    assert not caplog.records
    write_model(tmp_path / "tiny.gguf", "qwen2", token_ids={"bos": 2**32 - 1, "eos": VOCAB})
    generation = open_gguf(tmp_path / "tiny.gguf").generation
    assert (generation.eos_token_ids, generation.bos_token_id) == ((), None)
    assert "tokenizer.ggml.eos_token_id" in caplog.text


@pytest.mark.slow
def test_open_gguf_mutated_models_open_or_are_refused(tmp_path):
    write_model(tmp_path / "tiny.gguf", "llama")
    opened = open_gguf(tmp_path / "tiny.gguf")
    assert opened.gguf is not None
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    rng = np.random.default_rng(11)
    num_planned = 0
    path = tmp_path / "mutant.gguf"
    for _ in range(1000):
        mutant = bytearray(content)
        for place in rng.integers(0, opened.gguf.data_start, rng.integers(1, 4)):
            mutant[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        path.write_bytes(mutant)
        try:
            found = open_gguf(path)
            plan = plan_load(found.parameters, found.source, "float32")
        except ModelError as error:
            assert "mutant.gguf" in str(error)  # noqa: PT017 - most mutants fail, some do not
            continue
        num_planned += 1
        move = plan.moves[int(rng.integers(len(plan.moves)))]
        rows = read_rows(found.source, move.tensor, 0, move.part.source_rows)
        assert rows.numel() == move.part.source_rows * move.part.source_columns
        found.source.close()
    assert 0 < num_planned < 1000


def test_open_gguf_missing_file_is_refused(tmp_path):
    with raises_code("gguf.not_found", ModelNotFoundError):
        open_gguf(tmp_path / "none.gguf")


def test_open_gguf_imports_no_torch(tmp_path):
    write_model(tmp_path / "tiny.gguf", "qwen3")
    script = (
        "import sys; from pathlib import Path; from holdfast.loading.model_files import open_gguf\n"
        "open_gguf(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "tiny.gguf")], check=True)


@pytest.fixture(scope="module")
def default_path():
    try:
        return find_default_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_open_gguf_default_model_runs_few_python_lines(default_path):
    opened_by: list[OpenModel] = []
    # Some ten lines for each token of the vocabulary, read and checked.
    assert num_lines(lambda: opened_by.append(open_gguf(default_path))) < 20 * 49_152
    (opened,) = opened_by
    assert opened.spec.vocab_size == 49152
    assert opened.generation.eos_token_ids == (2,)
    assert plan_load(opened.parameters, opened.source, "float32").final_bytes == 4 * 134_515_008


@pytest.mark.parametrize(
    ("blocks", "most_rows"),
    [pytest.param((0, 29), 9_000, id="some"), pytest.param(range(30), 10**9, id="every", marks=pytest.mark.slow)],
)
def test_gguf_default_model_is_dequantized_bit_for_bit(default_path, blocks, most_rows):
    opened = open_gguf(default_path)
    assert opened.gguf is not None
    names = dict(zip(opened.gguf.tensors, opened.source.entries, strict=True))
    assert len(names) == 272
    content = np.memmap(default_path, mode="r")
    for stored in opened.gguf.tensors.values():
        block = re.match(r"blk\.(\d+)\.", stored.name)
        if block and int(block[1]) not in blocks:
            continue
        raw = content[stored.offset : stored.offset + stored.num_bytes].reshape(math.prod(stored.shape[:-1]), -1)[
            :most_rows
        ]
        plain = gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, stored.type.name))
        theirs = torch.from_numpy(np.array(plain)).view(-1, *stored.shape[1:])
        if stored.name.endswith(("attn_q.weight", "attn_k.weight")):
            theirs = theirs.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
        num_rows = theirs.shape[0]
        for start in range(0, num_rows, 10_000):
            ours = read_rows(opened.source, names[stored.name], start, min(start + 10_000, num_rows))
            assert torch.equal(ours.view(torch.int32), theirs[start : start + 10_000].view(torch.int32)), stored.name
    opened.source.close()


ARCHITECTURES_GGUF_MIXTURE = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
SIZES = {
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
"""Widths of whole blocks. The last is also the outer one: stacked matrices have the shape of transposed ones."""
QUANTIZED = {"gate_proj": "Q8_0", "up_proj": "Q4_1", "down_proj": "Q8_0"}
"""Types of the experts' tensors, shared ones too."""


@cache
def tiny(name: str) -> Any:
    return make_tiny(name, **SIZES[name])


def write_mixture(
    path: Path, model: Any, kinds: Mapping[str, str] | None = None, changed: Mapping[str, torch.Tensor | None] = {}
) -> dict[str, torch.Tensor]:
    """Write it as a conversion does; returns what the tensors are worth, under Hugging Face names.

    `kinds` are the types of the experts' tensors, by module; F32 without. `changed` are tensors by Hugging Face names that
    take the place of the model's own; None for none at all.
    """
    config = model.config
    arch = ARCHITECTURES_GGUF_MIXTURE[config.model_type]
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    worth: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors_of(model, "by kind.weight") | dict(changed)).items():
        if tensor is None:
            continue
        kind = (kinds or {}).get(name.split(".")[-2], "F32") if "expert" in name else "F32"
        number = getattr(gguf.GGMLQuantizationType, kind)
        raw = gguf.quants.quantize(tensor.numpy(), number)
        worth[name] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, number)))
        # Conversions take the dimension of 1 away.
        raw = raw.squeeze(0) if name.endswith("shared_expert_gate.weight") else raw
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")) or name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def load(path: Path, dtype: str, recipe: WeightRecipe = AS_STORED) -> LoadedModel:
    model = open_model(str(path), "auto")
    plan = plan_load(model.parameters, model.source, dtype, recipe)
    weights = load_weights(plan, model.source, "cpu", Ledger(), lambda done, total: None).weights
    model.source.close()
    return LoadedModel(model.spec, weights)


@pytest.mark.parametrize("name", ARCHITECTURES_GGUF_MIXTURE)
def test_logits_are_those_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.kernels.native_library.native_library", lambda: None)
    theirs = tiny(name)
    write_mixture(tmp_path / "tiny.gguf", theirs)
    ours = load(tmp_path / "tiny.gguf", "float32")
    assert ours.spec == read_spec(config_of(theirs))
    (request,) = make_requests((33,))
    drive = make_drive(ours, "torch_paged", max_num_batched_tokens=128)
    drive.run([request])
    judge(theirs, drive, request)


@pytest.mark.parametrize("name", ARCHITECTURES_GGUF_MIXTURE)
def test_load_gguf_quantized_experts_match_gguf_package(name, tmp_path):
    path, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    folder.mkdir()
    worth = write_mixture(path, tiny(name), QUANTIZED)
    save_file(worth, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(tiny(name))))
    plain = load(path, "float32")
    listed = open_model(str(path), "dummy").parameters
    expected = assembled(listed, worth)
    assert plain.weights.keys() == expected.keys()
    for weight, values in plain.weights.items():
        assert isinstance(values, torch.Tensor)
        assert same_bits(values, expected[weight]), weight
    ours, theirs = (load(place, "bfloat16", WeightRecipe(FP8)) for place in (path, folder))
    assert replace(ours.spec, checkpoint_dtype="float32") == theirs.spec
    num_quantized = 0
    for weight, held in ours.weights.items():
        other = theirs.weights[weight]
        if isinstance(held, QuantizedWeight) and isinstance(other, QuantizedWeight):
            num_quantized += 1
            assert torch.equal(held.codes.view(torch.uint8), other.codes.view(torch.uint8)), weight
            held, other = held.scales, other.scales
        assert isinstance(held, torch.Tensor), weight
        assert isinstance(other, torch.Tensor), weight
        assert same_bits(held, other), weight
    assert num_quantized >= 2 * (4 if name == "qwen3_moe" else 6)


def test_plan_load_gguf_wrong_expert_tensors_are_refused(tmp_path):
    """By file and tensor: a part of the experts missing, one expert short, and a shared expert where there is none."""
    path = tmp_path / "tiny.gguf"
    up, down = (f"model.layers.1.mlp.experts.{module}_proj.weight" for module in ("up", "down"))
    shared, gate = (f"model.layers.0.mlp.{module}.weight" for module in ("shared_expert.up_proj", "shared_expert_gate"))
    cases: list[tuple[str, dict[str, torch.Tensor | None], str]] = [
        ("qwen3_moe", {up: None}, up),
        ("qwen3_moe", {down: torch.ones(5, 64, 64)}, down),
        ("qwen3_moe", {"blk.0.ffn_up_shexp.weight": torch.ones(40, 64)}, shared),
        ("qwen2_moe", {shared: None}, shared),
        ("qwen2_moe", {gate: torch.ones(1, 32)}, gate),
    ]
    for name, changed, named in cases:
        write_mixture(path, tiny(name), changed=changed)
        opened = open_model(str(path), "auto")
        with pytest.raises(ModelFormatError, match=rf"tiny\.gguf.*{re.escape(named)}"):
            plan_load(opened.parameters, opened.source, "float32")

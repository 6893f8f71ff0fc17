import json
from pathlib import Path

import pytest

from holdfast.errors import ModelError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.model_files import open_directory, open_directory_without_weights
from holdfast.loading.planning.open_model import GenerationDefaults
from loading.safetensors_bytes import write
from loading.tiny_models import save_tiny

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


def folder_with(tmp_path: Path, config: object = LLAMA, **files: object) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


def generation_of(tmp_path: Path, config: object = LLAMA, **files: object) -> GenerationDefaults:
    return open_directory_without_weights(folder_with(tmp_path, config, **files)).generation


def test_a_saved_model_opens(tmp_path):
    save_tiny("qwen3", tmp_path, max_shard_size="60KB")
    opened = open_directory(tmp_path)
    assert (opened.kind, opened.spec.family, opened.path, opened.gguf) == ("directory", "qwen3", tmp_path, None)
    assert {part.tensor for parameter in opened.parameters for part in parameter.parts} == set(opened.source.entries)
    assert opened.generation.eos_token_ids == (2,)


def test_a_folder_without_config_says_what_it_holds(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json; it is empty"):
        open_directory(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ModelNotFoundError, match=r"it holds tokenizer\.json"):
        open_directory(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"pass .*model\.gguf"):
        open_directory(tmp_path)


@pytest.mark.parametrize("config", ["", "[]", "{", '{"architectures": [', '{"a": NaN}', "null"])
def test_a_config_that_is_no_object_is_refused(tmp_path, config):
    with pytest.raises(ModelFormatError, match=r"^config\.json"):
        open_directory(folder_with(tmp_path, config))


def test_code_that_comes_with_a_model_is_never_run(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    config = LLAMA | {
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"},
        "trust_remote_code": True,
    }
    open_directory_without_weights(folder_with(tmp_path, config))
    with pytest.raises(ModelError):
        open_directory(tmp_path)
    assert not canary.exists()


def test_dummy_needs_the_config_alone(tmp_path):
    opened = open_directory_without_weights(folder_with(tmp_path, LLAMA | {"torch_dtype": "float16"}))
    assert {entry.dtype for entry in opened.source.entries.values()} == {"float16"}
    assert len(opened.source.entries) == 12


def test_saved_weights_are_not_made_up(tmp_path):
    folder = folder_with(tmp_path, **{"holdfast-weights": {}})
    with pytest.raises(UnsupportedModelError, match=r"load_format=dummy .*saved quantized.*leave load_format out"):
        open_directory_without_weights(folder)


@pytest.mark.parametrize("bad", [False, True])
def test_scales_that_are_exponents_alone(tmp_path, bad):
    """As newer fp8 checkpoints have them: F8_E8M0, which torch knows and Triton does not."""
    import torch
    from safetensors.torch import save_file

    from holdfast.loading.execution.execute import load_weights
    from holdfast.loading.planning.plan import plan_load
    from holdfast.memory.ledger import Ledger

    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 8}
    config = LLAMA | small | {"torch_dtype": "bfloat16", "tie_word_embeddings": True}
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    folder_with(tmp_path, config | {"quantization_config": stored})
    tensors = {}
    for entry in open_directory_without_weights(tmp_path).source.entries.values():
        tensors[entry.name] = torch.ones(entry.shape).to(getattr(torch, entry.dtype))
        if entry.name.endswith("_scale_inv"):
            exponents = torch.arange(len(tensors) % 3, 256, 50, dtype=torch.uint8)[: tensors[entry.name].numel()]
            tensors[entry.name] = exponents.view(torch.float8_e8m0fnu).view(entry.shape)
    down = tensors["model.layers.0.mlp.down_proj.weight_scale_inv"].view(torch.uint8)
    assert down.shape == (1, 2)
    down[0] = torch.tensor([0, 255 if bad else 254])
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_directory(tmp_path)
    plan = plan_load(opened.parameters, opened.source, "bfloat16", stored=opened.stored)
    if bad:
        with pytest.raises(ModelFormatError, match=r"down_proj.weight_scale_inv.* is not finite in row 0"):
            load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None)
        return
    weights = load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights
    assert weights["layers.0.down.weight"].scales.tolist() == [[2.0**-127, 2.0**127]]
    wanted = [tensors[f"model.layers.0.mlp.{half}_proj.weight_scale_inv"] for half in ("gate", "up")]
    assert torch.equal(weights["layers.0.gate_up.weight"].scales, torch.cat(wanted).float())


def test_the_type_of_the_weights_is_taken_from_them_where_the_config_is_silent(tmp_path):
    folder_with(tmp_path)
    write(tmp_path / "model.safetensors", {"a": ("BF16", [100]), "b": ("F32", [10])})
    assert open_directory(tmp_path).spec.checkpoint_dtype == "bfloat16"
    folder_with(tmp_path, LLAMA | {"torch_dtype": "float16"})
    assert open_directory(tmp_path).spec.checkpoint_dtype == "float16"


def test_opt_checkpoints_without_the_outer_prefix_are_understood(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny("opt", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    opened = open_directory(tmp_path)
    assert set(opened.source.entries) == set(tensors)


@pytest.mark.parametrize(
    ("generation", "config", "eos", "bos"),
    [
        (None, {}, (2,), 1),
        (None, {"eos_token_id": [7, 8], "bos_token_id": None}, (7, 8), None),
        ({"eos_token_id": [5, 6], "bos_token_id": 4}, {"eos_token_id": 9}, (5, 6), 4),
        ({"eos_token_id": 5}, {"bos_token_id": 3}, (5,), 3),
        ({}, {"eos_token_id": 9}, (9,), 1),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (), 1),
    ],
)
def test_end_tokens_come_from_the_generation_config_and_else_from_the_config(tmp_path, generation, config, eos, bos):
    files = {} if generation is None else {"generation_config": generation}
    defaults = generation_of(tmp_path, LLAMA | config, **files)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == (eos, bos)


def test_families_without_a_default_end_token_have_none(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 1}
    defaults = generation_of(tmp_path, config)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((), None)


def test_advice_for_sampling_is_kept(tmp_path):
    advice = {"temperature": 0, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    defaults = generation_of(tmp_path, generation_config=advice)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (0.0, 0.9, 20, 1.1)
    assert generation_of(tmp_path, generation_config={"top_k": None}).top_k is None


@pytest.mark.parametrize(
    ("generation", "word"),
    [
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": True}, "top_p"),
        ("[1]", "generation_config.json"),
    ],
    ids=str,
)
def test_a_broken_generation_config_is_refused(tmp_path, generation, word):
    with pytest.raises(ModelFormatError, match=r"generation_config\.json") as caught:
        generation_of(tmp_path, generation_config=generation)
    assert word in str(caught.value)


def test_a_config_behind_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "outside.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "config.json").symlink_to("../outside.json")
    with pytest.raises(ModelFormatError, match=r"config\.json is a link that leads out of model"):
        open_directory(tmp_path / "model")

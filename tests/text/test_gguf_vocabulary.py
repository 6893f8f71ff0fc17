"""Tokenizers of folders as GGUF metadata: the ids of the folder's tokenizer, or a refusal by name."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import UnsupportedModelError
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.model_files import find_default_model
from holdfast.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from holdfast.text.gguf_vocabulary import END_KEYS, gguf_vocabulary
from holdfast.text.tokenizer import tokenizer_from_directory
from text.test_gguf_tokenizer import few_spaces
from text.tokenizer_cases import FORMS, NASTY_TEXTS, RUNS, byte_level_metadata, gemma_metadata, write_folder

NUM_ROWS = 512


@pytest.fixture(scope="module")
def default() -> Mapping[str, object]:
    return read_gguf(find_default_model()).metadata


def folder_of(folder: Path, metadata: Mapping[str, object], **named: str) -> Path:
    """A folder with the tokenizer of this metadata, as tokenizer.json."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(metadata, "m").to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_gguf_vocabulary_of_the_default_model_is_what_its_file_holds(tmp_path, default):
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    folder = folder_of(tmp_path / "m", default, unk_token="<|endoftext|>", **named)
    (folder / "chat_template.jinja").write_text(str(default["tokenizer.chat_template"]))
    found = gguf_vocabulary(folder, "m", 49152, (2,))
    assert found.keys() - default.keys() == {"tokenizer.ggml.add_eos_token"}
    assert {key for key in default if key.startswith("tokenizer.")} - found.keys() == {
        "tokenizer.ggml.add_space_prefix"
    }
    for key in found.keys() & default.keys():
        assert (
            list(found[key]) == list(default[key]) if hasattr(default[key], "__len__") else found[key] == default[key]
        )


@for_each("name", [name for name in PRE_TOKENIZERS if name != "default"])
def test_gguf_vocabulary_names_the_way_of_splitting(tmp_path_factory, name):
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = folder_of(tmp_path_factory.mktemp("m") / "m", byte_level_metadata(pre=name), **named)
    found = gguf_vocabulary(folder, "m", NUM_ROWS, ())
    assert PRE_TOKENIZERS[str(found["tokenizer.ggml.pre"])] == PRE_TOKENIZERS[name]


WRITTEN = ("byte_level", "gemma")


@for_each("form", WRITTEN)
def test_gguf_vocabulary_gives_the_ids_of_the_folder(tmp_path_factory, form):
    folder = write_folder(tmp_path_factory.mktemp("m") / "m", form)
    theirs = tokenizer_from_directory(folder)
    metadata = gguf_vocabulary(folder, "m", NUM_ROWS, ())
    ours = tokenizer_from_gguf(metadata, "m")
    for text in NASTY_TEXTS.values():
        text = few_spaces(text) if form == "gemma" else text
        for adds in (True, False):
            ids = theirs.encode(text, adds)
            assert ours.encode(text, adds) == ids, text[:40]
            assert ours.decode(ids) == theirs.decode(ids), text[:40]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.vocab_size == NUM_ROWS


def test_gguf_vocabulary_pads_rows_without_a_token(tmp_path):
    folder = write_folder(tmp_path / "m", "byte_level")
    metadata = gguf_vocabulary(folder, "m", NUM_ROWS, ())
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert len(tokens) == len(list(kinds)) == NUM_ROWS  # type: ignore[arg-type]
    assert tokens[-1] == f"[PAD{NUM_ROWS - 1}]"
    assert kinds[-1] == 5  # type: ignore[index]
    with raises_code("quantize.tokenizer", UnsupportedModelError, model="m"):
        gguf_vocabulary(folder, "m", 40, ())


def test_gguf_vocabulary_gemma_has_scores_in_the_order_of_merges(tmp_path):
    metadata = gguf_vocabulary(write_folder(tmp_path / "m", "gemma"), "m", NUM_ROWS, ())
    theirs = gemma_metadata()
    for key in ("model", "add_space_prefix", "add_bos_token", "unknown_token_id", "bos_token_id", "eos_token_id"):
        assert metadata[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"], key
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))  # type: ignore[arg-type]
    pairs = json.loads(FORMS["gemma"]().to_str())["model"]["merges"]
    merged = [left + right for left, right in pairs if left + right not in RUNS]
    assert len(merged) > 50
    assert [scores[token] for token in merged] == sorted((scores[token] for token in merged), reverse=True)


REFUSED = {
    "byte_level_nfc": "splits text in a way of its own",
    "byte_fallback": "merges are other pairs",
    "byte_fallback_metaspace": "changes text by Metaspace",
    "unigram": "it is a Unigram",
    "word_level": "it is a WordLevel",
}


@for_each("form, reason", REFUSED.items())
def test_gguf_vocabulary_refuses_other_tokenizers_by_name(tmp_path_factory, form, reason):
    folder = write_folder(tmp_path_factory.mktemp("m") / "m", form)
    with raises_code("quantize.tokenizer", UnsupportedModelError, model="small") as caught:
        gguf_vocabulary(folder, "small", NUM_ROWS, ())
    assert reason in str(caught.value)


def changed(folder: Path, **changes: object) -> Path:
    """A byte-level tokenizer with other values in its tokenizer.json."""
    write_folder(folder, "byte_level")
    state = json.loads((folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        place = state
        *path, last = key.split("__")
        for name in path:
            place = place[int(name) if name.isdigit() else name]
        place[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


CHANGES: dict[str, dict[str, object]] = {
    "has lstrip": {"added_tokens__1__lstrip": True},
    "by ByteLevel, in a way of its own": {"pre_tokenizer__add_prefix_space": True},
    "have a prefix, a suffix or a dropout": {"model__end_of_word_suffix": "</w>"},
    "normalizes text otherwise": {"normalizer": {"type": "Lowercase"}},
    "splits text in a way of its own; those": {"model__ignore_merges": True},
    "in a way of its own": {"pre_tokenizer__use_regex": False},
    "adds other tokens than bos and eos": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [257], "tokens": ["<|im_start|>"]}},
        }
    },
}


@for_each("reason, changes", CHANGES.items())
def test_gguf_vocabulary_refuses_what_files_do_not_keep(tmp_path_factory, reason, changes):
    folder = changed(tmp_path_factory.mktemp("m") / "m", **changes)
    with raises_code("quantize.tokenizer", UnsupportedModelError) as caught:
        gguf_vocabulary(folder, "m", NUM_ROWS, ())
    assert reason in str(caught.value)


def test_gguf_vocabulary_takes_the_ends_of_the_model(tmp_path):
    """Tokens of plain text are left out: readers match end tokens whole in a text."""
    folder = write_folder(tmp_path / "m", "byte_level")
    tokenizer = tokenizer_from_directory(folder)
    own, start, text = (tokenizer.vocabulary_id(token) for token in ("<|im_end|>", "<|im_start|>", "hello"))
    assert own is not None and start is not None and text is not None  # noqa: PT018
    for given, expected in (
        ((), [own]),
        ((start, own), [own, start]),
        ((start,), [start]),
        ((text, start), [start]),
        ((text,), [own]),
    ):
        metadata = gguf_vocabulary(folder, "m", NUM_ROWS, given)
        ends = [metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
        assert ends == [*expected, None, None][:3], given
    write_folder(folder, "byte_level", eos_token=None)
    with raises_code("quantize.tokenizer", UnsupportedModelError):
        gguf_vocabulary(folder, "m", NUM_ROWS, (text,))

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, ModelFormatError, PromptError, UnsupportedModelError
from holdfast.text.tokenizer import Tokenizer, tokenizer_from_directory
from text.nasty_texts import NASTY_TEXTS
from text.tokenizer_folders import FORMS, NAMED, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {form: write_folder(root / form, form) for form in FORMS}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {form: tokenizer_from_directory(folder) for form, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]):
    from transformers import AutoTokenizer

    return {form: AutoTokenizer.from_pretrained(folder) for form, folder in folders.items()}


@pytest.mark.parametrize("text", NASTY_TEXTS.values(), ids=NASTY_TEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_tokenizes_as_in_transformers(form, text, ours, theirs):
    for adds_special in (True, False):
        token_ids = ours[form].encode(text, add_special_tokens=adds_special)
        assert token_ids == theirs[form].encode(text, add_special_tokens=adds_special)
        for skips in (True, False):
            expected = theirs[form].decode(token_ids, skip_special_tokens=skips)
            assert ours[form].decode(token_ids, skip_special_tokens=skips) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_knows_the_ids_that_transformers_knows(form, ours, theirs):
    assert ours[form].vocab_size == len(theirs[form])
    assert ours[form].bos_token_id == theirs[form].bos_token_id
    assert ours[form].eos_token_id == theirs[form].eos_token_id
    assert ours[form].special_token_ids >= set(theirs[form].all_special_ids)
    assert ours[form].end_token_ids == {theirs[form].eos_token_id}
    assert ours[form].special_tokens == theirs[form].special_tokens_map


@given(text=st.text(max_size=40))
def test_random_texts_tokenize_as_in_transformers(text, ours, theirs):
    for form in ("byte_level", "byte_fallback", "byte_fallback_metaspace"):
        token_ids = ours[form].encode(text)
        assert token_ids == theirs[form].encode(text)
        assert ours[form].decode(token_ids) == theirs[form].decode(token_ids, skip_special_tokens=True)


def test_a_folder_of_class_llama_tokenizes_as_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, "byte_fallback_metaspace", tokenizer_class="LlamaTokenizerFast", legacy=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    ours, theirs = tokenizer_from_directory(folder), AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__.startswith("Llama")
    for text in NASTY_TEXTS.values():
        assert ours.encode(text) == theirs.encode(text)


CONFIGS: dict[str, dict[str, object]] = {
    "flags by id": {
        "added_tokens_decoder": {
            "364": {"content": "<|endoftext|>", "special": True, "lstrip": True, "rstrip": True},
            "365": {"content": "<|im_start|>", "special": True},
            "366": {"content": "<|im_end|>", "special": False},
            "367": {"content": "<tool>", "special": False, "single_word": True, "normalized": False},
        }
    },
    "new tokens by id": {
        "added_tokens_decoder": {
            "369": {"content": "<b>", "special": False, "normalized": False},
            "368": {"content": "<a>", "special": True, "normalized": False},
        }
    },
    "new named token": {
        "pad_token": "<pad>",
        "mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"},
    },
    "extra tokens": {"extra_special_tokens": ["<x>", "<y>"]},
    "additional tokens": {"additional_special_tokens": ["<x>", "<|im_start|>"]},
    "extra tokens by name": {"extra_special_tokens": {"image_token": "<image>"}},
    "a token of its own name": {"image_token": "<image>"},
    "bos asked for": {"add_bos_token": True, "add_eos_token": True},
    "special tokens as text": {"split_special_tokens": True},
    "cleaning": {"clean_up_tokenization_spaces": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokenizer_config_is_understood_as_in_transformers(tmp_path, config):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, "byte_level", **config)
    ours, theirs = tokenizer_from_directory(folder), AutoTokenizer.from_pretrained(folder)
    texts = [*NASTY_TEXTS.values(), "a <x> <y><image> <pad>  <mask>  <a><b> <tool>s <tool> <|endoftext|>  b ."]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map


def test_special_tokens_map_and_added_tokens_are_understood_as_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path, "byte_level", eos_token="<|endoftext|>")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<pad>"})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 368, "<pad>": 369}))
    ours, theirs = tokenizer_from_directory(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token_id == theirs.eos_token_id == ours.encode("<|im_end|>")[0]
    for text in ("a <new> b<pad>", "<|im_end|> <|endoftext|>"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    "text", ["\ud800", "a\udfffb", "ok \ud83d", "\ude00\ud83d"], ids=["high", "low", "cut pair", "swapped pair"]
)
def test_half_a_surrogate_pair_is_refused_in_words(text, ours):
    with pytest.raises(PromptError, match="surrogate") as caught:
        ours["byte_level"].encode(text)
    assert "\n" not in str(caught.value)


def test_other_types_than_text_are_refused(ours):
    for value in (None, b"bytes", 3, ["a"]):
        with pytest.raises(PromptError, match="string"):
            ours["byte_level"].encode(value)


@pytest.mark.parametrize("form", FORMS)
def test_ids_without_a_token_add_nothing(form, ours):
    tokenizer = ours[form]
    known = tokenizer.encode("hello world", add_special_tokens=False)
    strange = [tokenizer.vocab_size, 2**31, 2**32, 2**70, -1]
    assert tokenizer.decode([*strange, *known, *strange]) == tokenizer.decode(known)
    assert [tokenizer.token_text(token_id) for token_id in strange] == [""] * len(strange)


def test_one_token_as_text(ours):
    byte_level, byte_fallback = ours["byte_level"], ours["byte_fallback"]
    space, part = byte_level.encode(" world"), byte_level.encode("é中😀")
    assert "".join(map(byte_level.token_text, space)) == " world"
    assert byte_level.token_text(byte_level.encode("<|im_end|>")[0]) == "<|im_end|>"
    assert all("\ufffd" in byte_level.token_text(byte) for byte in range(128, 256))
    assert "".join(map(byte_level.token_text, part)) == "é中😀"
    assert "".join(map(byte_fallback.token_text, byte_fallback.encode("the", add_special_tokens=False))) == " the"
    assert byte_fallback.token_text(3 + 0x41) == "A"
    assert byte_fallback.token_text(3 + 0xFF) == "\ufffd"


def test_broken_bytes_leave_the_characters_around_them(ours):
    tokenizer = ours["byte_fallback"]
    token_ids = [3 + byte for byte in "é😀".encode() + b"\xff" + "ñ".encode()]
    assert tokenizer.decode(token_ids) == "é😀\ufffdñ"


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    tokenizer = FORMS["byte_level"]()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "x y z q w e r t"
    assert tokenizer_from_directory(tmp_path).encode(text) == FORMS["byte_level"]().encode(text).ids


BROKEN = {
    "empty file": b"",
    "not json": b"{",
    "a list": b"[]",
    "no model": b"{}",
    "empty model": b'{"model": {}}',
    "not utf-8": b'{"version": "\xff"}',
    "unknown model": b'{"version": "1.0", "model": {"type": "Magic"}}',
    "merge of unknown tokens": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    "negative id": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "vocab of a wrong type": b'{"version": "1.0", "model": {"type": "BPE", "vocab": 7, "merges": []}}',
    "deep": b'{"a":' * 100_000,
    "broken regex": json.dumps(
        {
            "version": "1.0",
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False},
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        }
    ).encode(),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_tokenizer_is_one_line_that_names_the_file(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json") as caught:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


BROKEN_CONFIGS = {
    "not json": b"{",
    "a list": b"[]",
    "token of a wrong type": b'{"eos_token": 5}',
    "token without content": b'{"eos_token": {"lstrip": true}}',
    "flag of a wrong type": b'{"eos_token": {"content": "a", "lstrip": "yes"}}',
    "added tokens of a wrong type": b'{"added_tokens_decoder": []}',
    "added token without an id": b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
    "added token with a huge id": b'{"added_tokens_decoder": {"99999999999999": {"content": "a"}}}',
    "extra tokens of a wrong type": b'{"extra_special_tokens": 3}',
    "extra token of a wrong type": b'{"extra_special_tokens": [3]}',
}


@pytest.mark.parametrize("data", BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS)
def test_a_broken_config_is_one_line_that_names_the_file(tmp_path, data):
    write_folder(tmp_path, "byte_level")
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json") as caught:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(caught.value)


@given(data=st.data())
def test_mutated_files_give_a_tokenizer_or_an_error_of_ours(data, tmp_path_factory):
    text = json.dumps(json.loads(FORMS["word_level"]().to_str())).encode()
    place = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 8))
    mutant = text[:place] + data.draw(st.binary(max_size=8)) + text[place + length :]
    folder = tmp_path_factory.mktemp("mutant")
    (folder / "tokenizer.json").write_bytes(mutant)
    with suppress(HoldfastError):
        tokenizer = tokenizer_from_directory(folder)
        tokenizer.decode(tokenizer.encode("hello world"))


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ("tokenizer.model", "SentencePiece"),
        ("qwen.tiktoken", "tiktoken"),
        ("tekken.json", "tekken"),
        ("vocab.json", "merges"),
        ("config.json", "no tokenizer of another form"),
    ],
)
def test_a_missing_tokenizer_says_what_is_there_and_what_to_do(tmp_path, present, words):
    (tmp_path / present).write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json") as caught:
        tokenizer_from_directory(tmp_path)
    assert words in str(caught.value)
    assert "save_pretrained" in caught.value.do or "download" in caught.value.do


def test_a_decoder_that_cannot_stream_is_declined_in_words(tmp_path):
    from tokenizers import decoders

    tokenizer = FORMS["word_level"]()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        tokenizer_from_directory(tmp_path)


def test_a_panic_in_native_code_is_an_error_of_ours(ours, monkeypatch):
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode(self, *args, **kwargs):
            raise PanicException("index out of bounds")

    monkeypatch.setattr(ours["byte_level"], "_backend", Panicking())
    with pytest.raises(PromptError, match="index out of bounds"):
        ours["byte_level"].encode("a")


def test_importing_the_package_brings_neither_library():
    code = (
        "import sys, holdfast.text.tokenizer, holdfast.text.gguf_tokenizer, holdfast.text.chat_template;"
        "import holdfast.text.detokenizer, holdfast.text.stop_strings;"
        "print([name for name in ('tokenizers', 'jinja2', 'torch', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_forms_and_of_their_special_tokens_agree():
    assert NAMED.keys() == FORMS.keys()

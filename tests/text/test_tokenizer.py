"""Tokenizer: the ids of transformers for every form; special tokens; broken and missing files in one line."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, models, normalizers

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import HoldfastError, ModelFormatError, PromptError, UnsupportedModelError
from holdfast.text.tokenizer import (
    NO_BOUND,
    TokenEntry,
    Tokenizer,
    longest_token_chars,
    special_tokens_of,
    tokenizer_from_directory,
)
from text.tokenizer_cases import FORMS, NAMED, NASTY_TEXTS, write_folder


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


@for_each("text", NASTY_TEXTS.values())
@for_each("form", FORMS)
def test_tokenizer_from_directory_matches_transformers(form, text, ours, theirs):
    for adds_special in (True, False):
        token_ids = ours[form].encode(text, add_special_tokens=adds_special)
        assert token_ids == theirs[form].encode(text, add_special_tokens=adds_special)
        for skips in (True, False):
            expected = theirs[form].decode(token_ids, skip_special_tokens=skips)
            assert ours[form].decode(token_ids, skip_special_tokens=skips) == expected


@for_each("form", FORMS)
def test_tokenizer_special_ids_match_transformers(form, ours, theirs):
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


def test_tokenizer_from_directory_llama_class_matches(tmp_path):
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
    "bos requested": {"add_bos_token": True, "add_eos_token": True},
    "special tokens as text": {"split_special_tokens": True},
    "cleaning": {"clean_up_tokenization_spaces": True},
}


@for_each("config", CONFIGS.values())
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


def test_special_tokens_files_are_read_like_transformers(tmp_path):
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


@for_each("text", ["\ud800", "a\udfffb", "ok \ud83d", "\ude00\ud83d"])
def test_encode_half_a_surrogate_pair_is_refused(text, ours):
    with raises_code("tokenizer.not_unicode", PromptError) as caught:
        ours["byte_level"].encode(text)
    assert "\n" not in str(caught.value)


def test_encode_other_types_than_text_are_refused(ours):
    for value in (None, b"bytes", 3, ["a"]):
        with raises_code("value.not_string", PromptError):
            ours["byte_level"].encode(value)


@for_each("form", FORMS)
def test_decode_skips_ids_without_a_token(form, ours):
    tokenizer = ours[form]
    known = tokenizer.encode("hello world", add_special_tokens=False)
    strange = [tokenizer.vocab_size, 2**31, 2**32, 2**70, -1]
    assert tokenizer.decode([*strange, *known, *strange]) == tokenizer.decode(known)
    assert [tokenizer.token_text(token_id) for token_id in strange] == [""] * len(strange)


def test_token_text_of_one_token(ours):
    byte_level, byte_fallback = ours["byte_level"], ours["byte_fallback"]
    space, part = byte_level.encode(" world"), byte_level.encode("é中😀")
    assert "".join(map(byte_level.token_text, space)) == " world"
    assert byte_level.token_text(byte_level.encode("<|im_end|>")[0]) == "<|im_end|>"
    assert all("\ufffd" in byte_level.token_text(byte) for byte in range(128, 256))
    assert "".join(map(byte_level.token_text, part)) == "é中😀"
    assert "".join(map(byte_fallback.token_text, byte_fallback.encode("the", add_special_tokens=False))) == " the"
    assert byte_fallback.token_text(3 + 0x41) == "A"
    assert byte_fallback.token_text(3 + 0xFF) == "\ufffd"


def test_decode_broken_bytes_keep_the_characters_around_them(ours):
    tokenizer = ours["byte_fallback"]
    token_ids = [3 + byte for byte in "é😀".encode() + b"\xff" + "ñ".encode()]
    assert tokenizer.decode(token_ids) == "é😀\ufffdñ"


def test_tokenizer_disables_truncation_and_padding_of_the_file(tmp_path):
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


@for_each("data", BROKEN.values())
def test_tokenizer_broken_file_is_refused_in_one_line(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with raises_code("tokenizer.invalid", ModelFormatError) as caught:
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


@for_each("data", BROKEN_CONFIGS.values())
def test_tokenizer_broken_config_is_refused_in_one_line(tmp_path, data):
    write_folder(tmp_path, "byte_level")
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json") as caught:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(caught.value)


@given(data=st.data())
def test_tokenizer_mutated_file_is_opened_or_refused(data, tmp_path_factory):
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
        ("config.json", "no tokenizer of another format"),
    ],
)
def test_tokenizer_missing_error_names_files_present_and_a_fix(tmp_path, present, words):
    (tmp_path / present).write_bytes(b"x")
    with raises_code("tokenizer.missing", ModelFormatError) as caught:
        tokenizer_from_directory(tmp_path)
    assert words in str(caught.value)
    assert "save_pretrained" in str(caught.value) or "Download" in str(caught.value)


def test_tokenizer_unstreamable_decoder_is_refused(tmp_path):
    tokenizer = FORMS["word_level"]()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with raises_code("tokenizer.unsupported", UnsupportedModelError):
        tokenizer_from_directory(tmp_path)


def test_encode_native_panic_is_a_prompt_error():
    class PanicException(BaseException):
        pass

    class Panicking:
        def __init__(self, backend: NativeTokenizer) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> object:
            return getattr(self.backend, name)

        def encode(self, *args: object, **kwargs: object) -> None:
            raise PanicException("index out of bounds")

    tokenizer = Tokenizer(Panicking(FORMS["byte_level"]()), "tokenizer.json", {})
    with raises_code("tokenizer.encode_failed", PromptError):
        tokenizer.encode("a")


def test_text_modules_import_no_tokenizers_jinja2_or_torch():
    code = (
        "import sys, holdfast.text.tokenizer, holdfast.text.gguf_tokenizer, holdfast.text.chat_template;"
        "import holdfast.text.detokenizer, holdfast.text.stop_strings;"
        "print([name for name in ('tokenizers', 'jinja2', 'torch', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_special_tokens_cases_cover_each_form():
    assert NAMED.keys() == FORMS.keys()


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return special_tokens_of(folder)


def test_special_tokens_of_an_empty_folder_are_empty(tmp_path):
    tokens = special_tokens_of(tmp_path)
    assert (tokens.texts(), tokens.extra, tokens.added, tokens.are_plain_text) == ({}, (), None, False)


def test_special_tokens_are_read_from_strings_and_entries(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": True, "__type": "AddedToken"},
        "pad_token": None,
        "image_token": "<image>",
        "add_bos_token": True,
        "odd_token": {"no": "content"},
        "model_max_length": 1000000000000000019884624838656,
    }
    tokens = write(tmp_path, tokenizer_config=config)
    assert tokens.texts() == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    assert tokens.named["eos_token"].flags == {"lstrip": True}


def test_special_tokens_list_by_id_wins_over_the_map(tmp_path):
    entry = {"content": "<s>", "special": True, "rstrip": True}
    config = {"bos_token": "<s>", "added_tokens_decoder": {"5": entry}}
    tokens = write(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "<other>"})
    assert tokens.named["bos_token"] == tokens.added[5] == TokenEntry("<s>", {"special": True, "rstrip": True})


def test_special_tokens_map_wins_without_a_list(tmp_path):
    tokens = write(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        special_tokens_map={"eos_token": "<end>", "additional_special_tokens": ["<x>"]},
        added_tokens={"<end>": 7, "<word>": 8},
    )
    assert tokens.texts() == {"bos_token": "<s>", "eos_token": "<end>"}
    assert tokens.extra == (TokenEntry("<x>"),)
    assert tokens.added[7].flags["special"]
    assert not tokens.added[8].flags["special"]


def test_special_tokens_can_be_plain_text(tmp_path):
    assert write(tmp_path, tokenizer_config={"split_special_tokens": True}).are_plain_text


@for_each(
    "files",
    [
        {"tokenizer_config": {"bos_token": ["<s>"]}},
        {"tokenizer_config": {"extra_special_tokens": "<x>"}},
        {"tokenizer_config": {"added_tokens_decoder": {"1": "<s>"}, "x": 1, "bos_token": 2}},
        {"special_tokens_map": {"eos_token": 3}},
        {"added_tokens": {"<a>": "7"}},
        {"added_tokens": {"<a>": -1}},
        {"added_tokens": {"<a>": True}},
    ],
)
def test_special_tokens_wrong_types_are_refused(tmp_path, files):
    with raises_code("tokenizer.wrong_token", ModelFormatError):
        write(tmp_path, **files)


BOUNDED = ["byte_level", "byte_level_nfc", "byte_fallback", "byte_fallback_metaspace"]


@for_each("form", BOUNDED)
def test_longest_token_bounds_the_characters_of_a_text(form):
    tokenizer = FORMS[form]()
    longest = longest_token_chars(tokenizer)
    assert longest < 100
    for text in NASTY_TEXTS.values():
        assert len(text) <= longest * len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", BOUNDED)
@given(text=st.text(max_size=60))
def test_longest_token_bounds_random_texts(form, text):
    tokenizer = FORMS[form]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text) <= longest_token_chars(tokenizer) * len(ids)


def test_longest_token_counts_composed_characters():
    assert longest_token_chars(FORMS["byte_level_nfc"]()) == 4 * longest_token_chars(FORMS["byte_level"]())


@pytest.mark.parametrize("form", ["unigram", "word_level"])
def test_longest_token_of_unknown_words_is_unbounded(form):
    assert longest_token_chars(FORMS[form]()) == NO_BOUND


def test_longest_token_without_byte_tokens_is_unbounded():
    model = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    assert longest_token_chars(NativeTokenizer(model)) == NO_BOUND


@for_each(
    "normalizer, is_bounded",
    [
        (normalizers.NFKC(), True),
        (normalizers.Lowercase(), True),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]), True),
        (normalizers.Replace("  ", " "), False),
        (normalizers.Strip(), False),
        (normalizers.StripAccents(), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), False),
    ],
)
def test_longest_token_with_shrinking_normalizer_is_unbounded(normalizer, is_bounded):
    tokenizer = FORMS["byte_level"]()
    tokenizer.normalizer = normalizer
    assert (longest_token_chars(tokenizer) < NO_BOUND) == is_bounded

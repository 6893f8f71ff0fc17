"""TextStream: deltas add up to what decoding at once gives, for every decoder that can be streamed."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, models

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import UnsupportedModelError
from holdfast.text.detokenizer import TextStream, TokenPieces, byte_alphabet, decode_rule
from holdfast.text.tokenizer import Tokenizer, tokenizer_from_directory
from text.tokenizer_cases import FORMS, NASTY_TEXTS, write_folder


def stream_after(tokenizer, prompt=(), skip_special_tokens=True):
    stream = tokenizer.text_stream(skip_special_tokens)
    stream.follow(prompt)
    return stream


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {form: tokenizer_from_directory(write_folder(root / form, form)) for form in FORMS}


def chunked(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [token_ids[start:end] for start, end in pairwise(places)]


def token_ids(most: int = 400) -> st.SearchStrategy[list[int]]:
    """Any ids, those without a token too, and many bytes of broken characters."""
    bytes_ = st.sampled_from([0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC0, 0xED, 0xA0, 0xF5])
    return st.lists(st.one_of(st.integers(0, most), bytes_, bytes_.map(lambda byte: byte + 3)), max_size=24)


@pytest.mark.parametrize("form", FORMS)
@given(prompt=token_ids(), output=token_ids(), cuts=st.lists(st.integers(0, 99), max_size=6), skips=st.booleans())
def test_text_stream_deltas_add_up_to_decode(form, prompt, output, cuts, skips, tokenizers):
    tokenizer = tokenizers[form]
    detokenizer = stream_after(tokenizer, prompt, skips)
    deltas = [detokenizer.push(chunk) for chunk in chunked(output, cuts)] + [detokenizer.finish()]
    whole = tokenizer.text_stream(skips)
    before = whole.push(prompt)
    assert before + "".join(deltas) == tokenizer.decode([*prompt, *output], skips)


@pytest.mark.parametrize("form", ["byte_level", "byte_level_nfc"])
@given(prompt=st.text(max_size=12), output=token_ids(), skips=st.booleans())
def test_deltas_equal_the_native_decoder_for_any_bytes(form, prompt, output, skips, tokenizers):
    tokenizer = tokenizers[form]
    prompt_ids = tokenizer.encode(prompt)
    detokenizer = stream_after(tokenizer, prompt_ids, skips)
    text = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.finish()
    native = FORMS[form]()
    whole = native.decode([*prompt_ids, *output], skip_special_tokens=skips)
    assert native.decode(prompt_ids, skip_special_tokens=skips) + text == whole


@pytest.mark.parametrize("form", ["byte_fallback", "byte_fallback_metaspace", "unigram", "word_level"])
@given(prompt=st.text(max_size=12), output=token_ids(440), skips=st.booleans())
def test_deltas_equal_the_native_decoder_for_characters(form, prompt, output, skips, tokenizers):
    """Native byte tokens are characters only if a whole run of them is; here those around a broken byte survive."""
    tokenizer = tokenizers[form]
    prompt_ids = tokenizer.encode(prompt)
    native = FORMS[form]()
    whole = native.decode([*prompt_ids, *output], skip_special_tokens=skips)
    detokenizer = stream_after(tokenizer, prompt_ids, skips)
    text = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.finish()
    if "\ufffd" not in whole:
        assert native.decode(prompt_ids, skip_special_tokens=skips) + text == whole
    else:
        assert "\ufffd" in tokenizer.decode(prompt_ids, skips) + text


@pytest.mark.parametrize("form", FORMS)
@given(output=token_ids())
def test_text_stream_holds_at_most_one_character(form, output, tokenizers):
    tokenizer = tokenizers[form]
    detokenizer = stream_after(tokenizer)
    given_out = ""
    for count, token_id in enumerate(output, 1):
        given_out += detokenizer.push([token_id])
        so_far = tokenizer.decode(output[:count])
        assert so_far.startswith(given_out)
        assert so_far[len(given_out) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


@for_each("text", NASTY_TEXTS.values())
@for_each("form", ["byte_level", "byte_fallback", "byte_fallback_metaspace"])
def test_text_stream_sound_text_shows_no_replacement(form, text, tokenizers):
    tokenizer = tokenizers[form]
    detokenizer = stream_after(tokenizer, skip_special_tokens=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = [detokenizer.push([token_id]) for token_id in token_ids]
    assert detokenizer.finish() == ""
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert ("\ufffd" in "".join(deltas)) == ("\ufffd" in text)


def test_text_stream_emits_a_character_with_its_last_byte(tokenizers):
    detokenizer = stream_after(tokenizers["byte_level"], [0x61])
    assert [detokenizer.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_text_stream_completes_a_character_of_the_prompt(tokenizers):
    start, end = "😀".encode()[:2], "😀".encode()[2:]
    detokenizer = stream_after(tokenizers["byte_level"], [0x61, *start])
    assert detokenizer.push(list(end)) == "😀"
    left_out = 3 * tokenizers["byte_level"].encode("<|im_end|>")
    detokenizer = stream_after(tokenizers["byte_level"], [0x61, *start, *left_out])
    assert detokenizer.push(list(end)) == "😀", "tokens that are left out are no context"


@for_each("num_bytes", [1, 2, 3])
@for_each("form", ["byte_level", "byte_fallback"])
def test_text_stream_after_a_partial_character_counts_each_byte(form, num_bytes, tokenizers):
    """The prompt ends after one, two or three bytes of a character of four, each a token of its own."""
    first = 0 if form == "byte_level" else 3
    data = [first + byte for byte in "a😀".encode()]
    prompt, rest = data[: 1 + num_bytes], data[1 + num_bytes :]
    detokenizer = stream_after(tokenizers[form], prompt)
    assert "".join(detokenizer.push([token_id]) for token_id in rest) + detokenizer.finish() == "😀"


def test_text_stream_finish_shows_an_unfinished_character(tokenizers):
    detokenizer = stream_after(tokenizers["byte_level"])
    assert detokenizer.push([0x61, *"😀".encode()[:3]]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_text_stream_keeps_leading_space_only_after_a_prompt(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    word = tokenizer.encode("hello", add_special_tokens=False)
    assert stream_after(tokenizer, tokenizer.encode("the")).push(word) == " hello"
    assert stream_after(tokenizer, []).push(word) == "hello"
    assert stream_after(tokenizer, [1]).push(word) == "hello"
    assert stream_after(tokenizer, [1], skip_special_tokens=False).push(word) == " hello"


def test_special_tokens_are_left_out_or_written(tokenizers):
    tokenizer = tokenizers["byte_level"]
    output = tokenizer.encode("a<|im_end|>b<tool>")
    assert stream_after(tokenizer, []).push(output) == "ab<tool>"
    assert stream_after(tokenizer, [], skip_special_tokens=False).push(output) == "a<|im_end|>b<tool>"


def test_text_stream_looks_up_each_token_once(tokenizers, monkeypatch):
    tokenizer, looked_up = tokenizers["byte_level"], []
    piece = TokenPieces.piece

    def counting(self, token_id):
        looked_up.append(token_id)
        return piece(self, token_id)

    monkeypatch.setattr(TokenPieces, "piece", counting)
    detokenizer = stream_after(tokenizer, [0x61] * 1_000_000)
    assert len(looked_up) <= 32
    looked_up.clear()
    for _ in range(5000):
        detokenizer.push([0x62])
    assert len(looked_up) == 5000


TOKENS = [
    *("a", "b", "é", "中", "😀", " ", "  ", "▁", "▁▁", "▁the", "x▁y", "▁▁z▁", "<0xC3>", "<0xA9>", "<0xa9>", "<0xF0>"),
    *("<0x41>", "<0xGG>", "<0x123>", "Ġ", "Ġw", "Ã", "©", "Ã©", "ð", "Ł", "ĺ", "Ģ", "Ċ", "\x00", "\n", "<s>"),
]
DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "metaspace always": decoders.Metaspace(),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "other metaspace": decoders.Metaspace(replacement="é"),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "two strips": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "bytes": decoders.ByteFallback(),
    "fuse": decoders.Fuse(),
    "replace": decoders.Replace("a", "bb"),
    "replacements": decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace(" ", "_")]),
    "nested": decoders.Sequence([decoders.Sequence([decoders.Replace("▁", " ")]), decoders.Fuse()]),
}
DECLINED = {
    "word piece": decoders.WordPiece(),
    "bpe suffix": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "strip of each token": decoders.Strip(" ", 1, 0),
    "strip at the end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "replace of the whole": decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
    "bytes after bytes": decoders.Sequence([decoders.ByteFallback(), decoders.ByteFallback()]),
}


def native_tokenizer(decoder) -> NativeTokenizer:
    tokenizer = NativeTokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def state(decoder) -> bytes | None:
    return None if decoder is None else decoder.__getstate__()


@for_each("decoder", DECODERS.values())
def test_text_stream_pieces_join_to_the_native_text(decoder):
    tokenizer = native_tokenizer(decoder)
    pieces = TokenPieces(tokenizer.id_to_token, decode_rule(state(decoder), "x"), frozenset())
    chance = random.Random(1)
    for _ in range(1500):
        ids = chance.choices(range(len(TOKENS) + 1), k=chance.randint(0, 7))
        stream = TextStream(pieces, skip_special_tokens=False)
        text = "".join(stream.push([token_id]) for token_id in ids) + stream.finish()
        expected = tokenizer.decode(ids)
        # A run of byte tokens with a broken one is all broken for the native decoder.
        if "\ufffd" not in expected or decoder is None or isinstance(decoder, decoders.ByteLevel):
            assert text == expected, [TOKENS[i] for i in ids if i < len(TOKENS)]


@for_each("decoder", DECLINED.values())
def test_decode_rule_unstreamable_decoder_is_refused(decoder):
    with raises_code("tokenizer.unsupported", UnsupportedModelError):
        decode_rule(state(decoder), "tokenizer.json")


def test_byte_alphabet_matches_transformers():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_alphabet() == {character: byte for byte, character in bytes_to_unicode().items()}


def test_text_stream_broken_bytes_match_the_native_decoder():
    """Broken characters: one U+FFFD for each longest part that could have begun a character."""
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    tokenizer = NativeTokenizer(models.WordLevel({alphabet[byte]: byte for byte in range(256)}, unk_token="!"))
    tokenizer.decoder = decoders.ByteLevel()
    pieces = TokenPieces(tokenizer.id_to_token, decode_rule(state(decoders.ByteLevel()), "x"), frozenset())
    leads = [0x41, 0x80, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xA0, 0x9F, 0xED, 0xEF, 0xF0, 0x90, 0x8F, 0xF4, 0xF5, 0xFF]
    for first in leads:
        for second in leads:
            for third in leads:
                for fourth in (0x41, 0x80, 0xBF, 0xF0):
                    data = [first, second, third, fourth]
                    stream = TextStream(pieces, skip_special_tokens=False)
                    text = "".join(stream.push([byte]) for byte in data) + stream.finish()
                    assert text == tokenizer.decode(data) == bytes(data).decode(errors="replace")

import random

import pytest
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import decoders, models

from holdfast.errors import UnsupportedModelError
from holdfast.text.detokenizer import TextStream, TokenPieces, byte_alphabet, decode_rule

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


def native(decoder) -> NativeTokenizer:
    tokenizer = NativeTokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def state(decoder) -> bytes | None:
    return None if decoder is None else decoder.__getstate__()


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_pieces_join_to_what_the_native_decoder_writes(decoder):
    tokenizer = native(decoder)
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


@pytest.mark.parametrize("decoder", DECLINED.values(), ids=DECLINED)
def test_decoders_that_cannot_be_streamed_are_declined(decoder):
    with pytest.raises(UnsupportedModelError, match="known here"):
        decode_rule(state(decoder), "tokenizer.json")


def test_every_byte_has_a_printable_character_of_its_own():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_alphabet() == {character: byte for byte, character in bytes_to_unicode().items()}


def test_any_bytes_read_as_rust_reads_them():
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

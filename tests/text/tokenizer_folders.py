"""Small tokenizers of every form that models come with, written into folders as a model's files."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from holdfast.text.detokenizer import byte_alphabet

WORDS = [
    "hello",
    "world",
    "this",
    "is",
    "a",
    "test",
    "the",
    "capital",
    "of",
    "france",
    "user",
    "return",
    "é",
    "ñ",
    "中",
    "文",
    "😀",
    "12",
    "'",
]


def merged(words: list[str], known: dict[str, int]) -> list[tuple[str, str]]:
    """Merges that build each word from the left; new pieces enter the vocabulary."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        left = word[0]
        for right in word[1:]:
            known.setdefault(left + right, len(known))
            merges[left, right] = None
            left += right
    return list(merges)


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen and Llama 3: bytes spelled in a printable alphabet; some tokens are parts of characters."""
    spell = {byte: character for character, byte in byte_alphabet().items()}
    vocab = {spell[byte]: byte for byte in range(256)}
    spelled = ["".join(spell[byte] for byte in text.encode()) for word in WORDS for text in (word, " " + word)]
    merges = merged(spelled, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def byte_level_nfc() -> Tokenizer:
    """As Qwen: the same with composed characters."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: pieces with ▁ for spaces, bytes for what is unknown, bos before every text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for character in sorted({*"▁", *"".join(WORDS), *map(chr, range(33, 127))}):
        vocab.setdefault(character, len(vocab))
    vocab.setdefault("▁▁", len(vocab))
    merges = [("▁", "▁"), *merged([text for word in WORDS for text in (word, "▁" + word)], vocab)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def byte_fallback_metaspace() -> Tokenizer:
    """As newer Mistral models: the space before a text comes from Metaspace, at its start only."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: scored pieces, and the decoder that belongs to Metaspace."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁▁", -3.0)]
    pieces += [("▁" + word, -1.0 - index / 100) for index, word in enumerate(WORDS)]
    pieces += [(chr(code), -9.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words, joined with spaces."""
    vocab = {word: index for index, word in enumerate(["[UNK]", *WORDS, ".", ","])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "</s>"])
    return tokenizer


FORMS: dict[str, Callable[[], Tokenizer]] = {
    form.__name__: form
    for form in (byte_level, byte_level_nfc, byte_fallback, byte_fallback_metaspace, unigram, word_level)
}
NAMED: dict[str, dict[str, object]] = {
    "byte_level": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "byte_level_nfc": {"bos_token": None, "eos_token": "<|im_end|>"},
    "byte_fallback": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "byte_fallback_metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "unigram": {"eos_token": "</s>", "unk_token": "<unk>"},
    "word_level": {"eos_token": "</s>", "unk_token": "[UNK]"},
}


def write_folder(folder: Path, form: str, **config: object) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    FORMS[form]().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[form], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

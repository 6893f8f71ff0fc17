"""Tokenizers of every form that models come with, as folders and as GGUF metadata, and texts that they trip over."""

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


RUNS = [character * length for length in (2, 3, 4) for character in ("▁", "\n")]
"""White space that a Gemma has tokens for; more of the same is several of them."""


def gemma_pieces() -> list[str]:
    """Best first: whatever is a piece of a word is a piece, and runs of white space come before all words."""
    words = [text for word in WORDS for text in (word, "▁" + word)]
    return [*RUNS, *dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1))]


def gemma() -> Tokenizer:
    """As Gemma: ▁ for spaces and none before a text, bytes for what is unknown, every way to merge a piece, turns of a chat."""
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    pieces = gemma_pieces()
    for piece in (*pieces, *sorted({*"▁\n", *"".join(WORDS), *map(chr, range(33, 127))})):
        vocab.setdefault(piece, len(vocab))
    cuts = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(len(piece) - 1, 0, -1)]
    merges = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"])
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in ("\n", *RUNS)])
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
    for form in (byte_level, byte_level_nfc, byte_fallback, byte_fallback_metaspace, gemma, unigram, word_level)
}
NAMED: dict[str, dict[str, object]] = {
    "byte_level": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "byte_level_nfc": {"bos_token": None, "eos_token": "<|im_end|>"},
    "byte_fallback": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "byte_fallback_metaspace": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
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


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level_metadata(**fields: object) -> dict[str, object]:
    """The byte-level tokenizer above, as a GGUF file would hold it."""
    state = json.loads(FORMS["byte_level"]().to_str())
    vocab = {**state["model"]["vocab"], **{token["content"]: token["id"] for token in state["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": vocab["<|im_start|>"],
        "eos_token_id": vocab["<|im_end|>"],
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


SCORED_WORDS = [
    "▁hello",
    "▁world",
    "▁the",
    "▁they",
    "th",
    "he",
    "the",
    "ll",
    "lo",
    "hell",
    "▁w",
    "or",
    "ld",
    "aa",
    "aaa",
    "▁▁",
    "▁▁▁",
]


def scored_metadata(**fields: object) -> dict[str, object]:
    """A SentencePiece vocabulary: control tokens, bytes, pieces by falling score, single characters last."""
    pieces = sorted(
        {piece[:end] for piece in SCORED_WORDS for end in range(2, len(piece) + 1)}, key=lambda p: (-len(p), p)
    )
    characters = sorted({*"".join(SCORED_WORDS), *map(chr, range(33, 127))} - {"<"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * (len(tokens) - 259))]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)],
        "token_type": kinds,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


def gemma_metadata(**fields: object) -> dict[str, object]:
    """The Gemma-like tokenizer above, as a conversion writes it: runs of white space are spelled out, and user-defined."""
    state, pieces = json.loads(FORMS["gemma"]().to_str()), gemma_pieces()
    vocab = {**state["model"]["vocab"], **{token["content"]: token["id"] for token in state["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    kinds |= {f"<0x{byte:02X}>": BYTE for byte in range(256)} | {"<unk>": UNKNOWN}
    scores = {piece: -float(index) for index, piece in enumerate(pieces)}
    is_run = [kinds.get(token) == USER_DEFINED for token in tokens]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": [token.replace("▁", " ") if run else token for token, run in zip(tokens, is_run, strict=True)],
        "scores": [-1000.0 if run else scores.get(t, -900.0) for t, run in zip(tokens, is_run, strict=True)],
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "unknown_token_id": vocab["<unk>"],
        "padding_token_id": vocab["<pad>"],
        "bos_token_id": vocab["<bos>"],
        "eos_token_id": vocab["<eos>"],
        "eot_token_id": vocab["<end_of_turn>"],
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": False,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


NASTY_TEXTS = {
    "empty": "",
    "plain": "Hello world, this is a test.",
    "leading space": " hello",
    "two leading spaces": "  hello",
    "trailing space": "hello ",
    "only spaces": "     ",
    "tabs and newlines": "\ta\n\n b\r\n\r\tc \n",
    "nul": "a\x00b\x00",
    "controls": "\x01\x02\x1b[31mred\x7f",
    "digits": "1 12 123 1234567890 3.14 1,000 007",
    "contractions": "I'll don't we've it's I'M HE'LL 's'",
    "code": "def f(x):\n    return {'a': [x**2 for x in range(10)]}\n\n\n",
    "emoji": "😀👍🏽🏳️‍🌈",
    "zwj family": "👩‍👩‍👧‍👦 and 👨🏿‍🚀",
    "flags": "🇫🇷🇩🇪🇯🇵",
    "combining": "e\u0301 n\u0303 a\u0308\u0304 \u0301alone",
    "zalgo": "Z̴̢̛̩͎̺͔̹̹̼̥͛̓̐̊̅͜a̸l̴g̵o̶",
    "precomposed": "é ñ ǟ",
    "hangul jamo": "한국 한국",
    "rtl": "שלום עולם مرحبا بالعالم",
    "bidi marks": "\u202eabc\u202c \u200fdef\u200e",
    "cjk": "中文字符，日本語のテキスト。한국어",
    "thai": "ภาษาไทยไม่มีช่องว่าง",
    "devanagari": "नमस्ते दुनिया",
    "math": "∑∫√∞ ≠ ≤ ½ ² ₃ Ⅳ ٣",
    "astral": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "replacement": "\ufffd \ufffd\ufffd",
    "noncharacters": "\ufffe\uffff\ufdd0",
    "bom": "\ufeffstart",
    "odd spaces": "a\u00a0b\u2003c\u200bd\u3000e\u2028f\u2029g\x85h",
    "metaspace mark": "▁ ▁▁a▁b",
    "byte alphabet": "Ġ Ċ Ã© ĠĠ",
    "byte token text": "<0x41><0xFF><0x0A>",
    "special token text": "a <|im_start|>user\nhi<|im_end|> b <s>x</s> [UNK] <unk>",
    "special glued": "<s><s>a</s></s>",
    "almost special": "<|im_start| >< s> <S> </s",
    "long run": "a" * 5000,
    "long spaces": " " * 3000 + "x",
    "long newlines": "\n" * 2000,
    "long word": "supercalifragilistic" * 200,
    "long emoji": "😀" * 500,
    "mixed": "Ünïcödé – “quotes” …\t→ ✓ 100% <b>bold</b> &amp; \\n",
}

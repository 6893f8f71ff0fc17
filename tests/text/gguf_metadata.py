"""Metadata of GGUF tokenizers: the default model's, and small ones made up here."""

from text.tokenizer_folders import FORMS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level_metadata(**fields: object) -> dict[str, object]:
    """The byte-level tokenizer of `tokenizer_folders`, as a GGUF file would hold it."""
    import json

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

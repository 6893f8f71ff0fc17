"""Writes a folder's tokenizer as GGUF metadata, the inverse of text/gguf_tokenizer.py, and a file's as a folder's; no torch.

GGUF files name one of a few ways to split text, and keep no other code. So a tokenizer is compared with those, written,
read back, and must then give the same ids for the probe texts. Others are refused.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import ModelError, UnsupportedModelError
from holdfast.loading.writing.gguf_header import GGUFValue
from holdfast.text.chat_template import TEMPLATE_FILE, chat_template_from_directory, chat_template_from_gguf
from holdfast.text.gguf_tokenizer import (
    CONTROL,
    PRE_TOKENIZERS,
    PREFIX,
    SPACE_MARK,
    UNKNOWN,
    USER_DEFINED,
    PreTokenizer,
    tokenizer_from_gguf,
)
from holdfast.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer, tokenizer_from_directory

NORMAL, UNUSED, BYTE = 1, 5, 6
"""Other values of token_type."""
DEFAULT_NAME = "default"
"""Not written: llama.cpp warns of it."""
PROBES = (
    "Hello world, it's 12345 and 3.14! I'LL say 'no'... (x**2) [a] {b} <c>",
    "def f(x):\n\treturn {'a': x}\n\n\n  # two  spaces,   three\r\n\r\n end ",
    "  é ñ e\u0301 中文字符，日本語のテキスト。한국어 😀👍🏽 ٣ ½ Ⅳ שלום นี่ \u00a0\u200b\ufeff",
    "ALLCAPS camelCase snake_case 1,000,000 007 " + "a" * 40 + " " * 4 + "x" + "\n" * 3,
    "<0x41> ĠĊ </s> [UNK] <|x|> \x00\x1b",
)
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_KEYS = {"bos_token": "bos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


class _RefusalError(Exception):
    """Why a tokenizer cannot be written; becomes an error that names the model."""


class _State(NamedTuple):
    """A tokenizer.json."""

    model: Mapping[str, Any]
    normalizers: list[Mapping[str, Any]]
    pre_tokenizers: list[Mapping[str, Any]]
    added: Sequence[Mapping[str, Any]]

    @property
    def is_scored(self) -> bool:
        """True for SentencePiece's BPE, whose merges follow from scores."""
        return bool(self.model.get("byte_fallback"))

    @property
    def free_merges(self) -> set[tuple[str, str]]:
        """Merges of pieces that are not matched whole before."""
        whole = {token["content"] for token in self.added}
        whole |= {text.replace(" ", SPACE_MARK) for text in whole}
        return {(left, right) for left, right in self.merges if not whole & {left, right, left + right}}

    @property
    def merges(self) -> Iterator[tuple[str, str]]:
        for merge in self.model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            yield left, right


def gguf_vocabulary(folder: Path, model: str, num_rows: int, end_ids: Sequence[int]) -> dict[str, GGUFValue]:
    """Return the metadata of a folder's tokenizer. `num_rows` are those of the embedding; `end_ids` end an answer."""
    tokenizer = tokenizer_from_directory(folder)
    try:
        state = _read_state(tokenizer)
        metadata = {PREFIX + name: value for name, value in _values(tokenizer, state, num_rows, end_ids).items()}
        _compare(tokenizer, state, metadata, model)
    except _RefusalError as refusal:
        raise UnsupportedModelError("quantize.tokenizer", model=model, reason=refusal) from None
    template = chat_template_from_directory(folder)
    return metadata if template is None else metadata | {"tokenizer.chat_template": template.source}


def tokenizer_files(metadata: Mapping[str, object], model: str) -> dict[str, str]:
    """Return the texts of a folder's files, by name, for the tokenizer and the template of a GGUF file."""
    tokenizer = tokenizer_from_gguf(metadata, model)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    files = {TOKENIZER_FILE: tokenizer.to_json(), CONFIG_FILE: f"{json.dumps(named, indent=2)}\n"}
    template = chat_template_from_gguf(metadata, model)
    return files if template is None else files | {TEMPLATE_FILE: template.source}


def _read_state(tokenizer: Tokenizer) -> _State:
    state = json.loads(tokenizer.to_json())
    normalizers = _flat(state["normalizer"], "normalizers")
    pre_tokenizers = _flat(state["pre_tokenizer"], "pretokenizers")
    return _State(state["model"], normalizers, pre_tokenizers, state["added_tokens"])


def _flat(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a sequence, or the one step."""
    if step is None:
        return []
    return [one for inner in step[key] for one in _flat(inner, key)] if step["type"] == "Sequence" else [step]


def _values(tokenizer: Tokenizer, state: _State, num_rows: int, end_ids: Sequence[int]) -> dict[str, GGUFValue]:
    kind = state.model["type"]
    if kind != "BPE":
        raise _RefusalError(f"it is a {kind}, and byte-level BPE and SentencePiece's BPE are written")
    if state.model.get("dropout") or any(state.model.get(key) for key in _AFFIXES):
        raise _RefusalError("its pieces have a prefix, a suffix or a dropout")
    tokens, types = _tokens(state, num_rows)
    values: dict[str, GGUFValue] = {"model": "llama" if state.is_scored else "gpt2"}
    if state.is_scored:
        values["pre"] = DEFAULT_NAME
        values["add_space_prefix"] = _has_space_prefix(state)
        values["scores"] = _scores(state, tokens)
    else:
        values["pre"] = _pre_tokenizer_name(state)
        values["merges"] = [f"{left} {right}" for left, right in state.merges]
    values |= {"tokens": tokens, "token_type": array("i", types)}
    for name, key in NAMED_KEYS.items():
        text = tokenizer.special_tokens.get(name)
        token_id = None if text is None else tokenizer.vocabulary_id(text)
        if token_id is not None:
            values[key] = token_id
    values |= dict(zip(END_KEYS, _ends(tokenizer, state, end_ids), strict=False))
    return values | _ends_added(tokenizer)


_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def _ends(tokenizer: Tokenizer, state: _State, end_ids: Sequence[int]) -> list[int]:
    """Return the special tokens that end an answer, the tokenizer's own first unless the model leaves it out.

    Readers of GGUF files match end tokens whole in a text, so a token of plain text cannot be one.
    """
    special = {token["id"] for token in state.added if token["special"]}
    ends = [token_id for token_id in end_ids if token_id in special]
    own = tokenizer.eos_token_id
    if own is not None and (not ends or own in ends):
        ends = [own, *(token_id for token_id in ends if token_id != own)]
    if end_ids and not ends:
        raise _RefusalError(f"the token {end_ids[0]} that ends an answer is not a special one")
    return ends


def _tokens(state: _State, num_rows: int) -> tuple[list[str], list[int]]:
    """Return texts and types of all ids; rows without a token are padded, as llama.cpp does."""
    for token in state.added:
        flag = next((flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]), None)
        if flag is not None:
            raise _RefusalError(f"its token {token['content']!r} has {flag}")
    texts = {token_id: text for text, token_id in state.model["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in state.added}
    if max(texts, default=0) >= num_rows:
        raise _RefusalError(f"it has the token {max(texts)}, and the embedding has {num_rows} rows")
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(num_rows)]
    types = [NORMAL if token_id in texts else UNUSED for token_id in range(num_rows)]
    if state.is_scored:
        bytes_of = {f"<0x{byte:02X}>" for byte in range(256)}
        types = [BYTE if token in bytes_of else kind for token, kind in zip(tokens, types, strict=True)]
    for token in state.added:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        if state.is_scored and not token["special"]:
            # Such tokens are matched in text whose spaces are still spaces.
            tokens[token["id"]] = token["content"].replace(SPACE_MARK, " ")
    unknown = state.model["vocab"].get(state.model.get("unk_token"))
    if unknown is not None:
        types[unknown] = UNKNOWN
    return tokens, types


def _pre_tokenizer_name(state: _State) -> str:
    """Return the name of the way in which the tokenizer splits text."""
    way = PreTokenizer(
        split=_split_pattern(state.pre_tokenizers),
        single_digits=any(step["type"] == "Digits" for step in state.pre_tokenizers),
        nfc=[step["type"] for step in state.normalizers] == ["NFC"],
        ignore_merges=bool(state.model.get("ignore_merges")),
    )
    if state.normalizers and not way.nfc:
        raise _RefusalError("it normalizes text otherwise than to NFC")
    for name, known in PRE_TOKENIZERS.items():
        if name != DEFAULT_NAME and replace(known, add_bos=False) == way:
            return name
    accepted = ", ".join(name for name in PRE_TOKENIZERS if name != DEFAULT_NAME)
    raise _RefusalError(f"it splits text in a way of its own; those written are {accepted}")


def _split_pattern(steps: list[Mapping[str, Any]]) -> str | None:
    """Return the pattern before the byte level; None if that splits as GPT-2 does. Other steps are refused."""
    kinds = [step["type"] for step in steps]
    pattern = None
    for step in steps:
        if step["type"] == "Split" and (step["behavior"], step["invert"]) == ("Isolated", False):
            pattern = step["pattern"].get("Regex")
    last = steps[-1] if steps else {}
    known = (["ByteLevel"], ["Digits", "ByteLevel"], ["Split", "ByteLevel"])
    if kinds not in known or last["add_prefix_space"] or last["use_regex"] != (pattern is None):
        raise _RefusalError(f"it splits text by {', '.join(kinds) or 'nothing'}, in a way of its own")
    if "Digits" in kinds and not steps[0]["individual_digits"]:
        raise _RefusalError("it splits text at runs of digits")
    return pattern


def _has_space_prefix(state: _State) -> bool:
    """Return True if a space goes before every text; refuse other changes of text."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prefix = {"type": "Prepend", "prepend": SPACE_MARK}
    before_spaces = [step for step in state.pre_tokenizers if step.get("pattern") != {"String": " "}]
    if before_spaces or state.normalizers not in ([spaces], [prefix, spaces]):
        steps = [step["type"] for step in (*state.normalizers, *before_spaces)]
        raise _RefusalError(f"it changes text by {', '.join(steps) or 'nothing'}; spaces must become {SPACE_MARK}")
    return prefix in state.normalizers


def _scores(state: _State, tokens: Sequence[str]) -> array:
    """Return scores that give the merges in their order; they are those of the tokens that they make."""
    made = [token for token, _ in groupby(left + right for left, right in state.merges)]
    ranks = {token: rank for rank, token in enumerate(made)}
    if len(ranks) != len(made):
        raise _RefusalError("its merges are in an order that no scores give")
    known = {token for token in tokens if token not in ranks}
    last = len(ranks)
    return array("f", [float(-ranks[token]) if token not in known else float(-last) for token in tokens])


def _ends_added(tokenizer: Tokenizer) -> dict[str, GGUFValue]:
    """Return whether bos goes before a text and eos after it; refuse anything else there."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    starts = len(whole) > len(bare) and whole[0] == tokenizer.bos_token_id
    ends = len(whole) > len(bare) + starts and whole[-1] == tokenizer.eos_token_id
    if whole[starts : len(whole) - ends] != bare:
        raise _RefusalError("it adds other tokens than bos and eos to a text")
    return {"add_bos_token": starts, "add_eos_token": ends}


def _compare(tokenizer: Tokenizer, state: _State, metadata: Mapping[str, GGUFValue], model: str) -> None:
    """Read the metadata back, and compare merges and the ids of texts."""
    try:
        written = tokenizer_from_gguf(metadata, model)
    except ModelError as error:
        raise _RefusalError(f"written, it is not read: {error.message}") from error
    # Readers of scores merge every pair of pieces that makes a piece.
    if state.is_scored and _read_state(written).free_merges != state.free_merges:
        raise _RefusalError("its merges are other pairs than those of its pieces that make a piece")
    whole = [token["content"] for token in state.added]
    special = "".join(f" {text}x" for text in whole if SPACE_MARK not in text and text.strip())
    for text in (*PROBES, special):
        for adds in (True, False):
            if written.encode(text, adds) != tokenizer.encode(text, adds):
                raise _RefusalError(f"written, it gives other ids for {text[:24]!r}")

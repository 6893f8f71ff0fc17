"""The tokenizer in a GGUF file's metadata: byte-level BPE and SentencePiece-style vocabularies; no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.text.tokenizer import BY_IDS, Tokenizer, native_calls

if TYPE_CHECKING:
    import tokenizers

PREFIX = "tokenizer.ggml."
FIX = f"Name a folder with tokenizer.json of the same model as tokenizer, or {BY_IDS}"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of token_type for tokens matched whole in a text; the last is not special."""
SPACE_MARK = "▁"
MAX_SCORED_TOKEN_CHARS = 512
"""Longest token of a vocabulary with scores: each is split at every position to find its merges."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Splits text for byte-level BPE before its merges, with llama.cpp's defaults."""

    split: str | None = None
    """Pattern whose matches are the pieces; None: GPT-2's."""
    single_digits: bool = False
    """True to first split around every digit."""
    nfc: bool = False
    ignore_merges: bool = False
    """True to keep a piece that is a token whole, whatever the merges."""
    add_bos: bool = False


_DATA = resources.files("holdfast").joinpath("data", "pre_tokenizers.json").read_text(encoding="utf-8")
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: PreTokenizer(**row) for name, row in json.loads(_DATA).items()}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


def tokenizer_from_gguf(metadata: Mapping[str, object], file_name: str) -> Tokenizer:
    """Make the tokenizer of the metadata; `file_name` is for messages."""
    fields = _Fields(metadata, file_name)
    model = fields.text("model")
    if model == "gpt2":
        backend, add_bos = _byte_level(fields)
    elif model == "llama":
        backend, add_bos = _scored(fields), True
    else:
        accepted = ("gpt2 (byte-level BPE)", "llama (SentencePiece)")
        raise UnsupportedModelError(
            "tokenizer.unsupported", file=file_name, what="tokenizer", value=model, accepted=accepted, fix=FIX
        )
    named = fields.named_ids()
    _add_found_tokens(backend, fields, named)
    _add_ends(backend, fields, named, add_bos)
    texts = {name: fields.tokens[token_id] for name, token_id in named.items()}
    ends = [end for end in map(fields.token_id, ("eot_token_id", "eom_token_id")) if end is not None]
    return Tokenizer(backend, file_name, texts, ends, len(fields.tokens))


class _Fields:
    """The tokenizer's fields, with their types checked."""

    def __init__(self, metadata: Mapping[str, object], file_name: str) -> None:
        self._metadata = metadata
        self.file_name = file_name
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise self.broken("tokens", "it is missing or empty")
        self.vocabulary = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        if len(self.vocabulary) != sum(map(bool, self.tokens)):
            twice = next(t for i, t in enumerate(self.tokens) if t and self.vocabulary[t] != i)
            raise self.broken("tokens", f"{twice[:40]!r} stands in it twice")
        self.types = self.sequence("token_type") or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.broken("token_type", f"it has {len(self.types)} entries for {len(self.tokens)} tokens")

    def text(self, name: str) -> str | None:
        value = self._metadata.get(PREFIX + name)
        if value is not None and not isinstance(value, str):
            raise self.broken(name, "it is not a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + name, default)
        if not isinstance(value, bool):
            raise self.broken(name, "it is not a boolean")
        return value

    def sequence(self, name: str) -> Sequence[object]:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return ()
        if hasattr(value, "tolist"):
            value = value.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.broken(name, "it is not a list")
        return value

    def strings(self, name: str) -> list[str]:
        values = self.sequence(name)
        found = [value for value in values if isinstance(value, str)]
        if len(found) != len(values):
            raise self.broken(name, "it is not a list of strings")
        try:
            "".join(found).encode()
        except UnicodeEncodeError as error:
            # The header keeps invalid UTF-8 as surrogates.
            raise self.broken(name, "a string in it is not UTF-8") from error
        return found

    def token_id(self, name: str) -> int | None:
        value = self._metadata.get(PREFIX + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.broken(name, f"it is {value!r}, and there are {len(self.tokens)} tokens")
        return value

    def named_ids(self) -> dict[str, int]:
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {f"{name}_token": self.token_id(f"{key}_token_id") for name, key in keys.items()}
        return {name: token_id for name, token_id in found.items() if token_id is not None and self.tokens[token_id]}

    def broken(self, name: str, reason: str) -> ModelFormatError:
        return ModelFormatError("tokenizer.wrong_field", file=self.file_name, key=PREFIX + name, reason=reason)


def _byte_level(fields: _Fields) -> tuple["tokenizers.Tokenizer", bool]:
    """Make byte-level BPE with the file's merges; also return the default of add_bos_token."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    name = fields.text("pre") or "default"
    if name not in PRE_TOKENIZERS:
        file, accepted = fields.file_name, list(PRE_TOKENIZERS)
        raise UnsupportedModelError(
            "tokenizer.unsupported", file=file, what="pre-tokenizer", value=name, accepted=accepted, fix=FIX
        )
    pre = PRE_TOKENIZERS[name]
    merges = _merges(fields)
    with native_calls(fields.file_name):
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=fields.vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
        )
        steps: list[pre_tokenizers.PreTokenizer] = []
        if pre.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pre.split is not None:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    """Split each merge into its sides. A side may be a space, so search the separator after the first character."""
    merges = fields.strings("merges")
    split = [merge.split(" ") for merge in merges]
    if all(len(sides) == 2 and sides[0] and sides[1] for sides in split):
        return [(left, right) for left, right in split]
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            cut = merge.find(" ", 1)
            if cut < 0 or cut + 1 == len(merge):
                raise fields.broken("merges", f"{merge[:40]!r} is not two tokens with a space between")
            left, right = merge[:cut], merge[cut + 1 :]
        pairs.append((left, right))
    return pairs


def _scored(fields: _Fields) -> "tokenizers.Tokenizer":
    """Make a SentencePiece-style BPE: the pair with the highest score merges first; unknown characters become bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    unknown = fields.token_id("unknown_token_id")
    has_prefix = fields.flag("add_space_prefix", True)
    merges = _merges_by_score(fields)
    with native_calls(fields.file_name):
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=fields.vocabulary,
                merges=merges,
                unk_token=None if unknown is None else fields.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
        joining: list[decoders.Decoder] = [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if has_prefix:
            spaces.insert(0, normalizers.Prepend(SPACE_MARK))
            joining.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(spaces)
        backend.decoder = decoders.Sequence(joining)
    return backend


def _merges_by_score(fields: _Fields) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token: best score first, then longest left side."""
    scores = fields.sequence("scores")
    if len(scores) != len(fields.tokens):
        raise fields.broken("scores", f"it has {len(scores)} entries for {len(fields.tokens)} tokens")
    vocabulary = fields.vocabulary
    found: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(fields.tokens, fields.types, scores, strict=True):
        if kind in (UNKNOWN, CONTROL):
            continue
        if not isinstance(score, int | float) or math.isnan(score):
            raise fields.broken("scores", f"the score of {token[:40]!r} is {score!r}")
        if len(token) > MAX_SCORED_TOKEN_CHARS:
            raise fields.broken("tokens", f"{token[:40]!r}... has more than {MAX_SCORED_TOKEN_CHARS} characters")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]


def _add_found_tokens(backend: "tokenizers.Tokenizer", fields: _Fields, named: Mapping[str, int]) -> None:
    import tokenizers

    unusual = [(i, kind) for i, kind in enumerate(fields.types) if kind != 1]
    special = {i for i, kind in unusual if kind in (UNKNOWN, CONTROL)} | set(named.values())
    whole = [i for i, kind in unusual if kind == USER_DEFINED and i not in special]
    with native_calls(fields.file_name):
        for ids, is_special in ((sorted(special), True), (whole, False)):
            texts = [fields.tokens[i] for i in ids if fields.tokens[i]]
            backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=is_special) for t in texts])


def _add_ends(
    backend: "tokenizers.Tokenizer", fields: _Fields, named: Mapping[str, int], default_add_bos: bool
) -> None:
    """Add bos before and eos after a text if the file, or llama.cpp's default, says so."""
    from tokenizers import processors

    wanted = [
        ("bos_token", fields.flag("add_bos_token", default_add_bos)),
        ("eos_token", fields.flag("add_eos_token", False)),
    ]
    ends = {name: named[name] for name, is_wanted in wanted if is_wanted and name in named}
    if not ends:
        return
    # Use aliases: the template syntax fails on a token with a colon.
    single = [f"{name}:0" for name in ends if name == "bos_token"]
    single += ["$A:0"] + [f"{name}:0" for name in ends if name == "eos_token"]
    with native_calls(fields.file_name):
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, "$B:1"],
            special_tokens=[
                {"id": name, "ids": [token_id], "tokens": [fields.tokens[token_id]]} for name, token_id in ends.items()
            ],
        )

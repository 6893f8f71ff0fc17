"""Tokenizer converts text to token ids and back; it is read from a folder, with its special tokens; no torch."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from holdfast.errors import ModelFormatError, PromptError
from holdfast.loading.sources.files import read_json_object, read_small_file
from holdfast.models.settings import plain
from holdfast.text.control_tokens import ContentEncoder, ControlTokens, Span, encode_ids
from holdfast.text.detokenizer import TextStream, TokenPieces, decode_rule

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 2**20
OTHER_FORMATS = {
    "tokenizer.model": "a SentencePiece or tiktoken model",
    "spiece.model": "a SentencePiece model",
    "tiktoken.model": "a tiktoken model",
    "tekken.json": "a Mistral tekken vocabulary",
    "vocab.json": "a vocabulary and merges in files of their own",
}
BY_IDS = 'pass prompts as token ids: LLM(model, tokenizer="none").generate(prompt_token_ids=[...])'
"""The fix for a model whose tokenizer is not supported."""
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NO_BOUND = 2**31
"""Stands for no bound: more characters than any text has."""
_COMPOSING = {"NFC", "NFD", "NFKC", "NFKD"}
MAX_COMPOSED_CHARS = 4


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token that is matched in text before any other."""

    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)
    """single_word, lstrip, rstrip, normalized and special, if the file has them."""

    def as_special(self) -> "TokenEntry":
        return replace(self, flags={**self.flags, "special": True})


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of the files beside tokenizer.json."""

    named: Mapping[str, TokenEntry]
    """Tokens by name: bos_token, eos_token etc."""
    extra: tuple[TokenEntry, ...]
    added: Mapping[int, TokenEntry] | None
    """Tokens by id, if a file lists them; None: those of tokenizer.json."""
    are_plain_text: bool = False
    """True if special tokens written in a text are text."""

    def texts(self) -> dict[str, str]:
        """Return names and texts, for chat templates."""
        return {name: entry.content for name, entry in self.named.items()}


class Tokenizer:
    """Encodes with the `tokenizers` library. Decodes byte-exactly, and can stream."""

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        origin: str,
        special_tokens: Mapping[str, str],
        end_token_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        """`origin` is the tokenizer's file; `special_tokens` are the texts of bos_token, eos_token etc."""
        self.origin = origin
        self.special_tokens = dict(special_tokens)
        self._backend = backend
        with native_calls(origin):
            backend.no_truncation()
            backend.no_padding()
            added = backend.get_added_tokens_decoder()
            decoder_json = backend.decoder.__getstate__() if backend.decoder is not None else None
            if vocab_size is None:
                vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size: int = vocab_size
        """Size of the tokenizer's id space; a model may have more rows."""
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.end_token_ids = frozenset((*eos, *end_token_ids))
        """Tokens that end an answer, from the tokenizer's files."""
        self._kept_whole = {token.content: token_id for token_id, token in added.items() if not token.special}
        self._control_texts: frozenset[str] = frozenset()
        self._encoder_lock = Lock()
        self._pieces = TokenPieces(backend.id_to_token, decode_rule(decoder_json, origin), self.special_token_ids)

    @cached_property
    def longest_token_chars(self) -> int:
        """Most characters of text per token; lets callers refuse a text that is too long before encoding.

        Excludes characters without a token, such as spaces beside a token that strips them.
        """
        return longest_token_chars(self._backend)

    def guard(self, texts: Iterable[str]) -> None:
        """Treat these added tokens as control tokens, although the files do not flag them special."""
        self._control_texts |= frozenset(texts)
        self.__dict__.pop("control_tokens", None)
        self.__dict__.pop("content_encoder", None)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Special tokens by text; none if the tokenizer reads them all as text."""
        if self._backend.encode_special_tokens:
            return ControlTokens({})
        special = {self._backend.id_to_token(token_id): token_id for token_id in sorted(self.special_token_ids)}
        special |= {text: token_id for text, token_id in self._kept_whole.items() if text in self._control_texts}
        return ControlTokens({text: token_id for text, token_id in special.items() if text}, self._kept_whole)

    @cached_property
    def content_encoder(self) -> ContentEncoder:
        return ContentEncoder(self._backend, self.control_tokens)

    def encode_chat(self, text: str, own: Sequence[Span]) -> list[int]:
        """Encode a rendered chat, in which the control tokens at `own` are text."""
        if not own:
            return self.encode(text, add_special_tokens=False)
        with self._encoder_lock:
            encoder = self.content_encoder
        return self._guarded(text, lambda: encoder.encode(text, list(own), add_special_tokens=False))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, including special tokens written in it, like transformers."""
        if not isinstance(text, str):
            raise PromptError("value.not_string", name="prompt", value=text)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise PromptError("tokenizer.not_unicode", place=error.start) from error
        return self._guarded(text, lambda: encode_ids(self._backend, text, add_special_tokens))

    def _guarded(self, text: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            with native_calls(self.origin):
                return encode()
        except ModelFormatError as error:
            reason, origin = error.values.get("reason", ""), self.origin
            raise PromptError("tokenizer.encode_failed", origin=origin, num_chars=len(text), reason=reason) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids; ids without a token add nothing."""
        stream = self.text_stream(skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def to_json(self) -> str:
        """Return the tokenizer as a tokenizer.json holds it."""
        return self._backend.to_str()

    def vocabulary_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def vocabulary_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return one token as text; incomplete characters become U+FFFD."""
        return (self._pieces.piece(token_id) or b"").decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token inside a text; None for ids without a token."""
        return self._pieces.piece(token_id)

    def text_stream(self, skip_special_tokens: bool, kept_token_ids: frozenset[int] = frozenset()) -> TextStream:
        """Return a stream that builds a text from token ids."""
        return TextStream(self._pieces, skip_special_tokens, kept_token_ids)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Read the tokenizer of a folder in Hugging Face layout: tokenizer.json, and the special tokens of other files."""
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise _missing_tokenizer(path)
    import tokenizers

    data = read_small_file(file, MAX_TOKENIZER_BYTES)
    with native_calls(TOKENIZER_FILE):
        backend = tokenizers.Tokenizer.from_buffer(data)
    special = special_tokens_of(path)
    with native_calls(CONFIG_FILE):
        backend.add_tokens([tokenizers.AddedToken(e.content, **e.flags) for e in _tokens_to_add(backend, special)])
        backend.encode_special_tokens = special.are_plain_text
    return Tokenizer(backend, TOKENIZER_FILE, special.texts())


def _tokens_to_add(backend: "tokenizers.Tokenizer", special: SpecialTokens) -> list[TokenEntry]:
    """Return tokens listed by id, then other named and extra ones; named ones are special."""
    present = {
        token_id: TokenEntry(token.content, _flags_of(token))
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
    }
    added = dict(sorted((special.added if special.added is not None else present).items()))
    names = {entry.content for entry in special.named.values()}
    known = {entry.content for entry in (*present.values(), *added.values())}
    found = [entry.as_special() if entry.content in names else entry for entry in added.values()]
    for entry in (*special.named.values(), *special.extra):
        if entry.content not in known:
            known.add(entry.content)
            found.append(entry.as_special())
    return found


def _flags_of(token: "tokenizers.AddedToken") -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in _FLAGS}


def _missing_tokenizer(path: Path) -> ModelFormatError:
    others = [f"{name} ({what})" for name, what in OTHER_FORMATS.items() if (path / name).is_file()]
    others += [f"{file.name} (a tiktoken vocabulary)" for file in sorted(path.glob("*.tiktoken"))[:1]]
    found, fix = "no tokenizer of another format either", f"Download {TOKENIZER_FILE} from the model's source"
    if others:
        convert = "Convert it once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        found, fix = f"it has {', '.join(others)}", f"{convert}, or {BY_IDS}"
    return ModelFormatError("tokenizer.missing", path=path, file=TOKENIZER_FILE, found=found, fix=fix)


@contextmanager
def native_calls(origin: str) -> Iterator[None]:
    """Turn any error of the `tokenizers` library into one that names the file."""
    try:
        yield
    except PromptError:
        raise
    except Exception as error:
        raise _broken_tokenizer(origin, error) from error
    except BaseException as error:
        # A Rust panic raises a BaseException of a class that cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise _broken_tokenizer(origin, error) from None


def _broken_tokenizer(origin: str, error: BaseException) -> ModelFormatError:
    if isinstance(error, ModelFormatError):
        return error
    reason = plain(str(error)) or type(error).__name__
    return ModelFormatError("tokenizer.invalid", file=origin, reason=reason)


def special_tokens_of(directory: Path) -> SpecialTokens:
    """Read the special tokens of one folder; a file may be missing."""
    path = directory / CONFIG_FILE
    config = _optional_json(path)
    added = _added_tokens(config["added_tokens_decoder"], path) if "added_tokens_decoder" in config else None
    if added is None:
        config = {**config, **_optional_json(directory / SPECIAL_TOKENS_FILE)}
    named = {
        name: entry
        for name, value in config.items()
        if name in STANDARD_NAMES or (name.endswith("_token") and _looks_like_token(value))
        if (entry := _token_entry(value, path, name)) is not None
    }
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(listed, dict):
        named |= {
            name: entry for name, value in listed.items() if (entry := _token_entry(value, path, name)) is not None
        }
        listed = []
    if not isinstance(listed, list):
        raise _wrong_token(path, "extra_special_tokens", listed)
    entries = [_token_entry(value, path, "extra_special_tokens") for value in listed]
    extra = tuple(entry for entry in entries if entry is not None)
    if added is None:
        added = _legacy_added_tokens(directory / ADDED_TOKENS_FILE, {e.content for e in (*named.values(), *extra)})
    return SpecialTokens(_with_flags_of(added, named), extra, added, config.get("split_special_tokens") is True)


def _with_flags_of(added: Mapping[int, TokenEntry] | None, named: dict[str, TokenEntry]) -> dict[str, TokenEntry]:
    known = {entry.content: entry for entry in (added or {}).values()}
    return {name: known.get(entry.content, entry) for name, entry in named.items()}


def _added_tokens(value: object, path: Path) -> dict[int, TokenEntry]:
    if not isinstance(value, dict):
        raise _wrong_token(path, "added_tokens_decoder", value)
    entries: dict[int, TokenEntry] = {}
    for key, token in value.items():
        entry = _token_entry(token, path, f"added_tokens_decoder[{key!r}]")
        if entry is None or not key.isdecimal() or len(key) > 9:
            raise _wrong_token(path, f"added_tokens_decoder[{key[:40]!r}]", token)
        entries[int(key)] = entry
    return entries


def _legacy_added_tokens(path: Path, special: set[str]) -> dict[int, TokenEntry] | None:
    """Read added_tokens.json of older models: texts and ids, without flags."""
    entries: dict[int, TokenEntry] = {}
    for content, token_id in _optional_json(path).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise _wrong_token(path, f"the id of {content[:40]!r}", token_id)
        is_special = content in special
        entries[token_id] = TokenEntry(content, {"normalized": not is_special, "special": is_special})
    return entries or None


def _looks_like_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _token_entry(value: object, path: Path, name: str) -> TokenEntry | None:
    if value is None:
        return None
    if isinstance(value, str):
        return TokenEntry(value)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(content, str):
        raise _wrong_token(path, name, value)
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _wrong_token(path, name, value)
    return TokenEntry(content, flags)


def _optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _wrong_token(path: Path, name: str, value: object) -> ModelFormatError:
    return ModelFormatError("tokenizer.wrong_token", file=path.name, key=name, value=value)


def longest_token_chars(backend: "tokenizers.Tokenizer") -> int:
    """Return the length of the longest token, times the characters that a normalizer may merge into one.

    NO_BOUND if words of any length become one unknown token, or a normalizer removes text.
    """
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE):
        return NO_BOUND
    has_bytes = model.byte_fallback and all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if model.unk_token is not None and not has_bytes:
        return NO_BOUND
    state = backend.normalizer.__getstate__() if backend.normalizer is not None else None
    shrinking = 1 if state is None else _shrinking(json.loads(state))
    if shrinking is None:
        return NO_BOUND
    return shrinking * max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)


def _shrinking(normalizer: dict[str, object]) -> int | None:
    """Return how many characters a normalizer may merge into one; None if unknown."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        inner = normalizer.get("normalizers")
        product = 1
        for step in inner if isinstance(inner, list) else ():
            factor = _shrinking(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind in _COMPOSING:
        return MAX_COMPOSED_CHARS
    if kind == "Replace":
        pattern = normalizer.get("pattern")
        old = pattern.get("String") if isinstance(pattern, dict) else None
        new = normalizer.get("content")
        return 1 if isinstance(old, str) and isinstance(new, str) and len(new) >= len(old) else None
    return 1 if kind in ("Prepend", "Lowercase") else None

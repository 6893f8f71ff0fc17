"""The special tokens that tokenizer_config.json and special_tokens_map.json name, as transformers understands them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.errors import ModelFormatError, shown
from holdfast.loading.sources.json_file import read_json_object

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token that is found in text before anything else is done with it."""

    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)
    """single_word, lstrip, rstrip, normalized and special, where the file says them."""

    def as_special(self) -> "TokenEntry":
        return replace(self, flags={**self.flags, "special": True})


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the files beside tokenizer.json say about tokens."""

    named: Mapping[str, TokenEntry]
    """By name: bos_token, eos_token and the like."""
    extra: tuple[TokenEntry, ...]
    added: Mapping[int, TokenEntry] | None
    """By id, when a file lists them; None leaves it to tokenizer.json."""
    are_plain_text: bool = False
    """Special tokens written out in a text are not understood as such."""

    def texts(self) -> dict[str, str]:
        """Names and texts, as chat templates see them."""
        return {name: entry.content for name, entry in self.named.items()}


def special_tokens_of(directory: Path) -> SpecialTokens:
    """Read the files of one folder; a missing file says nothing."""
    path = directory / CONFIG_FILE
    config = _optional(path)
    added = _added(config["added_tokens_decoder"], path) if "added_tokens_decoder" in config else None
    if added is None:
        config = {**config, **_optional(directory / SPECIAL_TOKENS_FILE)}
    named = {
        name: entry
        for name, value in config.items()
        if name in STANDARD_NAMES or (name.endswith("_token") and _looks_like_token(value))
        if (entry := _entry(value, path, name)) is not None
    }
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(listed, dict):
        named |= {name: entry for name, value in listed.items() if (entry := _entry(value, path, name)) is not None}
        listed = []
    if not isinstance(listed, list):
        raise _wrong(path, "extra_special_tokens", listed)
    entries = [_entry(value, path, "extra_special_tokens") for value in listed]
    extra = tuple(entry for entry in entries if entry is not None)
    if added is None:
        added = _legacy_added(directory / ADDED_TOKENS_FILE, {e.content for e in (*named.values(), *extra)})
    return SpecialTokens(_with_flags_of(added, named), extra, added, config.get("split_special_tokens") is True)


def _with_flags_of(added: Mapping[int, TokenEntry] | None, named: dict[str, TokenEntry]) -> dict[str, TokenEntry]:
    known = {entry.content: entry for entry in (added or {}).values()}
    return {name: known.get(entry.content, entry) for name, entry in named.items()}


def _added(value: object, path: Path) -> dict[int, TokenEntry]:
    if not isinstance(value, dict):
        raise _wrong(path, "added_tokens_decoder", value)
    entries: dict[int, TokenEntry] = {}
    for key, token in value.items():
        entry = _entry(token, path, f"added_tokens_decoder[{key!r}]")
        if entry is None or not key.isdecimal() or len(key) > 9:
            raise _wrong(path, f"added_tokens_decoder[{key[:40]!r}]", token)
        entries[int(key)] = entry
    return entries


def _legacy_added(path: Path, special: set[str]) -> dict[int, TokenEntry] | None:
    """added_tokens.json of older models: texts and ids, with no word about which are special."""
    entries: dict[int, TokenEntry] = {}
    for content, token_id in _optional(path).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise _wrong(path, f"the id of {content[:40]!r}", token_id)
        is_special = content in special
        entries[token_id] = TokenEntry(content, {"normalized": not is_special, "special": is_special})
    return entries or None


def _looks_like_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _entry(value: object, path: Path, name: str) -> TokenEntry | None:
    if value is None:
        return None
    if isinstance(value, str):
        return TokenEntry(value)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(content, str):
        raise _wrong(path, name, value)
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _wrong(path, name, value)
    return TokenEntry(content, flags)


def _optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _wrong(path: Path, name: str, value: object) -> ModelFormatError:
    return ModelFormatError(f"{path.name} says {name} = {shown(value)}", "a token is needed there", "check the file")

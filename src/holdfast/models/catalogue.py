"""The catalogue: well-known models by name, so that a plan needs no file; no torch."""

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from holdfast.errors import ModelNotFoundError

Config = Mapping[str, object]
FILE = Path(__file__).with_name("published.json")
"""Settings of each published config.json that a plan needs. `like` names an earlier model whose settings hold unless
`config` overrides them."""


class Published(NamedTuple):
    """One model."""

    repository: str
    """Owner and name on the Hugging Face Hub: the source of the figures."""
    config: Config
    same: tuple[str, ...] = ()
    """Names of other releases with the same figures."""
    short: str = ""
    """A common name, for tables in which the repository's name is too long."""

    @property
    def name(self) -> str:
        return self.short or self.repository.partition("/")[2]


def read_published(file: Path = FILE) -> tuple[Published, ...]:
    """Read every model of a file, in order."""
    found: dict[str, Published] = {}
    for row in json.loads(file.read_text(encoding="utf-8")):
        base = found[row["like"]].config if "like" in row else {}
        config = _merged(base, row.get("config", {}))
        model = Published(row["repository"], config, tuple(row.get("same", ())), row.get("name", ""))
        found[model.name] = model
    return tuple(found.values())


def _merged(base: Config, own: Config) -> Config:
    """Return settings with overrides; nested objects are merged too."""
    merged = dict(base)
    for key, value in own.items():
        old = merged.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        merged[key] = _merged(cast("Config", old), cast("Config", value)) if both else value
    return merged


PUBLISHED: tuple[Published, ...] = read_published()
"""Every model that can be planned by name, grouped by family."""
CATALOGUE: Mapping[str, Config] = {model.name: model.config for model in PUBLISHED}
"""Every model that can be planned by name."""
SOURCES: Mapping[str, str] = {model.name: model.repository for model in PUBLISHED}
"""Owner and name on the Hub of the repository whose config.json has the figures."""
SAME: Mapping[str, str] = {other: model.name for model in PUBLISHED for other in model.same}
"""Maps other releases to the model that has the same figures."""
MAX_NAME = 200
"""Most characters of a name."""
NUM_SUGGESTED = 3
"""Names that an error suggests."""
ALIKE = 0.75
"""Lowest similarity of two words (difflib's ratio) at which one counts as a typo of the other."""
MAX_FACTOR = 1.25
"""A typo changes a size by at most this factor, and omits no word."""
_TOKEN = re.compile(r"\d+x\d+b|[ae]\d+(?:\.\d+)?b|\d+e(?![a-z])|\d+(?:\.\d+)*[bm]?(?![a-z])|\d+(?:\.\d+)*|[a-z]+")
"""Matches one part of a name: a word, a version, or a size such as 8b, a3b, e4b, 8x7b and 128e."""
_SIZE = re.compile(r"\d{1,4}(?:\.\d{1,3})?[bm]")
"""Billions or millions of parameters."""
TUNED = ("instruct", "chat", "it", "pt", "base", "hf")
"""Words that distinguish a tuned model from its base, which has the same shapes."""
FOUR_BITS, EIGHT_BITS, IN_FILE = "mxfp4", "fp8", ""
STORED: Mapping[str, str] = {
    r"gguf|i?q[1-8](?:_[a-z\d]+)*": IN_FILE,
    r"fp8|w8a8|w8a16|8bit|int8": EIGHT_BITS,
    r"awq|gptq|int4|4bit|w4a16|nvfp4|mxfp4|bnb|autoround": FOUR_BITS,
    r"dynamic|block|unsloth|quantized|qat": IN_FILE,
}
"""Words that name a release's storage format, not its shapes, and the scheme with as many bits."""


class StoredAs(NamedTuple):
    """The storage format that a name mentions."""

    word: str
    scheme: str
    """The scheme here that takes about as much; empty if only the file can say."""


def find_model(name: str) -> tuple[str, Config]:
    """Return the catalogue's spelling of a name, and its config.

    Owners ("Qwen/"), case, spaces, dashes, dots and endings that change no shape do not matter.
    """
    found = _found(name)
    if found is not None:
        return found, CATALOGUE[SAME.get(found, found)]
    near = _near(name[: MAX_NAME + 1])
    size = (*_sizes(name), "32b")[0].upper()
    fix = f"ass its config.json with --config FILE, or --parameters {size} for an estimate. `holdfast plan --list` shows the known models."
    error = ModelNotFoundError("architecture.not_in_catalogue", name=name, count=len(CATALOGUE))
    raise error.hinting(f"Did you mean {' or '.join(near)}? Else p{fix}" if near else f"P{fix}")


def is_known(name: str) -> bool:
    """Return True if the catalogue has a model of that name."""
    return _found(name) is not None


def _found(name: str) -> str | None:
    """Return the catalogue's spelling of a name."""
    # A base model may be stored differently from its tuned version. Then the catalogue lists it too.
    found = _by_all_words().get(_bare(name)) or _by_heard_words().get(_plain(name))
    # Qwen3-527B has the letters and digits of Qwen3.5-27B, and is another model.
    is_same = found is not None and len(name) <= MAX_NAME and _sizes(name) == _sizes(found)
    return found if is_same else None


@cache
def _by_all_words() -> dict[str, str]:
    """Map each known name, with all of its words, to the catalogue's."""
    return {_bare(name): name for name in (*SAME, *CATALOGUE)}


@cache
def _by_heard_words() -> dict[str, str]:
    """Map what a known name's spellings share to the catalogue's name."""
    return {_plain(name): name for name in (*SAME, *CATALOGUE)}


def _near(name: str) -> list[str]:
    """List known names that this one may be a typo of; empty if it names another family, version or variant."""
    tokens, wanted = _tokens(name), _plain(name)
    known = [one for one in (*CATALOGUE, *SAME) if _is_slip(tokens, _tokens(one))]

    def distance(one: str) -> tuple[int, float]:
        return len(set(tokens) - set(_tokens(one))), -difflib.SequenceMatcher(None, wanted, _plain(one)).ratio()

    known.sort(key=distance)
    return known[:NUM_SUGGESTED]


def _is_slip(typed: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Return True if every part of a name is in the known one, or is spelled almost like a part of it."""
    if not any(_is_alike(token, known[0]) for token in typed if token.isalpha()):
        return False
    has_all_words = all(any(_is_alike(word, token) for token in typed) for word in known if word.isalpha())
    sizes = [_billions(token) for token in known if _SIZE.fullmatch(token) and has_all_words]
    for token in typed:
        if token in known or (token.isalpha() and any(_is_alike(token, other) for other in known)):
            continue
        is_bare = f"{token}b" in known or f"{token}m" in known  # Qwen3-32
        is_size = _SIZE.fullmatch(token) is not None
        if not is_bare and not (is_size and any(_is_close(_billions(token), size) for size in sizes)):
            return False
    return True


def _is_alike(word: str, other: str) -> bool:
    return other.isalpha() and difflib.SequenceMatcher(None, word, other).ratio() >= ALIKE


def _is_close(size: float, other: float) -> bool:
    return size > 0 and 1 / MAX_FACTOR <= size / other <= MAX_FACTOR


def _billions(token: str) -> float:
    return float(token[:-1]) / (1000 if token.endswith("m") else 1)


def stored_as(name: str) -> StoredAs | None:
    """Return the storage format of a release, if its name mentions one. A plan by name cannot know it otherwise."""
    for pattern, scheme in STORED.items():
        if match := _words(pattern).search(_last_part(name)):
            return StoredAs(match[0].upper(), scheme)
    return None


def _plain(name: str) -> str:
    """Normalize a name so that its spellings are equal."""
    return re.sub(r"[^a-z\d]", "", _heard(name))


def _heard(name: str) -> str:
    """Normalize a name without its owner and words that change no shape."""
    text = _last_part(name).removeprefix("meta-")
    for pattern in (*STORED, "|".join(TUNED)):
        text = _words(pattern).sub(" ", text)
    return text


@cache
def _tokens(name: str) -> tuple[str, ...]:
    """Split off the parts of a name that identify the model."""
    return tuple(_TOKEN.findall(_heard(name)))


def _sizes(name: str) -> tuple[str, ...]:
    """Return the numbers of parameters in a name."""
    return tuple(token for token in _tokens(name[:MAX_NAME]) if _SIZE.fullmatch(token))


def _bare(name: str) -> str:
    """Like `_plain`, with all words."""
    return re.sub(r"[^a-z\d]", "", _last_part(name))


def _last_part(name: str) -> str:
    return name[: MAX_NAME + 1].strip().rstrip("/").rsplit("/", 1)[-1].lower()


@cache
def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z\d])(?:{pattern})(?![a-z\d])")

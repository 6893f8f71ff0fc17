"""The catalogue: well-known models by the names that people type, so that a plan needs no file; no torch."""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from math import inf, log
from typing import NamedTuple

from holdfast.errors import ModelNotFoundError, shown
from holdfast.models.published import PUBLISHED, Config

CATALOGUE: Mapping[str, Config] = {model.name: model.config for model in PUBLISHED}
"""Every model that can be planned by name."""
SOURCES: Mapping[str, str] = {model.name: model.repository for model in PUBLISHED}
"""Owner and name on the Hub, whose config.json has the figures."""
SAME: Mapping[str, str] = {other: model.name for model in PUBLISHED for other in model.same}
"""Other releases, and the model that has the same figures."""
MAX_NAME = 200
"""Characters of a name; a longer one names nothing."""
NUM_ALIKE, NUM_TOLD = 8, 3
"""Names that are spelled like an unknown one, and how many of them are told."""
_SIZE = re.compile(r"(?<![a-z\d.])(\d{1,4}(?:\.\d{1,3})?)b(?![a-z\d])")
"""Billions of parameters in a name."""
TUNED = ("instruct", "chat", "it", "pt", "base", "hf")
"""Words that tell a tuned model from its base, which has the same shapes."""
FOUR_BITS, EIGHT_BITS, IN_FILE = "mxfp4", "fp8", ""
STORED: Mapping[str, str] = {
    r"gguf|i?q[1-8](?:_[a-z\d]+)*": IN_FILE,
    r"fp8|w8a8|w8a16|8bit|int8": EIGHT_BITS,
    r"awq|gptq|int4|4bit|w4a16|nvfp4|mxfp4|bnb|autoround": FOUR_BITS,
    r"dynamic|block|unsloth|quantized|qat": IN_FILE,
}
"""Words that say how the weights of a release are stored, not what shapes they have; and the scheme with as many bits."""


class StoredAs(NamedTuple):
    """What a name says of how its weights are stored."""

    word: str
    scheme: str
    """The scheme here that takes about as much; empty where only the file knows."""


def find_model(name: str) -> tuple[str, Config]:
    """The catalogue's spelling of a name and its config.

    Owners ("Qwen/"), case, spaces, dashes and dots do not matter, nor do endings that change no shape.
    """
    names, exact = _spellings()
    if _bare(name) in exact and len(name) <= MAX_NAME:
        # A base model may be stored otherwise than the one that was tuned from it, and is then listed too.
        found = exact[_bare(name)]
        return found, CATALOGUE[SAME.get(found, found)]
    wanted = _plain(name)
    if wanted in names and len(name) <= MAX_NAME:
        found = names[wanted]
        return found, CATALOGUE[SAME.get(found, found)]
    near = _by_size(name, [names[match] for match in difflib.get_close_matches(wanted[:MAX_NAME], names, n=NUM_ALIKE)])
    raise ModelNotFoundError(
        f"model {shown(name)} was asked for",
        f"it is neither a path nor among the {len(CATALOGUE)} models known by name",
        f"did you mean {' or '.join(near[:NUM_TOLD])}?" if near else "holdfast plan --list shows them",
    )


@cache
def _spellings() -> tuple[dict[str, str], dict[str, str]]:
    """Every known name by what its spellings share, and by all of its words."""
    known = (*SAME, *CATALOGUE)
    return {_plain(name): name for name in known}, {_bare(name): name for name in known}


def _by_size(name: str, near: list[str]) -> list[str]:
    """Of names that are spelled alike those of the same family first, and of these those with about as many parameters."""
    asked = _SIZE.search(name.lower())
    if asked is None or not float(asked[1]):
        return near

    def distance(known: str) -> tuple[bool, float]:
        size = _SIZE.search(known.lower())
        return _family(known) != _family(name), abs(log(float(size[1]) / float(asked[1]))) if size else inf

    return sorted(near, key=distance)


def _family(name: str) -> str:
    """The letters that a name begins with."""
    return re.split(r"[^a-z]", _plain(name), maxsplit=1)[0]


def stored_as(name: str) -> StoredAs | None:
    """How a release with that name keeps its weights, where the name says so: a plan by name does not know it."""
    for pattern, scheme in STORED.items():
        if match := _words(pattern).search(_last_part(name)):
            return StoredAs(match[0].upper(), scheme)
    return None


def _plain(name: str) -> str:
    """What two spellings of one name share."""
    text = _last_part(name).removeprefix("meta-")
    for pattern in (*STORED, "|".join(TUNED)):
        text = _words(pattern).sub(" ", text)
    return re.sub(r"[^a-z\d]", "", text)


def _bare(name: str) -> str:
    """The same with all of its words."""
    return re.sub(r"[^a-z\d]", "", _last_part(name))


def _last_part(name: str) -> str:
    return name[: MAX_NAME + 1].strip().rstrip("/").rsplit("/", 1)[-1].lower()


@cache
def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z\d])(?:{pattern})(?![a-z\d])")

"""Releases that a name mentions: Qwen3-32B:Q4_K_M and Qwen3-32B-AWQ say how weights are stored; no torch.

data/release_formats.json has a row for each kind:

words    a regular expression for the part of a name, in small letters
title    its usual spelling
mix      types as llama.cpp mixes them in a GGUF file (loading/writing/gguf_plan.py)
config   the usual quantization_config of such a checkpoint
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.loading.hub.names import parse_hub_name
from holdfast.memory.devices import read_data

GGUF_ENDING = "-gguf"


class Release(NamedTuple):
    """A kind of release that a name mentions."""

    words: str
    title: str
    mix: str = ""
    config: Mapping[str, object] | None = None


RELEASES = tuple(Release(**row) for row in read_data("release_formats.json"))


def bare_name(model: str) -> str:
    """Return the catalogue's name of a model on the Hub: no revision, no tag, no -GGUF."""
    name = parse_hub_name(model)
    if name is None:
        return model
    return name.repo[: -len(GGUF_ENDING)] if name.repo.lower().endswith(GGUF_ENDING) else name.repo


def find_release(model: str) -> Release | None:
    """Return the kind of release that a name mentions; None if it mentions none whose weights are known."""
    name = model.strip().rstrip("/").rsplit("/", 1)[-1].lower()
    found = (one for one in RELEASES if re.search(rf"(?<![a-z\d_])(?:{one.words})(?![a-z\d_])", name))
    return next(found, None)

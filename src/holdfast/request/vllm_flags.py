"""Parse vLLM's command-line flags: the name, whether a value follows, and the value; no torch."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.request.vllm_names import SHORT_FLAGS, Foreign

_WORDS = {"true": True, "false": False, "none": None}
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class ForeignFlag(NamedTuple):
    """A vLLM flag that Holdfast lacks."""

    name: str
    foreign: Foreign
    is_off: bool = False
    """True if typed as --no-name."""


def find_flag(typed: str, names: Mapping[str, Foreign]) -> ForeignFlag | None:
    """Find the name of a typed flag: --swap-space, --swap_space, --no-enable-lora, -O3, -cc.mode."""
    short = next((name for name in SHORT_FLAGS if re.fullmatch(rf"{name}([0-9]|\..*)?", typed)), None)
    plain = SHORT_FLAGS[short] if short else typed.removeprefix("--").partition(".")[0].replace("-", "_")
    if not typed.startswith("--") and short is None:
        return None
    if plain in names:
        return ForeignFlag(plain, names[plain])
    opposite = plain.removeprefix("no_")
    if opposite in names and names[opposite].is_switch:
        return ForeignFlag(opposite, names[opposite], is_off=True)
    return None


def read_value(text: str) -> object:
    """Parse a value: a number, true, false, none, JSON; any other text is returned as is."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text

"""Values as people type them on a command line: counts with suffixes, numbers, lists, pairs; no torch.

What cannot be read is returned as it was typed: the setting that it is for refuses it in its own words.
"""

import re
from collections.abc import Sequence

from holdfast.errors import ConfigError, RequestError, shown

COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""As in vLLM: small letters count in thousands, capitals in 1024s."""
_COUNT = re.compile(r"(-?[0-9]{1,18})(\.[0-9]{1,9})?([kKmMgG]?)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_count(text: str) -> int | str | None:
    """A whole number, as 8192, 8k (8000), 8K (8192) or 1M; auto is None, which leaves the choice open."""
    if text.strip().lower() == "auto":
        return None
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return text
    value = (
        float(f"{match[1]}{match[2]}") * COUNT_UNITS[match[3]] if match[2] else int(match[1]) * COUNT_UNITS[match[3]]
    )
    return int(value) if value == int(value) else text


def read_number(text: str) -> float | str:
    """A number, finite or not."""
    try:
        return float(text)
    except ValueError:
        return text


def read_share(text: str) -> float | str:
    """A share of a whole, as 0.8 or 80%."""
    number = read_number(text.strip().removesuffix("%"))
    if isinstance(number, str) or not text.strip().endswith("%"):
        return read_number(text)
    # One that is too large is refused as it was typed.
    return number / 100 if 0 < number <= 100 else text


def read_integers(texts: Sequence[str]) -> list[int | str]:
    """Whole numbers, each in a text of its own or several with commas between them."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in parts]


def read_patterns(texts: Sequence[str]) -> tuple[str, ...]:
    """Patterns, each in a text of its own or several with commas between them."""
    return tuple(part.strip() for text in texts for part in text.split(","))


def read_biases(texts: Sequence[str]) -> dict[int, float]:
    """Token ids and what is added to their logits, as 42=-100."""
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        number = read_number(bias)
        if not re.fullmatch(r"[0-9]{1,18}", token.strip()) or isinstance(number, str):
            raise RequestError(
                f"--logit-bias {shown(text)} was asked", "a token id and a number work", "write --logit-bias 42=-100"
            )
        biases[int(token)] = number
    return biases


def read_counts(text: str, option: str) -> tuple[int, ...]:
    """One or more counts with commas between them, each at least 1."""
    counts = [read_count(part) for part in text.split(",")]
    if not all(isinstance(count, int) and 1 <= count < 2**31 for count in counts):
        raise ConfigError(f"{option} {shown(text)} was asked", "whole numbers from 1 up work", f"write {option} 1,8")
    return tuple(count for count in counts if isinstance(count, int))


def read_range(text: str, option: str) -> tuple[int, int]:
    """A count, or two with a hyphen between them: the least and the most."""
    match = _RANGE.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(
            f"{option} {shown(text)} was asked", "a range of whole numbers from 1 up works", f"write {option} 32-512"
        )
    return low, high

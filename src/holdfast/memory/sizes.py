"""Sizes in words: "20GiB" to bytes and back."""

import re

from holdfast.errors import ConfigError, shown

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kb": 1000,
    "kib": 1024,
    "m": 1024**2,
    "mb": 1000**2,
    "mib": 1024**2,
    "g": 1024**3,
    "gb": 1000**3,
    "gib": 1024**3,
    "t": 1024**4,
    "tb": 1000**4,
    "tib": 1024**4,
}
MAX_BYTES = 2**63 - 1
"""What an address can reach; arithmetic with anything larger stops being exact, and then stops."""
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3})\s*")


def parse_bytes(text: str | int, option: str) -> int:
    """Bytes of "20GiB", "512MB" or a plain number; a wrong one is named after the option that held it."""
    if isinstance(text, int) and not isinstance(text, bool):
        num_bytes = text
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2].lower() not in UNITS:
            raise ConfigError(
                f"{option}={shown(text)} is not a size", "a number with a unit is", 'write "20GiB" or "512MB"'
            )
        num_bytes = int(float(match[1]) * UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise ConfigError(
            f"{option}={shown(text)} is no memory at all", "a size above zero is", 'write "20GiB" or "512MB"'
        )
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"{option}={shown(text)} was asked", "no machine has as much memory", 'write "20GiB" or "512MB"'
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """A size as a person reads it: three or four digits and a binary unit."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError(f"unreachable: {num_bytes=}")

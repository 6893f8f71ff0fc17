"""Sizes as text: "20GiB" to bytes and back."""

import re

from holdfast.errors import ConfigError

_PREFIXES = "kmgt"
UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{prefix: 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
}
"""Bytes of a unit, in lower case."""
MAX_BYTES = 2**63 - 1
"""The largest address."""
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3})\s*")


def parse_bytes(value: object, name: str) -> int:
    """Read "20GiB", "512MB" or a plain number of bytes. `name` is the option in errors."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    num_bytes = 0
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif match is not None and match[2].lower() in UNITS:
        num_bytes = int(float(match[1]) * UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise ConfigError("config.not_a_size", name=name, value=value)
    if num_bytes > MAX_BYTES:
        raise ConfigError("value.too_large", name=name, value=value, maximum=f"{MAX_BYTES} bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Print a size with three or four digits and a binary unit."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError(f"unreachable: {num_bytes=}")

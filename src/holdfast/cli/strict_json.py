"""JSON that every parser takes: plain ASCII, and null in place of numbers that are not finite; no torch."""

import json
import math
from collections.abc import Mapping


def dumps(value: object, indent: int | None = None) -> str:
    """One JSON text, without a newline at its end."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

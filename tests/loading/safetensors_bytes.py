"""Safetensors files made by hand, sound and broken."""

import json
import math
import struct
from pathlib import Path
from typing import Any

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """Name -> (dtype, shape), laid out one after the other."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header


def file_bytes(header: dict[str, Any] | str | bytes, num_data_bytes: int) -> bytes:
    """A file with this header and so many bytes of data."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + bytes(index % 251 for index in range(num_data_bytes))


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A sound file."""
    header = header_of(tensors)
    end = max((info["data_offsets"][1] for info in header.values()), default=0)
    path.write_bytes(file_bytes(header, end))
    return path

"""Storage formats as values: element types and the planes of a KV page; no torch.

A KV format says which planes one token of one layer occupies. Everything else (page pool, planner, storage, scheduler)
works from bytes and never asks which format it is; only an attention backend and its kernels know what the planes mean.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from holdfast.errors import ConfigError, shown

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the type."""


def bytes_for(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    return DTYPE_BYTES[dtype] * prod(shape)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache, described by what a single token adds to it."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        return bytes_for(self.dtype, self.token_shape)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store keys and values.

    Packed codes stand for elements of one head: a key's with the head's norm, a value's with its scale and zero.
    """

    name: str
    key_dtype: str
    value_dtype: str
    key_bits: int | None = None
    """Bits of a packed key; None: every element is stored as `key_dtype`."""
    value_bits: int | None = None

    def planes(self, num_kv_heads: int, head_dim: int) -> tuple[Plane, ...]:
        """The planes of one layer, in the order in which they are laid out."""
        token_shape = (num_kv_heads, head_dim)
        keys: tuple[Plane, ...] = (Plane("k", self.key_dtype, token_shape),)
        if self.key_bits is not None:
            codes = Plane("k_codes", "uint8", (num_kv_heads, _packed_bytes(head_dim, self.key_bits)))
            keys = (codes, Plane("k_norm", "float16", (num_kv_heads,)))
        values: tuple[Plane, ...] = (Plane("v", self.value_dtype, token_shape),)
        if self.value_bits is not None:
            codes = Plane("v_codes", "uint8", (num_kv_heads, _packed_bytes(head_dim, self.value_bits)))
            affine = (Plane(name, "float16", (num_kv_heads,)) for name in ("v_scale", "v_zero"))
            values = (codes, *affine)
        return (*keys, *values)


def _packed_bytes(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // 8)


FP8 = "float8_e4m3fn"
KV_FORMATS: dict[str, KVFormat] = {name: KVFormat(name, name, name) for name in ("float32", "float16", "bfloat16")}
"""Every KV format by the name that `kv_cache_dtype` takes."""
PLANNED_KV_FORMATS: Mapping[str, KVFormat] = {
    kv_format.name: kv_format
    for kv_format in (
        KVFormat("fp8", FP8, FP8),
        KVFormat("turboquant_k8v4", FP8, "uint8", value_bits=4),
        KVFormat("turboquant_4bit_nc", "uint8", "uint8", key_bits=4, value_bits=4),
        KVFormat("turboquant_k3v4_nc", "uint8", "uint8", key_bits=3, value_bits=4),
        KVFormat("turboquant_3bit_nc", "uint8", "uint8", key_bits=3, value_bits=3),
    )
}
"""Formats whose bytes are known and that nothing attends to yet: a plan takes them, an engine does not.

Every layer is counted in the one format. Whoever keeps the first and the last layers in a wider one adds them up.
"""


def kv_format(name: str) -> KVFormat:
    """The format of that name, whether an engine takes it yet or only a plan."""
    found = KV_FORMATS.get(name) or PLANNED_KV_FORMATS.get(name)
    if found is None:
        names = (*KV_FORMATS, *PLANNED_KV_FORMATS)
        near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
        raise ConfigError(
            f"kv_cache_dtype={shown(name)} was asked",
            f"the formats are {', '.join(names)}",
            f"try {near[0] if near else 'bfloat16'}",
        )
    return found

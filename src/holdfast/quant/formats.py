"""Storage formats as values: element types and the planes of a KV page; no torch.

A KV format lists the planes that one token of one layer occupies. Everything else (page pool, planner, storage,
scheduler) works from bytes, whatever the format. Only an attention backend and its kernels interpret the planes.
"""

from dataclasses import dataclass
from math import prod

from holdfast.errors import ConfigError, did_you_mean

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
    """Return the bytes of a dense tensor."""
    return DTYPE_BYTES[dtype] * prod(shape)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache, described by its share of a single token."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        return bytes_for(self.dtype, self.token_shape)


LATENT_TILE = 128
"""Latent elements that share a float32 scale in a row of fp8_ds_mla."""
LATENT_MULTIPLE = 8
"""If the elements before the rotated ones are a multiple of this, compressed attention can be quantized to 4 bits."""
EXPONENT_TILE = 64
"""Elements that share an exponent as their scale in a row of fp8_ds_v4."""
EXPONENT_ALIGNMENT = 8
"""The exponents of a row are padded to a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store keys and values, or latents (MLA): plain elements, or codes with scales."""

    name: str
    key_dtype: str
    value_dtype: str
    key_bits: int | None = None
    """Bits of a quantized key (quant/kv_quantize.py); None: every element is stored as `key_dtype`."""
    value_bits: int | None = None
    rope_dtype: str | None = None
    """Type of the rotated elements beside a latent; None: a format by head."""
    index_dtype: str = ""
    """Format of an index beside latents (DSA), one of INDEX_FORMATS; empty: the default beside this format."""
    has_exponents: bool = False
    """Scales are exponents of two, in a plane of their own (DeepSeek-V4)."""

    @property
    def is_quantized(self) -> bool:
        """True if heads or latents are codes and scales, which only their own kernels read."""
        return self.key_bits is not None

    @property
    def rotates_keys(self) -> bool:
        """True if keys are codes in the rotated space: of heads, with fewer than 8 bits."""
        return self.key_bits is not None and self.key_bits < 8 and not self.is_latent

    @property
    def is_latent(self) -> bool:
        """True if only latents can be stored in it."""
        return self.rope_dtype is not None

    @property
    def rotates_latents(self) -> bool:
        """True if latents are quantized in the rotated space. The weights around them then absorb the rotation."""
        return self.is_latent and self.key_bits == 4

    def planes(self, num_kv_heads: int, head_dim: int, rope_dim: int = 0) -> tuple[Plane, ...]:
        """Return the planes of one layer, in memory order.

        With `rope_dim` a token is one latent, and the last `rope_dim` of its `head_dim` elements are rotated.
        """
        if rope_dim:
            return self._latent_planes(head_dim - rope_dim, rope_dim)
        assert not self.is_latent, f"{self.name} keeps latents, not {num_kv_heads} heads"
        token_shape = (num_kv_heads, head_dim)
        keys: tuple[Plane, ...] = (Plane("k", self.key_dtype, token_shape),)
        if self.key_bits is not None:
            keys = _quantized_planes("k", self.key_bits, num_kv_heads, head_dim)
        values: tuple[Plane, ...] = (Plane("v", self.value_dtype, token_shape),)
        if self.value_bits is not None:
            values = _quantized_planes("v", self.value_bits, num_kv_heads, head_dim)
        return (*keys, *values)

    def _latent_planes(self, latent_dim: int, rope_dim: int) -> tuple[Plane, ...]:
        """Return one plane of rows; or a plane each of codes, scales and rotated elements, to keep rows aligned."""
        if not self.is_quantized:
            return (Plane("latent", self.key_dtype, (latent_dim + rope_dim,)),)
        assert self.rope_dtype is not None, f"{self.name} keeps keys and values by head, not latents"
        if self.has_exponents:
            num_bytes = latent_dim + bytes_for(self.rope_dtype, (rope_dim,))
            return Plane("latent", "uint8", (num_bytes,)), Plane("latent_scale", "uint8", (num_exponents(latent_dim),))
        if self.key_bits == 8:
            num_bytes = latent_dim + 4 * -(-latent_dim // LATENT_TILE) + bytes_for(self.rope_dtype, (rope_dim,))
            return (Plane("latent", "uint8", (num_bytes,)),)
        num_scales = 2 if self.rope_dtype == FP8 else 1
        return (
            Plane("latent_codes", "uint8", (latent_dim // 2,)),
            Plane("latent_scale", "float16", (num_scales,)),
            Plane("rope", self.rope_dtype, (rope_dim,)),
        )

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, rope_dim: int = 0) -> int:
        """Return the bytes of a token in one layer."""
        return sum(plane.bytes_per_token for plane in self.planes(num_kv_heads, head_dim, rope_dim))


def num_exponents(latent_dim: int) -> int:
    """Return the bytes of a row's scales in fp8_ds_v4, padding included."""
    num_tiles = -(-latent_dim // EXPONENT_TILE)
    return -(-num_tiles // EXPONENT_ALIGNMENT) * EXPONENT_ALIGNMENT


def _quantized_planes(name: str, bits: int, num_kv_heads: int, head_dim: int) -> tuple[Plane, ...]:
    """Return codes, odd bits if their number is odd, and a scale. Within a page a plane lies by head, then by token."""
    scale = Plane(f"{name}_scale", "float16", (num_kv_heads,))
    if bits in BITS_WITH_SIGNS:
        codes = Plane(f"{name}_codes", "uint8", (num_kv_heads, head_dim * (bits - 1) // 8))
        return codes, Plane(f"{name}_signs", "uint8", (num_kv_heads, head_dim // 8)), scale
    return Plane(f"{name}_codes", "uint8", (num_kv_heads, head_dim * bits // 8)), scale


FP8 = "float8_e4m3fn"
BITS_WITH_SIGNS = (3, 5)
"""Bits of codes that keep one of them in a plane of its own, so that the others fill words."""
KV_FORMATS: dict[str, KVFormat] = {
    **{name: KVFormat(name, name, name) for name in ("float32", "float16", "bfloat16")},
    **{
        kv_format.name: kv_format
        for kv_format in (
            KVFormat("fp8", FP8, FP8, key_bits=8, value_bits=8),
            KVFormat("turboquant_k8v4", FP8, "uint8", key_bits=8, value_bits=4),
            KVFormat("turboquant_k5v4", "uint8", "uint8", key_bits=5, value_bits=4),
            KVFormat("turboquant_4bit_nc", "uint8", "uint8", key_bits=4, value_bits=4),
            KVFormat("turboquant_k3v4_nc", "uint8", "uint8", key_bits=3, value_bits=4),
            KVFormat("turboquant_3bit_nc", "uint8", "uint8", key_bits=3, value_bits=3),
        )
    },
}
"""Formats of keys and values by head, keyed by the names of `kv_cache_dtype`; latents can use plain ones too."""
MLA_FORMATS: dict[str, KVFormat] = {
    kv_format.name: kv_format
    for kv_format in (
        KVFormat("fp8_ds_mla", FP8, FP8, key_bits=8, value_bits=8, rope_dtype="bfloat16"),
        KVFormat("turboquant_mla_4bit", "uint8", "uint8", key_bits=4, value_bits=4, rope_dtype="bfloat16"),
        KVFormat("turboquant_mla_4bit_r8", "uint8", "uint8", key_bits=4, value_bits=4, rope_dtype=FP8),
    )
}
"""Formats of latents alone (MLA), with 8 and 4 bits."""
MLA_NAMES: dict[str, str] = {"fp8": "fp8_ds_mla", "turboquant_4bit_nc": "turboquant_mla_4bit"}
"""Maps a format of heads to the one that a model with latents uses instead."""
COMPRESSED_FORMATS: dict[str, KVFormat] = {
    "fp8_ds_v4": KVFormat("fp8_ds_v4", FP8, FP8, key_bits=8, value_bits=8, rope_dtype="bfloat16", has_exponents=True),
    "turboquant_mla_4bit": MLA_FORMATS["turboquant_mla_4bit"],
}
"""Formats of tokens and entries of compressed attention (DeepSeek-V4), with 8 and 4 bits."""
COMPRESSED_NAMES: dict[str, str] = {
    "fp8": "fp8_ds_v4",
    "fp8_ds_mla": "fp8_ds_v4",
    "turboquant_4bit_nc": "turboquant_mla_4bit",
}
"""Maps a format to the one with as many bits that such a model uses instead."""
ALL_KV_FORMATS: dict[str, KVFormat] = {**KV_FORMATS, **MLA_FORMATS, **COMPRESSED_FORMATS}
"""Every name that `kv_cache_dtype` accepts."""


def formats_of(is_latent: bool, is_compressed: bool = False) -> dict[str, KVFormat]:
    """Return the formats for latents, for tokens and entries (compressed), or for keys and values by head."""
    if not is_latent and not is_compressed:
        return KV_FORMATS
    plain = {name: value for name, value in KV_FORMATS.items() if not value.is_quantized}
    return {**plain, **(COMPRESSED_FORMATS if is_compressed else MLA_FORMATS)}


INDEX_FORMATS = ("fp8", "bfloat16", "float16", "float32")
"""Formats of an index beside latents (DSA): e4m3 with a float32 power-of-two scale per token, or plain."""


def index_planes(dtype: str, dim: int) -> tuple[Plane, ...]:
    """Return the planes of an index with `dim` elements per token."""
    if dtype == "fp8":
        return Plane("index", FP8, (dim,)), Plane("index_scale", "float32", (1,))
    return (Plane("index", dtype, (dim,)),)


def index_dtype_beside(kv_format: KVFormat) -> str:
    """Return the default type of an index beside latents: fp8 if they are quantized, else theirs."""
    return kv_format.index_dtype or ("fp8" if kv_format.is_quantized else kv_format.key_dtype)


DEFAULT_PROTECTED_LAYERS: dict[str, int] = {
    "fp8": 0,
    "turboquant_k8v4": 0,
    "turboquant_k5v4": 0,
    "turboquant_4bit_nc": 4,
    "turboquant_k3v4_nc": 4,
    "turboquant_3bit_nc": 4,
}
"""Default number of layers in a wider format without near tokens, by format; others protect none."""
DEFAULT_NEAR_TOKENS: dict[str, int] = dict.fromkeys(
    ("turboquant_k8v4", "turboquant_k5v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"), 64
)
"""Default tokens of the newest block that attention reads exact, by format; others read all of them as codes."""
QUANTIZED_HEAD_DIM = 16
"""Quantized formats require heads of a multiple of this many elements, which the rotation and the packed words need."""


def kv_format(name: str) -> KVFormat:
    """Look up a format by its name."""
    found = ALL_KV_FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        error = ConfigError("value.not_one_of", name="kv_cache_dtype", value=name, accepted=tuple(ALL_KV_FORMATS))
        raise error.hinting(did_you_mean(name, ALL_KV_FORMATS))
    return found

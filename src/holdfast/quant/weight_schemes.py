"""Weight schemes as values (codes, scales, bytes), and WeightRecipe: which weights to quantize and how; no torch.

A matrix of N rows and K columns becomes two planes: codes, and scales that multiply them (w is about code * scale).
Everything here counts rows, so leading dimensions of stacked experts multiply the rows.

name          codes   scales                                             activations
fp8           e4m3    float32, one a row                                 e4m3, one scale a token
fp8_tensor    e4m3    float32, one a part (q, k, v, ...), kept by row     e4m3, one scale a token
fp8_block     e4m3    float32, one for every 128 rows by 128 columns     e4m3, one scale for every 128 columns of a token
int8          int8    float32, one a row                                 as they are
mxfp4         e2m1    e8m0 (a power of two), one for every 32 columns    as they are
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache, reduce
from math import gcd, prod
from typing import Literal, NamedTuple

from holdfast.errors import ConfigError, did_you_mean
from holdfast.quant.formats import bytes_for

SCALE_SUFFIX = ".scale"
"""Suffix of a weight's name for its scales."""
UNQUANTIZED = "none"


class WeightPlane(NamedTuple):
    """One tensor of a quantized weight."""

    suffix: str
    """Suffix of the weight's name; empty for the codes."""
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return bytes_for(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How matrices are stored. Two schemes with the same planes differ in how scales are found."""

    name: str
    code_dtype: str
    scale_dtype: str
    block_rows: int = 1
    """Rows that share a scale."""
    block_columns: int = 0
    """Columns that share a scale; 0: the whole row."""
    codes_per_byte: int = 1
    quantizes_activations: bool = False
    """Products take activations as e4m3, scaled by token (and by block of columns if weights are)."""
    is_whole_tensor: bool = False
    """A scale follows from a whole checkpoint tensor, which needs two passes over it."""
    scale_is_power_of_two: bool = False

    def planes(self, shape: tuple[int, ...]) -> tuple[WeightPlane, WeightPlane]:
        """Return codes and scales of a weight of this shape; leading dimensions stay if rows have their own scales."""
        *leading, num_rows, num_columns = shape
        assert num_columns % self.codes_per_byte == 0, f"{self.name}: {shape=} has half a byte of codes in a row"
        codes = WeightPlane("", (*leading, num_rows, num_columns // self.codes_per_byte), self.code_dtype)
        return codes, WeightPlane(SCALE_SUFFIX, self.scale_shape(shape), self.scale_dtype)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return [..., N] for scales by row, else [..., N / block_rows, K / block_columns], both rounded up."""
        *leading, num_rows, num_columns = shape
        assert self.block_rows == 1 or num_rows % self.block_rows == 0 or not leading, (
            f"{self.name}: {num_rows} rows of each of {prod(leading)} matrices in blocks of {self.block_rows}"
        )
        scale_rows = -(-num_rows // self.block_rows)
        if self.block_columns == 0:
            return (*leading, scale_rows)
        return (*leading, scale_rows, -(-num_columns // self.block_columns))

    def with_parts(self, part_rows: Iterable[int]) -> "WeightScheme":
        """Return the scheme with blocks of rows so low that none crosses two of a weight's parts.

        Parts of 576 and 192 rows get blocks of 64 instead of 128 rows; parts in whole blocks change nothing.
        """
        if self.block_rows == 1:
            return self
        return replace(self, block_rows=reduce(gcd, part_rows, self.block_rows))

    def unsupported(self, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of this shape cannot be stored so; None if it can."""
        num_columns = shape[-1]
        whole = self.block_columns if self.codes_per_byte > 1 else 1
        if num_columns % whole:
            return f"it has {num_columns} columns, and {self.name} stores {whole} at a time"
        return None


FP8 = WeightScheme("fp8", "float8_e4m3fn", "float32", quantizes_activations=True)
FP8_TENSOR = replace(FP8, name="fp8_tensor", is_whole_tensor=True)
FP8_BLOCK = replace(FP8, name="fp8_block", block_rows=128, block_columns=128)
INT8 = WeightScheme("int8", "int8", "float32")
MXFP4 = WeightScheme("mxfp4", "uint8", "uint8", block_columns=32, codes_per_byte=2, scale_is_power_of_two=True)
WEIGHT_SCHEMES: Mapping[str, WeightScheme] = {
    scheme.name: scheme for scheme in (FP8, FP8_TENSOR, FP8_BLOCK, INT8, MXFP4)
}
"""Values of `quantization`."""
ROW_SCHEMES = tuple(scheme for scheme in WEIGHT_SCHEMES.values() if scheme.block_columns == 0)
"""Schemes with a scale per row, which a head requires."""
HEAD_SCHEME = INT8
"""Scheme of head and embeddings. Rows are looked up one by one, so each needs a scale. On rows without outliers int8
loses a tenth of what e4m3 does (docs/log.md)."""


def find_scheme(value: object, name: str = "quantization") -> WeightScheme | None:
    """Look up a scheme by its name; None and "none" leave weights as the checkpoint has them."""
    if value is None or value == UNQUANTIZED:
        return None
    scheme = WEIGHT_SCHEMES.get(value) if isinstance(value, str) else None
    if scheme is None:
        names = (UNQUANTIZED, *WEIGHT_SCHEMES)
        error = ConfigError("value.not_one_of", name=name, value=value, accepted=names)
        raise error.hinting(did_you_mean(value, names))
    return scheme


PackedActivations = Literal["int8", "full"]
"""Activations of a product with packed weights: 8-bit codes with a scale for every 32 columns, or as they are."""


class PackedPolicy(NamedTuple):
    """Which weights that a checkpoint stores in blocks of few bits stay as they are stored."""

    keeps: Literal["none", "with_kernel", "all"] = "none"
    """None: every block is expanded; those that a kernel of the device multiplies; all, some through the reference."""
    device_kind: str = "cpu"
    activations: PackedActivations = "full"


EXPANDED = PackedPolicy()
QuantizedEmbeddings = Literal["none", "head", "all"]
EMBEDDING_CHOICES: tuple[QuantizedEmbeddings, ...] = ("none", "head", "all")
"""none: neither head nor embedding; head: the head, even if it is the embedding (tied); all: both."""
REGEX_PREFIX = "re:"


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """Which weights are quantized: matrices of layers and experts, by default the head, never routers, norms and biases."""

    scheme: WeightScheme | None = None
    embeddings: QuantizedEmbeddings = "head"
    ignore: tuple[str, ...] = ()
    """Globs such as "*.down_proj*", or regular expressions after "re:", over names of a weight and its tensors."""
    head_scheme: WeightScheme = HEAD_SCHEME
    """Differs only if a checkpoint stores its head in another scheme."""
    expert_scheme: WeightScheme | None = None
    """The scheme of experts, if a checkpoint stores them differently; None: the same."""
    packed: PackedPolicy = EXPANDED
    """Applies if nothing is quantized: a recipe with a scheme quantizes expanded rows again."""

    def __post_init__(self) -> None:
        if self.embeddings not in EMBEDDING_CHOICES:
            values = {"name": "quantized_embeddings", "value": self.embeddings, "accepted": EMBEDDING_CHOICES}
            raise ConfigError("value.not_one_of", **values)
        for pattern in self.ignore:
            check_pattern(pattern, "quantization_ignore")

    def scheme_for(self, kind: str, names: Iterable[str]) -> WeightScheme | None:
        """Return the scheme of a weight of this kind ("linear", "expert", "head", ...) and names; None: unquantized.

        A pattern for one part keeps the whole fused weight from being quantized.
        """
        if self.scheme is None or self.is_ignored(names):
            return None
        if kind in ("linear", "expert"):
            return self.of_kind(kind)
        wanted = {"none": (), "head": ("head",), "all": ("head", "embedding")}[self.embeddings]
        if kind not in wanted:
            return None
        return self.head_scheme if kind == "head" else HEAD_SCHEME

    def of_kind(self, kind: str) -> WeightScheme | None:
        """Return the scheme of layers, or that of their experts."""
        return self.expert_scheme or self.scheme if kind == "expert" else self.scheme

    def is_ignored(self, names: Iterable[str]) -> bool:
        return bool(self.ignore) and any(map(_matcher(self.ignore), names))


AS_STORED = WeightRecipe()
"""Nothing is quantized."""


def check_pattern(pattern: object, name: str) -> None:
    """Refuse a pattern that could never match, whatever the model."""
    problem = ""
    if not isinstance(pattern, str):
        problem = "is not a string"
    elif not pattern.strip().removeprefix(REGEX_PREFIX):
        problem = "is empty"
    elif pattern.strip().startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.strip().removeprefix(REGEX_PREFIX))
        except (re.error, RecursionError, OverflowError) as error:
            problem = f"is not a regular expression ({error})"
    if problem:
        raise ConfigError("config.pattern", name=name, value=pattern, problem=problem)


@lru_cache(maxsize=256)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that matches names. Stored checkpoints have hundreds of plain names, which take one lookup."""
    plain = frozenset(pattern for pattern in patterns if not _is_expression(pattern))
    others = [re.compile(_as_regex(pattern)) for pattern in patterns if pattern not in plain]

    def matches(name: str) -> bool:
        if name in plain or name.removesuffix(".weight") in plain:
            return True
        return any(other.match(name) is not None for other in others)

    return matches


def _is_expression(pattern: str) -> bool:
    return pattern.startswith(REGEX_PREFIX) or any(mark in pattern for mark in "*?[")


def _as_regex(pattern: str) -> str:
    if pattern.startswith(REGEX_PREFIX):
        return pattern.removeprefix(REGEX_PREFIX)
    return f"{translate(pattern)}|{translate(f'{pattern}.weight')}"

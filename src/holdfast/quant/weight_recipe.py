"""WeightRecipe: which weights of a model are quantized, and how; plans and loads ask the same recipe; no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from holdfast.errors import ConfigError, shown
from holdfast.quant.weight_schemes import HEAD_SCHEME, WeightScheme

QuantizedEmbeddings = Literal["none", "head", "all"]
EMBEDDING_CHOICES: tuple[QuantizedEmbeddings, ...] = ("none", "head", "all")
"""none: neither head nor embedding; head: the head, also where it is the embedding (tied); all: both."""
REGEX_PREFIX = "re:"


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """Matrices of layers and experts are quantized, and the head unless told otherwise; routers, norms and biases never are."""

    scheme: WeightScheme | None = None
    embeddings: QuantizedEmbeddings = "head"
    ignore: tuple[str, ...] = ()
    """Globs such as "*.down_proj*", or regular expressions behind "re:", over a weight's own name and its tensors' names."""
    head_scheme: WeightScheme = HEAD_SCHEME
    """Another one only where a checkpoint stores its head so."""

    def __post_init__(self) -> None:
        if self.embeddings not in EMBEDDING_CHOICES:
            raise ConfigError(
                f"quantized embeddings {shown(self.embeddings)} were asked",
                f"the choices are {', '.join(EMBEDDING_CHOICES)}",
                "take head, which quantizes the head alone",
            )
        for pattern in self.ignore:
            _check_pattern(pattern)

    def scheme_for(self, kind: str, names: Iterable[str]) -> WeightScheme | None:
        """The scheme of a weight of this kind ("linear", "expert", "head", ...), known by any of these names; None: as it is.

        A fused weight is left alone as soon as one of its parts is to be.
        """
        if self.scheme is None or self.is_ignored(names):
            return None
        if kind in ("linear", "expert"):
            return self.scheme
        wanted = {"none": (), "head": ("head",), "all": ("head", "embedding")}[self.embeddings]
        if kind not in wanted:
            return None
        return self.head_scheme if kind == "head" else HEAD_SCHEME

    def is_ignored(self, names: Iterable[str]) -> bool:
        return any(_matches(pattern, name) for pattern in self.ignore for name in names)


AS_STORED = WeightRecipe()
"""Nothing is quantized."""


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix(REGEX_PREFIX) if pattern.startswith(REGEX_PREFIX) else "")
    except re.error as error:
        raise ConfigError(
            f"weights that match {shown(pattern)} are to stay as they are",
            f"it is no regular expression: {error}",
            'correct it, or give a glob without "re:"',
        ) from error


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern.removeprefix(REGEX_PREFIX), name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.weight")

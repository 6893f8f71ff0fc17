"""PoolingParams, and what embeddings and scores come back as, in vLLM's names; vectors from hidden states; no torch.

H dimensions of a hidden state
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import RequestError, shown

if TYPE_CHECKING:
    import numpy as np

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
"""numpy is imported with the first vector, so that a wrong path does not wait for it."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is made of a hidden state."""

    dimensions: int | None = None
    """Keep so many numbers from the first on (Matryoshka), then normalise; None keeps all."""
    normalize: bool | None = None
    """Whether a vector has unit length; None does as the model's files say, and yes if they say nothing."""
    truncate_prompt_tokens: int | None = None
    """-1 cuts a text that is longer than the context at its end; None refuses it."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError(
                f"dimensions={shown(self.dimensions)} was given", "a count from 1 on works", "change it or leave it out"
            )
        if self.normalize not in (None, True, False):
            raise RequestError(f"normalize={shown(self.normalize)} was given", "True or False works", "change it")
        if self.truncate_prompt_tokens not in (None, -1):
            raise RequestError(
                f"truncate_prompt_tokens={shown(self.truncate_prompt_tokens)} was given",
                "-1 cuts an input to the context, None refuses a longer one",
                "pass one of these",
            )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """An input and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """One vector."""

    data: Any
    """A float32 tensor."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """An input and what was pooled from it."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Two texts and their score; `prompt_token_ids` are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


def vector_of(pooled: bytes, dimensions: int | None, normalizes: bool) -> Vector:
    """A hidden state cut to its first numbers, and to unit length; one without length stays as it is."""
    import numpy as np

    vector_H = np.frombuffer(pooled, dtype="<f4")[:dimensions].astype(np.float32)
    if normalizes:
        length = float(np.linalg.norm(vector_H.astype(np.float64)))
        if length > 0.0:
            vector_H /= np.float32(length)
    return vector_H


def cosine(one_H: Vector, other_H: Vector) -> float:
    """Of two vectors of any length; 0 if one has none."""
    import numpy as np

    one, other = one_H.astype(np.float64), other_H.astype(np.float64)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0.0 else 0.0

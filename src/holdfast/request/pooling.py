"""PoolingParams, outputs of embeddings and scores in vLLM's names, vectors from hidden states; no torch.

H dimensions of a hidden state
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
"""numpy is imported with the first vector, to start quickly."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Options for turning a hidden state into a vector."""

    dimensions: int | None = None
    """Keep this many first dimensions (Matryoshka), then normalise; None keeps all."""
    normalize: bool | None = None
    """True for unit length; None follows the model's files, or True."""
    truncate_prompt_tokens: int | None = None
    """-1 truncates a text longer than the context; None refuses it."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError("request.not_dimensions", name="dimensions", value=self.dimensions)
        if self.normalize not in (None, True, False):
            raise RequestError("value.not_bool", name="normalize", value=self.normalize)
        if self.truncate_prompt_tokens not in (None, -1):
            raise RequestError(
                "request.not_truncation", name="truncate_prompt_tokens", value=self.truncate_prompt_tokens
            )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """One vector, a float32 tensor."""

    data: Any


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Similarity of two texts."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """An input and its pooled vector."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """An input and its embedding."""

    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """Two texts and their score; `prompt_token_ids` are those of both."""

    outputs: ScoringOutput


def vector_of(pooled: bytes, dimensions: int | None, normalizes: bool) -> Vector:
    """Cut a hidden state to its first dimensions, and normalise it unless it is zero."""
    import numpy as np

    vector_H = np.frombuffer(pooled, dtype="<f4")[:dimensions].astype(np.float32)
    if normalizes:
        length = float(np.linalg.norm(vector_H.astype(np.float64)))
        if length > 0.0:
            vector_H /= np.float32(length)
    return vector_H


def cosine(one_H: Vector, other_H: Vector) -> float:
    """Cosine similarity; 0 if a vector is zero."""
    import numpy as np

    one, other = one_H.astype(np.float64), other_H.astype(np.float64)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0.0 else 0.0

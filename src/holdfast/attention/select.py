"""Pick the first backend that takes every layer, or say why each of them declined."""

from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.attention.backend import AttentionBackend, AttentionSpec
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.cache.storage import PageStorage
from holdfast.errors import UnsupportedModelError
from holdfast.memory.planner import Term


class Candidate(Protocol):
    """A backend's class."""

    name: str

    def __call__(self, specs: Sequence[AttentionSpec], storage: PageStorage) -> AttentionBackend[Any]: ...

    @staticmethod
    def unsupported(spec: AttentionSpec) -> str | None: ...

    @staticmethod
    def terms(specs: Sequence[AttentionSpec]) -> tuple[Term, ...]: ...


CANDIDATES: tuple[Candidate, ...] = (NativePagedAttention, TorchPagedAttention)
"""The fastest first."""


def select_backend(candidates: Sequence[Candidate], specs: Sequence[AttentionSpec]) -> Candidate:
    """The first candidate that declines no layer."""
    declined = []
    for candidate in candidates:
        reasons = {reason: None for spec in specs if (reason := candidate.unsupported(spec)) is not None}
        if not reasons:
            return candidate
        declined.append(f"{candidate.name}: {', '.join(reasons)}")
    raise UnsupportedModelError(
        "attention for this model was asked",
        f"no backend fits ({'; '.join(declined)})",
        "choose another kv_cache_dtype",
    )

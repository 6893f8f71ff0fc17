"""Pick the first backend that takes every layer, or say why each of them declined."""

from collections.abc import Sequence

from holdfast.attention.backend import AttentionSpec
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.torch_paged import TorchPagedAttention
from holdfast.errors import UnsupportedModelError

BackendType = type[NativePagedAttention] | type[TorchPagedAttention]

CANDIDATES: tuple[BackendType, ...] = (NativePagedAttention, TorchPagedAttention)
"""The fastest first."""


def select_backend(candidates: Sequence[BackendType], specs: Sequence[AttentionSpec]) -> BackendType:
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

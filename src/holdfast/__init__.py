"""Holdfast: an LLM inference engine that plans its memory, takes it once, and holds it.

The names below are imported on first use, so that `import holdfast` costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import holdfast.forks  # noqa: F401 - to see forks from here on

if TYPE_CHECKING:
    from holdfast.api.async_llm import AsyncLLM
    from holdfast.api.llm import LLM
    from holdfast.config import EngineConfig
    from holdfast.engine.admission import TextPrompt, TokensPrompt
    from holdfast.errors import HoldfastError
    from holdfast.integrations.transformers import TurboQuantCache
    from holdfast.request.outputs import CompletionOutput, RequestOutput
    from holdfast.request.pooling import (
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from holdfast.request.sampling_params import SamplingParams
    from holdfast.request.structured import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "HoldfastError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "TurboQuantCache",
    "__version__",
]
_HOMES = {
    "LLM": "holdfast.api.llm",
    "AsyncLLM": "holdfast.api.async_llm",
    "CompletionOutput": "holdfast.request.outputs",
    "EngineConfig": "holdfast.config",
    "HoldfastError": "holdfast.errors",
    "RequestOutput": "holdfast.request.outputs",
    "SamplingParams": "holdfast.request.sampling_params",
    "StructuredOutputs": "holdfast.request.structured",
    "TextPrompt": "holdfast.engine.admission",
    "TokensPrompt": "holdfast.engine.admission",
    "TurboQuantCache": "holdfast.integrations.transformers",
    "EmbeddingOutput": "holdfast.request.pooling",
    "EmbeddingRequestOutput": "holdfast.request.pooling",
    "PoolingOutput": "holdfast.request.pooling",
    "PoolingParams": "holdfast.request.pooling",
    "PoolingRequestOutput": "holdfast.request.pooling",
    "ScoringOutput": "holdfast.request.pooling",
    "ScoringRequestOutput": "holdfast.request.pooling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

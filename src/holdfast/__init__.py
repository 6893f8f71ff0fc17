"""Holdfast: an LLM inference engine that plans its memory, takes it once, and holds it.

The names below are imported on first use, so that `import holdfast` costs no torch.
"""

from typing import TYPE_CHECKING

import holdfast.forks  # noqa: F401 - registers the fork handler
from holdfast.api.vllm_paths import HOMES, install, look_up
from holdfast.errors import NameAbsentError
from holdfast.request.vllm_names import ABSENT_NAMES

if TYPE_CHECKING:
    from holdfast.api.async_llm import AsyncLLM
    from holdfast.api.async_llm import AsyncLLM as AsyncLLMEngine
    from holdfast.api.llm import LLM
    from holdfast.api.llm_engine import LLMEngine
    from holdfast.cli.engine_args import AsyncEngineArgs, EngineArgs
    from holdfast.config import EngineConfig
    from holdfast.engine.admission import Prompt as PromptType
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
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "HoldfastError",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
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
install()  # import paths of vLLM: holdfast.sampling_params and the like


def __getattr__(name: str) -> object:
    if name in HOMES:
        return look_up(name, HOMES)
    if name in ABSENT_NAMES:
        raise NameAbsentError("api.absent_name", name=f"holdfast.{name}", advice=ABSENT_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""The keyword options that LLM and AsyncLLM share, and what the makers of a model advise for sampling; no torch."""

from typing import TypedDict

from holdfast.errors import ModelFormatError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.sampling_params import SamplingParams

ADVISED = ("temperature", "top_p", "top_k", "repetition_penalty")
"""What makers of models advise in generation_config.json."""


class EngineOptions(TypedDict, total=False):
    """Every field of `EngineConfig` but the model, for editors and type checkers; `EngineConfig` explains and checks them."""

    revision: str | None
    tokenizer: str | None
    chat_template: str | None
    dtype: str
    kv_cache_dtype: str
    kv_protected_layers: int | str | None
    kv_protected_dtype: str
    quantization: str | None
    quantized_embeddings: str
    quantization_ignore: tuple[str, ...] | str
    allow_nonfinite: bool
    save_quantized: str | None
    weight_cache: str
    load_format: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_queue: int
    page_tokens: int | None
    memory_utilization: float | None
    memory_limit: str | int | None
    kv_cache_memory: str | int | None
    enable_prefix_caching: bool
    batch_invariant: bool
    enforce_eager: bool
    device: str
    seed: int
    gpu_memory_utilization: float | None
    """vLLM's name of memory_utilization."""
    block_size: int | None
    """vLLM's name of page_tokens."""
    kv_cache_memory_bytes: str | int | None
    """vLLM's name of kv_cache_memory."""


def sampling_params_from(generation: GenerationDefaults) -> SamplingParams:
    """What the makers of the model advise; the usual defaults where they say nothing."""
    advised = {name: value for name in ADVISED if (value := getattr(generation, name)) is not None}
    try:
        return SamplingParams(**advised)
    except RequestError as error:
        raise ModelFormatError(
            "the model's own sampling defaults were asked", str(error), "pass SamplingParams instead"
        ) from error

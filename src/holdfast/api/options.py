"""Keyword options of LLM and AsyncLLM, and the sampling defaults of a model; no torch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypedDict, TypeVar

from holdfast.engine.admission import ChatOptions
from holdfast.errors import KeywordError, ModelFormatError, RequestError
from holdfast.loading.planning.open_model import GenerationDefaults
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.vllm_names import CALL_NAMES, settle

_Call = ParamSpec("_Call")
_Result = TypeVar("_Result")

ADVISED = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Sampling defaults in generation_config.json."""


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig` except the model, for editors and type checkers; see `EngineConfig`."""

    revision: str | None
    tokenizer: str | None
    chat_template: str | None
    dtype: str
    kv_cache_dtype: str
    kv_quality: str | None
    kv_protected_layers: int | str | None
    index_cache_dtype: str
    kv_protected_dtype: str
    kv_near_tokens: int | None
    kv_key_scale: bool
    quantization: str | None
    quantized_embeddings: str
    quantization_ignore: tuple[str, ...] | str
    packed_weights: str | None
    packed_activations: str
    allow_nonfinite: bool
    save_quantized: str | None
    weight_cache: str
    load_format: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_step_stretch: float | str | None
    max_queue: int
    scheduling_policy: str
    page_tokens: int | None
    memory_utilization: float | None
    memory_limit: str | int | None
    kv_cache_memory: str | int | None
    enable_prefix_caching: bool
    state_snapshots: int | None
    snapshot_tokens: int
    batch_invariant: bool
    speculative: str | None
    enforce_eager: bool
    device: str
    seed: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    nnodes: int | None
    enable_expert_parallel: bool
    tensor_parallel_sums: str
    core_process: bool
    core_timeout: float
    gpu_memory_utilization: float | None
    """vLLM's name for memory_utilization."""
    block_size: int | None
    """vLLM's name for page_tokens."""
    kv_cache_memory_bytes: str | int | None
    """vLLM's name for kv_cache_memory."""
    speculative_config: Mapping[str, object] | None
    """vLLM's name for speculative, as a dict: {"method": "ngram", "num_speculative_tokens": 4}."""


def takes_vllm_names(call: Callable[_Call, _Result]) -> Callable[_Call, _Result]:
    """Decorate a method: accept vLLM's arguments without effect; refuse an unknown name and suggest the nearest."""
    names = set(inspect.signature(call).parameters) - {"self"}

    @wraps(call)
    def checked(*args: _Call.args, **options: _Call.kwargs) -> _Result:
        if not options.keys() <= names:
            settled = settle(options, names, CALL_NAMES, KeywordError)
            return call(*args, **settled.options)  # type: ignore[arg-type]
        return call(*args, **options)

    return checked


class ChatKeywords(TypedDict, total=False):
    """Keywords of calls with a conversation."""

    chat_template: str | None
    """Template text that replaces the model's own."""
    chat_template_kwargs: Mapping[str, object] | None
    """More template variables, such as enable_thinking."""
    add_generation_prompt: bool
    """End the prompt with the start of an answer. Default: True."""
    continue_final_message: bool
    """Continue the last message; needs add_generation_prompt=False."""
    tools: Sequence[object] | None
    """Tools for the template."""
    allow_special_tokens: bool
    """Parse special tokens such as <|im_end|> in messages; by default they are plain text."""


def chat_values(keywords: Mapping[str, object]) -> tuple[dict[str, object], ChatOptions]:
    """Split a call's keywords into template variables and chat options."""
    settled = settle(keywords, ChatKeywords.__annotations__, CALL_NAMES, KeywordError).options
    template, allows = settled.pop("chat_template", None), settled.pop("allow_special_tokens", False)
    more = settled.pop("chat_template_kwargs", None) or {}
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise RequestError("api.not_template_kwargs", value=more)
    values = {name: value for name, value in settled.items() if name != "tools" or value is not None}
    if allows not in (True, False):
        raise RequestError("value.not_bool", name="allow_special_tokens", value=allows)
    return {**more, **values}, ChatOptions(template, bool(allows))  # type: ignore[arg-type]


def sampling_params_from(generation: GenerationDefaults) -> SamplingParams:
    """Return SamplingParams with the model's defaults."""
    advised = {name: value for name in ADVISED if (value := getattr(generation, name)) is not None}
    try:
        return SamplingParams(**advised)
    except RequestError as error:
        raise ModelFormatError("api.bad_model_defaults", reason=str(error)) from error

"""The keyword options that LLM and AsyncLLM share, and what the makers of a model advise for sampling; no torch."""

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
"""What makers of models advise in generation_config.json."""


class EngineOptions(TypedDict, total=False):
    """Every field of `EngineConfig` but the model, for editors and type checkers; `EngineConfig` explains and checks them."""

    revision: str | None
    tokenizer: str | None
    chat_template: str | None
    dtype: str
    kv_cache_dtype: str
    kv_protected_layers: int | str | None
    index_cache_dtype: str
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
    max_step_stretch: float | str | None
    max_queue: int
    scheduling_policy: str
    page_tokens: int | None
    memory_utilization: float | None
    memory_limit: str | int | None
    kv_cache_memory: str | int | None
    enable_prefix_caching: bool
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
    """vLLM's name of memory_utilization."""
    block_size: int | None
    """vLLM's name of page_tokens."""
    kv_cache_memory_bytes: str | int | None
    """vLLM's name of kv_cache_memory."""
    speculative_config: Mapping[str, object] | None
    """vLLM's name of speculative, as its dict: {"method": "ngram", "num_speculative_tokens": 4}."""


def takes_vllm_names(call: Callable[_Call, _Result]) -> Callable[_Call, _Result]:
    """The same method: vLLM's other arguments are taken where they ask for nothing, a wrong name tells the nearest."""
    names = set(inspect.signature(call).parameters) - {"self"}

    @wraps(call)
    def checked(*args: _Call.args, **options: _Call.kwargs) -> _Result:
        if not options.keys() <= names:
            settled = settle(options, names, CALL_NAMES, KeywordError)
            return call(*args, **settled.options)  # type: ignore[arg-type]
        return call(*args, **options)

    return checked


class ChatKeywords(TypedDict, total=False):
    """Keywords of every call that takes a conversation."""

    chat_template: str | None
    """The text of a template for this call, in place of the model's own."""
    chat_template_kwargs: Mapping[str, object] | None
    """Further variables that the template knows, such as enable_thinking."""
    add_generation_prompt: bool
    """Whether the prompt ends where an answer begins; True unless told otherwise."""
    continue_final_message: bool
    """Go on with the last message, in place of a new one; needs add_generation_prompt=False."""
    tools: Sequence[object] | None
    """Tools as the template lists them."""
    allow_special_tokens: bool
    """Read control tokens that are written out in messages, such as <|im_end|>, as control tokens; else they are text."""


def chat_values(keywords: Mapping[str, object]) -> tuple[dict[str, object], ChatOptions]:
    """What a template is told, and how a conversation is read, from the keywords of a call."""
    settled = settle(keywords, ChatKeywords.__annotations__, CALL_NAMES, KeywordError).options
    template, allows = settled.pop("chat_template", None), settled.pop("allow_special_tokens", False)
    told = settled.pop("chat_template_kwargs", None) or {}
    if not isinstance(told, Mapping) or not all(isinstance(name, str) for name in told):
        raise RequestError("chat_template_kwargs were given", "a dict of names and values works", "pass such a dict")
    values = {name: value for name, value in settled.items() if name != "tools" or value is not None}
    if allows not in (True, False):
        raise RequestError("allow_special_tokens was asked", "it is a switch", "pass True or False")
    return {**told, **values}, ChatOptions(template, bool(allows))  # type: ignore[arg-type]


_Given = TypeVar("_Given")


def one_of_params(params: _Given | None, sampling_params: _Given | None) -> _Given | None:
    """Params by whichever name they were given."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params were given", "they are the same", "pass one of them")
    return params if params is not None else sampling_params


def sampling_params_from(generation: GenerationDefaults) -> SamplingParams:
    """What the makers of the model advise; the usual defaults where they say nothing."""
    advised = {name: value for name in ADVISED if (value := getattr(generation, name)) is not None}
    try:
        return SamplingParams(**advised)
    except RequestError as error:
        raise ModelFormatError(
            "the model's own sampling defaults were asked", str(error), "pass SamplingParams instead"
        ) from error

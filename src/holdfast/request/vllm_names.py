"""vLLM's names: those that change nothing here, those that are not in this version, and the nearest to a wrong one; no torch.

A call is settled before it is made: names and values that mean the same here are taken, those without an effect are
taken and listed for one log line, and what would change an answer or is missing is refused with what to do.
docs/from_vllm.md has the same tables for people; a test compares them.
"""

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import ConfigError, HoldfastError, KeywordError, NameAbsentError, shown

NOT_HERE = "it is not in this version"


@dataclass(frozen=True, slots=True)
class Foreign:
    """One of vLLM's names that is no name of ours."""

    words: str
    """Why it changes nothing; or, where only some values are taken, what to do about the others."""
    taken: tuple[object, ...] | None = None
    """Values that ask for nothing; None: all of them."""
    is_switch: bool = False
    """On a command line: --name and --no-name, without a value."""

    def takes(self, value: object) -> bool:
        # By type too: 1 == True, and a tensor compares with nothing.
        return self.taken is None or any(type(value) is type(quiet) and value == quiet for quiet in self.taken)

    @property
    def is_missing(self) -> bool:
        """True where some value of it asks for what is not here."""
        return self.taken is not None


def _same(words: str, *names: str) -> dict[str, Foreign]:
    return {name: Foreign(words, is_switch=name in _SWITCHES) for name in names}


def _only(words: str, *taken: object, names: str) -> dict[str, Foreign]:
    is_switch = any(isinstance(value, bool) for value in taken)
    return {name: Foreign(words, (None, *taken), is_switch) for name in names.split()}


_SWITCHES = frozenset(
    (
        *("trust_remote_code", "disable_cascade_attn", "disable_log_stats", "disable_log_requests"),
        *("enable_log_requests", "aggregate_engine_logging", "disable_custom_all_reduce", "language_model_only"),
        *("skip_mm_profiling", "ray_workers_use_nsight", "scheduler_reserve_full_isl", "kv_cache_metrics"),
        *("disable_hybrid_kv_cache_manager", "cudagraph_metrics", "enable_mfu_metrics", "use_tqdm_on_load"),
        *("enable_logging_iteration_details", "enable_flashinfer_autotune", "async_scheduling", "worker_use_ray"),
        *("fail_on_environ_validation", "use_v2_block_manager", "multi_step_stream_outputs", "numa_bind"),
        *("disable_async_output_proc", "disable_mm_preprocessor_cache", "enable_auto_tool_choice"),
        *("exclude_tools_when_tool_choice_none", "enable_prompt_tokens_details", "enable_force_include_usage"),
        *("enable_server_load_tracking", "disable_uvicorn_access_log", "disable_fastapi_docs", "enable_log_deltas"),
        *("enable_request_id_headers", "allow_credentials", "enable_per_request_metrics", "log_error_stack"),
    )
)
"""Options of vLLM without a value, among those that are taken whatever they say."""


ENGINE_ALIASES: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_utilization",
    "block_size": "page_tokens",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "speculative_config": "speculative",
}
"""vLLM's names of engine options, and ours."""

SAME_ENGINE_NAMES = (
    *("model", "tokenizer", "dtype", "kv_cache_dtype", "quantization", "load_format", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enforce_eager", "device", "seed"),
    *("scheduling_policy", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "nnodes"),
)
"""Engine options that are called the same in both."""

_GRAPHS = "graph sizes follow from the plan"
_LOG = "statistics are asked for: llm.stats(), llm.memory"
_RANKS = "ranks are processes of this engine, and its plan says how they exchange"
_SHARED = (
    "tensor_parallel_size, pipeline_parallel_size and enable_expert_parallel are how GPUs share a model: leave it out"
)
_TEXT = "only text is read here: leave it out"
_LORA = "merge the adapter into the weights and open the merged folder"
_DRAFT = "use speculative: ngram:4 proposes from the text itself; answers are the same"
_GRAMMAR = "use SamplingParams(structured_outputs={...}), with json, regex, choice, grammar or json_object"
_ROUTER = "start a server for each and put a router in front of them"
_TRACE = "give the tokens as prompt_token_ids, with prompt_logprobs"
_POOL = "every model generates and embeds, and some score, without it: leave it out"
_MAMBA = "no model with such layers runs here"
_EDIT = "change config.json in a copy of the model's folder"

ENGINE_NAMES: Mapping[str, Foreign] = {
    **_same("code out of a model folder is never run, and needs no leave", "trust_remote_code", "code_revision"),
    **_same(_LOG, "disable_log_stats", "aggregate_engine_logging"),
    **_same("holdfast serve logs prompts only with --log-requests", "disable_log_requests", "enable_log_requests"),
    **_same(_LOG, "kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics"),
    **_same(_LOG, "show_hidden_metrics_for_version", "enable_logging_iteration_details", "log_stats_interval"),
    **_same("nothing is swapped: a preempted sequence computes again", "swap_space", "preemption_mode"),
    **_same(_GRAPHS, "max_seq_len_to_capture", "max_context_len_to_capture", "cudagraph_capture_sizes"),
    **_same(_GRAPHS, "max_cudagraph_capture_size", "compilation_config", "optimization_level", "performance_mode"),
    **_same(
        "kernels are chosen from the plan", "attention_backend", "attention_config", "kernel_config", "moe_backend"
    ),
    **_same("kernels are chosen from the plan", "enable_flashinfer_autotune", "disable_cascade_attn", "ir_op_priority"),
    **_same(_RANKS, "disable_custom_all_reduce", "worker_use_ray", "distributed_executor_backend"),
    **_same(_RANKS, "distributed_timeout_seconds", "max_parallel_loading_workers", "ray_workers_use_nsight"),
    **_same(_RANKS, "all2all_backend"),
    **_same("torchrun tells them", "master_addr", "master_port", "node_rank"),
    **_same("the loop of steps has one form", "use_v2_block_manager", "num_scheduler_steps", "async_scheduling"),
    **_same("the loop of steps has one form", "multi_step_stream_outputs", "disable_async_output_proc"),
    **_same("the loop of steps has one form", "scheduler_delay_factor", "num_lookahead_slots", "stream_interval"),
    **_same("the loop of steps has one form", "max_num_partial_prefills", "max_long_partial_prefills"),
    **_same("the loop of steps has one form", "long_prefill_token_threshold", "disable_hybrid_kv_cache_manager"),
    **_same("the loop of steps has one form", "scheduler_reserve_full_isl", "renderer_num_workers"),
    **_same("texts are tokenized in this process", "tokenizer_pool_size", "tokenizer_pool_type"),
    **_same("texts are tokenized in this process", "tokenizer_pool_extra_config"),
    **_same("prefixes are compared token by token, not by hash", "prefix_caching_hash_algo"),
    **_same("a bar shows where somebody watches", "use_tqdm_on_load"),
    **_same("readers and chunks follow from the plan", "safetensors_load_strategy", "model_loader_extra_config"),
    **_same("only safetensors and GGUF are read, whatever else is there", "ignore_patterns", "pt_load_map_location"),
    **_same("a name for a server", "served_model_name"),
    **_same("numbers of experts are the model's", "expert_placement_strategy", "eplb_config"),
    **_same("up to 20 are reported", "max_logprobs"),
    **_same("kernels are chosen from the plan", "linear_backend", "gdn_prefill_backend", "mamba_backend"),
    **_same("readers and chunks follow from the plan", "safetensors_prefetch_num_threads"),
    **_same("the system places processes", "numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
    **_same("nothing waits for a shutdown", "shutdown_timeout", "fail_on_environ_validation"),
    **_only("chunks are how long prompts run: leave it out", True, names="enable_chunked_prefill"),
    **_only("the model's tokenizer.json or GGUF metadata is read", "auto", "hf", "fast", names="tokenizer_mode"),
    **_only("config.json or GGUF metadata is read: leave it out", "auto", "hf", names="config_format"),
    **_only("the decoder of this engine is the only one", "auto", "vllm", names="model_impl"),
    **_only(_POOL, "auto", "generate", "embed", "embedding", "score", "pooling", names="task runner"),
    **_only(_POOL, "auto", "none", "embed", names="convert"),
    **_only(_POOL, names="pooler_config override_pooler_config"),
    **_only(_ROUTER, 1, names="data_parallel_size"),
    **_only(
        _ROUTER,
        names="data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port",
    ),
    **_only(_ROUTER, "mp", names="data_parallel_backend"),
    **_only(_ROUTER, False, names="data_parallel_external_lb"),
    **_only("set CUDA_VISIBLE_DEVICES", names="device_ids"),
    **_only(_SHARED, 1, names="prefill_context_parallel_size decode_context_parallel_size"),
    **_only(_SHARED, False, names="enable_eplb enable_dbo data_parallel_hybrid_lb"),
    **_only("use memory_limit, quantization or a KV format", 0, 0.0, names="cpu_offload_gb kv_offloading_size"),
    **_only("use kv_cache_memory, in bytes", names="num_gpu_blocks_override"),
    **_only("use max_model_len", False, names="disable_sliding_window"),
    **_only("write what you need with the streams of AsyncLLM", names="scheduler_cls logits_processors worker_cls"),
    **_only("write what you need with the streams of AsyncLLM", "", names="worker_extension_cls"),
    **_only(
        _DRAFT,
        names="speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "speculative_max_model_len spec_method spec_model spec_tokens",
    ),
    **_only(_TRACE, False, names="enable_trace_replay"),
    **_only(_LORA, False, names="enable_lora enable_lora_bias fully_sharded_loras enable_prompt_adapter"),
    **_same("there is no LoRA here", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"),
    **_same("there is no LoRA here", "lora_extra_vocab_size", "long_lora_scaling_factors", "max_prompt_adapters"),
    **_only(_LORA, names="lora_modules qlora_adapter_name_or_path default_mm_loras lora_target_modules"),
    **_same("llguidance follows every form of structured outputs", "guided_decoding_backend"),
    **_only(_GRAMMAR, {}, names="structured_outputs_config"),
    **_only("split answers in your program", "", names="reasoning_parser reasoning_config logits_processor_pattern"),
    **_only(_TEXT, {}, names="limit_mm_per_prompt mm_processor_kwargs media_io_kwargs"),
    **_only(_TEXT, False, names="enable_mm_embeds interleave_mm_strings mm_encoder_only enable_prompt_embeds"),
    **_same("only text is read here", "language_model_only", "mm_processor_cache_gb", "disable_mm_preprocessor_cache"),
    **_same("only text is read here", "allowed_local_media_path", "allowed_media_domains", "skip_mm_profiling"),
    **_only(
        "leave it out: prompts may be token ids with a tokenizer too", False, names="skip_tokenizer_init tokens_only"
    ),
    **_only("download another revision into a folder, and name it", names="tokenizer_revision"),
    **_only("name the folder as model", names="download_dir hf_config_path"),
    "hf_token": Foreign("log in as huggingface_hub does, or set HF_TOKEN", (None, False, True)),
    **_only(_EDIT, {}, names="hf_overrides rope_scaling additional_config"),
    **_only(_EDIT, names="rope_theta override_attention_dtype quantization_config"),
    **_only(
        "pass SamplingParams; llm.get_default_sampling_params() has the makers'", "auto", names="generation_config"
    ),
    **_only("pass SamplingParams with these values", {}, names="override_generation_config"),
    **_only("llm.shutdown() gives all memory back", False, names="enable_sleep_mode"),
    **_only("leave it out: fp8 pages have scales of their own", False, names="calculate_kv_scales"),
    **_only("use kv_protected_layers", [], names="kv_cache_dtype_skip_layers"),
    **_only("log-probabilities are of raw logits", "raw_logprobs", names="logprobs_mode"),
    **_only("keys and values stay in this process", names="kv_transfer_config kv_events_config ec_transfer_config"),
    **_only("keys and values stay in this process", False, names="kv_sharing_fast_prefill"),
    **_only("open the model anew", names="weight_transfer_config"),
    **_only("leave it out: HOLDFAST_LOG_LEVEL=DEBUG tells what happens", names="otlp_traces_endpoint"),
    **_only("leave it out: HOLDFAST_LOG_LEVEL=DEBUG tells what happens", names="collect_detailed_traces"),
    **_only("use the profiler of torch around the call", {}, names="profiler_config"),
    **_only(_MAMBA, "auto", names="mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_config"),
}
"""Engine options of vLLM that are none here."""

STORED_AS_IS = ("compressed-tensors", "fbgemm_fp8", "gguf")
"""Names of quantization that only say how a checkpoint is stored."""
DTYPE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("float", "fp32", "f32"), "float32"),
}
"""Other names of types, as command lines and training scripts have them."""
_DTYPES: Mapping[Any, object] = {
    **DTYPE_NAMES,
    **{f"torch.{name}": name for name in ("float16", "bfloat16", "float32")},
    "torch.half": "float16",
    "torch.float": "float32",
}
ENGINE_VALUES: Mapping[str, Mapping[Any, object]] = {
    "dtype": _DTYPES,
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "index_cache_dtype": {**_DTYPES, "fp8_e4m3": "fp8"},
    "quantization": {
        "fp8_per_tensor": "fp8_tensor",
        "fp8_per_block": "fp8_block",
        "int8_per_channel_weight_only": "int8",
    },
    "max_model_len": {"auto": None, -1: None},
    "seed": {None: 0},
    "enable_prefix_caching": {None: True},
    "enforce_eager": {None: False},
}
"""Values that vLLM's users pass, and ours."""
_WEIGHTS = "take a checkpoint in fp8 or mxfp4, or plain weights with quantization fp8, int8 or mxfp4"
MISSING_VALUES: Mapping[str, Mapping[str, str]] = {
    "kv_cache_dtype": dict.fromkeys(("fp8_e5m2", "fp8_inc"), "use fp8, which is e4m3"),
    "quantization": dict.fromkeys(
        (
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "bitsandbytes",
            "modelopt",
            "modelopt_fp4",
            "nvfp4",
            "quark",
            "auto-round",
            "torchao",
            "experts_int8",
            "moe_wna16",
            "mxfp8",
            "marlin",
            "aqlm",
            "squeezellm",
            "hqq",
        ),
        _WEIGHTS,
    ),
    "load_format": dict.fromkeys(
        (
            "pt",
            "npcache",
            "bitsandbytes",
            "tensorizer",
            "sharded_state",
            "mistral",
            "runai_streamer",
            "runai_streamer_sharded",
            "fastsafetensors",
        ),
        "use auto, with safetensors or GGUF files",
    ),
}
"""Values of options that we share, which are not in this version, and what to do."""

SAME_SAMPLING_NAMES = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("detokenize", "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids"),
    *("bad_words", "truncate_prompt_tokens", "skip_reading_prefix_cache", "structured_outputs", "output_kind"),
)
"""Fields of SamplingParams that are called the same in both."""
_BEAMS = "use n, with temperature above 0, and take the best by cumulative_logprob"
STRUCTURED_NAMES: Mapping[str, Foreign] = {
    **_same("llguidance follows every form", "backend", "_backend", "disable_fallback"),
    **_only("write whitespace into the schema or the grammar", False, names="disable_any_whitespace"),
    **_only('add "additionalProperties": false to the schema', False, names="disable_additional_properties"),
    **_only("write whitespace into the schema or the grammar", names="whitespace_pattern"),
    **_only("use regex or grammar", names="structural_tag"),
}
"""Fields of vLLM's StructuredOutputsParams that are none here."""
SAMPLING_NAMES: Mapping[str, Foreign] = {
    **_same("special tokens stand as they are in a text", "spaces_between_special_tokens"),
    **_same("outputs come as steps end", "stream_interval"),
    **_same("params never change, so they are never copied", "skip_clone"),
    **_only("use n", 1, names="best_of"),
    **_only(_BEAMS, False, names="use_beam_search early_stopping"),
    **_only(_BEAMS, 1.0, names="length_penalty"),
    **_only("use logit_bias, bad_words or allowed_token_ids", names="logits_processors"),
    **_only("leave it out: nothing here reads it", {}, names="extra_args"),
    **_only("use logprobs", names="logprob_token_ids prompt_logprob_token_ids prompt_logprob_start"),
    **_only("log-probabilities are lists of dicts", False, names="flat_logprobs"),
    **_only("use max_tokens", -1, names="thinking_token_budget"),
    **_only("use repetition_penalty or frequency_penalty", names="repetition_detection"),
    **_only(_TRACE, names="trace_decode_token_ids"),
    **_only("leave it out", 0, names="routed_experts_prompt_start"),
}
"""Fields of vLLM's SamplingParams that are none here."""

CALL_NAMES: Mapping[str, Foreign] = {
    **_only(_LORA, names="lora_request prompt_adapter_request"),
    **_only("use SamplingParams(priority=...)", 0, names="priority"),
    **_only(_GRAMMAR, names="guided_options_request"),
    **_only(_TEXT, {}, names="mm_processor_kwargs multi_modal_data mm_cache_salt"),
    **_only("encode the prompt yourself: llm.get_tokenizer()", {}, names="tokenization_kwargs"),
    **_only("leave it out: a server takes the header traceparent", {}, names="trace_headers"),
    **_only(_ROUTER, 0, names="data_parallel_rank"),
    **_only(
        "content may be a text or a list of text parts",
        "auto",
        "string",
        "openai",
        names="chat_template_content_format",
    ),
}
"""Arguments of vLLM's generate and chat that are none here."""


_ENCODE = "embeddings and scores are here: use llm.embed or llm.score"
_SLEEP = "llm.shutdown() gives all memory back; open the model again when it is needed"
_PROFILE = "use the profiler of torch around the call; llm.stats() has counters"
_WORKERS = "one process runs the model: LLM.engine is it"
_QUEUE = "generate takes a list of prompts as one batch; AsyncLLM takes requests one by one"
_RUNNING = "an LLM answers or raises EngineDeadError; AsyncLLM.health() says whether its engine moves"
_DRAIN = "stop asking; AsyncLLM.drain() finishes what runs and then ends"
METHOD_NAMES: Mapping[str, str] = {
    "beam_search": f"{_BEAMS}: llm.generate(prompts, SamplingParams(n=4, temperature=1.0))",
    **dict.fromkeys(("classify", "reward"), _ENCODE),
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _SLEEP),
    **dict.fromkeys(("start_profile", "stop_profile", "is_tracing_enabled", "do_log_stats"), _PROFILE),
    "get_metrics": "use llm.stats() and llm.memory",
    **dict.fromkeys(("collective_rpc", "apply_model", "get_world_size", "llm_engine"), _WORKERS),
    **dict.fromkeys(("init_weight_transfer_engine", "update_weights"), "open the model anew"),
    **dict.fromkeys(("enqueue", "wait_for_completion", "add_request"), _QUEUE),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    "set_tokenizer": "pass tokenizer where the model is opened: LLM(model, tokenizer=...)",
    **dict.fromkeys(("preprocess_chat", "preprocess_cmpl"), "use llm.get_tokenizer().apply_chat_template or encode"),
    "reset_mm_cache": "only text is read here, and there is nothing to forget",
    **dict.fromkeys(("model_config", "get_model_config", "get_vllm_config"), "use llm.engine and llm.memory"),
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), _DRAIN),
    **dict.fromkeys(("check_health", "is_running", "is_stopped", "errored", "dead_error"), _RUNNING),
    "wait_for_requests_to_drain": _DRAIN,
    "supported_tasks": _POOL,
}
"""Methods and attributes of vLLM's LLM and AsyncLLM that are none here, and what to do."""


SERVER_NAMES: Mapping[str, Foreign] = {
    **_same("a model that knows tools may call them", "enable_auto_tool_choice"),
    **_same("a request that forbids tools gets no tools", "exclude_tools_when_tool_choice_none"),
    **_same("usage counts cached tokens already", "enable_prompt_tokens_details"),
    **_same("a stream sends usage if stream_options.include_usage is set", "enable_force_include_usage"),
    **_same("/metrics has the load of the server", "enable_server_load_tracking", "enable_per_request_metrics"),
    **_same("every answer has a request id", "enable_request_id_headers"),
    **_same("--log-requests and --log-format are the log's options", "uvicorn_log_level", "enable_log_deltas"),
    **_same("--log-requests and --log-format are the log's options", "disable_uvicorn_access_log", "max_log_len"),
    **_same("--log-requests and --log-format are the log's options", "log_error_stack", "log_config_file"),
    **_same("one process answers all connections", "api_server_count"),
    **_same("the server shows no generated docs", "disable_fastapi_docs"),
    **_same("CORS allows what the API needs", "allow_credentials", "allowed_methods", "allowed_headers"),
    **_same("headers have bounds already", "h11_max_incomplete_event_size", "h11_max_header_count"),
    **_only(
        "content may be a text or a list of text parts",
        "auto",
        "string",
        "openai",
        names="chat_template_content_format",
    ),
    **_only("the role of an answer is assistant", "assistant", names="response_role"),
    **_only("use logprobs and return_token_ids of a request", False, names="return_tokens_as_token_ids"),
    **_only("name one of the formats of --tool-parser", "", names="tool_parser_plugin"),
    **_only("name one of the formats of --reasoning-parser", "", names="reasoning_parser_plugin"),
    **_only("run tools in the client", names="tool_server"),
    **_only("a request may carry chat_template_kwargs", {}, names="default_chat_template_kwargs"),
    **_only("start the server with --chat-template", False, names="trust_request_chat_template"),
    **_only("put a reverse proxy with TLS in front", names="ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers"),
    **_only("put a reverse proxy with TLS in front", False, names="enable_ssl_refresh"),
    **_only("let the reverse proxy strip the prefix", "", names="root_path"),
    **_only("put a proxy in front", [], names="middleware"),
    **_only("listen on --host and --port", names="uds"),
    **_only(_ROUTER, False, names="headless"),
    **_only("use --log-requests", False, names="enable_log_outputs"),
}
"""Options of vllm serve that are none of the engine and none here."""

_CONFIG = "pass options of LLM by name: LLM(model, max_model_len=4096)"
_INTERNAL = "it is a part inside of vLLM: docs/from_vllm.md lists what a program may use here"
PARSERS_OF_VLLM = frozenset(
    (
        *("apertus", "cohere_command3", "cohere_command4", "dots", "ernie45", "functiongemma", "gemma4"),
        *("gigachat3", "granite", "granite4", "holo2", "hunyuan_a13b", "hy_v3", "inkling"),
        *("internlm", "jamba", "kimi_k3", "lfm2", "ling3", "llama4_pythonic", "longcat"),
        *("mimo", "minicpm5", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer"),
        *("nemotron_v3", "olmo3", "phi4_mini_json", "poolside_v1", "pythonic", "seed_oss", "step3"),
        *("step3p5", "xlam"),
    )
)
"""Formats of tools and reasoning that have a name in vLLM and none here."""
ABSENT_NAMES: Mapping[str, str] = {
    "LoRARequest": _LORA,
    "BeamSearchParams": _BEAMS,
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput", "PoolerConfig"), _ENCODE),
    "ModelRegistry": "a model family is a row of models/grouped_readers.py: CONTRIBUTING.md has the recipe",
    "initialize_ray_cluster": "use tensor_parallel_size, and torchrun on several nodes",
    **dict.fromkeys(("KVTransferConfig", "KVEventsConfig", "ECTransferConfig"), "keys and values stay in this process"),
    **dict.fromkeys(("CompilationConfig", "CUDAGraphMode", "CompilationMode"), f"leave it out: {_GRAPHS}"),
    **dict.fromkeys(("ModelConfig", "ParallelConfig", "SchedulerConfig", "CacheConfig", "LoadConfig"), _CONFIG),
    **dict.fromkeys(("DeviceConfig", "ObservabilityConfig", "MultiModalConfig", "AttentionConfig"), _CONFIG),
    **dict.fromkeys(("LoRAConfig",), _LORA),
    "VllmConfig": "use holdfast.EngineConfig",
    "SpeculativeConfig": _DRAFT,
    "StructuredOutputsConfig": _GRAMMAR,
    "ProfilerConfig": "use the profiler of torch around the call",
    "WeightTransferConfig": "open the model anew",
    "RepetitionDetectionParams": "use repetition_penalty or frequency_penalty",
    **dict.fromkeys(("get_open_port", "get_ip", "make_async"), _INTERNAL),
    **dict.fromkeys(("MultiModalDataDict", "EmbedsPrompt", "ExplicitEncoderDecoderPrompt"), _TEXT),
}
"""Names that programs import from vLLM and that are none here, and what to do."""
ABSENT_MODULES: Mapping[str, str] = {
    "lora": _LORA,
    "beam_search": _BEAMS,
    **dict.fromkeys(("multimodal", "assets"), _TEXT),
    "entrypoints.pooling": _ENCODE,
    "distributed.weight_transfer": "open the model anew",
    **dict.fromkeys(("distributed.kv_transfer", "distributed.kv_events"), "keys and values stay in this process"),
    "v1.sample": "use logit_bias, bad_words or allowed_token_ids",
    "v1.metrics": "use llm.stats() and llm.memory; a server has /metrics",
    "model_executor": "a model family is a row of models/grouped_readers.py: CONTRIBUTING.md has the recipe",
    "tokenizers": "use llm.get_tokenizer()",
    "transformers_utils": "use llm.get_tokenizer()",
    "entrypoints.chat_utils": "use llm.chat, or llm.get_tokenizer().apply_chat_template",
    "utils.print_utils": "print it in the program",
    "benchmarks": "use holdfast bench latency, throughput or serve",
    "envs": "options of LLM and of holdfast serve stand for environment variables",
    "platforms": "use torch.cuda; holdfast doctor tells what is here",
    "usage": "leave it out: nothing is reported to anybody",
    "entrypoints.openai": "use holdfast serve [MODEL], or AsyncLLM in a program",
    **dict.fromkeys(("entrypoints", "v1", "worker", "core", "executor", "attention", "compilation"), _INTERNAL),
    **dict.fromkeys(("plugins", "utils", "model_inspection", "forward_context"), _INTERNAL),
}
"""Modules that programs import from vLLM and that are none here, and what to do; the longest beginning of a path counts."""


class Settled(NamedTuple):
    """What is left of the options of a call, and what had no effect."""

    options: dict[str, object]
    quiet: dict[str, object]


def settle(
    options: Mapping[str, object],
    names: Collection[str],
    foreign: Mapping[str, Foreign],
    refuse: Callable[[str, str, str], HoldfastError],
) -> Settled:
    """Sort out the options of a call whose own names are `names`; one that nobody knows is refused with the nearest."""
    left: dict[str, object] = {}
    quiet: dict[str, object] = {}
    for name, value in options.items():
        if name in names:
            left[name] = value
            continue
        known = foreign.get(name)
        if known is None:
            near = difflib.get_close_matches(name, [*names, *foreign], n=1)
            do = f"did you mean {near[0]}?" if near else f"the names are {', '.join(sorted(names))}"
            raise refuse(f"option {shown(name)[1:-1]}={shown(value)} was asked", "there is no such option", do)
        if not known.takes(value):
            raise refuse(f"{name}={shown(value)} was asked", NOT_HERE, known.words)
        if value is not None:
            quiet[name] = value
    return Settled(left, quiet)


GUIDED_NAMES: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Older names of vLLM for structured_outputs with one field, and that field."""


_ONE_FORM = "an answer has one form"


_Params = TypeVar("_Params", bound=type)


def with_vllm_names(
    foreign: Mapping[str, Foreign], own: Callable[[Mapping[str, object]], dict[str, object]] = dict
) -> Callable[[_Params], _Params]:
    """The same dataclass, whose fields are given by name: vLLM's other names are taken or refused in words."""

    def decorate(params_class: _Params) -> _Params:
        construct = params_class.__init__
        names = {field.name for field in fields(params_class)}

        @wraps(construct)
        def settled_init(self: object, *values: object, **options: object) -> None:
            if values:
                asked = f"{params_class.__name__}({shown(values[0])}, ...) was asked"
                raise KeywordError(asked, "its fields have names", f"write {sorted(names)[-1]}=...")
            construct(self, **settle(own(options), names, foreign, KeywordError).options)

        params_class.__init__ = settled_init
        return params_class

    return decorate


def own_structured(options: Mapping[str, object]) -> dict[str, object]:
    """The same options with vLLM's older names as structured_outputs; None asks for nothing."""
    guided = {own: options[name] for name, own in GUIDED_NAMES.items() if options.get(name) is not None}
    left = {name: value for name, value in options.items() if name not in GUIDED_NAMES}
    decoding = left.pop("guided_decoding", None)
    if isinstance(decoding, Mapping):
        decoding = {name: value for name, value in decoding.items() if value is not None}
    if guided and decoding:
        raise KeywordError(f"guided_decoding and guided_{next(iter(guided))} were asked", _ONE_FORM, "name one")
    if guided or decoding:
        if left.get("structured_outputs") is not None:
            asked = "guided_decoding" if decoding else f"guided_{next(iter(guided))}"
            raise KeywordError(f"structured_outputs and {asked} were asked", _ONE_FORM, "name one")
        left["structured_outputs"] = guided or decoding
    return left


_AS_DICT = 'try {"method": "ngram", "num_speculative_tokens": 4}, or speculative=ngram:4'


def own_speculative(told: Mapping[Any, object] | str) -> str:
    """vLLM's speculative_config, a dict or the JSON of one, as our own option where both mean the same: proposals by n-gram.

    Which n-grams are looked up changes no answer, so bounds of their lengths are taken as they are.
    """
    try:
        asked = json.loads(told) if isinstance(told, str) else told
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"speculative_config={shown(told)} was asked", f"it is no JSON ({error})", _AS_DICT
        ) from error
    given = {name: value for name, value in asked.items() if value is not None}
    method = given.pop("method", None) or given.pop("model", None)
    if method == "ngram" and given.get("model") == "ngram":
        del given["model"]  # vLLM fills both
    words = f"speculative_config={shown(dict(asked))} was asked"
    if method not in ("ngram", "[ngram]"):
        raise ConfigError(words, "proposals come from n-grams alone here", _AS_DICT)
    number = given.pop("num_speculative_tokens", None)
    bounds = [given.pop(name, 1) for name in ("prompt_lookup_min", "prompt_lookup_max")]
    if any(isinstance(bound, bool) or not isinstance(bound, int) or bound < 1 for bound in bounds):
        raise ConfigError(
            words, "lengths of n-grams are whole numbers from 1 on", "leave out prompt_lookup_min and _max"
        )
    if given:
        raise ConfigError(words, f"{shown(next(iter(given)))} is not in this version", "leave that out")
    if number is None:
        raise ConfigError(words, "it does not say how many tokens", _AS_DICT)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(words, "num_speculative_tokens is a whole number", _AS_DICT)
    return f"ngram:{number}"


def missing_attribute(owner: object, name: str) -> object:
    """For the __getattr__ of an LLM: what vLLM's has is told apart from what nobody has."""
    kind = type(owner)
    if hasattr(kind, name):
        return object.__getattribute__(owner, name)  # a property that failed says why itself
    if name.startswith("_"):
        raise AttributeError(f"{kind.__name__} has no {name}")  # Python and notebooks probe for such names
    asked = f"{kind.__name__}.{shown(name)[1:-1]} was asked"
    if name in METHOD_NAMES:
        raise NameAbsentError(asked, NOT_HERE, METHOD_NAMES[name])
    public = [known for known in dir(kind) if not known.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    do = f"did you mean {near[0]}?" if near else f"the names are {', '.join(public)}"
    raise NameAbsentError(asked, f"there is no such name in {kind.__name__}", do)


def quiet_line(quiet: Mapping[str, object], foreign: Mapping[str, Foreign]) -> str:
    """One line for a log: names that were taken and change nothing here, and why."""
    told: dict[str, list[str]] = {}
    for name, value in quiet.items():
        why = "" if foreign[name].is_missing else foreign[name].words
        told.setdefault(why, []).append(f"{name}={shown(value, 40)}")
    parts = [", ".join(names) + (f" ({why})" if why else "") for why, names in told.items()]
    return f"taken without effect here: {'; '.join(parts)}"

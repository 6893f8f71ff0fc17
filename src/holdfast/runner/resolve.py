"""From what was asked to what will be done: device, types, limits and budget, each with its reason."""

import dataclasses
from dataclasses import dataclass

import torch

from holdfast.config import EngineConfig, Limits
from holdfast.errors import ConfigError
from holdfast.memory.host import available_host_bytes
from holdfast.memory.sizes import format_bytes, parse_bytes
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import KV_FORMATS, KVFormat

CPU_KV_BYTES = 1024**3
KV_IS_ASKED = "kv_cache_memory"
"""The reason of a bound on KV pages that was asked for; our own gives way where one sequence needs more."""
DEFAULT_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting that was left open, what it became, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything settled. `max_kv_bytes` bounds the pages beside the budget, None where nothing does."""

    device: str
    dtype: str
    kv_format: KVFormat
    limits: Limits
    may_shorten: bool
    """max_model_len was left open, so it may shrink to what fits."""
    budget_bytes: int
    budget_reason: str
    max_kv_bytes: int | None
    max_kv_reason: str
    choices: tuple[Choice, ...]

    def with_max_model_len(self, max_model_len: int, reason: str) -> "Resolved":
        """The same with a shorter context."""
        limits = dataclasses.replace(self.limits, max_model_len=max_model_len)
        choice = Choice("max_model_len", str(max_model_len), reason)
        kept = tuple(choice for choice in self.choices if choice.name != "max_model_len")
        return dataclasses.replace(self, limits=limits, choices=(*kept, choice))


def resolve(config: EngineConfig, spec: ModelSpec) -> Resolved:
    """Settle every open setting."""
    choices: list[Choice] = []
    device = _device(config, choices)
    kind = device.partition(":")[0]
    dtype = _dtype(config, spec, kind, choices)
    kv_name = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else dtype
    if config.kv_cache_dtype == "auto":
        choices.append(Choice("kv_cache_dtype", kv_name, "the same as dtype"))
    limits = _limits(config, spec, kind, choices)
    budget_bytes, budget_reason, max_kv_bytes = _budget(config, device, kind)
    choices.append(Choice("memory", format_bytes(budget_bytes), budget_reason))
    return Resolved(
        device,
        dtype,
        KV_FORMATS[kv_name],
        limits,
        config.max_model_len is None,
        budget_bytes,
        budget_reason,
        max_kv_bytes,
        _max_kv_reason(config, max_kv_bytes),
        tuple(choices),
    )


def _device(config: EngineConfig, choices: list[Choice]) -> str:
    if config.device == "auto":
        device, reason = ("cuda:0", "a GPU is there") if torch.cuda.is_available() else ("cpu", "no GPU is there")
        choices.append(Choice("device", device, reason))
        return device
    if config.device == "cpu":
        return "cpu"
    index = int(config.device.partition(":")[2] or 0)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_devices:
        raise ConfigError(
            f"device={config.device!r} was asked", f"torch sees {num_devices} CUDA devices here", "try device='auto'"
        )
    return f"cuda:{index}"


def _dtype(config: EngineConfig, spec: ModelSpec, kind: str, choices: list[Choice]) -> str:
    if config.dtype != "auto":
        return config.dtype
    if kind == "cpu":
        dtype, reason = "float32", "the fastest exact type on a CPU"
    elif spec.checkpoint_dtype in ("float16", "bfloat16"):
        dtype, reason = spec.checkpoint_dtype, "the checkpoint's own"
    else:
        dtype, reason = "bfloat16", f"the checkpoint is {spec.checkpoint_dtype}, and half of that serves on a GPU"
    choices.append(Choice("dtype", dtype, reason))
    return dtype


def _limits(config: EngineConfig, spec: ModelSpec, kind: str, choices: list[Choice]) -> Limits:
    max_model_len = config.max_model_len
    if max_model_len is None:
        max_model_len = spec.max_position
        choices.append(Choice("max_model_len", str(max_model_len), "what the model was made for"))
    elif spec.rope is None and max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} was asked",
            f"the model has learned {spec.max_position} positions",
            f"ask for at most {spec.max_position}",
        )
    elif max_model_len > spec.max_position:
        choices.append(Choice("max_model_len", str(max_model_len), f"asked, beyond the model's {spec.max_position}"))
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[kind]
    max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[kind]
    return Limits(max_num_seqs, max_num_batched_tokens, max_model_len, config.page_tokens)


def _max_kv_reason(config: EngineConfig, max_kv_bytes: int | None) -> str:
    if max_kv_bytes is None:
        return ""
    if config.kv_cache_memory is not None:
        return KV_IS_ASKED
    return f"{format_bytes(max_kv_bytes)} on a CPU, unless an option asks for more"


def _budget(config: EngineConfig, device: str, kind: str) -> tuple[int, str, int | None]:
    """Bytes for everything, why, and a bound on KV pages alone."""
    max_kv_bytes = (
        parse_bytes(config.kv_cache_memory, "kv_cache_memory") if config.kv_cache_memory is not None else None
    )
    if config.memory_limit is not None:
        return parse_bytes(config.memory_limit, "memory_limit"), "memory_limit", max_kv_bytes
    if kind == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device(device))
        share = config.memory_utilization or DEFAULT_UTILIZATION
        wanted = int(total_bytes * share)
        if wanted <= free_bytes:
            return wanted, f"{share:.0%} of the device's {format_bytes(total_bytes)}", max_kv_bytes
        return free_bytes, f"what others leave free of the device's {format_bytes(total_bytes)}", max_kv_bytes
    available = available_host_bytes()
    if config.memory_utilization is not None:
        reason = f"{config.memory_utilization:.0%} of {format_bytes(available)} available"
        return int(available * config.memory_utilization), reason, max_kv_bytes
    reason = f"{DEFAULT_UTILIZATION:.0%} of {format_bytes(available)} available"
    return int(available * DEFAULT_UTILIZATION), reason, max_kv_bytes if max_kv_bytes is not None else CPU_KV_BYTES

"""From what was asked to what will be done: types, limits and budget, each with its reason; no torch."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.config import EngineConfig, Limits
from holdfast.errors import ConfigError
from holdfast.memory.sizes import format_bytes, parse_bytes
from holdfast.models.blueprints.blueprint import Blueprint, spec_blueprint
from holdfast.models.spec import ModelSpec
from holdfast.quant.formats import KVFormat
from holdfast.quant.weight_recipe import WeightRecipe
from holdfast.runner.planning.protected_layers import ProtectedLayers, choose_protected, listed
from holdfast.runner.planning.target import Target
from holdfast.runner.planning.weight_choice import choose_recipe

CPU_KV_BYTES = 1024**3
KV_IS_ASKED = "kv_cache_memory"
"""The reason of a bound on KV pages that was asked for; our own gives way where one sequence needs more."""
DEFAULT_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
PAGE_TOKENS = 16
CODED_PAGE_TOKENS = 64
"""Kernels over coded pages take a tile of tokens of one head at a time, which lies in one piece where a page is a tile."""


class Choice(NamedTuple):
    """One setting that was left open, what it became, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything settled. `max_kv_bytes` bounds the pages beside the budget, None where nothing does."""

    device: str
    dtype: str
    recipe: WeightRecipe
    """Which weights are quantized, and how."""
    kv_format: KVFormat
    """Of all layers but the protected ones."""
    protected: ProtectedLayers
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
        return dataclasses.replace(self, limits=limits, choices=self._with_choice(choice))

    def with_protected(self, protected: ProtectedLayers) -> "Resolved":
        """The same with other layers protected."""
        choice = Choice("kv_protected_layers", listed(protected.layers), protected.reason)
        return dataclasses.replace(self, protected=protected, choices=self._with_choice(choice))

    def _with_choice(self, choice: Choice) -> tuple[Choice, ...]:
        return (*(other for other in self.choices if other.name != choice.name), choice)


def resolve(config: EngineConfig, model: Blueprint | ModelSpec, target: Target) -> Resolved:
    """Settle every open setting for a device that is settled already."""
    if isinstance(model, ModelSpec):
        model = spec_blueprint(model, model.architecture)
    choices: list[Choice] = []
    dtype = _dtype(config, model, target.kind, choices)
    recipe, notes = choose_recipe(config, model, target)
    choices += (Choice(*note) for note in notes)
    if config.kv_cache_dtype == "auto":
        choices.append(Choice("kv_cache_dtype", dtype, "the same as dtype"))
    kv_format = model.check_format(dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    protected = choose_protected(config, model, kv_format, dtype)
    if protected.reason:
        choices.append(Choice("kv_protected_layers", str(len(protected.layers)), protected.reason))
    page_tokens = _page_tokens(config, model, kv_format, choices)
    limits = _limits(config, model, target.kind, page_tokens, choices)
    budget_bytes, budget_reason, max_kv_bytes = _budget(config, target)
    choices.append(Choice("memory", format_bytes(budget_bytes), budget_reason))
    return Resolved(
        target.name,
        dtype,
        recipe,
        kv_format,
        protected,
        limits,
        config.max_model_len is None,
        budget_bytes,
        budget_reason,
        max_kv_bytes,
        _max_kv_reason(config, max_kv_bytes),
        tuple(choices),
    )


def _dtype(config: EngineConfig, model: Blueprint, kind: str, choices: list[Choice]) -> str:
    if config.dtype != "auto":
        return config.dtype
    if kind == "cpu":
        dtype, reason = "float32", "the fastest exact type on a CPU"
    elif model.checkpoint_dtype in ("float16", "bfloat16"):
        dtype, reason = model.checkpoint_dtype, "the checkpoint's own"
    else:
        dtype, reason = "bfloat16", f"the checkpoint is {model.checkpoint_dtype}, and half of that serves on a GPU"
    choices.append(Choice("dtype", dtype, reason))
    return dtype


def _page_tokens(config: EngineConfig, model: Blueprint, kv_format: KVFormat, choices: list[Choice]) -> int:
    if config.page_tokens is not None:
        return config.page_tokens
    if not kv_format.is_coded or model.anatomy.heads(1) is None:
        return PAGE_TOKENS
    reason = f"attention over quantized pages works in tiles of {CODED_PAGE_TOKENS} tokens"
    choices.append(Choice("page_tokens", str(CODED_PAGE_TOKENS), reason))
    return CODED_PAGE_TOKENS


def _limits(config: EngineConfig, model: Blueprint, kind: str, page_tokens: int, choices: list[Choice]) -> Limits:
    max_model_len, longest = config.max_model_len, model.max_position
    if max_model_len is None:
        max_model_len = longest
        choices.append(Choice("max_model_len", str(max_model_len), "what the model was made for"))
    elif model.has_learned_positions and max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} was asked",
            f"the model has learned {longest} positions",
            f"ask for at most {longest}",
        )
    elif max_model_len > longest:
        choices.append(Choice("max_model_len", str(max_model_len), f"asked, beyond the model's {longest}"))
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[kind]
    max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[kind]
    return Limits(max_num_seqs, max_num_batched_tokens, max_model_len, page_tokens)


def _max_kv_reason(config: EngineConfig, max_kv_bytes: int | None) -> str:
    if max_kv_bytes is None:
        return ""
    if config.kv_cache_memory is not None:
        return KV_IS_ASKED
    return f"{format_bytes(max_kv_bytes)} on a CPU, unless an option asks for more"


def _budget(config: EngineConfig, target: Target) -> tuple[int, str, int | None]:
    """Bytes for everything, why, and a bound on KV pages alone."""
    max_kv_bytes = (
        parse_bytes(config.kv_cache_memory, "kv_cache_memory") if config.kv_cache_memory is not None else None
    )
    share = config.memory_utilization or DEFAULT_UTILIZATION
    if target.kind == "cuda":
        wanted, reason = (
            int(target.total_bytes * share),
            f"{100 * share:g}% of the device's {format_bytes(target.total_bytes)}",
        )
        if config.memory_limit is not None:
            wanted, reason = parse_bytes(config.memory_limit, "memory_limit"), "memory_limit"
        if wanted <= target.available_bytes:
            return wanted, reason, max_kv_bytes
        return target.available_bytes, _bounded_reason(target, reason), max_kv_bytes
    budget_bytes, reason = (
        int(target.available_bytes * share),
        f"{100 * share:g}% of {format_bytes(target.available_bytes)} available",
    )
    if config.memory_limit is not None:
        limit_bytes = parse_bytes(config.memory_limit, "memory_limit")
        if limit_bytes <= target.available_bytes:
            return limit_bytes, "memory_limit", max_kv_bytes
        # A host that gives its last page ends a process without a word.
        return budget_bytes, f"{reason}, less than memory_limit", max_kv_bytes
    if config.memory_utilization is None and max_kv_bytes is None:
        max_kv_bytes = CPU_KV_BYTES
    return budget_bytes, reason, max_kv_bytes


def _bounded_reason(target: Target, wanted: str) -> str:
    if target.held_by_others_bytes == 0:
        return f"all of the device's {format_bytes(target.total_bytes)}, less than {wanted}"
    held, total = format_bytes(target.held_by_others_bytes), format_bytes(target.total_bytes)
    return f"what others leave: they hold {held} of the device's {total}"

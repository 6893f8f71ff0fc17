"""Contenders: one model over pages of several formats at once, sized for windows of a text, and what each keeps of a token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from holdfast.config import EngineConfig
from holdfast.engine.kv_quality import Contender
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS
from holdfast.runner.build import plan_model
from holdfast.runner.planning.device_target import choose_device, device_target
from holdfast.runner.planning.plan import RunnerPlan
from holdfast.runner.planning.protected_layers import listed
from holdfast.runner.planning.resolve import resolve
from holdfast.runner.variants import Variant, build_variants

CHUNK_TOKENS = 512
"""Most tokens of a step, unless somebody asks for more: every contender has a workspace for as many."""
PLAIN_BYTES = 2
"""Of an element in half precision, which others are compared with."""


class Entry(NamedTuple):
    """Somebody who is to be measured."""

    name: str
    variant: Variant
    bytes_per_token: Fraction | None = None
    """None: what the plan says."""
    note: str | None = None
    """None: which layers the plan protects."""


class OpenedContenders(NamedTuple):
    """All of them, the reference first, and what they have in common."""

    contenders: list[Contender]
    plain_bytes_per_token: Fraction
    """What a token takes in half precision."""
    release: Callable[[], None]


class FormatChoice(NamedTuple):
    """Formats that this model can have here, and why it cannot have the others."""

    names: tuple[str, ...]
    left_out: dict[str, str]


def settle_config(config: EngineConfig, model: OpenModel, window: int) -> EngineConfig:
    """Type and device decided; one sequence of a window's length, in steps that fit any machine."""
    config = replace(
        config,
        max_model_len=window,
        max_num_seqs=1,
        max_num_batched_tokens=min(window, config.max_num_batched_tokens or CHUNK_TOKENS),
        enforce_eager=True,
    )
    # Layers are protected format by format.
    plain = replace(config, kv_protected_layers=None)
    resolved = resolve(plain, model.spec, device_target(choose_device(config)[0]))
    return replace(config, dtype=resolved.dtype, device=resolved.device)


def reference_entry(config: EngineConfig) -> Entry:
    """Pages in the type that is computed in; the config is settled."""
    plain = replace(config, kv_cache_dtype=config.dtype, kv_protected_layers=None)
    return Entry(config.dtype, Variant(plain))


def format_entry(config: EngineConfig, model: OpenModel, name: str) -> Entry:
    """Pages of a format. Protected layers are for formats that are narrower than what protects them."""
    own, wide = (
        KV_FORMATS[config.dtype if each == "auto" else each].bytes_per_token(1, model.spec.head_dim)
        for each in (name, config.kv_protected_dtype)
    )
    asked = config.kv_protected_layers if KV_FORMATS[name].is_coded and own < wide else None
    return Entry(name, Variant(replace(config, kv_cache_dtype=name, kv_protected_layers=asked)))


def narrower_formats(config: EngineConfig, model: OpenModel) -> FormatChoice:
    """Every format that takes less than the reference and can run; the config is settled."""
    target = device_target(config.device)
    least = DTYPE_BYTES[config.dtype]
    names, left_out = [], {}
    for name, kv_format in KV_FORMATS.items():
        if not kv_format.is_coded and DTYPE_BYTES[kv_format.key_dtype] >= least:
            continue
        try:
            plan_model(format_entry(config, model, name).variant.config, model, target)
        except (ConfigError, UnsupportedModelError) as error:
            left_out[name] = str(error)
        else:
            names.append(name)
    return FormatChoice(tuple(names), left_out)


def protection_note(plan: RunnerPlan) -> str:
    """Which layers have a wider format; nothing where none has."""
    protected = plan.resolved.protected
    return f"layers {listed(protected.layers)} in {protected.format.name}" if protected.layers else ""


def open_contenders(
    entries: Sequence[Entry], model: OpenModel, on_progress: Callable[[int, int], None]
) -> OpenedContenders:
    """One load of the weights, a runner for each entry. The first is the reference, in plain pages of the computed type."""
    built = build_variants([entry.variant for entry in entries], model, on_progress)
    contenders = []
    for entry, runner, plan in zip(entries, built.runners, built.plans, strict=True):
        num_bytes = plan.kv_bytes_per_token if entry.bytes_per_token is None else entry.bytes_per_token
        note = protection_note(plan) if entry.note is None else entry.note
        contenders.append(Contender(entry.name, runner, num_bytes, note))
    reference = built.plans[0]
    plain = reference.kv_bytes_per_token * PLAIN_BYTES / DTYPE_BYTES[reference.resolved.dtype]
    return OpenedContenders(contenders, plain, built.release)

"""What would fit instead: every single change of a plan worth knowing, what it gives, and which of them is the smallest; no torch."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.memory.devices import GPUS, MIB
from holdfast.planning.fit import NO_RANKS, Fit, PlanRequest, longest_that_fits, settle, try_fit, unfitting_runner
from holdfast.planning.resolve import DEFAULT_UTILIZATION
from holdfast.planning.target import gpu_target
from holdfast.quant.formats import DTYPE_BYTES, KV_FORMATS
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightScheme

MAX_UTILIZATION = 0.98
"""A plan by owner is exact enough for this share of a device."""
MIN_BATCHED_TOKENS = 64
RANKS = (2, 4, 8)
NUM_GPUS = 3
"""GPUs that are offered."""
USEFUL_TOKENS = 2048
"""A change after which an open context would shrink below this does not count as one that fits."""


class Alternative(NamedTuple):
    """One change of one option, and what it gives."""

    change: str
    """In words, as an advice."""
    option: str
    value: str
    """As a person types it; nothing where the option is left out."""
    kv_tokens: int
    """0 where it does not fit."""
    max_concurrency: float
    fits: bool
    not_in_this_version: str | None
    """Why an engine of this version does not take it, in words."""
    is_smallest: bool


class _Change(NamedTuple):
    """A change before it is tried."""

    words: str
    option: str
    value: str
    request: PlanRequest
    missing: str | None = None


def list_alternatives(request: PlanRequest) -> tuple[Alternative, ...]:
    """Changes in the order in which a person would rather accept them.

    Where the plan does not fit, the first that does, and that this version can do, is the smallest change:

    1. those that lose nothing but speed: more of the memory, shorter steps, fewer sequences at once, no graphs
    2. a shorter context, since requests that stay below it are answered as before
    3. another format of pages that runs here, since that changes answers a little; then weights in fewer bits, likewise
    4. a larger GPU, since that costs money
    5. what this version does not have yet, to tell what is worth waiting for; never the smallest

    Where the plan fits, no change is needed and none is marked.
    """
    fit = try_fit(request)
    listed: list[Alternative] = []
    if fit is None:
        changes = (*_memory_changes(request), *_step_changes(request))
        listed += (item for item in _possible(changes) if item.fits)
    listed += _possible(_context_changes(request, fit))
    listed += _possible(_format_changes(request))
    listed += _possible(_weight_changes(request))
    listed += _gpu_alternatives(request)
    listed += _possible(_later_changes(request))
    if fit is not None:
        return tuple(listed)
    smallest = next((item for item in listed if item.fits and item.not_in_this_version is None), None)
    return tuple(item._replace(is_smallest=item is smallest) for item in listed)


def smallest_change(listed: Iterable[Alternative]) -> str:
    """The advice that ends a refusal."""
    fitting = [item for item in listed if item.fits]
    smallest = next((item for item in fitting if item.is_smallest), None)
    if smallest is not None:
        return f"{smallest.change}, which fits"
    if fitting:
        return f"take a smaller model; to {fitting[0].change} would fit, but {fitting[0].not_in_this_version}"
    return "take a smaller model: no single change makes this one fit"


def _possible(changes: Iterable[_Change]) -> Iterator[Alternative]:
    """What each change gives; one that contradicts another option, or that no attention reads, is none."""
    for change in changes:
        with suppress(ConfigError, UnsupportedModelError):
            yield _tried(change)


def _tried(change: _Change) -> Alternative:
    fit = try_fit(change.request)
    if fit is not None and fit.resolved.limits.max_model_len < _shortest_useful(change.request):
        fit = None
    return Alternative(
        change=change.words,
        option=change.option,
        value=change.value,
        kv_tokens=0 if fit is None else fit.kv_tokens,
        max_concurrency=0.0 if fit is None else fit.max_concurrency,
        fits=fit is not None,
        not_in_this_version=change.missing,
        is_smallest=False,
    )


def _shortest_useful(request: PlanRequest) -> int:
    """The context that a change must give: what was asked, or one that is worth starting an engine for."""
    return request.config.max_model_len or min(USEFUL_TOKENS, request.blueprint.max_position)


def _set(request: PlanRequest, words: str, option: str, value: object) -> _Change:
    """A change of one option of the config."""
    changed = request._replace(config=replace(request.config, **{option: value}))
    return _Change(words, option, "" if value is None else str(value).lower(), changed)


def _memory_changes(request: PlanRequest) -> Iterator[_Change]:
    """More of the memory that is there: just as much as is short of a useful context."""
    config, target = request.config, request.target
    if config.kv_cache_memory is not None:
        yield _set(request, "leave out kv_cache_memory", "kv_cache_memory", None)
    asked = request._replace(config=replace(config, max_model_len=_shortest_useful(request), kv_cache_memory=None))
    needed_bytes = unfitting_runner(asked).memory.peak_bytes
    if config.memory_limit is not None:
        limit = f"{-(-needed_bytes // MIB)}MiB"
        if needed_bytes <= target.available_bytes:
            yield _set(request, f"raise memory_limit to {limit}", "memory_limit", limit)
        return
    share = -(-100 * needed_bytes // target.total_bytes) / 100
    if (config.memory_utilization or DEFAULT_UTILIZATION) < share <= MAX_UTILIZATION:
        yield _set(request, f"raise memory_utilization to {share:.2f}", "memory_utilization", share)


def _step_changes(request: PlanRequest) -> Iterator[_Change]:
    """The largest powers of two that fit, and no graphs."""
    limits = settle(request)[1].limits
    for option, value, smallest in (
        ("max_num_batched_tokens", limits.max_num_batched_tokens, MIN_BATCHED_TOKENS),
        ("max_num_seqs", limits.max_num_seqs, 1),
    ):
        powers = [2**power for power in range(31) if smallest <= 2**power < value]
        changes = (_set(request, f"lower {option} to {power}", option, power) for power in reversed(powers))
        fitting = next((change for change in changes if _tried(change).fits), None)
        if fitting is not None:
            yield fitting
    if request.target.kind == "cuda" and not request.config.enforce_eager:
        yield _set(request, "set enforce_eager", "enforce_eager", True)


def _context_changes(request: PlanRequest, fit: Fit | None) -> Iterator[_Change]:
    """The longest context that fits, and the power of two below it: shorter than asked, or longer where there is room."""
    layout, resolved = settle(request)
    if fit is None:
        low, high = 1, 0 if resolved.may_shorten else resolved.limits.max_model_len - 1
    else:
        low, high = fit.resolved.limits.max_model_len + 1, 0 if resolved.may_shorten else request.blueprint.max_position
    longest = longest_that_fits(layout, resolved, low, high)
    if longest is None:
        return
    length = longest.resolved.limits.max_model_len
    rounded = 2 ** (length.bit_length() - 1)
    verb = "lower" if fit is None else "raise"
    for value in dict.fromkeys((length, rounded)):
        if value >= low:
            yield _set(request, f"{verb} max_model_len to {value}", "max_model_len", value)


def _format_changes(request: PlanRequest) -> Iterator[_Change]:
    """Half of float32, for pages or for everything; then pages in fewer and fewer bits."""
    resolved = settle(request)[1]
    half = "float16" if request.blueprint.checkpoint_dtype == "float16" else "bfloat16"
    current = resolved.kv_format.name
    if current not in ("float16", "bfloat16"):
        yield _set(request, f"keep KV pages in {half}", "kv_cache_dtype", half)
    if resolved.dtype == "float32":
        yield _set(request, f"compute in {half}", "dtype", half)
    for kv_format in KV_FORMATS.values():
        if kv_format.is_quantized and kv_format.name != current:
            yield _set(request, f"keep KV pages in {kv_format.name}", "kv_cache_dtype", kv_format.name)


def _weight_changes(request: PlanRequest) -> Iterator[_Change]:
    """Weights in fewer and fewer bits."""
    for name in narrower_schemes(request):
        yield _Change(f"keep weights in {name}", "quantization", name, in_scheme(request, name))


def narrower_schemes(request: PlanRequest) -> list[str]:
    """The first scheme of each number of bits below the present one that the model and the device take, the widest first."""
    present = settle(request)[1].recipe.scheme
    found: dict[float, str] = {}
    for name, scheme in WEIGHT_SCHEMES.items():
        if present is not None and _bits(scheme) >= _bits(present):
            continue
        with suppress(ConfigError, UnsupportedModelError):
            settle(in_scheme(request, name))
            found.setdefault(_bits(scheme), name)
    return [found[bits] for bits in sorted(found, reverse=True)]


def _bits(scheme: WeightScheme) -> float:
    """Of one weight, scales apart."""
    return 8 * DTYPE_BYTES[scheme.code_dtype] / scheme.codes_per_byte


def in_scheme(request: PlanRequest, name: str) -> PlanRequest:
    """The same with weights in a scheme, or as they are."""
    return request._replace(config=request.config.with_quantization(name))


def _gpu_alternatives(request: PlanRequest) -> list[Alternative]:
    """The smallest GPU that fits, and the next larger ones; the largest of all where none fits."""
    fitting: list[Alternative] = []
    tried = None
    for gpu in GPUS.values():
        if request.target.kind == "cuda" and gpu.total_bytes == request.target.total_bytes:
            continue
        if fitting and GPUS[fitting[-1].value].nominal_gb == gpu.nominal_gb:
            continue  # of several with as much one is enough
        # A limit was meant for the device that was named first.
        config = replace(request.config, device="auto", memory_limit=None)
        moved = request._replace(config=config, target=gpu_target(gpu), staging=None)
        tried = next(_possible([_Change(f"take {gpu.key}", "gpu", gpu.key, moved)]), None)
        fitting += [tried] if tried is not None and tried.fits else []
        if len(fitting) == NUM_GPUS:
            break
    return fitting or ([] if tried is None else [tried])


def _later_changes(request: PlanRequest) -> Iterator[_Change]:
    """What this version does not have: several ranks."""
    for ranks in RANKS:
        if ranks > request.tensor_parallel_size and request.blueprint.anatomy.indivisible(ranks) is None:
            changed = request._replace(tensor_parallel_size=ranks)
            yield _Change(f"share it among {ranks} GPUs", "tensor_parallel_size", str(ranks), changed, NO_RANKS)

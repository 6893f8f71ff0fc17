"""Alternatives to a plan: changes worth knowing, what each gives, and which cost least; no torch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import accumulate, islice
from typing import NamedTuple

from holdfast.distributed.mesh import ALONE, meshes
from holdfast.errors import ConfigError, PlanChange, UnsupportedModelError
from holdfast.memory.devices import GPUS, MIB
from holdfast.planning.fit import SHORTENED, RunnerPlan, longest_that_fits, try_fit, unfitting_runner
from holdfast.planning.resolve import DEFAULT_UTILIZATION, PlanRequest, Resolved, resolve
from holdfast.planning.speed import SpeedEstimate, estimate_speed
from holdfast.planning.target import gpu_target, too_old_reason
from holdfast.quant.formats import DTYPE_BYTES, formats_of
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightScheme

MAX_UTILIZATION = 0.98
"""Largest share of a device that a plan by owner, being exact, may use."""
LEVER_BATCHED_TOKENS = {"cuda": 2048, "cpu": 512}
"""Tokens of a step that still saturate a device, with a fraction of the scratch buffers."""
LEVER_NUM_SEQS = 4
"""Enough for a few users, with little per-sequence memory."""
MIN_BATCHED_TOKENS = 64
RANKS = (2, 4, 8)
NUM_GPUS = 3
ALIKE = 1.06
"""GPUs whose memory differs by less than this factor count as one."""
NUM_CHANGES = 3
"""Number of changes that a refusal lists."""
NUM_COMBINED = 2
"""Number of listed combinations beside the one with the model's own context."""
WORTH = 1.01
"""Smallest gain of a listed lever, as a factor."""
USEFUL_TOKENS = 2048
"""A change does not count as fitting if an open context shrinks below this."""
LEVER, CONTEXT, FORMAT, WEIGHTS, GPU, RANKED = "lever", "context", "format", "weights", "gpu", "ranks"
KINDS = (LEVER, CONTEXT, FORMAT, WEIGHTS, RANKED, GPU)
BEST = (LEVER, FORMAT, WEIGHTS, CONTEXT, RANKED, GPU)
"""Kinds in the order of preference: settings that cost at most speed, pages and then weights in fewer bits, a shorter
context, more of the same GPU, another GPU."""
LEVERS = (
    "memory_utilization",
    "memory_limit",
    "kv_cache_memory",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
)
"""Options that change no answer."""

LEFT_OUT = ""
"""The value of an option that a change removes."""
Settings = tuple[tuple[str, str], ...]
"""Options and their values as typed, or LEFT_OUT."""


class Alternative(NamedTuple):
    """One change of one option, or of several that help together, and its effect."""

    change: str
    """An imperative: "lower max_num_seqs to 4"."""
    settings: Settings
    kind: str
    """One of KINDS."""
    kv_tokens: int
    """0 if it does not fit."""
    max_model_len: int
    """The longest context after the change; 0 if it does not fit."""
    fits: bool
    is_smallest: bool = False
    speed: SpeedEstimate | None = None
    """None if it does not fit, or if the device's speed is unknown."""
    max_concurrency: float = 0.0
    """Sequences of the longest context that fit together."""

    @property
    def option(self) -> str | None:
        """The option that changes; None if there are several."""
        return self.settings[0][0] if len(self.settings) == 1 else None

    @property
    def value(self) -> str | None:
        return self.settings[0][1] if len(self.settings) == 1 else None

    @property
    def lasting(self) -> Settings:
        """The settings that change more than speed."""
        return tuple((name, value) for name, value in self.settings if name not in LEVERS)

    @property
    def advice(self) -> str:
        """The change, with its option unless it names it; several changes as options alone."""
        given = [f"{name}={value}" for name, value in self.settings]
        if len(given) > 1:
            return f"set {', '.join(given[:-1])} and {given[-1]}"
        return f"{self.change} ({given[0]})" if self.kind in (FORMAT, WEIGHTS) else self.change


class _Change(NamedTuple):
    """A change before it is tried."""

    text: str
    settings: Settings
    kind: str
    request: PlanRequest


def list_alternatives(resolved: Resolved) -> tuple[Alternative, ...]:
    """List changes in the order in which a user would accept them.

    If the plan does not fit, the first that does is the smallest change:

    1. settings that cost at most speed: more of the memory, shorter steps, fewer sequences at once, no graphs
    2. a shorter context: shorter requests get the same answers
    3. pages in fewer bits, which changes answers a little; then weights in fewer bits
    4. more of the same GPU
    5. another GPU that kernels run on; for a CPU only if none of the changes above fits

    The first pages and the first weights that fit are listed once more with all settings that cost no quality, unless these
    settings alone give the model's own context. If the plan fits, no change is marked as the smallest.
    """
    request = resolved.request
    fit = try_fit(resolved)
    listed = list_levers(resolved, fit)
    wanted = request.config.max_model_len or request.declared.max_position
    is_short = fit is None or fit.resolved.limits.max_model_len < wanted
    listed += _possible(_context_changes(resolved, fit))
    formats = _tried_all(_format_changes(resolved))
    weights = _tried_all(_weight_changes(resolved))
    listed += [item for _, item in formats]
    listed += _combined_pages(resolved, formats) if is_short and not _is_whole(listed, wanted) else []
    # Weights in fewer bits are offered if they fit in any way.
    needs_help = fit is None and not any(item.fits for _, item in weights)
    is_short = needs_help or (is_short and not _is_whole(listed, wanted))
    listed += [item for _, item in weights]
    listed += _combined_weights(resolved, weights) if is_short else []
    ranks = _tried_all(_rank_changes(resolved))
    listed += _combined_ranks(resolved, ranks) if not any(item.fits for item in listed) and fit is None else []
    listed += [item for _, item in ranks]
    if fit is not None or request.target.kind == "cuda" or not any(item.fits for item in listed):
        listed += _gpu_alternatives(resolved, fit)
    if fit is not None:
        return tuple(listed)
    smallest = next((item for item in listed if item.fits), None)
    return tuple(item._replace(is_smallest=item is smallest) for item in listed)


def _is_whole(listed: Iterable[Alternative], wanted: int) -> bool:
    """Return True if a change gives the wanted context."""
    return any(item.max_model_len >= wanted for item in listed)


def best_change(listed: Iterable[Alternative]) -> Alternative | None:
    """Return the first change that fits, with the settings that cost no quality: longest context, then most tokens.

    A context that the user gave is kept if settings or fewer bits can keep it.
    """
    fitting = sorted((item for item in listed if item.fits), key=lambda item: BEST.index(item.kind))
    if not fitting:
        return None
    alike = [item for item in fitting if item.kind == fitting[0].kind and item.lasting == fitting[0].lasting]
    # Without graphs a stream is slower, and a longer context does not make up for that.
    quick = [item for item in alike if ("enforce_eager", "true") not in item.settings]
    return max(quick or alike, key=lambda item: (item.max_model_len, item.kv_tokens))


def smallest_changes(listed: Iterable[Alternative], num_changes: int = NUM_CHANGES) -> tuple[Alternative, ...]:
    """Return the changes that cost least, with weights in fewer bits among them if these fit.

    There is one for each option that changes more than speed, and one for each set of options that do not.
    """
    by_options: dict[tuple[str, ...], Alternative] = {}
    for item in listed:
        if item.fits:
            by_options.setdefault(tuple(name for name, _ in item.lasting[:1] or item.settings), item)
    distinct = list(by_options.values())
    first, rest = distinct[:num_changes], distinct[num_changes:]
    quantized = next((item for item in rest if item.kind == WEIGHTS), None)
    if quantized is not None and not any(item.kind == WEIGHTS for item in first):
        first[-1] = quantized
    return tuple(first)


def advice(listed: Sequence[Alternative]) -> str:
    """Return the last sentence of a refusal."""
    changes = [item.advice for item in smallest_changes(listed)]
    if not changes:
        return "Take a smaller model: no change of options makes this one fit."
    first = changes[0][0].upper() + changes[0][1:]
    if len(changes) == 1:
        return f"{first}, which fits."
    return f"{', or '.join((first, *changes[1:]))}: each of them fits."


def plan_changes(listed: Iterable[Alternative]) -> tuple[PlanChange, ...]:
    """Return the smallest changes as an error holds them."""
    return tuple(
        PlanChange(item.change, typed(item.settings), item.kv_tokens, item.max_model_len)
        for item in smallest_changes(listed)
    )


def typed(settings: Settings) -> str:
    """Print settings as options of a command that starts an engine; empty if it has no such option."""
    if any(name == "gpu" or value == LEFT_OUT for name, value in settings):
        return ""
    return " ".join(f"--{name.replace('_', '-')}{'' if value == 'true' else f' {value}'}" for name, value in settings)


def context_note(resolved: Resolved, found: RunnerPlan, listed: Sequence[Alternative] | None = None) -> str:
    """Say which limit shortens the context, and what would lift it; empty if none does.

    `listed` are the alternatives, if they are already known.
    """
    length = found.resolved.limits.max_model_len
    heads = resolved.declared.declaration.heads(ALONE)
    windows = () if heads is None or heads.is_compressed else heads.windows
    notes = []
    reason = next((choice.reason for choice in found.resolved.choices if choice.name == "max_model_len"), "")
    if reason.startswith(SHORTENED):
        if listed is None:
            listed = [*list_levers(resolved, try_fit(resolved)), *_possible(_format_changes(resolved))]
        longer = [item for item in listed if item.fits and item.max_model_len > length]
        longest = max(longer, key=lambda item: item.max_model_len, default=None)
        best = longer[0] if longer and longer[0].kind == LEVER else longest
        lift = "" if best is None else f"; to lift it: {best.advice}, for {best.max_model_len:,}"
        notes.append(f"context of {length:,} tokens, {reason}{lift}")
    bounded = [window for window in windows if window is not None]
    if bounded and len(bounded) == len(windows) and max(bounded) < length:
        notes.append(f"every layer attends to the last {max(bounded):,} tokens only, the model's own window")
    return "; ".join(notes)


def layers_note(request: PlanRequest) -> str:
    """Say how many layers one device holds if it cannot hold all, and with which context; empty if it can."""
    declared, config = request.declared, request.config
    length = config.max_model_len or declared.max_position
    alone = replace(request, config=replace(config, max_model_len=length), mesh=ALONE, staging=None)

    def fits(num_layers: int) -> bool:
        cut = declared.first_layers(num_layers)
        return cut is not None and try_fit(resolve(replace(alone, declared=cut))) is not None

    low, high = 0, declared.num_layers
    if fits(high):
        return ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        return ""
    target = request.target.name
    return f"one {target} holds the first {low} of {declared.num_layers} layers, with a context of {length:,} tokens"


def _possible(changes: Iterable[_Change]) -> Iterator[Alternative]:
    """Try each change; skip one that contradicts another option or has no attention backend."""
    for change in changes:
        with suppress(ConfigError, UnsupportedModelError):
            yield _tried(change)


def _tried_all(changes: Iterable[_Change]) -> list[tuple[_Change, Alternative]]:
    return [(change, item) for change in changes for item in _possible([change])]


def _tried(change: _Change) -> Alternative:
    fit = try_fit(resolve(change.request))
    if fit is not None and fit.resolved.limits.max_model_len < shortest_useful(change.request):
        fit = None
    named = change.text, change.settings, change.kind
    if fit is None:
        return Alternative(*named, 0, 0, False)
    counts = fit.kv_tokens, fit.resolved.limits.max_model_len
    return Alternative(*named, *counts, True, speed=estimate_speed(fit), max_concurrency=fit.max_concurrency)


def shortest_useful(request: PlanRequest) -> int:
    """Return the context that a change must give: the given one, or one that is worth starting an engine for."""
    return request.config.max_model_len or min(USEFUL_TOKENS, request.declared.max_position)


def _set(resolved: Resolved, text: str, kind: str, option: str, value: object) -> _Change:
    """Change one option of the config."""
    typed_value = LEFT_OUT if value is None else str(value).lower()
    return _Change(text, ((option, typed_value),), kind, resolved.request_with(**{option: value}))


def list_levers(resolved: Resolved, fit: RunnerPlan | None) -> list[Alternative]:
    """List the changes that cost no quality.

    If the plan fits: each that helps, and all of them together. If not: those that suffice, each alone and only as far as
    needed, and as many as are needed together.
    """
    if fit is None:
        needed = [*_memory_changes(resolved), *_step_changes(resolved)]
        alone = [item for item in _possible(needed) if item.fits]
        enough = (item for item in _possible(_together(_levers(resolved))) if item.fits)
        return [*alone, *([item] if (item := next(enough, None)) is not None else [])]
    now = (fit.resolved.limits.max_model_len, fit.kv_tokens)
    tried = [(lever, item) for lever, item in _tried_all(_levers(resolved)) if _is_worth(item, *now)]
    alone = [item for _, item in tried]
    best: Alternative | None = None
    for item in _possible(_together([lever for lever, _ in tried])):
        if best is None or _is_worth(item, best.max_model_len, best.kv_tokens):
            best = item
    if best is None or not all(_is_worth(best, item.max_model_len, item.kv_tokens) for item in alone):
        return alone
    return [best, *alone]


def _is_worth(item: Alternative, max_model_len: int, kv_tokens: int) -> bool:
    """Return True if it gives a context that is longer by enough, or enough more tokens at no shorter one."""
    is_more = item.kv_tokens > WORTH * kv_tokens and item.max_model_len >= max_model_len
    return item.fits and (is_more or item.max_model_len > WORTH * max_model_len)


def _levers(resolved: Resolved) -> list[_Change]:
    """List each lever at its full length: more of the memory, shorter steps, fewer sequences, no graphs."""
    config, kind, limits = resolved.request.config, resolved.target.kind, resolved.limits
    share = MAX_UTILIZATION if kind == "cuda" else DEFAULT_UTILIZATION
    has_share = config.memory_utilization or (DEFAULT_UTILIZATION if kind == "cuda" else 0.0)
    levers = []
    if config.memory_limit is None and has_share < share:
        text = f"raise memory_utilization to {share:.2f}"
        levers.append(_set(resolved, text, LEVER, "memory_utilization", share))
    for option, value, most in (
        ("max_num_batched_tokens", LEVER_BATCHED_TOKENS[kind], limits.max_num_batched_tokens),
        ("max_num_seqs", LEVER_NUM_SEQS, limits.max_num_seqs),
    ):
        if most > value:
            levers.append(_set(resolved, f"lower {option} to {value}", LEVER, option, value))
    return [*levers, *_eager_changes(resolved)]


def _eager_changes(resolved: Resolved) -> list[_Change]:
    if resolved.target.kind != "cuda" or resolved.enforce_eager:
        return []
    return [_set(resolved, "set enforce_eager", LEVER, "enforce_eager", True)]


def _together(levers: Sequence[_Change]) -> Iterator[_Change]:
    """Join the first two, the first three, and so on."""
    return islice(accumulate(levers, _joined), 1, None)


def _joined(change: _Change, other: _Change) -> _Change:
    """Join two changes, of which the other sets an option of the config."""
    config, (option, value) = change.request.config, other.settings[0]
    merged = replace(config, **{option: getattr(other.request.config, option)})
    kind = max(change.kind, other.kind, key=KINDS.index)
    short = {
        "memory_utilization": f"{value} of the memory",
        "max_num_batched_tokens": f"steps of {value}",
        "max_num_seqs": f"{value} sequences",
        "enforce_eager": "no graphs",
    }.get(option, other.text.removeprefix("keep "))
    text = f"{change.text}{', ' if len(change.settings) > 1 else ' with '}{short}"
    return _Change(text, (*change.settings, *other.settings), kind, replace(change.request, config=merged))


def _memory_changes(resolved: Resolved) -> Iterator[_Change]:
    """Take more of the memory: only as much as a useful context needs."""
    config, target = resolved.request.config, resolved.target
    if config.kv_cache_memory is not None:
        yield _set(resolved, "leave out kv_cache_memory", LEVER, "kv_cache_memory", None)
    length = shortest_useful(resolved.request)
    useful = resolve(resolved.request_with(max_model_len=length, kv_cache_memory=None))
    needed_bytes = unfitting_runner(useful).memory.peak_bytes
    if config.memory_limit is not None:
        limit = f"{-(-needed_bytes // MIB)}MiB"
        if needed_bytes <= target.available_bytes:
            yield _set(resolved, f"raise memory_limit to {limit}", LEVER, "memory_limit", limit)
        return
    share = -(-100 * needed_bytes // target.total_bytes) / 100
    if (config.memory_utilization or DEFAULT_UTILIZATION) < share <= MAX_UTILIZATION:
        yield _set(resolved, f"raise memory_utilization to {share:.2f}", LEVER, "memory_utilization", share)


def _step_changes(resolved: Resolved) -> Iterator[_Change]:
    """Take the largest powers of two that fit, and no graphs."""
    limits = resolved.limits
    for option, value, smallest in (
        ("max_num_batched_tokens", limits.max_num_batched_tokens, MIN_BATCHED_TOKENS),
        ("max_num_seqs", limits.max_num_seqs, 1),
    ):
        powers = [2**power for power in range(31) if smallest <= 2**power < value]
        changes = [_set(resolved, f"lower {option} to {power}", LEVER, option, power) for power in powers]
        # If the smallest is not enough, none is.
        if changes and _tried(changes[0]).fits:
            yield next(change for change in reversed(changes) if _tried(change).fits)
    yield from _eager_changes(resolved)


def _context_changes(resolved: Resolved, fit: RunnerPlan | None) -> Iterator[_Change]:
    """Try the longest context that fits and the power of two below: shorter than given, or longer if memory is left."""
    longest_possible = resolved.limits.max_model_len - 1 if fit is None else resolved.declared.max_position
    low = 1 if fit is None else fit.resolved.limits.max_model_len + 1
    longest = None
    with suppress(UnsupportedModelError):  # contexts that no backend takes are not offered
        longest = longest_that_fits(resolved, low, 0 if resolved.may_shorten else longest_possible)
    if longest is None:
        return
    length = longest.resolved.limits.max_model_len
    verb = "lower" if fit is None else "raise"
    for value in dict.fromkeys((length, 2 ** (length.bit_length() - 1))):
        if value >= low:
            yield _set(resolved, f"{verb} max_model_len to {value}", CONTEXT, "max_model_len", value)


def _format_changes(resolved: Resolved) -> Iterator[_Change]:
    """Halve float32, for pages or for everything; then take pages in fewer and fewer bits."""
    declared, current = resolved.declared, resolved.kv_format.name
    half = "float16" if declared.checkpoint_dtype == "float16" else "bfloat16"

    def pages_in(name: str) -> _Change:
        return _set(resolved, f"keep KV pages in {name}", FORMAT, "kv_cache_dtype", name)

    if resolved.near_tokens:
        yield _set(resolved, "keep no near tokens beside KV pages", FORMAT, "kv_near_tokens", 0)
    if current not in ("float16", "bfloat16"):
        yield pages_in(half)
    if resolved.dtype == "float32":
        yield _set(resolved, f"compute in {half}", FORMAT, "dtype", half)
    for kv_format in formats_of(declared.keeps_latents, declared.is_compressed).values():
        if kv_format.is_quantized and kv_format.name != current:
            yield pages_in(kv_format.name)


def _weight_changes(resolved: Resolved) -> Iterator[_Change]:
    """Take weights in fewer and fewer bits."""
    for name in narrower_schemes(resolved):
        yield _Change(
            f"keep weights in {name}", (("quantization", name),), WEIGHTS, in_scheme(resolved.request_with(), name)
        )


def _combined_pages(resolved: Resolved, formats: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """Join pages in fewer bits with all levers: the first that fit, and the first with the model's own context."""
    pages = [change for change, _ in formats if change.settings[0][0] == "kv_cache_dtype"]
    return _enough(resolved, [_with_levers(resolved, change) for change in pages])


def _combined_weights(resolved: Resolved, weights: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """Join the first weights in fewer bits that fit with all levers, as they are and with pages in fewer bits."""
    pages = [change for change in _format_changes(resolved) if change.settings[0][0] == "kv_cache_dtype"]
    first = next((change for change, item in weights if item.fits), None)
    for change in (change for change, _ in weights) if first is None else [first]:
        joined = _with_levers(resolved, change)
        found = _enough(resolved, [joined, *(_with_levers(resolved, _joined(change, other)) for other in pages)])
        if found:
            return found
    return []


def _combined_ranks(resolved: Resolved, ranks: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """Return the fewest GPUs that hold weights in fewer bits, alone and with all levers, if these are fewer GPUs."""
    for change, item in ranks:
        if item.fits:
            break
        for name in narrower_schemes(resolved):
            settings = (*change.settings, ("quantization", name))
            moved = in_scheme(change.request, name)
            joined = _Change(f"{change.text} with weights in {name}", settings, RANKED, moved)
            found = [item for item in _possible([joined, _with_levers(resolved, joined)]) if item.fits]
            if found:
                return found
    return []


def _enough(resolved: Resolved, changes: Sequence[_Change]) -> list[Alternative]:
    """Return the first two that fit, and the first that gives the model's own context."""
    wanted = resolved.request.config.max_model_len or resolved.declared.max_position
    found: list[Alternative] = []
    for item in _possible(changes):
        is_whole = item.max_model_len >= wanted
        if item.fits and (is_whole or len(found) < NUM_COMBINED):
            found.append(item)
        if is_whole:
            break
    return found


def _with_levers(resolved: Resolved, change: _Change) -> _Change:
    """Join a change with all levers that cost neither quality nor the speed of one stream."""
    quick = (lever for lever in _levers(resolved) if lever.settings[0][0] != "enforce_eager")
    return reduce(_joined, quick, change)


def narrower_schemes(resolved: Resolved) -> list[str]:
    """Return the first possible scheme of each number of bits below the present one, the widest first."""
    present = resolved.recipe.scheme
    found: dict[float, str] = {}
    for name, scheme in WEIGHT_SCHEMES.items():
        if present is not None and _bits(scheme) >= _bits(present):
            continue
        with suppress(ConfigError, UnsupportedModelError):
            resolve(in_scheme(resolved.request_with(), name))
            found.setdefault(_bits(scheme), name)
    return [found[bits] for bits in sorted(found, reverse=True)]


def _bits(scheme: WeightScheme) -> float:
    """Bits of one weight, without scales."""
    return 8 * DTYPE_BYTES[scheme.code_dtype] / scheme.codes_per_byte


def in_scheme(request: PlanRequest, name: str) -> PlanRequest:
    """Return the request with weights in a scheme, or as they are."""
    return replace(request, config=request.config.with_quantization(name))


def _gpu_alternatives(resolved: Resolved, fit: RunnerPlan | None) -> list[Alternative]:
    """Return the smallest GPU that fits, and the next larger ones; the largest of all if none fits.

    It skips GPUs that kernels do not run on, GPUs with as much memory as one in the list, and, if memory has shortened the
    context, GPUs that hold no more.
    """
    fitting: list[Alternative] = []
    tried, taken_bytes, request = None, 0, resolved.request
    is_short = fit is not None and fit.resolved.limits.max_model_len < resolved.limits.max_model_len
    least_tokens = fit.kv_tokens + 1 if fit is not None and is_short else 0
    for gpu in GPUS.values():
        target = gpu_target(gpu)
        is_same = request.target.kind == "cuda" and gpu.total_bytes == request.target.total_bytes
        if is_same or too_old_reason(target) is not None or gpu.total_bytes < ALIKE * taken_bytes:
            continue
        # A limit applies to the device that was named first.
        config = replace(request.config, device="auto", memory_limit=None)
        moved = replace(request, config=config, target=target, staging=None)
        tried = next(_possible([_Change(f"take {gpu.key}", (("gpu", gpu.key),), GPU, moved)]), None)
        if tried is not None and tried.fits and tried.kv_tokens >= least_tokens:
            fitting.append(tried)
            taken_bytes = gpu.total_bytes
        if len(fitting) == NUM_GPUS:
            break
    return fitting or ([] if tried is None or is_short else [tried])


def _rank_changes(resolved: Resolved) -> Iterator[_Change]:
    """Share every layer among more GPUs.

    A plan of one stage says nothing about other stages, and ranks on a CPU share its memory. GPUs that are too old run
    nothing, so more of them do not help.
    """
    request = resolved.request
    is_too_old = too_old_reason(request.target) is not None
    if request.mesh.num_stages > 1 or request.target.kind == "cpu" or is_too_old:
        return
    for ranks in RANKS:
        mesh = meshes(ranks, is_exact=request.mesh.is_exact)[0]
        if ranks > request.mesh.tensor_size and request.declared.is_divisible(mesh):
            changed = replace(resolved.request_with(tensor_parallel_size=ranks), mesh=mesh)
            settings = (("tensor_parallel_size", str(ranks)),)
            yield _Change(f"share it among {ranks} GPUs", settings, RANKED, changed)

"""What would fit instead: every change of a plan worth knowing, what it gives, and which of them cost least; no torch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from holdfast.distributed.mesh import ALONE, meshes
from holdfast.errors import ConfigError, PlanChange, UnsupportedModelError
from holdfast.memory.devices import GPUS, MIB
from holdfast.planning.fit import (
    SHORTENED,
    Fit,
    PlanRequest,
    RunnerPlan,
    longest_that_fits,
    settle,
    try_fit,
    unfitting_runner,
)
from holdfast.planning.resolve import DEFAULT_UTILIZATION
from holdfast.planning.speed import SpeedEstimate, estimate_speed
from holdfast.planning.target import gpu_target, too_old_words
from holdfast.quant.formats import DTYPE_BYTES, formats_of
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightScheme

MAX_UTILIZATION = 0.98
"""A plan by owner is exact enough for this share of a device."""
LEVER_BATCHED_TOKENS = {"cuda": 2048, "cpu": 512}
"""Steps of so many tokens still fill a device's arithmetic, and need a fraction of the scratch."""
LEVER_NUM_SEQS = 4
"""For a few people; what a sequence costs whatever its length is not much then."""
MIN_BATCHED_TOKENS = 64
RANKS = (2, 4, 8)
NUM_GPUS = 3
"""GPUs that are offered."""
ALIKE = 1.06
"""GPUs whose memory differs by less are one to a plan."""
NUM_CHANGES = 3
"""That a refusal tells."""
NUM_COMBINED = 2
"""Combinations that are listed beside the one that gives the model's own context."""
WORTH = 1.01
"""A lever that gives less than one part in a hundred is not worth a line."""
USEFUL_TOKENS = 2048
"""A change after which an open context would shrink below this does not count as one that fits."""
LEVER, CONTEXT, FORMAT, WEIGHTS, GPU, RANKED = "lever", "context", "format", "weights", "gpu", "ranks"
KINDS = (LEVER, CONTEXT, FORMAT, WEIGHTS, RANKED, GPU)
BEST = (LEVER, FORMAT, WEIGHTS, CONTEXT, RANKED, GPU)
"""Changes in the order in which a person makes them: settings that cost speed at most, a shorter context, pages and then
weights in fewer bits, more of the same GPU, another GPU."""
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
"""The value of an option that a change leaves out."""
Settings = tuple[tuple[str, str], ...]
"""Options and their values, as a person types them, or LEFT_OUT."""


class Alternative(NamedTuple):
    """One change, of one option or of several that help together, and what it gives."""

    change: str
    """In words, as an advice."""
    settings: Settings
    kind: str
    """One of KINDS."""
    kv_tokens: int
    """0 where it does not fit."""
    max_model_len: int
    """The longest context then; 0 where it does not fit."""
    fits: bool
    is_smallest: bool = False
    speed: SpeedEstimate | None = None
    """None if it does not fit, or if nothing is known of the device's speed."""

    @property
    def max_concurrency(self) -> float:
        return self.kv_tokens / self.max_model_len if self.fits else 0.0

    @property
    def option(self) -> str | None:
        """The one option that is changed; None where there are several."""
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
        """The words, with the option where they do not name it; several changes as options alone."""
        given = [f"{name}={value}" for name, value in self.settings]
        if len(given) > 1:
            return f"set {', '.join(given[:-1])} and {given[-1]}"
        return f"{self.change} ({given[0]})" if self.kind in (FORMAT, WEIGHTS) else self.change


class _Change(NamedTuple):
    """A change before it is tried."""

    words: str
    settings: Settings
    kind: str
    request: PlanRequest


def list_alternatives(request: PlanRequest) -> tuple[Alternative, ...]:
    """Changes in the order in which a person makes them.

    If the plan does not fit, the first that does is the smallest change:

    1. settings that cost speed at most: more of the memory, shorter steps, fewer sequences at once, no graphs
    2. a shorter context: requests below it are answered as before
    3. pages in fewer bits, which changes answers a little; then weights in fewer bits
    4. more of the same GPU
    5. another GPU; never one that kernels do not run on, and on a CPU only if none of the changes above fits

    The first pages and the first weights that fit are listed once more with all settings that cost no quality, unless these
    settings alone give the model's own context. If the plan fits, no change is marked as the smallest.
    """
    fit = try_fit(request)
    listed = list_levers(request, fit)
    wanted = request.config.max_model_len or request.declared.max_position
    is_short = fit is None or fit.resolved.limits.max_model_len < wanted
    listed += _possible(_context_changes(request, fit))
    formats = _tried_all(_format_changes(request))
    weights = _tried_all(_weight_changes(request))
    listed += [item for _, item in formats]
    listed += _combined_pages(request, formats) if is_short and not _is_whole(listed, wanted) else []
    # Weights in fewer bits are offered if they fit in any way.
    needs_help = fit is None and not any(item.fits for _, item in weights)
    is_short = needs_help or (is_short and not _is_whole(listed, wanted))
    listed += [item for _, item in weights]
    listed += _combined_weights(request, weights) if is_short else []
    ranks = _tried_all(_rank_changes(request))
    listed += _combined_ranks(request, ranks) if not any(item.fits for item in listed) and fit is None else []
    listed += [item for _, item in ranks]
    if fit is not None or request.target.kind == "cuda" or not any(item.fits for item in listed):
        listed += _gpu_alternatives(request, fit)
    if fit is not None:
        return tuple(listed)
    smallest = next((item for item in listed if item.fits), None)
    return tuple(item._replace(is_smallest=item is smallest) for item in listed)


def _is_whole(listed: Iterable[Alternative], wanted: int) -> bool:
    """Whether a change gives the context that is wanted."""
    return any(item.max_model_len >= wanted for item in listed)


def best_change(listed: Iterable[Alternative]) -> Alternative | None:
    """The first change that fits with as much as costs no quality: the longest context, then the most tokens.

    A context that was typed is kept if settings or fewer bits keep it.
    """
    fitting = sorted((item for item in listed if item.fits), key=lambda item: BEST.index(item.kind))
    if not fitting:
        return None
    alike = [item for item in fitting if item.kind == fitting[0].kind and item.lasting == fitting[0].lasting]
    # Without graphs a stream is slower, which a longer context does not make up for.
    quick = [item for item in alike if ("enforce_eager", "true") not in item.settings]
    return max(quick or alike, key=lambda item: (item.max_model_len, item.kv_tokens))


def smallest_changes(listed: Iterable[Alternative], num_changes: int = NUM_CHANGES) -> tuple[Alternative, ...]:
    """The changes that cost least; weights in fewer bits are among them if they fit.

    One for each option that changes more than speed, and for each set of those that do not.
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
    """What ends a refusal, on one line."""
    changes = [item.advice for item in smallest_changes(listed)]
    if len(changes) == 1:
        return f"{changes[0]}, which fits"
    if changes:
        return f"{', or '.join(changes)}: each of them fits"
    return "take a smaller model: nothing that can be changed makes this one fit"


def plan_changes(listed: Iterable[Alternative]) -> tuple[PlanChange, ...]:
    """The same for whoever draws a refusal."""
    return tuple(
        PlanChange(item.change, typed(item.settings), item.kv_tokens, item.max_model_len)
        for item in smallest_changes(listed)
    )


def typed(settings: Settings) -> str:
    """As options of a command that starts an engine; empty where it has no such option."""
    words = []
    for name, value in settings:
        if name == "gpu" or value == LEFT_OUT:
            return ""
        words.append(f"--{name.replace('_', '-')}{'' if value == 'true' else f' {value}'}")
    return " ".join(words)


def context_note(request: PlanRequest, plan: RunnerPlan, listed: Sequence[Alternative] | None = None) -> str:
    """Which limit shortens what the model could attend to, and what would lift it; empty where none does.

    `listed` are the changes where they are known already.
    """
    limits = plan.resolved.limits
    heads = request.declared.declaration.heads(ALONE)
    windows = () if heads is None or heads.is_compressed else heads.windows
    notes = []
    reason = next((choice.reason for choice in plan.resolved.choices if choice.name == "max_model_len"), "")
    if reason.startswith(SHORTENED):
        if listed is None:
            fit = try_fit(request)
            listed = [*list_levers(request, fit), *_possible(_format_changes(request))]
        longer = [item for item in listed if item.fits and item.max_model_len > limits.max_model_len]
        best = longer[0] if longer and longer[0].kind == LEVER else max(longer, key=_length, default=None)
        lift = "" if best is None else f"; to lift it: {best.advice}, for {best.max_model_len:,}"
        notes.append(f"context of {limits.max_model_len:,} tokens, {reason}{lift}")
    bounded = [window for window in windows if window is not None]
    if bounded and len(bounded) == len(windows) and max(bounded) < limits.max_model_len:
        notes.append(f"every layer attends to the last {max(bounded):,} tokens only, the model's own window")
    return "; ".join(notes)


def layers_note(request: PlanRequest) -> str:
    """How many of a model's layers one device holds where it cannot hold all, and with which context; empty where it can."""
    declared, config = request.declared, request.config
    length = config.max_model_len or declared.max_position
    alone = replace(request, config=replace(config, max_model_len=length), mesh=ALONE, staging=None)

    def fits(num_layers: int) -> bool:
        cut = declared.first_layers(num_layers)
        return cut is not None and try_fit(replace(alone, declared=cut)) is not None

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


def _length(item: Alternative) -> int:
    return item.max_model_len


def _possible(changes: Iterable[_Change]) -> Iterator[Alternative]:
    """What each change gives; one that contradicts another option, or that no attention reads, is none."""
    for change in changes:
        with suppress(ConfigError, UnsupportedModelError):
            yield _tried(change)


def _tried_all(changes: Iterable[_Change]) -> list[tuple[_Change, Alternative]]:
    """Each change that is possible, with what it gives."""
    return [(change, item) for change in changes for item in _possible([change])]


def _tried(change: _Change) -> Alternative:
    fit = try_fit(change.request)
    if fit is not None and fit.resolved.limits.max_model_len < shortest_useful(change.request):
        fit = None
    return Alternative(
        change=change.words,
        settings=change.settings,
        kind=change.kind,
        kv_tokens=0 if fit is None else fit.kv_tokens,
        max_model_len=0 if fit is None else fit.resolved.limits.max_model_len,
        fits=fit is not None,
        speed=None if fit is None else estimate_speed(change.request, fit),
    )


def shortest_useful(request: PlanRequest) -> int:
    """The context that a change must give: what was asked, or one that is worth starting an engine for."""
    return request.config.max_model_len or min(USEFUL_TOKENS, request.declared.max_position)


def _set(request: PlanRequest, words: str, kind: str, option: str, value: object) -> _Change:
    """A change of one option of the config."""
    changed = request.with_config(replace(request.config, **{option: value}))
    return _Change(words, ((option, LEFT_OUT if value is None else str(value).lower()),), kind, changed)


def list_levers(request: PlanRequest, fit: Fit | None) -> list[Alternative]:
    """Changes that cost no quality.

    Of a plan that fits: what all together give, where several help, and each that helps by itself. Of one that does not:
    each alone, only as far as is needed, and as many as are needed together; those that suffice.
    """
    if fit is None:
        alone = [item for item in _possible(_needed_changes(request)) if item.fits]
        enough = (item for item in _possible(_together(_levers(request))) if item.fits)
        return [*alone, *([item] if (item := next(enough, None)) is not None else [])]
    now = (fit.resolved.limits.max_model_len, fit.kv_tokens)
    helping, alone = [], []
    for lever in _levers(request):
        found = next(_possible([lever]), None)
        if found is not None and _is_worth(found, *now):
            helping.append(lever)
            alone.append(found)
    best: Alternative | None = None
    for item in _possible(_together(helping)):
        if best is None or _is_worth(item, best.max_model_len, best.kv_tokens):
            best = item
    if best is None or not all(_is_worth(best, item.max_model_len, item.kv_tokens) for item in alone):
        return alone
    return [best, *alone]


def _is_worth(item: Alternative, max_model_len: int, kv_tokens: int) -> bool:
    """Whether it gives a longer context, or more tokens at the same, by enough to be told."""
    is_more = item.kv_tokens > WORTH * kv_tokens and item.max_model_len >= max_model_len
    return item.fits and (is_more or item.max_model_len > WORTH * max_model_len)


def _levers(request: PlanRequest) -> list[_Change]:
    """Each at its full length: more of the memory, shorter steps, fewer sequences, no graphs."""
    config, kind, limits = request.config, request.target.kind, settle(request)[1].limits
    share = MAX_UTILIZATION if kind == "cuda" else DEFAULT_UTILIZATION
    has_share = config.memory_utilization or (DEFAULT_UTILIZATION if kind == "cuda" else 0.0)
    levers = []
    if config.memory_limit is None and has_share < share:
        words = f"raise memory_utilization to {share:.2f}"
        levers.append(_set(request, words, LEVER, "memory_utilization", share))
    for option, value, most in (
        ("max_num_batched_tokens", LEVER_BATCHED_TOKENS[kind], limits.max_num_batched_tokens),
        ("max_num_seqs", LEVER_NUM_SEQS, limits.max_num_seqs),
    ):
        if most > value:
            levers.append(_set(request, f"lower {option} to {value}", LEVER, option, value))
    if kind == "cuda" and not config.enforce_eager:
        levers.append(_set(request, "set enforce_eager", LEVER, "enforce_eager", True))
    return levers


def _together(levers: Sequence[_Change]) -> Iterator[_Change]:
    """The first two, the first three, and so on."""
    joined = levers[0] if levers else None
    for lever in levers[1:]:
        assert joined is not None, "two levers have a first"
        joined = _joined(joined, lever)
        yield joined


def _joined(change: _Change, other: _Change) -> _Change:
    """Both, where the other sets options of the config."""
    config, (option, _) = change.request.config, other.settings[0]
    merged = change.request.with_config(replace(config, **{option: getattr(other.request.config, option)}))
    kind = max(change.kind, other.kind, key=KINDS.index)
    words = f"{change.words}{', ' if len(change.settings) > 1 else ' with '}{_short(other)}"
    return _Change(words, (*change.settings, *other.settings), kind, merged)


def _short(change: _Change) -> str:
    """A change after another, in fewer words."""
    (option, value), *_ = change.settings
    words = {
        "memory_utilization": f"{value} of the memory",
        "max_num_batched_tokens": f"steps of {value}",
        "max_num_seqs": f"{value} sequences",
        "enforce_eager": "no graphs",
    }
    return words.get(option, change.words.removeprefix("keep "))


def _needed_changes(request: PlanRequest) -> Iterator[_Change]:
    yield from _memory_changes(request)
    yield from _step_changes(request)


def _memory_changes(request: PlanRequest) -> Iterator[_Change]:
    """More of the memory that is there: just as much as is short of a useful context."""
    config, target = request.config, request.target
    if config.kv_cache_memory is not None:
        yield _set(request, "leave out kv_cache_memory", LEVER, "kv_cache_memory", None)
    asked = request.with_config(replace(config, max_model_len=shortest_useful(request), kv_cache_memory=None))
    needed_bytes = unfitting_runner(asked).memory.peak_bytes
    if config.memory_limit is not None:
        limit = f"{-(-needed_bytes // MIB)}MiB"
        if needed_bytes <= target.available_bytes:
            yield _set(request, f"raise memory_limit to {limit}", LEVER, "memory_limit", limit)
        return
    share = -(-100 * needed_bytes // target.total_bytes) / 100
    if (config.memory_utilization or DEFAULT_UTILIZATION) < share <= MAX_UTILIZATION:
        yield _set(request, f"raise memory_utilization to {share:.2f}", LEVER, "memory_utilization", share)


def _step_changes(request: PlanRequest) -> Iterator[_Change]:
    """The largest powers of two that fit, and no graphs."""
    limits = settle(request)[1].limits
    for option, value, smallest in (
        ("max_num_batched_tokens", limits.max_num_batched_tokens, MIN_BATCHED_TOKENS),
        ("max_num_seqs", limits.max_num_seqs, 1),
    ):
        powers = [2**power for power in range(31) if smallest <= 2**power < value]
        changes = [_set(request, f"lower {option} to {power}", LEVER, option, power) for power in powers]
        # Where the smallest is not enough, none is.
        if changes and _tried(changes[0]).fits:
            yield next(change for change in reversed(changes) if _tried(change).fits)
    if request.target.kind == "cuda" and not request.config.enforce_eager:
        yield _set(request, "set enforce_eager", LEVER, "enforce_eager", True)


def _context_changes(request: PlanRequest, fit: Fit | None) -> Iterator[_Change]:
    """The longest context that fits, and the power of two below it: shorter than asked, or longer where there is room."""
    layout, resolved = settle(request)
    if fit is None:
        low, high = 1, 0 if resolved.may_shorten else resolved.limits.max_model_len - 1
    else:
        low, high = fit.resolved.limits.max_model_len + 1, 0 if resolved.may_shorten else request.declared.max_position
    longest = None
    with suppress(UnsupportedModelError):  # of contexts that no backend takes none is offered
        longest = longest_that_fits(layout, resolved, low, high)
    if longest is None:
        return
    length = longest.resolved.limits.max_model_len
    rounded = 2 ** (length.bit_length() - 1)
    verb = "lower" if fit is None else "raise"
    for value in dict.fromkeys((length, rounded)):
        if value >= low:
            yield _set(request, f"{verb} max_model_len to {value}", CONTEXT, "max_model_len", value)


def _format_changes(request: PlanRequest) -> Iterator[_Change]:
    """Half of float32, for pages or for everything; then pages in fewer and fewer bits."""
    resolved = settle(request)[1]
    half = "float16" if request.declared.checkpoint_dtype == "float16" else "bfloat16"
    current = resolved.kv_format.name
    if current not in ("float16", "bfloat16"):
        yield _pages_in(request, half)
    if resolved.dtype == "float32":
        yield _set(request, f"compute in {half}", FORMAT, "dtype", half)
    for kv_format in formats_of(request.declared.keeps_latents, request.declared.is_compressed).values():
        if kv_format.is_quantized and kv_format.name != current:
            yield _pages_in(request, kv_format.name)


def _pages_in(request: PlanRequest, name: str) -> _Change:
    return _set(request, f"keep KV pages in {name}", FORMAT, "kv_cache_dtype", name)


def _weight_changes(request: PlanRequest) -> Iterator[_Change]:
    """Weights in fewer and fewer bits."""
    for name in narrower_schemes(request):
        settings = (("quantization", name),)
        yield _Change(f"keep weights in {name}", settings, WEIGHTS, in_scheme(request, name))


def _combined_pages(request: PlanRequest, formats: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """The first pages in fewer bits that fit with all that costs no quality; and the first that give the model's own context."""
    pages = [change for change, _ in formats if change.settings[0][0] == "kv_cache_dtype"]
    return _enough(request, [_with_levers(request, change) for change in pages])


def _combined_weights(request: PlanRequest, weights: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """The first weights in fewer bits that fit with all that costs no quality, as they are and with pages in fewer bits."""
    pages = [change for change in _format_changes(request) if change.settings[0][0] == "kv_cache_dtype"]
    first = next((change for change, item in weights if item.fits), None)
    for change in (change for change, _ in weights) if first is None else [first]:
        joined = _with_levers(request, change)
        found = _enough(request, [joined, *(_with_levers(request, _joined(change, other)) for other in pages)])
        if found:
            return found
    return []


def _combined_ranks(request: PlanRequest, ranks: Sequence[tuple[_Change, Alternative]]) -> list[Alternative]:
    """The fewest GPUs that hold weights in fewer bits, as they are and with all that costs no quality, if these are fewer."""
    for change, item in ranks:
        if item.fits:
            break
        for name in narrower_schemes(request):
            settings = (*change.settings, ("quantization", name))
            words = f"{change.words} with weights in {name}"
            joined = _Change(words, settings, RANKED, in_scheme(change.request, name))
            found = [item for item in _possible([joined, _with_levers(request, joined)]) if item.fits]
            if found:
                return found
    return []


def _enough(request: PlanRequest, changes: Sequence[_Change]) -> list[Alternative]:
    """The first two that fit, and the first that gives the model's own context."""
    found: list[Alternative] = []
    for item in _possible(changes):
        is_whole = item.max_model_len >= (request.config.max_model_len or request.declared.max_position)
        if item.fits and (is_whole or len(found) < NUM_COMBINED):
            found.append(item)
        if is_whole:
            break
    return found


def _with_levers(request: PlanRequest, change: _Change) -> _Change:
    """A change with all settings that cost neither quality nor the speed of one stream."""
    for lever in _levers(request):
        if lever.settings[0][0] != "enforce_eager":
            change = _joined(change, lever)
    return change


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
    return request.with_config(request.config.with_quantization(name))


def _gpu_alternatives(request: PlanRequest, fit: Fit | None) -> list[Alternative]:
    """The smallest GPU that fits, and the next larger ones; the largest of all where none fits.

    One that kernels do not run on is not offered, nor one that has as much memory as another that is, nor one that
    holds no more where memory has shortened the context.
    """
    fitting: list[Alternative] = []
    tried, taken_bytes = None, 0
    is_short = fit is not None and fit.resolved.limits.max_model_len < settle(request)[1].limits.max_model_len
    least_tokens = fit.kv_tokens + 1 if fit is not None and is_short else 0
    for gpu in GPUS.values():
        target = gpu_target(gpu)
        is_same = request.target.kind == "cuda" and gpu.total_bytes == request.target.total_bytes
        if is_same or too_old_words(target) is not None or gpu.total_bytes < ALIKE * taken_bytes:
            continue
        # A limit was meant for the device that was named first.
        config = replace(request.config, device="auto", memory_limit=None)
        moved = replace(request, config=config, target=target, staging=None)
        tried = next(_possible([_Change(f"take {gpu.key}", (("gpu", gpu.key),), GPU, moved)]), None)
        if tried is not None and tried.fits and tried.kv_tokens >= least_tokens:
            fitting.append(tried)
            taken_bytes = gpu.total_bytes
        if len(fitting) == NUM_GPUS:
            break
    return fitting or ([] if tried is None or is_short else [tried])


def _rank_changes(request: PlanRequest) -> Iterator[_Change]:
    """More GPUs to every layer; of stages a plan is of one and says nothing of others, and ranks on a CPU share its memory.

    Ranks refuse compressed attention, and GPUs that are too old run nothing, so more of them are no way out.
    """
    is_no_way_out = too_old_words(request.target) is not None or request.declared.is_compressed
    if request.mesh.num_stages > 1 or request.target.kind == "cpu" or is_no_way_out:
        return
    for ranks in RANKS:
        mesh = meshes(ranks, is_exact=request.mesh.is_exact)[0]
        if ranks > request.mesh.tensor_size and request.declared.is_divisible(mesh):
            config = replace(request.config, tensor_parallel_size=ranks)
            changed = replace(request, config=config, mesh=mesh, staging=request.known_staging)
            settings = (("tensor_parallel_size", str(ranks)),)
            yield _Change(f"share it among {ranks} GPUs", settings, RANKED, changed)

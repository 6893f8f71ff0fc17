"""From what was asked to what will be done: types, limits, budget, protected layers, recipe, each with its reason; no torch."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.cache.compressed import StateKind, compressed_cache, list_states
from holdfast.cache.groups import block_tokens, tokens_again
from holdfast.cache.spec import CacheSpec, mixed_cache
from holdfast.config import AUTO_EMBEDDINGS, NGRAM, EngineConfig, Limits, parse_layers, parse_speculative
from holdfast.distributed.mesh import ALONE
from holdfast.errors import ConfigError, shown
from holdfast.memory.sizes import format_bytes, parse_bytes
from holdfast.models.declaration import HeadGeometry
from holdfast.models.declared_model import DeclaredModel, declare_decoder
from holdfast.models.declared_weights import BEFORE
from holdfast.models.spec import ModelSpec
from holdfast.planning.target import Target
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS, KVFormat, formats_of, index_dtype_beside
from holdfast.quant.weight_schemes import HEAD_SCHEME, WEIGHT_SCHEMES, WeightRecipe

CPU_KV_BYTES = 1024**3
KV_IS_ASKED = "kv_cache_memory"
"""The reason of a bound on KV pages that was asked for; our own gives way where one sequence needs more."""
DEFAULT_UTILIZATION = 0.9
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
WINDOW_SHARE = 10
"""Of the memory one part in so many is for what sequences keep whatever their length, unless their number was asked."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
PAGE_TOKENS = 16
QUANTIZED_PAGE_TOKENS = 64
"""Kernels over quantized pages take a tile of tokens of one head at a time, which lies in one piece where a page is a tile."""
LATENT_PAGE_TOKENS = 64
"""The same of latents (MLA), whatever their format: a row is wide, and a tile of them fills a program's shared memory."""
COMPRESSED_PAGE_TOKENS = 16
"""Rows of a page of compressed attention: one row stands for up to 128 tokens, and a prefix is cached by whole pages."""
FP8_PRODUCTS = (8, 9)
"""The compute capability from which on a GPU multiplies e4m3 by e4m3."""


SPECULATED_ROWS = 128
"""Rows that a step chooses from for proposals, unless sequences alone are more: beyond it computing costs more than reading weights."""
MOST_PADDING = 0.05
"""Of a page of a cache group that protected layers may leave unused, unless they were asked for."""


class Choice(NamedTuple):
    """One setting that was left open, what it became, and why."""

    name: str
    value: str
    reason: str


class ProtectedLayers(NamedTuple):
    """Some layers, perhaps none, and their format."""

    layers: tuple[int, ...]
    """In rising order."""
    format: KVFormat
    is_open: bool
    """Their number is settled, and so are all bytes; which they are is settled by the weights."""
    reason: str
    """Empty where nothing was chosen."""

    def formats(self, kv_format: KVFormat, num_layers: int) -> tuple[KVFormat, ...]:
        """The format of every layer, where all others have `kv_format`."""
        return tuple(self.format if layer in self.layers else kv_format for layer in range(num_layers))


NONE_PROTECTED = ProtectedLayers((), KV_FORMATS["float32"], False, "")


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
    num_proposals: int = 0
    """Most tokens that are proposed for a sequence in a step."""

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


def resolve(config: EngineConfig, model: DeclaredModel | ModelSpec, target: Target) -> Resolved:
    """Settle every open setting for a device that is settled already."""
    if isinstance(model, ModelSpec):
        model = declare_decoder(model, model.architecture)
    choices: list[Choice] = []
    dtype, reason = choose_dtype(config, model.checkpoint_dtype, target.kind)
    if reason:
        choices.append(Choice("dtype", dtype, reason))
    recipe, recipe_choices = choose_recipe(config, model, target)
    choices += recipe_choices
    if config.kv_cache_dtype == "auto":
        choices.append(Choice("kv_cache_dtype", dtype, "the same as dtype"))
    kv_format = model.check_format(dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    if kv_format.name not in (config.kv_cache_dtype, dtype):
        what = "tokens and entries that all heads share" if model.is_compressed else "latents (MLA)"
        reason = f"what {config.kv_cache_dtype} is of {what}"
        choices.append(Choice("kv_cache_dtype", kv_format.name, reason))
    kv_format = _with_index(config, model, kv_format, choices)
    protected = choose_protected(config, model, kv_format, dtype)
    if protected.reason:
        choices.append(Choice("kv_protected_layers", str(len(protected.layers)), protected.reason))
    page_tokens = _page_tokens(config, model, kv_format, choices)
    limits = _limits(config, model, target.kind, page_tokens, choices)
    budget_bytes, budget_reason, max_kv_bytes = _budget(config, target)
    choices.append(Choice("memory", format_bytes(budget_bytes), budget_reason))
    if config.max_num_seqs is None:
        limits = _fewer_windows(limits, model.kv_bytes_per_sequence(kv_format), budget_bytes, choices)
    num_proposals = parse_speculative(config.speculative)
    if num_proposals:
        limits = _with_proposals(limits, num_proposals, model, kv_format, choices)
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
        num_proposals,
    )


def _with_index(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]) -> KVFormat:
    """The format with how the index beside latents is kept; as it is where a model has none."""
    heads, asked = model.declaration.heads(ALONE), config.index_cache_dtype
    if heads is None or not heads.index_dim:
        if asked != "auto":
            has = f"{model.name} has no index that chooses tokens (DSA)"
            raise ConfigError(f"index_cache_dtype={asked} was asked", has, "leave it out")
        return kv_format
    if asked == "auto":
        asked = index_dtype_beside(kv_format)
        what = "entries" if model.is_compressed else "latents"
        reason = f"{what} are quantized too" if kv_format.is_quantized else f"as {what} are"
        choices.append(Choice("index_cache_dtype", asked, reason))
    return dataclasses.replace(kv_format, index_dtype=asked)


def choose_dtype(config: EngineConfig, checkpoint_dtype: str, kind: str) -> tuple[str, str]:
    """The type that is computed in, and why; no reason where it was asked for."""
    if config.dtype != "auto":
        return config.dtype, ""
    if kind == "cpu":
        return "float32", "the fastest exact type on a CPU"
    if checkpoint_dtype in ("float16", "bfloat16"):
        return checkpoint_dtype, "the checkpoint's own"
    return "bfloat16", f"the checkpoint is {checkpoint_dtype}, and half of that serves on a GPU"


def _page_tokens(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]) -> int:
    heads = model.declaration.heads(ALONE)
    if heads is not None and heads.is_compressed:
        return _entry_rows(config, heads, kv_format, choices)
    if config.page_tokens is not None:
        return config.page_tokens
    if model.keeps_latents:
        reason = f"attention over latents works in tiles of {LATENT_PAGE_TOKENS} tokens"
        choices.append(Choice("page_tokens", str(LATENT_PAGE_TOKENS), reason))
        return LATENT_PAGE_TOKENS
    if not kv_format.is_quantized or model.declaration.heads(ALONE) is None:
        return PAGE_TOKENS
    reason = f"attention over quantized pages works in tiles of {QUANTIZED_PAGE_TOKENS} tokens"
    choices.append(Choice("page_tokens", str(QUANTIZED_PAGE_TOKENS), reason))
    return QUANTIZED_PAGE_TOKENS


def _entry_rows(config: EngineConfig, heads: HeadGeometry, kv_format: KVFormat, choices: list[Choice]) -> int:
    """Rows of a page of compressed attention, and what the prefix cache makes of them."""
    rows = config.page_tokens or COMPRESSED_PAGE_TOKENS
    if config.page_tokens is None:
        reason = (
            f"rows, of which one stands for up to {max(heads.ratios)} tokens" if any(heads.ratios) else "the default"
        )
        choices.append(Choice("page_tokens", str(rows), reason))
    groups = compressed_pages(heads, (kv_format,) * len(heads.ratios), rows)[0].cache_groups()
    again = tokens_again(groups)
    reason = "whole pages of every cache group"
    if again:
        reason += f"; the last {again} tokens of a prefix that is found are computed again, to make states of them"
    choices.append(Choice("prefix block", f"{block_tokens(groups)} tokens", reason))
    return rows


def compressed_pages(
    heads: HeadGeometry, formats: Sequence[KVFormat], page_tokens: int
) -> tuple[CacheSpec, tuple[StateKind, ...]]:
    """Windows and entries on pages, and the states beside them."""
    (window,) = set(heads.windows)
    assert window is not None, "compressed attention has a window in every layer"
    ratios = heads.ratios, heads.overlapped_layers
    cache = compressed_cache(formats, heads.head_dim, heads.rope_dim, window, *ratios, heads.index_dim, page_tokens)
    return cache, list_states(*ratios, heads.head_dim, heads.index_dim)


def _limits(config: EngineConfig, model: DeclaredModel, kind: str, page_tokens: int, choices: list[Choice]) -> Limits:
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


def _fewer_windows(limits: Limits, sequence_bytes: int, budget_bytes: int, choices: list[Choice]) -> Limits:
    """Sequences whose windows take a share of the memory, where a model keeps some whatever a sequence's length."""
    room_bytes = budget_bytes // WINDOW_SHARE
    if limits.max_num_seqs * sequence_bytes <= room_bytes:
        return limits
    fewer = 2 ** (max(1, room_bytes // sequence_bytes).bit_length() - 1)
    reason = f"a sequence keeps {format_bytes(sequence_bytes)} in windows and states, which get 1/{WINDOW_SHARE} of the memory"
    choices.append(Choice("max_num_seqs", str(fewer), reason))
    return dataclasses.replace(limits, max_num_seqs=fewer)


def _with_proposals(
    limits: Limits, num_proposals: int, model: DeclaredModel, kv_format: KVFormat, choices: list[Choice]
) -> Limits:
    """More rows to choose from: up to SPECULATED_ROWS, or one a sequence where that is more."""
    asked = f"speculative={NGRAM}:{num_proposals} was asked"
    reason = _unrewindable(model, kv_format)
    if reason is not None:
        raise ConfigError(asked, reason, "leave speculative out")
    most = limits.max_num_batched_tokens
    if most <= num_proposals:
        raise ConfigError(
            asked,
            f"a sequence takes {1 + num_proposals} tokens of a step, and max_num_batched_tokens is {most}",
            f"set max_num_batched_tokens to {1 + num_proposals} or more"
            + (f", or ask for {NGRAM}:{most - 1}" if most > 1 else ""),
        )
    wanted = limits.max_num_seqs * (1 + num_proposals)
    rows = min(wanted, max(limits.max_num_seqs, SPECULATED_ROWS), most)
    reason = f"asked: up to {num_proposals} tokens more a sequence in a step, checked in {rows} rows of logits together"
    choices.append(Choice("speculative", f"{NGRAM}:{num_proposals}", reason))
    return dataclasses.replace(limits, max_sampled_rows=rows)


def _unrewindable(model: DeclaredModel, kv_format: KVFormat) -> str | None:
    """None, or what of a model does not go back behind a proposal that was rejected, in words."""
    if model.not_runnable is not None:
        return f"{model.name} is planned, not run: {model.not_runnable}"
    if model.kv_bytes_per_sequence(kv_format):
        return f"{model.name} keeps a state of a sequence, which cannot go back behind a rejected token"
    for rows in model.declaration.cache_rows(kv_format, ALONE):
        if rows.ratio > 1:
            return f"{model.name} keeps one row for {rows.ratio} tokens ({rows.name}), which cannot go back behind one"
    return None


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


def choose_protected(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, dtype: str) -> ProtectedLayers:
    """What was asked, or the default of a format; by position until the weights are there."""
    asked = parse_layers(config.kv_protected_layers, "kv_protected_layers")
    heads, num_layers = model.declaration.heads(ALONE), model.num_layers
    if asked in (0, None) and (heads is None or heads.is_compressed or not kv_format.is_quantized):
        return ProtectedLayers((), kv_format, False, "")
    if heads is None or heads.is_compressed:
        has = f"{model.name} keeps no keys and values by head, and all its layers have one format"
        raise ConfigError(f"kv_protected_layers={config.kv_protected_layers} was asked", has, "leave it out")
    _check_layers(asked, num_layers)
    if isinstance(asked, tuple):
        return ProtectedLayers(asked, _wider_format(config, model, kv_format, dtype), False, "")
    default = DEFAULT_PROTECTED_LAYERS.get(kv_format.name, 0)
    count = asked if asked is not None else min(default, num_layers // 2)
    if count == 0:
        reason = f"the default of {kv_format.name}" if default == 0 else f"half of {num_layers} layers is none"
        return ProtectedLayers((), kv_format, False, "" if asked == 0 else reason)
    wider = _wider_format(config, model, kv_format, dtype)
    layers, has_groups = by_position(count, num_layers), _num_groups(config, model, heads) > 1
    # Where groups share columns, or stages have different layers, bytes depend on which layers are protected, so that weights
    # come too late to say it.
    is_open = heads.has_key_bias and count < num_layers and not has_groups and config.pipeline_parallel_size == 1
    ends = "the first" if count == 1 else "the first and the last"
    which = "those with the largest key biases" if is_open else f"{ends} ({numbers(layers)})"
    why = f"the default of {kv_format.name}" if count == default else f"half of the layers, {default} would be more"
    why = "asked" if asked is not None else why
    found = ProtectedLayers(layers, wider, is_open, f"{why}; kept in {wider.name}: {which}")
    if asked is None and has_groups:
        padding = _padding_share(config, model, heads, kv_format, found)
        if padding > max(MOST_PADDING, _padding_share(config, model, heads, kv_format, NONE_PROTECTED)):
            reason = f"{len(layers)} in {wider.name}, {why}, would leave {100 * padding:.0f}% of a cache group's pages unused"
            return ProtectedLayers((), kv_format, False, reason)
    return found


def _num_groups(config: EngineConfig, model: DeclaredModel, heads: HeadGeometry) -> int:
    """Cache groups of the longest context that may come of it."""
    longest = config.max_model_len or model.max_position
    return len({None if window is None or window >= longest else window for window in heads.windows})


def _padding_share(
    config: EngineConfig, model: DeclaredModel, heads: HeadGeometry, kv_format: KVFormat, protected: ProtectedLayers
) -> float:
    """Of a page, what the group that leaves most of it has no layer for."""
    formats = protected.formats(kv_format, model.num_layers)
    shape = heads.num_kv_heads, heads.head_dim, _page_tokens(config, model, kv_format, [])
    longest = config.max_model_len or model.max_position
    latent = heads.rope_dim, heads.index_dim, heads.shared_layers
    cache = mixed_cache(formats, *shape, heads.windows, longest, *latent)
    return max(map(cache.padding_bytes, range(len(cache.groups)))) / cache.bytes_per_page


def by_position(count: int, num_layers: int) -> tuple[int, ...]:
    """The first half and the last half of so many layers: the ends of a model take compression worst."""
    first = (count + 1) // 2
    return (*range(first), *range(num_layers - (count - first), num_layers))


def by_key_bias(count: int, norms: Sequence[float]) -> tuple[tuple[int, ...], str]:
    """The layers whose key biases are the largest, by their norms, and the reason in words.

    A bias is the same in every key, so that it takes part of the few codes without telling keys apart.
    Equals are taken by position; what is no number counts as infinite.
    """
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms]
    if len(set(sizes)) == 1:
        layers = by_position(count, len(sizes))
        return layers, "all key biases are alike, and these are the first and the last"
    near_ends = {layer: place for place, layer in enumerate(_from_the_ends(len(sizes)))}
    order = sorted(range(len(sizes)), key=lambda layer: (-sizes[layer], near_ends[layer]))
    layers = tuple(sorted(order[:count]))
    high, low, median = (sizes[order[place]] for place in (0, count - 1, len(order) // 2))
    return layers, f"their key biases are the largest, {low:.3g} to {high:.3g} where the median is {median:.3g}"


def numbers(layers: Sequence[int]) -> str:
    """Layers in a sentence."""
    return ",".join(map(str, layers))


def listed(layers: Sequence[int]) -> str:
    """Layers as the option takes them; one alone has a comma behind it."""
    return numbers(layers) + ("," if len(layers) == 1 else "")


def _from_the_ends(num_layers: int) -> list[int]:
    """First, last, second, second last, and so on."""
    return [place // 2 if place % 2 == 0 else num_layers - 1 - place // 2 for place in range(num_layers)]


def _check_layers(asked: int | tuple[int, ...] | None, num_layers: int) -> None:
    if isinstance(asked, tuple) and asked[-1] >= num_layers:
        raise ConfigError(
            f"kv_protected_layers={listed(asked)} was asked",
            f"the layers are 0 to {num_layers - 1}",
            "list some of these",
        )
    if isinstance(asked, int) and asked > num_layers:
        raise ConfigError(
            f"kv_protected_layers={asked} was asked",
            f"the model has {num_layers} layers",
            f"ask for at most {num_layers}",
        )


def _wider_format(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, dtype: str) -> KVFormat:
    asked = dtype if config.kv_protected_dtype == "auto" else config.kv_protected_dtype
    found = model.check_format(asked, "kv_protected_dtype")
    heads, known = model.declaration.heads(ALONE), formats_of(model.keeps_latents, model.is_compressed)
    rope_dim = 0 if heads is None else heads.rope_dim
    sizes = {name: value.bytes_per_token(1, model.head_dim, rope_dim) for name, value in known.items()}
    if sizes[found.name] > sizes[kv_format.name]:
        # An index that was asked for is the same in every layer; left open it is as wide as the latents beside it.
        index_dtype = "" if config.index_cache_dtype == "auto" else config.index_cache_dtype
        return dataclasses.replace(found, index_dtype=index_dtype)
    wider = [name for name, size in sizes.items() if size > sizes[kv_format.name]]
    raise ConfigError(
        f"protected layers in {found.name} were asked",
        f"a {'latent' if model.keeps_latents else 'head'} takes {sizes[found.name]} bytes in it and {sizes[kv_format.name]} in {kv_format.name}",
        f"set kv_protected_dtype to {' or '.join(wider)}"
        if kv_format.is_quantized
        else "set kv_cache_dtype to a narrower format, or leave out kv_protected_layers",
    )


def choose_recipe(
    config: EngineConfig, model: DeclaredModel, target: Target
) -> tuple[WeightRecipe, tuple[Choice, ...]]:
    """The recipe of a load, and what is worth telling of it; what cannot be done raises."""
    recipe = config.recipe
    if config.quantized_embeddings == AUTO_EMBEDDINGS:
        recipe = with_stored_embedding(recipe, model)
    if model.stored_recipe is not None:
        return _as_stored(recipe, model.stored_recipe, model, target)
    if recipe.scheme is None:
        if recipe.embeddings == WeightRecipe().embeddings:
            return recipe, ()
        return recipe, (
            Choice("quantized_embeddings", recipe.embeddings, "asked, but nothing is quantized without quantization"),
        )
    declined = unsupported_scheme(recipe.scheme.name, target)
    if declined is not None:
        raise ConfigError(f"quantization={recipe.scheme.name} was asked", declined, f"try {_works_on(target)}")
    choices: list[Choice] = []
    found = model.review_recipe(recipe)
    if found.num_quantized == 0:
        reason = "asked, but no weight is quantized: quantization_ignore covers them all"
    else:
        reason = f"asked: {found.num_quantized} of {found.num_weights} weights are quantized as they load"
    choices.append(Choice("quantization", recipe.scheme.name, reason))
    if recipe.embeddings != config.recipe.embeddings and model.on_disk is not None:
        has = f"the file stores the embedding as {model.on_disk.embedding_type}"
        choices.append(
            Choice("quantized_embeddings", recipe.embeddings, f"{has}; it is {HEAD_SCHEME.name} by rows here")
        )
    for pattern in found.idle:
        choices.append(Choice("quantization_ignore", pattern, "asked, but what it matches is never quantized"))
    return recipe, tuple(choices)


def with_stored_embedding(recipe: WeightRecipe, model: DeclaredModel) -> WeightRecipe:
    """The recipe for the embedding too, where it is one of its own and the file has it quantized to begin with."""
    if recipe.scheme is None or model.on_disk is None or model.on_disk.embedding_type is None:
        return recipe
    if all(weight.kind != "embedding" for weight in model.parameters()):
        return recipe  # tied: it is the head
    return dataclasses.replace(recipe, embeddings="all")


def _as_stored(
    asked: WeightRecipe, stored: WeightRecipe, model: DeclaredModel, target: Target
) -> tuple[WeightRecipe, tuple[Choice, ...]]:
    """A checkpoint that is quantized already stays as it is; its own scheme, where that is asked, is for what it left plain."""
    assert stored.scheme is not None, f"{model.name} is stored in no scheme"
    declined = stored.scheme.quantizes_activations and _lacks_fp8_products(target)
    if declined and model.not_runnable is None:
        raise ConfigError(
            f"{model.name} was asked, whose weights are stored in {stored.scheme.name}",
            _lack_words(target),
            f"take the unquantized checkpoint, with {_works_on(target)}",
        )
    if asked.scheme is not None and asked.scheme.name != stored.scheme.name:
        raise ConfigError(
            f"quantization={asked.scheme.name} was asked",
            f"{model.name} has its weights in {stored.scheme.name} already",
            f"leave quantization out to load it as it is, or {BEFORE}",
        )
    if asked.scheme is not None and model.unread_pattern is not None:
        raise ConfigError(
            f"quantization={asked.scheme.name} was asked",
            f"{model.name} leaves out {shown(model.unread_pattern)}, an expression that is not followed here",
            "leave quantization out to load it as it is: which of its plain weights must stay so is not known",
        )
    recipe = model.review_stored(asked)
    reason = "the checkpoint's own" if asked.scheme is None else "asked, and the checkpoint's own"
    if stored.expert_scheme is not None:
        reason += f", with experts in {stored.expert_scheme.name}"
    num_more = len(stored.ignore) - len(recipe.ignore)
    if num_more:
        reason += f"; {num_more} of its plain weights {'is' if num_more == 1 else 'are'} quantized on load"
    return recipe, (Choice("quantization", stored.scheme.name, reason),)


def unsupported_scheme(name: str, target: Target) -> str | None:
    """None, or why a device cannot run products of a scheme, in words. A CPU runs all of them, through their references."""
    if not WEIGHT_SCHEMES[name].quantizes_activations or not _lacks_fp8_products(target):
        return None
    return _lack_words(target)


def _works_on(target: Target) -> str:
    return " or ".join(name for name in WEIGHT_SCHEMES if unsupported_scheme(name, target) is None)


def _lacks_fp8_products(target: Target) -> bool:
    return target.kind == "cuda" and target.capability is not None and target.capability < FP8_PRODUCTS


def _lack_words(target: Target) -> str:
    assert target.capability is not None, f"{target.name} lacks nothing that is known"
    major, minor = target.capability
    return f"{target.name} has compute capability {major}.{minor}, and products in fp8 take 8.9"

"""ProtectedLayers: which layers keep KV in a wider format, by count, position or key biases; no torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.cache.spec import mixed_cache
from holdfast.config import EngineConfig, parse_layers
from holdfast.distributed.mesh import ALONE
from holdfast.errors import ConfigError
from holdfast.models.declaration import HeadGeometry
from holdfast.models.declared_model import DeclaredModel
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KVFormat, formats_of

MOST_PADDING = 0.05
"""Share of a cache group's page that protected layers may leave unused, unless the user chose them."""
NEAR_INSTEAD = (
    "kv_near_tokens lowers the error more per byte, and pages of one format hold twice the near tokens of mixed ones"
)


class ProtectedLayers(NamedTuple):
    """Layers in a wider KV format, in rising order."""

    layers: tuple[int, ...]
    format: KVFormat
    is_open: bool = False
    """The count and all bytes are settled; the weights decide which layers."""
    reason: str = ""

    def formats(self, kv_format: KVFormat, num_layers: int) -> tuple[KVFormat, ...]:
        """Return the format of every layer if all others have `kv_format`."""
        if not self.layers:
            return (kv_format,) * num_layers
        return tuple([self.format if layer in self.layers else kv_format for layer in range(num_layers)])


def choose_protected(
    config: EngineConfig,
    model: DeclaredModel,
    kv_format: KVFormat,
    dtype: str,
    near_tokens: int,
    page_tokens: int,
) -> ProtectedLayers:
    """Return the given layers, or the default of the format; chosen by position until the weights are loaded."""
    given = parse_layers(config.kv_protected_layers, "kv_protected_layers")
    heads = model.declaration.heads(ALONE)
    if given in (0, None) and (heads is None or heads.is_compressed or not kv_format.is_quantized):
        return ProtectedLayers((), kv_format)
    values = {"name": "kv_protected_layers", "value": config.kv_protected_layers, "model": model.name}
    if heads is None or heads.is_compressed:
        raise ConfigError("plan.one_kv_format", **values)
    paged, num_layers = heads.paged_layers, len(heads.paged_layers)
    _check_given(given, heads, values)
    if isinstance(given, tuple):
        return ProtectedLayers(given, _wider_format(config, model, kv_format, dtype))
    default = DEFAULT_PROTECTED_LAYERS.get(kv_format.name, 0)
    if default and near_tokens and not _sets_protection(config):
        return ProtectedLayers((), kv_format, False, NEAR_INSTEAD)
    count = given if given is not None else min(default, num_layers // 2)
    if count == 0:
        reason = f"the default of {kv_format.name}" if default == 0 else f"half of {num_layers} layers is none"
        return ProtectedLayers((), kv_format, False, "" if given == 0 else reason)
    wider = _wider_format(config, model, kv_format, dtype)
    layers = tuple(paged[place] for place in by_position(count, num_layers))
    has_groups = _num_groups(config, model, heads) > 1
    # If groups share columns, or stages have different layers, bytes depend on which layers are protected: weights come too late.
    is_open = heads.has_key_bias and count < num_layers and not has_groups and config.pipeline_parallel_size == 1
    ends = "the first" if count == 1 else "the first and the last"
    which = "those with the largest key biases" if is_open else f"{ends} ({numbers(layers)})"
    why = f"the default of {kv_format.name}" if count == default else f"half of the layers, {default} would be more"
    why = "given" if given is not None else why
    found = ProtectedLayers(layers, wider, is_open, f"{why}; kept in {wider.name}: {which}")
    if given is None and has_groups:
        padding = _padding_share(config, model, heads, page_tokens, found.formats(kv_format, model.num_layers))
        unprotected = (kv_format,) * num_layers
        if padding > max(MOST_PADDING, _padding_share(config, model, heads, page_tokens, unprotected)):
            reason = f"{len(layers)} in {wider.name}, {why}, would leave {100 * padding:.0f}% of a cache group's pages unused"
            return ProtectedLayers((), kv_format, False, reason)
    return found


def _check_given(given: int | tuple[int, ...] | None, heads: HeadGeometry, values: dict[str, object]) -> None:
    """Refuse layers that do not exist, or have no pages."""
    paged = heads.paged_layers
    is_wrong = not set(given) <= set(paged) if isinstance(given, tuple) else (given or 0) > len(paged)
    if is_wrong and heads.state is not None:
        raise ConfigError("plan.not_paged_layers", **values, num_layers=len(paged), accepted=tuple(map(str, paged)))
    if is_wrong:
        raise ConfigError("plan.too_many_layers", **values, num_layers=len(paged), last=len(paged) - 1)


def _sets_protection(config: EngineConfig) -> bool:
    """Return True if the user chose layers or their format."""
    is_default = config.kv_protected_dtype == EngineConfig.kv_protected_dtype
    return config.kv_protected_layers is not None or not is_default


def _num_groups(config: EngineConfig, model: DeclaredModel, heads: HeadGeometry) -> int:
    """Count the cache groups at the longest possible context."""
    longest = config.max_model_len or model.max_position
    return len({None if window is None or window >= longest else window for window in heads.windows})


def _padding_share(
    config: EngineConfig, model: DeclaredModel, heads: HeadGeometry, page_tokens: int, formats: Sequence[KVFormat]
) -> float:
    """Return the largest share of a page that a cache group leaves unused."""
    shape = heads.num_kv_heads, heads.head_dim, page_tokens
    longest = config.max_model_len or model.max_position
    latent = heads.rope_dim, heads.index_dim, heads.shared_layers
    cache = mixed_cache(formats, *shape, heads.windows, longest, *latent)
    return max(map(cache.padding_bytes, range(len(cache.groups)))) / cache.bytes_per_page


def by_position(count: int, num_layers: int) -> tuple[int, ...]:
    """Return the first half and the last half of `count` layers: the ends of a model suffer most from compression."""
    first = (count + 1) // 2
    return (*range(first), *range(num_layers - (count - first), num_layers))


def by_key_bias(count: int, norms: Sequence[float]) -> tuple[tuple[int, ...], str]:
    """Return the layers with the largest norms of key biases, and the reason.

    A bias is the same in every key, so it uses some of the few codes without telling keys apart. Ties go to the layers
    nearest to the ends; NaN counts as infinite.
    """
    sizes = [math.inf if math.isnan(norm) else norm for norm in norms]
    if len(set(sizes)) == 1:
        layers = by_position(count, len(sizes))
        return layers, "all key biases are alike, and these are the first and the last"
    order = sorted(range(len(sizes)), key=lambda layer: (-sizes[layer], _distance_to_end(layer, len(sizes))))
    high, low, median = (sizes[order[place]] for place in (0, count - 1, len(order) // 2))
    reason = f"their key biases are the largest, {low:.3g} to {high:.3g} where the median is {median:.3g}"
    return tuple(sorted(order[:count])), reason


def _distance_to_end(layer: int, num_layers: int) -> int:
    """Rank layers as first, last, second, second last, and so on."""
    return min(2 * layer, 2 * (num_layers - 1 - layer) + 1)


def numbers(layers: Sequence[int]) -> str:
    """Join layers with commas."""
    return ",".join(map(str, layers))


def listed(layers: Sequence[int]) -> str:
    """Print layers as the option takes them; one alone has a comma after it."""
    return numbers(layers) + ("," if len(layers) == 1 else "")


def _wider_format(config: EngineConfig, model: DeclaredModel, kv_format: KVFormat, dtype: str) -> KVFormat:
    wanted = dtype if config.kv_protected_dtype == "auto" else config.kv_protected_dtype
    found = model.check_format(wanted, "kv_protected_dtype")
    heads, known = model.declaration.heads(ALONE), formats_of(model.keeps_latents, model.is_compressed)
    rope_dim = 0 if heads is None else heads.rope_dim
    sizes = {name: value.bytes_per_token(1, model.head_dim, rope_dim) for name, value in known.items()}
    own, other = sizes[kv_format.name], sizes[found.name]
    if other > own:
        # A given index format holds for every layer; left open, it is as wide as the latents beside it.
        index_dtype = "" if config.index_cache_dtype == "auto" else config.index_cache_dtype
        return replace(found, index_dtype=index_dtype)
    wider = tuple(name for name, size in sizes.items() if size > own)
    code = "plan.protected_not_wider" if kv_format.is_quantized else "plan.nothing_to_protect"
    values = {"value": found.name, "num_bytes": other, "kv_cache_dtype": kv_format.name, "kv_bytes": own}
    raise ConfigError(code, name="kv_protected_dtype", **values, accepted=wider)

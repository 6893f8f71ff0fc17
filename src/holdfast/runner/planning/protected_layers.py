"""Protected layers: those that keep KV pages in a wider format than the rest, how many, which, and why; no torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.config import EngineConfig, parse_layers
from holdfast.errors import ConfigError
from holdfast.models.blueprints.blueprint import Blueprint
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS, KVFormat


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


def choose_protected(config: EngineConfig, model: Blueprint, kv_format: KVFormat, dtype: str) -> ProtectedLayers:
    """What was asked, or the default of a format; by position until the weights are there."""
    asked = parse_layers(config.kv_protected_layers, "kv_protected_layers")
    heads, num_layers = model.anatomy.heads(1), model.num_layers
    if asked in (0, None) and (heads is None or not kv_format.is_coded):
        return ProtectedLayers((), kv_format, False, "")
    if heads is None:
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
    layers, is_open = by_position(count, num_layers), heads.has_key_bias and count < num_layers
    ends = "the first" if count == 1 else "the first and the last"
    which = "those with the largest key biases" if is_open else f"{ends} ({listed(layers)})"
    why = f"the default of {kv_format.name}" if count == default else f"half of the layers, {default} would be more"
    why = "asked" if asked is not None else why
    return ProtectedLayers(layers, wider, is_open, f"{why}; kept in {wider.name}: {which}")


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


def listed(layers: Sequence[int]) -> str:
    """Layers as the option takes them; one alone has a comma behind it."""
    return ",".join(map(str, layers)) + ("," if len(layers) == 1 else "")


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


def _wider_format(config: EngineConfig, model: Blueprint, kv_format: KVFormat, dtype: str) -> KVFormat:
    found = KV_FORMATS[dtype if config.kv_protected_dtype == "auto" else config.kv_protected_dtype]
    sizes = {name: value.bytes_per_token(1, model.head_dim) for name, value in KV_FORMATS.items()}
    if sizes[found.name] > sizes[kv_format.name]:
        return found
    wider = [name for name, size in sizes.items() if size > sizes[kv_format.name]]
    raise ConfigError(
        f"protected layers in {found.name} were asked",
        f"a head takes {sizes[found.name]} bytes in it and {sizes[kv_format.name]} in {kv_format.name}",
        f"set kv_protected_dtype to {' or '.join(wider)}"
        if kv_format.is_coded
        else "set kv_cache_dtype to a narrower format, or leave out kv_protected_layers",
    )

"""Cache of compressed attention (DeepSeek-V4): windows, entries by ratio, states of unfinished entries; no torch.

Every layer keeps the newest tokens, one row each. Some layers also keep an entry for every `ratio` tokens. All are
vectors of one size, so they share the columns of a page (cache/spec.py). The index of overlapped entries has its own
columns. With `page_tokens` = 16:

    group             layers   chunks of a page   rows   tokens      (DeepSeek-V4-Flash)
    window of 128       43            1             16      16
    entries of 4        21            2             32     128       and 42 columns of index
    entries of 128      20            1             16    2048

A block of the prefix cache has 128 tokens: whole pages of the first two groups, and a row of the third. A sequence that
starts inside a page of the third gets a copy of it (cache/prefix.py).

`CacheSpec.layers` lists the windows of all layers in order, then the entries of those that have some.

An entry is a softmax over its tokens, channel by channel. The state of an unfinished entry is three numbers per
channel: the largest gate, the sum of weights, the weighted sum. It lies outside the pages, one place per runner slot
(cache/storage.py). An overlapped entry covers two windows of tokens, so two entries are in progress at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import NamedTuple

from holdfast.cache.spec import BLOCK_WORTH, MOST_CHUNKS, CacheSpec, LayerCache, LayerGroup
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.entry_state import STATE_DTYPE, state_bytes, state_shape
from holdfast.quant.formats import KVFormat

WINDOW, ENTRIES, INDEX = "window", "entries", "index"
"""Names of what a layer keeps: `LayerCache.name` of the first two, `StateKind.name` of the last two."""


def compressed_cache(
    formats: Sequence[KVFormat],
    head_dim: int,
    rope_dim: int,
    window: int,
    ratios: Sequence[int],
    overlapped_layers: frozenset[int],
    index_dim: int,
    page_tokens: int,
) -> CacheSpec:
    """Return the spec: a window for each layer, entries if its ratio is not 0, and one format per layer.

    `overlapped_layers` also have an index of `index_dim` elements. `page_tokens`: rows of a chunk.
    """
    assert len(formats) == len(ratios), f"{len(formats)} formats for {len(ratios)} layers"
    assert window >= 1, f"{window=} tokens"
    assert all(ratio == 0 or ratio > 1 for ratio in ratios), f"{ratios=}"
    shape = head_dim, rope_dim, index_dim
    return _laid_out(tuple(formats), shape, window, tuple(ratios), overlapped_layers, page_tokens)


@lru_cache(maxsize=64)  # as that of cache/spec.py
def _laid_out(
    formats: tuple[KVFormat, ...],
    shape: tuple[int, int, int],
    window: int,
    ratios: tuple[int, ...],
    overlapped_layers: frozenset[int],
    page_tokens: int,
) -> CacheSpec:
    head_dim, rope_dim, index_dim = shape
    layers = [LayerCache(layer, WINDOW, own, 1, head_dim, rope_dim) for layer, own in enumerate(formats)]
    members: dict[tuple[int, bool], list[int]] = {}
    for layer, (own, ratio) in enumerate(zip(formats, ratios, strict=True)):
        if ratio:
            is_overlapped = layer in overlapped_layers
            members.setdefault((ratio, is_overlapped), []).append(len(layers))
            own_index = index_dim if is_overlapped else 0
            layers.append(LayerCache(layer, ENTRIES, own, 1, head_dim, rope_dim, own_index, ratio))
    groups = [LayerGroup(window, tuple(range(len(formats))))]
    for (ratio, is_overlapped), places in sorted(members.items()):
        groups.append(LayerGroup(None, tuple(places), 1, ratio, is_overlapped))
    if len(groups) == 1:
        return CacheSpec(page_tokens, tuple(layers), tuple(groups), has_states=True)
    spread = (
        CacheSpec(page_tokens, tuple(layers), chosen, has_states=True)
        for factor in range(1, MOST_CHUNKS + 1)
        for chosen in _spreads(groups, factor)
    )
    return min(spread, key=_cost)


def _spreads(groups: Sequence[LayerGroup], factor: int) -> list[tuple[LayerGroup, ...]]:
    """List layouts with `factor` chunks per window on a page, and up to as many of entries as fit in its columns."""
    num_columns = factor * len(groups[0].layers)
    counts = [range(1, max(1, num_columns // len(group.layers)) + 1) for group in groups[1:]]
    # Many chunks make long pages, and a group of few layers allows many: try only some counts.
    some = [[count for count in own if count <= MOST_CHUNKS or count == own[-1]] for own in counts]
    return [
        tuple(replace(group, chunks_per_page=count) for group, count in zip(groups, (factor, *chosen), strict=True))
        for chosen in product(*some)
    ]


def _cost(spec: CacheSpec) -> tuple[float, int]:
    """Return a sort key: overhead per token of a long context plus the cost of long pages; then page bytes."""
    kept = [group for group in spec.groups if group.tokens_per_row > 1]
    paged = sum(spec.bytes_per_page / _page_tokens(spec, group) for group in kept)
    least = sum(
        sum(spec.layers[place].bytes_per_token for place in group.layers) / group.tokens_per_row for group in kept
    )
    whole = lcm(*(_page_tokens(spec, group) for group in spec.groups))
    return paged / least - 1 + whole / BLOCK_WORTH, spec.bytes_per_page


def _page_tokens(spec: CacheSpec, group: LayerGroup) -> int:
    return group.chunks_per_page * spec.page_tokens * group.tokens_per_row


class StateKind(NamedTuple):
    """Layers whose states have one shape: [layers, places, windows in progress, moments, channels], float32."""

    name: str
    """ENTRIES or INDEX."""
    ratio: int
    layers: tuple[int, ...]
    is_overlapped: bool
    """True if two entries are in progress at a time: the current one, and the first half of the next."""
    dim: int

    @property
    def what(self) -> str:
        """Noun of a plan's line."""
        return "unfinished entries"

    @property
    def place_bytes(self) -> int:
        """Bytes per sequence in all of these layers."""
        return len(self.layers) * state_bytes(self.dim, self.is_overlapped)

    def tensor(self, num_places: int) -> TensorSpec:
        """Return the TensorSpec of these states for `num_places` sequences."""
        shape = len(self.layers), num_places, *state_shape(self.dim, self.is_overlapped)
        return TensorSpec(f"{self.name} of {self.ratio}", shape, STATE_DTYPE)


def list_states(
    ratios: Sequence[int], overlapped_layers: frozenset[int], head_dim: int, index_dim: int
) -> tuple[StateKind, ...]:
    """List the states that a sequence keeps outside its pages, whatever its length."""
    kinds: list[StateKind] = []
    every = range(len(ratios))
    for ratio, is_overlapped in sorted(
        {(ratios[layer], layer in overlapped_layers) for layer in every if ratios[layer]}
    ):
        layers = tuple(
            layer for layer in every if ratios[layer] == ratio and (layer in overlapped_layers) == is_overlapped
        )
        kinds.append(StateKind(ENTRIES, ratio, layers, is_overlapped, head_dim))
        if is_overlapped:
            kinds.append(StateKind(INDEX, ratio, layers, True, index_dim))
    names = [kind.tensor(1).name for kind in kinds]
    assert len(set(names)) == len(names), f"entries of one ratio overlap in some layers and not in others: {kinds}"
    return tuple(kinds)

"""The cache of compressed attention (DeepSeek-V4): windows, entries by ratio, and the states that entries are made of; no torch.

Every layer keeps the newest tokens, a row each, and some layers an entry for every `ratio` tokens beside them. All of these are
vectors of one size, so that they take turns in the columns of a page (cache/spec.py); the index of overlapped entries has columns
of its own. Of a page of `page_tokens` = 16 rows:

    group             layers   chunks of a page   rows   tokens      (DeepSeek-V4-Flash)
    window of 128       43            1             16      16
    entries of 4        21            2             32     128       and 42 columns of index
    entries of 128      20            1             16    2048       which is the block of the prefix cache

The layers of a `CacheSpec` are first the windows of all layers, in order, and behind them the entries of those that have some.

An entry is a softmax over its tokens, channel by channel. What is known of an entry that is not finished are three numbers a
channel: the largest gate, the sum of weights, the weighted sum. They lie beside the pages, one place a slot of the runner
(cache/storage.py). Overlapped entries are made of two windows of tokens, so that two are under way at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import NamedTuple

from holdfast.cache.spec import BLOCK_WORTH, MOST_CHUNKS, CacheSpec, LayerCache, LayerGroup
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.entry_state import STATE_DTYPE, state_bytes, state_shape
from holdfast.quant.formats import KVFormat

WINDOW, ENTRIES, INDEX = "window", "entries", "index"
"""Names of what a layer keeps: `LayerCache.name` of the first two, `StateKind.name` of the last two."""
STATE_OWNER = "kv state"


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
    """Windows of all layers, and entries of those whose ratio is not 0, in one format a layer.

    `overlapped_layers` have an index of `index_dim` elements beside their entries. `page_tokens`: rows of a chunk.
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
    """Pages for `factor` chunks of each window, and up to as many of entries as fit beside each other in its columns."""
    num_columns = factor * len(groups[0].layers)
    counts = [range(1, max(1, num_columns // len(group.layers)) + 1) for group in groups[1:]]
    # Many chunks make long blocks, and a page of few layers has room for many: some of them say enough.
    some = [[count for count in own if count <= MOST_CHUNKS or count == own[-1]] for own in counts]
    return [
        tuple(replace(group, chunks_per_page=count) for group, count in zip(groups, (factor, *chosen), strict=True))
        for chosen in product(*some)
    ]


def _cost(spec: CacheSpec) -> tuple[float, int]:
    """What a token of a long context takes beyond its rows, and what long blocks cost the prefix cache; the smallest pages among equals."""
    kept = [group for group in spec.groups if group.tokens_per_row > 1]
    paged = sum(spec.bytes_per_page / _page_tokens(spec, group) for group in kept)
    least = sum(
        sum(spec.layers[place].bytes_per_token for place in group.layers) / group.tokens_per_row for group in kept
    )
    block = lcm(*(_page_tokens(spec, group) for group in spec.groups))
    return paged / least - 1 + block / BLOCK_WORTH, spec.bytes_per_page


def _page_tokens(spec: CacheSpec, group: LayerGroup) -> int:
    return group.chunks_per_page * spec.page_tokens * group.tokens_per_row


class StateKind(NamedTuple):
    """Layers whose unfinished entries have one shape: [layers, places, windows under way, moments, channels], float32."""

    name: str
    """ENTRIES or INDEX."""
    ratio: int
    layers: tuple[int, ...]
    is_overlapped: bool
    """Then two entries are under way at a time: the one that is being made, and the first half of the next."""
    dim: int

    @property
    def place_bytes(self) -> int:
        """Bytes of one sequence in all of these layers."""
        return len(self.layers) * state_bytes(self.dim, self.is_overlapped)

    def tensor(self, num_places: int) -> TensorSpec:
        """All of them, where so many sequences run at a time."""
        shape = len(self.layers), num_places, *state_shape(self.dim, self.is_overlapped)
        return TensorSpec(f"{self.name} of {self.ratio}", shape, STATE_DTYPE)


def list_states(
    ratios: Sequence[int], overlapped_layers: frozenset[int], head_dim: int, index_dim: int
) -> tuple[StateKind, ...]:
    """What sequences keep beside their pages, whatever their length."""
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


def place_bytes(kinds: Sequence[StateKind]) -> int:
    """Return the bytes of one sequence."""
    return sum(kind.place_bytes for kind in kinds)


def state_terms(kinds: Sequence[StateKind], num_places: int) -> tuple[Term, ...]:
    """The lines of the plan, as StateStorage takes them."""
    return tuple(
        Term(
            f"{STATE_OWNER}/{kind.tensor(num_places).name}",
            kind.tensor(num_places).aligned_bytes,
            f"unfinished entries of {num_places} sequences in {len(kind.layers)} layers",
            PAGE_PHASES,
        )
        for kind in kinds
    )

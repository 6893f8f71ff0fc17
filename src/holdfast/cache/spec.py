"""Geometry of the KV cache: planes of layers, groups of layers, and how one pool's pages serve all groups; no torch.

A chunk is `page_tokens` rows of one layer: block tables list chunks, and kernels call them pages. A row holds one
token, or several (cache/compressed.py). A page of the pool is one chunk in each column. A column is an array over all
pages, for layers of one kind: layers with equal planes. The index of sparse attention has its own columns.

    column 0   [ chunk of page 0 | chunk of page 1 | ... | chunk of page P-1 ]
    column 1   [ chunk of page 0 | chunk of page 1 | ... | chunk of page P-1 ]
    ...

Each group gives a layer `chunks_per_page` adjacent columns. All pages have the same bytes, so a group of few layers
has more tokens per page than one of many. A kernel sees a layer's columns as one array of chunks_per_page * P chunks:
chunk j of a page p has number (j % chunks_per_page) * P + p there. With one group each layer has one column, and a
chunk is a page.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from holdfast.cache.groups import CacheGroup
from holdfast.cache.near import NEAR, NearLayout, NearRows, can_host, most_near_tokens, place_near, row_bytes
from holdfast.memory.planner import KV_OWNER, PAGE_PHASES, Term
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec
from holdfast.quant.formats import KVFormat, Plane, index_dtype_beside, index_planes

MOST_CHUNKS = 4
"""Most chunks per page of a layer of the largest group."""
BLOCK_WORTH = 8192
"""Tokens of whole pages of all groups that cost as much as a padding share of 1."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer, per token."""

    layer: int
    name: str
    format: KVFormat
    num_kv_heads: int
    head_dim: int
    rope_dim: int = 0
    """Rotated elements at the end of a latent (MLA); 0: keys and values by head."""

    index_dim: int = 0
    """Elements of the sparse-attention index of a latent; 0: none."""

    tokens_per_row: int = 1
    """Tokens that a row stands for; it is complete once the last of them is computed."""

    @property
    def is_latent(self) -> bool:
        """True if a token is one latent that all query heads share."""
        return self.rope_dim > 0

    @property
    def latent_dim(self) -> int:
        """Elements of a latent without the rotated ones."""
        return self.head_dim - self.rope_dim

    @property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(plane for kind in self.kinds for plane in kind)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a row."""
        return _token_bytes(self.planes)

    @property
    def kinds(self) -> tuple[tuple[Plane, ...], ...]:
        """Planes that layers must have in common to share columns: those of the token, and those of its index."""
        own = self.format.planes(self.num_kv_heads, self.head_dim, self.rope_dim)
        return (own, index_planes(index_dtype_beside(self.format), self.index_dim)) if self.index_dim else (own,)

    @property
    def shape(self) -> tuple[object, ...]:
        """Parameters that determine its planes."""
        return self.format, self.num_kv_heads, self.head_dim, self.rope_dim, self.index_dim


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a page table, and how many chunks of each lie on a page."""

    window: int | None
    layers: tuple[int, ...]
    """Indices into `CacheSpec.layers`."""
    chunks_per_page: int = 1
    tokens_per_row: int = 1
    """Tokens that each of their rows stands for."""
    is_overlapped: bool = False
    """True if a row also covers as many tokens before its own."""
    near: NearRows | None = None
    """What near pages of these layers hold; None: their group keeps the rows of `LayerCache`."""

    @property
    def name(self) -> str:
        if self.near is not None:
            return NEAR
        if self.tokens_per_row > 1:
            return f"entries of {self.tokens_per_row}"
        return "whole context" if self.window is None else f"window of {self.window}"


class StoredPlane(NamedTuple):
    """One tensor of the storage, and the layers of its columns."""

    name: str
    plane: Plane
    num_columns: int
    columns: dict[int, tuple[int, int]]
    """First column and number of columns by layer."""

    def tensor(self, column_slots: int) -> TensorSpec:
        """Return the TensorSpec for `column_slots` slots per column."""
        return TensorSpec(self.name, (self.num_columns * column_slots, *self.plane.token_shape), self.plane.dtype)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All layers' caches: page p of the pool holds chunks of the layers of the group that took it."""

    page_tokens: int
    """Tokens of a chunk."""
    layers: tuple[LayerCache, ...]
    groups: tuple[LayerGroup, ...] = ()
    """Default: one group of all layers, for the whole context."""
    has_states: bool = False
    """True if sequences also have a place outside the pages, for unfinished rows (cache/storage.py)."""
    columns: dict[tuple[Plane, ...], int] = field(init=False, compare=False, repr=False)
    """Columns of each kind: as many as the group with most of them takes."""
    near: NearLayout | None = field(init=False, compare=False, repr=False)
    """Where near planes lie over these columns; None: there are none."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(None, tuple(range(len(self.layers)))),))
        object.__setattr__(self, "columns", self._count_columns())
        group = self.near_group
        object.__setattr__(self, "near", None if group is None else self._place_near(group))

    @property
    def row_groups(self) -> tuple[LayerGroup, ...]:
        """The groups of rows of `LayerCache`: all but that of near pages, which is the last."""
        return self.groups if self.near_group is None else self.groups[:-1]

    @property
    def near_group(self) -> LayerGroup | None:
        return self.groups[-1] if self.groups[-1].near is not None else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a row in all layers, for a token that every layer keeps."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def _count_columns(self) -> dict[tuple[Plane, ...], int]:
        most: dict[tuple[Plane, ...], int] = {}
        kinds = self._kinds()
        for group in self.row_groups:
            for kind, count in Counter(kind for layer in group.layers for kind in kinds[layer]).items():
                most[kind] = max(most.get(kind, 0), count * group.chunks_per_page)
        return most

    def _place_near(self, group: LayerGroup) -> NearLayout:
        """Place near planes over the columns. Only a stage with an uneven share of the layers may need another column."""
        assert group.near is not None, f"{group} has no near pages"
        kinds, page_tokens, row = self._kinds(), group.near.page_tokens, self._near_row_bytes(group)
        if not group.layers:
            return NearLayout(page_tokens, 1, {})
        while True:
            found = place_near(self.columns, self.page_tokens, page_tokens, row, group.layers)
            if found is not None:
                return found
            sizes = {kinds[layer][0]: _token_bytes(kinds[layer][0]) for layer in group.layers}
            hosts = [kind for kind in sizes if can_host(kind, self.page_tokens, page_tokens * row)]
            assert hosts, f"{page_tokens} near tokens of {row} bytes fit no chunk of {sizes}"
            self.columns[min(hosts, key=lambda kind: sizes[kind])] += 1

    def _near_row_bytes(self, group: LayerGroup) -> int:
        """Return the bytes of a token in one near plane; 0 if none of the group's layers is here."""
        assert group.near is not None, f"{group} has no near pages"
        if not group.layers:
            return 0
        first = self.layers[group.layers[0]]
        return row_bytes(first.num_kv_heads, first.head_dim, group.near.dtype)

    def _kinds(self) -> list[tuple[tuple[Plane, ...], ...]]:
        """List the kinds of every layer. Listing planes is slow, so layers of one shape share a result."""
        kinds: dict[tuple[object, ...], tuple[tuple[Plane, ...], ...]] = {}
        for layer in self.layers:
            if layer.shape not in kinds:
                kinds[layer.shape] = layer.kinds
        return [kinds[layer.shape] for layer in self.layers]

    @property
    def bytes_per_page(self) -> int:
        return self.page_tokens * sum(count * _token_bytes(kind) for kind, count in self.columns.items())

    def padding_bytes(self, group: int) -> int:
        """Bytes of a group's page that no layer uses."""
        own, kinds = self.groups[group], self._kinds()
        if own.near is not None:
            return self.bytes_per_page - 2 * len(own.layers) * own.near.page_tokens * self._near_row_bytes(own)
        counts = Counter(kind for layer in own.layers for kind in kinds[layer])
        used = own.chunks_per_page * sum(count * _token_bytes(kind) for kind, count in counts.items())
        return self.bytes_per_page - self.page_tokens * used

    def group_of(self, layer: int) -> int:
        """Return the index of a layer's group."""
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)

    def stored_planes(self) -> tuple[StoredPlane, ...]:
        """Return the tensors of all pages: one per plane of each layer, or of each kind if groups share columns."""
        if len(self.groups) == 1:
            return tuple(
                StoredPlane(f"{layer.layer}.{layer.name}.{plane.name}", plane, 1, {index: (0, 1)})
                for index, layer in enumerate(self.layers)
                for plane in layer.planes
            )
        kinds, found = self._kinds(), []
        for kind, num_columns in self.columns.items():
            columns: dict[int, tuple[int, int]] = {}
            for group in self.row_groups:
                members = [layer for layer in group.layers if kind in kinds[layer]]
                size = group.chunks_per_page
                columns |= {layer: (place * size, size) for place, layer in enumerate(members)}
            first = self.layers[min(columns)]
            name = f"{first.format.name}.{first.num_kv_heads}x{first.head_dim}"
            found += (StoredPlane(f"{name}.{plane.name}", plane, num_columns, columns) for plane in kind)
        return tuple(found)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups for pool, prefix cache and scheduler.

        If rows overlap, a sequence recomputes the last tokens of a prefix hit. So windows are kept for those too.
        """
        again = max((group.tokens_per_row for group in self.groups if group.is_overlapped), default=0)
        return tuple(
            CacheGroup(
                group.name,
                group.chunks_per_page * self.page_tokens * group.tokens_per_row,
                None if group.window is None else group.window + again,
                tokens_per_row=group.tokens_per_row,
                tokens_again=group.tokens_per_row if group.is_overlapped else 0,
            )
            if group.near is None
            else _near_cache_group(group.near)
            for group in self.groups
        )

    def with_near(self, layers: Sequence[int], block_tokens: int, first_tokens: int, dtype: str) -> "CacheSpec | None":
        """Return the spec with near pages of these layers; None if a page is too small for one near token.

        A near page has as many tokens as fit in the bytes of a page.
        """
        group = LayerGroup(block_tokens, tuple(layers), near=NearRows(block_tokens, 1, first_tokens, dtype))
        row = self._near_row_bytes(group)
        tokens = most_near_tokens(self.columns, self.page_tokens, row, len(layers), block_tokens)
        if not tokens:
            return None
        own = NearRows(block_tokens, tokens, first_tokens, dtype)
        return replace(self, groups=(*self.groups, replace(group, near=own)))

    def for_stage(self, layers: range) -> "CacheSpec":
        """Return the spec of a pipeline stage: its own layers, numbered from 0, in their own columns.

        Page ids mean the same on all ranks. So every stage has all groups of the model, with the same tokens per
        page, even a group that has none of its layers.
        """
        own = [place for place, cache in enumerate(self.layers) if cache.layer in layers]
        places = {place: number for number, place in enumerate(own)}
        return CacheSpec(
            self.page_tokens,
            tuple(replace(self.layers[place], layer=self.layers[place].layer - layers.start) for place in own),
            tuple(
                replace(group, layers=tuple(places[place] for place in group.layers if place in places))
                for group in self.groups
            ),
            self.has_states,
        )


def _near_cache_group(near: NearRows) -> CacheGroup:
    kept = -(-near.first_tokens // near.page_tokens)
    return CacheGroup(NEAR, near.page_tokens, near.block_tokens, is_blocked=True, kept_pages=kept)


def _token_bytes(kind: tuple[Plane, ...]) -> int:
    return sum(plane.bytes_per_token for plane in kind)


def mixed_cache(
    formats: Sequence[KVFormat],
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    windows: Sequence[int | None] = (),
    max_model_len: int | None = None,
    rope_dim: int = 0,
    index_dim: int = 0,
    shared_layers: frozenset[int] = frozenset(),
    layers: Sequence[int] = (),
) -> CacheSpec:
    """Return the spec of a decoder whose layers have equal heads or latents, and each a format and perhaps a window.

    A window of at least `max_model_len` counts as none. `rope_dim`: that of a latent, else 0. `index_dim`: that of its
    index, which `shared_layers` lack. `layers`: numbers of those with pages, if others keep states; default: all.
    """
    seen = tuple(
        None if window is None or (max_model_len is not None and window >= max_model_len) else window
        for window in (windows or (None,) * len(formats))
    )
    assert len(seen) == len(formats), f"{len(seen)} windows for {len(formats)} layers"
    shape = num_kv_heads, head_dim, rope_dim, index_dim
    found = _laid_out(tuple(formats), shape, page_tokens, seen, shared_layers)
    if not layers:
        return found
    numbered = (replace(own, layer=number) for own, number in zip(found.layers, layers, strict=True))
    return replace(found, layers=tuple(numbered), has_states=True)


@lru_cache(maxsize=64)  # one plan tries many settings, and few of them change the geometry
def _laid_out(
    formats: tuple[KVFormat, ...],
    shape: tuple[int, int, int, int],
    page_tokens: int,
    windows: tuple[int | None, ...],
    shared_layers: frozenset[int],
) -> CacheSpec:
    """Group layers by window, on the pages with the lowest cost; `shape` is that of a LayerCache."""
    num_kv_heads, head_dim, rope_dim, index_dim = shape
    name = "latent" if rope_dim else "attention"
    layers = tuple(
        LayerCache(layer, name, form, num_kv_heads, head_dim, rope_dim, 0 if layer in shared_layers else index_dim)
        for layer, form in enumerate(formats)
    )
    members = {
        window: tuple(i for i, own in enumerate(windows) if own == window)
        for window in sorted(set(windows), key=_order)
    }
    groups = tuple(LayerGroup(window, own) for window, own in members.items())
    if len(groups) == 1:
        return CacheSpec(page_tokens, layers, groups)
    return min((_spread(page_tokens, layers, groups, factor) for factor in range(1, MOST_CHUNKS + 1)), key=_cost)


def _order(window: int | None) -> tuple[bool, int]:
    """Return a sort key: whole contexts first, then the widest windows."""
    return window is not None, -(window or 0)


def _spread(page_tokens: int, layers: tuple[LayerCache, ...], groups: tuple[LayerGroup, ...], factor: int) -> CacheSpec:
    """Return the spec with `factor` chunks per layer of the largest group, and as many of the others as fit."""
    sizes = [_group_bytes(layers, group) for group in groups]
    spread = tuple(
        LayerGroup(group.window, group.layers, factor * max(sizes) // size)
        for group, size in zip(groups, sizes, strict=True)
    )
    return CacheSpec(page_tokens, layers, spread)


def _group_bytes(layers: tuple[LayerCache, ...], group: LayerGroup) -> int:
    """Return the bytes of one token in all layers of a group."""
    own = {layers[i].shape: layers[i] for i in group.layers}
    counts = Counter(layers[i].shape for i in group.layers)
    return sum(count * own[shape].bytes_per_token for shape, count in counts.items())


def _cost(spec: CacheSpec) -> tuple[float, int]:
    """Return a sort key: worst share of padding plus the cost of long prefix blocks; then page bytes."""
    padding = max(spec.padding_bytes(group) for group in range(len(spec.groups))) / spec.bytes_per_page
    block = lcm(*(group.chunks_per_page for group in spec.groups)) * spec.page_tokens
    return padding + block / BLOCK_WORTH, spec.bytes_per_page


def uniform_cache(
    num_layers: int,
    kv_format: KVFormat,
    num_kv_heads: int,
    head_dim: int,
    page_tokens: int,
    rope_dim: int = 0,
    index_dim: int = 0,
) -> CacheSpec:
    """Return the spec of a decoder whose layers all keep every token in one format."""
    formats = (kv_format,) * num_layers
    return mixed_cache(formats, num_kv_heads, head_dim, page_tokens, rope_dim=rope_dim, index_dim=index_dim)


def kv_padding_term(spec: CacheSpec) -> Term:
    """Return the most alignment padding after planes, for any number of pages; 0 if page sizes are aligned."""
    page_bytes = [plane.tensor(spec.page_tokens).num_bytes for plane in spec.stored_planes()]
    padding_bytes = sum(ALIGNMENT_BYTES - gcd(num_bytes, ALIGNMENT_BYTES) for num_bytes in page_bytes)
    reason = f"{len(page_bytes)} planes, each at a multiple of {ALIGNMENT_BYTES} bytes"
    return Term(f"{KV_OWNER}/padding", padding_bytes, reason, PAGE_PHASES)

"""The cache of compressed attention: pages, columns and states of DeepSeek-V4, to the byte, and storage that is what was said."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.compressed import (
    ENTRIES,
    INDEX,
    WINDOW,
    compressed_cache,
    list_states,
)
from holdfast.cache.groups import block_tokens, tokens_again, unrewindable
from holdfast.cache.places import place_bytes, state_terms
from holdfast.cache.spec import CacheSpec, kv_padding_term
from holdfast.cache.storage import PageStorage, StateStorage
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import ALL_KV_FORMATS

CPU = torch.device("cpu")
FLASH = (0, 0, *(4, 128) * 20, 4)
PRO = (128, 128, *(4, 128) * 29, 4)


def overlapped(ratios: tuple[int, ...], ratio: int = 4) -> frozenset[int]:
    return frozenset(layer for layer, own in enumerate(ratios) if own == ratio)


def cache_of(ratios: tuple[int, ...], kv_dtype: str, page_tokens: int = 16) -> CacheSpec:
    formats = (ALL_KV_FORMATS[kv_dtype],) * len(ratios)
    return compressed_cache(formats, 512, 64, 128, ratios, overlapped(ratios), 128, page_tokens)


def whole_context_bytes(cache: CacheSpec, num_tokens: int) -> int:
    """Bytes of the groups that keep every token."""
    kept = (group.pages_for(num_tokens) for group in cache.cache_groups() if group.window is None)
    return sum(kept) * cache.bytes_per_page


@pytest.mark.parametrize(
    ("ratios", "kv_dtype", "row_bytes", "index_bytes", "gib"),
    [
        (FLASH, "fp8_ds_v4", 584, 132, 3.98),
        (FLASH, "bfloat16", 1024, 256, 7.11),
        (PRO, "fp8_ds_v4", 584, 132, 5.65),
    ],
    ids=["Flash in fp8", "Flash in bfloat16", "Pro in fp8"],
)
def test_pages_of_deepseek_v4_by_hand(
    ratios: tuple[int, ...], kv_dtype: str, row_bytes: int, index_bytes: int, gib: float
) -> None:
    cache = cache_of(ratios, kv_dtype)
    window, fours, hundreds = cache.groups
    num_layers, num_fours = len(ratios), len(overlapped(ratios))
    assert [group.name for group in cache.groups] == ["window of 128", "entries of 4", "entries of 128"]
    assert [group.chunks_per_page for group in cache.groups] == [1, 2, 1]
    assert cache.bytes_per_page == 16 * (num_layers * row_bytes + 2 * num_fours * index_bytes)
    assert cache.padding_bytes(0) == 16 * 2 * num_fours * index_bytes
    assert cache.padding_bytes(1) == 16 * (num_layers - 2 * num_fours) * row_bytes
    assert cache.padding_bytes(2) == cache.bytes_per_page - 16 * len(hundreds.layers) * row_bytes
    groups = cache.cache_groups()
    assert [group.page_tokens for group in groups] == [16, 128, 2048]
    assert block_tokens(groups) == 128
    assert round(whole_context_bytes(cache, 2**20) / 2**30, 2) == gib
    assert window.layers == tuple(range(num_layers))
    assert [cache.layers[place].layer for place in fours.layers] == sorted(overlapped(ratios))
    assert {cache.layers[place].tokens_per_row for place in hundreds.layers} == {128}


def test_layers_are_windows_first_and_then_entries() -> None:
    cache = cache_of((0, 4, 128, 4), "bfloat16")
    assert [(own.name, own.layer) for own in cache.layers] == [
        *((WINDOW, layer) for layer in range(4)),
        *((ENTRIES, layer) for layer in (1, 2, 3)),
    ]
    assert [own.index_dim for own in cache.layers] == [0, 0, 0, 0, 128, 0, 128]
    assert [cache.group_of(place) for place in range(7)] == [0, 0, 0, 0, 1, 2, 1]


def test_windows_are_kept_for_the_tokens_that_are_computed_again() -> None:
    cache = cache_of(FLASH, "bfloat16")
    window, fours, hundreds = cache.cache_groups()
    assert (window.window, cache.groups[0].window) == (132, 128)
    assert tokens_again((window, fours, hundreds)) == 4
    plain = cache_of((0, 128), "bfloat16").cache_groups()
    assert (plain[0].window, tokens_again(plain)) == (128, 0)
    assert "entries of 4 makes one row of 4 tokens" in str(unrewindable((window, fours)))
    assert unrewindable((window,)) is None


def test_windows_alone_are_one_group() -> None:
    cache = cache_of((0, 0, 0), "bfloat16")
    assert [group.name for group in cache.groups] == ["window of 128"]
    assert cache.has_states
    assert list_states((0, 0, 0), frozenset(), 512, 128) == ()


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 4, 4, 8, 128]), min_size=1, max_size=8),
    st.sampled_from([1, 2, 16]),
    st.sampled_from(["float32", "fp8_ds_v4"]),
)
def test_compressed_storage_matches_pages_without_overlap(listed: list[int], page_tokens: int, kv_dtype: str) -> None:
    ratios, num_pages, ledger = tuple(listed), 3, Ledger()
    formats = (ALL_KV_FORMATS[kv_dtype],) * len(ratios)
    cache = compressed_cache(formats, 80, 16, 5, ratios, overlapped(ratios), 32, page_tokens)
    storage = PageStorage(cache, num_pages, CPU, ledger)
    padding = kv_padding_term(cache).num_bytes
    assert 0 <= ledger.total_bytes - num_pages * cache.bytes_per_page <= padding
    for group, shape in zip(cache.groups, chunk_shapes(cache, num_pages), strict=True):
        assert shape.tokens_per_row == group.tokens_per_row
        owned: set[int] = set()
        for place in group.layers:
            for plane in storage.planes(place).values():
                assert plane.shape[0] == num_pages * group.chunks_per_page * page_tokens
                first = plane.data_ptr()
                own = range(first, first + plane.nbytes)
                assert not owned & set(own), f"{group.name} has bytes twice"
                owned |= set(own)
    block = block_tokens(cache.cache_groups())
    for group in cache.cache_groups():
        assert block % group.page_tokens == 0 or (group.can_be_open and group.page_tokens % block == 0)
        assert block % group.tokens_per_row == group.page_tokens % group.tokens_per_row == 0


def test_states_of_a_sequence_by_hand() -> None:
    kinds = list_states(FLASH, overlapped(FLASH), 512, 128)
    assert [(kind.name, kind.ratio, len(kind.layers), kind.is_overlapped, kind.dim) for kind in kinds] == [
        (ENTRIES, 4, 21, True, 512),
        (INDEX, 4, 21, True, 128),
        (ENTRIES, 128, 20, False, 512),
    ]
    assert place_bytes(kinds) == 21 * (12_288 + 3_072) + 20 * 6_144 == 445_440
    assert sum(term.num_bytes for term in state_terms(kinds, 256)) == 256 * 445_440


def test_states_are_what_was_planned_and_each_layer_has_its_own() -> None:
    kinds, ledger = list_states((0, 4, 8, 4), overlapped((0, 4, 8, 4)), 24, 8), Ledger()
    states = StateStorage(kinds, 3, CPU, ledger)
    planned = {term.owner: term.num_bytes for term in state_terms(kinds, 3)}
    assert {entry.owner: entry.num_bytes for entry in ledger} == planned
    shapes = {(ENTRIES, 1): (3, 2, 3, 24), (ENTRIES, 2): (3, 1, 3, 24), (INDEX, 3): (3, 2, 3, 8)}
    for (name, layer), shape in shapes.items():
        state_PK3D = states.state(layer, name)
        assert state_PK3D.shape == shape
        assert state_PK3D.is_contiguous()
        assert not state_PK3D.any()
    every = [
        states.state(layer, name) for name, layer in ((ENTRIES, 1), (ENTRIES, 2), (ENTRIES, 3), (INDEX, 1), (INDEX, 3))
    ]
    for number, state in enumerate(every):
        state.fill_(number)
    assert [state.unique().item() for state in every] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        states.state(0)
    states.release()
    assert ledger.total_bytes == 0

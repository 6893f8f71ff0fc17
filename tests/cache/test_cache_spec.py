"""The term for padding bounds what alignment costs, for any planes and any number of pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.spec import CacheSpec, LayerCache, kv_padding_term, mixed_cache, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import plan_memory
from holdfast.quant.formats import KV_FORMATS


def test_uniform_cache_of_default_model_by_hand() -> None:
    spec = uniform_cache(30, KV_FORMATS["float32"], num_kv_heads=3, head_dim=64, page_tokens=16)
    assert spec.bytes_per_token == 30 * 2 * 3 * 64 * 4 == 46_080
    assert spec.bytes_per_page == 737_280
    assert [layer.layer for layer in spec.layers] == list(range(30))


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 16, 256]))
def test_pages_for_leaves_less_than_one_page_spare(num_tokens: int, page_tokens: int) -> None:
    spec = uniform_cache(1, KV_FORMATS["float16"], 1, 8, page_tokens)
    (group,) = spec.cache_groups()
    spare = group.pages_for(num_tokens) * page_tokens - num_tokens
    assert 0 <= spare < page_tokens


def test_layers_may_differ_and_own_several_caches() -> None:
    """What latent attention with an index needs: two caches in one layer, other geometry in the next."""
    layers = (
        LayerCache(0, "latent", KV_FORMATS["bfloat16"], 1, 576),
        LayerCache(0, "index", KV_FORMATS["float16"], 1, 128),
        LayerCache(1, "attention", KV_FORMATS["float32"], 2, 8),
    )
    spec = CacheSpec(64, layers)
    assert spec.bytes_per_token == 2 * 576 * 2 + 2 * 128 * 2 + 2 * 2 * 8 * 4
    assert spec.bytes_per_page == 64 * spec.bytes_per_token


@given(st.lists(st.sampled_from(list(KV_FORMATS)), min_size=1, max_size=8), st.sampled_from([1, 16, 64]))
def test_layers_of_mixed_formats_add_up(names: list[str], page_tokens: int) -> None:
    spec = mixed_cache([KV_FORMATS[name] for name in names], 3, 64, page_tokens)
    alone = [uniform_cache(1, KV_FORMATS[name], 3, 64, page_tokens) for name in names]
    assert [layer.format.name for layer in spec.layers] == names
    assert [layer.layer for layer in spec.layers] == list(range(len(names)))
    assert spec.bytes_per_token == sum(one.bytes_per_token for one in alone)
    assert spec.bytes_per_page == sum(one.bytes_per_page for one in alone)
    assert spec.bytes_per_token == sum(plane.bytes_per_token for layer in spec.layers for plane in layer.planes)


def test_specs_are_values() -> None:
    assert uniform_cache(2, KV_FORMATS["float32"], 1, 8, 16) == uniform_cache(2, KV_FORMATS["float32"], 1, 8, 16)


PLAIN = [name for name, value in KV_FORMATS.items() if not value.is_quantized]
QUANTIZED = [name for name, value in KV_FORMATS.items() if value.is_quantized]
layers = st.lists(
    st.tuples(st.sampled_from(PLAIN), st.integers(1, 5), st.integers(1, 70))
    | st.tuples(st.sampled_from(QUANTIZED), st.integers(1, 5), st.integers(1, 8).map(lambda blocks: 16 * blocks)),
    min_size=1,
    max_size=4,
)


def cache_for(shapes: list[tuple[str, int, int]], page_tokens: int) -> CacheSpec:
    return CacheSpec(
        page_tokens,
        tuple(
            LayerCache(index, "attention", KV_FORMATS[name], num_heads, head_dim)
            for index, (name, num_heads, head_dim) in enumerate(shapes)
        ),
    )


@given(layers, st.integers(1, 32), st.integers(1, 40))
def test_pages_and_padding_hold_every_plane(shapes, page_tokens: int, num_pages: int) -> None:
    spec = cache_for(shapes, page_tokens)
    term = kv_padding_term(spec)
    ledger = Ledger()
    PageStorage(spec, num_pages, torch.device("cpu"), ledger)
    used = num_pages * spec.bytes_per_page
    assert used <= ledger.total_bytes <= used + term.num_bytes
    assert term.num_bytes < 256 * sum(len(layer.planes) for layer in spec.layers)
    assert ledger.group_bytes().keys() == {term.group}


@given(layers, st.integers(1, 32))
def test_kv_padding_term_bound_is_reached(shapes, page_tokens: int) -> None:
    """For each plane some number of pages pads as much as the term counts for it."""
    spec = cache_for(shapes, page_tokens)
    sizes = [plane.bytes_per_token * page_tokens for layer in spec.layers for plane in layer.planes]
    worst = [max(-size * num_pages % 256 for num_pages in range(1, 257)) for size in sizes]
    assert sum(worst) == kv_padding_term(spec).num_bytes


@given(
    st.lists(st.sampled_from(list(KV_FORMATS)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 16, 64]),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_cache_spec_order_of_formats_changes_no_byte(
    names, dice, page_tokens: int, num_heads: int, num_pages: int
) -> None:
    """Which layers are protected may be settled after the plan: as many of each format take as much, to the byte."""
    shuffled = dice.sample(names, len(names))
    held, terms = [], []
    for order in (names, shuffled):
        spec = cache_for([(name, num_heads, 32) for name in order], page_tokens)
        ledger = Ledger()
        PageStorage(spec, num_pages, torch.device("cpu"), ledger)
        held.append(ledger.total_bytes)
        terms.append(kv_padding_term(spec).num_bytes)
    sizes = [plane.bytes_per_token * page_tokens * num_pages for layer in spec.layers for plane in layer.planes]
    assert held == [sum(sizes) + sum(-size % 256 for size in sizes)] * 2
    assert terms[0] == terms[1]
    assert sum(sizes) == num_pages * spec.bytes_per_page


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_kv_padding_term_is_zero_for_quantized_even_heads(name: str, head_dim: int) -> None:
    assert kv_padding_term(uniform_cache(3, KV_FORMATS[name], 2, head_dim, page_tokens=64)).num_bytes == 0
    odd = kv_padding_term(uniform_cache(3, KV_FORMATS[name], 3, head_dim, page_tokens=64)).num_bytes
    assert odd <= 3 * 6 * 128


def test_kv_padding_term_is_zero_for_common_models() -> None:
    spec = uniform_cache(64, KV_FORMATS["bfloat16"], num_kv_heads=8, head_dim=128, page_tokens=16)
    term = kv_padding_term(spec)
    assert (term.owner, term.num_bytes, term.phases) == ("kv pages/padding", 0, ("capture", "serve"))
    assert term.reason == "128 planes, each at a multiple of 256 bytes"
    assert plan_memory(2**30, "", (term,), spec.bytes_per_page, 1, 10**6).num_pages == 2**30 // spec.bytes_per_page


WINDOWS = (512, 512, 512, 512, 512, None, 512, 512, 512, 512, 512, None, 512, 512)
"""Fourteen layers, two of them with the whole context."""


@pytest.mark.parametrize("windows", [(None,) * 14, WINDOWS], ids=["one group", "windows"])
def test_for_stage_keeps_groups_and_only_own_layers(windows: tuple[int | None, ...]) -> None:
    formats = [KV_FORMATS["turboquant_k8v4" if 1 < layer < 12 else "bfloat16"] for layer in range(14)]
    whole = mixed_cache(formats, 4, 64, 16, windows, 4096)
    cuts = (range(5), range(5, 12), range(12, 14))
    stages = [whole.for_stage(cut) for cut in cuts]
    for cut, stage in zip(cuts, stages, strict=True):
        assert stage.cache_groups() == whole.cache_groups()
        assert [layer.layer for layer in stage.layers] == list(range(len(cut)))
        assert [layer.format for layer in stage.layers] == [formats[layer] for layer in cut]
        for number, layer in enumerate(cut):
            assert stage.group_of(number) == whole.group_of(layer)
        assert stage.bytes_per_page <= whole.bytes_per_page
    assert sum(stage.bytes_per_token for stage in stages) == whole.bytes_per_token
    # The last has no layer of the whole context: a group without layers keeps its place.
    assert (() in [group.layers for group in stages[-1].groups]) == (windows is WINDOWS)
    storage = PageStorage(stages[-1], 3, torch.device("meta"), Ledger())
    num_slots = [len(plane) for number in range(2) for plane in storage.planes(number).values()]
    chunks = {group.window: group.chunks_per_page for group in stages[-1].groups}[windows[-1]]
    assert num_slots == [3 * 16 * chunks] * len(num_slots)

"""The term for padding bounds what alignment costs, for any planes and any number of pages."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.padding import kv_padding_term
from holdfast.cache.spec import CacheSpec, LayerCache, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import plan_memory
from holdfast.quant.formats import KV_FORMATS

layers = st.lists(
    st.tuples(st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(1, 5), st.integers(1, 70)),
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
def test_the_bound_is_reached(shapes, page_tokens: int) -> None:
    """For one layer some number of pages pads as much as the term says: it is not larger than it has to be."""
    spec = cache_for(shapes[:1], page_tokens)
    sizes = [plane.bytes_per_token * page_tokens for plane in spec.layers[0].planes]
    worst = max(sum(-size * num_pages % 256 for size in sizes) for num_pages in range(1, 257))
    assert worst == kv_padding_term(spec).num_bytes


def test_models_as_they_are_pad_nothing() -> None:
    spec = uniform_cache(64, KV_FORMATS["bfloat16"], num_kv_heads=8, head_dim=128, page_tokens=16)
    term = kv_padding_term(spec)
    assert (term.owner, term.num_bytes, term.phases) == ("kv pages/padding", 0, ("capture", "serve"))
    assert term.reason == "128 planes, each at a multiple of 256 bytes"
    assert plan_memory(2**30, "", (term,), spec.bytes_per_page, 1, 10**6).num_pages == 2**30 // spec.bytes_per_page

"""The geometry of the KV cache: bytes by hand, and pages that hold their tokens."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cache.spec import CacheSpec, LayerCache, mixed_cache, uniform_cache
from holdfast.quant.formats import KV_FORMATS


def test_the_default_models_cache_by_hand() -> None:
    spec = uniform_cache(30, KV_FORMATS["float32"], num_kv_heads=3, head_dim=64, page_tokens=16)
    assert spec.bytes_per_token == 30 * 2 * 3 * 64 * 4 == 46_080
    assert spec.bytes_per_page == 737_280
    assert [layer.layer for layer in spec.layers] == list(range(30))


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 16, 256]))
def test_pages_hold_their_tokens_with_less_than_one_page_to_spare(num_tokens: int, page_tokens: int) -> None:
    spec = uniform_cache(1, KV_FORMATS["float16"], 1, 8, page_tokens)
    spare = spec.pages_for(num_tokens) * page_tokens - num_tokens
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

"""Near pages over quantized ones: tokens of a page by hand, planes that overlap no other near plane, chunks by number."""

from itertools import product

import pytest
import torch

from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.groups import CacheGroup
from holdfast.cache.near import FIRST_TOKENS
from holdfast.cache.spec import CacheSpec, mixed_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS

CPU = torch.device("cpu")
HEADS, DIM = 2, 32
NARROW = KV_FORMATS["turboquant_4bit_nc"]


def near_spec(
    formats: list[str], windows: tuple[int | None, ...] = (), page_tokens: int = 64, block: int = 64, dtype="bfloat16"
) -> CacheSpec:
    spec = mixed_cache([KV_FORMATS[name] for name in formats], HEADS, DIM, page_tokens, windows, 10_000)
    layers = [layer for layer, name in enumerate(formats) if KV_FORMATS[name].is_quantized]
    first_tokens = FIRST_TOKENS if any(not windows or windows[layer] is None for layer in layers) else 0
    found = spec.with_near(layers, block, first_tokens, dtype)
    assert found is not None
    return found


TOKENS = [
    (["turboquant_4bit_nc"] * 3, (), "bfloat16", 16),
    (["turboquant_4bit_nc"] * 3, (), "float32", 8),
    (["fp8"] * 3, (), "bfloat16", 32),
    # Keys of 8 bits and values of 4: keys and values share the keys' columns.
    (["turboquant_k8v4"] * 3, (), "bfloat16", 16),
    (["turboquant_3bit_nc"] * 3, (), "bfloat16", 8),
    (["turboquant_k3v4_nc"] * 3, (), "bfloat16", 8),
    # Ten planes of five layers in the eight columns of four layers.
    (["turboquant_4bit_nc"] * 4 + ["fp8"], (), "bfloat16", 8),
    # A layer with plain pages has none, and the near planes of the others.
    (["turboquant_4bit_nc", "bfloat16", "turboquant_4bit_nc"], (), "bfloat16", 32),
    # Two groups of three layers share three columns, so each holds two.
    (["turboquant_4bit_nc"] * 6, (100, None) * 3, "bfloat16", 8),
]


@pytest.mark.parametrize(("formats", "windows", "dtype", "tokens"), TOKENS, ids=lambda own: str(own)[:30])
def test_near_page_has_the_tokens_that_fit_a_page(formats, windows, dtype, tokens) -> None:
    spec = near_spec(formats, windows, dtype=dtype)
    without = mixed_cache([KV_FORMATS[name] for name in formats], HEADS, DIM, 64, windows, 10_000)
    group = spec.cache_groups()[-1]
    assert group == CacheGroup("near", tokens, 64, is_blocked=True, kept_pages=-(-16 // tokens))
    assert spec.cache_groups()[:-1] == without.cache_groups()
    assert spec.bytes_per_page == without.bytes_per_page, "near pages lie over the others"
    num_layers = sum(KV_FORMATS[name].is_quantized for name in formats)
    used = 2 * num_layers * tokens * HEADS * DIM * (4 if dtype == "float32" else 2)
    assert spec.padding_bytes(len(spec.groups) - 1) == spec.bytes_per_page - used >= 0


@pytest.mark.parametrize(("formats", "windows", "dtype", "tokens"), TOKENS, ids=lambda own: str(own)[:30])
def test_near_planes_hold_every_token_of_every_page(formats, windows, dtype, tokens) -> None:
    """Each token of each page has a number of its own: all are read back as they were written, and no byte is added."""
    spec, num_pages = near_spec(formats, windows, dtype=dtype), 5
    ledger = Ledger()
    storage = PageStorage(spec, num_pages, CPU, ledger)
    assert ledger.total_bytes >= num_pages * spec.bytes_per_page > ledger.total_bytes - 256 * len(list(ledger))
    shape, near = chunk_shapes(spec, num_pages)[-1], spec.near
    assert near is not None
    layers = spec.groups[-1].layers
    planes = [storage.plane(layer, name) for layer, name in product(layers, ("near_k", "near_v"))]
    chunks = shape.numbers(range(num_pages))
    slots_S = torch.as_tensor(chunks[:, None] * tokens + range(tokens)).view(-1)
    for number, plane in enumerate(planes):
        assert plane.shape[1:] == (HEADS, DIM)
        assert plane.is_contiguous()
        assert plane.dtype == getattr(torch, dtype)
        plane[slots_S] = content(slots_S, number).to(plane.dtype)
    for number, plane in enumerate(planes):
        assert (plane[slots_S] == content(slots_S, number)).all()


def content(slots_S: torch.Tensor, number: int) -> torch.Tensor:
    """Small whole numbers, which every type holds."""
    return ((slots_S * 31 + number * 7) % 251).view(-1, 1, 1)


def test_near_page_copies_with_its_page() -> None:
    spec = near_spec(["turboquant_4bit_nc"] * 4 + ["fp8"])
    storage, shape = PageStorage(spec, 4, CPU, Ledger()), chunk_shapes(spec, 4)[-1]
    tokens = spec.cache_groups()[-1].page_tokens
    plane = storage.plane(4, "near_v")
    source, target = (slice(chunk * tokens, (chunk + 1) * tokens) for chunk in shape.numbers([1, 3]).tolist())
    plane[source] = 7
    storage.copy_pages([(1, 3)])
    assert (plane[target] == 7).all()


@pytest.mark.parametrize(("first_tokens", "kept"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3), (64, 4)])
def test_near_group_keeps_the_pages_of_the_first_tokens(first_tokens: int, kept: int) -> None:
    spec = mixed_cache([NARROW] * 3, HEADS, DIM, 64).with_near(range(3), 64, first_tokens, "bfloat16")
    assert spec is not None
    assert spec.cache_groups()[-1] == CacheGroup("near", 16, 64, is_blocked=True, kept_pages=kept)


def test_near_page_too_small_for_a_token_is_none() -> None:
    spec = mixed_cache([NARROW] * 2, HEADS, DIM, page_tokens=2)
    assert spec.with_near([0, 1], 64, 16, "bfloat16") is None


def test_near_group_keeps_no_first_tokens_behind_windows() -> None:
    spec = near_spec(["turboquant_4bit_nc"] * 2, (100, 100))
    assert spec.cache_groups()[-1].kept_pages == 0
    assert near_spec(["turboquant_4bit_nc", "bfloat16"], (100, None)).cache_groups()[-1].kept_pages == 0


def test_stage_keeps_the_tokens_of_near_pages() -> None:
    """Page ids mean the same on every rank. A stage whose layers need more room for them than they have gets a column."""
    whole = near_spec(["turboquant_4bit_nc"] * 4 + ["fp8"] * 4)
    assert whole.cache_groups()[-1].page_tokens == 16
    for first, last in ((0, 4), (3, 6), (4, 8)):
        stage = whole.for_stage(range(first, last))
        assert stage.cache_groups() == whole.cache_groups()
        storage = PageStorage(stage, 3, CPU, Ledger())
        assert all({"near_k", "near_v"} <= storage.planes(layer).keys() for layer in range(last - first))
    # A stage of plain layers has the group, and nothing in it.
    mixed_whole = near_spec(["turboquant_4bit_nc"] * 2 + ["bfloat16"] * 2)
    plain = mixed_whole.for_stage(range(2, 4))
    assert plain.cache_groups() == mixed_whole.cache_groups()
    assert plain.near is not None
    assert plain.near.places == {}
    uneven = near_spec(["turboquant_4bit_nc"] * 5, (100, None, None, None, None)).for_stage(range(2))
    own = mixed_cache([NARROW] * 2, HEADS, DIM, 64, (100, None), 10_000)
    assert uneven.bytes_per_page >= own.bytes_per_page

"""The tensors behind page ids: one arena, a plane for each layer and kind."""

from itertools import product

import pytest
import torch

from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.spec import CacheSpec, LayerCache, kv_padding_term, mixed_cache, uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, aligned
from holdfast.quant.formats import KV_FORMATS, KVFormat

CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_bytes_are_those_of_the_spec_and_of_the_ledger(kv_dtype, page_tokens):
    spec = uniform_cache(3, KV_FORMATS[kv_dtype], num_kv_heads=2, head_dim=32, page_tokens=page_tokens)
    ledger = Ledger()
    storage = PageStorage(spec, 7, CPU, ledger)
    described = spec.layers[0].planes
    planes = [storage.plane(layer, plane.name) for layer in range(3) for plane in described]
    assert sum(plane.nbytes for plane in planes) == 7 * spec.bytes_per_page
    assert {plane.untyped_storage().data_ptr() for plane in planes} == {planes[0].untyped_storage().data_ptr()}
    assert ledger.group_bytes() == {"kv pages": planes[0].untyped_storage().nbytes()}
    owners = [f"kv pages/0.attention.{plane.name}" for plane in described]
    assert [entry.owner for entry in ledger][: len(described)] == owners
    assert [entry.num_bytes for entry in ledger] == [aligned(plane.nbytes) for plane in planes]
    for plane, expected in zip(planes, 3 * described, strict=True):
        assert plane.data_ptr() % ALIGNMENT_BYTES == 0
        assert plane.shape == (7 * page_tokens, *expected.token_shape)
        assert plane.dtype == getattr(torch, expected.dtype)
        assert plane.is_contiguous()


def test_planes_do_not_overlap():
    spec = uniform_cache(2, KV_FORMATS["float32"], 1, 4, page_tokens=2)
    storage = PageStorage(spec, 3, CPU, Ledger())
    planes = [plane for layer in range(2) for plane in storage.planes(layer).values()]
    for value, plane in enumerate(planes):
        plane.fill_(value)
    assert [plane.unique().tolist() for plane in planes] == [[0], [1], [2], [3]]


def test_layers_may_differ():
    """Boundary layers in another format, a layer with another number of heads: each plane is its own."""
    mixed = KVFormat("mixed", "float16", "float32")
    spec = CacheSpec(
        4, (LayerCache(0, "attention", mixed, 2, 8), LayerCache(5, "index", KV_FORMATS["bfloat16"], 1, 16))
    )
    ledger = Ledger()
    storage = PageStorage(spec, 2, CPU, ledger)
    assert storage.plane(0, "k").dtype == torch.float16
    assert storage.plane(0, "v").dtype == torch.float32
    assert storage.plane(1, "k").shape == (8, 1, 16)
    assert ledger.total_bytes == sum(aligned(2 * 4 * num_bytes) for num_bytes in (32, 64, 32, 32))
    assert [entry.owner for entry in ledger][-1] == "kv pages/5.index.v"


def test_page_storage_plane_keeps_its_address():
    storage = PageStorage(uniform_cache(1, KV_FORMATS["float32"], 1, 4, 2), 3, CPU, Ledger())
    assert storage.planes(0).keys() == {"k", "v"}
    assert storage.planes(0)["k"].data_ptr() == storage.plane(0, "k").data_ptr() == storage.plane(0, "k").data_ptr()
    with pytest.raises(KeyError):
        storage.plane(0, "latent")


def test_released_pages_leave_the_ledger():
    ledger = Ledger()
    storage = PageStorage(uniform_cache(2, KV_FORMATS["float32"], 1, 4, 2), 3, CPU, ledger)
    storage.release()
    assert list(ledger) == []
    with pytest.raises(IndexError):
        storage.plane(0, "k")


def test_page_storage_two_caches_of_one_layer_have_own_names():
    """One page table over keys, values and an index: the same layer twice."""
    spec = CacheSpec(2, tuple(LayerCache(0, name, KV_FORMATS["float16"], 1, 8) for name in ("attention", "index")))
    ledger = Ledger()
    storage = PageStorage(spec, 1, CPU, ledger)
    assert [entry.owner.partition("/")[2] for entry in ledger] == [
        "0.attention.k",
        "0.attention.v",
        "0.index.k",
        "0.index.v",
    ]
    assert storage.plane(0, "k").data_ptr() != storage.plane(1, "k").data_ptr()


def grouped(page_tokens: int = 2) -> CacheSpec:
    """A whole context and two windows, of 2, 5 and 3 layers in mixed formats: pages hold several chunks of some."""
    windows = [None, 4, 4, 8, 4, None, 4, 8, 4, 8]
    names = ["float32", "float16", "float16", "float32", "float32", "float16", "float16", "float32", "float16", "fp8"]
    return mixed_cache([KV_FORMATS[name] for name in names], 2, 32, page_tokens, windows)


def pool_bytes(storage: PageStorage) -> torch.Tensor:
    """Every byte of the arena."""
    plane = storage.plane(0, "k")
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(plane.untyped_storage())


@pytest.mark.parametrize("page_tokens", [1, 2, 16])
def test_pages_of_groups_take_the_bytes_of_the_spec(page_tokens):
    spec, ledger = grouped(page_tokens), Ledger()
    assert len(spec.groups) == 3
    assert len({group.chunks_per_page for group in spec.groups}) > 1
    storage = PageStorage(spec, 7, CPU, ledger)
    held = ledger.group_bytes()["kv pages"]
    assert held == len(pool_bytes(storage))
    assert 7 * spec.bytes_per_page <= held <= 7 * spec.bytes_per_page + kv_padding_term(spec).num_bytes
    exact = sum(entry.num_bytes for entry in ledger) - sum(
        -(7 * count * page_tokens * plane.bytes_per_token) % ALIGNMENT_BYTES
        for kind, count in spec.columns.items()
        for plane in kind
    )
    assert exact == 7 * spec.bytes_per_page
    for group in spec.groups:
        for layer in group.layers:
            for plane in spec.layers[layer].planes:
                shape = storage.plane(layer, plane.name).shape
                assert shape == (group.chunks_per_page * 7 * page_tokens, *plane.token_shape)


def test_page_storage_pages_of_groups_share_no_byte():
    """Every chunk of every layer of every group on every page is written, and only bytes of that page may change."""
    spec, num_pages = grouped(), 3
    storage = PageStorage(spec, num_pages, CPU, Ledger())
    everything = pool_bytes(storage)
    owner = torch.full_like(everything, 255)
    for (group, shape), page in product(zip(spec.groups, chunk_shapes(spec, num_pages), strict=True), range(num_pages)):
        written = torch.zeros_like(everything)
        for layer, number in product(group.layers, shape.numbers([page]).tolist()):
            for plane in spec.layers[layer].planes:
                rows = storage.plane(layer, plane.name)[number * 2 : number * 2 + 2].view(torch.uint8)
                everything.zero_()
                rows.fill_(1)
                assert not (written & everything).any(), f"layer {layer} has bytes of another layer of its group"
                written |= everything
        assert int(written.sum()) == spec.bytes_per_page - spec.padding_bytes(spec.groups.index(group))
        taken = owner[written.bool()]
        assert ((taken == 255) | (taken == page)).all(), f"page {page} has bytes of another page"
        owner[written.bool()] = page
    assert int((owner != 255).sum()) == num_pages * spec.bytes_per_page, "a byte of a page belongs to no group"


def test_columns_are_lines_of_the_ledger():
    ledger = Ledger()
    PageStorage(mixed_cache([KV_FORMATS["float32"]] * 3, 2, 32, 4, [None, 8, 8]), 2, CPU, ledger)
    assert [entry.owner for entry in ledger] == ["kv pages/float32.2x32.k", "kv pages/float32.2x32.v"]
    assert {entry.reason for entry in ledger} == {"2 pages"}


def test_copied_pages_have_all_columns_and_others_stay():
    storage = PageStorage(grouped(2), 4, CPU, Ledger())
    everything = pool_bytes(storage)
    everything.copy_(torch.arange(len(everything)) % 251)
    before = [columns.clone() for columns in storage._columns]
    storage.copy_pages([(0, 1), (3, 2), (1, 0)])
    for columns, old in zip(storage._columns, before, strict=True):
        assert torch.equal(columns, old[:, [0, 0, 3, 3]])

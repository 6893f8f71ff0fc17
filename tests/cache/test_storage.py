"""The tensors behind page ids: one arena, a plane for each layer and kind."""

import pytest
import torch

from holdfast.cache.spec import CacheSpec, LayerCache, uniform_cache
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


def test_a_plane_stays_where_it_is():
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


def test_two_caches_of_one_layer_have_names_of_their_own():
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

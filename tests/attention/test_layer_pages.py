"""The pages of all layers: each of its own kind, on planes of its own, with one rotation for all that need it."""

import pytest
import torch

from attention.steps import Geometry, make_batch, texts
from holdfast.attention.layer_pages import CodedPages, LayerPages, PlainPages

MIX = Geometry(windows=5 * (None,), kv_dtype="float32 fp8 turboquant_k8v4 turboquant_3bit_nc float32", page_tokens=16)


def test_every_layer_has_pages_of_its_kind():
    pages = LayerPages(MIX.specs, MIX.storage(2))._pages
    assert [type(one) for one in pages] == [PlainPages, CodedPages, CodedPages, CodedPages, PlainPages]


def test_rows_go_to_the_planes_of_their_layer():
    made, num_pages = texts(MIX, [20], consecutive=False)
    storage = MIX.storage(num_pages)
    layers = LayerPages(MIX.specs, storage)
    batch, qkv = make_batch(MIX, [(made[0], 0, 20)])
    before = {
        (layer, plane.name): storage.plane(layer, plane.name).clone()
        for layer, cache in enumerate(MIX.cache.layers)
        for plane in cache.planes
    }
    for layer in (0, 3):
        layers.write(qkv, batch, None, None, layer, torch.empty(20, 6, 16))
    for (layer, name), plane in before.items():
        is_same = torch.equal(storage.plane(layer, name).view(torch.uint8), plane.view(torch.uint8))
        assert is_same == (layer not in (0, 3)), f"{layer=} {name=}"


def test_layers_share_one_rotation():
    layers = LayerPages(MIX.specs, MIX.storage(2))
    first, second, third = (pages.planes for pages in layers._pages if isinstance(pages, CodedPages))
    assert first.rotation_DD.numel() == 0, "8 bits are not rotated"
    assert second.rotation_DD.data_ptr() == third.rotation_DD.data_ptr()
    assert layers.held_bytes() == {"attention/rotation": 17 * 16 * 4}


def test_tables_are_held_where_pages_are_read():
    held = LayerPages(MIX.specs, MIX.storage(2), is_read=True).held_bytes()
    assert held.keys() == {"attention/rotation", "attention/dequantize"}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_plain_layers_hold_nothing(kv_dtype):
    geometry = Geometry(kv_dtype=kv_dtype)
    assert LayerPages(geometry.specs, geometry.storage(2), is_read=True).held_bytes() == {}


def test_means_belong_to_their_layer():
    mean = torch.ones(2, 16)
    layers = LayerPages(MIX.specs, MIX.storage(2), [None, None, mean, None, None])
    means = [pages.planes.k_mean_KD for pages in layers._pages if isinstance(pages, CodedPages)]
    assert [one is mean for one in means] == [False, True, False]
    with pytest.raises(ValueError, match="shorter"):
        LayerPages(MIX.specs, MIX.storage(2), [mean])

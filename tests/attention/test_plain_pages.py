"""What plain backends share: every layer has its own pair of planes, and rows end up in their slots of it."""

import torch

from holdfast.attention.batch import Batch
from holdfast.attention.plain_pages import PlainPages
from holdfast.attention.spec import AttentionSpec
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS


def test_rows_go_to_their_slots_of_their_layer_and_padding_nowhere():
    cache = uniform_cache(2, KV_FORMATS["float32"], num_kv_heads=1, head_dim=4, page_tokens=2)
    storage = PageStorage(cache, 3, torch.device("cpu"), Ledger())
    specs = [AttentionSpec(layer, 2, 1.0, None, 6, "float32", "cpu") for layer in cache.layers]
    for layer in range(2):
        for name in ("k", "v"):
            storage.plane(layer, name).fill_(-7.0)
    qkv_TX, queries_THD = torch.arange(3 * 16.0).view(3, 16), torch.full((3, 2, 4), 9.0)
    batch = Batch(torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.tensor([5, 0, -1]), (), None)
    PlainPages(specs, storage).write(qkv_TX, batch, None, None, 1, queries_THD)
    assert torch.equal(queries_THD[:2], qkv_TX[:2, :8].view(2, 2, 4))
    assert (queries_THD[2] == 0).all(), "the queries of padding are zeros"
    k_plane, v_plane = storage.plane(1, "k"), storage.plane(1, "v")
    assert torch.equal(k_plane[[5, 0], 0], qkv_TX[:2, 8:12])
    assert torch.equal(v_plane[[5, 0], 0], qkv_TX[:2, 12:])
    assert (k_plane[1:5] == -7).all()
    assert (v_plane[1:5] == -7).all()
    assert (storage.plane(0, "k") == -7).all(), "the other layer's"

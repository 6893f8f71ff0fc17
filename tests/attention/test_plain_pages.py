"""One layer's plain pages: rows end up in their slots, and are read from there."""

import torch

from holdfast.attention.backend import Batch
from holdfast.attention.layer_pages import PagedRows, PlainPages
from holdfast.kernels.attention.tiled_attention import small_programs, tile_rows

CPU = torch.device("cpu")


def pages_of(num_slots: int) -> PlainPages:
    return PlainPages(torch.full((num_slots, 1, 4), -7.0), torch.full((num_slots, 1, 4), -7.0), page_tokens=2)


def test_rows_go_to_their_slots_and_padding_nowhere():
    pages = pages_of(6)
    qkv_TX, queries_THD = torch.arange(3 * 16.0).view(3, 16), torch.full((3, 2, 4), 9.0)
    batch = Batch(torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.tensor([5, 0, -1]), (), None)
    pages.write(qkv_TX, batch, None, None, queries_THD)
    assert torch.equal(queries_THD[:2], qkv_TX[:2, :8].view(2, 2, 4))
    assert (queries_THD[2] == 0).all(), "the queries of padding are zeros"
    k_plane, v_plane = pages.planes
    assert torch.equal(k_plane[[5, 0], 0], qkv_TX[:2, 8:12])
    assert torch.equal(v_plane[[5, 0], 0], qkv_TX[:2, 12:])
    assert (k_plane[1:5] == -7).all()
    assert (v_plane[1:5] == -7).all()


def test_what_is_read_is_what_was_written():
    pages = pages_of(8)
    pages.planes[0][:, 0, 0] = torch.arange(8.0)
    pages.planes[1][:, 0, 0] = -torch.arange(8.0)
    k_KLD, v_KLD = pages.read(PagedRows.locate([3, 0], 1, 4, 2, CPU), torch.float32)
    assert k_KLD.shape == v_KLD.shape == (1, 3, 4)
    assert k_KLD[0, :, 0].tolist() == [7, 0, 1]
    assert v_KLD[0, :, 0].tolist() == [-7, 0, -1]


def test_queries_and_outputs_need_nothing():
    pages, rows = pages_of(2), torch.randn(3, 2, 4)
    assert pages.queries(rows) is rows
    before = rows.clone()
    pages.finish(rows.view(3, 8))
    assert torch.equal(rows, before)


def test_tiles_are_those_of_the_kernel():
    geometry = pages_of(2).tile_geometry(num_heads=8)
    assert geometry.small_rows == tile_rows(8, 1, large=False)
    assert geometry.large_rows == tile_rows(8, 1, large=True)
    for num_rows in (1, 2, 3, 100):
        assert geometry.small_programs(num_rows) == small_programs(num_rows)[0]

"""One layer's coded pages: rows are coded into their slots, and read from there as numbers."""

import pytest
import torch

from holdfast.attention.backend import Batch
from holdfast.attention.layer_pages import CodedPages, CodeReader, PagedRows
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.kernels.attention.quantized_planes import CodedPlanes
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import (
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    rotate_heads,
    rotation_table,
)
from kernels.exactness import random, same_bits

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 48
FORMATS = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_coded]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def pages_of(name: str, num_pages: int, page_tokens: int, k_mean: torch.Tensor | None = None) -> CodedPages:
    """Pages whose every scale is NaN."""
    kv_format = KV_FORMATS[name]
    assert kv_format.key_bits is not None
    assert kv_format.value_bits is not None
    bits = kv_format.key_bits, kv_format.value_bits
    cache = uniform_cache(1, kv_format, NUM_KV_HEADS, HEAD_DIM, page_tokens)
    storage = PageStorage(cache, num_pages, CPU, Ledger())
    storage.plane(0, "k_scale").fill_(float("nan"))
    storage.plane(0, "v_scale").fill_(float("nan"))
    rotation = rotation_table(HEAD_DIM, torch.float32, CPU)
    planes = CodedPlanes.of(lambda plane: storage.plane(0, plane), *bits, HEAD_DIM, page_tokens, rotation, k_mean)
    return CodedPages(planes, CodeReader(*bits, HEAD_DIM, CPU))


def written(name: str, pages: list[int], num_tokens: int, page_tokens: int) -> tuple[CodedPages, torch.Tensor]:
    """A sequence on these pages, and padding behind it; its heads, [L, H + 2 K, D]."""
    coded = pages_of(name, max(pages) + 2, page_tokens)
    qkv_TX = random(num_tokens + 2, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    slots = [pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(num_tokens)]
    positions_T = torch.arange(num_tokens + 2)
    batch = Batch(positions_T, positions_T, torch.tensor([*slots, -1, -1]), (), None)
    queries_THD = torch.full((num_tokens + 2, NUM_HEADS, HEAD_DIM), float("nan"))
    coded.write(qkv_TX, batch, None, None, queries_THD)
    assert not queries_THD[num_tokens:].any(), "the queries of padding are zeros"
    heads_LXD = qkv_TX[:num_tokens].view(num_tokens, -1, HEAD_DIM)
    rotates = coded.planes.rotates_keys
    expected_THD = rotate_heads(heads_LXD[:, :NUM_HEADS]) if rotates else heads_LXD[:, :NUM_HEADS]
    torch.testing.assert_close(queries_THD[:num_tokens], expected_THD)
    return coded, heads_LXD


@EVERY_FORMAT
@pytest.mark.parametrize("page_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_any_range_is_read_as_it_was_coded(name, page_tokens, consecutive):
    num_tokens = 37
    num_pages = -(-num_tokens // page_tokens)
    pages = list(range(3, 3 + num_pages))
    pages = pages if consecutive else pages[::-1]
    coded, heads_LXD = written(name, pages, num_tokens, page_tokens)
    k_LKD, v_LKD = heads_LXD[:, NUM_HEADS:].split(NUM_KV_HEADS, dim=1)
    planes, reader = coded.planes, coded._readable
    k_LKD = rotate_heads(k_LKD) if planes.rotates_keys else k_LKD
    v_LKD = rotate_heads(v_LKD) if planes.rotates_values else v_LKD
    k_LKD = decode_keys(encode_keys(k_LKD, planes.key_bits), planes.key_bits, HEAD_DIM)
    v_LKD = decode_values(encode_values(v_LKD, planes.value_bits), planes.value_bits, HEAD_DIM)
    for first, end in ((0, num_tokens), (0, 1), (5, 6), (7, 33), (num_tokens - 1, num_tokens)):
        rows = PagedRows.locate(pages, first, end, page_tokens, CPU)
        assert consecutive or page_tokens >= num_tokens or end - first == 1 or rows.pages_P is not None
        k_KlD, v_KlD = coded.read(rows, torch.float32)
        assert same_bits(k_KlD, k_LKD[first:end].transpose(0, 1)[..., reader.key_order_D])
        assert same_bits(v_KlD[..., reader.value_places_D], v_LKD[first:end].transpose(0, 1))


@EVERY_FORMAT
def test_products_do_not_depend_on_the_order_of_coordinates(name):
    coded, _ = written(name, [1, 0], 9, 8)
    q_THD = random(5, NUM_HEADS, HEAD_DIM, seed=4)
    k_KLD, v_KLD = coded.read(PagedRows.locate([1, 0], 0, 9, 8, CPU), torch.float32)
    keys = coded.planes.keys_at(torch.tensor([1] * 8 + [0]), torch.tensor([*range(8), 0]))
    k_LKD = decode_keys(keys, coded.planes.key_bits, HEAD_DIM)
    scores = torch.einsum("thd,ld->thl", coded.queries(q_THD), k_KLD[1])
    torch.testing.assert_close(scores, torch.einsum("thd,ld->thl", q_THD, k_LKD[:, 1]))
    values = coded.planes.values_at(torch.tensor([1] * 8 + [0]), torch.tensor([*range(8), 0]))
    v_LKD = decode_values(values, coded.planes.value_bits, HEAD_DIM)
    v_LKD = rotate_heads(v_LKD) if coded.planes.rotates_values else v_LKD
    out_TX = v_KLD[1].repeat(1, NUM_HEADS)
    coded.finish(out_TX)
    torch.testing.assert_close(out_TX, v_LKD[:, 1].repeat(1, NUM_HEADS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_read_and_finished_in_their_type(dtype):
    coded, _ = written("turboquant_4bit_nc", [0], 3, 4)
    k_KLD, v_KLD = coded.read(PagedRows.locate([0], 0, 3, 4, CPU), dtype)
    assert k_KLD.dtype == v_KLD.dtype == dtype
    out = v_KLD[0].clone()
    coded.finish(out)
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_a_mean_is_taken_from_keys_before_they_are_coded():
    mean = random(NUM_KV_HEADS, HEAD_DIM, seed=8, scale=20.0)
    pages = [pages_of("turboquant_4bit_nc", 1, 4, k_mean) for k_mean in (None, mean)]
    qkv_TX = random(1, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    shifted_TX = qkv_TX.clone()
    shifted_TX.view(1, -1, HEAD_DIM)[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS] += rotate_heads(mean)
    batch = Batch(*(torch.zeros(1, dtype=torch.int64),) * 3, (), None)
    for coded, rows_TX in zip(pages, (qkv_TX, shifted_TX), strict=True):
        coded.write(rows_TX, batch, None, None, torch.empty(1, NUM_HEADS, HEAD_DIM))
    rows = PagedRows.locate([0], 0, 1, 4, CPU)
    left, right = (coded.read(rows, torch.float32)[0] for coded in pages)
    torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-3)


def test_pages_for_kernels_are_not_read():
    coded = pages_of("turboquant_4bit_nc", 1, 4)
    with pytest.raises(AssertionError, match="made for kernels"):
        CodedPages(coded.planes).read(PagedRows.locate([0], 0, 1, 4, CPU), torch.float32)

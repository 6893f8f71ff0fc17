"""The pages of all layers: each of its own kind, on planes of its own, with one rotation for all that need it."""

import random as chance
from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, texts
from for_each import for_each
from holdfast.attention.backend import Batch
from holdfast.cache.spec import uniform_cache
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import code_table_bytes
from holdfast.families.grouped.pages import Dequantizer, GroupedBackend, PagedRows, PlainPages, QuantizedPages
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tiled_attention import small_programs, tile_rows
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.memory.ledger import Ledger
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import (
    QuantizedHeads,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
    rotate_heads,
    rotation_table,
)
from kernels.exactness import random, same_bits

CPU = torch.device("cpu")


def plane_of(num_pages, page_tokens, dtype=torch.float32):
    """Slot s holds s, so that what was read says where it lay."""
    slots = torch.arange(num_pages * page_tokens, dtype=torch.float32)
    return slots.view(-1, 1, 1).expand(-1, 2, 3).contiguous().to(dtype)


def expected_slots(pages, first, end, page_tokens):
    return [float(pages[i // page_tokens] * page_tokens + i % page_tokens) for i in range(first, end)]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("seed", range(20))
def test_paged_rows_read_any_range_of_any_page_list(page_tokens, seed):
    dice = chance.Random(seed)
    pages = dice.sample(range(12), dice.randint(1, 12))
    end = dice.randint(1, len(pages) * page_tokens)
    first = dice.randrange(end)
    rows = PagedRows.locate(pages, first, end, page_tokens, CPU)
    read = rows.read(plane_of(12, page_tokens), page_tokens, torch.float32)
    assert read.shape == (2, end - first, 3)
    assert read[0, :, 0].tolist() == expected_slots(pages, first, end, page_tokens)
    assert (read == read[:1, :, :1]).all()


@for_each("page_tokens", [1, 4, 16])
@for_each("seed", range(20))
@for_each("with_bytes", [True, False])
def test_paged_rows_read_by_head_any_range(page_tokens, seed, with_bytes):
    """Slot s of head h holds 1000 h + s."""
    dice = chance.Random(seed)
    pages = dice.sample(range(12), dice.randint(1, 12))
    pages = sorted(pages) if seed % 2 else pages
    end = dice.randint(1, len(pages) * page_tokens)
    first = dice.randrange(end)
    plane = torch.arange(12 * page_tokens).view(12, 1, page_tokens) + 1000 * torch.arange(2).view(1, 2, 1)
    plane = plane.unsqueeze(-1).expand(-1, -1, -1, 3) if with_bytes else plane
    read = PagedRows.locate(pages, first, end, page_tokens, CPU).read_by_head(plane.contiguous())
    assert read.shape == ((2, end - first, 3) if with_bytes else (2, end - first))
    read = read[..., 0] if with_bytes else read
    expected = torch.tensor(expected_slots(pages, first, end, page_tokens))
    assert torch.equal(read[0].float(), expected)
    assert torch.equal(read[1].float(), 1000 + expected)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 16), (3, 5), (5, 13), (15, 16)])
def test_neighbours_are_read_in_place(first, end):
    plane = plane_of(9, 4)
    rows = PagedRows.locate([3, 4, 5, 6], first, end, 4, CPU)
    read = rows.read(plane, 4, torch.float32)
    assert rows.pages_P is None
    assert read.data_ptr() == plane[12 + first].data_ptr()
    assert read[0, :, 0].tolist() == expected_slots([3, 4, 5, 6], first, end, 4)


def test_pages_outside_the_range_do_not_matter():
    """A window that has left the scattered pages behind reads its own in place."""
    rows = PagedRows.locate([8, 1, 2, 0], first=5, end=12, page_tokens=4, device=CPU)
    assert rows.pages_P is None
    assert rows.first_slot == 5


@pytest.mark.parametrize("pages", [[3, 4], [4, 3]], ids=["in place", "gathered"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_pages_are_widened(pages, dtype):
    plane = plane_of(9, 4, dtype)
    read = PagedRows.locate(pages, 0, 7, 4, CPU).read(plane, 4, torch.float32)
    assert read.dtype == torch.float32
    assert read[0, :, 0].tolist() == expected_slots(pages, 0, 7, 4)


KINDS = [("keys", 8), ("keys", 5), ("keys", 4), ("keys", 3), ("values", 8), ("values", 4), ("values", 3)]
EVERY_KIND = pytest.mark.parametrize(("which", "bits"), KINDS)
FORMAT_BITS = [(8, 8), (8, 4), (5, 4), (4, 4), (3, 4), (3, 3)]


def reader_of(which: str, bits: int, head_dim: int) -> Dequantizer:
    """Values have no 5 bits."""
    return Dequantizer(bits, min(bits, 4) if which == "keys" else bits, head_dim, CPU)


HEAD_DIMS = pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 192, 256])


def check(heads: QuantizedHeads, bits: int, head_dim: int, reader: Dequantizer, which: str) -> None:
    if which == "keys":
        expected = dequantize_keys(heads, bits, head_dim)[..., reader.key_order_D]
        assert same_bits(reader.keys(heads), expected)
    else:
        expected = dequantize_values(heads, bits, head_dim)
        assert same_bits(reader.values(heads)[..., reader.value_places_D], expected)


@pytest.mark.each_pair
@EVERY_KIND
@HEAD_DIMS
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (2, 0)], ids=str)
def test_heads_that_were_quantized(which, bits, head_dim, shape):
    y = random(*shape, head_dim, seed=head_dim, scale=3.0)
    quantized = quantize_keys(y, bits) if which == "keys" else quantize_values(y, bits)
    check(quantized, bits, head_dim, reader_of(which, bits, head_dim), which)


@EVERY_KIND
def test_dequantizer_decodes_any_bytes(bits, which):
    """Also those that nothing quantized: every code meets every neighbour."""
    generator = torch.Generator().manual_seed(1)
    num_bytes = {8: 64, 5: 32, 4: 32, 3: 16}[bits]
    codes = torch.randint(0, 256, (7, 700, num_bytes), generator=generator, dtype=torch.uint8)
    if bits == 8:
        codes[codes & 127 == 127] = 0  # NaN, which no product keeps to the bit
    signs = torch.randint(0, 256, (7, 700, 8), generator=generator, dtype=torch.uint8) if bits in (3, 5) else None
    heads = QuantizedHeads(codes, signs, torch.rand(7, 700, generator=generator).half())
    check(heads, bits, 64, reader_of(which, bits, 64), which)


@EVERY_KIND
def test_heads_that_lie_apart(bits, which):
    """As a window leaves them: some tokens in the middle of some pages."""
    y = random(2, 40, 64)
    whole = quantize_keys(y, bits) if which == "keys" else quantize_values(y, bits)
    part = QuantizedHeads(*(None if x is None else x[:, 3:17] for x in whole))
    check(part, bits, 64, reader_of(which, bits, 64), which)


@pytest.mark.parametrize(("key_bits", "value_bits"), FORMAT_BITS)
def test_orders_are_permutations(key_bits, value_bits):
    reader = Dequantizer(key_bits, value_bits, 80, CPU)
    assert sorted(reader.key_order_D.tolist()) == sorted(reader.value_places_D.tolist()) == list(range(80))


@pytest.mark.parametrize(("key_bits", "value_bits"), FORMAT_BITS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_dequantizer_holds_declared_table_bytes(key_bits, value_bits, head_dim):
    reader = Dequantizer(key_bits, value_bits, head_dim, CPU)
    assert reader.num_bytes == code_table_bytes(key_bits, value_bits, head_dim)


def test_dequantizer_nan_scale_gives_nan_row():
    heads = quantize_keys(random(3, 64), 4)
    heads.scale_X[1] = float("nan")
    numbers = Dequantizer(4, 4, 64, CPU).keys(heads)
    assert numbers[1].isnan().all()
    assert numbers[[0, 2]].isfinite().all()


def pages_of(num_slots: int) -> PlainPages:
    return PlainPages(torch.full((num_slots, 1, 4), -7.0), torch.full((num_slots, 1, 4), -7.0), page_tokens=2)


def test_rows_go_to_their_slots_and_padding_nowhere():
    pages = pages_of(6)
    qkv_TX, queries_THD = torch.arange(3 * 16.0).view(3, 16), torch.full((3, 2, 4), 9.0)
    batch = Batch(torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.tensor([[5, 0, -1]]), (), None)
    pages.write(qkv_TX, batch, None, None, queries_THD)
    assert torch.equal(queries_THD[:2], qkv_TX[:2, :8].view(2, 2, 4))
    assert (queries_THD[2] == 0).all(), "the queries of padding are zeros"
    k_plane, v_plane = pages.planes
    assert torch.equal(k_plane[[5, 0], 0], qkv_TX[:2, 8:12])
    assert torch.equal(v_plane[[5, 0], 0], qkv_TX[:2, 12:])
    assert (k_plane[1:5] == -7).all()
    assert (v_plane[1:5] == -7).all()


def test_plain_pages_read_what_was_written():
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


NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 48
FORMATS = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def pages_of_quantized_pages(
    name: str, num_pages: int, page_tokens: int, k_mean: torch.Tensor | None = None
) -> QuantizedPages:
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
    planes = QuantizedPlanes.of(lambda plane: storage.plane(0, plane), *bits, HEAD_DIM, page_tokens, rotation, k_mean)
    return QuantizedPages(planes, Dequantizer(*bits, HEAD_DIM, CPU))


def written(name: str, pages: list[int], num_tokens: int, page_tokens: int) -> tuple[QuantizedPages, torch.Tensor]:
    """A sequence on these pages, and padding behind it; its heads, [L, H + 2 K, D]."""
    quantized = pages_of_quantized_pages(name, max(pages) + 2, page_tokens)
    qkv_TX = random(num_tokens + 2, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    slots = [pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(num_tokens)]
    positions_T = torch.arange(num_tokens + 2)
    batch = Batch(positions_T, positions_T, torch.tensor([[*slots, -1, -1]]), (), None)
    queries_THD = torch.full((num_tokens + 2, NUM_HEADS, HEAD_DIM), float("nan"))
    quantized.write(qkv_TX, batch, None, None, queries_THD)
    assert not queries_THD[num_tokens:].any(), "the queries of padding are zeros"
    heads_LXD = qkv_TX[:num_tokens].view(num_tokens, -1, HEAD_DIM)
    rotates = quantized.planes.rotates_keys
    expected_THD = rotate_heads(heads_LXD[:, :NUM_HEADS]) if rotates else heads_LXD[:, :NUM_HEADS]
    torch.testing.assert_close(queries_THD[:num_tokens], expected_THD)
    return quantized, heads_LXD


@pytest.mark.each_pair
@EVERY_FORMAT
@pytest.mark.parametrize("page_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_quantized_pages_read_any_range_as_quantized(name, page_tokens, consecutive):
    num_tokens = 37
    num_pages = -(-num_tokens // page_tokens)
    pages = list(range(3, 3 + num_pages))
    pages = pages if consecutive else pages[::-1]
    quantized, heads_LXD = written(name, pages, num_tokens, page_tokens)
    k_LKD, v_LKD = heads_LXD[:, NUM_HEADS:].split(NUM_KV_HEADS, dim=1)
    planes, reader = quantized.planes, quantized.reader
    k_LKD = rotate_heads(k_LKD) if planes.rotates_keys else k_LKD
    v_LKD = rotate_heads(v_LKD) if planes.rotates_values else v_LKD
    k_LKD = dequantize_keys(quantize_keys(k_LKD, planes.key_bits), planes.key_bits, HEAD_DIM)
    v_LKD = dequantize_values(quantize_values(v_LKD, planes.value_bits), planes.value_bits, HEAD_DIM)
    for first, end in ((0, num_tokens), (0, 1), (5, 6), (7, 33), (num_tokens - 1, num_tokens)):
        rows = PagedRows.locate(pages, first, end, page_tokens, CPU)
        assert consecutive or page_tokens >= num_tokens or end - first == 1 or rows.pages_P is not None
        k_KlD, v_KlD = quantized.read(rows, torch.float32)
        assert same_bits(k_KlD, k_LKD[first:end].transpose(0, 1)[..., reader.key_order_D])
        assert same_bits(v_KlD[..., reader.value_places_D], v_LKD[first:end].transpose(0, 1))


@EVERY_FORMAT
def test_products_do_not_depend_on_the_order_of_coordinates(name):
    quantized, _ = written(name, [1, 0], 9, 8)
    q_THD = random(5, NUM_HEADS, HEAD_DIM, seed=4)
    k_KLD, v_KLD = quantized.read(PagedRows.locate([1, 0], 0, 9, 8, CPU), torch.float32)
    keys = quantized.planes.keys_at(torch.tensor([1] * 8 + [0]), torch.tensor([*range(8), 0]))
    k_LKD = dequantize_keys(keys, quantized.planes.key_bits, HEAD_DIM)
    scores = torch.einsum("thd,ld->thl", quantized.queries(q_THD), k_KLD[1])
    torch.testing.assert_close(scores, torch.einsum("thd,ld->thl", q_THD, k_LKD[:, 1]))
    values = quantized.planes.values_at(torch.tensor([1] * 8 + [0]), torch.tensor([*range(8), 0]))
    v_LKD = dequantize_values(values, quantized.planes.value_bits, HEAD_DIM)
    v_LKD = rotate_heads(v_LKD) if quantized.planes.rotates_values else v_LKD
    out_TX = v_KLD[1].repeat(1, NUM_HEADS)
    quantized.finish(out_TX)
    torch.testing.assert_close(out_TX, v_LKD[:, 1].repeat(1, NUM_HEADS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_read_and_finished_in_their_type(dtype):
    quantized, _ = written("turboquant_4bit_nc", [0], 3, 4)
    k_KLD, v_KLD = quantized.read(PagedRows.locate([0], 0, 3, 4, CPU), dtype)
    assert k_KLD.dtype == v_KLD.dtype == dtype
    out = v_KLD[0].clone()
    quantized.finish(out)
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_quantized_pages_subtract_k_mean_before_quantizing():
    mean = random(NUM_KV_HEADS, HEAD_DIM, seed=8, scale=20.0)
    pages = [pages_of_quantized_pages("turboquant_4bit_nc", 1, 4, k_mean) for k_mean in (None, mean)]
    qkv_TX = random(1, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    shifted_TX = qkv_TX.clone()
    shifted_TX.view(1, -1, HEAD_DIM)[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS] += rotate_heads(mean)
    zeros = torch.zeros(1, dtype=torch.int64)
    batch = Batch(zeros, zeros, zeros.unsqueeze(0), (), None)
    for quantized, rows_TX in zip(pages, (qkv_TX, shifted_TX), strict=True):
        quantized.write(rows_TX, batch, None, None, torch.empty(1, NUM_HEADS, HEAD_DIM))
    rows = PagedRows.locate([0], 0, 1, 4, CPU)
    left, right = (quantized.read(rows, torch.float32)[0] for quantized in pages)
    torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-3)


def test_pages_for_kernels_are_not_read():
    quantized = pages_of_quantized_pages("turboquant_4bit_nc", 1, 4)
    with pytest.raises(AssertionError, match="made for kernels"):
        QuantizedPages(quantized.planes).read(PagedRows.locate([0], 0, 1, 4, CPU), torch.float32)


MIX = Geometry(windows=5 * (None,), kv_dtype="float32 fp8 turboquant_k8v4 turboquant_3bit_nc float32", page_tokens=16)


def test_grouped_backend_layer_pages_match_their_format():
    pages = GroupedBackend(MIX.specs, MIX.storage(2)).pages
    assert [type(one) for one in pages] == [PlainPages, QuantizedPages, QuantizedPages, QuantizedPages, PlainPages]


def test_rows_go_to_the_planes_of_their_layer():
    made, num_pages = texts(MIX, [20], consecutive=False)
    storage = MIX.storage(num_pages)
    layers = GroupedBackend(MIX.specs, storage)
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
    layers = GroupedBackend(MIX.specs, MIX.storage(2))
    first, second, third = (pages.planes for pages in layers.pages if isinstance(pages, QuantizedPages))
    assert first.rotation_DD.numel() == 0, "8 bits are not rotated"
    assert second.rotation_DD.data_ptr() == third.rotation_DD.data_ptr()
    assert layers.held_bytes() == {"attention/rotation": 17 * 16 * 4}


def test_tables_are_held_where_pages_are_read():
    held = GroupedBackend(MIX.specs, MIX.storage(2), is_read=True).held_bytes()
    assert held.keys() == {"attention/rotation", "attention/dequantize"}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_plain_layers_hold_nothing(kv_dtype):
    geometry = Geometry(kv_dtype=kv_dtype)
    assert GroupedBackend(geometry.specs, geometry.storage(2), is_read=True).held_bytes() == {}


def test_means_and_biases_belong_to_their_layer():
    """Two layers have some, each its own; the tables that turn biases are held once."""
    means = [None, torch.ones(2, 16), torch.zeros(2, 16), None, None]
    turns = make_key_turns(torch.ones(8), 1.0, 64, torch.float32, CPU)
    biases = [None, None, KeyBias(means[1], turns), KeyBias(means[2], turns), None]
    layers = GroupedBackend(MIX.specs, MIX.storage(2), means, key_biases=biases)
    planes = [pages.planes for pages in layers.pages if isinstance(pages, QuantizedPages)]
    for place in range(3):
        assert planes[place].k_mean_KD is means[1 + place]
        assert planes[place].key_bias is biases[1 + place]
    assert layers.held_bytes()["attention/key_bias"] == 2 * 2 * 16 * 4 + turns.num_bytes
    with pytest.raises(ValueError, match="shorter"):
        GroupedBackend(MIX.specs, MIX.storage(2), means[1:2])


def test_grouped_backend_on_write_runs_before_pages_are_written():
    """With its layer, norm and RoPE; queries may then be written over the projection."""
    made, num_pages = texts(MIX, [3], consecutive=True)
    storage = MIX.storage(num_pages)
    layers, seen = GroupedBackend(MIX.specs, storage), []
    batch, qkv_TX = make_batch(MIX, [(made[0], 0, 3)])
    before_TX, norm = qkv_TX.clone(), HeadNorm(torch.ones(16), torch.ones(16), 1e-5)
    planes = [storage.plane(layer, MIX.cache.layers[layer].planes[0].name) for layer in range(5)]

    def note(layer, given_TX, head_norm, rotary):
        assert torch.equal(given_TX, before_TX)
        assert not planes[layer].view(torch.uint8).any()
        seen.append((layer, head_norm, rotary))

    for plane in planes:
        plane.zero_()
    layers.on_write = note
    rotary = Rotary(torch.ones(3, 8), torch.zeros(3, 8))
    for layer, head_norm, turn in ((3, norm, None), (0, None, rotary)):
        queries_THD = qkv_TX.clone().unflatten(1, (-1, 16))[:, :6]
        layers.write(qkv_TX, batch, head_norm, turn, layer, queries_THD)
    layers.on_write = None
    layers.write(qkv_TX, batch, None, None, 0, torch.empty(3, 6, 16))
    assert seen == [(3, norm, None), (0, None, rotary)]


@EVERY_FORMAT
def test_read_adds_the_bias_of_each_position_to_keys(name):
    """Ranges begin in the middle of a page and of a block of positions."""
    pages = [2, 0, 4, 1, 3]
    quantized, _ = written(name, pages, 70, 16)
    reader, frequency_C = quantized.reader, 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    bias_KD = random(NUM_KV_HEADS, HEAD_DIM, seed=8)
    key_bias = KeyBias(bias_KD, make_key_turns(frequency_C, 1.5, 128, torch.float32, CPU))
    biased = QuantizedPages(replace(quantized.planes, key_bias=key_bias), reader)
    pairs_K1C = torch.complex(*bias_KD.double().chunk(2, dim=-1)).unsqueeze(1)
    for first, end in ((0, 70), (62, 67), (69, 70)):
        rows = PagedRows.locate(pages, first, end, 16, CPU)
        angle_LC = torch.outer(torch.arange(first, end).double(), frequency_C.double())
        turned_KLC = pairs_K1C * torch.polar(torch.full_like(angle_LC, 1.5), angle_LC)
        turned_KLD = torch.cat((turned_KLC.real, turned_KLC.imag), dim=-1).float()
        expected_KLD = rotate_heads(turned_KLD) if biased.planes.rotates_keys else turned_KLD
        added_KLD = biased.read(rows, torch.float32)[0] - quantized.read(rows, torch.float32)[0]
        torch.testing.assert_close(added_KLD, expected_KLD[..., reader.key_order_D], rtol=1e-4, atol=1e-4)

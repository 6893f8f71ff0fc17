"""Quantized pages: their layout, what is stored and read back, and the pieces of kernels that find codes and store outputs."""

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.quantized_planes import (
    LEAST_LOG2,
    P_ONE,
    QuantizedPlanes,
    bytes_at,
    key_codes,
    pages_of,
    part_dims,
    slots_of,
    store_parts,
    store_rotated,
)
from holdfast.kernels.triton_compat import constexpr, jit, tl
from holdfast.quant import kv_quantize
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import (
    FP8_MAX,
    VALUE_PARTS,
    hadamard_block,
    hadamard_signs,
    quantize_keys,
    quantize_values,
    rotate_heads,
    rotation_table,
)
from kernels.exactness import random, same_bits
from kernels.quantized_kv_cases import (
    FORMATS,
    HEAD_DIMS,
    POISON_BYTE,
    assert_untouched,
    fill_slots,
    heads_at,
    make_planes,
    tensors_of,
)
from kernels.tiled_cases import BEYOND


def storage_of(name: str, num_kv_heads: int, head_dim: int, num_slots: int) -> dict[str, torch.Tensor]:
    return {
        plane.name: torch.zeros(num_slots, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in KV_FORMATS[name].planes(num_kv_heads, head_dim)
    }


@for_each("name", [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized])
def test_quantized_planes_are_views_of_the_storage_bytes(name):
    kv_format = KV_FORMATS[name]
    assert kv_format.key_bits is not None
    assert kv_format.value_bits is not None
    storage = storage_of(name, 3, 80, 5 * 16)
    bits = kv_format.key_bits, kv_format.value_bits
    planes = QuantizedPlanes.of(storage.__getitem__, *bits, 80, 16, hadamard_signs(80))
    assert (planes.num_kv_heads, planes.page_tokens, planes.head_dim) == (3, 16, 80)
    assert (planes.rotates_keys, planes.rotates_values) == (bits[0] < 8, bits[1] < 8)
    tensors = tensors_of(planes)
    assert tensors.keys() == storage.keys()
    for plane_name, plane in tensors.items():
        assert plane.shape[:3] == (5, 3, 16)
        assert plane.is_contiguous()
        assert plane.data_ptr() == storage[plane_name].data_ptr()
        assert plane.nbytes == storage[plane_name].nbytes
    assert sum(plane.nbytes for plane in tensors.values()) == 5 * 16 * sum(
        plane.bytes_per_token for plane in kv_format.planes(3, 80)
    )


@FORMATS
def test_quantized_planes_keep_tokens_of_a_head_adjacent(key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 2, 32, 4, 3, torch.float32)
    storage = planes.k_codes_PKtB.flatten()
    row = planes.k_codes_PKtB.shape[-1]
    page, head, token = 1, 1, 2
    start = ((page * 2 + head) * 4 + token) * row
    planes.k_codes_PKtB[page, head, token] = torch.arange(row, dtype=torch.uint8)
    assert torch.equal(storage[start : start + row], torch.arange(row, dtype=torch.uint8))


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_quantized_planes_read_back_stored_heads(head_dim, key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 3, head_dim, 4, 3, torch.float32)
    keys = quantize_keys(random(5, 3, head_dim, seed=1), key_bits)
    values = quantize_values(random(5, 3, head_dim, seed=2), value_bits)
    pages, tokens = torch.tensor([2, 0, 0, 2, 1]), torch.tensor([3, 0, 2, 1, 1])
    planes.store(pages, tokens, keys, values)
    for stored, quantized in ((planes.keys_at(pages, tokens), keys), (planes.values_at(pages, tokens), values)):
        for mine, theirs in zip(stored, quantized, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    assert_untouched(planes, pages * 4 + tokens)


def test_quantized_planes_rows_without_slots_store_nothing():
    planes = make_planes(3, 3, 2, 16, 4, 2, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    planes.store(none, none, quantize_keys(torch.empty(0, 2, 16), 3), quantize_values(torch.empty(0, 2, 16), 3))
    assert planes.keys_at(none, none).codes_XB.shape == (0, 2, 4)
    assert_untouched(planes, [])


@FORMATS
def test_quantized_planes_cases_start_as_poison(key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 2, 48, 3, 2, torch.float16)
    assert planes.k_scale_PKt.isnan().all()
    assert planes.v_scale_PKt.isnan().all()
    assert all((plane.view(torch.uint8) == POISON_BYTE).all() for plane in tensors_of(planes).values())
    assert planes.rotation_DD.dtype == torch.float16


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("with_mean", [False, True], ids=["plain", "centered"])
def test_quantized_planes_cases_use_the_space_of_the_layer(with_mean, key_bits, value_bits):
    mean = 20 * random(2, 64, seed=3) if with_mean else None
    planes = make_planes(key_bits, value_bits, 2, 64, 4, 3, torch.float32, k_mean_KD=mean)
    k, v = random(4, 2, 64, seed=1), random(4, 2, 64, seed=2)
    biased = k if mean is None else k + mean
    slots = [7, 0, 11, 4]
    fill_slots(planes, slots, biased, v)
    for back, true, bits, signal in zip(
        heads_at(planes, slots), (biased, v), (key_bits, value_bits), (k, v), strict=True
    ):
        allowed = {8: 0.05, 5: 0.09, 4: 0.16, 3: 0.3}[bits]
        assert ((back - true).norm(dim=-1) <= allowed * signal.norm(dim=-1)).all()
    assert_untouched(planes, slots)
    with pytest.raises(AssertionError, match="belongs to no row"):
        assert_untouched(planes, slots[1:])


BLOCK_N = 64
NAN = float("nan")


def test_quantized_weights_and_scales_fit_half_precision():
    half = torch.finfo(torch.float16)
    assert torch.log2(torch.tensor(half.smallest_normal * half.eps)) == LEAST_LOG2.value
    assert P_ONE.value * 2 <= half.max, "a weight may pass one by a rounding"
    assert P_ONE.value * FP8_MAX * 2**20 < torch.finfo(torch.float32).max / 2**60


@jit
def _slots_kernel(
    p_table, p_slots, p_pages, n, high, i_head, NUM_KV_HEADS: constexpr, PAGE_TOKENS: constexpr, BLOCK_N: constexpr
):
    o_n = tl.arange(0, BLOCK_N)
    page = pages_of(p_table, n, o_n, 0, high, False, PAGE_TOKENS, BLOCK_N)
    tl.store(p_slots + o_n, slots_of(page, i_head, n, o_n, NUM_KV_HEADS, PAGE_TOKENS, BLOCK_N))
    tl.store(p_pages + o_n, tl.zeros((BLOCK_N,), tl.int32) + page)


@for_each("page_tokens", [1, 2, 16, 32, 64, 128, 256])
def test_page_slots_point_at_the_head_of_a_page(device, page_tokens):
    num_kv_heads, high = 3, 300
    num_pages = -(-high // page_tokens)
    pages = torch.randperm(num_pages + 2, generator=torch.Generator().manual_seed(0))[:num_pages]
    table = torch.full((num_pages + BLOCK_N,), BEYOND, dtype=torch.int32)
    table[:num_pages] = pages
    for n in (0, 64, 192, 256):
        slots = torch.full((BLOCK_N,), -1, dtype=torch.int64, device=device)
        followed = torch.full((BLOCK_N,), -1, dtype=torch.int32, device=device)
        grid = (table.to(device), slots, followed, n, high, 1)
        _slots_kernel[(1,)](*grid, NUM_KV_HEADS=num_kv_heads, PAGE_TOKENS=page_tokens, BLOCK_N=BLOCK_N)
        token = torch.arange(n, min(n + BLOCK_N, high))
        expected = (pages[token // page_tokens] * num_kv_heads + 1) * page_tokens + token % page_tokens
        assert torch.equal(slots[: len(token)].cpu(), expected)
        assert followed.max() < num_pages + 2, "a page that is not there was followed"
        assert (slots < (num_pages + 2) * num_kv_heads * page_tokens).all(), "a slot that is not there"


def test_page_slots_past_the_end_read_no_page(device):
    """Pages and scales are read a block ahead, also behind the last one."""
    for page_tokens in (16, 64):
        slots = torch.full((BLOCK_N,), -1, dtype=torch.int64, device=device)
        followed = torch.full((BLOCK_N,), -1, dtype=torch.int32, device=device)
        table = torch.full((BLOCK_N,), BEYOND, dtype=torch.int32, device=device)
        sizes = {"NUM_KV_HEADS": 2, "PAGE_TOKENS": page_tokens, "BLOCK_N": BLOCK_N}
        _slots_kernel[(1,)](table, slots, followed, 128, 128, 1, **sizes)
        assert not followed.any()
        assert slots.min() >= 0
        assert slots.max() < 2 * page_tokens


def test_page_slots_reach_beyond_two_to_the_31(device):
    slots = torch.zeros(BLOCK_N, dtype=torch.int64, device=device)
    table = torch.full((1,), 2**26, dtype=torch.int32, device=device)
    sizes = {"NUM_KV_HEADS": 8, "PAGE_TOKENS": 64, "BLOCK_N": BLOCK_N}
    _slots_kernel[(1,)](table, slots, torch.empty_like(slots, dtype=torch.int32), 0, 64, 7, **sizes)
    assert slots.tolist() == [(2**26 * 8 + 7) * 64 + token for token in range(64)]


@jit
def _dims_kernel(p_dims, NUM_PARTS: constexpr, HEAD_DIM: constexpr, COLUMNS: constexpr):
    o_c = tl.arange(0, COLUMNS)
    for part in tl.static_range(NUM_PARTS):
        o_d = part_dims(o_c, part, NUM_PARTS, HEAD_DIM)
        tl.store(p_dims + part * (HEAD_DIM // NUM_PARTS) + o_c, o_d, mask=o_c < HEAD_DIM // NUM_PARTS)


@for_each("num_parts", [1, 2, 4, 8])
def test_part_coordinates_follow_the_format(device, num_parts):
    for head_dim in HEAD_DIMS:
        dims = torch.full((num_parts, head_dim // num_parts), -1, dtype=torch.int32, device=device)
        _dims_kernel[(1,)](dims, NUM_PARTS=num_parts, HEAD_DIM=head_dim, COLUMNS=256)
        assert torch.equal(dims.cpu().long(), kv_quantize.part_dims(num_parts, head_dim))
        assert dims.flatten().sort().values.tolist() == list(range(head_dim))


@jit
def _bytes_kernel(p, p_out, p_slots, num_tokens, limit, ROW: constexpr, COLUMNS: constexpr, MASKED: constexpr):
    o_n, o_c = tl.arange(0, 16), tl.arange(0, COLUMNS)
    b = bytes_at(p, tl.load(p_slots + o_n), o_c, o_n < num_tokens, limit, ROW, MASKED)
    tl.store(p_out + o_n[:, None] * COLUMNS + o_c[None, :], b)


@pytest.mark.parametrize("row", [10, 16], ids=["narrow", "whole"])
def test_plane_load_reads_bytes_of_its_tokens_only(device, row, guarded):
    plane = guarded(20, row, dtype=torch.uint8)
    plane.copy_(torch.randint(1, 256, (20, row), generator=torch.Generator().manual_seed(0)))
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:16]
    out = guarded(16, 16, dtype=torch.uint8)
    _bytes_kernel[(1,)](plane, out, slots.to(device), 11, row, ROW=row, COLUMNS=16, MASKED=True)
    expected = torch.zeros(16, 16, dtype=torch.uint8)
    expected[:11, :row] = plane.cpu()[slots[:11]]
    assert torch.equal(out.cpu(), expected)
    if row == 16:
        _bytes_kernel[(1,)](plane, out, slots.to(device), 11, row, ROW=row, COLUMNS=16, MASKED=False)
        assert torch.equal(out.cpu(), plane.cpu()[slots])


@jit
def _keys_kernel(
    p_k, p_out, num_tokens, KEY_BITS: constexpr, HEAD_DIM: constexpr, COLUMNS: constexpr, PLAIN: constexpr
):
    o_n, o_c = tl.arange(0, 16), tl.arange(0, COLUMNS)
    b = key_codes(p_k, o_n, o_c, o_n < num_tokens, True, KEY_BITS, HEAD_DIM, PLAIN)
    tl.store(p_out + o_n[:, None] * COLUMNS + o_c[None, :], b.to(tl.int32))


@pytest.mark.parametrize(("bits", "row", "columns"), [(8, 80, 80), (5, 40, 20), (4, 40, 40), (3, 20, 20)])
def test_key_codes_load_as_bytes_or_their_words(device, bits, row, columns, guarded):
    plane = guarded(16, row, dtype=torch.uint8)
    plane.copy_(torch.randint(1, 256, plane.shape, generator=torch.Generator().manual_seed(bits)))
    for plain in (False, True):
        out = guarded(16, 128, dtype=torch.int32)
        _keys_kernel[(1,)](plane, out, 11, KEY_BITS=bits, HEAD_DIM=80, COLUMNS=128, PLAIN=plain)
        codes = plane.cpu()[:11]
        if plain and bits < 8:
            codes = codes.view(torch.int32).repeat_interleave(4, dim=1)
        expected = torch.zeros(16, 128, dtype=torch.int32)
        expected[:11, :columns] = codes[:, :columns]
        assert torch.equal(out.cpu(), expected)


@jit
def _store_kernel(
    p_acc,
    p_scale,
    p_rotation,
    p_out,
    p_places,
    rotation_scale,
    num_columns,
    ROTATED: constexpr,
    VALUE_BITS: constexpr,
    HEAD_DIM: constexpr,
    VALUE_COLUMNS: constexpr,
    BLOCK_G: constexpr,
    BLOCK_D: constexpr,
):
    """Sums [part, column, query]; queries go to places of their own, and those from `num_columns` on nowhere."""
    o_g, o_c = tl.arange(0, BLOCK_G), tl.arange(0, VALUE_COLUMNS)
    p_part = p_acc + o_c[:, None] * BLOCK_G + o_g[None, :]
    PART: constexpr = VALUE_COLUMNS * BLOCK_G
    b_0, b_1 = tl.load(p_part), tl.load(p_part + PART)
    if VALUE_BITS == 8:
        b_acc = (b_0, b_1)
    else:
        b_2, b_3 = tl.load(p_part + 2 * PART), tl.load(p_part + 3 * PART)
        if VALUE_BITS == 4:
            b_acc = (b_0, b_1, b_2, b_3)
        else:
            b_4, b_5 = tl.load(p_part + 4 * PART), tl.load(p_part + 5 * PART)
            b_acc = (b_0, b_1, b_2, b_3, b_4, b_5, tl.load(p_part + 6 * PART), tl.load(p_part + 7 * PART))
    b_scale = tl.load(p_scale + o_g)
    o_q = tl.load(p_places + o_g) * HEAD_DIM
    m_g = o_g < num_columns
    if ROTATED:
        store_rotated(
            b_acc,
            b_scale,
            rotation_scale,
            p_rotation,
            p_out,
            o_q,
            m_g,
            VALUE_BITS,
            HEAD_DIM,
            VALUE_COLUMNS,
            BLOCK_D,
        )
    else:
        store_parts(b_acc, b_scale, p_out, o_q, m_g, VALUE_BITS, HEAD_DIM, VALUE_COLUMNS)


@pytest.mark.each_value
@pytest.mark.parametrize("rotated", [False, True], ids=["parts", "rotated"])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 112, 128, 256], ids=lambda size: f"D{size}")
def test_part_sums_store_to_their_coordinates(device, head_dim, bits, rotated, guarded):
    """Columns that no part has, and queries that are not there, are not written."""
    num_parts, num_columns, block_g = VALUE_PARTS[bits], 6, 8
    columns = max(16, 1 << (head_dim // num_parts - 1).bit_length())
    sums = random(num_columns, head_dim, seed=head_dim)
    scale = torch.ones(block_g)
    scale[:num_columns] = random(num_columns).abs()
    acc = torch.full((num_parts, columns, block_g), 1e3)  # what is no number of a head is a number still
    acc[:, : head_dim // num_parts, :num_columns] = sums[:, kv_quantize.part_dims(num_parts, head_dim)].movedim(0, -1)
    out = guarded(7, head_dim, dtype=torch.float16 if rotated else torch.float32).fill_(NAN)
    places = [3, 0, 6, 1, 5, 2, BEYOND, BEYOND]
    _store_kernel[(1,)](
        acc.to(device),
        scale.to(device),
        rotation_table(head_dim, torch.float16, device),
        out,
        torch.tensor(places, device=device),
        hadamard_block(head_dim) ** -0.5,
        num_columns,
        ROTATED=rotated,
        VALUE_BITS=bits,
        HEAD_DIM=head_dim,
        VALUE_COLUMNS=columns,
        BLOCK_G=block_g,
        BLOCK_D=max(16, 1 << (head_dim - 1).bit_length()),
        num_warps=1,
    )
    assert out[4].isnan().all(), "a place of no query"
    scaled, result = sums * scale[:num_columns, None], out[places[:num_columns]].cpu()
    if not rotated:
        assert same_bits(result, scaled)
        return
    expected = rotate_heads(scaled) if bits < 8 else scaled
    torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-3)

import pytest
import torch

from holdfast.kernels.attention.quantized_planes import CodedPlanes
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import encode_keys, encode_values, hadamard_signs
from kernels.coded_cases import (
    FORMATS,
    HEAD_DIMS,
    POISON_BYTE,
    assert_untouched,
    fill_slots,
    heads_at,
    make_planes,
    tensors_of,
)
from kernels.exactness import random


def storage_of(name: str, num_kv_heads: int, head_dim: int, num_slots: int) -> dict[str, torch.Tensor]:
    return {
        plane.name: torch.zeros(num_slots, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        for plane in KV_FORMATS[name].planes(num_kv_heads, head_dim)
    }


@pytest.mark.parametrize("name", [name for name, kv_format in KV_FORMATS.items() if kv_format.is_coded])
def test_planes_are_the_bytes_of_the_storage(name):
    kv_format = KV_FORMATS[name]
    assert kv_format.key_bits is not None
    assert kv_format.value_bits is not None
    storage = storage_of(name, 3, 80, 5 * 16)
    bits = kv_format.key_bits, kv_format.value_bits
    planes = CodedPlanes.of(storage.__getitem__, *bits, 80, 16, hadamard_signs(80))
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
def test_tokens_of_a_head_are_neighbours_within_a_page(key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 2, 32, 4, 3, torch.float32)
    storage = planes.k_codes_PKtB.flatten()
    row = planes.k_codes_PKtB.shape[-1]
    page, head, token = 1, 1, 2
    start = ((page * 2 + head) * 4 + token) * row
    planes.k_codes_PKtB[page, head, token] = torch.arange(row, dtype=torch.uint8)
    assert torch.equal(storage[start : start + row], torch.arange(row, dtype=torch.uint8))


@FORMATS
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_what_is_stored_is_found_again(head_dim, key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 3, head_dim, 4, 3, torch.float32)
    keys = encode_keys(random(5, 3, head_dim, seed=1), key_bits)
    values = encode_values(random(5, 3, head_dim, seed=2), value_bits)
    pages, tokens = torch.tensor([2, 0, 0, 2, 1]), torch.tensor([3, 0, 2, 1, 1])
    planes.store(pages, tokens, keys, values)
    for stored, coded in ((planes.keys_at(pages, tokens), keys), (planes.values_at(pages, tokens), values)):
        for mine, theirs in zip(stored, coded, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    assert_untouched(planes, pages * 4 + tokens)


def test_nothing_is_stored_where_there_is_nothing():
    planes = make_planes(3, 3, 2, 16, 4, 2, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    planes.store(none, none, encode_keys(torch.empty(0, 2, 16), 3), encode_values(torch.empty(0, 2, 16), 3))
    assert planes.keys_at(none, none).codes_XB.shape == (0, 2, 4)
    assert_untouched(planes, [])


@FORMATS
def test_cases_start_as_poison(key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 2, 48, 3, 2, torch.float16)
    assert planes.k_scale_PKt.isnan().all()
    assert planes.v_scale_PKt.isnan().all()
    assert all((plane.view(torch.uint8) == POISON_BYTE).all() for plane in tensors_of(planes).values())
    assert planes.rotation_DD.dtype == torch.float16


@FORMATS
@pytest.mark.parametrize("with_mean", [False, True], ids=["plain", "centered"])
def test_cases_are_filled_and_read_in_the_layers_own_space(with_mean, key_bits, value_bits):
    mean = 20 * random(2, 64, seed=3) if with_mean else None
    planes = make_planes(key_bits, value_bits, 2, 64, 4, 3, torch.float32, k_mean_KD=mean)
    k, v = random(4, 2, 64, seed=1), random(4, 2, 64, seed=2)
    biased = k if mean is None else k + mean
    slots = [7, 0, 11, 4]
    fill_slots(planes, slots, biased, v)
    for back, true, bits, signal in zip(
        heads_at(planes, slots), (biased, v), (key_bits, value_bits), (k, v), strict=True
    ):
        allowed = {8: 0.05, 4: 0.16, 3: 0.3}[bits]
        assert ((back - true).norm(dim=-1) <= allowed * signal.norm(dim=-1)).all()
    assert_untouched(planes, slots)
    with pytest.raises(AssertionError, match="belongs to no row"):
        assert_untouched(planes, slots[1:])

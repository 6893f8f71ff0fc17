"""Near rows, which a write into quantized pages stores beside codes: what the codes encode, before it is quantized."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import turned_heads
from holdfast.kernels.attention.write_quantized_kv import (
    NearWrite,
    write_quantized_kv,
    write_quantized_kv_reference,
    write_quantized_kv_triton,
)
from holdfast.quant.kv_quantize import hadamard_block, hadamard_signs
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.head_cases import Case, make_case
from kernels.quantized_kv_cases import BITS, FORMATS, HEAD_DIMS, make_planes, tensors_of
from kernels.triton_cases import DTYPES, QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

NAN = float("nan")
NUM_SLOTS = 24
POSITIONS = [130, 63, 3, 1000]
"""Positions of rows, over several blocks of the turns of a bias."""


def frequency_of(head_dim: int) -> torch.Tensor:
    return 0.6 ** torch.arange(head_dim // 2)


def turned_bias(bias: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """[T, K, D] in float64: pairs as complex numbers that positions turn."""
    first, second = bias.double().chunk(2, dim=-1)
    angle = torch.outer(torch.tensor(positions).double(), frequency_of(bias.shape[-1]).double()).unsqueeze(1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def write(function, case: Case, bits, device, near_slots, has_bias=False, mean=None, with_near=True):
    """Near planes of NaN amid red zones; returns them, the planes of codes, and the queries."""
    zones = RedZones(torch.device(device))
    _, num_kv_heads, head_dim = case.k_plane.shape
    dtype = case.qkv.dtype
    planes = make_planes(*bits, num_kv_heads, head_dim, 4, 16, dtype, device, zones, mean)
    if has_bias:
        turns = make_key_turns(frequency_of(head_dim), 1.0, 1001, dtype, device)
        planes = replace(planes, key_bias=KeyBias(random(num_kv_heads, head_dim, seed=4, scale=9.0).to(device), turns))
    near_k, near_v = (zones.allocate(NUM_SLOTS, num_kv_heads, head_dim, dtype=dtype).fill_(NAN) for _ in range(2))
    positions = torch.tensor(POSITIONS[: len(case.slots)], device=device)
    near = NearWrite(torch.tensor(near_slots, device=device), positions, near_k, near_v) if with_near else None
    moved = case.on(device)
    q = function(moved.qkv, moved.slots, planes, moved.head_norm, moved.rotary, None, near)
    zones.check()
    return near_k.cpu(), near_v.cpu(), planes, q.cpu()


def exact_near(case: Case, bits, mean=None, has_bias=False) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all rows in float64, from rows as the projection has them."""
    exact = case.rounded(torch.float64)
    _, num_kv_heads, head_dim = case.k_plane.shape
    _, k, v = turned_heads(exact.qkv, num_kv_heads, head_dim, exact.head_norm, exact.rotary)
    if has_bias:
        k = k + turned_bias(random(num_kv_heads, head_dim, seed=4, scale=9.0), POSITIONS[: len(k)])
    k, v = (rotate_exactly(x) if head_bits < 8 else x for x, head_bits in zip((k, v), bits, strict=True))
    if mean is not None:
        k = k - (rotate_exactly(mean.double()) if bits[0] < 8 else mean.double())
    return k, v


def rotate_exactly(x: torch.Tensor) -> torch.Tensor:
    head_dim = x.shape[-1]
    return x @ hadamard_signs(head_dim).double() * hadamard_block(head_dim) ** -0.5


def judge(case: Case, bits, device, near_slots, has_bias=False, mean=None) -> None:
    """The kernel and the reference against float64; no slot beside those is written."""
    mine = write(write_quantized_kv_triton, case, bits, device, near_slots, has_bias, mean)
    theirs = write(write_quantized_kv_reference, case, bits, "cpu", near_slots, has_bias, mean)
    stored = [row for row, slot in enumerate(near_slots) if slot >= 0]
    slots = [near_slots[row] for row in stored]
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for kernel, in_torch, exact in zip(mine[:2], theirs[:2], exact_near(case, bits, mean, has_bias), strict=True):
        assert_as_exact_as_torch(kernel[slots], in_torch[slots], exact[stored])
        error = (in_torch[slots].double() - exact[stored]).norm() / exact[stored].norm()
        assert error < 8 * torch.finfo(case.qkv.dtype).eps, f"{error=}"
        assert kernel[others].isnan().all(), "a slot was written that belongs to no row"
        assert in_torch[others].isnan().all()


@pytest.mark.each_value
@DTYPES
@FORMATS
def test_write_near_rows_are_what_codes_encode(device, key_bits, value_bits, dtype):
    judge(make_case(3, 64).rounded(dtype), (key_bits, value_bits), device, [5, -1, 23])


@for_each("head_dim", HEAD_DIMS)
def test_write_near_rows_take_every_head_dim(device, head_dim):
    judge(make_case(1, head_dim, with_norm=False), (4, 4), device, [0])


@for_each("group, num_kv_heads", [(1, 12), (3, 5), (71, 1)])
def test_write_near_rows_take_every_grouping(device, group, num_kv_heads):
    judge(make_case(2, 32, group, num_kv_heads), (8, 3), device, [23, 0])


@pytest.mark.parametrize("bits", [(8, 8), (3, 4)], ids=["k8v8", "k3v4"])
@pytest.mark.parametrize("with_mean", [True, False], ids=["mean", "as they are"])
def test_write_near_keys_have_the_bias_that_codes_leave_out(device, bits, with_mean):
    mean = random(2, 48, seed=6) if with_mean else None
    for dtype in (torch.float32, torch.float16):
        case = make_case(4, 48, group=1, with_norm=False).rounded(dtype)
        judge(case, bits, device, [9, 3, -1, 22], has_bias=True, mean=mean)


@for_each("has_bias", [True, False])
def test_write_near_rows_change_no_code_and_no_query(device, has_bias):
    """Also where a row has a slot for a code and none here, or the reverse."""
    for function in (write_quantized_kv_triton, write_quantized_kv_reference):
        case, mean = make_case(3, 32, group=2, with_norm=False).padded([2]), random(2, 32, seed=7)
        *_, planes, q = write(function, case, (3, 4), device, [4, -1, 7], has_bias, mean)
        *_, other_planes, other_q = write(function, case, (3, 4), device, [4, -1, 7], has_bias, mean, with_near=False)
        assert same_bits(q, other_q)
        others = tensors_of(other_planes)
        for name, plane in tensors_of(planes).items():
            assert torch.equal(plane.view(torch.uint8), others[name].view(torch.uint8)), name


def test_write_near_rows_refuse_planes_of_other_shapes(device):
    case = make_case(2, 32).on(device)
    planes: QuantizedPlanes = make_planes(4, 4, 2, 32, 4, 4, torch.float32, device)
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    plane = torch.zeros(8, 2, 32, device=device)
    for wrong, message in ((plane[:, :1], "heads of"), (plane[::2], "side by side")):
        near = NearWrite(numbers, numbers, plane, wrong)
        with pytest.raises(AssertionError, match=message):
            write_quantized_kv_triton(case.qkv, case.slots, planes, None, case.rotary, None, near)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS, ids=str)
def test_write_near_rows_allocate_nothing(device, bits):
    case = make_case(5, 128, with_norm=False).rounded(torch.bfloat16).on(device)
    planes = make_planes(*bits, 2, 128, 16, 1, torch.bfloat16, device)
    near_planes = torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16, device=device)
    near = NearWrite(case.slots, case.slots, near_planes[0], near_planes[1])
    out = torch.empty(5, 6, 128, dtype=torch.bfloat16, device=device)
    rows = case.qkv, case.slots
    assert_allocates_nothing(lambda: write_quantized_kv(*rows, planes, None, case.rotary, out, near))

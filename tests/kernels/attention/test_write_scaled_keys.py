"""Keys times a scale by pair, and queries divided by it, in the write into quantized pages: codes, near rows and queries."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import turned_heads
from holdfast.kernels.attention.write_quantized_kv import (
    NearWrite,
    write_quantized_kv_reference,
    write_quantized_kv_triton,
)
from holdfast.quant.kv_quantize import hadamard_block, hadamard_signs
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.head_cases import Case, make_case
from kernels.quantized_kv_cases import HEAD_DIMS, make_planes, tensors_of
from kernels.triton_cases import DTYPES, QUIET, amid_poison
from red_zones import RedZones

pytestmark = QUIET

FUNCTIONS = write_quantized_kv_reference, write_quantized_kv_triton
NAN = float("nan")
NUM_SLOTS = 24
POSITIONS = [130, 63, 3, 1000]


def pair_scales(num_kv_heads: int, head_dim: int, is_power: bool) -> torch.Tensor:
    """Different numbers between 1/8 and 8 for all heads and pairs; powers of two change no rounding."""
    logs = torch.linspace(-3, 3, num_kv_heads * head_dim // 2).view(num_kv_heads, -1)
    scale = (2.0 ** (logs.round() if is_power else logs)).repeat(1, 2)
    return torch.stack((scale, 1 / scale))


def write(function, case: Case, bits, scales=None, device="cpu", bias=None, mean=None):
    """The planes, the near keys and the queries of a write amid poison; rows of the scales too."""
    zones = RedZones(torch.device(device))
    _, num_kv_heads, head_dim = case.k_plane.shape
    dtype = case.qkv.dtype
    planes = make_planes(*bits, num_kv_heads, head_dim, 4, 16, dtype, device, zones, mean)
    if scales is not None:
        alone = amid_poison(scales.reshape(1, -1), device).view(scales.shape)
        planes = replace(planes, pair_scale_2KD=alone)
    if bias is not None:
        turns = make_key_turns(0.6 ** torch.arange(head_dim // 2), 1.0, 1001, dtype, device)
        planes = replace(planes, key_bias=KeyBias(bias.to(device), turns))
    near_k, near_v = (zones.allocate(NUM_SLOTS, num_kv_heads, head_dim, dtype=dtype).fill_(NAN) for _ in range(2))
    slots = torch.arange(len(case.slots), device=device)
    near = NearWrite(slots, torch.tensor(POSITIONS[: len(slots)], device=device), near_k, near_v)
    moved = case.on(device)
    q = function(moved.qkv, moved.slots, planes, moved.head_norm, moved.rotary, None, near)
    zones.check()
    return planes, near_k[: len(slots)].cpu(), q.cpu()


def scaled_rows(case: Case, scales: torch.Tensor) -> Case:
    """Rows whose queries and keys have their factors already: right without a norm."""
    _, num_kv_heads, head_dim = case.k_plane.shape
    q, k, v = case.qkv.unflatten(1, (-1, head_dim)).split((case.num_heads, num_kv_heads, num_kv_heads), dim=1)
    inverse = scales[1].repeat_interleave(case.num_heads // num_kv_heads, dim=0)
    heads = torch.cat((q * inverse, k * scales[0], v), dim=1)
    return replace(case, qkv=heads.to(case.qkv.dtype).flatten(1))


def assert_same_codes(mine: QuantizedPlanes, theirs: QuantizedPlanes) -> None:
    others = tensors_of(theirs)
    for name, plane in tensors_of(mine).items():
        assert torch.equal(plane.view(torch.uint8), others[name].view(torch.uint8)), name


def judge_powers(case: Case, bits, device) -> None:
    """By powers of two the scale commutes with RoPE to the bit: the same codes, near keys and queries as of scaled rows."""
    _, num_kv_heads, head_dim = case.k_plane.shape
    scales = pair_scales(num_kv_heads, head_dim, is_power=True)
    for function, place in zip(FUNCTIONS, ("cpu", device), strict=True):
        planes, near_k, q = write(function, case, bits, scales, place)
        other_planes, other_k, other_q = write(function, scaled_rows(case, scales), bits, device=place)
        assert same_bits(q, other_q)
        assert same_bits(near_k, other_k)
        assert_same_codes(planes, other_planes)


@DTYPES
@pytest.mark.parametrize("bits", [(4, 4), (3, 4), (3, 3)], ids=["k4v4", "k3v4", "k3v3"])
def test_write_scaled_keys_powers_of_two_equal_scaled_rows(device, bits, dtype):
    judge_powers(make_case(3, 64, with_norm=False).rounded(dtype).padded([1]), bits, device)


@for_each("head_dim", HEAD_DIMS)
def test_write_scaled_keys_take_every_head_dim(device, head_dim):
    judge_powers(make_case(1, head_dim, with_norm=False), (4, 4), device)


@for_each("group, num_kv_heads", [(1, 12), (3, 5), (71, 1), (9, 3)])
def test_write_scaled_keys_each_query_has_the_scale_of_its_key_head(device, group, num_kv_heads):
    judge_powers(make_case(2, 32, group, num_kv_heads, with_norm=False), (3, 4), device)


@for_each("with_rope", [True, False])
def test_write_scaled_keys_follow_the_norm(device, with_rope):
    """Near keys and queries of any scale, against float64; bias and mean are those of scaled keys."""
    for dtype, with_norm in ((torch.float32, True), (torch.float16, False)):
        case = make_case(4, 48, group=2, with_norm=with_norm, with_rope=with_rope).rounded(dtype)
        mean = random(2, 48, seed=6)
        bias = None if with_norm else random(2, 48, seed=4, scale=9.0)
        scales = pair_scales(2, 48, is_power=False)
        exact_k, exact_q = exact_rows(case, scales, bias, mean)
        _, near_k, q = write(write_quantized_kv_triton, case, (4, 4), scales, device, bias, mean)
        _, torch_k, torch_q = write(write_quantized_kv_reference, case, (4, 4), scales, "cpu", bias, mean)
        assert_as_exact_as_torch(near_k, torch_k, exact_k)
        assert_as_exact_as_torch(q, torch_q, exact_q)
        for found, exact in ((torch_k, exact_k), (torch_q, exact_q)):
            assert (found.double() - exact).norm() < 8 * torch.finfo(dtype).eps * exact.norm()


def exact_rows(case: Case, scales, bias, mean) -> tuple[torch.Tensor, torch.Tensor]:
    """Near keys and queries in float64."""
    exact = case.rounded(torch.float64)
    _, num_kv_heads, head_dim = case.k_plane.shape
    q, k, _ = turned_heads(exact.qkv, num_kv_heads, head_dim, exact.head_norm, exact.rotary)
    rotation = hadamard_signs(head_dim).double() * hadamard_block(head_dim) ** -0.5
    k = k * scales[0].double()
    if bias is not None:
        first, second = bias.double().chunk(2, dim=-1)
        frequency = (0.6 ** torch.arange(head_dim // 2)).double()
        angle = torch.outer(torch.tensor(POSITIONS[: len(k)]).double(), frequency).unsqueeze(1)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        k = k + torch.cat((turned.real, turned.imag), dim=-1)
    q = q * scales[1].double().repeat_interleave(case.num_heads // num_kv_heads, dim=0)
    return k @ rotation - mean.double() @ rotation, q @ rotation


def test_write_scaled_keys_of_eight_bits_are_refused(device):
    case = make_case(2, 32, with_norm=False).on(device)
    planes = make_planes(8, 4, 2, 32, 4, 2, torch.float32, device)
    planes = replace(planes, pair_scale_2KD=torch.ones(2, 2, 32, device=device))
    with pytest.raises(AssertionError, match="no pair scale"):
        write_quantized_kv_triton(case.qkv, case.slots, planes, None, case.rotary)

"""RoPE of a part of each head, and queries with gates between them: the write into plain and quantized pages."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.key_bias import KeyBias, make_key_turns
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import (
    Rotary,
    in_pair_order,
    turned_heads,
    write_kv,
    write_kv_reference,
    write_kv_triton,
)
from holdfast.kernels.attention.write_quantized_kv import (
    NearWrite,
    write_quantized_kv_reference,
    write_quantized_kv_triton,
)
from holdfast.quant.kv_quantize import dequantize_keys, dequantize_values, rotate_heads
from kernels.exactness import assert_as_exact_as_torch, companies, island, random, same_bits
from kernels.head_cases import POISON, Case, make_case
from kernels.quantized_kv_cases import make_planes, tensors_of
from kernels.triton_cases import DTYPES, QUIET, amid_poison
from red_zones import RedZones

pytestmark = QUIET

SHAPES = [(16, 4), (24, 2), (24, 22), (64, 16), (80, 20), (96, 72), (128, 32), (256, 64)]
"""Head dims, and elements of a head that RoPE turns: a quarter, most, all but two; halves inside a quarter and across."""
SOME = [(16, 4), (64, 16), (96, 72)]
POSITIONS = torch.tensor([130, 63, 3, 1000])


def partial(num_rows: int, head_dim: int, rope_dim: int, group=3, num_kv_heads=2, with_norm=True) -> Case:
    case = make_case(num_rows, head_dim, group, num_kv_heads, with_norm)
    angles = torch.rand(num_rows, rope_dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    return replace(case, rotary=Rotary(angles.cos(), angles.sin()))


def gated(case: Case) -> torch.Tensor:
    """The rows with a gate of poison after each query head: no write may read one."""
    _, num_kv_heads, head_dim = case.k_plane.shape
    heads = case.qkv.unflatten(1, (-1, head_dim))
    q, kv = heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads :]
    return torch.cat((torch.stack((q, torch.full_like(q, POISON)), dim=2).flatten(1, 2), kv), dim=1).flatten(1)


def exact_heads(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in float64: the norm by its formula, pairs of RoPE as complex numbers."""
    _, num_kv_heads, head_dim = case.k_plane.shape
    heads = case.qkv.double().unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    norm, rotary = case.head_norm, case.rotary
    if norm is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (weight.double() + norm.offset)
            for x, weight in ((q, norm.q_weight_D), (k, norm.k_weight_D))
        )
    assert rotary is not None
    pairs = rotary.cos_TP.shape[1]
    turn = torch.complex(rotary.cos_TP.double(), rotary.sin_TP.double()).unsqueeze(1)
    turned = []
    for x in (q, k):
        pair = torch.complex(x[..., :pairs].contiguous(), x[..., pairs : 2 * pairs].contiguous()) * turn
        turned.append(torch.cat((pair.real, pair.imag, x[..., 2 * pairs :]), dim=-1))
    return *turned, v


def judge(case: Case, function, device="cpu", query_step: int = 1) -> None:
    """Against float64; in memory amid poison, with red zones."""
    zones, dtype = RedZones(torch.device(device)), case.qkv.dtype
    num_slots, num_kv_heads, head_dim = case.k_plane.shape
    planes = [zones.allocate(num_slots, num_kv_heads, head_dim, dtype=dtype).fill_(POISON) for _ in range(2)]
    out = zones.allocate(len(case.slots), case.num_heads, head_dim, dtype=dtype).fill_(POISON)
    rows, moved = case.qkv if query_step == 1 else gated(case), case.on(torch.device(device))
    qkv = island(rows) if function is write_kv else amid_poison(rows, device)
    function(qkv, moved.slots, *planes, moved.head_norm, moved.rotary, out, query_step)
    zones.check()
    used = case.slots >= 0
    q, k, v = exact_heads(case)
    expected = turned_heads(case.qkv, num_kv_heads, head_dim, case.head_norm, case.rotary)
    assert_as_exact_as_torch(out.cpu()[used], expected[0][used], q[used])
    assert_as_exact_as_torch(planes[0].cpu()[case.slots[used]], expected[1][used], k[used])
    assert same_bits(planes[1].cpu()[case.slots[used]].double(), v[used])
    assert not out.cpu()[~used].any()
    unused = torch.ones(num_slots, dtype=torch.bool)
    unused[case.slots[used]] = False
    assert planes[0].cpu()[unused].isnan().all()


@for_each("head_dim, rope_dim", SHAPES)
def test_turned_heads_rotates_first_elements_only(head_dim, rope_dim):
    case = partial(5, head_dim, rope_dim)
    for found, exact in zip(
        turned_heads(case.qkv, 2, head_dim, case.head_norm, case.rotary), exact_heads(case), strict=True
    ):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@for_each("query_step", [1, 2])
@for_each("head_dim, rope_dim", SHAPES)
def test_native_write_kv_rotates_part_of_head(native, head_dim, rope_dim, query_step):
    for num_rows in (1, 17):
        judge(partial(num_rows, head_dim, rope_dim), write_kv, query_step=query_step)
    judge(partial(4, head_dim, rope_dim, with_norm=False), write_kv, query_step=query_step)


@DTYPES
@pytest.mark.parametrize("query_step", [1, 2])
@pytest.mark.parametrize(("head_dim", "rope_dim"), SOME)
def test_write_kv_triton_rotates_part_of_head(device, head_dim, rope_dim, query_step, dtype):
    judge(partial(3, head_dim, rope_dim).rounded(dtype).padded([1]), write_kv_triton, device, query_step)


@for_each("head_dim, rope_dim", [shape for shape in SHAPES if shape not in SOME])
def test_write_kv_triton_takes_any_part(device, head_dim, rope_dim):
    judge(partial(1, head_dim, rope_dim, group=1, num_kv_heads=3, with_norm=False), write_kv_triton, device, 2)


@for_each("function", [write_kv, write_kv_reference, write_kv_triton])
def test_write_kv_unturned_elements_keep_their_bits(device, function):
    """Infinities too, whose product with a sine of zero would be NaN."""
    case = partial(2, 64, 16, with_norm=False)
    case.qkv[1].unflatten(0, (-1, 64))[:, 20] = float("inf")
    moved = case.on(device if function is write_kv_triton else torch.device("cpu"))
    q = function(moved.qkv, moved.slots, moved.k_plane, moved.v_plane, None, moved.rotary)
    heads = case.qkv.unflatten(1, (-1, 64))
    assert same_bits(q[..., 16:].cpu().contiguous(), heads[:, :6, 16:])
    assert same_bits(moved.k_plane.cpu()[case.slots][..., 16:], heads[:, 6:8, 16:])


@for_each("function", [write_kv, write_kv_reference])
def test_write_kv_gated_rows_are_batch_invariant(function):
    case = partial(33, 64, 16)
    case.qkv = gated(case)

    def run(rows):
        planes = case.k_plane.clone(), case.v_plane.clone()
        q = function(case.qkv[rows], case.slots[rows], *planes, case.head_norm, case.rotary.at(rows), None, 2)
        return q, planes[0][case.slots[rows]]

    whole = run(list(range(33)))
    for rows in [[row] for row in range(33)] + list(companies(33)):
        assert all(same_bits(mine, theirs[rows]) for mine, theirs in zip(run(rows), whole, strict=True)), f"{rows=}"


def test_write_kv_refuses_rope_wider_than_head(device):
    case = partial(2, 16, 4)
    wide = Rotary(*torch.ones(2, 2, 9).unbind())
    with pytest.raises(AssertionError, match="RoPE of 18 elements"):
        write_kv_triton(case.qkv, case.slots, case.k_plane, case.v_plane, None, wide)
    with pytest.raises(AssertionError, match="2 for each query"):
        write_kv_triton(case.qkv[:, 16:], case.slots, case.k_plane, case.v_plane, None, None, None, 2)


def test_in_pair_order_pairs_elements_that_rope_turns():
    for head_dim, rope_dim in SHAPES:
        order, half, pairs = in_pair_order(torch.arange(head_dim), rope_dim), head_dim // 2, rope_dim // 2
        assert sorted(order.tolist()) == list(range(head_dim))
        assert order[:pairs].tolist() == list(range(pairs))
        assert order[half : half + pairs].tolist() == list(range(pairs, rope_dim))
    whole = torch.arange(24)
    assert in_pair_order(whole, 24) is whole


def write_quantized(function, case: Case, bits, device, query_step=1, scales=None, bias=None, mean=None, rope_dim=0):
    """Planes, near keys and queries of a write amid poison."""
    zones = RedZones(torch.device(device))
    _, num_kv_heads, head_dim = case.k_plane.shape
    dtype, num_rows = case.qkv.dtype, len(case.slots)
    planes = make_planes(*bits, num_kv_heads, head_dim, 4, 16, dtype, device, zones, mean)
    if scales is not None:
        planes = replace(planes, pair_scale_2KD=scales.to(device))
    if bias is not None:
        turns = make_key_turns(frequency_of(rope_dim), 1.25, 1001, dtype, device, head_dim // 2)
        planes = replace(planes, key_bias=KeyBias(bias.to(device), turns))
    near = [zones.allocate(num_rows, num_kv_heads, head_dim, dtype=dtype).fill_(POISON) for _ in range(2)]
    near_write = NearWrite(torch.arange(num_rows, device=device), POSITIONS[:num_rows].to(device), *near)
    rows, moved = case.qkv if query_step == 1 else gated(case), case.on(torch.device(device))
    q = function(
        amid_poison(rows, device), moved.slots, planes, moved.head_norm, moved.rotary, None, near_write, query_step
    )
    zones.check()
    return planes, near[0].cpu(), q.cpu()


def frequency_of(rope_dim: int) -> torch.Tensor:
    return 0.6 ** torch.arange(rope_dim // 2)


def keys_of(planes: QuantizedPlanes, case: Case) -> torch.Tensor:
    """Stored keys in pair order, rotated back and with their mean."""
    places = case.slots // planes.page_tokens, case.slots % planes.page_tokens
    k = dequantize_keys(planes.keys_at(*places), planes.key_bits, planes.head_dim)
    k = k if planes.k_mean_KD is None else k + planes.k_mean_KD
    return rotate_heads(k) if planes.rotates_keys else k


ERRORS = {8: 0.04, 5: 0.09, 4: 0.16, 3: 0.3}
"""Error of a quantized head of normal numbers relative to its norm."""


@for_each("bits", [(8, 8), (8, 4), (5, 4), (4, 4), (3, 4), (3, 3)])
@for_each("head_dim, rope_dim", [(16, 4), (32, 24), (80, 20), (256, 64)])
def test_write_quantized_kv_reference_holds_partly_turned_keys(head_dim, rope_dim, bits):
    """Codes are near the true heads in pair order, near rows and queries equal them, and so scores stay."""
    case = partial(4, head_dim, rope_dim)
    for query_step in (1, 2):
        planes, near_k, q = write_quantized(write_quantized_kv_reference, case, bits, "cpu", query_step)
        exact_q, exact_k, exact_v = exact_heads(case)
        own_k, own_q = (rotate_heads(x) if bits[0] < 8 else x for x in (near_k, q))
        torch.testing.assert_close(own_k.double(), in_pair_order(exact_k, rope_dim), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own_q.double(), in_pair_order(exact_q, rope_dim), rtol=1e-4, atol=1e-4)
        error = keys_of(planes, case) - in_pair_order(exact_k, rope_dim)
        assert (error.norm(dim=-1) <= ERRORS[bits[0]] * exact_k.norm(dim=-1)).all()
        places = case.slots // planes.page_tokens, case.slots % planes.page_tokens
        v = dequantize_values(planes.values_at(*places), bits[1], head_dim)
        error = (rotate_heads(v) if bits[1] < 8 else v) - exact_v
        assert (error.norm(dim=-1) <= ERRORS[bits[1]] * exact_v.norm(dim=-1)).all(), "values keep their order"
        exact, near = (
            torch.einsum("nhd,lhd->nhl", a[:, ::3], b) for a, b in ((exact_q, exact_k), (q.double(), near_k.double()))
        )
        torch.testing.assert_close(near, exact, rtol=1e-4, atol=1e-3)


def judge_quantized(case: Case, bits, device, **options) -> None:
    """The kernel against its reference, to the bit in codes where no norm is summed."""
    mine = write_quantized(write_quantized_kv_triton, case, bits, device, **options)
    theirs = write_quantized(write_quantized_kv_reference, case, bits, "cpu", **options)
    tolerance = 4 * torch.finfo(case.qkv.dtype).eps
    for found, wanted in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=8 * tolerance)
    others = tensors_of(theirs[0])
    for name, plane in tensors_of(mine[0]).items():
        differing = plane.cpu().view(torch.uint8) != others[name].view(torch.uint8)
        assert differing.float().mean() < 0.003, f"{name}: {differing.sum()} bytes differ"


@for_each("head_dim, rope_dim", [(16, 4), (64, 16), (96, 72), (80, 20)])
def test_write_quantized_kv_triton_rotates_part_of_head(device, head_dim, rope_dim):
    judge_quantized(partial(2, head_dim, rope_dim, group=2, with_norm=False), (4, 4), device)


@for_each("bits", [(8, 4), (4, 4), (3, 3)])
def test_write_quantized_kv_triton_takes_wide_gated_heads(device, bits):
    judge_quantized(partial(2, 256, 64, group=2, num_kv_heads=1), bits, device, query_step=2)
    judge_quantized(partial(2, 64, 48, group=2).rounded(torch.float16), bits, device, query_step=2)


def pair_scales(num_kv_heads: int, head_dim: int) -> torch.Tensor:
    scale = (2.0 ** torch.linspace(-3, 3, num_kv_heads * head_dim // 2)).view(num_kv_heads, -1).repeat(1, 2)
    return torch.stack((scale, 1 / scale))


@for_each("function", [write_quantized_kv_reference, write_quantized_kv_triton])
def test_write_quantized_kv_scale_and_bias_stay_exact_beyond_rope(device, function):
    """Scores of near rows are those of the true heads with their bias, whatever scale, mean and bias codes leave out."""
    head_dim, rope_dim = 64, 16
    case = partial(4, head_dim, rope_dim, group=1, with_norm=False)
    bias, mean = random(2, head_dim, seed=4, scale=3.0), random(2, head_dim, seed=6)
    angles = torch.outer(POSITIONS.double(), frequency_of(rope_dim).double())
    case = replace(case, rotary=Rotary((1.25 * angles.cos()).float(), (1.25 * angles.sin()).float()))
    q, k, _ = exact_heads(case)
    heads = case.qkv.unflatten(1, (-1, head_dim)).clone()
    heads[:, 2:4] += bias
    _, biased_k, _ = exact_heads(replace(case, qkv=heads.flatten(1)))
    scales = pair_scales(2, head_dim)
    # Tables hold scaled biases and means in pair order (runner/key_scale.py).
    tables = {"scales": scales, "bias": scales[0] * in_pair_order(bias, rope_dim), "mean": mean, "rope_dim": rope_dim}
    place = device if function is write_quantized_kv_triton else "cpu"
    planes, near_k, near_q = write_quantized(function, case, (4, 4), place, **tables)
    near_k = near_k + rotate_heads(mean)
    pairs = (q, biased_k), (near_q.double(), near_k.double())
    wanted, found = (torch.einsum("nhd,lhd->nhl", *one) for one in pairs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-3)
    scaled_k = scales[0] * in_pair_order(k, rope_dim)
    error = keys_of(on_cpu(planes), case) - scaled_k
    assert (error.norm(dim=-1) <= ERRORS[4] * (scaled_k - mean).norm(dim=-1)).all(), "codes have no bias"


def on_cpu(planes: QuantizedPlanes) -> QuantizedPlanes:
    fields = {name: getattr(planes, name) for name in QuantizedPlanes.__dataclass_fields__}
    return QuantizedPlanes(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in fields.items()})

"""The write into quantized pages, against its reference to the bit where the interpreter rounds as a GPU does."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, turned_heads
from holdfast.kernels.attention.write_quantized_kv import (
    write_quantized_kv,
    write_quantized_kv_reference,
    write_quantized_kv_triton,
)
from holdfast.quant.kv_quantize import (
    KEY_CODEBOOKS,
    VALUE_CODEBOOKS,
    QuantizedHeads,
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    hadamard_signs,
)
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.head_cases import FEATURES, POISON, Case, make_case
from kernels.quantized_kv_cases import BITS, FORMATS, HEAD_DIMS, assert_untouched, heads_at, make_planes, tensors_of
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

RELATIVE_ERROR = {8: 0.04, 5: 0.09, 4: 0.16, 3: 0.3}
"""Error of a quantized head of normal numbers relative to its norm, by bits; well above the mean."""
CODERS = pytest.mark.parametrize("bits", [(8, 8), (4, 4), (3, 3)], ids=["k8v8", "k4v4", "k3v3"])
"""Formats that have every way to code once; keys and values never meet in a program."""


@dataclass
class Written:
    """What a write left behind."""

    q: torch.Tensor
    planes: QuantizedPlanes
    slots: torch.Tensor

    def quantized(self, what: str) -> QuantizedHeads:
        """Codes of the written slots: [R, K, ...]."""
        places = self.slots // self.planes.page_tokens, self.slots % self.planes.page_tokens
        return self.planes.keys_at(*places) if what == "keys" else self.planes.values_at(*places)

    def steps(self, what: str) -> torch.Tensor:
        """The codes as the numbers that they stand for, without a scale: [R, K, D]."""
        heads = self.quantized(what)
        heads = QuantizedHeads(heads.codes_XB, heads.signs_XS, torch.ones_like(heads.scale_X))
        if what == "keys":
            return dequantize_keys(heads, self.planes.key_bits, self.planes.head_dim)
        return dequantize_values(heads, self.planes.value_bits, self.planes.head_dim)


def written(function, case: Case, bits, device="cpu", page_tokens=4, mean=None, rows=None, moat=64) -> Written:
    """Rows apart amid poison, planes of poison, and red zones around all that is written."""
    zones = RedZones(torch.device(device))
    rows = list(range(len(case.slots))) if rows is None else rows
    num_slots, num_kv_heads, head_dim = case.k_plane.shape
    dtype, num_pages = case.qkv.dtype, -(-num_slots // page_tokens)
    planes = make_planes(*bits, num_kv_heads, head_dim, page_tokens, num_pages, dtype, device, zones, mean)
    out = zones.allocate(len(rows), case.num_heads, head_dim, dtype=dtype).fill_(POISON)

    def alone(values):
        return amid_poison(values.reshape(1, -1), device).view(values.shape)

    norm, rotary, slots = case.head_norm, case.rotary and case.rotary.at(rows), case.slots[rows]
    q = function(
        amid_poison(case.qkv[rows], device, moat),
        slots.to(device),
        replace(planes, rotation_DD=alone(planes.rotation_DD)),
        norm and HeadNorm(alone(norm.q_weight_D), alone(norm.k_weight_D), norm.eps, norm.offset),
        rotary and Rotary(alone(rotary.cos_TP), alone(rotary.sin_TP)),
        out,
    )
    assert q is out
    zones.check()
    used = slots[slots >= 0]
    assert_untouched(planes, used)
    return Written(out.cpu(), _on_cpu(planes), used)


def _on_cpu(planes: QuantizedPlanes) -> QuantizedPlanes:
    fields = {name: getattr(planes, name) for name in QuantizedPlanes.__dataclass_fields__}
    return QuantizedPlanes(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in fields.items()})


def true_heads(case: Case, bits, mean=None) -> dict[str, torch.Tensor]:
    """Queries of all rows, keys and values of those that are not padding: in float64, in the space in which they are quantized."""
    exact = case.rounded(torch.float64)
    _, num_kv_heads, head_dim = case.k_plane.shape
    q, k, v = turned_heads(exact.qkv, num_kv_heads, head_dim, exact.head_norm, exact.rotary)
    rotation = hadamard_signs(head_dim).double() * hadamard_block(head_dim) ** -0.5
    if bits[0] < 8:
        q, k = q @ rotation, k @ rotation
    if bits[1] < 8:
        v = v @ rotation
    if mean is not None:
        k = k - (mean.double() @ rotation if bits[0] < 8 else mean.double())
    used = case.slots >= 0
    return {"queries": torch.where(used[:, None, None], q, 0.0), "keys": k[used], "values": v[used]}


def judge(case: Case, bits, device, page_tokens=4, mean=None) -> None:
    """The kernel against the reference, whose choices may differ only where a number lies half way between two codes."""
    mine = written(write_quantized_kv_triton, case, bits, device, page_tokens, mean)
    theirs = written(write_quantized_kv_reference, case, bits, "cpu", page_tokens, mean)
    exact = true_heads(case, bits, mean)
    assert_as_exact_as_torch(mine.q, theirs.q, exact["queries"])
    # A norm's sum has no order, so that what it is rounded to may differ by a unit.
    rounded_apart = case.head_norm is not None and case.qkv.dtype != torch.float32
    tolerance = 8 * torch.finfo(case.qkv.dtype).eps if rounded_apart else 1e-5
    for what, codebooks, head_bits in (("keys", KEY_CODEBOOKS, bits[0]), ("values", VALUE_CODEBOOKS, bits[1])):
        scale, their_scale = mine.quantized(what).scale_X, theirs.quantized(what).scale_X
        steps, their_steps = mine.steps(what).double(), theirs.steps(what).double()
        head = exact[what]
        if head_bits == 8:
            wanted = head / their_scale.double().unsqueeze(-1)
        else:
            factor = codebooks[head_bits].gain * head.shape[-1] ** 0.5
            wanted = head * factor / head.norm(dim=-1, keepdim=True)
        differ = steps != their_steps
        margin = ((steps - wanted).abs() - (their_steps - wanted).abs()).abs()
        assert (margin[differ] <= tolerance * (1 + wanted[differ].abs())).all(), f"{what}: {margin[differ].max()}"
        allowed = 0.02 if rounded_apart else 1e-3
        assert differ.sum() <= 1 + allowed * differ.numel(), f"{what}: {differ.sum()} of {differ.numel()} differ"
        apart = (scale.view(torch.int16) - their_scale.view(torch.int16)).abs()
        assert (apart <= 1).all(), f"{what}: scales {apart.max()} units apart"


def assert_same(mine: Written, theirs: Written) -> None:
    """To the bit, where both have written."""
    assert same_bits(mine.q, theirs.q)
    for name, plane in tensors_of(mine.planes).items():
        assert torch.equal(plane.view(torch.uint8), tensors_of(theirs.planes)[name].view(torch.uint8)), name


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_write_quantized_kv_matches_reference_for_every_head_dim(device, head_dim, bits):
    dtype = torch.float16 if head_dim % 32 else torch.float32
    judge(make_case(1, head_dim, with_norm=head_dim % 64 != 0).rounded(dtype), (bits, bits), device)


@pytest.mark.slow
@DTYPES
@FORMATS
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_write_quantized_kv_takes_every_head_dim_and_dtype(device, head_dim, key_bits, value_bits, dtype):
    judge(make_case(3, head_dim).rounded(dtype), (key_bits, value_bits), device)


@pytest.mark.each_value
@DTYPES
@FORMATS
def test_write_quantized_kv_takes_every_format_and_dtype(device, key_bits, value_bits, dtype):
    judge(make_case(1, 128, group=8).rounded(dtype), (key_bits, value_bits), device)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)], ids=["k8v8", "k4v4"])
def test_write_quantized_kv_float32_norms_with_offset_are_exact(device, bits, dtype):
    judge(make_case(2, 64).rounded(dtype).float32_norms(1.0), bits, device)


@FEATURES
def test_write_quantized_kv_accepts_heads_without_norm_or_rope(device, with_norm, with_rope):
    judge(make_case(1, 64, with_norm=with_norm, with_rope=with_rope), (4, 3), device)


@for_each("group, num_kv_heads", [(1, 1), (1, 12), (3, 5), (7, 2), (8, 8), (71, 1)])
def test_write_quantized_kv_matches_reference_for_every_grouping(device, group, num_kv_heads):
    """Programs are full, or have heads that are not there."""
    judge(make_case(1, 64, group, num_kv_heads), (4, 4), device)


@for_each("page_tokens", [1, 2, 16, 256])
def test_write_quantized_kv_matches_reference_for_any_page_size(device, page_tokens):
    slots = sorted({0, page_tokens - 1, page_tokens, 3 * page_tokens - 1})
    case = make_case(len(slots), 32, group=1)
    planes = torch.empty(3 * page_tokens, 2, 32)
    judge(replace(case, slots=torch.tensor(slots), k_plane=planes, v_plane=planes), (3, 4), device, page_tokens)


@hypothesis_settings(max_examples=8)
@given(
    num_rows=st.integers(0, 2),
    sixteenths=st.integers(1, 16),
    group=st.integers(1, 9),
    num_kv_heads=st.integers(1, 9),
    bits=st.sampled_from(BITS),
    with_norm=st.booleans(),
    with_rope=st.booleans(),
    with_mean=st.booleans(),
    padding=st.sets(st.integers(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_write_quantized_kv_matches_reference_for_any_shape(
    device, num_rows, sixteenths, group, num_kv_heads, bits, with_norm, with_rope, with_mean, padding, dtype
):
    head_dim = 16 * sixteenths
    case = make_case(num_rows, head_dim, group, num_kv_heads, with_norm, with_rope).rounded(dtype)
    mean = random(num_kv_heads, head_dim, seed=9) if with_mean else None
    judge(case.padded([row for row in padding if row < num_rows]), bits, device, page_tokens=3, mean=mean)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_padding_stores_and_reads_nothing(device, function, bits):
    case = make_case(2, 48, group=1)
    clean = written(function, case, bits, device)
    for padding in ([0], range(2)):
        mine = written(function, case.padded(padding), bits, device)  # which looks for bytes that no row has
        others = [row for row in range(2) if row not in padding]
        assert same_bits(mine.q[list(padding)], torch.zeros(len(padding), 2, 48))
        assert same_bits(mine.q[others], clean.q[others])
        assert same_bits(mine.quantized("keys").scale_X, clean.quantized("keys").scale_X[others])
        assert torch.equal(mine.quantized("values").codes_XB, clean.quantized("values").codes_XB[others])


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_is_batch_invariant(device, function, bits):
    if function is write_quantized_kv_triton:
        case, choices = make_case(3, 64, group=1).rounded(torch.float16), ([2], [1, 0])
    else:
        case, choices = make_case(65, 80, group=3, num_kv_heads=1), companies(65)
    whole = written(function, case, bits, device)
    for rows in choices:
        mine = written(function, case, bits, device, rows=rows)
        assert same_bits(mine.q, whole.q[rows])
        for what in ("keys", "values"):
            for tensor, other in zip(mine.quantized(what), whole.quantized(what), strict=True):
                assert tensor is None or torch.equal(tensor, other[rows]), what


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_codes_are_near_the_rows(device, function, bits):
    case = make_case(2, 128, with_norm=False)
    mine = written(function, case, bits, device)
    _, *true = turned_heads(case.qkv, 2, 128, None, case.rotary)
    for head, back, head_bits in zip(true, heads_at(mine.planes, mine.slots), bits, strict=True):
        assert ((head - back).norm(dim=-1) <= RELATIVE_ERROR[head_bits] * head.norm(dim=-1)).all()


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_keeps_scores_through_the_rotation(device, function, bits):
    case = make_case(2, 96, group=1)
    mine = written(function, case, bits, device)
    quantized = dequantize_keys(mine.quantized("keys"), bits[0], 96)
    q, k, _ = turned_heads(case.qkv, 2, 96, case.head_norm, case.rotary)
    expected, score = ((a * b).sum(-1) for a, b in ((q, k), (mine.q, quantized)))
    assert ((score - expected).abs() <= RELATIVE_ERROR[bits[0]] * q.norm(dim=-1) * k.norm(dim=-1)).all()


@CODERS
def test_write_quantized_kv_outliers_match_reference(device, bits):
    case = make_case(2, 64, with_norm=False)
    case.qkv[0, ::7] *= 1e4
    case.qkv[1] = 1e-4 * case.qkv[1]
    judge(case, bits, device)
    judge(case.rounded(torch.float16), bits, device)


@CODERS
def test_write_quantized_kv_subtracts_key_mean_first(device, bits):
    """The kernel as the reference does it, and both as it should: a bias thirty times the signal is not seen."""
    mean = 30 * random(2, 64, seed=5)
    case = make_case(2, 64, group=1, with_norm=False, with_rope=False)
    case.qkv.unflatten(1, (6, 64))[:, 2:4] += mean
    judge(case, bits, device, mean=mean)
    k = case.qkv.unflatten(1, (6, 64))[:, 2:4]
    centered = written(write_quantized_kv_triton, case, bits, device, mean=mean)
    back, _ = heads_at(centered.planes, centered.slots)
    assert ((back - k).norm(dim=-1) <= RELATIVE_ERROR[bits[0]] * (k - mean).norm(dim=-1)).all()


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_zero_heads_stay_zeros(device, function, bits):
    case = make_case(2, 80)
    case.qkv[0] = 0.0
    case.qkv[1].unflatten(0, (10, 80))[6::2] = 0.0
    mine = written(function, case, bits, device)
    for head, what in zip(heads_at(mine.planes, mine.slots), ("keys", "values"), strict=True):
        assert not mine.quantized(what).scale_X[0].any()
        assert not mine.quantized(what).scale_X[1, 0].any()
        assert not head[0].any()
        assert not head[1, 0].any()
        assert head[1, 1].any()
    assert not mine.q[0].any()


@CODERS
def test_write_quantized_kv_tiny_heads_stay_finite(device, bits):
    case = make_case(1, 64, with_norm=False, with_rope=False)
    case.qkv *= 1e-12
    mine = written(write_quantized_kv_triton, case, bits, device)
    assert all(head.isfinite().all() for head in heads_at(mine.planes, mine.slots))
    case.qkv *= 1e-33  # numbers that are denormal in float32, whose squares are zero
    mine = written(write_quantized_kv_triton, case, bits, device)
    assert all(head.isfinite().all() for head in heads_at(mine.planes, mine.slots))


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(("bad", "head_dim"), [(float("nan"), 64), (float("inf"), 64), (float("nan"), 80)])
def test_write_quantized_kv_nonfinite_value_stays_in_its_head(device, head_dim, bits, bad):
    """Head 3 of the queries, and the second key and value head of row 1."""
    case = make_case(2, head_dim, with_norm=False)
    clean = written(write_quantized_kv_triton, case, bits, device)
    case.qkv[1].unflatten(0, (10, head_dim))[[3, 7, 9], 5] = bad
    mine = written(write_quantized_kv_triton, case, bits, device)
    assert not mine.q[1, 3].isfinite().all()
    mine.q[1, 3] = clean.q[1, 3]
    if bad != bad:
        assert mine.quantized("keys").scale_X[1, 1].isnan()
        assert mine.quantized("values").scale_X[1, 1].isnan()
    place = mine.slots[1] // 4, 1, mine.slots[1] % 4
    for name, plane in tensors_of(mine.planes).items():
        plane[place] = tensors_of(clean.planes)[name][place]
    assert_same(mine, clean)


@for_each("moat", [0, 1, 8])
def test_write_quantized_kv_accepts_strided_rows(device, moat):
    case = make_case(2, 64)
    assert_same(
        written(write_quantized_kv_triton, case, (4, 4), device, moat=moat),
        written(write_quantized_kv_triton, case, (4, 4), device, moat=64),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize(
    "function", [write_quantized_kv_triton, write_quantized_kv_reference], ids=["kernel", "reference"]
)
def test_write_quantized_kv_may_leave_queries_in_place(device, poison, function, bits):
    case = make_case(3, 96).rounded(torch.float16).padded([1]).on(device)
    planes, others = (make_planes(*bits, 2, 96, 3, 3, torch.float16, device) for _ in range(2))
    slots, how = case.slots, (case.head_norm, case.rotary)
    qkv, before = case.qkv, case.qkv.clone()
    expected = function(qkv, slots, planes, *how)
    assert same_bits(qkv, before)
    queries = qkv[:, : 6 * 96].unflatten(1, (6, 96))
    assert function(qkv, slots, others, *how, queries) is queries
    assert same_bits(queries, expected)
    assert same_bits(qkv[:, 6 * 96 :], before[:, 6 * 96 :]), "keys and values are read only"
    for name, plane in tensors_of(planes).items():
        assert torch.equal(plane.view(torch.uint8), tensors_of(others)[name].view(torch.uint8)), name


@for_each("edge", ["first slots", "last slots"])
def test_write_quantized_kv_writes_first_and_last_slots(device, edge):
    case = make_case(2, 80, group=1)
    case.slots = torch.arange(2) if edge == "first slots" else torch.arange(len(case.k_plane) - 2, len(case.k_plane))
    for bits in ((8, 8), (3, 3)):
        judge(case, bits, device, page_tokens=7)


@for_each("function", [write_quantized_kv, write_quantized_kv_triton, write_quantized_kv_reference])
def test_write_quantized_kv_without_rows_changes_nothing(device, function):
    mine = written(function, make_case(3, 16), (4, 4), device, rows=[])
    assert mine.q.shape == (0, 6, 16)


def test_write_quantized_kv_refuses_arguments_out_of_range(device):
    case = make_case(2, 32, with_norm=False, with_rope=False).on(device)
    slots = case.slots
    planes = make_planes(4, 4, 2, 32, 4, 2, torch.float32, device)
    with pytest.raises(AssertionError, match="heads of a row"):
        write_quantized_kv_triton(case.qkv, slots, planes, None, None, torch.empty(2, 6, 64, device=device)[..., :32])
    with pytest.raises(AssertionError, match="elements of a row"):
        write_quantized_kv_triton(case.qkv.T.contiguous().T, slots, planes, None, None)
    with pytest.raises(AssertionError, match="of a table"):
        write_quantized_kv_triton(case.qkv.half(), slots, planes, None, None)
    apart = replace(planes, k_scale_PKt=torch.empty(2, 2, 8, device=device, dtype=torch.float16)[:, :, ::2])
    with pytest.raises(AssertionError, match="pages of a plane"):
        write_quantized_kv_triton(case.qkv, slots, apart, None, None)


@pytest.mark.gpu
def test_write_quantized_kv_writes_beyond_two_gib(device):
    num_pages = 2**31 // (8 * 16 * 128) + 2
    planes = make_planes(8, 4, 8, 128, 16, num_pages, torch.bfloat16, device)
    qkv = torch.randn(1, 24 * 128, device=device).bfloat16()
    slots = torch.tensor([num_pages * 16 - 1], device=device)
    write_quantized_kv(qkv, slots, planes, None, None)
    k, _ = heads_at(planes, slots)
    torch.testing.assert_close(k[0].flatten(), qkv[0, 1024:2048].float(), rtol=0.07, atol=0.01)
    assert planes.k_scale_PKt[:-1].isnan().all()


@pytest.mark.gpu
@FORMATS
def test_write_quantized_kv_allocates_nothing(device, key_bits, value_bits):
    case = make_case(5, 128).rounded(torch.bfloat16).padded([4]).on(device)
    planes = make_planes(key_bits, value_bits, 2, 128, 16, 1, torch.bfloat16, device)
    out = torch.empty(5, 6, 128, dtype=torch.bfloat16, device=device)
    rows = (case.qkv, case.slots)
    assert_allocates_nothing(lambda: write_quantized_kv(*rows, planes, case.head_norm, case.rotary, out))

"""The write into plain pages on a GPU or in the interpreter, against its reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, write_kv, write_kv_reference, write_kv_triton
from kernels.exactness import assert_as_exact_as_torch, companies, same_bits
from kernels.head_cases import FEATURES, POISON, Case, make_case
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

HEAD_DIMS = (2, 24, 64, 80, 96, 112, 128, 256)


def run(case, device, rows=None, moat=64):
    """(queries, key plane, value plane) of the kernel: rows apart amid poison, slots apart, red zones around.

    Strides differ between all of them.
    """
    zones = RedZones(device)
    rows = list(range(len(case.slots))) if rows is None else rows
    dtype = case.qkv.dtype
    num_slots, num_kv_heads, head_dim = case.k_plane.shape
    k_plane, v_plane = (
        zones.allocate(num_slots, apart, num_kv_heads, head_dim, dtype=case.k_plane.dtype).fill_(POISON)[:, apart - 1]
        for apart in (2, 3)
    )
    out = zones.allocate(len(rows), case.num_heads + 1, head_dim, dtype=dtype).fill_(POISON)[:, 1:]

    def alone(values):
        return amid_poison(values.reshape(1, -1), device).view(values.shape)

    norm, rotary = case.head_norm, case.rotary and case.rotary.at(rows)
    q = write_kv_triton(
        amid_poison(case.qkv[rows], device, moat),
        case.slots[rows].to(device),
        k_plane,
        v_plane,
        norm and HeadNorm(alone(norm.q_weight_D), alone(norm.k_weight_D), norm.eps, norm.offset),
        rotary and Rotary(amid_poison(rotary.cos_TP, device, 72), amid_poison(rotary.sin_TP, device, 72)),
        out,
    )
    assert q is out
    zones.check()
    return out.cpu(), k_plane.cpu(), v_plane.cpu()


def judge(case: Case, device) -> None:
    """Against float64 and torch in the same type; slots that belong to no row keep their poison."""
    dtype = case.qkv.dtype
    q, k_plane, v_plane = run(case, device)
    in_torch = case.run(write_kv_reference, dtype=dtype)
    exact = case.run(write_kv_reference, dtype=torch.float64)
    used = case.slots[case.slots >= 0]
    assert_as_exact_as_torch(q, in_torch[0], exact[0])
    assert_as_exact_as_torch(k_plane[used], in_torch[1][used], exact[1][used])
    unused = torch.ones(len(k_plane), dtype=torch.bool)
    unused[used] = False
    assert k_plane[unused].isnan().all(), "a slot was written that belongs to no row"
    assert v_plane[unused].isnan().all(), "a slot was written that belongs to no row"
    assert same_bits(v_plane[used], in_torch[2][used]), "values are stored as they come"
    # In half precision each product of the rotation is exact in float32, so only the norm's sums can round otherwise.
    if case.head_norm is None and dtype != torch.float32:
        assert same_bits(q, in_torch[0])
        assert same_bits(k_plane[used], in_torch[1][used])


@pytest.mark.each_pair
@DTYPES
@pytest.mark.parametrize("with_norm", [False, True], ids=["rope", "norm and rope"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_write_kv_triton_is_exact_for_every_head_dim(device, head_dim, with_norm, dtype):
    for num_rows in (1, 4):
        judge(make_case(num_rows, head_dim, with_norm=with_norm).rounded(dtype), device)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_write_kv_triton_float32_norms_are_exact_with_any_offset(device, offset, dtype):
    judge(make_case(3, 64).rounded(dtype).float32_norms(offset), device)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (1, 12), (3, 5), (7, 2), (8, 8), (71, 1)])
def test_write_kv_triton_is_exact_for_every_grouping(device, group, num_kv_heads, dtype):
    """Programs hold heads of one kind, of two, or of all three."""
    judge(make_case(2, 64, group, num_kv_heads).rounded(dtype), device)


@hypothesis_settings(max_examples=20)
@given(
    num_rows=st.integers(0, 4),
    half=st.integers(1, 130),
    group=st.integers(1, 9),
    num_kv_heads=st.integers(1, 9),
    with_norm=st.booleans(),
    with_rope=st.booleans(),
    padding=st.sets(st.integers(0, 3)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_write_kv_triton_is_exact_for_any_shape(
    device, num_rows, half, group, num_kv_heads, with_norm, with_rope, padding, dtype
):
    head_dim = 2 * half - (0 if with_rope else 1)  # only a rotation needs halves
    case = make_case(num_rows, head_dim, group, num_kv_heads, with_norm, with_rope).rounded(dtype)
    judge(case.padded([row for row in padding if row < num_rows]), device)


@pytest.mark.each_pair
@DTYPES
@FEATURES
@pytest.mark.parametrize("padding", [[4], [0, 2, 3], range(5)], ids=["last", "some", "all"])
def test_write_kv_triton_padding_stores_and_reads_nothing(device, with_norm, with_rope, padding, dtype):
    case = make_case(5, 48, with_norm=with_norm, with_rope=with_rope).rounded(dtype)
    clean_q, clean_k, clean_v = run(case, device)
    q, k_plane, v_plane = run(case.padded(padding), device)
    others = [row for row in range(5) if row not in padding]
    assert same_bits(q[list(padding)], torch.zeros(len(padding), 6, 48, dtype=dtype))
    assert same_bits(q[others], clean_q[others])
    clean_k[case.slots[list(padding)]] = POISON
    clean_v[case.slots[list(padding)]] = POISON
    assert same_bits(k_plane, clean_k)
    assert same_bits(v_plane, clean_v)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("head_dim", [80, 128], ids=lambda size: f"D{size}")
def test_write_kv_triton_is_batch_invariant(device, head_dim, dtype):
    case = make_case(5, head_dim, group=2).rounded(dtype)
    whole_q, whole_k, whole_v = run(case, device)
    for rows in [[0], [4], *companies(5)[4:8]]:
        q, k_plane, v_plane = run(case, device, rows)
        slots = case.slots[rows]
        assert same_bits(q, whole_q[rows]), f"{rows=}"
        assert same_bits(k_plane[slots], whole_k[slots]), f"{rows=}"
        assert same_bits(v_plane[slots], whole_v[slots]), f"{rows=}"


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("edge", ["first slots", "last slots"])
def test_write_kv_triton_writes_first_and_last_slots(device, with_norm, with_rope, edge):
    case = make_case(5, 80, with_norm=with_norm, with_rope=with_rope)
    num_slots = len(case.k_plane)
    case.slots = torch.arange(5) if edge == "first slots" else torch.arange(num_slots - 5, num_slots)
    judge(case, device)


@for_each("moat", [0, 1, 8])
def test_write_kv_triton_accepts_strided_rows(device, moat):
    case = make_case(3, 64)
    for mine, theirs in zip(run(case, device, moat=moat), case.run(write_kv_reference), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.each_value
@DTYPES
@FEATURES
def test_write_kv_triton_may_leave_queries_in_place(device, poison, with_norm, with_rope, dtype):
    case = make_case(5, 96, with_norm=with_norm, with_rope=with_rope).rounded(dtype).padded([3])
    case = case.on(device)
    qkv, rows, how = case.qkv, (case.slots,), (case.head_norm, case.rotary)
    planes, other_planes = ([plane.clone() for plane in (case.k_plane, case.v_plane)] for _ in range(2))
    expected = write_kv_triton(qkv, *rows, *planes, *how)
    assert expected.is_contiguous()
    before = qkv.clone()
    queries = qkv[:, : 6 * 96].unflatten(1, (6, 96))
    assert write_kv_triton(qkv, *rows, *other_planes, *how, queries) is queries
    assert same_bits(queries, expected)
    assert same_bits(qkv[:, 6 * 96 :], before[:, 6 * 96 :]), "keys and values are read only"
    assert all(same_bits(*pair) for pair in zip(planes, other_planes, strict=True))


@FEATURES
def test_write_kv_triton_half_planes_hold_the_nearest_value(device, with_norm, with_rope):
    case = make_case(5, 24, with_norm=with_norm, with_rope=with_rope)
    q, k_plane, v_plane = run(case, device)
    case.k_plane, case.v_plane = case.k_plane.half(), case.v_plane.half()
    half_q, half_k, half_v = run(case, device)
    assert same_bits(half_q, q)
    assert same_bits(half_k, k_plane.half())
    assert same_bits(half_v, v_plane.half())


@for_each("bad", [float("nan"), float("inf")])
def test_write_kv_triton_nonfinite_value_stays_in_its_head(device, bad):
    case = make_case(3, 24)
    clean_q, clean_k, clean_v = run(case, device)
    case.qkv[1, 2 * 24] = bad
    q, k_plane, v_plane = run(case, device)
    assert not q[1, 2].isfinite().all()
    q[1, 2] = clean_q[1, 2]
    assert all(same_bits(*pair) for pair in zip((q, k_plane, v_plane), (clean_q, clean_k, clean_v), strict=True))


def test_write_kv_triton_without_rows_changes_nothing(device):
    q, k_plane, v_plane = run(make_case(3, 16), device, rows=[])
    assert q.shape == (0, 6, 16)
    assert k_plane.isnan().all()
    assert v_plane.isnan().all()


def test_write_kv_triton_refuses_strided_heads(device):
    case = make_case(3, 16, with_norm=False, with_rope=False).on(device)
    rows, planes = (case.qkv, case.slots), (case.k_plane, case.v_plane)
    out = torch.empty(3, 6, 32, device=device)[..., :16]
    with pytest.raises(AssertionError, match="heads of a row"):
        write_kv_triton(*rows, *planes, None, None, out)
    with pytest.raises(AssertionError, match="elements of a row"):
        write_kv_triton(rows[0].T.contiguous().T, *rows[1:], *planes, None, None)


@pytest.mark.gpu
def test_write_kv_triton_writes_beyond_two_to_the_31_elements(device):
    num_slots, num_kv_heads, head_dim = 2**21 + 2, 8, 128
    k_plane = torch.zeros(num_slots, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    v_plane = torch.zeros(num_kv_heads, head_dim, dtype=torch.bfloat16, device=device).expand(num_slots, -1, -1)
    qkv = torch.randn(1, 3 * num_kv_heads * head_dim, device=device).bfloat16()
    slots = torch.tensor([num_slots - 1], device=device)
    write_kv(qkv, slots, k_plane, v_plane, None, None)
    assert same_bits(k_plane[-1].flatten(), qkv[0, 1024:2048])
    assert not k_plane[:-1].any()


@pytest.mark.gpu
def test_write_kv_triton_allocates_nothing(device):
    case = make_case(5, 128).rounded(torch.bfloat16).padded([4]).on(device)
    out = torch.empty(5, 6, 128, dtype=torch.bfloat16, device=device)
    rows, planes = (case.qkv, case.slots), (case.k_plane, case.v_plane)
    assert_allocates_nothing(lambda: write_kv(*rows, *planes, case.head_norm, case.rotary, out))

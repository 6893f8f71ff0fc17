"""The write into plain pages, in C and in torch: norm, rope, slots, padding."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.write_kv import HeadNorm, write_kv, write_kv_reference
from kernels.exactness import assert_as_exact_as_torch, companies, island, num_threads, same_bits
from kernels.head_cases import FEATURES, POISON, Case, make_case

pytestmark = pytest.mark.usefixtures("native")

HEAD_DIMS = (2, 16, 24, 64, 80, 96, 128, 256)
GROUPS = (1, 3, 7, 71)


def judge(case: Case) -> None:
    q, k_plane, v_plane = case.run()
    reference = case.run(write_kv_reference)
    exact = case.run(write_kv_reference, dtype=torch.float64)
    assert_as_exact_as_torch(q, reference[0], exact[0])
    assert_as_exact_as_torch(k_plane[case.slots], reference[1][case.slots], exact[1][case.slots])
    heads = case.qkv.unflatten(-1, (-1, case.k_plane.shape[-1]))
    assert same_bits(v_plane[case.slots], heads[:, -case.k_plane.shape[1] :]), "values are stored as they come"
    unused = torch.ones(len(k_plane), dtype=torch.bool)
    unused[case.slots] = False
    assert k_plane[unused].isnan().all(), "a slot was written that belongs to no row"
    assert v_plane[unused].isnan().all(), "a slot was written that belongs to no row"


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_write_kv_is_exact_for_every_head_dim(head_dim, with_norm, with_rope):
    for num_rows in (1, 2, 9, 17, 63):
        judge(make_case(num_rows, head_dim, with_norm=with_norm, with_rope=with_rope))


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group} queries a key")
def test_write_kv_is_exact_for_every_grouping(group, with_norm, with_rope):
    for num_kv_heads in (1, 2, 5):
        judge(make_case(5, 24, group, num_kv_heads, with_norm, with_rope))


@for_each("head_dim", [2, 24, 64])
def test_write_kv_adds_offset_to_norm_weights(head_dim):
    case = make_case(5, head_dim)
    with_offset = case.float32_norms(1.0)
    judge(with_offset)
    norm = with_offset.head_norm
    added = HeadNorm(norm.q_weight_D + 1.0, norm.k_weight_D + 1.0, norm.eps)
    plain = replace(case, head_norm=added)
    assert all(
        same_bits(mine[case.slots], theirs[case.slots])
        for mine, theirs in zip(with_offset.run()[1:], plain.run()[1:], strict=True)
    )


def test_write_kv_without_norm_and_rope_copies_heads():
    case = make_case(9, 24, with_norm=False, with_rope=False)
    q, k_plane, _ = case.run()
    heads = case.qkv.unflatten(-1, (-1, 24))
    assert same_bits(q, heads[:, :6])
    assert same_bits(k_plane[case.slots], heads[:, 6:8])


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80], ids=lambda size: f"D{size}")
def test_write_kv_is_batch_invariant(head_dim, with_norm, with_rope):
    case = make_case(65, head_dim, with_norm=with_norm, with_rope=with_rope)
    whole_q, whole_k, whole_v = case.run()
    for threads in (1, 2):
        with num_threads(threads):
            for rows in [[row] for row in range(65)] + list(companies(65)):
                q, k_plane, v_plane = case.run(rows=rows)
                slots = case.slots[rows]
                assert same_bits(q, whole_q[rows]), f"{threads=} {rows=}"
                assert same_bits(k_plane[slots], whole_k[slots]), f"{threads=} {rows=}"
                assert same_bits(v_plane[slots], whole_v[slots]), f"{threads=} {rows=}"


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("head_dim", [2, 24, 64], ids=lambda size: f"D{size}")
@pytest.mark.parametrize("edge", ["first slots", "last slots"])
def test_native_write_kv_stays_within_its_buffers(native, guarded_host, head_dim, with_norm, with_rope, edge):
    case = make_case(17, head_dim, with_norm=with_norm, with_rope=with_rope)
    num_slots, num_kv_heads, _ = case.k_plane.shape
    case.slots = torch.arange(17) if edge == "first slots" else torch.arange(num_slots - 17, num_slots)
    expected = case.run()
    qkv = island(case.qkv)
    tables = [0, 0] if case.rotary is None else [case.rotary.cos_TP, case.rotary.sin_TP]
    norms = [0, 0] if case.head_norm is None else [case.head_norm.q_weight_D, case.head_norm.k_weight_D]
    inputs = [island(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in (*tables, *norms)]
    q = guarded_host(17, 6, head_dim)
    planes = [guarded_host(num_slots, num_kv_heads, head_dim) for _ in range(2)]
    for plane in planes:
        plane.fill_(POISON)
    native.holdfast_write_heads(
        qkv.data_ptr(),
        case.slots.data_ptr(),
        *(0 if tensor is None else tensor.data_ptr() for tensor in inputs),
        1e-5,
        0.0,
        q.data_ptr(),
        *(plane.data_ptr() for plane in planes),
        17,
        6,
        num_kv_heads,
        head_dim,
        head_dim // 2,
        1,
    )
    assert all(same_bits(mine, theirs) for mine, theirs in zip((q, *planes), expected, strict=True))
    assert q.isfinite().all()


@for_each("bad", [float("nan"), float("inf")])
def test_write_kv_nonfinite_value_stays_in_its_row(bad):
    case = make_case(9, 24)
    clean_q, clean_k, clean_v = case.run()
    case.qkv[4] = bad
    q, k_plane, v_plane = case.run()
    others = [row for row in range(9) if row != 4]
    slots = case.slots[others]
    assert not q[4].isfinite().any()
    assert same_bits(q[others], clean_q[others])
    assert same_bits(k_plane[slots], clean_k[slots])
    assert same_bits(v_plane[slots], clean_v[slots])


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_write_kv_half_planes_hold_the_nearest_value(dtype, with_norm, with_rope):
    case = make_case(9, 24, with_norm=with_norm, with_rope=with_rope)
    expected_q, expected_k, expected_v = case.run(write_kv_reference)
    case.k_plane, case.v_plane = case.k_plane.to(dtype), case.v_plane.to(dtype)
    k_plane, v_plane = case.k_plane.clone(), case.v_plane.clone()
    q = write_kv(case.qkv, case.slots, k_plane, v_plane, case.head_norm, case.rotary)
    assert same_bits(q.contiguous(), expected_q.contiguous())
    assert same_bits(k_plane[case.slots], expected_k[case.slots].to(dtype))
    assert same_bits(v_plane[case.slots], expected_v[case.slots].to(dtype))


def test_write_kv_without_rows_changes_nothing():
    case = make_case(3, 16)
    q, k_plane, v_plane = case.run(rows=[])
    assert q.shape == (0, 6, 16)
    assert k_plane.isnan().all()
    assert v_plane.isnan().all()


PADDED = pytest.mark.parametrize("padding", [[8], [0], [3, 4, 7], range(9)], ids=["last", "first", "some", "all"])


@pytest.mark.each_value
@PADDED
@FEATURES
@pytest.mark.parametrize("function", [write_kv, write_kv_reference], ids=["C", "reference"])
def test_write_kv_padding_stores_and_reads_nothing(function, with_norm, with_rope, padding):
    case = make_case(9, 24, with_norm=with_norm, with_rope=with_rope)
    clean_q, clean_k, clean_v = case.run(function)
    q, k_plane, v_plane = case.padded(padding).run(function)
    others = [row for row in range(9) if row not in padding]
    assert same_bits(q[list(padding)], torch.zeros(len(padding), 6, 24))
    assert same_bits(q[others], clean_q[others])
    clean_k[case.slots[list(padding)]] = POISON
    clean_v[case.slots[list(padding)]] = POISON
    assert same_bits(k_plane, clean_k)
    assert same_bits(v_plane, clean_v)


@pytest.mark.each_value
@FEATURES
@pytest.mark.parametrize("function", [write_kv, write_kv_reference], ids=["C", "reference"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_write_kv_writes_only_query_places_of_out(guarded_host, function, with_norm, with_rope, num_rows):
    case = make_case(num_rows, 24, with_norm=with_norm, with_rope=with_rope).padded([num_rows - 1])
    expected = case.run(function)
    how = (case.head_norm, case.rotary)
    together = guarded_host(num_rows, 6, 24).fill_(POISON)
    wide = torch.full((num_rows, 8, 24), POISON)
    in_place = case.qkv.clone()
    for qkv, out in (
        (case.qkv, together),
        (case.qkv, wide[:, 1:7]),
        (in_place, in_place[:, : 6 * 24].unflatten(1, (6, 24))),
    ):
        planes = case.k_plane.clone(), case.v_plane.clone()
        assert function(qkv, case.slots, *planes, *how, out) is out
        assert all(same_bits(mine, theirs) for mine, theirs in zip((out, *planes), expected, strict=True))
    assert wide[:, 0].isnan().all()
    assert wide[:, 7].isnan().all()


def test_write_kv_strided_rows_equal_contiguous_rows():
    case = make_case(5, 24)
    expected = case.run()
    wide = torch.full((5, case.qkv.shape[1] + 7), POISON)
    wide[:, 3:-4] = case.qkv
    case.qkv = wide[:, 3:-4]
    k_plane, v_plane = case.k_plane.clone(), case.v_plane.clone()
    q = write_kv(case.qkv, case.slots, k_plane, v_plane, case.head_norm, case.rotary)
    assert all(same_bits(mine, theirs) for mine, theirs in zip((q, k_plane, v_plane), expected, strict=True))


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_write_kv_half_types_use_torch(dtype):
    case = make_case(5, 24).rounded(dtype).padded([1, 4])
    expected = case.run(write_kv_reference, dtype=dtype)
    out = torch.empty(5, 6, 24, dtype=dtype)
    write_kv(case.qkv, case.slots, case.k_plane, case.v_plane, case.head_norm, case.rotary, out)
    assert all(same_bits(*pair) for pair in zip((out, case.k_plane, case.v_plane), expected, strict=True))
    assert not out[[1, 4]].any()

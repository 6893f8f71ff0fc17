"""Attention to quantized pages in any mix of tiles: against its reference and float64, its merge, its geometry, its launches."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.quantized_attention import (
    large_shape,
    quantized_attention,
    quantized_attention_reference,
    quantized_geometry,
)
from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS, MERGED_HEADS
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.quant.kv_quantize import rotation_table
from kernels.exactness import random, same_bits
from kernels.quantized_kv_cases import (
    BITS,
    FORMATS,
    NAN,
    QUIET,
    Cut,
    assert_near,
    cut_tiles,
    fill_slots,
    heads_at,
    judge,
    make_planes,
    peaked_step,
    quantized_step,
    run_tiles,
)
from kernels.triton_cases import assert_allocates_nothing

pytestmark = QUIET

SMALL, LARGE, HALVES = Cut(), Cut(large=True), Cut(splits=2)


@for_each("bits", [(8, 4), (3, 3)])
def test_quantized_attention_mixes_decode_prefill_and_padding(device, bits):
    rows = [(63, 1), (0, 12), (10, 2), (64, 1), (150, 9)]
    step = quantized_step(bits, rows, 32, group=4, num_kv_heads=2)
    cuts = [SMALL, LARGE, HALVES, Cut(splits=5), Cut(large=True, splits=3)]
    judge(step, cuts, device, num_padding=3, num_sms=2)


@hypothesis_settings(max_examples=3)
@given(data=st.data())
def test_quantized_attention_is_exact_for_any_step(device, data):
    counts = st.one_of(st.just(1), st.integers(1, 12))
    rows = data.draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 150)), counts), min_size=1, max_size=2))
    bounds = st.lists(st.sampled_from([0, 64, 128, 192]), max_size=3).map(lambda ends: tuple(sorted(ends)))
    cuts = [data.draw(st.builds(Cut, st.booleans(), st.just(1), bounds)) for _ in rows]
    step = quantized_step(
        data.draw(st.sampled_from(BITS)),
        rows,
        head_dim=data.draw(st.sampled_from([16, 48])),
        group=data.draw(st.sampled_from([1, 3, 9])),
        num_kv_heads=data.draw(st.integers(1, 2)),
        page_tokens=data.draw(st.sampled_from([1, 16, 64, 128])),
        window=data.draw(st.sampled_from([None, None, 1, 5, 64])),
        seed=data.draw(st.integers(0, 99)),
    )
    judge(step, cuts, device, data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2)))


@pytest.mark.each_value
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)], ids=["as they are", "rotated"])
def test_quantized_attention_merged_rows_equal_unsplit_rows(device, bits, large):
    """Straight to the output, or as partial results: of one range that has all, and of several."""
    step = quantized_step(bits, [(190, 2)], 80, group=3)
    direct = run_tiles(step, cut_tiles(step, [Cut(large)]), device)
    for bounds, num_padding in product(((0,), (192,), (64, 128)), (0, MERGE_BY_HEAD_ROWS)):
        if bounds == (64, 128) or (num_padding == 0) == (bounds == (0,)):
            tiles = cut_tiles(step, [Cut(large, bounds=bounds)], num_padding)
            assert_near(run_tiles(step, tiles, device)[:2], direct.double(), step)


@for_each("group, num_kv_heads", [(1, 1), (3, 2), (7, 1), (9, 1)])
def test_quantized_attention_merges_any_number_of_heads(device, group, num_kv_heads):
    """In steps of few rows by the head, in others several heads at a time, whatever their number is divided by."""
    assert MERGED_HEADS < 9
    for num_padding in (0, MERGE_BY_HEAD_ROWS):
        judge(quantized_step((4, 4), [(70, 1)], 48, group, num_kv_heads), HALVES, device, num_padding)


@for_each("num_padding", [0, MERGE_BY_HEAD_ROWS])
def test_quantized_attention_merges_more_splits_than_fit_at_once(device, num_padding):
    """Most of them empty: nothing at first is not the end of it."""
    for bounds in (17 * (0,), (64, *(20 * (128,)))):
        judge(quantized_step((4, 4), [(70, 1)], 16, group=2), Cut(bounds=bounds), device, num_padding)


@for_each("num_padding", [0, MERGE_BY_HEAD_ROWS])
def test_quantized_attention_last_peak_rescales_earlier_splits(device, num_padding):
    """Those between are empty, so that only the first and the last count: 16 are merged at once."""
    step = peaked_step(4, 2 * BLOCK_TOKENS, gap=5, peak=2 * BLOCK_TOKENS - 1)
    judge(step, Cut(bounds=17 * (BLOCK_TOKENS,)), device, num_padding)


def test_quantized_attention_split_of_larger_values_decides(device):
    """Partial results are weighed by their sums alone, not by the values that went into them."""
    step = quantized_step((4, 4), [(127, 1)], group=2)
    step.tokens[0][1][:64] *= 5000
    for cut in (HALVES, Cut(large=True, splits=2)):
        for num_padding in (0, MERGE_BY_HEAD_ROWS):
            out = run_tiles(step, cut_tiles(step, [cut], num_padding), device)
            assert_near(out[:1], step.exact(), step)


def test_quantized_attention_idle_programs_do_nothing(device):
    step = quantized_step((4, 4), [(70, 1), (0, 9)], 16)
    tiles = cut_tiles(step, [HALVES, LARGE])
    expected = run_tiles(step, tiles, device)
    assert same_bits(run_tiles(step, tiles, device, num_sms=3), expected)


def test_quantized_attention_graph_without_work_changes_nothing(device):
    """A graph launches all of them; the numbers of tiles decide. Rows without a tile are padding."""
    planes = make_planes(4, 4, 1, 16, 16, 1, torch.float16, device)
    planes = replace(planes, rotation_DD=rotation_table(16, torch.float16, device))
    q, table = random(4, 2, 16).to(device, torch.float16), torch.zeros(1, 1, dtype=torch.int32, device=device)
    tiles = torch.full((3, 8), 2**30, dtype=torch.int32, device=device)
    tiles[0, :2] = 0
    rows = torch.tensor([(0, 1), (0, 0), (0, 1), (0, 0)], dtype=torch.int32, device=device)
    work = TileWork(tiles, rows, has_small=True, has_large=True, has_merge=True)
    for function in (quantized_attention, quantized_attention_reference):
        out = torch.full((4, 32), NAN, dtype=torch.float16, device=device)
        function(TileCall(q, table, work, Scoring(0.25), out[:0].float(), out[:0].float(), out, 1), planes)
        assert out[[0, 2]].isnan().all()
        assert same_bits(out[[1, 3]].cpu(), torch.zeros(2, 32, dtype=torch.float16))


@for_each("cut", [SMALL, Cut(splits=3), LARGE])
def test_quantized_attention_is_batch_invariant(device, cut):
    """Its own tiles given, and steps of many rows: few take a merge of another shape. Pages may lie elsewhere."""
    step = quantized_step((4, 4), [(130, 1), (30, 2), (64, 2), (9, 1)], 16, group=2)
    whole = run_tiles(step, cut_tiles(step, 4 * [cut], MERGE_BY_HEAD_ROWS), device, num_sms=2)
    for order in ([1, 0], [3, 2, 0]):
        rows = [step.row_starts[i] + row for i in order for row in range(step.rows[i][1])]
        some = step.only(order)
        tiles = cut_tiles(some, len(order) * [cut], MERGE_BY_HEAD_ROWS + 3)
        assert same_bits(run_tiles(some, tiles, device)[: len(rows)], whole[rows]), f"{order=}"


@FORMATS
def test_quantized_reference_attends_to_stored_heads(key_bits, value_bits):
    """From heads that are rotated back one by one, with queries that are not rotated: nothing but the format is left."""
    num_tokens, head_dim, page_tokens = 40, 48, 16
    planes = make_planes(key_bits, value_bits, 1, head_dim, page_tokens, 4, torch.float32)
    slots = torch.cat((torch.arange(16) + 32, torch.arange(24)))
    k, v = random(num_tokens, 1, head_dim), random(num_tokens, 1, head_dim, seed=1)
    fill_slots(planes, slots, k, v)
    k, v = (x.double() for x in heads_at(planes, slots))
    torch.testing.assert_close(k, random(num_tokens, 1, head_dim).double(), rtol=0, atol=1.0)
    q = random(2, 2, head_dim, seed=2)
    rotation = rotation_table(head_dim, torch.float32, "cpu")[:head_dim] * 16**-0.5
    tiles = torch.tensor([(1, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 38, 0, 40, -1, 1)], dtype=torch.int32)
    work = TileWork(tiles, torch.tensor([(0, 1), (0, 1)], dtype=torch.int32), True, False, False)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    for window in (None, 7):
        out = torch.full((2, 2 * head_dim), NAN)
        seen = q @ rotation if key_bits < 8 else q
        call = TileCall(seen, table, work, Scoring(0.3, window), out[:0], out[:0], out, 1)
        quantized_attention_reference(call, planes)
        for row, end in enumerate((39, 40)):
            first = 0 if window is None else end - window
            scores = q[row].double() @ k[first:end, 0].T * 0.3
            expected = (scores.softmax(-1) @ v[first:end, 0]).flatten()
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9, 16, 64, 71, 128])
def test_quantized_geometry_tiles_fill_their_operands(group, key_bits, value_bits):
    geometry = quantized_geometry(3 * group, 3, key_bits, value_bits)
    shape = large_shape(key_bits)
    assert geometry.small_rows == max(1, 8 // group)
    assert geometry.large_rows == max(1, shape.rows // group)
    assert geometry.small_rows * group <= max(8, group)
    assert geometry.large_rows * group <= max(shape.rows, group)
    assert geometry.small_rows <= geometry.large_rows
    assert geometry.large_programs_per_sm == shape.programs_per_sm
    assert geometry.block_tokens == BLOCK_TOKENS
    assert geometry.has_aligned_starts, "a block that begins elsewhere would count tokens before it"


def test_quantized_geometry_is_constant_for_many_rows():
    """A step that must not depend on its company is padded to 16 rows, which is beyond every such limit."""
    assert MERGE_BY_HEAD_ROWS < 16
    geometry = quantized_geometry(32, 8, 4, 4)
    assert len({geometry.small_programs(num_rows) for num_rows in range(16, 300)}) == 1


@pytest.mark.gpu
def test_quantized_attention_is_deterministic(device):
    step = quantized_step((4, 4), [(3000, 1), (0, 300), (1500, 140)], 128, 8, page_tokens=64, dtype=torch.bfloat16)
    tiles = cut_tiles(step, [Cut(splits=30), LARGE, Cut(large=True, splits=4)])
    expected = run_tiles(step, tiles, device, num_sms=132)
    for _ in range(10):
        assert same_bits(run_tiles(step, tiles, device, num_sms=132), expected)


@pytest.mark.gpu
@FORMATS
def test_quantized_attention_allocates_nothing(device, key_bits, value_bits):
    planes = make_planes(key_bits, value_bits, 2, 64, 64, 4, torch.bfloat16, device)
    planes = replace(planes, rotation_DD=rotation_table(64, torch.bfloat16, device))
    q = random(3, 8, 64).to(device, torch.bfloat16)
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    listed = [
        (2, 1, 0, 0, 0, 0, 0, 0),
        (0, 0, 2, 80, 0, 64, 0, 2),
        (0, 0, 2, 80, 64, 82, 1, 2),
        (0, 2, 1, 9, 0, 10, -1, 1),
    ]
    tiles = torch.tensor(listed, dtype=torch.int32, device=device)
    rows = torch.tensor([(0, 2), (2, 2), (0, 1)], dtype=torch.int32, device=device)
    out = torch.empty(3, 512, dtype=torch.bfloat16, device=device)
    partials = torch.empty(4, 512, device=device), torch.empty(4, 8, device=device)
    work = TileWork(tiles, rows, has_small=True, has_large=True, has_merge=True)
    call = TileCall(q, table, work, Scoring(0.125), *partials, out, 132)
    assert_allocates_nothing(lambda: quantized_attention(call, planes))


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_quantized_attention_reads_beyond_two_gib(device, large):
    num_pages = 2**31 // (8 * 64 * 64) + 2
    planes = make_planes(4, 4, 8, 128, 64, num_pages, torch.bfloat16, device)
    planes = replace(planes, rotation_DD=rotation_table(128, torch.bfloat16, device))
    slots = torch.arange(num_pages * 64 - 64, num_pages * 64, device=device)
    fill_slots(planes, slots, random(64, 8, 128).to(device), random(64, 8, 128, seed=1).to(device))
    table = torch.tensor([[num_pages - 1]], dtype=torch.int32, device=device)
    tiles = torch.tensor([(1 - large, large, 0, 0, 0, 0, 0, 0), (0, 0, 1, 63, 0, 64, -1, 1)], dtype=torch.int32)
    rows = torch.tensor([(0, 1)], dtype=torch.int32, device=device)
    work = TileWork(tiles.to(device), rows, not large, large, False)
    q = random(1, 8, 128, seed=2).to(device, torch.bfloat16)
    out, expected = torch.full((2, 1, 1024), NAN, dtype=torch.bfloat16, device=device)
    for function, written in ((quantized_attention, out), (quantized_attention_reference, expected)):
        nothing = written[:0].float()
        function(TileCall(q, table, work, Scoring(0.1), nothing, nothing, written, 132), planes)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)

"""Attention to plain pages in any mix of tiles: against its reference and float64, causal masks, merges, small batches."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.attention.tiled_attention import (
    SMALL_BATCH_ROWS,
    SMALL_TILE,
    large_blocks,
    small_programs,
    tile_rows,
    tiled_attention,
    tiled_attention_reference,
)
from holdfast.kernels.geometry import LARGE_TILE, TileGeometry
from kernels.exactness import random, same_bits
from kernels.paged_cases import PagedCase, paged_case
from kernels.tiled_cases import NAN, Cut, cut_tiles, rounded, run_tiles
from kernels.triton_cases import assert_allocates_nothing

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum, and where NaN or an infinity is right.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)

SMALL, LARGE = Cut(), Cut(large=True)
HALVES = Cut(splits=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""For values around one: weights are rounded to the type of the values, and the result again."""


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; half precision on a GPU, which would multiply float32 as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def judge(case: PagedCase, cuts: list[Cut] | Cut, device, dtype, num_padding=0, num_sms=1) -> torch.Tensor:
    """Against plain attention in float64 over the tokens themselves, and against the reference; padding is zeros."""
    case = rounded(case, dtype)
    cuts = cuts if isinstance(cuts, list) else [cuts] * len(case.rows)
    tiles = cut_tiles(case, cuts, num_padding)
    out = run_tiles(case, tiles, device, num_sms=num_sms)
    reference = run_tiles(case, tiles, torch.device("cpu"), tiled_attention_reference)
    num_rows, tolerance = len(case.q), TOLERANCE[dtype]
    exact = case.exact()
    torch.testing.assert_close(out[:num_rows].double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(reference[:num_rows].double(), exact, rtol=tolerance, atol=tolerance)
    for written in (out, reference):
        assert same_bits(written[num_rows:], torch.zeros_like(written[num_rows:])), "padding is zeros"
    return out


@pytest.mark.parametrize("cut", [SMALL, LARGE, HALVES, Cut(large=True, splits=3)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_tiled_attention_half_precision_is_exact(device, dtype, cut):
    judge(paged_case([(64, 1), (10, 3), (0, 9)], 64, group=4, num_kv_heads=1), cut, device, dtype, num_padding=2)


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [HALVES, Cut(large=True, splits=2)], ids=["small", "large"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 112, 128, 256], ids=lambda size: f"D{size}")
def test_tiled_attention_is_exact_for_every_head_dim(device, widest, head_dim, cut):
    judge(paged_case([(69, 1), (30, 4)], head_dim, group=2, num_kv_heads=1, page_tokens=16), cut, device, widest)


@for_each("group", [1, 4, 7, 8, 16, 17, 71, 128])
def test_tiled_attention_is_exact_for_every_grouping(device, widest, group):
    """Also those that leave rows of a tile empty, and those that are higher than a small one."""
    judge(paged_case([(60, 9), (20, 1)], group=group, num_kv_heads=2), LARGE, device, widest)
    cuts = [SMALL, HALVES if group <= 16 else SMALL]
    judge(paged_case([(60, 3), (70, 1)], group=group, num_kv_heads=2), cuts, device, widest)


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [HALVES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("page_tokens", [1, 16, 64], ids=lambda size: f"pages of {size}")
def test_tiled_attention_is_exact_for_every_page_size(device, widest, page_tokens, cut):
    judge(paged_case([(99, 1), (60, 6)], num_kv_heads=1, page_tokens=page_tokens), cut, device, widest)


@for_each("num_tokens", [1, 63, 64, 65, 1000])
def test_tiled_attention_is_exact_for_every_length(device, widest, num_tokens):
    count = min(5, num_tokens)
    rows = [(num_tokens - 1, 1), (num_tokens - count, count)]
    case = paged_case(rows, page_tokens=16, num_kv_heads=1)
    judge(case, [SMALL, LARGE], device, widest)
    judge(case, [Cut(splits=3), Cut(large=True, splits=4)], device, widest, num_padding=1)


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [SMALL, HALVES, Cut(large=True, splits=3)], ids=["small", "split", "large"])
@pytest.mark.parametrize("window", [1, 5, 64, 1000], ids=lambda window: f"window of {window}")
def test_tiled_attention_is_exact_for_every_window(device, widest, window, cut):
    case = paged_case([(190, 1), (120, 9), (0, 3)], group=2, num_kv_heads=1, page_tokens=16, window=window)
    judge(case, cut, device, widest)


def test_tiled_attention_mixes_decode_prefill_and_padding(device, widest):
    case = paged_case([(63, 1), (0, 65), (10, 3), (64, 1), (100, 17), (0, 1)], group=2, num_kv_heads=2, page_tokens=16)
    cuts = [SMALL, LARGE, HALVES, Cut(splits=5), Cut(large=True, splits=2), SMALL]
    judge(case, cuts, device, widest, num_padding=3, num_sms=2)


@pytest.mark.each_value
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(
    "bounds",
    [[0], [0, 0, 30], [30, 30], [100], [64, 128], [1, 2, 3, 4, 5], [7, 71]],
    ids=["first", "two first", "between", "last", "whole blocks", "single tokens", "odd"],
)
def test_tiled_attention_empty_and_odd_ranges_are_exact(device, widest, bounds, large):
    """A range of no tokens weighs nothing, wherever it lies."""
    judge(paged_case([(90, 4), (95, 1)], group=2, num_kv_heads=1), Cut(large, bounds=bounds), device, widest)


@for_each("start, bounds", [(0, [4]), (0, [66]), (0, [64, 65]), (3, [68, 80])])
def test_tiled_attention_masks_ranges_seen_by_later_rows(device, widest, start, bounds):
    """Rows before the range get nothing from it, and it takes nothing from the range before it."""
    judge(paged_case([(start, 85)], group=1, num_kv_heads=1), Cut(large=True, bounds=bounds), device, widest)


@for_each("start", [62, 63, 126, 127])
def test_tiled_attention_at_block_edge_sees_no_later_token(device, widest, start):
    """Whether the first row sees the last token of the block decides whether the block needs a mask."""
    judge(paged_case([(start, 3), (start, 3)], group=2, num_kv_heads=1), [SMALL, LARGE], device, widest)


@pytest.mark.each_value
@pytest.mark.parametrize("num_padding", [0, MERGE_BY_HEAD_ROWS], ids=["few rows", "many rows"])
@pytest.mark.parametrize("num_empty", [16, 17, 40])
def test_tiled_attention_merges_many_empty_splits(device, widest, num_empty, num_padding):
    """Nothing at first is not the end of it."""
    for bounds in (num_empty * [0], [20] + num_empty * [41]):
        judge(paged_case([(40, 1)], group=2, num_kv_heads=1), Cut(bounds=bounds), device, widest, num_padding)


def test_tiled_attention_merges_more_splits_than_fit_at_once(device, widest):
    judge(paged_case([(40, 1), (5, 1)], group=2, num_kv_heads=1), [Cut(splits=40), SMALL], device, widest)


@hypothesis_settings(max_examples=12)
@given(data=st.data())
def test_tiled_attention_is_exact_for_any_step(device, data):
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    counts = st.one_of(st.just(1), st.integers(1, 12))
    rows = data.draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 150)), counts), min_size=1, max_size=3))
    bounds = st.lists(st.integers(0, 200), max_size=3).map(sorted)
    cuts = [data.draw(st.builds(Cut, st.booleans(), st.just(1), bounds)) for _ in rows]
    case = paged_case(
        rows,
        head_dim=16,
        group=data.draw(st.sampled_from([1, 3])),
        num_kv_heads=data.draw(st.integers(1, 2)),
        page_tokens=data.draw(st.sampled_from([1, 4, 16])),
        window=data.draw(st.sampled_from([None, None, 1, 5, 64])),
        seed=data.draw(st.integers(0, 99)),
    )
    judge(case, cuts, device, dtype, data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2)))


@for_each("group, num_kv_heads", [(1, 1), (3, 1), (3, 2), (8, 1), (12, 1)])
def test_tiled_attention_merges_any_number_of_heads(device, widest, group, num_kv_heads):
    """In steps of few rows by the head, in others several heads at a time, whatever their number is divided by."""
    for num_padding in (0, MERGE_BY_HEAD_ROWS):
        case = paged_case([(40, 1)], group=group, num_kv_heads=num_kv_heads)
        judge(case, HALVES, device, widest, num_padding)


def test_tiled_attention_idle_programs_do_nothing(device, widest):
    case = rounded(paged_case([(70, 1), (0, 9)]), widest)
    tiles = cut_tiles(case, [HALVES, LARGE])
    expected = run_tiles(case, tiles, device)
    for num_sms in (2, 3):
        assert same_bits(run_tiles(case, tiles, device, num_sms=num_sms), expected), f"{num_sms=}"


def test_tiled_attention_graph_without_work_changes_nothing(device, widest):
    """A graph launches all of them; the numbers of tiles decide."""
    q = random(4, 2, 16).to(device, widest)
    plane, table = random(8, 1, 16, seed=1).to(device, widest), torch.zeros(1, 1, dtype=torch.int32, device=device)
    tiles = torch.full((3, 8), 2**30, dtype=torch.int32, device=device)
    tiles[0, :2] = 0
    rows = torch.tensor([(0, 1), (0, 0), (0, 1), (0, 0)], dtype=torch.int32, device=device)
    out = torch.full((4, 32), NAN, dtype=widest, device=device)
    work = TileWork(tiles, rows, has_small=True, has_large=True, has_merge=True)
    for function in (tiled_attention, tiled_attention_reference):
        function(TileCall(q, table, work, Scoring(0.25), out[:0], out[:0], out, 1), plane, plane, 4)
        assert out[[0, 2]].isnan().all()
        assert not out[[1, 3]].any()


@for_each("cut", [SMALL, Cut(splits=20), LARGE])
def test_tiled_attention_is_batch_invariant(device, widest, cut):
    """Its own tiles given, and steps of many rows: few take kernels of another shape."""
    case = rounded(paged_case([(69, 1), (30, 5), (64, 2), (9, 1)], group=2, num_kv_heads=1), widest)
    cuts = 4 * [cut]
    whole = run_tiles(case, cut_tiles(case, cuts), device, num_sms=2)
    for order in ([1, 0], [3, 2, 0]):
        rows = [case.row_starts[i] + row for i in order for row in range(case.rows[i][1])]
        some = PagedCase(
            [case.rows[i] for i in order],
            case.q[rows],
            case.k_plane,
            case.v_plane,
            [case.pages[i] for i in order],
            [case.tokens[i] for i in order],
            case.page_tokens,
            case.scale,
            case.window,
        )
        tiles = cut_tiles(some, cuts[: len(order)], num_padding=MERGE_BY_HEAD_ROWS)
        assert same_bits(run_tiles(some, tiles, device)[: len(rows)], whole[rows]), f"{order=}"


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [SMALL, HALVES, LARGE], ids=["small", "split", "large"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tiled_attention_nonfinite_query_stays_in_its_row(device, widest, cut, bad):
    case = rounded(paged_case([(0, 7), (66, 1)], group=2, num_kv_heads=1), widest)
    tiles = cut_tiles(case, [cut, cut])
    clean = run_tiles(case, tiles, device)
    for row in (3, 7):
        hurt = rounded(case, widest)
        hurt.q = case.q.clone()
        hurt.q[row] = bad
        out = run_tiles(hurt, tiles, device)
        others = [other for other in range(8) if other != row]
        assert not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [SMALL, HALVES, LARGE], ids=["small", "split", "large"])
@pytest.mark.parametrize("plane", ["k_plane", "v_plane"])
def test_tiled_attention_nonfinite_token_stays_in_its_tile(device, widest, cut, plane):
    """Tiles that end before it do not see it; sequences that lie between its pages never do."""
    case = rounded(paged_case([(0, 12), (30, 1), (0, 5)], group=4, num_kv_heads=1), widest)
    cuts = [cut, HALVES, SMALL]
    clean = run_tiles(case, cut_tiles(case, cuts), device)
    position = 9
    slot = case.pages[0][position // 4] * 4 + position % 4
    getattr(case, plane)[slot] = NAN
    out = run_tiles(case, cut_tiles(case, cuts), device)
    height = tile_rows(4, 1, cut.large)
    assert same_bits(out[: position // height * height], clean[: position // height * height])
    assert same_bits(out[12:], clean[12:])
    assert out[position].isnan().any()


def test_tiled_attention_window_hides_older_tokens(device, widest):
    case = rounded(paged_case([(99, 1), (50, 3)], window=8), widest)
    tiles = cut_tiles(case, [HALVES, LARGE])
    clean = run_tiles(case, tiles, device)
    for index, first_seen in ((0, 92), (1, 43)):
        for position in range(first_seen):
            slot = case.pages[index][position // 4] * 4 + position % 4
            case.k_plane[slot] = case.v_plane[slot] = NAN
    assert same_bits(run_tiles(case, tiles, device), clean)


def test_tiled_attention_distant_scores_pick_one_token(device, widest):
    case = rounded(paged_case([(0, 9), (70, 1)], q_scale=300.0), widest)
    out = run_tiles(case, cut_tiles(case, [LARGE, Cut(splits=3)]), device)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), case.exact(), rtol=TOLERANCE[widest], atol=50 * TOLERANCE[widest])


@for_each("group", [1, 2, 4, 7, 8, 16, 17, 71, 128])
def test_tile_rows_fill_a_tile_and_no_more(group):
    for large, height in ((False, SMALL_TILE), (True, LARGE_TILE)):
        rows = tile_rows(3 * group, 3, large)
        assert rows == max(1, height // group)
        assert rows * group <= max(height, group)


def test_tile_geometry_is_constant_for_many_rows():
    """A step that must not depend on its company is padded to 16 rows, which is beyond every such limit."""
    assert len({small_programs(num_rows) for num_rows in range(SMALL_BATCH_ROWS + 1, 300)}) == 1
    assert all(min(small_programs(num_rows)) >= 1 for num_rows in range(1, SMALL_BATCH_ROWS + 1))
    assert max(SMALL_BATCH_ROWS, MERGE_BY_HEAD_ROWS) < 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(8, 128), (7, 64), (1, 80), (8, 256)])
def test_tiled_attention_long_contexts_are_exact_on_gpu(device, dtype, group, head_dim):
    rows = [(3000, 1), (0, 140), (900, 70), (2999, 1), (4095, 1)]
    case = paged_case(rows, head_dim, group, num_kv_heads=1, page_tokens=16)
    cuts = [Cut(splits=30), LARGE, Cut(large=True, splits=4), SMALL, Cut(splits=9)]
    judge(case, cuts, device, dtype, num_padding=5, num_sms=132)


@pytest.mark.gpu
def test_tiled_attention_is_deterministic(device):
    case = rounded(paged_case([(3000, 1), (0, 300), (1500, 140)], 128, 8, page_tokens=16), torch.bfloat16)
    tiles = cut_tiles(case, [Cut(splits=30), LARGE, Cut(large=True, splits=4)])
    expected = run_tiles(case, tiles, device, num_sms=132)
    for _ in range(10):
        assert same_bits(run_tiles(case, tiles, device, num_sms=132), expected)


@pytest.mark.gpu
def test_tiled_attention_allocates_nothing(device):
    q, plane = (random(*shape).to(device, torch.bfloat16) for shape in ((3, 8, 64), (64, 2, 64)))
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    listed = [(2, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 40, 0, 20, 0, 2), (0, 0, 2, 40, 20, 42, 1, 2)]
    tiles = torch.tensor(listed, dtype=torch.int32, device=device)
    rows = torch.tensor([(0, 2), (2, 2), (0, 0)], dtype=torch.int32, device=device)
    out, partial = torch.empty(3, 512, dtype=torch.bfloat16, device=device), torch.empty(4, 520, device=device)
    work = TileWork(tiles, rows, has_small=True, has_large=True, has_merge=True)
    scratch = partial[:, :512].contiguous(), partial[:, 512:].contiguous()
    call = TileCall(q, table, work, Scoring(0.125), *scratch, out, 132)
    assert_allocates_nothing(lambda: tiled_attention(call, plane, plane, 16))


def test_large_blocks_fit_into_shared_memory():
    hopper, ada = 227 * 1024, 99 * 1024
    assert large_blocks(128, hopper) == (64, 3)
    assert large_blocks(128, ada) == (32, 2)
    assert large_blocks(256, hopper) == (32, 2)


PLAIN = TileGeometry(2, 16, small_programs_per_sm=4, large_programs_per_sm=2, block_tokens=64)


@for_each("num_rows", [1, 2, 8192])
def test_tiled_attention_program_count_is_the_same_for_any_step(num_rows):
    assert PLAIN.small_programs(num_rows) == 4


@for_each("num_rows, programs", [(0, 3), (1, 3), (2, 3), (3, 4), (8192, 4)])
def test_small_programs_are_fewer_for_few_rows(num_rows, programs):
    assert PLAIN._replace(small_batch_rows=2, small_batch_programs_per_sm=3).small_programs(num_rows) == programs


def test_tile_geometry_defaults_add_no_constraints():
    assert not PLAIN.has_aligned_starts
    assert not PLAIN.takes_whole_turns


def test_kernel_geometry_imports_without_torch():
    code = "import sys, holdfast.kernels.geometry; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

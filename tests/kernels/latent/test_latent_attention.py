"""Absorbed attention to plain latents: against its reference and float64, with tiles of the real scheduler and others, amid poison."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_attention import latent_attention, latent_attention_reference, latent_blocks
from holdfast.kernels.latent.latent_geometry import (
    LARGE_HEIGHT,
    PLAIN_PROGRAMS_PER_SM,
    SMALL_HEIGHT,
    head_blocks,
    latent_geometry,
    programs_per_sm,
    tile_height,
    tile_rows,
)
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes
from holdfast.kernels.latent.latent_tiles import SPREAD_MERGE_ROWS, row_form
from holdfast.kernels.latent.latent_warpgroups import takes_warpgroups
from kernels.exactness import random, same_bits
from kernels.latent_cases import LatentCase, Scheduling, cut_work, latent_case, run_latents
from kernels.tiled_cases import NAN
from kernels.triton_cases import assert_allocates_nothing

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""For values around one: weights are rounded to the type of the latents, and the result again."""
DECODE, PROMPTS = [(64, 1), (10, 1), (129, 1)], [(0, 9), (60, 12)]
MIXED = [(63, 1), (0, 17), (10, 3), (64, 1), (0, 1)]


def more(*values: int) -> list[Any]:
    """Values for `make test-slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; half precision on a GPU, which would multiply float32 as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def judge(case: LatentCase, work: TileWork, num_rows: int, max_partials: int, device, num_sms: int) -> torch.Tensor:
    """Against plain attention in float64 over the tokens themselves, and against the reference; padding is zeros."""
    out = run_latents(case, work, num_rows, max_partials, device, num_sms=num_sms)
    reference = run_latents(case, work, num_rows, max_partials, device, latent_attention_reference)
    filled, tolerance, exact = len(case.q_TNX), TOLERANCE[case.q_TNX.dtype], case.exact()
    for written in (out, reference):
        torch.testing.assert_close(written[:filled].double(), exact, rtol=tolerance, atol=tolerance)
        assert same_bits(written[filled:], torch.zeros_like(written[filled:])), "padding is zeros"
    return out


def judge_step(case: LatentCase, scheduling: Scheduling, device, dtype, num_padding: int = 0) -> torch.Tensor:
    case, num_rows = case.rounded(dtype), len(case.q_TNX) + num_padding
    work = scheduling.work(case, num_rows, device)
    return judge(case, work, num_rows, scheduling.max_partials, device, scheduling.num_sms)


def judge_cut(case: LatentCase, splits: int, large: bool, device, dtype, num_padding: int = 0) -> torch.Tensor:
    case, num_rows = case.rounded(dtype), len(case.q_TNX) + num_padding
    work, num_partials = cut_work(case, splits, large, num_rows, device)
    return judge(case, work, num_rows, num_partials, device, num_sms=2)


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [DECODE, PROMPTS, MIXED], ids=["decode", "prompts", "mixed"])
@pytest.mark.parametrize(
    "scheduling",
    [
        Scheduling(),
        Scheduling(num_sms=4),
        Scheduling(captured=True),
        Scheduling(batch_invariant=True),
        Scheduling(2, 0),
    ],
    ids=["one program", "split", "captured", "batch invariant", "no partials"],
)
def test_latent_attention_is_exact_for_scheduled_steps(device, widest, rows, scheduling):
    judge_step(latent_case(rows), scheduling, device, widest)


@pytest.mark.each_value
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("num_padding", [MERGE_BY_HEAD_ROWS, SPREAD_MERGE_ROWS], ids=lambda n: f"{n} padded")
def test_latent_attention_padded_rows_are_zeros(device, widest, num_padding, captured):
    judge_step(latent_case(DECODE, 3, 16), Scheduling(4, captured=captured), device, widest, num_padding)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_latent_attention_half_precision_is_exact(device, dtype, large):
    judge_cut(latent_case([(64, 1), (10, 3), (0, 9)], 5, 64, 32), 2, large, device, dtype, num_padding=2)


@pytest.mark.each_value
@pytest.mark.parametrize("num_heads", [1, 17, 65, *more(3, 5, 8, 16, 20, 128)])
def test_latent_attention_is_exact_for_every_head_count(device, widest, num_heads):
    """Also those that leave places of a block, or of the last one, empty."""
    for large in (False, True):
        judge_cut(latent_case([(65, 2)], num_heads, 16), 2, large, device, widest)


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim"),
    [(16, 16), (80, 64), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((48, 32), (256, 32), (512, 64)))],
    ids=lambda size: str(size),
)
def test_latent_attention_is_exact_for_every_width(device, widest, latent_dim, rope_dim):
    for large in (False, True):
        judge_cut(latent_case([(69, 1), (30, 4)], 2, latent_dim, rope_dim), 2, large, device, widest)


@pytest.mark.each_value
@pytest.mark.parametrize("page_tokens", [1, 128, *more(2, 32, 256)])
def test_latent_attention_is_exact_for_every_page_size(device, widest, page_tokens):
    for large in (False, True):
        judge_cut(latent_case([(199, 1), (60, 6)], page_tokens=page_tokens), 2, large, device, widest)


@pytest.mark.each_value
@pytest.mark.parametrize("splits", [3, 66])
@pytest.mark.parametrize("num_padding", [0, MERGE_BY_HEAD_ROWS, SPREAD_MERGE_ROWS], ids=lambda n: f"{n} padded")
def test_latent_attention_empty_splits_weigh_nothing(device, widest, splits, num_padding):
    """More of them than are merged at once, in every form of the merge."""
    judge_cut(latent_case([(100, 1)], 2, 16), splits, False, device, widest, num_padding)


def test_latent_attention_masks_split_seen_by_later_rows(device, widest):
    """Rows before it get nothing from it, and it takes nothing from what is before it."""
    judge_cut(latent_case([(60, 8), (62, 4)], 8), 2, True, device, widest)


@hypothesis_settings(max_examples=10)
@given(data=st.data())
def test_latent_attention_is_exact_for_any_step(device, data):
    counts = st.one_of(st.just(1), st.integers(1, 20))
    rows = data.draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 150)), counts), min_size=1, max_size=3))
    case = latent_case(
        rows,
        data.draw(st.sampled_from([1, 3, 16, 20])),
        data.draw(st.sampled_from([16, 48])),
        page_tokens=data.draw(st.sampled_from([1, 16, 64])),
        seed=data.draw(st.integers(0, 99)),
    )
    scheduling = Scheduling(data.draw(st.integers(1, 4)), batch_invariant=data.draw(st.booleans()))
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    judge_step(case, scheduling, device, dtype, data.draw(st.integers(0, 2)))


def test_latent_attention_is_batch_invariant(device, widest):
    """Its own tiles given, and steps of many rows: few take a merge of another shape."""
    rows = [(269, 1), (30, 1), (400, 1)]
    case = latent_case(rows).rounded(widest)
    scheduling = Scheduling(4, batch_invariant=True)
    outs = []
    for num_rows in (16, SPREAD_MERGE_ROWS + 1):
        work = scheduling.work(case, num_rows, device)
        outs.append(run_latents(case, work, num_rows, scheduling.max_partials, device, num_sms=4)[:3])
    alone = latent_case(rows).rounded(widest)
    alone.rows, alone.q_TNX, alone.pages, alone.tokens = rows[2:], case.q_TNX[2:], case.pages[2:], case.tokens[2:]
    one = run_latents(alone, scheduling.work(alone, 16, device), 16, scheduling.max_partials, device, num_sms=1)
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0][2:], one[:1])


@for_each("large", [False, True])
def test_latent_attention_head_group_matches_all_heads(device, widest, large):
    """With the tiles of all heads, the same to the bit as long as blocks are the same."""
    case = latent_case([(100, 1), (7, 4)], 16).rounded(widest)
    work, num_partials = cut_work(case, 2, large, 5, device)
    whole = run_latents(case, work, 5, num_partials, device)
    for first in (0, 8):
        group = latent_case([(100, 1), (7, 4)], 16).rounded(widest)
        group.q_TNX = case.q_TNX[:, first : first + 8].contiguous()
        out = run_latents(group, work, 5, num_partials, device)
        torch.testing.assert_close(out, whole[:, first : first + 8], rtol=1e-3, atol=1e-3)


def test_latent_attention_graph_without_work_changes_nothing(device, widest):
    """A graph launches all of them; the numbers of tiles decide."""
    q, plane = random(4, 2, 32).to(device, widest), random(8, 32, seed=1).to(device, widest)
    tiles = torch.full((3, 8), 2**30, dtype=torch.int32, device=device)
    tiles[0, :2] = 0
    rows = torch.tensor([(0, 1), (0, 0), (0, 1), (0, 0)], dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = torch.full((4, 2, 16), NAN, dtype=widest, device=device)
    work = TileWork(tiles, rows, has_small=True, has_large=True, has_merge=True)
    planes, nothing = LatentPlanes("plain", 16, 16, 4, plane), torch.empty(0, device=device)
    for function in (latent_attention, latent_attention_reference):
        function(LatentCall(q, planes, table, 0.25, nothing, nothing, out, 1), work)
        assert out[[0, 2]].isnan().all()
        assert not out[[1, 3]].any()


@for_each("num_heads", [1, 3, 8, 16, 20, 32, 64, 65, 96, 128, 130])
def test_latent_geometry_blocks_and_tiles_hold_all_heads(num_heads):
    geometry = latent_geometry(num_heads)
    for large, rows in ((False, geometry.small_rows), (True, geometry.large_rows)):
        num_blocks, heads = head_blocks(num_heads, large)
        assert (num_blocks - 1) * heads < num_heads <= num_blocks * heads
        assert rows == tile_rows(num_heads, large) >= 1
        assert (rows + 1) * heads > (LARGE_HEIGHT if large else SMALL_HEIGHT), "one more row would fit"
        assert large or num_blocks * heads - num_heads < num_blocks, "blocks are as equal as can be"
        for some in range(1, num_heads + 1):
            assert rows * head_blocks(some, large)[1] <= tile_height(some, large) <= LARGE_HEIGHT
    assert head_blocks(128) == (2, 64)


def test_latent_row_form_is_constant_for_many_rows():
    """A step that must not depend on its company is padded to 16 rows; programs of one head or of several add alike."""
    assert {row_form(num_rows).merges_side_by_side for num_rows in range(16, 300)} == {False}


def test_latent_blocks_fit_into_shared_memory():
    hopper, ada, row_bytes = 227 * 1024, 99 * 1024, 2 * 576
    assert [latent_blocks(height, row_bytes, hopper) for height in (16, 32, 64)] == [(64, 3, 4), (64, 3, 8), (64, 2, 8)]
    for height in (16, 32):
        assert latent_blocks(height, row_bytes, ada).tokens == 32
    assert latent_blocks(64, row_bytes, ada) == (16, 2, 8)


@pytest.mark.each_value
@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_latent_geometry_counts_launched_small_programs(num_heads, is_quantized):
    geometry, height = latent_geometry(num_heads, is_quantized), tile_height(num_heads, large=False)
    assert geometry.small_programs_per_sm == (programs_per_sm(height) if is_quantized else PLAIN_PROGRAMS_PER_SM)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("num_heads", [16, 20, 128], ids=lambda heads: f"{heads} heads")
def test_latent_attention_is_exact_at_model_sizes(device, dtype, num_heads):
    """Those of more than 16 heads, and prompts, in warpgroups on a Hopper."""
    rows = [(3000, 1), (0, 40), (900, 20), (2999, 1), (4095, 1), (63, 2)]
    case = latent_case(rows, num_heads, 512, 64, q_scale=1.0)
    judge_step(case, Scheduling(132, 256), device, dtype, num_padding=5)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [32, 128], ids=["small pages", "large pages"])
@pytest.mark.parametrize("num_heads", [40, 100], ids=lambda heads: f"{heads} heads")
def test_latent_attention_odd_blocks_and_pages_are_exact_on_gpu(device, num_heads, page_tokens):
    rows = [(2000, 1), (0, 40), (127, 1), (128, 1), (129, 3), (0, 1)]
    case = latent_case(rows, num_heads, 512, 64, page_tokens, q_scale=1.0)
    judge_step(case, Scheduling(132, 256), device, torch.bfloat16, num_padding=1)


def test_takes_warpgroups_accepts_known_sizes_and_pages(device):
    plane = torch.empty(256, 576, dtype=torch.bfloat16, device=device)
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    assert takes_warpgroups(LatentPlanes("plain", 512, 64, 64, plane)) == is_hopper
    assert takes_warpgroups(LatentPlanes("plain", 512, 64, 128, plane.half())) == is_hopper
    assert not takes_warpgroups(LatentPlanes("plain", 512, 64, 32, plane))
    assert not takes_warpgroups(LatentPlanes("plain", 512, 64, 64, plane.float()))
    assert not takes_warpgroups(LatentPlanes("plain", 544, 32, 64, plane))
    assert not takes_warpgroups(LatentPlanes("fp8_ds_mla", 512, 64, 64, plane))


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128], ids=lambda heads: f"{heads} heads")
def test_latent_attention_is_deterministic(device, num_heads):
    case = latent_case([(3000, 1), (0, 300), (1500, 140)], num_heads, 512, 64).rounded(torch.bfloat16)
    work = Scheduling(132, 256).work(case, 441, device)
    expected = run_latents(case, work, 441, 256, device, num_sms=132)
    for _ in range(10):
        assert same_bits(run_latents(case, work, 441, 256, device, num_sms=132), expected)


@pytest.mark.gpu
def test_latent_attention_allocates_nothing(device):
    case = latent_case([(300, 1), (10, 4)], 16, 512, 64).rounded(torch.bfloat16)
    work = Scheduling(132).work(case, 8, device)
    q = torch.cat((case.q_TNX, case.q_TNX[:3])).to(device)
    planes = LatentPlanes("plain", 512, 64, 64, case.plane_SX.to(device))
    out = torch.empty(8, 16, 512, dtype=torch.bfloat16, device=device)
    partial_out, partial_lse = torch.empty(64, 16 * 512, device=device), torch.empty(64, 16, device=device)
    table = case.page_table().to(device)
    call = LatentCall(q, planes, table, 0.04, partial_out, partial_lse, out, 132)
    assert_allocates_nothing(lambda: latent_attention(call, work))

"""Rows of the lane against plain torch, and attention over them against float64."""

import torch

from for_each import for_each
from holdfast.kernels.attention.near_tokens import NearPages
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.geometry import LaneGeometry
from kernels.exactness import same_bits
from kernels.lane_cases import Lane, LaneSource, by_lane, lane_rows, near_reference, with_lane, with_near
from kernels.paged_cases import odd_sinks
from kernels.quantized_kv_cases import (
    BITS,
    NAN,
    QUIET,
    Cut,
    QuantizedStep,
    assert_near,
    cut_tiles,
    quantized_step,
    run_tiles,
)
from kernels.tiled_cases import Tiles

pytestmark = QUIET
CPU = torch.device("cpu")
LARGE = Cut(large=True)


def lane_of(step: QuantizedStep, tiles: Tiles, near: NearPages | None, fill) -> Lane:
    """All heads of a step."""
    found = []

    def attend(call: TileCall, planes: QuantizedPlanes) -> torch.Tensor:
        call = with_lane(call, near, planes.num_kv_heads)
        assert call.work.lane is not None
        (part,) = call.work.lane.rounds
        num_blocks = planes.num_kv_heads * part.num_blocks
        memory_E = torch.full((2 * num_blocks * 64 * planes.head_dim,), NAN, dtype=torch.float16)
        lane = lane_rows.lane_of(memory_E, planes.head_dim, LaneGeometry(1, num_blocks, planes.num_kv_heads))
        fill(call, LaneSource(planes, near), lane, part, 0, planes.num_kv_heads)
        found.append(lane)
        return call.out_TX

    run_tiles(step, tiles, CPU, attend)
    return found[0]


@for_each("bits, head_dim", [*((bits, 64) for bits in BITS), ((4, 4), 96), ((3, 3), 80), ((8, 4), 16), ((5, 4), 256)])
def test_lane_rows_equal_reference(bits, head_dim):
    step = quantized_step(bits, [(60, 9), (130, 70)], head_dim, group=2, num_kv_heads=2)
    tiles = cut_tiles(step, [LARGE, LARGE])
    lane, expected = (lane_of(step, tiles, None, fill) for fill in (lane_rows.fill_lane, lane_rows.fill_reference))
    for rows, rows_expected in zip(lane[:2], expected[:2], strict=True):
        assert same_bits(rows, rows_expected)


@for_each("first, window", [(16, None), (0, 100), (0, None)])
def test_lane_near_rows_equal_reference(first, window):
    step = quantized_step((4, 4), [(150, 90), (3, 5)], 32, group=2, num_kv_heads=2, window=window)
    near, _, tiles = with_near(step, first, CPU)
    lane, expected = (lane_of(step, tiles, near, fill) for fill in (lane_rows.fill_lane, lane_rows.fill_reference))
    for rows, rows_expected in zip(lane[:2], expected[:2], strict=True):
        assert same_bits(rows, rows_expected)


@for_each("bits", BITS)
def test_attention_over_lane_rows_is_exact(bits):
    step = quantized_step(bits, [(60, 9), (0, 70)], 64, group=2, num_kv_heads=2)
    tiles = cut_tiles(step, [LARGE, LARGE])
    assert_near(run_tiles(step, tiles, CPU, by_lane(heads=1)), step.exact(), step)


@for_each("first, window", [(16, None), (0, 100), (0, None)])
def test_attention_over_near_rows_is_exact(first, window):
    step = quantized_step((4, 4), [(50, 90), (3, 5)], 32, group=2, num_kv_heads=2, window=window)
    step.sinks, step.softcap = odd_sinks(4), 20.0
    near, tiles, whole = with_near(step, first, CPU)
    expected = run_tiles(step, tiles, CPU, near_reference(near)).double()
    assert_near(run_tiles(step, whole, CPU, by_lane(near)), expected, step)


@for_each("which", [0, 1])
def test_nan_token_spares_earlier_rows(which):
    step = quantized_step((8, 4), [(0, 40), (0, 5)], 16, group=2)
    tiles = cut_tiles(step, [LARGE, LARGE])
    clean = run_tiles(step, tiles, CPU, by_lane())
    step.tokens[0][which][30] = NAN
    out = run_tiles(step, tiles, CPU, by_lane())
    assert same_bits(out[:30], clean[:30])
    assert same_bits(out[40:], clean[40:])
    assert out[30:40].isnan().all()

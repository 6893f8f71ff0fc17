"""Large tiles from a lane (benchmarks/lane_attention.py): formats, heads and options amid poison; lanes of any size, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.quantized_attention import quantized_attention_reference
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.quant.kv_quantize import dequantize_keys, dequantize_values
from kernels.exactness import random, same_bits
from kernels.lane_cases import LaneForm, by_lane, lane_attention, near_pages, near_reference, near_tiles
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

pytestmark = QUIET

CPU = torch.device("cpu")
LARGE, HALVES = Cut(large=True), Cut(large=True, splits=2)


def judge(step: QuantizedStep, cuts: list[Cut], device: torch.device, form: LaneForm | None = None) -> torch.Tensor:
    """Compare to float64; padding is zeros."""
    tiles, num_rows = cut_tiles(step, cuts, num_padding=1), len(step.q)
    out = run_tiles(step, tiles, device, by_lane(form=form))
    assert_near(out[:num_rows], step.exact(), step)
    assert not out[num_rows:].any()
    return out


@for_each("bits", BITS)
def test_lane_is_exact_for_every_format(device, bits):
    """Two sequences: tiles of a chunk, and splits."""
    judge(quantized_step(bits, [(60, 9), (0, 70)], 64, group=2, num_kv_heads=2), [HALVES, LARGE], device)


@for_each("bits, head_dim", [((8, 8), 80), ((4, 4), 96), ((3, 3), 80), ((5, 4), 48), ((3, 4), 128), ((8, 4), 256)])
def test_lane_is_exact_for_every_head_dim(device, bits, head_dim):
    judge(quantized_step(bits, [(62, 5)], head_dim, group=2), [LARGE], device)


@for_each("group", [1, 7, 16])
def test_lane_is_exact_for_every_grouping(device, group):
    judge(quantized_step((4, 4), [(50, 9)], 16, group), [LARGE], device)


@for_each("page_tokens", [1, 48, 64, 128])
def test_lane_is_exact_for_every_page_size(device, page_tokens):
    judge(quantized_step((3, 4), [(130, 9)], 32, page_tokens=page_tokens), [HALVES], device)


def test_lane_window_hides_older_tokens(device):
    step = quantized_step((8, 8), [(99, 3), (126, 30)], 16, group=2, window=8)
    tiles = cut_tiles(step, [LARGE, HALVES])
    clean = run_tiles(step, tiles, device, by_lane())
    assert_near(clean, step.exact(), step)
    for (k, v), first_seen in zip(step.tokens, (92, 119), strict=True):
        k[:first_seen] = v[:first_seen] = NAN
    assert same_bits(run_tiles(replace(step, hole=2**30), tiles, device, by_lane()), clean)


def test_lane_sinks_cap_and_window_are_exact(device):
    step = quantized_step((4, 4), [(100, 20), (0, 9)], 32, group=2, window=70)
    step.sinks, step.softcap = odd_sinks(2), 3.0
    judge(step, [HALVES, LARGE], device)


@for_each("bits", [(8, 8), (4, 4)])
def test_lane_key_bias_is_exact(device, bits):
    step = quantized_step(bits, [(120, 12)], 32, group=2)
    step.bias, step.rope = random(1, 32, seed=3, scale=4.0), (0.6 ** torch.arange(16), 1.2)
    judge(step, [LARGE], device)


@for_each("first, window", [(16, None), (0, 100), (0, None)])
def test_lane_near_tokens_are_exact(device, first, window):
    """A tile without codes, tiles behind codes, and a sequence of near tokens alone."""
    step = quantized_step((4, 4), [(50, 90), (3, 5)], 32, group=2, num_kv_heads=2, window=window)
    step.sinks, step.softcap = odd_sinks(4), 20.0
    near, tiles = near_pages(step, 64, first, device), near_tiles(step, 64, first, 32)
    out = run_tiles(step, tiles, device, by_lane(near))
    assert_near(out, run_tiles(step, tiles, CPU, near_reference(near)).double(), step)


def test_lane_of_any_size_gives_the_same_bits(device):
    """One head, two or all at a time; rows between heads; other sequences before a run."""
    step = quantized_step((4, 4), [(70, 9), (130, 12)], 32, group=2, num_kv_heads=3)
    whole = run_tiles(step, cut_tiles(step, [LARGE, LARGE]), device, by_lane())
    for heads, more_rows in ((1, 0), (2, 8), (3, 64)):
        out = run_tiles(step, cut_tiles(step, [LARGE, LARGE]), device, by_lane(None, heads, None, more_rows), num_sms=2)
        assert same_bits(out, whole)
    alone = step.only([1])
    assert same_bits(run_tiles(alone, cut_tiles(alone, [LARGE]), device, by_lane()), whole[9:])


@for_each("window", [None, 90])
def test_lane_chunks_of_a_prompt_give_the_same_bits(device, window):
    """A block that is clear in one cut is masked in another."""
    step = quantized_step((8, 4), [(60, 140)], 16, group=2, window=window)
    whole = run_tiles(step, cut_tiles(step, [LARGE]), device, by_lane())
    (k, v), outs = step.tokens[0], []
    for first, count in ((60, 7), (67, 100), (167, 33)):
        rows = slice(first - 60, first - 60 + count)
        part = replace(step, rows=[(first, count)], q=step.q[rows], tokens=[(k[: first + count], v[: first + count])])
        outs.append(run_tiles(part, cut_tiles(part, [LARGE]), device, by_lane()))
    assert same_bits(torch.cat(outs), whole)


@for_each("which", [0, 1])
def test_lane_nan_token_spares_earlier_rows(device, which):
    """Other sequences never see it, nor do earlier rows of its own tile or block."""
    step = quantized_step((8, 4), [(0, 40), (0, 5)], 16, group=2)
    tiles = cut_tiles(step, [LARGE, LARGE])
    clean = run_tiles(step, tiles, device, by_lane())
    step.tokens[0][which][30] = NAN
    out = run_tiles(step, tiles, device, by_lane())
    assert same_bits(out[:30], clean[:30])
    assert same_bits(out[40:], clean[40:])
    assert out[30:40].isnan().all()


@for_each("bits", [8, 4, 3])
def test_lane_values_of_zero_and_of_any_size_are_exact(device, bits):
    step = quantized_step((bits, bits), [(60, 9)], 32, group=2)
    step.tokens[0][1][3] *= 2000
    step.tokens[0][1][40] *= 1e-4
    step.tokens[0][1][50] = 0
    judge(step, [LARGE], device)
    step.tokens[0][1].zero_()
    assert not run_tiles(step, cut_tiles(step, [HALVES]), device, by_lane()).any()


@for_each("bounds", [(0, 0, 64), (64, 64), (192, 256, 320)])
def test_lane_empty_ranges_and_small_tiles_are_exact(device, bounds):
    step = quantized_step((3, 3), [(186, 5), (62, 1)], 16, group=2)
    judge(step, [Cut(large=True, bounds=bounds), Cut()], device)


@for_each("start, splits", [(0, 1), (200, 2)])
def test_lane_blocks_of_128_tokens_are_exact(device, start, splits):
    """Splits begin inside a block."""
    step = quantized_step((4, 4), [(start, 70), (60, 3)], 16, group=2, page_tokens=64)
    judge(step, [Cut(large=True, splits=splits), LARGE], device, LaneForm(128))
    judge(step, [Cut(large=True, bounds=(192, 320, 384)), LARGE], device, LaneForm(128))
    near, tiles = near_pages(step, 64, 16, device), near_tiles(step, 64, 16, 32)
    out = run_tiles(step, tiles, device, by_lane(near, form=LaneForm(128)))
    assert_near(out, run_tiles(step, tiles, CPU, near_reference(near)).double(), step)


def test_lane_reference_is_the_one_of_the_present_kernel(device):
    step = quantized_step((5, 4), [(30, 40)], 32, group=2)
    tiles = cut_tiles(step, [LARGE])
    reference = run_tiles(step, tiles, CPU, quantized_attention_reference)
    assert_near(run_tiles(step, tiles, device, by_lane()), reference.double(), step)


@for_each("bits", [(8, 8), (5, 4), (3, 3)])
def test_lane_holds_numbers_of_codes_and_scales_of_either_sign(device, bits):
    step = quantized_step(bits, [(0, 70)], 16, group=1, num_kv_heads=2)

    def attend(call, planes):
        planes.v_scale_PKt.neg_()
        plan = lane_attention.plan_lane(call.work.tiles_X8.cpu().numpy(), 1, None, device)
        lane = lane_attention.make_lane(16, torch.float16, device, 64 * 4 * lane_attention.row_bytes(16))
        lane_attention.fill_lane(call, planes, lane, plan, 1, 1)
        token_L = torch.arange(70, device=device)
        pages = call.page_table_NP[0, token_L // 16].long(), token_L % 16
        keys, values = planes.keys_at(*pages), planes.values_at(*pages)
        k_LD, v_LD = dequantize_keys(keys, bits[0], 16)[:, 1], dequantize_values(values, bits[1], 16)[:, 1]
        k_scale_L, log_L, inverse_L = lane.scales_3L[:, :70].unsqueeze(-1)
        torch.testing.assert_close(lane.k_LD[:70].float() * k_scale_L, k_LD * (step.scale * LOG2_E))
        torch.testing.assert_close(lane.v_LD[:70].float() * torch.exp2(log_L), v_LD)
        torch.testing.assert_close(lane.v_LD[:70].float() / inverse_L, v_LD)
        assert not lane.v_LD[70:128].any()
        planes.v_scale_PKt.neg_()
        return call.out_TX

    run_tiles(step, cut_tiles(step, [LARGE]), device, attend)


def test_lane_plan_gives_each_sequence_a_run_of_whole_blocks():
    """A sequence of small tiles has none, and tiles without codes count for nothing."""
    large = [
        (2, 0, 8, 130, 64, 138, -1, 1),
        (2, 8, 8, 138, 64, 146, -1, 1),
        (0, 20, 4, 0, 0, 4, -1, 1),
        (3, 30, 4, 9, 64, 0, -1, 1),
    ]
    tiles = np.array([(1, len(large), 0, 0, 0, 0, 0, 0), (1, 16, 1, 70, 0, 71, -1, 1), *large])
    plan = lane_attention.plan_lane(tiles, 4, 60, CPU)
    assert plan.blocks_B4.tolist() == [[3, 0, 0, 0], [0, 0, 0, 4], [2, 64, 71, 146], [2, 128, 71, 146]]
    assert plan.starts_N[[0, 2]].tolist() == [0, 0]
    assert plan.num_blocks == 3
    wide = lane_attention.plan_lane(tiles, 4, 60, CPU, block_tokens=128)
    assert wide.blocks_B4[1:, :2].tolist() == [[0, 0], [0, 64], [2, 0], [2, 64], [2, 128], [2, 192]]


def test_lane_holds_as_many_heads_as_fit_evenly():
    assert [lane_attention.lane_heads(n, 128, 8) for n in (64, 8192, 8256, 16384, 32768, 65536, 65600)] == [
        8, 8, 4, 4, 2, 1, 0,
    ]  # fmt: skip
    assert lane_attention.lane_heads(12288, 128, 8) == 4
    assert lane_attention.lane_capacity(128) == 65536
    assert lane_attention.lane_bytes(128) == 65536 * (512 + 12)
    lane = lane_attention.make_lane(64, torch.float16, CPU, 2**20)
    assert sum(part.nbytes for part in lane) == lane_attention.lane_bytes(64, 2**20)


def test_lane_that_holds_no_head_is_refused(device):
    step = quantized_step((4, 4), [(60, 9)], 16, group=2)
    plan = lane_attention.plan_lane(np.array([(0, 1, 0, 0, 0, 0, 0, 0), (0, 0, 9, 60, 0, 69, -1, 1)]), 1, None, CPU)
    lane = lane_attention.make_lane(16, torch.float16, CPU, 64 * lane_attention.row_bytes(16))

    def attend(call, planes):
        return lane_attention.attend_by_lane(call, planes, None, lane, plan)

    with pytest.raises(AssertionError, match="more than the lane"):
        run_tiles(step, cut_tiles(step, [LARGE]), device, attend)

"""Large tiles over quantized pages: every format, head and group, causal masks and windows, p that half precision must hold."""

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.quantized_attention import quantized_geometry
from kernels.exactness import same_bits
from kernels.quantized_kv_cases import (
    BITS,
    FORMATS,
    HEAD_DIMS,
    NAN,
    QUIET,
    Cut,
    assert_near,
    cut_tiles,
    judge,
    peaked_step,
    quantized_step,
    run_tiles,
)

pytestmark = QUIET

LARGE, HALVES = Cut(large=True), Cut(large=True, splits=2)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
CODERS = pytest.mark.parametrize("bits", [8, 4, 3], ids=lambda bits: f"{bits} bits")
"""Every way to take keys and values apart once."""


@pytest.mark.each_value
@DTYPES
@FORMATS
def test_quantized_prefill_is_exact_for_every_format(device, key_bits, value_bits, dtype):
    """Several tiles of a chunk, and splits."""
    step = quantized_step((key_bits, value_bits), [(60, 35), (130, 3)], 128, dtype=dtype)
    judge(step, [LARGE, HALVES], device, num_padding=1)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_quantized_prefill_is_exact_for_every_head_dim(device, head_dim, bits):
    judge(quantized_step((bits, bits), [(62, 5)], head_dim, group=2), LARGE, device)


@for_each("group", [1, 7, 16, 71, 128])
def test_quantized_prefill_is_exact_for_every_grouping(device, group):
    """A tile that is full, and one more row; groups that leave rows of a tile empty, and that are higher than one."""
    for bits in ((8, 4), (4, 4)) if group in (7, 128) else ((4, 4),):
        rows = quantized_geometry(group, 1, *bits).large_rows
        judge(quantized_step(bits, [(50, rows + 1)], 16, group, num_kv_heads=2 if group == 7 else 1), LARGE, device)


@for_each("page_tokens", [1, 16, 64, 128, 256])
def test_quantized_prefill_is_exact_for_every_page_size(device, page_tokens):
    judge(quantized_step((3, 4), [(130, 9)], 32, num_kv_heads=2, page_tokens=page_tokens), HALVES, device)


def test_quantized_prefill_empty_splits_weigh_nothing(device):
    judge(quantized_step((8, 4), [(250, 9), (0, 5)], 16, group=1), Cut(large=True, splits=5), device)


@for_each("bounds", [(0, 0, 64), (64, 64), (192, 256, 320)])
def test_quantized_prefill_empty_ranges_are_exact(device, bounds):
    judge(quantized_step((3, 3), [(186, 5), (62, 4)], 16, group=2), Cut(large=True, bounds=bounds), device)


@for_each("start, bounds", [(0, (64,)), (120, (64, 128))])
def test_quantized_prefill_masks_ranges_seen_by_later_rows(device, start, bounds):
    """Rows before the range get nothing from it, and it takes nothing from the range before it."""
    judge(
        quantized_step((4, 4), [(start, 70 if start == 0 else 12)], 16, group=1), Cut(large=True, bounds=bounds), device
    )


def test_quantized_prefill_window_hides_older_tokens(device):
    step = quantized_step((8, 8), [(99, 3), (126, 30)], 16, group=2, window=8)
    tiles = cut_tiles(step, [LARGE, HALVES])
    clean = run_tiles(step, tiles, device)
    for (k, v), first_seen in zip(step.tokens, (92, 119), strict=True):
        k[:first_seen] = v[:first_seen] = NAN
    assert same_bits(run_tiles(step, tiles, device), clean)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize("factor", [1e-4, 1000], ids=lambda factor: f"times {factor:g}")
def test_quantized_prefill_keys_and_values_of_any_size_are_exact(device, bits, factor):
    for which in (0, 1):
        step = quantized_step((bits, bits), [(60, 9)], group=2)
        step.tokens[0][which].mul_(factor)
        out = run_tiles(step, cut_tiles(step, [LARGE]), device)
        # The type itself holds no more of numbers below 6e-5.
        assert_near(out, step.exact(), step, at_least=1e-2 if which and factor < 1 else 0)


@CODERS
def test_quantized_prefill_token_of_huge_values_stays_exact(device, bits):
    step = quantized_step((bits, bits), [(60, 9)], group=2)
    step.tokens[0][1][62] *= 2000
    assert_near(run_tiles(step, cut_tiles(step, [HALVES]), device), step.exact(), step)


@CODERS
def test_quantized_prefill_zero_keys_and_values_are_exact(device, bits):
    """Keys that are all alike, and values that are nothing."""
    step = quantized_step((bits, bits), [(60, 9)], group=2)
    step.tokens[0][0].zero_()
    judge(step, LARGE, device)
    step.tokens[0][1].zero_()
    assert not run_tiles(step, cut_tiles(step, [HALVES]), device).any()


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(("gap", "peak"), [(3, 0), (60, 70), (3000, 70)], ids=lambda number: str(number))
def test_quantized_prefill_zero_value_at_highest_score_is_exact(device, bits, gap, peak):
    step = peaked_step(bits, 100, gap, peak)
    step.tokens[0][1][peak] = 0
    out = run_tiles(step, cut_tiles(step, [HALVES]), device)
    assert_near(out, step.exact(), step, at_least=1e-3)


def test_quantized_prefill_many_small_weights_do_not_vanish(device):
    """A token 2^20 above 4095 others, which weigh 1/256 of it together: all there is where its value is zero."""
    step = peaked_step(8, 4096, 20, 1234)
    _, v = step.tokens[0]
    v[:] = torch.tensor(4 * [1.53, -0.2, 0.9, -1.53])  # alike, so that their weights are rounded alike
    v[1234] = torch.tensor(8 * [1.0] + 8 * [0.0])
    out, expected = run_tiles(step, cut_tiles(step, [LARGE]), device), step.exact()
    assert_near(out, expected, step)
    others, theirs = (x.double().view(-1, 16)[:, 8:] for x in (out, expected))
    assert 1e-3 < float(theirs.norm() / v[0].norm()) < 1e-2, "the case is not what it says"
    assert float((others - theirs).norm() / theirs.norm()) < 2e-3


@for_each("bad", [NAN, float("inf")])
def test_quantized_prefill_nonfinite_query_stays_in_its_row(device, bad):
    step = quantized_step((4, 4), [(60, 7)], 16, group=2)
    tiles = cut_tiles(step, [LARGE])
    clean = run_tiles(step, tiles, device)
    step.q[3] = bad
    others = [0, 1, 2, 4, 5, 6]
    assert same_bits(run_tiles(step, tiles, device)[others], clean[others])


@for_each("which", [0, 1])
def test_quantized_prefill_nan_token_spares_earlier_tiles(device, which):
    """Tiles that end before it do not see it, and other sequences never do."""
    step = quantized_step((4, 4), [(0, 100), (0, 5)], 16, group=2)
    cuts = [LARGE, LARGE]
    clean = run_tiles(step, cut_tiles(step, cuts), device)
    step.tokens[0][which][90] = NAN
    out = run_tiles(step, cut_tiles(step, cuts), device)
    first = 90 // quantized_geometry(2, 1, 4, 4).large_rows * quantized_geometry(2, 1, 4, 4).large_rows
    assert first > 0
    assert same_bits(out[:first], clean[:first])
    assert same_bits(out[100:], clean[100:])
    assert out[90].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "group", "head_dim", "dtype"),
    [
        *((bits, 8, 128, torch.bfloat16) for bits in BITS),
        ((4, 4), 7, 64, torch.float16),
        ((3, 3), 1, 80, torch.bfloat16),
        ((3, 3), 16, 112, torch.float16),
        ((4, 4), 4, 192, torch.bfloat16),
        ((3, 4), 8, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_quantized_prefill_long_prompts_are_exact_on_gpu(device, bits, group, head_dim, dtype):
    rows = [(0, 300), (900, 70), (2000, 33), (64, 1)]
    step = quantized_step(bits, rows, head_dim, group, num_kv_heads=2, page_tokens=64, dtype=dtype)
    cuts = [LARGE, Cut(large=True, splits=4), HALVES, LARGE]
    judge(step, cuts, device, num_padding=5, num_sms=132)

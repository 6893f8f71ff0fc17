"""Small tiles over quantized pages: every format, head and group, causal masks and windows, p that half precision must hold."""

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
    QuantizedStep,
    assert_near,
    cut_tiles,
    judge,
    peaked_step,
    quantized_step,
    run_tiles,
)

pytestmark = QUIET

SMALL, HALVES = Cut(), Cut(splits=2)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
CODERS = pytest.mark.parametrize("bits", [8, 4, 3], ids=lambda bits: f"{bits} bits")
"""Every way to take keys and values apart once."""


@pytest.mark.each_value
@DTYPES
@FORMATS
def test_quantized_decode_is_exact_for_every_format(device, key_bits, value_bits, dtype):
    """A block that all rows see, one that they see a part of, and one that ends before its page does."""
    step = quantized_step((key_bits, value_bits), [(69, 1), (20, 2), (0, 1)], 128, dtype=dtype)
    judge(step, [HALVES, SMALL, SMALL], device, num_padding=1)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_quantized_decode_is_exact_for_every_head_dim(device, head_dim, bits):
    judge(quantized_step((bits, bits), [(65, 1)], head_dim, group=2), SMALL, device)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 256], ids=lambda size: f"D{size}")
def test_quantized_decode_in_float32_matches_reference(device, head_dim, key_bits, value_bits):
    """The backend declines float32 on a GPU, but runner tests use it in the interpreter. Its tables are twice as wide."""
    step = quantized_step((key_bits, value_bits), [(65, 1), (20, 2)], head_dim, group=2, dtype=torch.float32)
    judge(step, SMALL, device)


@for_each("group", [1, 3, 8, 9, 71])
def test_quantized_decode_is_exact_for_every_grouping(device, group):
    """Also those that leave columns of a tile empty, and those that are wider than one instruction."""
    rows = quantized_geometry(group, 1, 4, 4).small_rows
    step = quantized_step(
        (4, 4), [(64 - rows, rows), (67, 1)], 16, group, num_kv_heads=2 if group < 9 else 1, seed=group
    )
    judge(step, [SMALL, HALVES], device)


@for_each("page_tokens", [1, 16, 64, 128, 256])
def test_quantized_decode_is_exact_for_every_page_size(device, page_tokens):
    judge(quantized_step((3, 4), [(139, 1)], 32, num_kv_heads=2, page_tokens=page_tokens), HALVES, device)


@for_each("start, count", [(0, 3), (61, 5), (64, 2), (126, 8)])
def test_quantized_decode_short_queries_see_no_later_token(device, start, count):
    """Rows of a tile that end in different blocks."""
    judge(quantized_step((4, 4), [(start, count)], 16, group=1), SMALL, device)


def test_quantized_decode_empty_splits_weigh_nothing(device):
    judge(quantized_step((8, 4), [(250, 1), (62, 3)], 16, group=2), Cut(splits=5), device)


@for_each("bounds", [(0, 0, 64), (64, 64), (192, 256, 320)])
def test_quantized_decode_empty_ranges_are_exact(device, bounds):
    judge(quantized_step((3, 3), [(190, 1), (62, 4)], 16, group=2), Cut(bounds=bounds), device)


def test_quantized_decode_masks_range_seen_by_later_rows(device):
    judge(quantized_step((4, 4), [(62, 4), (60, 8)], 16, group=1), Cut(bounds=(64,)), device)


@for_each("number", [NAN, 6e4])
def test_quantized_decode_window_hides_older_tokens(device, number):
    """A token that no row sees any more may hold anything, also in a block that is read for others."""
    step = quantized_step((8, 8), [(99, 1), (126, 3)], 16, group=2, window=8)
    tiles = cut_tiles(step, [SMALL, HALVES])
    clean = run_tiles(step, tiles, device)
    for (k, v), first_seen in zip(step.tokens, (92, 119), strict=True):
        k[:first_seen] = v[:first_seen] = number
    assert same_bits(run_tiles(step, tiles, device), clean)


def hostile(step: QuantizedStep, device: torch.device, at_least: float = 0.0) -> None:
    """Against float64 and nothing else: here scores are so large that the reference rounds queries otherwise."""
    tiles = cut_tiles(step, len(step.rows) * [HALVES])
    assert_near(run_tiles(step, tiles, device), step.exact(), step, at_least)


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize("factor", [1e-4, 1000], ids=lambda factor: f"times {factor:g}")
def test_quantized_decode_keys_and_values_of_any_size_are_exact(device, bits, factor):
    for which in (0, 1):
        step = quantized_step((bits, bits), [(100, 2)], group=2)
        step.tokens[0][which].mul_(factor)
        # The type itself holds no more of numbers below 6e-5.
        hostile(step, device, at_least=1e-2 if which and factor < 1 else 0)


@CODERS
def test_quantized_decode_token_of_huge_values_stays_exact(device, bits):
    """Its weight decides what the others' are rounded to."""
    step = quantized_step((bits, bits), [(100, 1), (100, 1)], group=2)
    for (_, v), token in zip(step.tokens, (3, 80), strict=True):
        v[token] *= 2000
    hostile(step, device)


@CODERS
def test_quantized_decode_clamps_queries_beyond_half_precision(device, bits):
    """A query of 60000 in a model that scales scores by more than one."""
    step = quantized_step((bits, bits), [(70, 1)], group=2)
    step.q[0, 0, :8] = 60000
    step.scale = 1.0
    hostile(step, device)


@CODERS
def test_quantized_decode_zero_keys_weigh_alike(device, bits):
    step = quantized_step((bits, bits), [(100, 1)], group=2)
    step.tokens[0][0].zero_()
    judge(step, HALVES, device)


@CODERS
def test_quantized_decode_zero_values_give_zeros(device, bits):
    step = quantized_step((bits, bits), [(100, 1), (30, 2)], group=2)
    for _, v in step.tokens:
        v.zero_()
    for cut in (SMALL, HALVES):
        out = run_tiles(step, cut_tiles(step, [cut, cut]), device)
        assert not out.any(), "a scale of zero"


@pytest.mark.each_value
@CODERS
@pytest.mark.parametrize(("gap", "peak"), [(3, 0), (20, 0), (60, 70), (3000, 70)], ids=lambda number: str(number))
def test_quantized_decode_zero_value_at_highest_score_is_exact(device, bits, gap, peak):
    """Nothing is left of the others but what their weights are; no weight is infinite, and none is NaN."""
    step = peaked_step(bits, 100, gap, peak)
    step.tokens[0][1][peak] = 0
    hostile(step, device, at_least=1e-3)


def test_quantized_decode_many_small_weights_do_not_vanish(device):
    """A token 2^20 above 4095 others, which weigh 1/256 of it together: all there is where its value is zero."""
    step = peaked_step(8, 4096, 20, 1234)
    _, v = step.tokens[0]
    v[:] = torch.tensor(4 * [1.53, -0.2, 0.9, -1.53])  # alike, so that their weights are rounded alike
    v[1234] = torch.tensor(8 * [1.0] + 8 * [0.0])
    out, expected = run_tiles(step, cut_tiles(step, [SMALL]), device), step.exact()
    assert_near(out, expected, step)
    others, theirs = (x.double().view(-1, 16)[:, 8:] for x in (out, expected))
    assert 1e-3 < float(theirs.norm() / v[0].norm()) < 1e-2, "the case is not what it says"
    assert float((others - theirs).norm() / theirs.norm()) < 2e-3


@for_each("bad", [NAN, float("inf")])
def test_quantized_decode_nonfinite_query_stays_in_its_row(device, bad):
    step = quantized_step((4, 4), [(60, 3), (66, 1)], 16, group=2)
    tiles = cut_tiles(step, [SMALL, HALVES])
    clean = run_tiles(step, tiles, device)
    for row in (1, 3):
        hurt = quantized_step((4, 4), [(60, 3), (66, 1)], 16, group=2)
        hurt.q[row] = bad
        others = [other for other in range(4) if other != row]
        assert same_bits(run_tiles(hurt, tiles, device)[others], clean[others])


@pytest.mark.each_value
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("bits", [8, 4], ids=lambda bits: f"{bits} bits")
def test_quantized_decode_nan_token_stays_in_its_sequence(device, which, bits):
    step = quantized_step((bits, bits), [(30, 1), (70, 1), (5, 1)], 16, group=2)
    cuts = [SMALL, HALVES, SMALL]
    clean = run_tiles(step, cut_tiles(step, cuts), device)
    step.tokens[1][which][20] = NAN
    out = run_tiles(step, cut_tiles(step, cuts), device)
    assert same_bits(out[[0, 2]], clean[[0, 2]])
    assert out[1].isnan().all()


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
def test_quantized_decode_long_contexts_are_exact_on_gpu(device, bits, group, head_dim, dtype):
    rows = [(3000, 1), (4095, 1), (2999, 1), (64, 1), (0, 1), (777, 1)]
    step = quantized_step(bits, rows, head_dim, group, num_kv_heads=2, page_tokens=64, dtype=dtype)
    cuts = [Cut(splits=30), Cut(splits=9), SMALL, SMALL, SMALL, Cut(splits=4)]
    judge(step, cuts, device, num_padding=5, num_sms=132)

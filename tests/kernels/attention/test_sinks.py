"""Attention sinks, soft-capping and poison behind the window, in every attention kernel: against float64, and to the bit."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from holdfast.kernels.attention.quantized_attention import quantized_attention_reference
from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS
from holdfast.kernels.attention.tiled_attention import tiled_attention_reference
from kernels import quantized_kv_cases as quantized
from kernels import tiled_cases as tiled
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.paged_cases import PagedCase, odd_sinks, paged_case
from kernels.quantized_kv_cases import FORMATS, QUIET, QuantizedStep, quantized_step

pytestmark = QUIET

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
CAPS = pytest.mark.parametrize("softcap", [None, 0.5, 30.0], ids=["no cap", "cap 0.5", "cap 30"])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 37, 1000], ids=lambda window: f"window of {window}")
POISONS = pytest.mark.parametrize("bad", [NAN, INF], ids=str)
SHAPES = pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim"),
    [
        (1, 3, 16),
        (2, 1, 256),
        (3, 2, 16),
        (4, 1, 16),
        (5, 1, 24),
        (6, 1, 16),
        (7, 1, 16),
        (8, 1, 64),
        (12, 1, 16),
        (16, 2, 16),
    ],
    ids=lambda number: str(number),
)
TILED_CUTS = {
    "small": tiled.Cut(),
    "small, split": tiled.Cut(splits=3),
    "large": tiled.Cut(large=True),
    "large, split": tiled.Cut(large=True, splits=2),
}
QUANTIZED_CUTS = {
    "small": quantized.Cut(),
    "small, split": quantized.Cut(splits=2),
    "large": quantized.Cut(large=True),
    "large, split": quantized.Cut(large=True, splits=2),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; a GPU would multiply it as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def with_sinks(case, softcap: float | None = None):
    """The case with a sink for each head, and perhaps a cap."""
    return replace(case, sinks=odd_sinks(case.q.shape[1]), softcap=softcap)


def judge_tiled(case: PagedCase, cuts: list[tiled.Cut], device, dtype, num_padding: int = 0) -> torch.Tensor:
    """Kernel and reference against float64; padding is zeros."""
    case = tiled.rounded(case, dtype)
    tiles, num_rows, exact = tiled.cut_tiles(case, cuts, num_padding), len(case.q), case.exact()
    out = tiled.run_tiles(case, tiles, device)
    for written in (out, tiled.run_tiles(case, tiles, CPU, tiled_attention_reference)):
        torch.testing.assert_close(written[:num_rows].double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert not written[num_rows:].any(), "padding is zeros"
    return out


@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "capped"])
def test_sinks_in_tiles_of_every_shape_are_exact(device, widest, group, num_kv_heads, head_dim, softcap):
    """Whole and split tiles in one step; captured shapes have rows of padding."""
    rows = [(69, 1), (66, 1), (30, 3), (60, 9), (0, 1)]
    case = with_sinks(paged_case(rows, head_dim, group, num_kv_heads, page_tokens=16), softcap)
    cuts = [*TILED_CUTS.values(), TILED_CUTS["small"]]
    judge_tiled(case, cuts, device, widest, num_padding=2)


@pytest.mark.each_value
@WINDOWS
@pytest.mark.parametrize("cut", TILED_CUTS.values(), ids=TILED_CUTS)
def test_sinks_in_tiles_with_every_window_are_exact(device, widest, window, cut):
    case = paged_case([(130, 3), (99, 1), (0, 5)], group=2, num_kv_heads=1, page_tokens=16, window=window)
    judge_tiled(with_sinks(case, 1.5), 3 * [cut], device, widest)


@for_each("num_padding", [0, MERGE_BY_HEAD_ROWS])
def test_sink_of_a_split_row_is_added_once(device, widest, num_padding):
    """Splits that see nothing are neutral, also where they are all that was merged so far."""
    case = with_sinks(paged_case([(40, 1), (20, 1)], group=3, num_kv_heads=1))
    for bounds in (17 * [0], [20, *(17 * [41])]):
        judge_tiled(case, 2 * [tiled.Cut(bounds=bounds)], device, widest, num_padding)


def test_sink_far_from_scores_takes_all_or_nothing(device, widest):
    """Also where the other is beyond what float32 can add to it."""
    plain = tiled.rounded(paged_case([(70, 1), (0, 20), (3, 1)], group=2, num_kv_heads=1), widest)
    cuts = [tiled.Cut(splits=2), tiled.Cut(large=True), tiled.Cut()]
    tiles = tiled.cut_tiles(plain, cuts)
    without = tiled.run_tiles(plain, tiles, device)
    for low in (-1e4, -3e38, -INF):
        out = tiled.run_tiles(replace(plain, sinks=torch.full((2,), low)), tiles, device)
        assert same_bits(out, without), f"a sink of {low} changed something"
    for high in (1e4, 3e38, INF):
        out = tiled.run_tiles(replace(plain, sinks=torch.full((2,), high)), tiles, device)
        assert not out.any(), f"beside a sink of {high} nothing is left"
    halves = tiled.run_tiles(replace(plain, q=torch.zeros_like(plain.q), sinks=torch.zeros(2)), tiles, device)
    alone = tiled.run_tiles(replace(plain, q=torch.zeros_like(plain.q)), tiles, device)
    num_seen = torch.tensor([71, *range(1, 21), 4]).unsqueeze(1)
    torch.testing.assert_close(halves.double(), alone.double() * num_seen / (num_seen + 1), rtol=3e-3, atol=1e-3)


@for_each("cut", TILED_CUTS.values())
def test_soft_cap_of_scores_of_any_size_is_finite(device, widest, cut):
    """Scores of tiny ones are left as they are; huge and infinite ones are the cap itself, never NaN."""
    case = tiled.rounded(paged_case([(66, 5)], group=2, num_kv_heads=1, q_scale=1e-3), widest)
    tiles = tiled.cut_tiles(case, [cut])
    capped, plain = (tiled.run_tiles(replace(case, softcap=cap), tiles, device).double() for cap in (50.0, None))
    torch.testing.assert_close(capped, plain, rtol=TOLERANCE[widest], atol=TOLERANCE[widest])
    huge = replace(case, q=(case.q * 1e6).to(widest), softcap=3.0)
    torch.testing.assert_close(
        tiled.run_tiles(huge, tiles, device).double(), huge.exact(), rtol=TOLERANCE[widest], atol=4 * TOLERANCE[widest]
    )
    signs = case.k_plane[..., :1].sign().expand_as(case.k_plane).contiguous()
    infinite = replace(case, q=torch.full_like(case.q, 6e4), k_plane=signs, scale=1e36, softcap=3.0)
    assert tiled.run_tiles(infinite, tiles, device).isfinite().all()


@pytest.mark.each_value
@POISONS
@pytest.mark.parametrize("cut", TILED_CUTS.values(), ids=TILED_CUTS)
def test_tiled_attention_does_not_read_before_the_window(device, widest, cut, bad):
    for window in (1, 70):
        case = tiled.rounded(paged_case([(99, 1), (133, 6)], group=2, num_kv_heads=1, window=window), widest)
        case = with_sinks(case)
        tiles = tiled.cut_tiles(case, [cut, cut])
        clean = tiled.run_tiles(case, tiles, device)
        case.poison_behind_the_window(bad)
        case.forget_pages_behind_the_window(-1)
        assert same_bits(tiled.run_tiles(case, tiles, device), clean), f"{window=}"
        assert tiled.run_tiles(case, tiles, CPU, tiled_attention_reference).isfinite().all()


def judge_native(case: PagedCase) -> None:
    out = case.run(paged_attention)
    assert_as_exact_as_torch(out, case.run(paged_attention_reference), case.exact(), magnitude=8.0)


@pytest.mark.each_value
@SHAPES
@CAPS
def test_c_attention_with_sinks_is_exact_in_every_shape(native, group, num_kv_heads, head_dim, softcap):
    rows = [(0, 1), (63, 1), (0, 65), (10, 3), (100, 17)]
    judge_native(with_sinks(paged_case(rows, head_dim, group, num_kv_heads), softcap))


@pytest.mark.each_value
@WINDOWS
@CAPS
def test_c_attention_with_sinks_is_exact_for_every_window(native, window, softcap):
    rows = [(0, 1), (190, 1), (120, 70), (0, 9)]
    judge_native(with_sinks(paged_case(rows, page_tokens=16, window=window), softcap))
    judge_native(replace(paged_case(rows, page_tokens=16, window=window, q_scale=30.0), softcap=softcap))


def test_c_attention_accepts_sinks_and_scores_of_any_size(native):
    case = paged_case([(70, 3), (0, 1)], group=2, num_kv_heads=1)
    without = case.run(paged_attention)
    for low in (-1e4, -INF):
        assert same_bits(replace(case, sinks=torch.full((2,), low)).run(paged_attention), without)
    for high in (1e4, 3e38, INF):
        assert not replace(case, sinks=torch.full((2,), high)).run(paged_attention).any()
    huge = replace(case, q=case.q * 1e6, softcap=3.0)
    judge_native(huge)
    signs = case.k_plane[..., :1].sign().expand_as(case.k_plane).contiguous()
    infinite = replace(case, q=torch.full_like(case.q, 1e30), k_plane=1e30 * signs, softcap=3.0)
    assert infinite.run(paged_attention).isfinite().all()
    small = replace(case, q=case.q * 1e-3, softcap=50.0)
    torch.testing.assert_close(small.run(paged_attention).double(), small.exact(), rtol=1e-6, atol=1e-6)


@for_each("window, softcap", [(None, None), (5, 2.0), (64, None), (100, 30.0), (1, None)])
def test_c_attention_chunks_with_freed_pages_equal_the_whole(native, window, softcap):
    """Before each chunk everything behind its window becomes NaN and its pages are holes."""
    num_tokens = 140
    whole = with_sinks(paged_case([(0, num_tokens)], window=window), softcap)
    expected = whole.run(paged_attention)
    for chunk in (1, 3, 17, 64, 100):
        case = replace(whole, k_plane=whole.k_plane.clone(), v_plane=whole.v_plane.clone(), pages=[[*whole.pages[0]]])
        for start in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - start)
            case.rows, case.q = [(start, count)], whole.q[start : start + count]
            if window is not None:
                case.pages = [[*whole.pages[0]]]
                case.poison_behind_the_window(NAN)
                case.forget_pages_behind_the_window(-1)
            assert same_bits(case.run(paged_attention), expected[start : start + count]), f"{chunk=} {start=}"
            assert case.run(paged_attention_reference).isfinite().all()


@pytest.mark.each_value
@POISONS
@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 100])
def test_c_attention_does_not_read_before_the_window(native, window, bad):
    case = with_sinks(paged_case([(99, 1), (133, 40), (3, 2)], window=window))
    clean, reference = case.run(paged_attention), case.run(paged_attention_reference)
    case.poison_behind_the_window(bad)
    assert same_bits(case.run(paged_attention), clean), "a number from behind the window"
    case.forget_pages_behind_the_window(-1)
    assert same_bits(case.run(paged_attention), clean)
    assert same_bits(case.run(paged_attention_reference), reference)


def judge_quantized(step: QuantizedStep, cuts: list[quantized.Cut], device, num_padding: int = 0) -> None:
    """As a step is judged elsewhere; heads of which a sink leaves next to nothing are judged by what is left of a value."""
    tiles, num_rows = quantized.cut_tiles(step, cuts, num_padding), len(step.q)
    for out in (
        quantized.run_tiles(step, tiles, device),
        quantized.run_tiles(step, tiles, CPU, quantized_attention_reference),
    ):
        quantized.assert_near(out[:num_rows], step.exact(), step, at_least=0.05)
        assert not out[num_rows:].any(), "padding is zeros"


def with_bias(step: QuantizedStep) -> QuantizedStep:
    num_kv_heads, head_dim = step.tokens[0][0].shape[1:]
    frequency = 1e4 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return replace(step, bias=random(num_kv_heads, head_dim, seed=5), rope=(frequency, 1.0))


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["no cap", "capped"])
def test_sinks_are_exact_for_every_quantized_format(device, key_bits, value_bits, softcap):
    """Small and large tiles, whole and split, with padding; a key bias is capped with the score."""
    rows = [(66, 1), (69, 1), (0, 12), (130, 3)]
    step = with_sinks(quantized_step((key_bits, value_bits), rows, 32, group=4), softcap)
    judge_quantized(step if softcap is None else with_bias(step), [*QUANTIZED_CUTS.values()], device, num_padding=2)


@for_each("group, head_dim", [(1, 64), (8, 256), (12, 16), (16, 64)])
def test_sinks_are_exact_for_quantized_heads_of_every_shape(device, group, head_dim):
    step = with_sinks(quantized_step((4, 4), [(69, 1), (64, 3)], head_dim, group), 20.0)
    judge_quantized(step, [QUANTIZED_CUTS["small, split"], QUANTIZED_CUTS["large"]], device, MERGE_BY_HEAD_ROWS)


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1e-4, 1000.0], ids=lambda size: f"values times {size:g}")
@pytest.mark.parametrize("cut", QUANTIZED_CUTS.values(), ids=QUANTIZED_CUTS)
def test_sinks_are_exact_beside_values_of_any_size(device, size, cut):
    """Kernels keep p within half precision by a bound on values: the sink is no part of that."""
    step = quantized_step((4, 4), [(130, 2)], group=2)
    step.tokens[0][1].mul_(size)
    for sink in (-1e4, 4.0):
        own = replace(step, sinks=torch.full((2,), sink))
        out = quantized.run_tiles(own, quantized.cut_tiles(own, [cut]), device)
        quantized.assert_near(out, own.exact(), own, at_least=1e-2 if size < 1 else 0)
    own = replace(step, sinks=torch.tensor([50.0, INF]))
    out = quantized.run_tiles(own, quantized.cut_tiles(own, [cut]), device)
    assert not out.any(), "half precision has nothing as small as what is left"


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("bits", "has_bias"),
    [*((bits, False) for bits in quantized.BITS), ((8, 4), True), ((4, 4), True), ((3, 3), True)],
    ids=lambda value: {True: "key bias", False: "no bias"}.get(value, str(value)),
)
@pytest.mark.parametrize(
    ("window", "page_tokens", "bad", "hole"),
    [(7, 16, NAN, -1), (70, 4, INF, tiled.BEYOND), (65, 64, INF, -1)],
    ids=["pages of 16", "pages of 4", "pages of 64"],
)
def test_quantized_attention_does_not_read_before_the_window(device, bits, has_bias, window, page_tokens, bad, hole):
    """Neither at codes, signs and scales there, which are read for others, nor at pages that the table has no longer."""
    step = quantized_step(bits, [(99, 1), (130, 3)], 16, 2, 1, page_tokens, window)
    step = with_bias(step) if has_bias else step
    tiles = quantized.cut_tiles(step, [QUANTIZED_CUTS["small"], QUANTIZED_CUTS["large, split"]])
    clean = quantized.run_tiles(step, tiles, device)
    assert same_bits(quantized.run_tiles(replace(step, poison=bad, hole=hole), tiles, device), clean)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "softcap"),
    [(8, 64, 128, None), (8, 64, None, None), (2, 256, 1024, 50.0), (2, 256, None, 50.0), (4, 128, 4096, None)],
    ids=str,
)
def test_sinks_with_long_contexts_are_exact_on_gpu(device, group, head_dim, window, softcap):
    """Shapes of gpt-oss, Gemma and Mistral, with everything behind the window gone."""
    rows = [(5000, 1), (0, 140), (900, 70), (2999, 1), (4095, 1)]
    case = paged_case(rows, head_dim, group, num_kv_heads=2, page_tokens=16, window=window)
    case = tiled.rounded(with_sinks(case, softcap), torch.bfloat16)
    if window is not None:
        case.poison_behind_the_window(NAN)
        case.forget_pages_behind_the_window(tiled.BEYOND)
    large = tiled.Cut(large=True)
    cuts = [tiled.Cut(splits=9), large, tiled.Cut(large=True, splits=4), tiled.Cut(), tiled.Cut(splits=30)]
    tiles = tiled.cut_tiles(case, cuts, num_padding=5)
    out = tiled.run_tiles(case, tiles, device, num_sms=132)
    torch.testing.assert_close(out[: len(case.q)].double(), case.exact(), rtol=1.6e-2, atol=1.6e-2)
    assert not out[len(case.q) :].any()


@pytest.mark.gpu
@FORMATS
def test_sinks_with_quantized_pages_are_exact_on_gpu(device, key_bits, value_bits):
    rows = [(3000, 1), (0, 150), (700, 40), (2000, 1)]
    shape = {"head_dim": 64, "group": 8, "page_tokens": 16, "window": 500, "dtype": torch.bfloat16}
    step = with_bias(with_sinks(quantized_step((key_bits, value_bits), rows, **shape), 20.0))
    step = replace(step, poison=NAN, hole=tiled.BEYOND)
    cuts = [QUANTIZED_CUTS[name] for name in ("small, split", "large", "large, split", "small")]
    judge_quantized(step, cuts, device, num_padding=3)

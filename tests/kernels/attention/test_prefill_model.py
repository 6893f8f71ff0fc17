"""The source of the kernel in warpgroups, run by a model in plain torch: exact, equal bits in any cut, in any schedule."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from kernels.exactness import same_bits
from kernels.paged_cases import PagedCase
from kernels.prefill_cases import (
    ALIGNED,
    CASES,
    INF,
    OTHER_CASES,
    SMALL,
    STEPS,
    THIRDS,
    WHOLE,
    Case,
    cut_rows,
    in_model,
)
from kernels.tiled_cases import NAN, Cut, Tiles, cut_tiles, run_tiles

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")

CPU = torch.device("cpu")
TINY = SMALL._replace(dtype=torch.float32)
ALL_CASES = CASES | OTHER_CASES
QUICK = ("D80, sinks", "D256, all options")
"""Cases of a quick run; the others take seconds each."""


def run(case: PagedCase, tiles: Tiles, num_sms: int = 2, seed: int = 0) -> torch.Tensor:
    """Large tiles in the model, and all else in Triton's interpreter."""
    return run_tiles(case, tiles, CPU, partial(in_model, seed=seed), num_sms)


def judge(case: PagedCase, cuts: list[Cut], num_padding: int = 0, num_sms: int = 2, seed: int = 0) -> None:
    """Run a step against float64; padding is zeros."""
    out, num_rows = run(case, cut_tiles(case, cuts, num_padding), num_sms, seed), len(case.q)
    torch.testing.assert_close(out[:num_rows].double(), case.exact(), rtol=1e-5, atol=1e-5)
    assert same_bits(out[num_rows:], torch.zeros_like(out[num_rows:])), "padding is zeros"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL_CASES]
)
def test_prefill_source_is_exact_and_ignores_cuts(name):
    case = ALL_CASES[name]._replace(dtype=torch.float32)
    for step, (rows, cuts) in STEPS.items():
        try:
            judge(case.make(rows, num_kv_heads=1), cuts, num_padding=1)
        except BaseException as error:
            error.add_note(f"in the step {step}")
            raise
    whole = case.make([(70, 130)], num_kv_heads=1)
    expected = run(whole, cut_tiles(whole, [ALIGNED]))
    for counts in ((77, 53), (1, 90, 39)):
        cut = cut_rows(whole, counts)
        assert same_bits(run(cut, cut_tiles(cut, len(counts) * [ALIGNED])), expected), f"{counts=}"


@for_each("seed", range(12))
def test_prefill_source_gives_equal_bits_in_any_schedule(seed):
    """Copies arrive late or early, and partitions run in any order. One program has several tiles."""
    made = TINY.make([(0, 20), (290, 9), (130, 40)], num_kv_heads=1)
    tiles = cut_tiles(made, [WHOLE, THIRDS, WHOLE])
    assert same_bits(run(made, tiles, 1, seed), run(made, tiles, 3, seed + 100))


@hypothesis_settings(max_examples=15)
@given(data=st.data())
def test_prefill_source_is_exact_for_any_step(data):
    counts = st.one_of(st.just(1), st.integers(1, 90))
    rows = data.draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 300)), counts), min_size=1, max_size=3))
    bounds = st.lists(st.integers(0, 400), max_size=3).map(sorted)
    cuts = [data.draw(st.builds(Cut, st.just(True), st.just(1), st.one_of(st.none(), bounds))) for _ in rows]
    case = Case(
        data.draw(st.sampled_from([64, 72, 256])),
        data.draw(st.sampled_from([1, 2, 3, 16])),
        data.draw(st.sampled_from([16, 48, 64, 256])),
        torch.float32,
        data.draw(st.sampled_from([None, None, 1, 5, 64, 129, 1000])),
    )
    made = case.make(rows, 1, data.draw(st.integers(0, 99)))
    judge(made, cuts, data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99)))


def test_prefill_source_programs_without_a_tile_do_nothing():
    made = TINY.make([(0, 70), (200, 5)], num_kv_heads=1)
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    expected = run(made, tiles, 1)
    for num_sms in (2, 9):
        assert same_bits(run(made, tiles, num_sms), expected), f"{num_sms=}"


@for_each("bad", [NAN, INF])
def test_prefill_source_nonfinite_query_stays_in_its_row(bad):
    made = TINY.make([(0, 70), (166, 3)], num_kv_heads=1)
    tiles = cut_tiles(made, [WHOLE, WHOLE])
    clean = run(made, tiles)
    for row in (3, 71):
        hurt = replace(made, q=made.q.clone())
        hurt.q[row] = bad
        out = run(hurt, tiles)
        others = [other for other in range(73) if other != row]
        assert not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])


@for_each("plane", ["k_plane", "v_plane"])
def test_prefill_source_nonfinite_token_stays_in_its_tile(plane):
    made = TINY.make([(0, 150), (30, 1)], num_kv_heads=1)
    tiles = cut_tiles(made, 2 * [WHOLE])
    clean, position = run(made, tiles), 140
    hurt = replace(made, **{plane: getattr(made, plane).clone()})
    getattr(hurt, plane)[made.pages[0][position // 16] * 16 + position % 16] = NAN
    out = run(hurt, tiles)
    assert same_bits(out[:128], clean[:128])  # a tile has 64 rows
    assert same_bits(out[150:], clean[150:])
    assert out[position:150].isnan().any(-1).all()


def test_prefill_source_caps_of_any_size_are_finite():
    made = TINY.make([(66, 30)], num_kv_heads=1, q_scale=1e-3)
    tiles = cut_tiles(made, [WHOLE])
    capped, plain = (run(replace(made, softcap=cap), tiles).double() for cap in (50.0, None))
    torch.testing.assert_close(capped, plain, rtol=1e-4, atol=1e-4)
    huge = replace(made, q=made.q * 1e6, softcap=3.0)
    torch.testing.assert_close(run(huge, tiles).double(), huge.exact(), rtol=1e-5, atol=1e-5)


def test_prefill_source_sinks_far_from_scores_take_all_or_nothing():
    made = TINY.make([(0, 70), (170, 9)], num_kv_heads=1)
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    without = run(made, tiles)
    for low in (-1e4, -INF):
        assert same_bits(run(replace(made, sinks=torch.full((2,), low)), tiles), without), f"{low=}"
    for high in (1e4, INF):
        assert not run(replace(made, sinks=torch.full((2,), high)), tiles).any(), f"{high=}"

"""Large tiles in warpgroups on a Hopper GPU: exact in every shape, equal bits in any cut, hostile memory, graphs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from kernels.exactness import random, same_bits
from kernels.paged_cases import PagedCase
from kernels.prefill_cases import ALIGNED, CASES, FP16, INF, SMALL, STEPS, THIRDS, WHOLE, cut_rows, exact
from kernels.tiled_cases import NAN, Cut, Tiles, cut_tiles, in_warpgroups, run_tiles
from kernels.triton_cases import assert_allocates_nothing

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""For values around one: weights are rounded to the type of the values, and the result again."""
NUM_SMS = 132


def run(case: PagedCase, tiles: Tiles, device: torch.device) -> torch.Tensor:
    return run_tiles(case, tiles, device, in_warpgroups, NUM_SMS)


def judge(case: PagedCase, cuts: list[Cut], device: torch.device, num_padding: int = 0) -> torch.Tensor:
    """Run a step against float64; padding is zeros."""
    out, tolerance = run(case, cut_tiles(case, cuts, num_padding), device), TOLERANCE[case.q.dtype]
    num_rows = len(case.q)
    torch.testing.assert_close(out[:num_rows].double(), exact(case, device), rtol=tolerance, atol=tolerance)
    assert same_bits(out[num_rows:], torch.zeros_like(out[num_rows:])), "padding is zeros"
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_prefill_warpgroups_are_exact_and_ignore_cuts(device, name):
    """Both properties in one test: a specialization compiles for seconds."""
    case = CASES[name]
    for step, (rows, cuts) in STEPS.items():
        if not all(cut.large for cut in cuts):
            continue  # small tiles would compile too
        try:
            judge(case.make(rows), cuts, device, num_padding=3)
        except BaseException as error:
            error.add_note(f"in the step {step}")
            raise
    whole = case.make([(70, 330)])
    expected = run(whole, cut_tiles(whole, [ALIGNED]), device)
    for counts in ((77, 253), (1, 200, 129)):
        cut = cut_rows(whole, counts)
        assert same_bits(run(cut, cut_tiles(cut, len(counts) * [ALIGNED]), device), expected), f"{counts=}"


def long_contexts(device: torch.device) -> None:
    rows = [(3000, 1), (0, 140), (900, 70), (2999, 1), (4095, 1)]
    judge(SMALL.make(rows), [WHOLE, WHOLE, Cut(large=True, splits=4), WHOLE, THIRDS], device, num_padding=5)


def other_company(device: torch.device) -> None:
    """Rows get the same bits."""
    made = SMALL.make([(0, 300), (900, 41), (64, 2), (9, 1)])
    expected = run(made, cut_tiles(made, 4 * [WHOLE]), device)
    for order in ([1, 0], [3, 2, 0], [0], [3]):
        rows = [made.row_starts[i] + row for i in order for row in range(made.rows[i][1])]
        some = replace(
            made,
            rows=[made.rows[i] for i in order],
            q=made.q[rows],
            pages=[made.pages[i] for i in order],
            tokens=[made.tokens[i] for i in order],
        )
        out = run(some, cut_tiles(some, len(order) * [WHOLE], num_padding=16), device)
        assert same_bits(out[: len(rows)], expected[rows]), f"{order=}"


def other_programs(device: torch.device) -> None:
    """Most programs have no tile, or one has all of them; and again."""
    made = SMALL.make([(0, 330), (1500, 9)])
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    expected = run(made, tiles, device)
    for num_sms in (1, 3, *(10 * [NUM_SMS])):
        assert same_bits(run_tiles(made, tiles, device, in_warpgroups, num_sms), expected), f"{num_sms=}"


def any_step(device: torch.device) -> None:
    @hypothesis_settings(max_examples=40)
    @given(data=st.data())
    def judge_step(data) -> None:
        counts = st.one_of(st.just(1), st.integers(1, 300))
        row = st.tuples(st.one_of(st.just(0), st.integers(0, 600)), counts)
        rows = data.draw(st.lists(row, min_size=1, max_size=5))
        bounds = st.lists(st.integers(0, 900), max_size=4).map(sorted)
        cuts = [data.draw(st.builds(Cut, st.just(True), st.just(1), st.one_of(st.none(), bounds))) for _ in rows]
        made = SMALL.make(rows, seed=data.draw(st.integers(0, 99)))
        judge(made, cuts, device, data.draw(st.integers(0, 2)))

    judge_step()


def nonfinite_query(device: torch.device) -> None:
    """It stays in its row."""
    made = SMALL.make([(0, 70), (166, 3)])
    tiles = cut_tiles(made, [WHOLE, WHOLE])
    clean = run(made, tiles, device)
    for row, bad in ((3, NAN), (69, INF), (71, NAN)):
        hurt = replace(made, q=made.q.clone())
        hurt.q[row] = bad
        out = run(hurt, tiles, device)
        others = [other for other in range(73) if other != row]
        assert not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])


def nonfinite_token(device: torch.device) -> None:
    """Earlier tiles do not see it. Sequences on pages beside it never do."""
    made = SMALL.make([(0, 200), (30, 1), (0, 5)])
    tiles = cut_tiles(made, 3 * [WHOLE])
    clean, position = run(made, tiles, device), 140
    for plane in ("k_plane", "v_plane"):
        hurt = replace(made, **{plane: getattr(made, plane).clone()})
        getattr(hurt, plane)[made.pages[0][position // 16] * 16 + position % 16] = NAN
        out = run(hurt, tiles, device)
        assert same_bits(out[:128], clean[:128])  # a tile has 64 rows
        assert same_bits(out[200:], clean[200:])
        assert out[position:200].isnan().any(-1).all()


def distant_scores(device: torch.device) -> None:
    """They pick one token."""
    made = SMALL.make([(0, 90), (170, 9)], q_scale=300.0)
    out = run(made, cut_tiles(made, [WHOLE, THIRDS]), device)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), exact(made, device), rtol=2e-3, atol=0.1)


class Step:
    """A step in fixed buffers, as a graph reads them."""

    def __init__(self, device: torch.device, num_rows: int = 80) -> None:
        made = SMALL.make([(0, 304)])  # whole pages, in any order
        self.q = random(num_rows, 4, 64, seed=9).to(device, FP16)
        self.planes = made.k_plane.to(device), made.v_plane.to(device)
        self.table = torch.tensor([made.pages[0]], dtype=torch.int32, device=device)
        self.tiles = torch.zeros(8, 8, dtype=torch.int32, device=device)
        self.rows = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.out = torch.full((num_rows, 256), NAN, dtype=FP16, device=device)
        self.partials = torch.empty(4 * num_rows, 256, device=device), torch.empty(4 * num_rows, 4, device=device)

    def fill(self, tiles: list[tuple[int, ...]], rows: list[tuple[int, int]]) -> None:
        """Overwrite the lists; rows after the last one are padding."""
        listed = torch.tensor([(0, len(tiles), 0, 0, 0, 0, 0, 0), *tiles], dtype=torch.int32)
        self.tiles[: len(listed)] = listed.to(self.tiles.device)
        self.rows.zero_()
        if rows:
            self.rows[: len(rows)] = torch.tensor(rows, dtype=torch.int32).to(self.rows.device)
        self.out.fill_(NAN)

    def attend(self) -> None:
        work = TileWork(self.tiles, self.rows, has_small=False, has_large=True, has_merge=True)
        call = TileCall(self.q, self.table, work, Scoring(0.125), *self.partials, self.out, NUM_SMS)
        in_warpgroups(call, *self.planes, 16)


LISTS: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, int]]]] = {
    "a prompt": ([(0, 0, 64, 0, 0, 64, -1, 1), (0, 64, 9, 64, 0, 73, -1, 1)], 73 * [(0, 1)]),
    "nothing": ([], []),
    "a row": ([(0, 0, 1, 299, 0, 300, -1, 1)], [(0, 1)]),
    "splits": ([(0, 0, 3, 250, 0, 128, 0, 2), (0, 0, 3, 250, 128, 253, 1, 2)], [(0, 2), (2, 2), (4, 2)]),
}


def graph_of_other_steps(device: torch.device) -> None:
    """Captured without a tile. Lists, block table, queries and pages change between replays."""
    step = Step(device)
    step.fill([], [])
    step.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.attend()
    for name in ("a prompt", "nothing", "splits", "a row", "a prompt"):
        step.q.copy_(random(80, 4, 64, seed=len(name)))
        step.planes[0].mul_(-0.5)
        step.table.copy_(step.table.flip(1))
        step.fill(*LISTS[name])
        step.attend()
        expected = step.out.clone()
        step.out.fill_(NAN)
        graph.replay()
        num_rows = len(LISTS[name][1])
        assert same_bits(step.out, expected), name
        assert step.out[:num_rows].isfinite().all()
        assert not step.out[num_rows:].any()


def allocations(device: torch.device) -> None:
    step = Step(device)
    step.fill(*LISTS["splits"])
    assert_allocates_nothing(step.attend)


CHECKS = (
    *(long_contexts, other_company, other_programs, any_step, nonfinite_query, nonfinite_token, distant_scores),
    *(graph_of_other_steps, allocations),
)


@pytest.mark.gpu
@for_each("check", CHECKS)
def test_prefill_warpgroups_of_one_specialization_keep_every_property(device, check):
    """In one test, so that one process compiles it."""
    check(device)


@pytest.mark.gpu
def test_prefill_warpgroups_far_sinks_and_any_cap_are_finite(device):
    """A sink takes all or nothing. Tiny scores stay as they are, and huge and infinite ones become the cap."""
    case = SMALL._replace(window=1000, has_sinks=True, softcap=50.0)
    made = case.make([(0, 90), (170, 9)])
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    without = run(replace(made, sinks=torch.full((4,), -INF)), tiles, device)
    for low in (-1e4, -3e38):
        assert same_bits(run(replace(made, sinks=torch.full((4,), low)), tiles, device), without), f"{low=}"
    for high in (1e4, 3e38, INF):
        assert not run(replace(made, sinks=torch.full((4,), high)), tiles, device).any(), f"{high=}"
    for q_scale, cap in ((1e-3, 50.0), (1e3, 3.0)):
        judge(case._replace(softcap=cap).make([(66, 80)], q_scale=q_scale), [WHOLE], device)
    signs = made.k_plane[..., :1].sign().expand_as(made.k_plane).contiguous()
    infinite = replace(made, q=torch.full_like(made.q, 6e4), k_plane=signs, scale=1e36, softcap=3.0)
    assert run(infinite, tiles, device).isfinite().all()

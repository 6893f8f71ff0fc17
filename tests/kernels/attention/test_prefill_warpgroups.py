"""Large tiles in warpgroups on a Hopper GPU: exact in every shape, equal bits in any cut, hostile memory, graphs."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from kernels.exactness import random, same_bits
from kernels.paged_cases import PagedCase, odd_sinks, paged_case
from kernels.tiled_cases import BEYOND, NAN, Cut, Tiles, cut_tiles, in_warpgroups, rounded, run_tiles
from kernels.triton_cases import assert_allocates_nothing
from scratch_memory import Memory

INF = float("inf")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""For values around one: weights are rounded to the type of the values, and the result again."""
NUM_SMS = 132
WHOLE, ALIGNED, THIRDS = Cut(large=True), Cut(large=True, is_aligned=True), Cut(large=True, splits=3)


class Case(NamedTuple):
    """A specialization of the kernel."""

    head_dim: int = 128
    group: int = 8
    page_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None

    def make(
        self, rows: list[tuple[int, int]], num_kv_heads: int = 2, seed: int = 0, q_scale: float = 3.0
    ) -> PagedCase:
        """Make a step; pages before a window are gone, and their tokens are NaN."""
        made = paged_case(
            rows, self.head_dim, self.group, num_kv_heads, self.page_tokens, self.window, seed, q_scale=q_scale
        )
        if self.window is not None:
            made.poison_behind_the_window(NAN)
            made.forget_pages_behind_the_window(BEYOND)
        made.softcap = self.softcap
        made.sinks = odd_sinks(made.q.shape[1]) if self.has_sinks else None
        return rounded(made, self.dtype)


FP16 = torch.float16
CASES = {
    "D128": Case(),
    "D128, group 1": Case(group=1),
    "D128, group 4": Case(group=4),
    "D128, group 5": Case(group=5),
    "D128, group 7, float16": Case(group=7, dtype=FP16),
    "D128, group 16": Case(group=16),
    "D128, group 71": Case(group=71),
    "D128, window": Case(window=100),
    "D128, window of one": Case(window=1, group=2),
    "D128, window and sinks": Case(window=300, has_sinks=True, group=4),
    "D128, sinks": Case(has_sinks=True),
    "D128, capped": Case(softcap=30.0, group=2),
    "D128, all options, pages of 32": Case(window=128, has_sinks=True, softcap=20.0, group=5, page_tokens=32),
    "D128, pages of 48": Case(page_tokens=48),
    "D128, pages of 256": Case(page_tokens=256),
    "D64": Case(64),
    "D64, group 7, float16": Case(64, 7, dtype=FP16),
    "D64, window and sinks": Case(64, 8, window=128, has_sinks=True),
    "D72, group 3": Case(72, 3),
    "D80": Case(80, 1, dtype=FP16),
    "D96": Case(96, 1),
    "D96, float16, window": Case(96, 4, 64, FP16, window=70),
    "D112, sinks": Case(112, 2, has_sinks=True),
    "D160, window": Case(160, 4, 32, window=90),
    "D192": Case(192, 8, 64),
    "D256": Case(256, 4),
    "D256, capped, window": Case(256, 2, window=200, softcap=50.0),
    "D256, float16, pages of 256": Case(256, 7, 256, FP16),
    "D256, all options": Case(256, 8, window=64, has_sinks=True, softcap=20.0),
}
SMALL = Case(64, 2, dtype=FP16)
"""The specialization of tests that need one only."""


def run(case: PagedCase, tiles: Tiles, device: torch.device, memory: Memory | None = None) -> torch.Tensor:
    return run_tiles(case, tiles, device, in_warpgroups, NUM_SMS, memory=memory)


def exact(case: PagedCase, device: torch.device) -> torch.Tensor:
    """Attention in float64 from the tokens themselves, [T, H * D]; like `PagedCase.exact`, all rows of a sequence at once."""
    parts = []
    for (start, count), row, tokens in zip(case.rows, case.row_starts, case.tokens, strict=True):
        group = case.q.shape[1] // tokens[0].shape[1]
        k_HLD, v_HLD = (x.to(device).double().repeat_interleave(group, 1).transpose(0, 1) for x in tokens)
        q_HnD = case.q[row : row + count].to(device).double().transpose(0, 1)
        distance_nL = torch.arange(start, start + count).unsqueeze(1) - torch.arange(k_HLD.shape[1])
        m_seen_nL = (distance_nL >= 0) & (distance_nL < (case.window or BEYOND))
        score_HnL = q_HnD @ k_HLD.transpose(1, 2) * case.scale
        if case.softcap is not None:
            score_HnL = case.softcap * torch.tanh(score_HnL / case.softcap)
        score_HnL = score_HnL.masked_fill(~m_seen_nL.to(device), -INF)
        if case.sinks is not None:
            sinks_Hn1 = case.sinks.to(device).double().view(-1, 1, 1).expand(-1, count, 1)
            score_HnL = torch.cat((score_HnL, sinks_Hn1), -1)
        weights_HnL = score_HnL.softmax(-1)[..., : k_HLD.shape[1]]
        parts.append((weights_HnL @ v_HLD).transpose(0, 1).reshape(count, -1).cpu())
    return torch.cat(parts)


def judge(case: PagedCase, cuts: list[Cut], device: torch.device, num_padding: int = 0) -> torch.Tensor:
    """Run a step against float64; padding is zeros."""
    out, tolerance = run(case, cut_tiles(case, cuts, num_padding), device), TOLERANCE[case.q.dtype]
    num_rows = len(case.q)
    torch.testing.assert_close(out[:num_rows].double(), exact(case, device), rtol=tolerance, atol=tolerance)
    assert same_bits(out[num_rows:], torch.zeros_like(out[num_rows:])), "padding is zeros"
    return out


STEPS: dict[str, tuple[list[tuple[int, int]], list[Cut]]] = {
    "one prompt": ([(0, 200)], [WHOLE]),
    "odd lengths": ([(0, 1), (0, 63), (0, 129), (5, 70)], 4 * [WHOLE]),
    "after contexts": ([(127, 40), (128, 3), (500, 90), (383, 1)], 4 * [WHOLE]),
    "splits": ([(300, 20), (0, 150), (64, 65)], [THIRDS, THIRDS, Cut(large=True, bounds=[7, 71])]),
    "empty splits": ([(90, 4), (60, 9)], [Cut(large=True, bounds=[0, 0, 30, 30]), Cut(large=True, bounds=[69])]),
    "aligned starts": ([(200, 60), (330, 9)], 2 * [ALIGNED]),
    "small tiles beside": ([(99, 1), (0, 70), (40, 1)], [Cut(), WHOLE, Cut(splits=2)]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_prefill_warpgroups_are_exact_and_ignore_cuts(device, name):
    """Both properties in one test: a specialization compiles for seconds."""
    case = CASES[name]
    for step, (rows, cuts) in STEPS.items():
        try:
            judge(case.make(rows), cuts, device, num_padding=3)
        except BaseException as error:
            error.add_note(f"in the step {step}")
            raise
    whole = case.make([(70, 330)])
    expected = run(whole, cut_tiles(whole, [ALIGNED]), device)
    for counts in ((77, 253), (1, 200, 129)):
        starts = [70 + sum(counts[:i]) for i in range(len(counts))]
        rows = list(zip(starts, counts, strict=True))
        cut = replace(whole, rows=rows, pages=len(rows) * whole.pages, tokens=len(rows) * whole.tokens)
        assert same_bits(run(cut, cut_tiles(cut, len(rows) * [ALIGNED]), device), expected), f"{counts=}"


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "head_dim"), [(8, 128), (7, 64), (8, 256)])
def test_prefill_warpgroups_long_contexts_are_exact(device, group, head_dim):
    rows = [(3000, 1), (0, 140), (900, 70), (2999, 1), (4095, 1)]
    made = Case(head_dim, group).make(rows, num_kv_heads=1)
    judge(made, [WHOLE, WHOLE, Cut(large=True, splits=4), Cut(), THIRDS], device, num_padding=5)


@pytest.mark.gpu
def test_prefill_warpgroups_give_a_row_equal_bits_in_any_company(device):
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


@pytest.mark.gpu
@for_each("num_sms", [1, 3, 132])
def test_prefill_warpgroups_of_any_number_give_equal_bits(device, num_sms):
    """Most programs have no tile, or one has all of them."""
    made = SMALL.make([(0, 130), (700, 9)])
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    expected = run(made, tiles, device)
    for _ in range(5):
        assert same_bits(run_tiles(made, tiles, device, in_warpgroups, num_sms), expected)


@hypothesis_settings(max_examples=40)
@given(data=st.data())
@pytest.mark.gpu
def test_prefill_warpgroups_are_exact_for_any_step(device, data):
    counts = st.one_of(st.just(1), st.integers(1, 300))
    rows = data.draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 600)), counts), min_size=1, max_size=5))
    bounds = st.lists(st.integers(0, 900), max_size=4).map(sorted)
    cuts = [data.draw(st.builds(Cut, st.just(True), st.just(1), st.one_of(st.none(), bounds))) for _ in rows]
    window = data.draw(st.sampled_from([None, None, 1, 5, 64, 129, 1000]))
    made = SMALL._replace(window=window).make(rows, seed=data.draw(st.integers(0, 99)))
    judge(made, cuts, device, data.draw(st.integers(0, 2)))


@pytest.mark.gpu
@for_each("bad", [NAN, INF])
def test_prefill_warpgroups_nonfinite_query_stays_in_its_row(device, bad):
    made = SMALL.make([(0, 70), (166, 3)])
    tiles = cut_tiles(made, [WHOLE, WHOLE])
    clean = run(made, tiles, device)
    for row in (3, 69, 71):
        hurt = replace(made, q=made.q.clone())
        hurt.q[row] = bad
        out = run(hurt, tiles, device)
        others = [other for other in range(73) if other != row]
        assert not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])


@pytest.mark.gpu
@for_each("plane", ["k_plane", "v_plane"])
def test_prefill_warpgroups_nonfinite_token_stays_in_its_tile(device, plane):
    """Earlier tiles do not see it. Sequences on pages beside it never do."""
    made = SMALL.make([(0, 200), (30, 1), (0, 5)])
    tiles = cut_tiles(made, 3 * [WHOLE])
    clean, position = run(made, tiles, device), 140
    hurt = replace(made, **{plane: getattr(made, plane).clone()})
    getattr(hurt, plane)[made.pages[0][position // 16] * 16 + position % 16] = NAN
    out = run(hurt, tiles, device)
    assert same_bits(out[:128], clean[:128])  # a tile has 64 rows
    assert same_bits(out[200:], clean[200:])
    assert out[position:200].isnan().any(-1).all()


@pytest.mark.gpu
def test_prefill_warpgroups_distant_scores_pick_one_token(device):
    made = SMALL.make([(0, 90), (170, 9)], q_scale=300.0)
    out = run(made, cut_tiles(made, [WHOLE, THIRDS]), device)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), exact(made, device), rtol=2e-3, atol=0.1)


@pytest.mark.gpu
def test_prefill_warpgroups_sinks_far_from_scores_take_all_or_nothing(device):
    made = SMALL.make([(0, 90), (170, 9)], num_kv_heads=1)
    tiles = cut_tiles(made, [WHOLE, THIRDS])
    without = run(made, tiles, device)
    for low in (-1e4, -3e38, -INF):
        assert same_bits(run(replace(made, sinks=torch.full((2,), low)), tiles, device), without), f"{low=}"
    for high in (1e4, 3e38, INF):
        assert not run(replace(made, sinks=torch.full((2,), high)), tiles, device).any(), f"{high=}"


@pytest.mark.gpu
def test_prefill_warpgroups_caps_of_any_size_are_finite(device):
    """Tiny scores stay as they are. Huge and infinite ones become the cap."""
    made = SMALL.make([(66, 80)], num_kv_heads=1, q_scale=1e-3)
    tiles = cut_tiles(made, [WHOLE])
    capped, plain = (run(replace(made, softcap=cap), tiles, device).double() for cap in (50.0, None))
    torch.testing.assert_close(capped, plain, rtol=2e-3, atol=2e-3)
    huge = replace(made, q=(made.q * 1e6).half(), softcap=3.0)
    torch.testing.assert_close(run(huge, tiles, device).double(), exact(huge, device), rtol=2e-3, atol=8e-3)
    signs = made.k_plane[..., :1].sign().expand_as(made.k_plane).contiguous()
    infinite = replace(made, q=torch.full_like(made.q, 6e4), k_plane=signs, scale=1e36, softcap=3.0)
    assert run(infinite, tiles, device).isfinite().all()


class Step:
    """A step in fixed buffers, as a graph reads them."""

    def __init__(self, device: torch.device, num_rows: int = 80) -> None:
        made = SMALL.make([(0, 304)], num_kv_heads=1)  # whole pages, in any order
        self.q = random(num_rows, 2, 64, seed=9).to(device, FP16)
        self.planes = made.k_plane.to(device), made.v_plane.to(device)
        self.table = torch.tensor([made.pages[0]], dtype=torch.int32, device=device)
        self.tiles = torch.zeros(8, 8, dtype=torch.int32, device=device)
        self.rows = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.out = torch.full((num_rows, 128), NAN, dtype=FP16, device=device)
        self.partials = torch.empty(4 * num_rows, 128, device=device), torch.empty(4 * num_rows, 2, device=device)

    def fill(self, tiles: list[tuple[int, ...]], rows: list[tuple[int, int]]) -> None:
        """Overwrite the lists; rows after the last one are padding."""
        listed = torch.tensor([(0, len(tiles), 0, 0, 0, 0, 0, 0), *tiles], dtype=torch.int32)
        self.tiles[: len(listed)] = listed.to(self.tiles.device)
        self.rows.zero_()
        if rows:
            self.rows[: len(rows)] = torch.tensor(rows, dtype=torch.int32).to(self.rows.device)
        self.out.fill_(NAN)

    def attend(self) -> None:
        work = TileWork(self.tiles, self.rows, has_small=True, has_large=True, has_merge=True)
        call = TileCall(self.q, self.table, work, Scoring(0.125), *self.partials, self.out, NUM_SMS)
        in_warpgroups(call, *self.planes, 16)


LISTS: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, int]]]] = {
    "a prompt": ([(0, 0, 64, 0, 0, 64, -1, 1), (0, 64, 9, 64, 0, 73, -1, 1)], 73 * [(0, 1)]),
    "nothing": ([], []),
    "a row": ([(0, 0, 1, 299, 0, 300, -1, 1)], [(0, 1)]),
    "splits": ([(0, 0, 3, 250, 0, 128, 0, 2), (0, 0, 3, 250, 128, 253, 1, 2)], [(0, 2), (2, 2), (4, 2)]),
}


@pytest.mark.gpu
def test_prefill_warpgroups_graph_replays_other_steps(device):
    """Captured without a tile. Lists, block table, queries and pages change between replays."""
    step = Step(device)
    step.fill([], [])
    step.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.attend()
    for name in ("a prompt", "nothing", "splits", "a row", "a prompt"):
        step.q.copy_(random(80, 2, 64, seed=len(name)))
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


@pytest.mark.gpu
def test_prefill_warpgroups_allocate_nothing(device):
    step = Step(device)
    step.fill(*LISTS["splits"])
    assert_allocates_nothing(step.attend)


@pytest.mark.gpu
def test_prefill_warpgroups_are_deterministic(device):
    made = Case().make([(0, 300), (1500, 140)])
    tiles = cut_tiles(made, [WHOLE, Cut(large=True, splits=4)])
    expected = run(made, tiles, device)
    for _ in range(10):
        assert same_bits(run(made, tiles, device), expected)

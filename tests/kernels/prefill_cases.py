"""Steps for large tiles in warpgroups: a case for each kind of specialization, and attention in float64."""

from dataclasses import replace
from typing import NamedTuple

import torch

from holdfast.kernels.attention import prefill_warpgroups, warpgroup_tiles
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.attention.tiled_attention import LargeKernel, tiled_attention
from kernels.gluon_model import modelled
from kernels.paged_cases import PagedCase, odd_sinks, paged_case
from kernels.tiled_cases import BEYOND, NAN, Cut, rounded

INF = float("inf")
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
        """Make a step. Pages before a window belong to others by now, and are NaN."""
        made = paged_case(
            rows, self.head_dim, self.group, num_kv_heads, self.page_tokens, self.window, seed, q_scale=q_scale
        )
        if self.window is not None:
            made.poison_behind_the_window(NAN)
            own = {page for pages in made.pages for page in pages}
            # A page of NaN is worse than one outside of the plane: copies of that give zeros.
            made.forget_pages_behind_the_window(min(set(range(len(own) + 3)) - own))
        made.softcap = self.softcap
        made.sinks = odd_sinks(made.q.shape[1]) if self.has_sinks else None
        return rounded(made, self.dtype)


FP16 = torch.float16
CASES = {
    "D128": Case(),
    "D128, all options": Case(group=5, page_tokens=48, dtype=FP16, window=300, has_sinks=True, softcap=20.0),
    "D64, window and sinks": Case(64, window=128, has_sinks=True),
    "D80, sinks": Case(80, 1, 32, has_sinks=True),
    "D96, window": Case(96, 3, 64, FP16, window=100),
    "D256, pages of 256": Case(256, 4, 256),
    "D256, all options": Case(256, 2, window=70, has_sinks=True, softcap=50.0),
}
"""Specializations that a GPU runs: each compiles for seconds there."""
OTHER_CASES = {
    "D128, group 1": Case(group=1),
    "D128, group 16": Case(group=16),
    "D128, group 71": Case(group=71),
    "D128, window of one": Case(window=1, group=2),
    "D128, pages of 256": Case(page_tokens=256),
    "D64, group 7": Case(64, 7),
    "D72": Case(72, 3),
    "D112": Case(112, 2),
    "D160, window": Case(160, 4, 32, window=90),
    "D192": Case(192, 8, 64),
    "D256, window": Case(256, 8, window=64),
}
"""Specializations that only the model runs. All of them, and more, ran on an H200 once (docs/log.md, 2026-11-19)."""
SMALL = Case(64, 2, dtype=FP16)
"""The specialization of tests that need one only."""
STEPS: dict[str, tuple[list[tuple[int, int]], list[Cut]]] = {
    "one prompt": ([(0, 200)], [WHOLE]),
    "odd lengths": ([(0, 1), (0, 63), (0, 129), (5, 70)], 4 * [WHOLE]),
    "after contexts": ([(127, 40), (128, 3), (500, 90), (383, 1)], 4 * [WHOLE]),
    "splits": ([(300, 20), (0, 150), (64, 65)], [THIRDS, THIRDS, Cut(large=True, bounds=[7, 71])]),
    "empty splits": ([(90, 4), (60, 9)], [Cut(large=True, bounds=[0, 0, 30, 30]), Cut(large=True, bounds=[69])]),
    "aligned starts": ([(200, 60), (330, 9)], 2 * [ALIGNED]),
    "small tiles beside": ([(99, 1), (0, 70), (40, 1)], [Cut(), WHOLE, Cut(splits=2)]),
}


def in_model(
    call: TileCall, k_plane: torch.Tensor, v_plane: torch.Tensor, page_tokens: int, seed: int = 0
) -> torch.Tensor:
    """`tiled_attention`, with large tiles in the model of the kernel."""
    with modelled(prefill_warpgroups, warpgroup_tiles, seed=seed):
        return tiled_attention(call, k_plane, v_plane, page_tokens, LargeKernel("warpgroups", "a test"))


def cut_rows(whole: PagedCase, counts: tuple[int, ...]) -> PagedCase:
    """Return the rows of one sequence as several sequences over the same pages."""
    starts = [whole.rows[0][0] + sum(counts[:i]) for i in range(len(counts))]
    rows = list(zip(starts, counts, strict=True))
    return replace(whole, rows=rows, pages=len(rows) * whole.pages, tokens=len(rows) * whole.tokens)


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

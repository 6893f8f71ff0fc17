"""Sequences scattered over pages, with poison in all other slots."""

from dataclasses import dataclass

import torch

from holdfast.kernels.attention.paged_attention import Scoring
from kernels.exactness import random

# T rows, H query heads, K key/value heads, D head dim, L stored tokens of a sequence, S slots


@dataclass
class PagedCase:
    """Sequences of a step over one set of planes; keys and values of sequence i are also kept as tokens[i]."""

    rows: list[tuple[int, int]]
    """(position of the first row, number of rows) of each sequence."""
    q: torch.Tensor
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    pages: list[list[int]]
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    page_tokens: int
    scale: float
    window: int | None
    sinks: torch.Tensor | None = None
    """[H] in float32."""
    softcap: float | None = None

    @property
    def row_starts(self) -> list[int]:
        starts, row = [], 0
        for _, count in self.rows:
            starts.append(row)
            row += count
        return starts

    def tables(self, order: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """pages_P and sequences_N4 as the kernel takes them, sequences in the given order."""
        pages: list[int] = []
        sequences = []
        for index in range(len(self.rows)) if order is None else order:
            (start, count), row = self.rows[index], self.row_starts[index]
            sequences.append((row, count, start, len(pages)))
            pages += self.pages[index]
        return torch.tensor(pages, dtype=torch.int32), torch.tensor(sequences, dtype=torch.int64).view(-1, 4)

    def run(self, function, order: list[int] | None = None) -> torch.Tensor:
        pages, sequences = self.tables(order)
        scoring = Scoring(self.scale, self.window, self.sinks, self.softcap)
        return function(self.q, self.k_plane, self.v_plane, pages, sequences, self.page_tokens, scoring)

    def exact(self) -> torch.Tensor:
        """In float64, from the tokens themselves: no page is looked at."""
        num_rows, num_heads, head_dim = self.q.shape
        out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float64)
        for (start, count), row, (k, v) in zip(self.rows, self.row_starts, self.tokens, strict=True):
            for i in range(count):
                end = start + i + 1
                low = 0 if self.window is None else max(0, end - self.window)
                group = num_heads // k.shape[1]
                keys = k[low:end].double().repeat_interleave(group, 1)
                values = v[low:end].double().repeat_interleave(group, 1)
                scores = torch.einsum("hd,lhd->hl", self.q[row + i].double(), keys) * self.scale
                out[row + i] = torch.einsum("hl,lhd->hd", exact_weights(scores, self.sinks, self.softcap), values)
        return out.view(num_rows, num_heads * head_dim)

    def poison_behind_the_window(self, bad: float) -> None:
        """Every slot before what a sequence's first row sees: what other owners of these pages may have left there."""
        assert self.window is not None
        for (start, _), own in zip(self.rows, self.pages, strict=True):
            for position in range(max(0, start - self.window + 1)):
                slot = own[position // self.page_tokens] * self.page_tokens + position % self.page_tokens
                self.k_plane[slot] = self.v_plane[slot] = bad

    def forget_pages_behind_the_window(self, hole: int) -> None:
        """Page lists as they are once the pages were given back."""
        assert self.window is not None
        for (start, _), own in zip(self.rows, self.pages, strict=True):
            num_given_back = max(0, start - self.window + 1) // self.page_tokens
            own[:num_given_back] = num_given_back * [hole]


def exact_weights(scores: torch.Tensor, sinks: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    """[H, L] in float64: the softmax, its scores capped, with a sink of each head that takes a share and goes."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.double().unsqueeze(-1)), -1).softmax(-1)[:, :-1]


def odd_sinks(num_heads: int, seed: int = 0) -> torch.Tensor:
    """Sinks around the scores of cases, one far below and one far above all of them."""
    sinks = random(num_heads, seed=seed + 77, scale=3.0)
    sinks[0] = -1e4
    if num_heads > 1:
        sinks[num_heads // 2] = 50.0
    return sinks


def paged_case(
    rows: list[tuple[int, int]],
    head_dim: int = 16,
    group: int = 3,
    num_kv_heads: int = 2,
    page_tokens: int = 4,
    window: int | None = None,
    seed: int = 0,
    q_scale: float = 3.0,
) -> PagedCase:
    """Pages in random order among unused ones; slots that hold no token of a sequence are NaN."""
    tokens = [
        tuple(random(start + count, num_kv_heads, head_dim, seed=seed + first + index) for first in (100, 200))
        for index, (start, count) in enumerate(rows)
    ]
    q = random(sum(count for _, count in rows), group * num_kv_heads, head_dim, seed=seed + 1, scale=q_scale)
    return scattered_case(rows, q, tokens, page_tokens, window, seed)


def scattered_case(
    rows: list[tuple[int, int]],
    q: torch.Tensor,
    tokens: list[tuple[torch.Tensor, torch.Tensor]],
    page_tokens: int,
    window: int | None = None,
    seed: int = 0,
    free: float = float("nan"),
) -> PagedCase:
    """The tokens on pages in random order; every slot that holds none of them is `free`."""
    num_kv_heads, head_dim = tokens[0][0].shape[1:]
    counts = [-(-len(k) // page_tokens) for k, _ in tokens]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    planes = torch.full((2, len(order) * page_tokens, num_kv_heads, head_dim), free)
    pages = []
    for (k, v), num_pages in zip(tokens, counts, strict=True):
        own = [order.pop() for _ in range(num_pages)]
        position = torch.arange(len(k))
        slots = torch.tensor(own)[position // page_tokens] * page_tokens + position % page_tokens
        planes[0, slots], planes[1, slots] = k, v
        pages.append(own)
    return PagedCase(rows, q, planes[0].clone(), planes[1].clone(), pages, tokens, page_tokens, head_dim**-0.5, window)

"""Sequences scattered over pages, with poison in every slot that nobody may read."""

from dataclasses import dataclass

import torch

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
        return function(self.q, self.k_plane, self.v_plane, pages, sequences, self.page_tokens, self.scale, self.window)

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
                out[row + i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        return out.view(num_rows, num_heads * head_dim)


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
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + count) // page_tokens) for start, count in rows]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    planes = torch.full((2, len(order) * page_tokens, num_kv_heads, head_dim), float("nan"))
    pages, tokens = [], []
    for index, ((start, count), num_pages) in enumerate(zip(rows, counts, strict=True)):
        own = [order.pop() for _ in range(num_pages)]
        k = random(start + count, num_kv_heads, head_dim, seed=seed + 100 + index)
        v = random(start + count, num_kv_heads, head_dim, seed=seed + 200 + index)
        for position in range(start + count):
            slot = own[position // page_tokens] * page_tokens + position % page_tokens
            planes[0, slot], planes[1, slot] = k[position], v[position]
        pages.append(own)
        tokens.append((k, v))
    q = random(sum(count for _, count in rows), group * num_kv_heads, head_dim, seed=seed + 1, scale=q_scale)
    return PagedCase(rows, q, planes[0].clone(), planes[1].clone(), pages, tokens, page_tokens, head_dim**-0.5, window)

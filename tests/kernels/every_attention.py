"""The contract of the suite over every attention kernel: a step, the world that runs it, and the adapter that makes the world.

T rows of a step, X = heads times head dim of the output

To add a kernel: write a `make` that builds a World from a Step, and put an Attention with it into a registry
(every_grouped.py, every_latent.py). test_every_attention.py then holds every property of the suite for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from scratch_memory import Memory, Poison

__all__ = ["PEAK_NATS", "Attention", "Memory", "Poison", "Step", "World", "assert_near", "run_step"]

PEAK_NATS = 5.0
"""How far a peak lies above the other scores: of 150 tokens it weighs as much as all others together."""


ROUNDING = {torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Error of a head if weights, partials and outputs are rounded to these types, as on a GPU."""


@dataclass(frozen=True)
class Step:
    """What an adapter builds a world from. Scores differ by little, so that every token shows in the output."""

    rows: tuple[tuple[int, int], ...]
    """(position of the first row, number of rows) of each sequence."""
    seed: int = 0
    splits: int = 1
    """Split-KV ranges of every sequence; the last may be empty."""
    window: int | None = None
    """Tokens before it are poison, and the block table has a hole for each page that lies before it."""
    sinks: bool = False
    """One logit of each head, all different."""
    softcap: float | None = None
    peak: int | None = None
    """Position of a key that lies PEAK_NATS above the others, in every sequence; at most its last position."""
    uneven: bool = False
    """Scales of neighbouring tokens, and of neighbouring groups of one token, lie a factor of 1e4 apart."""
    num_padding: int = 0
    """Rows without a sequence after the others: written as zeros, and nothing of them is read."""
    poison: Poison = Poison.NAN
    """What free pages, free slots, and tokens before a window hold."""

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.rows)

    def with_poison(self, poison: Poison) -> "Step":
        return replace(self, poison=poison)


class World(Protocol):
    """Pages, a block table and queries of one step. Pages lie in random order; entries after a sequence's end are hostile."""

    def run(self, memory: Memory) -> torch.Tensor:
        """Run the kernel with all outputs and scratch from `memory`; return [T + padding, X] in host memory."""
        ...

    def expected(self) -> torch.Tensor:
        """Attention from its definition, over the dequantized tokens: [T, X] in float64. No page is read."""
        ...


@dataclass(frozen=True)
class Attention:
    """A kernel, or several that one function launches, as the suite sees it."""

    name: str
    make: Callable[[Step, torch.device], World]
    head_dim: int
    """Elements of an output head: errors are taken per head."""
    tolerance: float
    """Largest error of a head relative to its norm."""
    family: str = ""
    """Adapters of one family run the same code on other formats: most properties take one of them in a quick run."""
    block: int = 64
    """Tokens that a loop takes at a time."""
    page: int = 16
    takes: frozenset[str] = frozenset()
    """Some of window, sinks, softcap, splits, uneven, prefill, padding, peak."""

    def __str__(self) -> str:
        return self.name


def run_step(attention: Attention, step: Step, device: torch.device, memory: Memory | None = None) -> torch.Tensor:
    """Run a step, by default in fresh memory that holds NaN, and check the edges of the memory."""
    memory = memory or Memory(device)
    out_TX = attention.make(step, device).run(memory).clone()
    memory.check()
    return out_TX


def assert_near(attention: Attention, out_TX: torch.Tensor, expected_TX: torch.Tensor) -> None:
    """Each head's error is small against its length, or against a hundredth of the longest head."""
    assert out_TX.shape == expected_TX.shape, f"{out_TX.shape=} {expected_TX.shape=}"
    heads_XD = expected_TX.double().reshape(-1, attention.head_dim)
    off_X = (out_TX.double().reshape(-1, attention.head_dim) - heads_XD).norm(dim=-1)
    length_X = heads_XD.norm(dim=-1)
    assert not off_X.isnan().any(), "NaN in a result, or in what it is judged by"
    error_X = off_X / length_X.clamp(min=1e-2 * float(length_X.max()))
    tolerance = max(attention.tolerance, ROUNDING.get(out_TX.dtype, 0.0))
    assert float(error_X.max()) < tolerance, f"errors of heads {error_X}"

"""CUDA graphs of whole steps, and the row counts that compile every specialization.

R rows whose logits are wanted, V vocabulary

A decode step has one row per sequence and wants logits of all rows. A mixed step has any rows and wants logits of some.
Both are padded up to the next captured size. A graph reads rows, tiles, pages and parameters from fixed buffers, which
are filled before it runs. It works in the workspace, so its pool holds next to nothing.

A rank's graph also holds its exchanges: all-reduces, gathers, receives from the stage before and sends to the next. In
the last stage it sends the argmaxes to rank 0, which fetches them outside its own graph, in collect(). During capture
a size runs once on all ranks before any rank captures it: a run waits for its peers, a capture runs nothing and waits
for no rank.

Warm-up runs a step at each row count of `warm_rows`; together they launch every specialization of every kernel.
Weights, formats and the model decide most of a specialization, and any step shows that much. For the rest, which
follows from the number of rows, each launcher has `row_form` and uses it to launch. Plain arguments such as the number
of rows are marked as counts (`jit_counting`), and do not specialize.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from holdfast.kernels import geometry, hyper_connections
from holdfast.kernels.attention import quantized_attention, tiled_attention
from holdfast.kernels.exchange import add_rows
from holdfast.kernels.gemm import (
    block_scaled_gemv,
    block_scaled_tiles,
    gemv,
    packed_gemv,
    packed_mma,
    quantized_tiles,
    row_scaled_tiles,
)
from holdfast.kernels.latent import latent_projection, latent_tiles
from holdfast.kernels.moe import expert_sum
from holdfast.models.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph and its output logits: [R, V] in the workspace; none before the last stage."""

    graph: torch.cuda.CUDAGraph
    logits_RV: torch.Tensor


class StepGraphs:
    """All graphs of one runner, in one pool, captured on one stream."""

    def __init__(self, decode_sizes: tuple[int, ...], mixed_sizes: tuple[int, ...], num_logit_rows: int) -> None:
        self._sizes = {True: decode_sizes, False: mixed_sizes}
        self._num_logit_rows = num_logit_rows
        self._steps: dict[tuple[bool, int], CapturedStep] = {}

    def __len__(self) -> int:
        """Number of captured graphs."""
        return len(self._steps)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Rows of the captured steps with prompts."""
        return self._sizes[False]

    def size_for(self, num_rows: int, num_logit_rows: int, is_decode: bool) -> int | None:
        """Return the smallest captured size that fits, or None. Forks can want more logits than rows."""
        sizes = self._sizes[is_decode]
        index = bisect_left(sizes, max(num_rows, num_logit_rows))
        if index == len(sizes) or num_logit_rows > self.logit_rows(sizes[index], is_decode):
            return None
        return sizes[index]

    def logit_rows(self, size: int, is_decode: bool) -> int:
        """Rows whose logits a captured step computes."""
        return size if is_decode else min(size, self._num_logit_rows)

    def capture(
        self,
        run: Callable[[int, bool], torch.Tensor],
        stream: torch.cuda.Stream,
        on_progress: Callable[[int, int], None],
        meet: Callable[[int, bool], None] | None = None,
    ) -> None:
        """Capture every size, the largest first; `run(size, is_decode)` is one step on padding, run once before.

        `meet` has the same arguments. It does this rank's work outside its graph, so that peers' steps can end.
        """
        pool = torch.cuda.graph_pool_handle()
        keys = [(is_decode, size) for is_decode, sizes in self._sizes.items() for size in reversed(sizes)]
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection in the middle of a capture could free device memory, which breaks it
        try:
            for number, (is_decode, size) in enumerate(keys):
                run(size, is_decode)
                if meet is not None:
                    meet(size, is_decode)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits_RV = run(size, is_decode)
                self._steps[is_decode, size] = CapturedStep(graph, logits_RV)
                on_progress(number + 1, len(keys))
        finally:
            if was_enabled:
                gc.enable()

    def replay(self, size: int, is_decode: bool) -> torch.Tensor:
        """Replay a captured step; return its logits with padding."""
        step = self._steps[is_decode, size]
        step.graph.replay()
        return step.logits_RV

    def release(self) -> None:
        """Free every graph."""
        self._steps.clear()


LAUNCHERS = (
    *(tiled_attention, quantized_attention, latent_tiles, latent_projection),
    *(block_scaled_gemv, block_scaled_tiles, gemv, packed_gemv, packed_mma, quantized_tiles, row_scaled_tiles),
    *(expert_sum, hyper_connections, add_rows),
)
"""Launchers whose specialization follows from the row count alone, whether or not the model uses them."""


def step_form(num_rows: int, experts: ExpertsSpec | None) -> tuple[Hashable, ...]:
    """Return the kernel specializations that a step of `num_rows` rows takes."""
    forms: tuple[Hashable, ...] = tuple(launcher.row_form(num_rows) for launcher in LAUNCHERS)
    if experts is None:
        return forms
    return *forms, geometry.expert_order_form(num_rows, experts.top_k, experts.num_experts)


def warm_rows(
    numbers: Iterable[int], experts: ExpertsSpec | None, own_form: Callable[[int], Hashable] | None = None
) -> tuple[int, ...]:
    """Return the first row count of each specialization; `own_form` adds what the model specializes on."""
    first: dict[tuple[Hashable, ...], int] = {}
    for num_rows in numbers:
        own = None if own_form is None else own_form(num_rows)
        first.setdefault((*step_form(num_rows, experts), own), num_rows)
    return tuple(first.values())

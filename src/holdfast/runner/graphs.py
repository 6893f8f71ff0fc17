"""CUDA graphs of whole steps, and what is compiled before a runner is ready.

R rows whose logits are wanted, V vocabulary

A decode step has a row for each sequence and wants all of their logits. A mixed step has any rows and wants the logits of
some. Both are padded up to the next size that was captured. What a graph reads (rows, tiles, pages, parameters) lies in
fixed buffers that are filled before it runs; what it works in is the workspace. So its pool holds next to nothing.

On ranks a graph holds a rank's exchanges too: sums and gathers, rows of the stage before it and to the one behind it, and in the
last stage the argmaxes for rank 0, which fetches them outside of its own graph, when it collects. While graphs are captured a size
runs once on all ranks before any of them captures it: what runs waits for its peers, and a capture runs nothing and waits for no rank.

Before ready a step is run at every number of rows of `warm_rows`, so that together they take every form of every kernel. A
form is what Triton compiles a kernel for. Weights, formats and the model decide most of it, and any step shows that much.
What follows from the number of rows every launcher says of itself in `row_form`, and takes it from there when it launches;
numbers that are mere arguments, such as rows, are marked as counts (`jit_counting`), and change nothing.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from holdfast.kernels import geometry, hyper_connections
from holdfast.kernels.attention import quantized_attention, tiled_attention
from holdfast.kernels.exchange import add_rows
from holdfast.kernels.gemm import block_scaled_gemv, gemv, quantized_tiles, row_scaled_tiles
from holdfast.kernels.latent import latent_projection, latent_tiles
from holdfast.kernels.moe import expert_sum
from holdfast.models.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One graph and the logits it leaves: [R, V] in the workspace; none before the last stage."""

    graph: torch.cuda.CUDAGraph
    logits_RV: torch.Tensor


class StepGraphs:
    """All graphs of one runner, in one pool, captured on one stream."""

    def __init__(self, decode_sizes: tuple[int, ...], mixed_sizes: tuple[int, ...], num_logit_rows: int) -> None:
        self._sizes = {True: decode_sizes, False: mixed_sizes}
        self._num_logit_rows = num_logit_rows
        self._steps: dict[tuple[bool, int], CapturedStep] = {}

    def __len__(self) -> int:
        """Graphs that were captured."""
        return len(self._steps)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Rows of the captured steps with prompts."""
        return self._sizes[False]

    def size_for(self, num_rows: int, num_logit_rows: int, is_decode: bool) -> int | None:
        """The smallest captured size that takes so many rows, or None. Forks can make more logits than rows."""
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

        `meet` takes the same, and what this rank does behind a step outside of its graph, so that peers' steps can end.
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
        """Run a captured step; its logits, padding included."""
        step = self._steps[is_decode, size]
        step.graph.replay()
        return step.logits_RV

    def release(self) -> None:
        """Let go of every graph."""
        self._steps.clear()


LAUNCHERS = (
    *(tiled_attention, quantized_attention, latent_tiles, latent_projection),
    *(block_scaled_gemv, gemv, quantized_tiles, row_scaled_tiles, expert_sum, hyper_connections, add_rows),
)
"""Those whose form follows from the number of rows alone, whether or not the model has a use for them."""


def step_form(num_rows: int, experts: ExpertsSpec | None) -> tuple[Hashable, ...]:
    """All that a step of so many rows decides about the kernels it launches."""
    forms: tuple[Hashable, ...] = tuple(launcher.row_form(num_rows) for launcher in LAUNCHERS)
    if experts is None:
        return forms
    return *forms, geometry.expert_order_form(num_rows, experts.top_k, experts.num_experts)


def warm_rows(
    numbers: Iterable[int], experts: ExpertsSpec | None, own_form: Callable[[int], Hashable] | None = None
) -> tuple[int, ...]:
    """The fewest rows of each form among steps of these numbers of rows, from the least; `own_form`: what a model adds to it."""
    first: dict[tuple[Hashable, ...], int] = {}
    for num_rows in numbers:
        own = None if own_form is None else own_form(num_rows)
        first.setdefault((*step_form(num_rows, experts), own), num_rows)
    return tuple(first.values())

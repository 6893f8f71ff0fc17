"""Warm-up on a GPU: run every kernel specialization once, then capture the graphs of a plan's step sizes."""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from holdfast.config import Limits
from holdfast.distributed.exchange_plan import can_be_captured
from holdfast.kernels.latent.latent_geometry import compressed_splits
from holdfast.kernels.triton_compat import compiled_folder, counting_compiles
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.observability.preparing import OnPrepare, Preparing
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.terms import graph_sizes, mixed_sizes
from holdfast.runner.assembly import num_sms
from holdfast.runner.graphs import StepGraphs, warm_rows
from holdfast.runner.invariance import padded_rows
from holdfast.runner.runner import Runner

log = get_logger(__name__)

COMPILING_GPU, CAPTURING, WARMING = "Compiling GPU kernels", "Capturing CUDA graphs", "Warming kernels"


class WarmUp(NamedTuple):
    """Values that decide which steps are run and captured."""

    plan: RunnerPlan
    spec: ModelSpec
    row_sizes: tuple[int, ...]
    """Row counts that steps are padded to, if products must round alike; empty if any count will do."""
    device: torch.device

    def graphs(self, limits: Limits) -> StepGraphs:
        """Choose the captured sizes, and how many logits each has."""
        decode = graph_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens))
        mixed = mixed_sizes(limits.max_num_batched_tokens, self.plan.resolved.num_proposals > 0)
        sizes = self.row_sizes
        most_logits = min(limits.sampled_rows, sizes[-1]) if sizes else limits.sampled_rows
        return StepGraphs(
            tuple(dict.fromkeys(padded_rows(size, sizes) for size in decode)),
            tuple(size for size in mixed if size in sizes or not sizes),
            padded_rows(most_logits, sizes),
        )

    def rows(self, limits: Limits) -> tuple[int, ...]:
        """List row counts whose steps launch every kernel specialization."""
        spec, numbers = self.spec, self.row_sizes or range(1, limits.max_num_batched_tokens + 1)
        splits = None if spec.compressed is None else partial(_is_split, spec.form_heads, num_sms(self.device))
        return warm_rows(numbers, spec.experts, splits)


def warm_up(runner: Runner, warm: WarmUp, enforce_eager: bool, on_prepare: OnPrepare) -> None:
    """Run every kernel once, and capture graphs unless `enforce_eager`."""
    on_prepare(Preparing(WARMING, 0, 0))
    start, plan = time.monotonic(), warm.plan
    is_exchange_captured = can_be_captured(plan.exchange_kind, plan.mesh)
    if not is_exchange_captured and not enforce_eager:
        log.info("steps launch kernel by kernel: no graph can hold a send between stages by %s", plan.exchange_kind)
    has_graphs = not enforce_eager and is_exchange_captured
    has_graphs = has_graphs and plan.declaration is not None and plan.declaration.can_be_captured
    graphs = warm.graphs(runner.limits) if has_graphs else None
    report_warm(runner, warm.rows(runner.limits), graphs, on_prepare)
    log.info("Graph capturing finished in %.0f secs", time.monotonic() - start)


def report_warm(runner: Runner, rows: Sequence[int], graphs: StepGraphs | None, on_prepare: OnPrepare) -> None:
    """Warm a runner and report what is compiled: nothing if every kernel was cached on disk."""
    steps, folder = (0, len(rows) + 1), compiled_folder()

    def compiled() -> None:
        if counted.num_compiled == 1:
            log.info("Compiling GPU kernels, which can take minutes, once; they are kept in %s", folder)
        on_prepare(Preparing(COMPILING_GPU, *steps, f"{counted.num_compiled} compiled, kept in {folder}"))

    def warmed(num_done: int, num_total: int) -> None:
        nonlocal steps
        steps = num_done, num_total

    with counting_compiles(compiled) as counted:
        runner.warm(rows, graphs, lambda *counts: on_prepare(Preparing(CAPTURING, *counts)), warmed)
    log.info("Triton compiled %d kernels and found %d compiled", counted.num_compiled, counted.num_found)


def _is_split(num_heads: int, num_sms: int, num_rows: int) -> bool:
    """Return True if compressed attention merges splits at this row count.

    Unsplit steps launch no merge, and could be the only step warmed of their specialization.
    """
    return compressed_splits(num_rows, num_heads, num_sms) > 1

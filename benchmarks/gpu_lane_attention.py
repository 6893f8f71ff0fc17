"""Prompts over quantized pages through the lane, against plain pages in the same run: python benchmarks/gpu_lane_attention.py

Rows: whole prompts and chunks after a cached context, in every format that prompts read through the lane, with near tokens where
they are the default. Columns: `plain` is bfloat16 pages of 16 tokens in warpgroups, `lane` fills and attends in all rounds of a
step, `codes` is the kernel of steps without the lane. Keys and values are normal numbers, quantized.

A measurement is a CUDA graph of a few calls. In each round every format follows a graph of plain pages, so both meet the same
clock. `against_plain` is the median over the rounds of both times' ratio. Processes of their own compile the kernels before.
About 60 seconds.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_lane_attention.py --tiny --device cpu
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import gpu_attention
import torch
from gpu_attention import FLOPS_PER_PAIR, MAX_ERROR, Rig
from gpu_quantized_attention import FULL, NEAR_TOKENS, TINY, make_rig
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.attention.declarations import StepBounds
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.quant.kv_quantize import quantize_keys, quantize_values

NUM_ROUNDS = 9
GRAPH_FLOPS = 4e12
"""About the FLOPs of a graph; shorter calls are repeated in it."""
COMPILE_SECONDS = 120.0
STEP_SECONDS = 10.0
"""Least seconds left for which another row is begun."""
WANTED = {
    "turboquant_k8v4": 0.96,
    "turboquant_4bit_nc": 0.93,
    "turboquant_3bit_nc": 0.93,
    "turboquant_k5v4": None,
    "turboquant_k3v4_nc": None,
    "fp8": None,
}
"""Goals of `against_plain` by format."""


class LaneStep(NamedTuple):
    """One chunk of one sequence."""

    name: str
    start: int
    num_rows: int
    has_goal: bool = True

    @property
    def num_flops(self) -> float:
        num_pairs = self.num_rows * self.start + self.num_rows * (self.num_rows + 1) / 2
        return FLOPS_PER_PAIR * FULL.num_heads * FULL.head_dim * num_pairs


STEPS = (
    LaneStep("8K", 0, 8192),
    LaneStep("2K after 30K", 30720, 2048),
    LaneStep("2K", 0, 2048, has_goal=False),
    LaneStep("8K after 120K", 122880, 8192, has_goal=False),
)
TINY_STEPS = (LaneStep("40", 0, 40), LaneStep("40 after 80", 80, 40))


def plain_call(step: LaneStep, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return attention over plain pages."""
    shape = gpu_attention.FULL if device.type == "cuda" else gpu_attention.TINY
    shape = shape._replace(bounds=StepBounds(256, 8192, 16))
    rig = gpu_attention.make_rig(shape, [(step.start, step.num_rows)], 1, device)
    return rig.calls(batch_invariant=False, captured=False)[0]


def quantized_rig(name: str, step: LaneStep, device: torch.device) -> Rig:
    """Build a step over normal keys and values in this format."""
    near = NEAR_TOKENS if name.startswith("turboquant") else 0
    shape = FULL if device.type == "cuda" else TINY
    rig = make_rig(shape, name, [(step.start, step.num_rows)], 1, device, near_tokens=near, has_lane=True)
    backend = TritonPagedAttention(rig.specs, rig.storage, rig.bounds, rig.num_sms)
    planes, page_tokens = backend.pages[0].planes, rig.bounds.page_tokens
    assert isinstance(planes, QuantizedPlanes) and rig.batch.page_tables is not None, f"{name} is plain"  # noqa: PT018
    for first in range(0, step.start + step.num_rows, 8192):
        token_L = torch.arange(first, min(step.start + step.num_rows, first + 8192), device=device)
        k_LKD, v_LKD = torch.randn(2, len(token_L), planes.num_kv_heads, planes.head_dim, device=device)
        heads = quantize_keys(k_LKD, planes.key_bits), quantize_values(v_LKD, planes.value_bits)
        page_L = rig.batch.page_tables[0][0, token_L // page_tokens].long()
        planes.store(page_L, token_L % page_tokens, *heads)
    return rig


def lane_calls(rig: Rig) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the step through the lane, and over codes."""
    backend = TritonPagedAttention(rig.specs, rig.storage, rig.bounds, rig.num_sms)
    assert any(work.lane is not None for work in backend.plan(rig.batch).work.values()), "no row reads the lane"
    without = replace(rig, specs=tuple(replace(spec, has_lane=False) for spec in rig.specs))
    return {
        name: one.calls(batch_invariant=False, captured=False)[0] for name, one in (("lane", rig), ("codes", without))
    }


def capture(call: Callable[[], object], num_calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture some calls; the first run is outside."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_calls):
            call()
    return graph


def rounds_of(graphs: Sequence[torch.cuda.CUDAGraph], stream: torch.cuda.Stream) -> list[list[float]]:
    """Replay the graphs one after the other; return the milliseconds of each by round. The first round does not count."""
    rounds = []
    with torch.cuda.stream(stream):
        for _ in range(1 + NUM_ROUNDS):
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
            for graph, (begin, end) in zip(graphs, events, strict=True):
                begin.record()
                graph.replay()
                end.record()
            rounds.append(events)
    stream.synchronize()
    return [[begin.elapsed_time(end) for begin, end in events] for events in rounds[1:]]


@torch.inference_mode()
def run_step(step: LaneStep, device: torch.device) -> list[dict[str, Any]]:
    """Compare and time a row for each format."""
    plain, rows = plain_call(step, device), []
    num_calls = max(1, min(10, int(GRAPH_FLOPS / step.num_flops)))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for name, wanted in WANTED.items():
        rig = quantized_rig(name, step, device)
        calls = lane_calls(rig)
        wanted_TX = calls["codes"]().float()
        rig.out_TX.fill_(float("nan"))
        found_TX = calls["lane"]().float()
        difference = float(((found_TX - wanted_TX).norm(dim=1) / wanted_TX.norm(dim=1)).max())
        milliseconds, ratio = dict.fromkeys(("plain", *calls), 0.0), 0.0
        if stream is not None:
            graphs = [capture(call, num_calls, stream) for call in (plain, *calls.values())]
            rounds = rounds_of(graphs, stream)
            milliseconds = {
                column: round(median(one[i] for one in rounds) / num_calls, 4) for i, column in enumerate(milliseconds)
            }
            ratio = round(median(one[0] / one[1] for one in rounds), 3)
        rows.append(
            {
                "measure": f"prefill, {step.name}, {name}",
                "format": name,
                "unit": "ms",
                "values": milliseconds,
                "tflops": {column: round(step.num_flops / ms / 1e9, 1) for column, ms in milliseconds.items() if ms},
                "against_plain": ratio,
                "wanted": wanted if step.has_goal else None,
                "difference": difference,
            }
        )
        print(rows[-1]["measure"], milliseconds, ratio, difference, flush=True)
    return rows


def compile_kernels() -> None:
    """Compile in a process for each format; Triton's cache on disk keeps the kernels."""
    children = [subprocess.Popen([sys.executable, __file__, "--child", name]) for name in WANTED]
    for child in children:
        try:
            child.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


@torch.inference_mode()
def compile_format(name: str) -> None:
    """Run the kernels of a format once on a short step that reads the lane."""
    step, device = LaneStep("short", 0, 512), torch.device("cuda")
    for call in (*lane_calls(quantized_rig(name, step, device)).values(), plain_call(step, device)):
        call()
    torch.cuda.synchronize()


def verdicts(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the goals and whether they are met."""
    goals = {
        f"{row['measure']} at {row['wanted']} of plain pages or more": row["against_plain"] >= row["wanted"]
        for row in results
        if row["wanted"]
    }
    return goals | {"right": all(row["difference"] <= MAX_ERROR for row in results)}  # false for NaN


def write(results: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    words = f"{FULL.num_heads}/{FULL.num_kv_heads} heads of {FULL.head_dim}, near blocks of {NEAR_TOKENS} tokens"
    facts = {"verdicts": verdicts(results)}
    record = make_record("gpu-lane-attention", results, "Prompts over quantized pages", words, arguments, facts)
    write_record(record, "lane-attention", arguments)


def main() -> None:
    """Compile, measure step by step, print."""
    arguments = options("Prompts over quantized pages through the lane against plain pages").parse_args()
    device, budget = torch.device(arguments.device), Budget(arguments.budget_seconds)
    if arguments.child is not None:
        compile_format(arguments.child)
        return
    torch.manual_seed(0)
    if device.type == "cuda":
        compile_kernels()
        print(f"[{budget.spent_seconds:.0f} s] kernels are compiled", flush=True)
    results: list[dict[str, Any]] = []
    for step in TINY_STEPS if arguments.tiny or device.type != "cuda" else STEPS:
        if budget.left_seconds < STEP_SECONDS:
            print(f"left out for want of time: {step.name}", flush=True)
            continue
        results += run_step(step, device)
        write(results, arguments)
    lines = [(row["measure"], *row["values"].values(), row["against_plain"], row["difference"]) for row in results]
    print_table(
        "Prompts over quantized pages, ms", ("", "plain", "lane", "codes", "against plain", "difference"), lines
    )
    print(f"\n{verdicts(results)}")


if __name__ == "__main__":
    main()

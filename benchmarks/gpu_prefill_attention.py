"""Prefill attention over shuffled pages against torch and FlashAttention-3: python benchmarks/gpu_prefill_attention.py [--peer FOLDER]

Rows: whole prompts, and chunks after a cached context. Columns, all in one run: `holdfast` is the kernel that a layer takes,
`holdfast, triton` the one for other GPUs. cuDNN and torch's flash kernel get contiguous keys, repeated for each head. With
--peer, FlashAttention-3 comes from the vLLM in a folder of packages: over the same pages, and over contiguous keys.

A measurement is a CUDA graph of one or more calls. Graphs of all columns take turns, so that they meet the same clock; the
median of their rounds counts. Processes of their own compile the kernels before. TFLOPS count two products of the pairs
that a causal mask leaves. About 60 seconds without a peer.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_prefill_attention.py --tiny --device cpu

H query heads, K key heads, D head dim, L stored tokens, T rows
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_attention import FLOPS_PER_PAIR, FULL, MAX_ERROR, TINY, Rig, make_rig
from gpu_records import Budget, make_record, options, print_table, write_record
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from holdfast.attention.declarations import StepBounds
from holdfast.families.grouped import pages
from holdfast.kernels.attention.tiled_attention import TRITON_TILES, choose_large_kernel

NUM_ROUNDS = 9
GRAPH_FLOPS = 4e12
"""About the FLOPs of a graph; shorter calls are repeated in it."""
COMPILE_SECONDS = 120.0
STEP_SECONDS = 15.0
"""Least seconds left for which another row is begun."""
OURS, TRITON = "holdfast", "holdfast, triton"


class PrefillStep(NamedTuple):
    """One chunk of one sequence."""

    name: str
    start: int
    num_rows: int
    head_dim: int = 128
    page_tokens: int = 16
    wanted_tflops: float | None = None
    """Goal of `holdfast`."""

    @property
    def num_flops(self) -> float:
        num_pairs = self.num_rows * self.start + self.num_rows * (self.num_rows + 1) / 2
        return FLOPS_PER_PAIR * FULL.num_heads * self.head_dim * num_pairs

    def rig(self, device: torch.device, num_rows: int | None = None) -> Rig:
        """Build the step, or a short one of the same specializations."""
        if device.type != "cuda":
            return make_rig(TINY, [(self.start, self.num_rows)], 1, device)
        bounds = StepBounds(256, 32768, self.page_tokens)
        rows = (self.start, self.num_rows) if num_rows is None else (0, num_rows)
        return make_rig(FULL._replace(head_dim=self.head_dim, bounds=bounds), [rows], 1, device)


STEPS = (
    PrefillStep("8K", 0, 8192, wanted_tflops=500),
    PrefillStep("32K", 0, 32768, wanted_tflops=550),
    PrefillStep("2K after 30K", 30720, 2048, wanted_tflops=480),
    PrefillStep("2K after 30K, pages of 256", 30720, 2048, page_tokens=256),
    PrefillStep("2K", 0, 2048),
    PrefillStep("256 after 30K", 30720, 256),
    PrefillStep("8K, heads of 64", 0, 8192, 64),
    PrefillStep("8K, heads of 96", 0, 8192, 96),
    PrefillStep("8K, heads of 256", 0, 8192, 256, wanted_tflops=400),
)
TINY_STEPS = (PrefillStep("40", 0, 40, 16), PrefillStep("9 after 40", 40, 9, 16))


@contextmanager
def large_tiles_in_triton() -> Iterator[None]:
    """Build backends as for other GPUs."""
    with patch.object(pages, choose_large_kernel.__name__, lambda *_: TRITON_TILES):
        yield


def our_calls(rig: Rig) -> dict[str, Callable[[], torch.Tensor]]:
    """Return both kernels over the tiles that the backend's plan gives each."""
    (own,) = rig.calls(batch_invariant=False, captured=False)
    with large_tiles_in_triton():
        (triton,) = rig.calls(batch_invariant=False, captured=False)
    return {OURS: own, TRITON: triton}


def contiguous(rig: Rig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the order of tokens, [L, K, D]."""
    (sequence,) = rig.batch.sequences
    return rig.stored(0, "k", sequence), rig.stored(0, "v", sequence)


def torch_calls(step: PrefillStep, rig: Rig) -> dict[str, Callable[[], torch.Tensor]]:
    """Return torch's kernels. cuDNN's mask has no rows after a context."""
    group = rig.q_THD.shape[1] // rig.specs[0].cache.num_kv_heads
    q_1HTD = rig.q_THD.transpose(0, 1).unsqueeze(0).contiguous()
    k_1HLD, v_1HLD = (
        x_LKD.repeat_interleave(group, dim=1).transpose(0, 1).unsqueeze(0).contiguous() for x_LKD in contiguous(rig)
    )

    def run(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel([backend]):
            if step.start:
                mask = causal_lower_right(step.num_rows, step.start + step.num_rows)
                return F.scaled_dot_product_attention(q_1HTD, k_1HLD, v_1HLD, attn_mask=mask)
            return F.scaled_dot_product_attention(q_1HTD, k_1HLD, v_1HLD, is_causal=True)

    if rig.q_THD.device.type != "cuda":
        return {"torch": lambda: run(SDPBackend.MATH)}
    flash: dict[str, Callable[[], torch.Tensor]] = {"torch flash": lambda: run(SDPBackend.FLASH_ATTENTION)}
    return flash if step.start else {"cuDNN": lambda: run(SDPBackend.CUDNN_ATTENTION)} | flash


def load_peer(folder: Path | None) -> ModuleType | None:
    """Import vLLM's flash attention from a folder of packages, without vLLM's own start."""
    if folder is None:
        return None
    sys.path.append(str(folder))
    package = ModuleType("vllm")
    package.__path__ = [str(folder / "vllm")]
    sys.modules["vllm"] = package
    try:
        return import_module("vllm.vllm_flash_attn")
    except Exception as error:
        print(f"FlashAttention-3 is not there: {type(error).__name__}: {error}"[:300], flush=True)
        return None


def peer_calls(step: PrefillStep, rig: Rig, peer: ModuleType) -> dict[str, Callable[[], torch.Tensor]]:
    """Return FlashAttention-3 over the same pages, and for whole prompts over contiguous keys."""
    assert rig.batch.page_tables is not None, "the batch has no page table"
    end, device = step.start + step.num_rows, rig.q_THD.device
    ends = torch.tensor([0, step.num_rows], dtype=torch.int32, device=device)
    key_ends = torch.tensor([0, end], dtype=torch.int32, device=device)
    k_pages, v_pages = (
        rig.storage.plane(0, name).unflatten(0, (-1, step.page_tokens)).contiguous() for name in ("k", "v")
    )
    table = rig.batch.page_tables[0][:, : -(-end // step.page_tokens)].contiguous()
    common = {
        "max_seqlen_q": step.num_rows, "cu_seqlens_q": ends, "max_seqlen_k": end, "causal": True,
        "softmax_scale": rig.specs[0].scale, "fa_version": 3,
    }  # fmt: skip
    calls = {
        "FA3, pages": lambda: peer.flash_attn_varlen_func(
            rig.q_THD, k_pages, v_pages, seqused_k=key_ends[1:], block_table=table, **common
        )
    }
    if not step.start:
        k_LKD, v_LKD = contiguous(rig)
        calls["FA3"] = lambda: peer.flash_attn_varlen_func(rig.q_THD, k_LKD, v_LKD, cu_seqlens_k=key_ends, **common)
    return calls


def rows_of(out: torch.Tensor, rig: Rig) -> torch.Tensor:
    """Return an output as [T, H * D] in float32: torch's has heads first."""
    if out.shape == rig.out_TX.shape:
        return out.float()
    return (out[0].transpose(0, 1) if out.dim() == 4 else out).reshape(rig.out_TX.shape).float()


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


def seconds_of_graphs(graphs: Mapping[str, torch.cuda.CUDAGraph], stream: torch.cuda.Stream) -> dict[str, float]:
    """Replay all graphs in turns; return the median of each."""
    rounds = []
    with torch.cuda.stream(stream):
        for _ in range(1 + NUM_ROUNDS):
            events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in graphs}
            for name, graph in graphs.items():
                events[name][0].record()
                graph.replay()
                events[name][1].record()
            rounds.append(events)
    stream.synchronize()
    return {name: median(one[name][0].elapsed_time(one[name][1]) for one in rounds[1:]) / 1000 for name in graphs}


@torch.inference_mode()
def run_step(step: PrefillStep, device: torch.device, peer: ModuleType | None) -> dict[str, Any]:
    """Compare and time all columns of a row; those that fail give their error."""
    rig = step.rig(device)
    calls, errors = our_calls(rig), {}
    wanted_TX = rows_of(calls[TRITON](), rig).clone()
    calls |= torch_calls(step, rig) | ({} if peer is None else peer_calls(step, rig, peer))
    num_calls = max(1, min(10, int(GRAPH_FLOPS / step.num_flops)))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    differences, graphs = {}, {}
    for name, call in calls.items():
        try:
            rig.out_TX.fill_(float("nan"))
            found_TX = rows_of(call(), rig)
            differences[name] = float(((found_TX - wanted_TX).norm(dim=1) / wanted_TX.norm(dim=1)).max())
            if stream is not None:
                graphs[name] = capture(call, num_calls, stream)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    seconds = {} if stream is None else seconds_of_graphs(graphs, stream)
    tflops = {name: step.num_flops * num_calls / value / 1e12 for name, value in seconds.items()}
    return {
        "measure": f"prefill, {step.name}",
        "unit": "TFLOPS",
        "values": {name: round(rate, 1) for name, rate in tflops.items()},
        "milliseconds": {name: round(value * 1000 / num_calls, 4) for name, value in seconds.items()},
        "against_triton": round(tflops[OURS] / tflops[TRITON], 3) if {OURS, TRITON} <= tflops.keys() else None,
        "wanted": step.wanted_tflops,
        "difference": max((differences.get(name, float("nan")) for name in (OURS, TRITON)), default=None),
        "differences": differences,
        "errors": errors,
    }


def compile_kernels(steps: Sequence[PrefillStep]) -> None:
    """Compile in a process for each specialization; Triton's cache on disk keeps the kernels."""
    first = {(step.head_dim, step.page_tokens): index for index, step in reversed(list(enumerate(steps)))}
    command = [sys.executable, __file__, "--child"]
    children = [subprocess.Popen([*command, str(index)]) for index in first.values()]
    for child in children:
        try:
            child.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


@torch.inference_mode()
def compile_step(step: PrefillStep) -> None:
    """Run both kernels once on a short step."""
    for call in our_calls(step.rig(torch.device("cuda"), num_rows=256)).values():
        call()
    torch.cuda.synchronize()


def verdicts(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the goals and whether they are met."""
    goals = {
        f"{row['measure']} at {row['wanted']:.0f} TFLOPS or more": row["values"].get(OURS, 0.0) >= row["wanted"]
        for row in results
        if row["wanted"]
    }
    return goals | {"right": all(row["difference"] <= MAX_ERROR for row in results)}  # false for NaN


def write(results: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    words = f"bfloat16, {FULL.num_heads}/{FULL.num_kv_heads} heads of 128 and others, pages of 16 and 256, shuffled"
    facts = {"verdicts": verdicts(results)}
    write_record(
        make_record("gpu-prefill-attention", results, "Prefill attention", words, arguments, facts),
        "prefill-attention",
        arguments,
    )


def main() -> None:
    """Compile, measure row by row, print."""
    parser = options("Prefill attention over pages against torch and FlashAttention-3")
    parser.add_argument("--peer", type=Path, default=None, help="folder of packages with a vllm")
    arguments = parser.parse_args()
    device, budget = torch.device(arguments.device), Budget(arguments.budget_seconds)
    steps = TINY_STEPS if arguments.tiny or device.type != "cuda" else STEPS
    if arguments.child is not None:
        compile_step(STEPS[int(arguments.child)])
        return
    torch.manual_seed(0)
    if device.type == "cuda":
        compile_kernels(steps)
        print(f"[{budget.spent_seconds:.0f} s] kernels are compiled", flush=True)
    peer, results = load_peer(arguments.peer), []
    for step in steps:
        if budget.left_seconds < STEP_SECONDS:
            print(f"left out for want of time: {step.name}", flush=True)
            continue
        results.append(run_step(step, device, peer))
        row = results[-1]
        print(f"[{budget.spent_seconds:.0f} s] {row['measure']}: {row['values']} {row['errors'] or ''}", flush=True)
        write(results, arguments)
    names = list(dict.fromkeys(name for row in results for name in row["values"]))
    lines = [
        (row["measure"], row["milliseconds"].get(OURS), *(row["values"].get(name) for name in names), row["difference"])
        for row in results
    ]
    print_table("Prefill attention, TFLOPS", ("", "ms", *names, "difference"), lines)
    print(f"\n{verdicts(results)}")


if __name__ == "__main__":
    main()

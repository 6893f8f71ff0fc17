"""Products by packed weights alone, in every family, beside cuBLAS in bfloat16 and our fp8: python benchmarks/gpu_packed.py

Rows: the four products of a layer of Qwen3-32B for every family, of Llama-70B for two, by 1 to 128 and 8,192 rows. Columns:
microseconds of the packed product, GB/s of its stored bytes and their share of the read rate (measured first, by a sum of
2 GiB), and times of bfloat16 (cuBLAS) and of fp8 with scales by row, quantized rows included. An error against float64 sums
of the reference's values comes before the time, on a part of the columns of outputs; a wrong family is not timed.

A measurement is a CUDA graph of calls over copies of the weight that exceed the L2 cache, normal inputs, random codes.
Rows of most interest come first and are printed as they are measured: 1, 8, 64, 16 and 8,192 rows of Qwen3-32B, family by
family, then the rest. So `--families q4_k,awq --budget-seconds 60` has them. Processes of their own compile kernels
meanwhile, one a product, and launch none. `--families q4_k,int4` takes some. Under four minutes.

On a CPU, to see that it runs (the reference is timed): python benchmarks/gpu_packed.py --tiny --device cpu
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.kernels.gemm.linear import quantized_linear
from holdfast.kernels.gemm.packed_linear import own_room, packed_linear
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch
from holdfast.kernels.geometry import ROW_SCALED_SPLIT_ROWS, row_scaled_splits
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme, integer_scheme, nvfp4_scheme
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8

FAMILIES: dict[str, PackedScheme] = {
    "q4_k": BLOCK_SCHEMES["Q4_K"],
    "q6_k": BLOCK_SCHEMES["Q6_K"],
    "awq": integer_scheme("AWQ of 4 bits in groups of 128", 4, 128, "float16", "uint8"),
    "q4_0": BLOCK_SCHEMES["Q4_0"],
    "q5_k": BLOCK_SCHEMES["Q5_K"],
    "q8_0": BLOCK_SCHEMES["Q8_0"],
    "nvfp4": nvfp4_scheme("NVFP4", divides=False),
    "gptq": integer_scheme("GPTQ of 4 bits in groups of 32", 4, 32, "float16"),
    "int4": integer_scheme("4 bits by channel", 4, 0, "bfloat16"),
    **{name.lower(): BLOCK_SCHEMES[name] for name in ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4")},
    **{name.lower(): BLOCK_SCHEMES[name] for name in ("Q2_K", "Q3_K")},
}
"""The first ones count most, so that a run that is cut off has them."""
LARGE_FAMILIES = ("q4_k", "awq")
"""Families measured in the shapes of the larger model too."""
MODELS = {
    "Qwen3-32B": {"qkv": (10240, 5120), "o": (5120, 8192), "gate-up": (51200, 5120), "down": (5120, 25600)},
    "Llama-70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate-up": (57344, 8192), "down": (8192, 28672)},
}
FIRST_ROWS = (1, 8, 64, 16, 8192)
"""Rows of every family, in order of importance."""
MORE_ROWS = (2, 4, 32, 128)
"""Rows of the large families, measured after all others."""
CACHE_BYTES = 160e6
"""Copies of a weight exceed this together: about three times the L2 cache."""
GRAPH_SECONDS = 1.5e-3
NUM_ROUNDS = 5
MOST_ERROR = 8e-3
"""Relative to the length of the exact result: the rounding of bfloat16 outputs, and of dequantized weights."""
JUDGED_OUTPUTS = 96
COMPILE_SECONDS = 100.0
"""Longest wait for the kernels of a product."""
STEP_SECONDS = 2.0
WANTED_SHARE = 75.0
"""Percent of the read rate that up to 16 rows should reach, in large products of 4.5 bits."""


class Case(NamedTuple):
    """One product."""

    model: str
    product: str
    size_n: int
    size_k: int
    num_rows: int


class Group(NamedTuple):
    """Cases of a family that one process compiles."""

    family: str
    model: str
    product: str
    rows: tuple[int, ...]

    @property
    def cases(self) -> list[Case]:
        sizes = (192, 512) if self.model == "tiny" else MODELS[self.model][self.product]
        return [Case(self.model, self.product, *sizes, num_rows) for num_rows in self.rows]


def groups(families: Sequence[str], tiny: bool) -> list[Group]:
    """List what is measured, the most important first."""
    if tiny:
        return [Group(family, "tiny", "product", (1, 20)) for family in families]
    first, *others = MODELS
    large = [family for family in families if family in LARGE_FAMILIES]
    found = [Group(family, first, product, FIRST_ROWS) for family in families for product in MODELS[first]]
    found += [
        Group(family, model, product, FIRST_ROWS) for family in large for model in others for product in MODELS[model]
    ]
    return found + [
        Group(family, model, product, MORE_ROWS)
        for family in large
        for model, products in MODELS.items()
        for product in products
    ]


def make_weight(scheme: PackedScheme, size_n: int, size_k: int, device: torch.device, seed: int) -> PackedWeight:
    """Return random codes with scales that make values of about 1 / sqrt(K)."""
    made = torch.Generator(device).manual_seed(seed)
    planes = []
    for plane in scheme.shaped((size_n, size_k)):
        name, dtype = plane.suffix.removeprefix("."), getattr(torch, plane.dtype)
        if dtype == torch.float8_e4m3fn:
            tensor = (0.5 + torch.rand(plane.shape, generator=made, device=device)).to(dtype)
        elif dtype.is_floating_point:
            # Sub-scales are integers, so d is smaller than a scale alone.
            size = {"d": 2e-4, "dmin": 1e-3, "mins": -8e-3, "second": 1e-3}.get(name, 1e-3)
            tensor = ((0.75 + 0.5 * torch.rand(plane.shape, generator=made, device=device)) * size).to(dtype)
        elif name == "scales" and scheme.family == "block_mxfp4":
            tensor = torch.randint(116, 120, plane.shape, generator=made, device=device, dtype=dtype)
        else:
            limits = {"scales": (1, 32), "mins": (1, 32), "zeros": (6, 10)}.get(name, (0, 256))
            low, high = (-128, 128) if dtype == torch.int8 and name == "codes" else limits
            tensor = torch.randint(low, high, plane.shape, generator=made, device=device, dtype=dtype)
        planes.append(tensor)
    part = PackedPart(scheme, 0, (size_n, size_k), tuple(planes))
    part.check()
    return PackedWeight((size_n, size_k), (part,))


def error_of(case: Case, weight: PackedWeight, x_TK: torch.Tensor, y_TN: torch.Tensor) -> float:
    """Return the length of the error over that of the exact result, for some outputs of the last rows."""
    (part,), step = weight.parts, max(1, case.size_n // 3)
    errors, lengths = 0.0, 0.0
    for start in {0, min(step, case.size_n - 1), max(0, case.size_n - JUDGED_OUTPUTS)}:
        end = min(case.size_n, start + JUDGED_OUTPUTS)
        values = torch.empty(end - start, case.size_k, device=x_TK.device)
        dequantize_rows(part, 0, (start, end), values)
        some = slice(max(0, case.num_rows - 64), case.num_rows)
        exact = x_TK[some].double() @ values.double().t()
        errors += float((y_TN[some, start:end].double() - exact).square().sum())
        lengths += float(exact.square().sum())
    return (errors / lengths) ** 0.5 if errors == errors and lengths > 0 else float("nan")


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median seconds of one of these calls, which run in turn in a graph."""
    for call in calls[:2]:
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    alone = max(2e-6, begin.elapsed_time(end) / 1000)
    num_calls = max(2, min(200, round(GRAPH_SECONDS / alone)), len(calls) if alone < 1e-3 else 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            calls[i % len(calls)]()
    graph.replay()
    found = []
    for _ in range(NUM_ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / num_calls)
    return median(found)


def read_rate(device: torch.device) -> float:
    """Return bytes a second that a sum reads."""
    numbers = torch.rand(2**29 if device.type == "cuda" else 2**20, device=device)
    return numbers.nbytes / seconds_of([lambda: torch.sum(numbers)], device)


def fp8_calls(case: Case, device: torch.device, x_TK: torch.Tensor, num_copies: int) -> list[Callable[[], object]]:
    """Return products by fp8 weights with scales by row, which quantize their rows."""
    shape, rows = (case.size_n, case.size_k), case.num_rows
    splits = row_scaled_splits(*shape)
    scratch = TileScratch(
        torch.empty(
            ROW_SCALED_SPLIT_ROWS * case.size_n * splits if rows <= ROW_SCALED_SPLIT_ROWS else 1, device=device
        ),
        torch.zeros(4096, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    codes = torch.empty(rows, case.size_k, dtype=torch.float8_e4m3fn, device=device)
    quantized = QuantizedRows(codes, torch.empty(rows, 1, device=device), scratch)
    out = torch.empty(rows, case.size_n, dtype=torch.bfloat16, device=device)
    weights = []
    for _ in range(num_copies):
        numbers = torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        weights.append(QuantizedWeight(FP8, shape, numbers, torch.rand(case.size_n, device=device)))
    return [lambda weight=weight: quantized_linear(x_TK, weight, None, out, quantized) for weight in weights]


class Rig:
    """Peers' times, which do not depend on the family, and inputs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._peers: dict[tuple[int, int, int], dict[str, float]] = {}

    def inputs(self, case: Case) -> torch.Tensor:
        made = torch.Generator(self.device).manual_seed(case.num_rows)
        return torch.randn(case.num_rows, case.size_k, generator=made, device=self.device).to(self.dtype)

    def peers(self, case: Case) -> dict[str, float]:
        """Return the seconds of cuBLAS in bfloat16, and of fp8."""
        key = case.num_rows, case.size_n, case.size_k
        if key not in self._peers:
            x_TK, shape = self.inputs(case), (case.size_n, case.size_k)
            copies = num_copies(2 * case.size_n * case.size_k, self.device)
            plain = [torch.randn(shape, device=self.device).to(self.dtype) for _ in range(copies)]
            out = torch.empty(case.num_rows, case.size_n, device=self.device, dtype=self.dtype)
            calls = [lambda weight=weight: torch.mm(x_TK, weight.t(), out=out) for weight in plain]
            found = {"bfloat16": seconds_of(calls, self.device)}
            del plain, calls
            if self.device.type == "cuda":
                copies = num_copies(case.size_n * case.size_k, self.device)
                found["fp8"] = seconds_of(fp8_calls(case, self.device, x_TK, copies), self.device)
            self._peers[key] = found
        return self._peers[key]


def num_copies(num_bytes: int, device: torch.device) -> int:
    return max(1, min(16, -(-int(CACHE_BYTES) // num_bytes))) if device.type == "cuda" else 1


@torch.inference_mode()
def run_case(family: str, case: Case, rig: Rig, rate: float, with_peers: bool) -> dict[str, Any]:
    """Judge a product, then time it."""
    scheme, device = FAMILIES[family], rig.device
    stored = scheme.row_bytes(case.size_k) * case.size_n
    x_TK, out = rig.inputs(case), torch.empty(case.num_rows, case.size_n, device=device, dtype=rig.dtype)
    weights = [
        make_weight(scheme, case.size_n, case.size_k, device, seed) for seed in range(num_copies(stored, device))
    ]
    if device.type == "cuda":
        room = own_room(weights[0].parts[0], x_TK)
        weights = [PackedWeight(one.shape, one.parts, room) for one in weights]
    found: dict[str, Any] = {
        "measure": f"{case.model} {case.product}, {case.num_rows} rows, {scheme.title}",
        "unit": "us", "family": family, **case._asdict(), "stored_bytes": stored,
    }  # fmt: skip
    out.fill_(float("nan"))
    packed_linear(x_TK, weights[0], None, out)
    found["error"] = error_of(case, weights[0], x_TK, out)
    found["values"] = {}
    if not found["error"] <= MOST_ERROR:
        return found
    seconds = seconds_of([lambda one=one: packed_linear(x_TK, one, None, out) for one in weights], device)
    again = torch.empty_like(out)
    packed_linear(x_TK, weights[0], None, out)
    packed_linear(x_TK, weights[0], None, again)
    found["is_repeatable"] = bool(torch.equal(out, again))
    found["values"] = {"packed": 1e6 * seconds}
    found["gigabytes_per_second"] = stored / seconds / 1e9
    found["percent_of_read_rate"] = 100 * stored / seconds / rate
    if with_peers:
        found["values"] |= {name: 1e6 * peer for name, peer in rig.peers(case).items()}
    return found


def compile_group(group: Group) -> None:
    """Compile the kernels of some cases, of ours and of fp8, and launch none."""
    from triton.runtime.jit import JITFunction

    run, device = JITFunction.run, torch.device("cuda")

    def compile_alone(self: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 as `run`
        return run(self, *given, **{**named, "warmup": True})

    JITFunction.run = compile_alone  # type: ignore[method-assign]
    rig = Rig(device)
    for case in group.cases:
        shape = case.size_n, case.size_k
        planes = [
            torch.empty(plane.shape, dtype=getattr(torch, plane.dtype), device=device)
            for plane in FAMILIES[group.family].shaped(shape)
        ]
        weight = PackedWeight(shape, (PackedPart(FAMILIES[group.family], 0, shape, tuple(planes)),))
        x_TK = rig.inputs(case)
        packed_linear(x_TK, weight, None, x_TK.new_empty(case.num_rows, case.size_n))
        fp8_calls(case, device, x_TK, 1)[0]()


class Compilers:
    """Processes that compile groups ahead of their measurement, one for each core at most."""

    def __init__(self, waiting: Iterable[Group]) -> None:
        self._waiting = list(waiting)
        self._running: dict[Group, subprocess.Popen[bytes]] = {}
        self._fill()

    def _fill(self) -> None:
        busy = sum(child.poll() is None for child in self._running.values())
        while self._waiting and busy < max(1, (os.cpu_count() or 2) - 1):
            group = self._waiting.pop(0)
            words = ":".join((*group[:3], ",".join(map(str, group.rows))))
            command = [sys.executable, __file__, "--child", words]
            self._running[group] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            busy += 1

    def wait_for(self, group: Group, most_seconds: float) -> None:
        """Wait until a group is compiled; what is not compiled by then compiles when it is launched."""
        end = time.monotonic() + min(most_seconds, COMPILE_SECONDS)
        while time.monotonic() < end:
            self._fill()
            child = self._running.get(group)
            if child is not None and child.poll() is not None:
                return
            time.sleep(0.05)

    def end(self) -> None:
        for child in self._running.values():
            child.kill()


def verdicts(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return what should hold, over what was measured."""
    timed = [row for row in results if row["values"]]
    found = {"right": all(row["error"] <= MOST_ERROR for row in results)}
    few = [row for row in timed if row["num_rows"] <= 16 and row["stored_bytes"] / row["size_n"] / row["size_k"] < 0.6]
    large = [row for row in few if row["product"] in ("gate-up", "down")]
    if large:
        found[f"large products of up to 16 rows at {WANTED_SHARE:g} % of the read rate"] = all(
            row["percent_of_read_rate"] >= WANTED_SHARE for row in large
        )
    for num_rows, peer, factor in ((64, "fp8", 1.0), (8192, "bfloat16", 1 / 0.85)):
        rows = [row for row in timed if row["num_rows"] == num_rows and peer in row["values"]]
        if rows:
            words = f"{num_rows} rows take at most {factor:.2f} of the time of {peer}"
            found[words] = all(row["values"]["packed"] <= factor * row["values"][peer] for row in rows)
    return found


def tried(family: str, case: Case, rig: Rig, rate: float) -> dict[str, Any]:
    """Run a case; one that fails hides no other."""
    try:
        return run_case(family, case, rig, rate, with_peers=True)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error)[:300]}"
        made = {"measure": f"{family} {case}", "unit": "us", "family": family, **case._asdict(), "failed": words}
        return {**made, "stored_bytes": 0, "error": float("nan"), "values": {}}


def show(row: Mapping[str, Any], budget: Budget) -> None:
    """Print a case as soon as it is measured."""
    times = ", ".join(f"{name} {value:.1f}" for name, value in row["values"].items())
    share = f", {row['percent_of_read_rate']:.0f} % of the read rate" if row["values"] else ""
    words = f"{times} us{share}" if times else row.get("failed", f"wrong: error {row['error']:.1e}")
    print(f"[{budget.spent_seconds:.0f} s] {row['measure']}: {words}", flush=True)


def write(results: Sequence[Mapping[str, Any]], rate: float, arguments: argparse.Namespace) -> None:
    facts = {"read_bytes_per_second": rate, "verdicts": verdicts(results)}
    record = make_record("gpu-packed", results, "Products by packed weights", "random codes", arguments, facts)
    write_record(record, "packed", arguments)


def main() -> None:
    """Compile, judge and measure family by family, print."""
    parser = options("Products by packed weights beside bfloat16 and fp8")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.set_defaults(budget_seconds=235.0)
    arguments = parser.parse_args()
    if arguments.child is not None:
        family, model, product, rows = arguments.child.split(":")
        compile_group(Group(family, model, product, tuple(int(count) for count in rows.split(","))))
        return
    device, budget = torch.device(arguments.device), Budget(arguments.budget_seconds)
    is_tiny, names = arguments.tiny or device.type != "cuda", arguments.families.split(",")
    torch.manual_seed(0)
    wanted = groups(names, is_tiny)
    compilers = Compilers(wanted if device.type == "cuda" else ())
    rate, rig, results = read_rate(device), Rig(device), []
    print(f"[{budget.spent_seconds:.0f} s] read rate {rate / 1e9:.0f} GB/s", flush=True)
    try:
        for group in wanted:
            if device.type == "cuda":
                compilers.wait_for(group, budget.left_seconds - STEP_SECONDS)
            for case in group.cases:
                if budget.left_seconds >= STEP_SECONDS:
                    results.append(tried(group.family, case, rig, rate))
                    show(results[-1], budget)
            if results:
                write(results, rate, arguments)
    finally:
        compilers.end()
    lines = [
        (
            row["measure"],
            *(row["values"].get(column) for column in ("packed", "bfloat16", "fp8")),
            row.get("gigabytes_per_second"),
            row.get("percent_of_read_rate"),
            row["error"],
        )
        for row in results
    ]
    columns = ("", "packed, us", "bfloat16", "fp8", "GB/s", "% of read rate", "error")
    print_table("Products by packed weights", columns, lines)
    for words, holds in verdicts(results).items():
        print(f"{'yes' if holds else 'NO '}  {words}")


if __name__ == "__main__":
    main()

"""Parts of a prompt's layers in fp8 beside attention: python benchmarks/gpu_prefill_products.py

8,192 rows of Qwen3-32B and Qwen3-30B-A3B with uniform routing: codes of gated rows, of rows and of norms, the order of
pairs, and products of experts in several tiles. A part's first column is what a layer runs. Others compute the same, and
bits that differ are reported. Graphs of all columns take turns. Processes of their own compile before. About 50 seconds.

On a CPU, to see that it runs: TRITON_INTERPRET=1 python benchmarks/gpu_prefill_products.py --tiny --device cpu

T rows, K columns, I columns of a gated row, E experts, S experts of a row, P pairs
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from gpu_prefill_attention import capture, seconds_of_graphs
from gpu_records import Budget, make_record, options, print_table, write_record

from holdfast.kernels.activation import gate_mul_triton
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    add_rms_norm_coded_triton,
    gate_mul_coded_triton,
    quantize_rows_triton,
    rms_norm_codes_triton,
)
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.moe import grouped_gemm
from holdfast.kernels.moe.grouped_gemm import Tile
from holdfast.kernels.moe.routing import ExpertOrder, ExpertProduct, order_experts
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES

COMPILE_SECONDS = 45.0
CALLS_OF_GRAPH = 8
Call = Callable[[], tuple[torch.Tensor, ...]]


class Sizes(NamedTuple):
    """What a part is measured with."""

    num_rows: int = 8192
    num_experts: int = 128
    top_k: int = 8
    shrink: int = 1
    """Divisor of widths."""


FULL, TINY = Sizes(), Sizes(24, 4, 2, 32)


class Part(NamedTuple):
    """One step of a layer: columns by name, with bytes or operations for a rate."""

    name: str
    make: Callable[[Sizes, torch.device], Mapping[str, Call]]
    num_bytes: Callable[[Sizes], float] | None = None
    num_flops: Callable[[Sizes], float] | None = None
    wanted: float | None = None
    """TB/s, TFLOPS, or most microseconds if neither is counted."""

    def rate(self, sizes: Sizes, seconds: float) -> float:
        counted = self.num_bytes or self.num_flops
        return seconds * 1e6 if counted is None else counted(sizes) / seconds / 1e12

    @property
    def unit(self) -> str:
        if self.num_bytes is None and self.num_flops is None:
            return "us"
        return "TFLOPS" if self.num_bytes is None else "TB/s"


def random_rows(num_rows: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.randn(num_rows, width, device=device, dtype=torch.float32).to(torch.bfloat16)


def empty_codes(num_rows: int, width: int, device: torch.device) -> QuantizedRows:
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(codes, torch.empty(num_rows, 1, device=device))


def codes_of(rows: QuantizedRows) -> tuple[torch.Tensor, ...]:
    return rows.codes_TK.view(torch.uint8), rows.scales_TB


def gated(width: int) -> Part:
    """Codes of gated rows."""

    def make(sizes: Sizes, device: torch.device) -> Mapping[str, Call]:
        size = width // sizes.shrink
        gate_up, out = random_rows(sizes.num_rows, 2 * size, device), random_rows(sizes.num_rows, size, device)
        codes = empty_codes(sizes.num_rows, size, device)

        def joined() -> tuple[torch.Tensor, ...]:
            gate_mul_coded_triton(gate_up, "silu", out, None, codes)
            return codes_of(codes)

        def apart() -> tuple[torch.Tensor, ...]:
            quantize_rows_triton(gate_mul_triton(gate_up, "silu", out), codes)
            return codes_of(codes)

        return {"one launch": joined, "two launches": apart}

    return Part(f"codes of gated rows, {width}", make, lambda sizes: 5.0 * sizes.num_rows * width, wanted=3.8)


def coded(num_times: int, width: int) -> Part:
    """Codes of rows; pairs are `num_times` the rows."""

    def make(sizes: Sizes, device: torch.device) -> Mapping[str, Call]:
        num_rows, size = num_times * sizes.num_rows, width // sizes.shrink
        x, codes = random_rows(num_rows, size, device), empty_codes(num_rows, size, device)
        return {"codes": lambda: codes_of(quantize_rows_triton(x, codes))}

    name = f"codes of {'pairs' if num_times > 1 else 'rows'}, {width}"
    return Part(name, make, lambda sizes: 3.0 * num_times * sizes.num_rows * width, wanted=3.5)


def normed(width: int) -> Part:
    """Codes of normed rows after a residual add."""

    def make(sizes: Sizes, device: torch.device) -> Mapping[str, Call]:
        size = width // sizes.shrink
        x = random_rows(sizes.num_rows, size, device)
        delta = torch.zeros_like(x)
        weight, out = torch.ones(size, device=device, dtype=torch.bfloat16), torch.empty_like(x)
        codes = empty_codes(sizes.num_rows, size, device)

        def run(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
            function(x, delta, weight, 1e-6, out, codes)
            return codes_of(codes)

        return {
            "codes alone": lambda: run(rms_norm_codes_triton),
            "rows too": lambda: run(add_rms_norm_coded_triton),
        }

    return Part(f"codes of normed rows, {width}", make, lambda sizes: 7.0 * sizes.num_rows * width, wanted=3.5)


def uniform_order(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    scores = torch.rand(sizes.num_rows, sizes.num_experts, device=device)
    ids = scores.topk(sizes.top_k, dim=1).indices.to(torch.int32)
    specs = order_specs(sizes.num_rows, sizes.top_k, sizes.num_experts)
    return ids, [torch.zeros(spec.shape, dtype=torch.int32, device=device) for spec in specs]


def make_order(sizes: Sizes, device: torch.device) -> Mapping[str, Call]:
    ids, tensors = uniform_order(sizes, device)

    def run() -> tuple[torch.Tensor, ...]:
        return (order_experts(ids, sizes.num_experts, tensors).block_experts_B,)

    return {"order": run}


TILES = {
    True: {"64 and 64 by 128": None, "joint, 4 stages": Tile(128, 128, 4, 8, True), "joint, 3 stages": Tile(128, 128, 3, 8, True),
           "joint, two on a multiprocessor": Tile(128, 128, 3, 4, True)},
    False: {"128 by 128": None, "3 stages": Tile(128, 128, 3, 8), "two on a multiprocessor": Tile(128, 128, 3, 4)},
}  # fmt: skip
"""Gated or not. None: what `tile_for` chooses. K is summed in the same blocks in all, so bits are equal."""


def experts(is_gated: bool, size_k: int, size_n: int) -> Part:
    """A product of experts by fp8 codes."""

    def make(sizes: Sizes, device: torch.device) -> Mapping[str, Call]:
        columns, outputs = size_k // sizes.shrink, size_n // sizes.shrink
        scheme = WEIGHT_SCHEMES["fp8"].with_parts((outputs,))
        shape = (sizes.num_experts, outputs * (2 if is_gated else 1), columns)
        codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.rand(scheme.scale_shape(shape), device=device).add_(0.5).mul_(1e-3)
        weight = QuantizedWeight(scheme, shape, codes.view(-1, columns), scales)
        ids, tensors = uniform_order(sizes, device)
        order: ExpertOrder = order_experts(ids, sizes.num_experts, tensors)
        num_inputs = sizes.num_rows if is_gated else order.num_pairs
        x, rows = random_rows(num_inputs, columns, device), empty_codes(num_inputs, columns, device)
        quantize_rows_triton(x, rows)
        out = torch.empty(order.num_pairs, outputs, dtype=torch.bfloat16, device=device)
        product = ExpertProduct(x, weight, order, out, is_gated, rows)

        def run(tile: Tile | None) -> tuple[torch.Tensor, ...]:
            if tile is None:
                return (grouped_gemm.grouped_gemm(product),)
            with patch.object(grouped_gemm, grouped_gemm.tile_for.__name__, lambda *_: tile):
                return (grouped_gemm.grouped_gemm(product),)

        return {name: lambda tile=tile: run(tile) for name, tile in TILES[is_gated].items()}

    name = "gate and up of experts" if is_gated else "down of experts"
    num_outputs = size_n * (2 if is_gated else 1)
    flops = 2.0 * size_k * num_outputs
    return Part(name, make, num_flops=lambda sizes: flops * sizes.num_rows * sizes.top_k)


PARTS = (
    gated(25600),
    coded(1, 8192),
    normed(5120),
    Part("order of pairs", make_order, wanted=30),
    coded(8, 768),
    normed(2048),
    experts(True, 2048, 768),
    experts(False, 768, 2048),
    gated(9728),
)


@torch.inference_mode()
def run_part(part: Part, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Compare bits and time all columns; those that fail give their error."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    first: tuple[torch.Tensor, ...] | None = None
    graphs, errors, equal = {}, {}, {}
    for name, call in part.make(sizes, device).items():
        try:
            found = tuple(one.clone() for one in call())
            first = found if first is None else first
            equal[name] = all(torch.equal(mine, other) for mine, other in zip(found, first, strict=True))
            if stream is not None:
                graphs[name] = capture(call, CALLS_OF_GRAPH, stream)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    seconds = {} if stream is None else seconds_of_graphs(graphs, stream)
    each = {name: value / CALLS_OF_GRAPH for name, value in seconds.items()}
    return {
        "measure": part.name,
        "unit": part.unit,
        "microseconds": {name: round(value * 1e6, 1) for name, value in each.items()},
        "values": {name: round(part.rate(sizes, value), 2) for name, value in each.items()},
        "equal": equal,
        "wanted": part.wanted,
        "errors": errors,
    }


def compile_parts() -> None:
    """Compile each part in a process; Triton's cache on disk keeps the kernels."""
    children = [subprocess.Popen([sys.executable, __file__, "--child", str(index)]) for index in range(len(PARTS))]
    for child in children:
        try:
            child.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


def write(results: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    words = "parts of layers of Qwen3-32B and Qwen3-30B-A3B in fp8, 8,192 rows"
    facts = {"equal": {row["measure"]: row["equal"] for row in results}}
    record = make_record("gpu-prefill-products", results, "Prefill in fp8 beside attention", words, arguments, facts)
    write_record(record, "prefill-products", arguments)


def main() -> None:
    """Compile, measure part by part, print."""
    arguments = options("Parts of a prompt's layers in fp8 beside attention").parse_args()
    device, budget = torch.device(arguments.device), Budget(arguments.budget_seconds)
    sizes = TINY if arguments.tiny or device.type != "cuda" else FULL
    torch.manual_seed(0)
    if arguments.child is not None:
        with torch.inference_mode():
            for call in PARTS[int(arguments.child)].make(sizes, device).values():
                call()
        torch.cuda.synchronize()
        return
    if device.type == "cuda":
        compile_parts()
        print(f"[{budget.spent_seconds:.0f} s] kernels are compiled", flush=True)
    results = []
    for part in PARTS:
        results.append(run_part(part, sizes, device))
        row = results[-1]
        print(
            f"[{budget.spent_seconds:.0f} s] {part.name}: {row['microseconds']} us {row['equal']} {row['errors'] or ''}",
            flush=True,
        )
        if device.type == "cuda":
            write(results, arguments)
    lines = [
        (
            row["measure"],
            name,
            row["microseconds"].get(name),
            row["values"].get(name),
            row["unit"],
            row["wanted"],
            equal,
        )
        for row in results
        for name, equal in row["equal"].items()
    ]
    print_table("Prefill in fp8 beside attention", ("", "", "us", "rate", "", "wanted", "equal bits"), lines)


if __name__ == "__main__":
    main()

"""Probe of products by row-scaled e4m3 weights at 1 to 64 rows, shapes of Qwen3-32B, on one Hopper GPU:

    python benchmarks/probe_fp8_rows.py --out FOLDER [--no-times]

First processes compile all kernels and compare the streaming kernel (kernels/gemm/row_scaled_stream.py) with float32 products,
many at once, each with a time limit. Then one process times products and chains of a layer's products, replayed from one graph
over several layers of weights, so the L2 cache holds none of them. FOLDER/probe_fp8_rows.json holds everything, and is written
after each part.

Error: largest difference over the tolerance; above 1 fails. Bits that differ between row counts or repeats must be 0.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402

from holdfast.kernels.gemm import row_scaled_stream  # noqa: E402
from holdfast.kernels.gemm.deferred_rms_norm import (  # noqa: E402
    AmaxScratch,
    NormedRows,
    ResidualStream,
    RowAmax,
    SmallBatchScratch,
    defer_rms_norm,
    row_amax,
)
from holdfast.kernels.gemm.quantize_activations import (  # noqa: E402
    QuantizedRows,
    TileScratch,
    add_rms_norm_coded,
    quantize_rows,
    quantize_rows_by_amax,
)
from holdfast.kernels.gemm.row_scaled_stream import StreamForm, stream_gate, stream_linear  # noqa: E402
from holdfast.kernels.gemm.row_scaled_tiles import row_scaled_gate, row_scaled_linear  # noqa: E402
from holdfast.kernels.gemm.small_batch import linear_add, normed_linear  # noqa: E402
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX, SPLIT_K_COLUMNS  # noqa: E402
from holdfast.quant.quantized_weight import QuantizedWeight  # noqa: E402
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES  # noqa: E402

READ_RATE = 4.37e12
HIDDEN, ATTENDED, INNER = 5120, 8192, 25600
NUM_LAYERS = 8
PARALLEL_SECONDS, TIME_SECONDS = 45, 50
MOST_ROWS = 64
FORMS = {
    "default": None,
    "ring, released early": (0, 0),
    "ring, released late": (0, 12),
    "ahead 6, released early": (6, 0),
    "ahead 6, released at 24": (6, 24),
    "ahead 16, released at 12": (16, 12),
    "ahead 16, released at 24": (16, 24),
    "small ring": (8, 12),
}
"""Steps ahead, and steps before the end at which the next kernel may start."""


class Shape(NamedTuple):
    """Outputs and inputs of a product; a gated one has twice as many rows."""

    size_n: int
    size_k: int
    kind: str = ""


SHAPES = {
    "qkv": Shape(10240, HIDDEN),
    "o": Shape(HIDDEN, ATTENDED),
    "gate_up": Shape(INNER, HIDDEN, "silu"),
    "down": Shape(HIDDEN, INNER),
}
ODD = {
    "odd": Shape(100, 2112),
    "odd gate": Shape(70, 4224, "silu"),
    "small": Shape(24, 64),
    "A3B o": Shape(2048, 4096),
    "gelu": Shape(640, 1040, "gelu_tanh"),
}


def form_of(name: str, num_rows: int) -> StreamForm | None:
    """Return the form of this name."""
    default, sizes = row_scaled_stream.stream_form(row_scaled_stream.row_form(num_rows)), FORMS[name]
    if sizes is None:
        return default
    return StreamForm(default.num_stages - (2 if name == "small ring" else 0), *sizes)


def make_weight(shape: Shape, seed: int) -> QuantizedWeight:
    """Make codes without NaN, and scales that keep outputs near 1."""
    torch.manual_seed(seed)
    full = shape.size_n * (2 if shape.kind else 1), shape.size_k
    codes = torch.randint(0, 256, full, dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0x30
    scales = (0.5 + torch.rand(full[0], device="cuda")) / (90 * shape.size_k**0.5)
    return QuantizedWeight(WEIGHT_SCHEMES["fp8"], full, codes.view(torch.float8_e4m3fn), scales)


def make_rows(num_rows: int, size_k: int, scratch: TileScratch | None) -> QuantizedRows:
    """Make random rows as codes."""
    codes = torch.empty(num_rows, size_k, dtype=torch.float8_e4m3fn, device="cuda")
    rows = QuantizedRows(codes, torch.empty(num_rows, 1, device="cuda"), scratch)
    return quantize_rows(torch.randn(num_rows, size_k, device="cuda", dtype=torch.bfloat16), rows)


def make_scratch() -> TileScratch:
    """Make the scratch of streams and of tiles, with poison."""
    partials = torch.full((max(2 * 132 * 128 * 64, 128 * 3 * HIDDEN),), float("nan"), device="cuda")
    arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")
    return TileScratch(partials, arrived, torch.full((64 * 1024,), -1, dtype=torch.int32, device="cuda"))


# --- errors


def product(rows: QuantizedRows, weight: QuantizedWeight, shape: Shape, form: StreamForm | None = None) -> torch.Tensor:
    """Run the streaming kernel into poison."""
    out = torch.full((len(rows.codes_TK), shape.size_n), float("nan"), dtype=torch.bfloat16, device="cuda")
    if shape.kind:
        stream_gate(rows, weight, None, shape.kind, out, form)
    else:
        stream_linear(rows, weight, None, out, form)
    return out


def expected(rows: QuantizedRows, weight: QuantizedWeight, shape: Shape) -> torch.Tensor:
    """Multiply in float32."""
    y = rows.codes_TK.float() @ weight.codes.float().t() * rows.scales_TB * weight.scales
    if not shape.kind:
        return y
    gate, up = y.chunk(2, dim=-1)
    return up * (
        torch.nn.functional.silu(gate) if shape.kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def judge(name: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Say errors, and bits that differ between row counts, repeats and forms."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape, scratch = {**SHAPES, **ODD}[name], make_scratch()
    weight, whole = make_weight(shape, 1), make_rows(MOST_ROWS, shape.size_k, scratch)
    exact = expected(whole, weight, shape)
    spread = exact.square().mean().sqrt()
    largest = None
    for num_rows in (64, 8, 1, 2, 16, 17, 32, 33):
        rows = QuantizedRows(whole.codes_TK[:num_rows].clone(), whole.scales_TB[:num_rows].clone(), scratch)
        y = product(rows, weight, shape)
        torch.cuda.synchronize()
        found: dict[str, Any] = {"shape": name, "rows": num_rows}
        error = (y.float() - exact[:num_rows]).abs() / (2**-8 * exact[:num_rows].abs() + 2e-3 * spread)
        found["error"] = float(error.max()) if bool(y.isfinite().all()) else "not finite"
        largest = y if largest is None else largest
        found["differs from 64 rows"] = differing(y, largest[:num_rows])
        if shape.kind:
            bits = scratch.amax[: num_rows * -(-shape.size_n // 64)].view(num_rows, -1).amax(-1)
            found["amax"] = int((bits != y.float().abs().amax(-1).view(torch.int32)).sum())
        outs = [product(rows, weight, shape, form_of(form, num_rows)) for form in FORMS for _ in range(3)]
        found["differs in repeats and forms"] = sum(differing(y, out) for out in outs)
        found["counts left"] = int(scratch.arrived.count_nonzero())
        say(found)


# --- chains


class Layer(NamedTuple):
    """One layer's weights."""

    qkv: QuantizedWeight
    o: QuantizedWeight
    gate_up: QuantizedWeight
    down: QuantizedWeight


class Buffers(NamedTuple):
    """Rows of a chain."""

    x: torch.Tensor
    norm: torch.Tensor
    normed: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    active: torch.Tensor


def make_buffers(num_rows: int) -> Buffers:
    """Make the rows of a chain; attention is left out, so its result is given."""

    def rows(width: int) -> torch.Tensor:
        return torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)

    norm = torch.rand(HIDDEN, device="cuda").bfloat16()
    return Buffers(rows(HIDDEN), norm, rows(HIDDEN), rows(HIDDEN), rows(10240), rows(ATTENDED), rows(INNER))


def fused_chain(layers: list[Layer], buffers: Buffers) -> Callable[[], None]:
    """Return the fused decode path of today: 1 to 16 rows."""
    b, num_rows = buffers, len(buffers.x)
    zeros = torch.zeros(16 * NUM_GATE_AMAX, dtype=torch.int32, device="cuda")
    amax = AmaxScratch(torch.empty(2560, device="cuda"), torch.empty(FUSED_DECODE_ROWS, device="cuda"), zeros)
    partials = torch.empty(FUSED_DECODE_ROWS * SPLIT_K_COLUMNS, device="cuda")
    arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")
    scratch = SmallBatchScratch(torch.empty(2560, device="cuda"), partials, arrived, amax)
    stream = ResidualStream(b.x, b.norm, 1e-6, b.normed, scratch)

    def run() -> None:
        rows: NormedRows = defer_rms_norm(stream)
        for layer in layers:
            normed_linear(rows, layer.qkv, None, False, b.qkv, scratch)
            inputs = row_amax(b.attended, amax.inputs, amax.gated[: num_rows * NUM_GATE_AMAX])
            rows = linear_add(b.attended, layer.o, None, stream, inputs)
            normed_linear(rows, layer.gate_up, None, True, b.active, scratch)
            rows = linear_add(b.active, layer.down, None, stream, RowAmax(amax.gated, NUM_GATE_AMAX))

    return run


def plain_chain(layers: list[Layer], buffers: Buffers, form: str | None) -> Callable[[], None]:
    """Return norms, codes and products in turn: tiles of today, or the streaming kernel in a form."""
    b, num_rows = buffers, len(buffers.x)
    scratch = make_scratch()
    wide, tall, deep = (make_rows(num_rows, size, scratch) for size in (HIDDEN, ATTENDED, INNER))
    sizes = None if form is None else form_of(form, num_rows)

    def multiply(rows: QuantizedRows, weight: QuantizedWeight, out: torch.Tensor) -> None:
        if form is None:
            row_scaled_linear(rows, weight, None, out)
        else:
            stream_linear(rows, weight, None, out, sizes)

    def run() -> None:
        delta = None
        for layer in layers:
            add_rms_norm_coded(b.x, delta, b.norm, 1e-6, b.normed, wide)
            multiply(wide, layer.qkv, b.qkv)
            quantize_rows(b.attended, tall)
            multiply(tall, layer.o, b.delta)
            delta = b.delta
            add_rms_norm_coded(b.x, delta, b.norm, 1e-6, b.normed, wide)
            if form is None:
                amax = row_scaled_gate(wide, layer.gate_up, None, "silu", b.active)
            else:
                amax = stream_gate(wide, layer.gate_up, None, "silu", b.active, sizes)
            quantize_rows_by_amax(b.active, amax, deep)
            multiply(deep, layer.down, b.delta)
        assert delta is not None
        b.x.add_(delta)

    return run


def chains(num_rows: int, forms: list[str]) -> dict[str, Callable[[list[Layer], Buffers], Callable[[], None]]]:
    """Return the chains of this many rows by name."""
    found: dict[str, Callable[[list[Layer], Buffers], Callable[[], None]]] = {}
    if num_rows <= FUSED_DECODE_ROWS:
        found["fused"] = fused_chain
    found["tiles"] = lambda layers, buffers: plain_chain(layers, buffers, None)
    for form in forms:
        found[f"stream, {form}"] = lambda layers, buffers, form=form: plain_chain(layers, buffers, form)
    return found


# --- times


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once, then capture."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, num_replays: int = 6) -> float:
    """Return the median of five measurements of a replay."""
    graph.replay()
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / num_replays)
    return sorted(found)[2]


def time_chains(layers: list[Layer], num_rows: int, forms: list[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Time the chains of this many rows, and compare their results."""
    num_bytes = sum(weight.codes.numel() for weight in layers[0])
    first = None
    for name, make in chains(num_rows, forms).items():
        found: dict[str, Any] = {"chain": name, "rows": num_rows}
        try:
            torch.manual_seed(3)
            buffers = make_buffers(num_rows)
            start = buffers.x.clone()
            make(layers[:2], buffers)()
            moved = (buffers.x - start).float()
            first = moved if first is None else first
            found["difference"] = float((moved - first).norm() / first.norm())
            us = microseconds(captured(make(layers, buffers))) / len(layers)
            found |= {"us a layer": us, "% of the read rate": 100 * num_bytes / us / 1e-6 / READ_RATE}
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[-300:]
        say(found)


def time_products(layers: list[Layer], num_rows: int, forms: list[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Time products of one kind back to back."""
    scratch, buffers = make_scratch(), make_buffers(num_rows)
    outs = {"qkv": buffers.qkv, "o": buffers.delta, "gate_up": buffers.active, "down": buffers.delta}
    for index, (name, shape) in enumerate(SHAPES.items()):
        rows = make_rows(num_rows, shape.size_k, scratch)

        def run(form: str | None, index: int = index, name: str = name, rows: QuantizedRows = rows) -> None:
            for layer in layers:
                if name == "gate_up" and form is None:
                    row_scaled_gate(rows, layer[index], None, "silu", outs[name])
                elif name == "gate_up":
                    stream_gate(rows, layer[index], None, "silu", outs[name], form_of(form or "", num_rows))
                elif form is None:
                    row_scaled_linear(rows, layer[index], None, outs[name])
                else:
                    stream_linear(rows, layer[index], None, outs[name], form_of(form, num_rows))

        for form in (None, *forms):
            us = microseconds(captured(lambda form=form, run=run: run(form)), 4) / len(layers)
            percent = 100 * layers[0][index].codes.numel() / us / 1e-6 / READ_RATE
            say({"product": name, "rows": num_rows, "form": form or "tiles", "us": us, "%": percent})


def time_all(say: Callable[[dict[str, Any]], None], seconds: float) -> None:
    """Time chains first, the most important ones at the front."""
    begin = time.monotonic()
    layers = [
        Layer(*(make_weight(shape, 10 * i + j) for j, shape in enumerate(SHAPES.values()))) for i in range(NUM_LAYERS)
    ]
    some, few = list(FORMS), ["default", "ahead 16, released at 24"]
    parts: list[tuple[Callable[..., None], int, list[str]]] = [
        (time_chains, 8, some), (time_chains, 32, few), (time_chains, 1, few), (time_chains, 16, few),
        (time_products, 8, few), (time_chains, 64, few), (time_chains, 2, few), (time_chains, 32, some[2:]),
        (time_products, 32, few), (time_products, 1, few), (time_products, 2, few), (time_products, 4, few),
        (time_products, 16, few), (time_products, 64, few),
    ]  # fmt: skip
    for part, num_rows, forms in parts:
        if time.monotonic() - begin > seconds:
            say({"stopped": "out of time"})
            return
        part(layers, num_rows, forms, say)


def warm(num_rows: int, chain: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Compile the kernels of a chain; errors compile those of streams."""
    layers = [Layer(*(make_weight(shape, 1) for shape in SHAPES.values()))]
    chains(num_rows, [])[chain](layers, make_buffers(num_rows))()
    torch.cuda.synchronize()
    say({"rows": num_rows, "warm": chain})


# --- processes


def child(name: str) -> None:
    """Run one part and print lines of JSON."""

    def say(found: dict[str, Any]) -> None:
        print("FOUND " + json.dumps(found), flush=True)

    kind, _, rest = name.partition(":")
    if kind == "judge":
        judge(rest, say)
    elif kind == "warm":
        num_rows, _, chain = rest.partition(":")
        warm(int(num_rows), chain, say)
    else:
        time_all(say, float(rest))


def run_child(name: str, seconds: float, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Run a part in a process, and keep each finding at once."""
    process = subprocess.Popen(
        ["timeout", "-k", "1", str(int(seconds)), sys.executable, __file__, "--child", name],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    other: list[str] = []
    for line in process.stdout:
        if line.startswith("FOUND "):
            keep(name, json.loads(line.removeprefix("FOUND ")))
        else:
            other.append(line)
    if process.wait():
        keep(name, {"failed": process.returncode, "output": "".join(other)[-1200:]})


def main() -> None:
    """Parse the command line; run one part, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child)
        return
    begin, record = time.monotonic(), {}
    arguments.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, found: dict[str, Any]) -> None:
        record.setdefault(name, []).append(found)
        (arguments.out / "probe_fp8_rows.json").write_text(json.dumps(record, indent=1))
        numbers = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
        )
        print(f"[{time.monotonic() - begin:.0f} s] {name}:", "  ".join(numbers), flush=True)

    names = [f"judge:{name}" for name in (*SHAPES, *ODD)]
    names += ["warm:1:fused", "warm:8:fused", "warm:8:tiles", "warm:32:tiles", "warm:64:tiles"]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        for task in [pool.submit(run_child, name, PARALLEL_SECONDS, keep) for name in names]:
            task.result()
    has_hung = any(found[-1].get("failed") == 124 for found in record.values())
    if not arguments.no_times and not has_hung:
        run_child(f"times:{TIME_SECONDS - 14}", TIME_SECONDS, keep)
    wrong = [name for name, found in record.items() if any(is_wrong(one) for one in found)]
    print(f"{len(record) - len(wrong)} of {len(record)} parts are right. Others: {wrong}", flush=True)


def is_wrong(found: dict[str, Any]) -> bool:
    """Return True if a part failed, an error is beyond its tolerance, or bits differ."""
    error = found.get("error", 0.0)
    bits = ("differs from 64 rows", "differs in repeats and forms", "amax", "counts left")
    return "failed" in found or not isinstance(error, float) or error > 1 or any(found.get(name) for name in bits)


if __name__ == "__main__":
    main()

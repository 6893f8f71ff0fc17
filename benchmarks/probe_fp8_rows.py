"""Probe of products by row-scaled e4m3 weights at 1 to 64 rows, shapes of Qwen3-32B, on one Hopper GPU:

    python benchmarks/probe_fp8_rows.py --out FOLDER

First processes compile all kernels and compare each product with float32, many at once, each with a time limit. Then one
process times chains of a layer's products, replayed from one graph over several layers of weights, so the L2 cache holds none
of them: the fused decode path, and tiles in several sizes of launch. FOLDER/probe_fp8_rows.json holds everything, and is
written after each part.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402

from holdfast.kernels import geometry  # noqa: E402
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
    RowAmaxBits,
    TileScratch,
    add_rms_norm_coded,
    quantize_rows,
    quantize_rows_by_amax,
)
from holdfast.kernels.gemm.row_scaled_stream import StreamForm, stream_gate, stream_linear  # noqa: E402
from holdfast.kernels.gemm.row_scaled_tiles import TileForm, row_form, row_scaled_gate, row_scaled_linear  # noqa: E402
from holdfast.kernels.gemm.small_batch import linear_add, normed_linear  # noqa: E402
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX, SPLIT_K_COLUMNS  # noqa: E402
from holdfast.quant.quantized_weight import QuantizedWeight  # noqa: E402
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES  # noqa: E402

READ_RATE = 4.37e12
HIDDEN, ATTENDED, INNER = 5120, 8192, 25600
NUM_LAYERS = 8
PARALLEL_SECONDS, TIME_SECONDS = 45, 45
LIMIT = 4e-3
"""Largest error of a product in bfloat16, by norm."""
Forms = Mapping[str, TileForm | StreamForm]
GATE: dict[str, TileForm | StreamForm] = {"gate_up": TileForm(64, 1, 3, 0)}
FORMS: dict[int, dict[str, Forms]] = {
    16: {
        "tiles": {},
        "gate of 3 stages": GATE,
        "gate of 3 stages, 4 ahead": {"gate_up": TileForm(64, 1, 3, 4)},
        "gate of 128, 3 stages": {"gate_up": TileForm(128, 1, 3, 0, 8)},
        "4 ahead": {
            "qkv": TileForm(64, 1, 6, 4), "o": TileForm(64, 2, 6, 4), "gate_up": TileForm(64, 1, 3, 2),
            "down": TileForm(64, 3, 6, 4),
        },
        "8 ahead": {
            "qkv": TileForm(64, 1, 6, 8), "o": TileForm(64, 2, 6, 8), "gate_up": TileForm(64, 1, 3, 4),
            "down": TileForm(64, 3, 6, 8),
        },
        "16 ahead": {
            "qkv": TileForm(64, 1, 6, 16), "o": TileForm(64, 2, 6, 16), "gate_up": TileForm(64, 1, 3, 8),
            "down": TileForm(64, 3, 6, 16),
        },
        "10 stages": GATE | {
            "qkv": TileForm(64, 1, 10, 0), "o": TileForm(64, 2, 10, 0), "down": TileForm(64, 3, 8, 0),
        },
        "4 stages": GATE | {
            "qkv": TileForm(64, 1, 4, 0), "o": TileForm(64, 2, 4, 0), "down": TileForm(64, 3, 4, 0),
        },
        "o in 3": GATE | {"o": TileForm(64, 3, 6, 0)},
        "o in 4": GATE | {"o": TileForm(64, 4, 5, 0)},
        "down in 2": GATE | {"down": TileForm(64, 2, 8, 0)},
        "down in 4": GATE | {"down": TileForm(64, 4, 5, 0)},
        "qkv in 2": GATE | {"qkv": TileForm(64, 2, 5, 0)},
        "264 streams": {name: StreamForm(3, 0, 6) for name in ("qkv", "o", "gate_up", "down")},
        "264 streams of 5 stages": {name: StreamForm(5, 0, 6) for name in ("qkv", "o", "gate_up", "down")},
    },
    32: {
        "tiles": {},
        "gate of 2 stages": {"gate_up": TileForm(64, 1, 2, 0)},
        "gate of 128, 2 stages": {"gate_up": TileForm(128, 1, 2, 0, 8)},
        "gate of 128, 3 stages": {"gate_up": TileForm(128, 1, 3, 0, 8)},
        "8 ahead": {
            "qkv": TileForm(64, 1, 6, 8), "o": TileForm(64, 2, 6, 8), "gate_up": TileForm(64, 1, 4, 4),
            "down": TileForm(64, 3, 6, 8),
        },
        "o in 3": {"o": TileForm(64, 3, 5, 0)},
        "down in 2": {"down": TileForm(64, 2, 6, 0)},
    },
    64: {
        "tiles": {},
        "gate of 3 stages": {"gate_up": TileForm(64, 1, 3, 0)},
        "gate of 128, 2 stages": {"gate_up": TileForm(128, 1, 2, 0, 8)},
        "8 ahead": {
            "qkv": TileForm(64, 1, 6, 8), "o": TileForm(64, 2, 6, 8), "gate_up": TileForm(64, 1, 4, 4),
            "down": TileForm(64, 3, 6, 8),
        },
    },
}  # fmt: skip
"""Sizes of launches by the rows of a tile; those of today otherwise."""


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


def multiply(
    rows: QuantizedRows, weight: QuantizedWeight, name: str, out: torch.Tensor, form: TileForm | StreamForm | None
) -> RowAmaxBits | None:
    """Launch a product in a form; return the amax of gate and up."""
    if isinstance(form, StreamForm):
        num_programs = geometry.ROW_SCALED_PROGRAMS
        geometry.ROW_SCALED_PROGRAMS = 264
        try:
            if name == "gate_up":
                return stream_gate(rows, weight, None, "silu", out, form)
            stream_linear(rows, weight, None, out, form)
        finally:
            geometry.ROW_SCALED_PROGRAMS = num_programs
    elif name == "gate_up":
        return row_scaled_gate(rows, weight, None, "silu", out, form)
    else:
        row_scaled_linear(rows, weight, None, out, form)
    return None


def errors(num_rows: int, forms: Forms) -> dict[str, float]:
    """Return the error of each product, by norm."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found, scratch = {}, make_scratch()
    for name, shape in SHAPES.items():
        weight, rows = make_weight(shape, 1), make_rows(num_rows, shape.size_k, scratch)
        out = torch.full((num_rows, shape.size_n), float("nan"), dtype=torch.bfloat16, device="cuda")
        multiply(rows, weight, name, out, forms.get(name))
        exact = rows.codes_TK.float() @ weight.codes.float().t() * rows.scales_TB * weight.scales
        if shape.kind:
            gate, up = exact.chunk(2, dim=-1)
            exact = torch.nn.functional.silu(gate) * up
        found[name] = float((out.float() - exact).norm() / exact.norm())
    return found


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


def plain_chain(layers: list[Layer], buffers: Buffers, forms: Forms) -> Callable[[], None]:
    """Return norms, codes and products in turn."""
    b, num_rows = buffers, len(buffers.x)
    scratch = make_scratch()
    wide, tall, deep = (make_rows(num_rows, size, scratch) for size in (HIDDEN, ATTENDED, INNER))

    def run() -> None:
        delta = None
        for layer in layers:
            add_rms_norm_coded(b.x, delta, b.norm, 1e-6, b.normed, wide)
            multiply(wide, layer.qkv, "qkv", b.qkv, forms.get("qkv"))
            quantize_rows(b.attended, tall)
            multiply(tall, layer.o, "o", b.delta, forms.get("o"))
            delta = b.delta
            add_rms_norm_coded(b.x, delta, b.norm, 1e-6, b.normed, wide)
            amax = multiply(wide, layer.gate_up, "gate_up", b.active, forms.get("gate_up"))
            assert amax is not None
            quantize_rows_by_amax(b.active, amax, deep)
            multiply(deep, layer.down, "down", b.delta, forms.get("down"))
        assert delta is not None
        b.x.add_(delta)

    return run


def chain_of(layers: list[Layer], num_rows: int, name: str) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a chain by name, and its stream of rows."""
    torch.manual_seed(3)
    buffers = make_buffers(num_rows)
    if name == "fused":
        return fused_chain(layers, buffers), buffers.x
    return plain_chain(layers, buffers, FORMS[row_form(num_rows)][name]), buffers.x


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


def time_chain(layers: list[Layer], num_rows: int, name: str) -> dict[str, Any]:
    """Time a chain."""
    found: dict[str, Any] = {"chain": name, "rows": num_rows}
    try:
        run, x = chain_of(layers[:2], num_rows, name)
        start = x.clone()
        run()
        found["moved"] = float((x - start).float().norm())
        us = microseconds(captured(chain_of(layers, num_rows, name)[0])) / len(layers)
        num_bytes = sum(weight.codes.numel() for weight in layers[0])
        found |= {"us a layer": us, "% of the read rate": 100 * num_bytes / us / 1e-6 / READ_RATE}
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"[-300:]
    return found


def time_all(say: Callable[[dict[str, Any]], None], seconds: float) -> None:
    """Time all chains, twice: first in order, then backwards."""
    begin = time.monotonic()
    layers = [
        Layer(*(make_weight(shape, 10 * i + j) for j, shape in enumerate(SHAPES.values()))) for i in range(NUM_LAYERS)
    ]
    names = [(8, name) for name in ("fused", *FORMS[16])]
    names += [
        (num_rows, name) for num_rows in (2, 3, 4, 6, 12, 16, 1) for name in ("fused", "tiles", "gate of 3 stages")
    ]
    names += [(num_rows, name) for num_rows in (32, 64) for name in FORMS[num_rows]]
    names += [(16, name) for name in ("8 ahead", "4 ahead", "264 streams")]
    for num_rows, name in (*names, *names[::-1]):
        if time.monotonic() - begin > seconds:
            say({"stopped": "out of time"})
            return
        say(time_chain(layers, num_rows, name))


def warm(num_rows: int, name: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Compile the kernels of a chain, and say the errors of its products."""
    layers = [Layer(*(make_weight(shape, 1) for shape in SHAPES.values()))]
    chain_of(layers, num_rows, name)[0]()
    torch.cuda.synchronize()
    say({} if name == "fused" else errors(num_rows, FORMS[row_form(num_rows)][name]))


# --- processes


def child(name: str) -> None:
    """Run one part and print lines of JSON."""

    def say(found: dict[str, Any]) -> None:
        print("FOUND " + json.dumps(found), flush=True)

    kind, _, rest = name.partition(":")
    if kind == "warm":
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

    names = ["warm:1:fused", "warm:8:fused"]
    names += [f"warm:{rows}:{name}" for rows, forms in FORMS.items() for name in forms]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for task in [pool.submit(run_child, name, PARALLEL_SECONDS, keep) for name in names]:
            task.result()
    if not any(found[-1].get("failed") == 124 for found in record.values()):
        run_child(f"times:{TIME_SECONDS - 12}", TIME_SECONDS, keep)
    wrong = [name for name, found in record.items() if any(is_wrong(one) for one in found)]
    print(f"{len(record) - len(wrong)} of {len(record)} parts are right. Others: {wrong}", flush=True)


def is_wrong(found: dict[str, Any]) -> bool:
    """Return True if a part failed, or a product is too far from float32."""
    return "failed" in found or any(not found.get(name, 0.0) < LIMIT for name in SHAPES)


if __name__ == "__main__":
    main()

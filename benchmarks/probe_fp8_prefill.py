"""Probe of what lies around attention in a prefill of 8,192 tokens with row-scaled e4m3 weights, on one Hopper GPU:

    python benchmarks/probe_fp8_prefill.py --out FOLDER

Times every launch of one layer of Qwen3-32B and of Qwen3-30B-A3B (uniform routing), back to back with itself, and compares the
gate that stores codes with the gate and the codes apart. FOLDER/probe_fp8_prefill.json holds everything.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402

from holdfast.kernels.activation import gate_mul, launch_gate_codes  # noqa: E402
from holdfast.kernels.gemm.linear import linear, linear_float32  # noqa: E402
from holdfast.kernels.gemm.quantize_activations import (  # noqa: E402
    QuantizedRows,
    add_rms_norm_coded,
    quantize_rows,
)
from holdfast.kernels.geometry import order_specs  # noqa: E402
from holdfast.kernels.moe.expert_linear import expert_linear  # noqa: E402
from holdfast.kernels.moe.expert_sum import ExpertOutputs, sum_experts  # noqa: E402
from holdfast.kernels.moe.routing import ExpertProduct, Routing, order_experts, route_tokens  # noqa: E402
from holdfast.quant.quantized_weight import QuantizedWeight  # noqa: E402
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES  # noqa: E402

TOKENS = 8192
NUM_EXPERTS, TOP_K = 128, 8
BUDGET_SECONDS = 60


def make_weight(*shape: int) -> QuantizedWeight:
    """Make codes without NaN, and scales that keep outputs near 1."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    codes[(codes & 0x7F) == 0x7F] = 0x30
    scales = (0.5 + torch.rand(shape[:-1], device="cuda")) / (90 * shape[-1] ** 0.5)
    return QuantizedWeight(WEIGHT_SCHEMES["fp8"], shape, codes.view(torch.float8_e4m3fn), scales)


def make_room(num_rows: int, size_k: int) -> QuantizedRows:
    """Make a buffer for codes."""
    codes = torch.zeros(num_rows, size_k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    return QuantizedRows(codes, torch.ones(num_rows, 1, device="cuda"))


def rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)


def microseconds(run: Callable[[], object]) -> float:
    """Return the median of five measurements of a few launches."""
    run()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / 8)
    return sorted(found)[2]


Say = Callable[..., None]


def timed(say: Say, model: str, name: str, run: Callable[[], object], flops: float = 0.0, moved: float = 0.0) -> None:
    """Say the time of a launch, its TFLOPS and TB/s."""
    try:
        us = microseconds(run)
    except Exception as error:
        say(model=model, launch=name, failed=f"{type(error).__name__}: {error}"[-300:])
        return
    say(model=model, launch=name, us=us, TFLOPS=flops / us / 1e6, **{"TB/s": moved / us / 1e6})


def dense(say: Say) -> None:
    """Time a layer of Qwen3-32B."""
    model, hidden, inner = "32B", 5120, 25600
    x, delta, normed, weight = rows(TOKENS, hidden), rows(TOKENS, hidden), rows(TOKENS, hidden), rows(1, hidden)[0]
    wide_room, tall_room, deep_room = (make_room(TOKENS, size) for size in (hidden, 8192, inner))
    timed(
        say, model, "norm, codes", lambda: add_rms_norm_coded(x, delta, weight, 1e-6, normed, wide_room),
        moved=TOKENS * hidden * 9,
    )  # fmt: skip
    for name, size_n, size_k in (
        ("qkv", 10240, hidden), ("o", hidden, 8192), ("gate_up", 2 * inner, hidden), ("down", hidden, inner),
    ):  # fmt: skip
        product, out, room = make_weight(size_n, size_k), rows(TOKENS, size_n), make_room(TOKENS, size_k)
        a = rows(TOKENS, size_k)
        quantize_rows(a, room)
        timed(
            say, model, name, lambda a=a, product=product, out=out, room=room: linear(a, product, None, out, room, True),
            flops=2.0 * TOKENS * size_n * size_k,
        )  # fmt: skip
    attended, gate_up, active = rows(TOKENS, 8192), rows(TOKENS, 2 * inner), rows(TOKENS, inner)
    timed(say, model, "codes of o", lambda: quantize_rows(attended, tall_room), moved=TOKENS * 8192 * 3)
    timed(say, model, "gate", lambda: gate_mul(gate_up, "silu", active), moved=TOKENS * inner * 6)
    timed(say, model, "codes of down", lambda: quantize_rows(active, deep_room), moved=TOKENS * inner * 3)
    gate_mul(gate_up, "silu", active)
    quantize_rows(active, deep_room)
    other = make_room(TOKENS, inner)
    for num_warps in (8, 16, 32):

        def run(num_warps: int = num_warps) -> None:
            launch_gate_codes(gate_up, "silu", None, other[:2], num_warps)

        timed(say, model, f"gate, codes: {num_warps} warps", run, moved=TOKENS * inner * 5)
        same = torch.equal(other.codes_TK.view(torch.uint8), deep_room.codes_TK.view(torch.uint8))
        say(model=model, launch=f"gate, codes: {num_warps} warps", **{"same codes": same})


def experts(say: Say, is_fp8: bool) -> None:
    """Time a layer of Qwen3-30B-A3B."""
    model, hidden, inner = "A3B fp8" if is_fp8 else "A3B bf16", 2048, 768
    pairs = TOKENS * TOP_K

    def weight(*shape: int) -> QuantizedWeight | torch.Tensor:
        return (
            make_weight(*shape)
            if is_fp8
            else torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5
        )

    x, delta, normed, norm = rows(TOKENS, hidden), rows(TOKENS, hidden), rows(TOKENS, hidden), rows(1, hidden)[0]
    room, deep_room = make_room(TOKENS, hidden), make_room(pairs, inner)
    if is_fp8:
        timed(
            say,
            model,
            "norm, codes",
            lambda: add_rms_norm_coded(x, delta, norm, 1e-6, normed, room),
            moved=TOKENS * hidden * 9,
        )
        timed(say, model, "codes of x", lambda: quantize_rows(x, room), moved=TOKENS * hidden * 3)
    for name, size_n, size_k in (("qkv", 5120, hidden), ("o", hidden, 4096)):
        product, out, own, a = (
            weight(size_n, size_k),
            rows(TOKENS, size_n),
            make_room(TOKENS, size_k),
            rows(TOKENS, size_k),
        )
        quantize_rows(a, own)
        timed(
            say, model, name, lambda a=a, product=product, out=out, own=own: linear(a, product, None, out, own, True),
            flops=2.0 * TOKENS * size_n * size_k,
        )  # fmt: skip
    router, logits = rows(NUM_EXPERTS, hidden), torch.randn(TOKENS, NUM_EXPERTS, device="cuda")
    ids, shares = (
        torch.empty(TOKENS, TOP_K, dtype=torch.int32, device="cuda"),
        torch.empty(TOKENS, TOP_K, device="cuda"),
    )
    timed(say, model, "router", lambda: linear_float32(x, router, torch.empty_like(logits)))
    timed(say, model, "route", lambda: route_tokens(logits, Routing(True), ids, shares))
    tensors = [
        torch.zeros(spec.shape, dtype=torch.int32, device="cuda") for spec in order_specs(TOKENS, TOP_K, NUM_EXPERTS)
    ]
    timed(say, model, "order", lambda: order_experts(ids, NUM_EXPERTS, tensors))
    order = order_experts(ids, NUM_EXPERTS, tensors)
    gate_up, down = weight(NUM_EXPERTS, 2 * inner, hidden), weight(NUM_EXPERTS, hidden, inner)
    active, routed, out = rows(pairs, inner), rows(pairs, hidden), rows(TOKENS, hidden)
    first = ExpertProduct(x, gate_up, order, active, True, room if is_fp8 else None)
    second = ExpertProduct(active, down, order, routed, False, deep_room if is_fp8 else None)
    timed(say, model, "experts, gate_up", lambda: expert_linear(first, True), flops=4.0 * pairs * inner * hidden)
    if is_fp8:
        timed(say, model, "codes of down", lambda: quantize_rows(active, deep_room), moved=pairs * inner * 3)
    timed(say, model, "experts, down", lambda: expert_linear(second, True), flops=2.0 * pairs * inner * hidden)
    timed(say, model, "sum", lambda: sum_experts(ExpertOutputs(routed, shares), out), moved=pairs * hidden * 2)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin, record = time.monotonic(), []

    def say(**found: Any) -> None:  # noqa: ANN401 forwarded to JSON
        record.append(found)
        (arguments.out / "probe_fp8_prefill.json").write_text(json.dumps(record, indent=1))
        numbers = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
        )
        print(f"[{time.monotonic() - begin:.0f} s]", "  ".join(numbers), flush=True)

    torch.manual_seed(0)
    for part in (lambda: experts(say, True), lambda: dense(say), lambda: experts(say, False)):
        if time.monotonic() - begin < BUDGET_SECONDS:
            part()
    for model in ("32B", "A3B fp8", "A3B bf16"):
        say(model=model, sum=sum(found["us"] for found in record if found.get("model") == model and "us" in found))


if __name__ == "__main__":
    main()

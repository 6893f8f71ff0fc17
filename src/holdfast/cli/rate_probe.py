"""Memory and matmul rates of torch's devices, as JSON lines on stdout: the process of `holdfast doctor --measure`.

On a CPU the engine's own matmul runs: one row against a weight larger than any cache reads memory, many rows multiply.
On a GPU a float32 sum reads memory, and one large bfloat16 matmul multiplies.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from holdfast.kernels.gemm.linear import plain_linear
from holdfast.memory.device_rates import cpu_identity
from holdfast.memory.devices import LEAST_CAPABILITY


class Sizes(NamedTuple):
    """Sizes of the measurements."""

    seconds: float = 1.5
    """Time per measurement; the fastest call counts."""
    cpu_bytes: int = 2**28
    """Size of the weight, much larger than the caches."""
    cpu_rows: int = 256
    gpu_bytes: int = 2**31
    gpu_width: int = 8192


TINY = Sizes(0.02, 2**20, 4, 2**20, 64)
COLUMNS = 1024
"""Columns of the weight on a CPU."""


def measure_cpu(sizes: Sizes) -> dict[str, object]:
    """Measure memory and float32 rates, with the threads of an engine."""
    weight_NK = torch.ones(max(1, sizes.cpu_bytes // (4 * COLUMNS)), COLUMNS)
    x_1K, y_1N = torch.ones(1, COLUMNS), torch.empty(1, len(weight_NK))
    reading = best_seconds(lambda: plain_linear(x_1K, weight_NK, None, y_1N), sizes.seconds)
    square_KK = weight_NK[:COLUMNS]
    x_TK, y_TK = torch.ones(sizes.cpu_rows, COLUMNS), torch.empty(sizes.cpu_rows, len(square_KK))
    multiplying = best_seconds(lambda: plain_linear(x_TK, square_KK, None, y_TK), sizes.seconds)
    flops = 2 * sizes.cpu_rows * COLUMNS * len(square_KK)
    return _found(cpu_identity(), 0, weight_NK.nbytes / reading, flops / multiplying)


def measure_gpu(index: int, sizes: Sizes) -> dict[str, object]:
    """Measure memory and bfloat16 rates."""
    device, properties = torch.device("cuda", index), torch.cuda.get_device_properties(index)
    free_bytes = torch.cuda.mem_get_info(device)[0]
    numbers = torch.ones(min(sizes.gpu_bytes, free_bytes // 4) // 4, device=device)

    def synchronized(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize(device)

        return run

    reading = best_seconds(synchronized(numbers.sum), sizes.seconds)
    x = torch.ones(sizes.gpu_width, sizes.gpu_width, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    multiplying = best_seconds(synchronized(lambda: torch.mm(x, x.t(), out=y)), sizes.seconds)
    rates = numbers.nbytes / reading, 2 * sizes.gpu_width**3 / multiplying
    return _found(properties.name, properties.total_memory, *rates)


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest call within the time, after one warm-up call."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _found(device: str, total_bytes: int, read: float, flops: float) -> dict[str, object]:
    return {
        "device": device,
        "total_bytes": total_bytes,
        "read_bytes_per_second": round(read),
        "flops_per_second": round(flops),
    }


def probe(sizes: Sizes, report: Callable[[dict[str, object]], None]) -> None:
    """Measure the CPU and every supported GPU; a device that fails becomes a problem."""
    report({"next": cpu_identity()})
    report(measure_cpu(sizes))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < LEAST_CAPABILITY or torch.version.hip:
            continue
        report({"next": properties.name})
        try:
            report(measure_gpu(index, sizes))
        except RuntimeError as error:  # out of memory
            report({"problem": f"{properties.name}: {' '.join(str(error).split())[:200]}"})


def _report(fact: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(fact)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    probe(TINY if "tiny" in sys.argv else Sizes(), _report)

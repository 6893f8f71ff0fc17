"""One load of a model's weights by the engine's code, measured inside the process: bytes by every counter, and seconds.

The first load of a process also compiles kernels, so memory is sampled in the second too. Later loads run without sampling, for speed.
"""

import gc
import hashlib
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_records import keep
from memory_watch import DEVICE, MemoryWatch, look

from holdfast.config import EngineConfig
from holdfast.loading.execution.execute import LoadReport
from holdfast.loading.model_files import open_model
from holdfast.loading.planning.plan import LoadPlan
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.ledger import Ledger
from holdfast.quant.packed_weight import AnyWeight, tensors_of
from holdfast.runner.weight_load import WeightLoad, plan_weights

DTYPE = "bfloat16"
NUM_WATCHED = 2
"""Loads with memory samples every few milliseconds, which slow them a little."""
FINGERPRINT_BYTES = 2**25
FINGERPRINT_WEIGHTS = 65521
"""A prime: a byte's weight depends on its place, and repeats after this many."""


class Case(NamedTuple):
    """Settings of a process's loads."""

    model: str
    scheme: str
    """Scheme of the weights; their type if unquantized."""
    path: str
    load_format: str = "auto"
    headers: str | None = None
    """A checkpoint whose plan must equal this load's."""
    cache: str | None = None
    """Folder of the cache of quantized weights."""
    num_loads: int = 4


def run_case(case: Case, device: str, result: Path | None = None) -> dict[str, Any]:
    """Run every load of a case in this process; save findings so far for the process that waits for `result`."""
    if device.startswith("cuda"):
        device = "cuda:0" if device == "cuda" else device
        torch.zeros(1, device=device).add_(1)  # the context and its libraries do not count as a load
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if case.cache is not None:
        os.environ[CACHE_VARIABLE] = case.cache
    found: dict[str, Any] = {"loads": []}
    gc.freeze()  # existing objects stay, so the collector can skip them between loads
    try:
        for number in range(case.num_loads):
            found["loads"].append(load_once(case, device, is_watched=number < NUM_WATCHED))
            keep(found, result)
    finally:
        gc.unfreeze()
    if case.headers is not None:
        ours, real = planned_case(case), planned_case(case._replace(path=case.headers, load_format="auto"))
        real.model.source.close()
        found["same_plan"] = compare_plans(ours.plan, real.plan, device)
    return found


def load_once(case: Case, device: str, is_watched: bool) -> dict[str, Any]:
    """Plan, load, measure, and free everything."""
    is_cuda, kind = device.startswith("cuda"), torch.device(device).type
    host_before = look(device)
    start = time.perf_counter()
    load = planned_case(case)
    plan_seconds = time.perf_counter() - start
    plan, is_hit = load.taken_plan, load.slot is not None and load.slot.hit is not None
    before = _device_bytes(device)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with MemoryWatch(device) if is_watched else nullcontext() as watch:
        loaded = load.run(device, Ledger(), lambda done, total: None)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {
        "plan_seconds": plan_seconds,
        "seconds": loaded.report.seconds,
        "seconds_with_cache": seconds,
        "is_from_cache": is_hit,
        "source_bytes": load.plan.read_bytes,
        **_predicted(plan, kind),
        **_split(loaded.report),
    }
    if is_cuda:
        found["final"] = {name: num - before[name] for name, num in _device_bytes(device).items()}
        found["peak"] = {
            "allocated": torch.cuda.max_memory_allocated() - before["allocated"],
            "reserved": torch.cuda.max_memory_reserved() - before["reserved"],
        }
    if watch is not None:
        found["num_looks"] = watch.num_looks
        found["host"] = {name: num for name, num in watch.taken.items() if name != DEVICE}
        found["host_with_plan"] = watch.peak["RssAnon"] - host_before["RssAnon"]
        if is_cuda:
            found["peak"]["used"] = watch.taken[DEVICE]
    if case.cache is not None:
        found["fingerprint"] = fingerprint(loaded.weights)
    loaded.weights.clear()
    del loaded, load, plan
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        found["left"] = {name: num - before[name] for name, num in _device_bytes(device).items()}
    found["host_left"] = look(device)["RssAnon"] - host_before["RssAnon"]
    return found


def planned_case(case: Case) -> WeightLoad:
    """Return headers and plan like the engine's."""
    is_quantized, uses_cache = case.scheme != DTYPE, case.cache is not None
    config = EngineConfig(
        model=case.path,
        quantization=case.scheme if is_quantized else None,
        weight_cache="on" if uses_cache else "off",
        load_format=case.load_format,
    )
    model = open_model(case.path, config.load_format)
    return plan_weights(config, model, DTYPE, config.recipe, uses_cache)


def _predicted(plan: LoadPlan, kind: str) -> dict[str, Any]:
    return {
        "predicted_final": plan.final_bytes,
        "predicted_peak": plan.final_bytes + plan.staging_bytes(kind),
        "pinned_bytes": plan.pinned_bytes(kind),
        "predicted_host": plan.host_bytes(kind),
        "read_bytes": plan.read_bytes,
        "num_weights": len(plan.weights),
        "num_quantized": plan.num_quantized,
        "num_moves": len(plan.moves),
    }


def _split(report: LoadReport) -> dict[str, Any]:
    return {
        "num_readers": report.num_readers,
        "read_seconds": report.read_seconds / max(1, report.num_readers),
        "copy_seconds": report.copy_seconds,
        "place_seconds": report.place_seconds,
    }


def _device_bytes(device: str) -> dict[str, int]:
    """Return bytes allocated and reserved by torch, and used by the driver; zeros on a CPU."""
    if not device.startswith("cuda"):
        return {"allocated": 0, "reserved": 0, "used": 0}
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": look(device)[DEVICE],
    }


def compare_plans(ours: LoadPlan, real: LoadPlan, device: str) -> dict[str, bool]:
    """Return whether dummy weights have the same load plan as a checkpoint."""
    kind = torch.device(device).type
    return {
        "weights": ours.weights == real.weights,
        "moves": set(ours.moves) == set(real.moves),
        "final bytes": ours.final_bytes == real.final_bytes,
        "staging bytes": ours.staging_bytes(kind) == real.staging_bytes(kind),
    }


def fingerprint(weights: dict[str, AnyWeight]) -> str:
    """Return a number that changes if any byte of a weight changes or moves."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        for tensor in tensors_of(weight):
            for piece in tensor.reshape(-1).view(torch.uint8).split(FINGERPRINT_BYTES):
                places = torch.arange(piece.numel(), device=piece.device) % FINGERPRINT_WEIGHTS + 1
                digest.update(f"{name} {int((piece.to(torch.int64) * places).sum())}\n".encode())
    return digest.hexdigest()[:16]

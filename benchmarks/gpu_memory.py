"""Compare the plan with the GPU's memory, owner by owner: python benchmarks/gpu_memory.py [--cases 0,3] [--budget-seconds N]

Each case is an engine in its own process: a start at a share of the device, a short generation, then a memory snapshot:

    tensors        by owner, with the requested size of each allocation
    libraries      blocks of torch's allocator without a tensor of the engine: workspaces of cuBLAS
    cuda graphs    the graphs' pool, and driver memory taken during capture
    cuda context   the driver's other memory: used - reserved by torch - graphs
    allocator      torch's other reserved memory: rounding, and unused memory

`used` is the driver's figure, less nvidia-smi's figure before the process began. The sum of all owners is `used`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gpu_records import Budget, leave, make_record, options, print_table, run_child, used_bytes, write_record

MIB = 2**20
GIB = 2**30
LARGE_BYTES = 50 * MIB
"""Owners above this size must stay within MAX_OWNER_PERCENT."""
MAX_OWNER_PERCENT = 2.0
MAX_TOTAL_PERCENT = 1.0
MIN_SECONDS = 12.0
"""Least remaining seconds to start a case."""
PROMPT_TOKENS = 300
NUM_PROMPTS = 4
OUTPUT_TOKENS = 16


class Case(NamedTuple):
    """One engine."""

    model: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    memory_utilization: float = 0.98
    kv_cache_dtype: str = "auto"

    @property
    def words(self) -> str:
        context = f"{self.max_model_len // 1024}K" if self.max_model_len < 2**20 else f"{self.max_model_len // 2**20}M"
        return (
            f"{self.model}, {context} x {self.max_num_seqs}, {self.max_num_batched_tokens} tokens a step, "
            f"{'eager' if self.enforce_eager else 'graphs'}"
            f"{'' if self.kv_cache_dtype == 'auto' else f', {self.kv_cache_dtype} pages'}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of an engine."""
        return {name: value for name, value in self._asdict().items() if name != "model"}


CASES = (
    Case("Qwen3-32B", 40960, 256, 8192, False),
    Case("Qwen3-0.6B", 4096, 512, 8192, False),
    Case("Qwen2.5-7B-Instruct", 2**20, 8, 4096, False),
    Case("Llama-3.1-8B", 131072, 128, 8192, True),
    Case("Qwen3-8B", 131072, 64, 2048, False),
    Case("Qwen3-32B", 4096, 512, 2048, True),
    Case("Qwen3-4B", 262144, 32, 8192, True),
    Case("Qwen3-0.6B", 2**20, 1, 2048, False),
    Case("Qwen3-32B", 131072, 16, 4096, False),
    Case("Qwen3-8B", 8192, 512, 4096, True),
    Case("Llama-3.1-8B", 524288, 4, 8192, False),
    Case("Qwen3-4B", 32768, 128, 4096, False),
    Case("Qwen2.5-7B-Instruct", 32768, 256, 2048, True),
    Case("Qwen3-0.6B", 16384, 1, 2048, True),
    Case("Qwen3-32B", 40960, 256, 8192, False, kv_cache_dtype="turboquant_k8v4"),
    Case("Qwen3-8B", 131072, 64, 4096, False, kv_cache_dtype="turboquant_4bit_nc"),
    Case("Llama-3.1-8B", 131072, 128, 8192, False, kv_cache_dtype="turboquant_3bit_nc"),
    Case("Qwen3-4B", 262144, 32, 2048, True, kv_cache_dtype="turboquant_k3v4_nc"),
)
"""The most important first; those with TurboQuant pages are the last four."""
TINY_CASES = (Case("Qwen3-0.6B", 512, 4, 512, False), Case("Qwen2.5-7B-Instruct", 1024, 2, 256, True))


class Block(NamedTuple):
    """A piece of a segment of torch's allocator."""

    address: int
    num_bytes: int
    is_used: bool
    is_graph_pool: bool


class Look(NamedTuple):
    """Figures of the driver and torch at one moment."""

    used: int
    reserved: int
    allocated: int

    @property
    def driver(self) -> int:
        """Return the bytes outside torch's allocator: contexts, code, libraries, graphs."""
        return self.used - self.reserved


def blocks_of(segments: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Return the blocks of torch.cuda.memory_snapshot(), which are contiguous in their segments."""
    found = []
    for segment in segments:
        address = segment["address"]
        is_graph_pool = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        for block in segment["blocks"]:
            found.append(Block(address, block["size"], block["state"] != "inactive", is_graph_pool))
            address += block["size"]
    return found


def measured_by_owner(
    blocks: Sequence[Block], storages: Mapping[str, Mapping[int, int]], end: Look, graph_driver_bytes: int, before: int
) -> dict[str, int]:
    """Return every device byte of this process, each under one owner."""
    held = {address: (owner, size) for owner, sizes in storages.items() for address, size in sizes.items()}
    found: dict[str, int] = dict.fromkeys(storages, 0)
    found |= {"libraries": 0, "cuda graphs": graph_driver_bytes, "allocator": 0}
    for block in blocks:
        if block.address in held:
            owner, num_bytes = held[block.address]
            found[owner] += num_bytes
            found["allocator"] += block.num_bytes - num_bytes
        elif block.is_graph_pool:
            found["cuda graphs"] += block.num_bytes
        else:
            found["libraries" if block.is_used else "allocator"] += block.num_bytes
    found["cuda context"] = end.driver - before - graph_driver_bytes
    return found


def compare(planned: Mapping[str, int], measured: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return owners, largest first, with the error in percent of the plan; an unplanned owner is 100 % error."""
    rows = []
    for owner in sorted({*planned, *measured}, key=lambda name: -max(planned.get(name, 0), measured.get(name, 0))):
        ours, found = planned.get(owner, 0), measured.get(owner, 0)
        percent = 100.0 * (found - ours) / ours if ours else 100.0 if found else 0.0
        rows.append({"owner": owner, "planned_bytes": ours, "measured_bytes": found, "percent": round(percent, 3)})
    return rows


def worst(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the large owner with the largest error."""
    large = [row for row in rows if max(row["planned_bytes"], row["measured_bytes"]) > LARGE_BYTES]
    return max(large or rows, key=lambda row: abs(row["percent"]))


# --- in the process of a case


def run_case(case: Case, tiny: bool, device: str) -> dict[str, Any]:
    """Start, generate, take a snapshot."""
    import torch
    from gpu_engines import open_engine, prompts, storages_by_owner

    from holdfast.request.sampling_params import SamplingParams
    from holdfast.runner.graphs import StepGraphs

    looks: dict[str, Look] = {}
    capture = StepGraphs.capture

    def watched_capture(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
        looks["before capture"] = _look(device)
        capture(*arguments, **named)
        looks["after capture"] = _look(device)

    settings = case.options
    if device == "cpu":
        del settings["memory_utilization"]
    StepGraphs.capture = watched_capture
    try:
        with tempfile.TemporaryDirectory() as folder:
            opened = open_engine(case.model, Path(folder), tiny, device, **settings)
    finally:
        StepGraphs.capture = capture
    looks["ready"] = _look(device)
    num_prompts = min(NUM_PROMPTS, case.max_num_seqs)
    length = min(PROMPT_TOKENS, case.max_model_len - OUTPUT_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    made = prompts(Random(0), [length] * num_prompts, opened.runner.vocab_size)
    outputs = opened.llm.generate([*made], params, progress=False)
    assert all(len(output.outputs[0].token_ids) == OUTPUT_TOKENS for output in outputs), f"{outputs=}"
    looks["served"] = _look(device)
    report, before = opened.llm.memory.as_dict(), opened.built.profile.before
    graphs = opened.runner.graphs
    is_cuda = device.startswith("cuda")
    return {
        "report": report,
        "looks": {name: look._asdict() for name, look in looks.items()},
        "bare_used_bytes": before.used if before is not None else 0,
        "num_graphs": len(graphs) if graphs is not None else 0,
        "num_layers": opened.runner.model.num_layers,
        "load_seconds": opened.built.load_seconds,
        "storages": storages_by_owner(opened.runner, "cuda" if is_cuda else "cpu"),
        "blocks": blocks_of(torch.cuda.memory_snapshot()) if is_cuda else [],
    }


def _look(device: str) -> Look:
    import torch

    from holdfast.memory.profiler import measure

    if device.startswith("cuda"):
        torch.cuda.synchronize()
    found = measure("cuda:0" if device == "cuda" else device)
    return Look(found.used, found.reserved, found.allocated) if found is not None else Look(0, 0, 0)


# --- in the parent process


def finding(case: Case, found: dict[str, Any], before: int | None) -> dict[str, Any]:
    """Return one row of the record."""
    row: dict[str, Any] = {"measure": case.words, "unit": "GiB", "values": {"planned": 0.0}, **case._asdict()}
    if "error" in found:
        return {**row, "error": found["error"]}
    report, looks = found["report"], {name: Look(**look) for name, look in found["looks"].items()}
    planned = {line["owner"]: line["planned_bytes"] for line in report["rows"] if "serve" in line["phases"]}
    storages = {owner: {int(a): n for a, n in held.items()} for owner, held in found["storages"].items()}
    if found["blocks"]:
        graphs = looks["after capture"].driver - looks["before capture"].driver if "after capture" in looks else 0
        blocks = [Block(*block) for block in found["blocks"]]
        measured = measured_by_owner(blocks, storages, looks["served"], graphs, before or 0)
        total = looks["served"].used - (before or 0)
    else:
        measured = {owner: sum(held.values()) for owner, held in storages.items()}
        total = sum(measured.values())
    owners, planned_bytes = compare(planned, measured), sum(planned.values())
    percent = 100.0 * (total - planned_bytes) / planned_bytes
    largest = worst(owners)
    return {
        **row,
        "values": {"planned": round(planned_bytes / GIB, 4), "measured": round(total / GIB, 4)},
        "total_percent": round(percent, 3),
        "worst_owner": largest["owner"],
        "worst_percent": largest["percent"],
        "holds": abs(percent) <= MAX_TOTAL_PERCENT and abs(largest["percent"]) <= MAX_OWNER_PERCENT,
        "kv_tokens": report["kv_tokens"],
        "budget_bytes": report["budget_bytes"],
        "owners": owners,
        "driver_bytes": {
            "before the process": before,
            "bare context": found["bare_used_bytes"] - (before or 0),
            **{name: look.driver - (before or 0) for name, look in looks.items()},
        },
        "reserved_bytes": looks["served"].reserved,
        "allocated_bytes": looks["served"].allocated,
        "measured_bytes_by_the_engine": report["measured_bytes"],
        "used_bytes_by_nvidia_smi": found.get("used_bytes_by_nvidia_smi"),
        "num_graphs": found["num_graphs"],
        "num_layers": found["num_layers"],
        "load_seconds": round(found["load_seconds"], 2),
    }


def constants(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the measured values of the plan's CUDA constants: least and most of all cases, in MiB."""
    found: dict[str, list[float]] = {}
    for result in (result for result in results if "owners" in result):
        owners = {row["owner"]: row["measured_bytes"] for row in result["owners"]}
        values = {name: owners[name] / MIB for name in ("cuda context", "libraries", "allocator") if name in owners}
        values["bare context"] = result["driver_bytes"]["bare context"] / MIB
        values["driver growth after ready"] = (result["driver_bytes"]["served"] - result["driver_bytes"]["ready"]) / MIB
        if result["num_graphs"] and "cuda graphs" in owners:
            num_layers = result["num_graphs"] * result["num_layers"]
            values["a layer of a graph"] = owners["cuda graphs"] / MIB / num_layers
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: [round(min(values), 4), round(max(values), 4)] for name, values in found.items()}


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables at the end of a run."""
    first = next((result for result in results if "owners" in result), None)
    if first is not None:
        columns = ("owner", "planned MiB", "measured MiB", "error %")
        lines = [
            (row["owner"], row["planned_bytes"] / MIB, row["measured_bytes"] / MIB, row["percent"])
            for row in first["owners"]
        ]
        print_table(first["measure"], columns, lines)
        rows = [(name, low, high) for name, (low, high) in constants(results).items()]
        print_table("What CUDA takes, over all cases", ("", "least MiB", "most MiB"), rows)
    columns = ("case", "planned GiB", "measured GiB", "error %", "worst owner", "error %", "holds")
    lines = [
        (
            result["measure"],
            result["values"].get("planned"),
            result["values"].get("measured"),
            result.get("total_percent"),
            result.get("worst_owner", result.get("error", ""))[:60],
            result.get("worst_percent"),
            "yes" if result.get("holds") else "no",
        )
        for result in results
    ]
    print_table("Plan against measured", columns, lines)


def main() -> None:
    """Run the cases in turn while time allows."""
    parser = options("Plan against measured memory, owner by owner")
    parser.add_argument("--cases", default="", help="numbers of cases, such as 0,3; else all")
    arguments = parser.parse_args()
    cases = TINY_CASES if arguments.tiny else CASES
    if arguments.child is not None:
        found = run_case(cases[int(arguments.child)], arguments.tiny, arguments.device)
        leave(found, arguments.result)
        return
    chosen = [int(number) for number in arguments.cases.split(",") if number] or list(range(len(cases)))
    results = measure_all(cases, chosen, arguments)
    facts = {"cuda_mib": constants(results), "max_total_percent": MAX_TOTAL_PERCENT, "num_cases": len(results)}
    chosen_cases = [cases[number] for number in chosen[: len(results)]]
    facts["engine_settings"] = {case.words: {"model": case.model, "options": case.options} for case in chosen_cases}
    words = "bfloat16, dummy weights, utilization 0.98"
    record = make_record("gpu-memory", results, "Qwen3, Qwen2.5 and Llama-3.1 shapes", words, arguments, facts)
    show(results)
    write_record(record, "memory", arguments)


def measure_all(cases: Sequence[Case], chosen: Sequence[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each case in its own process."""
    budget, results = Budget(arguments.budget_seconds), []
    for number in chosen:
        if budget.left_seconds < MIN_SECONDS:
            print(f"{len(chosen) - len(results)} cases are left out: no time")
            break
        before, start = used_bytes(), budget.spent_seconds
        shared = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
        command = [sys.argv[0], "--child", str(number), *shared]
        found = run_child(command, budget.left_seconds, lambda: {"used_bytes_by_nvidia_smi": used_bytes()})
        results.append({**finding(cases[number], found, before), "seconds": round(budget.spent_seconds - start, 1)})
        last = results[-1]
        print(json.dumps({name: last.get(name) for name in ("measure", "values", "total_percent", "error", "seconds")}))
        sys.stdout.flush()
    return results


if __name__ == "__main__":
    main()

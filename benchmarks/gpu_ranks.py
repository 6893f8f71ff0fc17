"""Engines on ranks that share one GPU under MPS: exact answers, still allocators, plan against device: python benchmarks/gpu_ranks.py

Qwen3-32B's shapes with a few layers and dummy weights. One rank with batch_invariant answers first; then 2 and 4 rank processes
with the same settings, whose sums and gathers go through symmetric memory inside CUDA graphs: their tokens must be the same, greedy
and sampled. Allocators of all ranks are looked at before and after many steps; what the device has lost is held against the plans
of all ranks. Times between ranks of one GPU say nothing about several GPUs, and no speed is reported.
"""

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_records
from dummy_models import TINY, write_dummy_model
from mps import OVERLAP, mps

MODEL, NUM_LAYERS = "Qwen3-32B", 4
SIZES = ("1", "2", "4", "1x2")
"""Ranks that share all layers; behind the x the stages of a pipeline, whose steps launch kernel by kernel."""
PART_SECONDS = 170.0


def sampled_requests(num_requests: int, num_tokens: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Prompts of many lengths; two thirds are greedy."""
    from holdfast import SamplingParams

    dice = Random(0)
    prompts = [
        {"prompt_token_ids": [dice.randrange(200) for _ in range(dice.choice((1, 3, 17, 60, 200)))]}
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(temperature=0.8 if nth % 3 == 2 else 0.0, seed=nth, max_tokens=num_tokens, ignore_eos=True)
        for nth in range(num_requests)
    ]
    return prompts, params


def run_size(arguments: argparse.Namespace, size: str) -> dict[str, Any]:
    """One engine on so many ranks: what it answered, and what its ranks hold and did."""
    tensor_size, _, num_stages = size.partition("x")
    from holdfast import LLM
    from holdfast.engine.rank_build import allocator_counters

    shape = TINY if arguments.tiny else {"num_hidden_layers": NUM_LAYERS}
    is_cpu = arguments.device == "cpu"
    before_bytes = gpu_records.used_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = write_dummy_model(Path(folder), MODEL, **shape)
        began = time.monotonic()
        llm = LLM(
            str(path),
            load_format="dummy",
            device="cpu" if is_cpu else "cuda",
            dtype="float32" if is_cpu else "bfloat16",
            batch_invariant=True,
            tensor_parallel_size=int(tensor_size),
            pipeline_parallel_size=int(num_stages or 1),
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            kv_cache_memory="16MiB" if is_cpu else "512MiB",
            enable_prefix_caching=False,
        )
        start_seconds = time.monotonic() - began
    with llm:
        ready_bytes = gpu_records.used_bytes()
        prompts, params = sampled_requests(8, 8) if arguments.tiny else sampled_requests(24, 32)
        first = [one.outputs[0].token_ids for one in llm.generate(prompts, params, progress=False)]
        runner = llm.engine.core.runner  # type: ignore[union-attr]
        own = runner if size == "1" else runner.inner  # type: ignore[union-attr]
        looks = [[allocator_counters(own.device), *([] if size == "1" else runner.look())]]  # type: ignore[union-attr]
        num_before = llm.engine.core.stats().num_steps
        num_steps = 40 if arguments.tiny else 1000
        while llm.engine.core.stats().num_steps - num_before < num_steps:
            again = [one.outputs[0].token_ids for one in llm.generate(prompts, params, progress=False)]
        looks.append([allocator_counters(own.device), *([] if size == "1" else runner.look())])  # type: ignore[union-attr]
        memory = llm.memory
        planned = [memory.planned_bytes, *(rank.planned_bytes for rank in memory.ranks)]
        return {
            "size": size,
            "tokens": first,
            "is_repeated": again == first,
            "steps": llm.engine.core.stats().num_steps - num_before,
            "counters_before": looks[0],
            "counters_after": looks[1],
            "planned_bytes": planned,
            "device_bytes": None if ready_bytes is None or before_bytes is None else ready_bytes - before_bytes,
            "has_graphs": own.graphs is not None,
            "start_seconds": round(start_seconds, 1),
        }


def judged(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """A line of the record."""
    if "error" in found:
        return {"measure": f"{found['size']} ranks", "unit": "", "values": {}, "error": found["error"]}
    planned, device = sum(found["planned_bytes"]), found["device_bytes"]
    return {
        "measure": f"{found['size']} ranks",
        "unit": "steps",
        "values": {"steps": found["steps"]},
        "equals_one_rank": found["tokens"] == alone.get("tokens"),
        "is_repeated": found["is_repeated"],
        "num_allocations": [
            after.get("allocation.all.allocated", 0) - before.get("allocation.all.allocated", 0)
            for before, after in zip(found["counters_before"], found["counters_after"], strict=True)
        ],
        "planned_bytes": found["planned_bytes"],
        "device_bytes": device,
        "difference_percent": None if not device else round(100 * (device / planned - 1), 2),
        "has_graphs": found["has_graphs"],
        "start_seconds": found["start_seconds"],
    }


def main() -> None:
    """Measure, tell, and keep the record."""
    parser = gpu_records.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=lambda text: tuple(text.split(",")), default=SIZES)
    arguments = parser.parse_args()
    if arguments.child is not None:
        gpu_records.leave(run_size(arguments, arguments.child), arguments.result)
        return
    options = [*(["--tiny"] if arguments.tiny else []), "--device", arguments.device]
    found = []
    with nullcontext(None) if arguments.device == "cpu" else mps() as environment:
        for size in arguments.sizes:
            command = [str(Path(__file__).resolve()), *options, "--child", size]
            one = gpu_records.run_child(command, PART_SECONDS, environment=environment or OVERLAP)
            found.append({"size": size, **one})
            rows = [judged(own, found[0]) for own in found]
            print(rows[-1], flush=True)
    words = f"{MODEL} with {NUM_LAYERS} layers, dummy weights, batch_invariant, exact sums"
    record = gpu_records.make_record("ranks", rows, words, "rank processes on one GPU under MPS", arguments, {})
    gpu_records.write_record(record, "ranks", arguments)


if __name__ == "__main__":
    main()

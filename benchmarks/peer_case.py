"""Measure one engine by the names that Holdfast and vLLM share; benchmarks/gpu_peers.py starts a process for each engine.

Both engines run this code on the same prompts. It imports the engine of its task and not the other one, because each may
need its own versions of packages. It takes a task as JSON and writes its findings to --result; each finished measure is
kept as it comes. The process, and all processes that it started, end with its stdin.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import Any

from child_report import keep, leave, used_bytes

OURS = "holdfast"
SEED = 3
PACKAGES = ("torch", "triton", "transformers")
"""Packages whose versions are recorded for each engine."""
LONG_TOKENS = 30_000
"""A prompt of so many tokens takes seconds, so one run is enough."""


def prompt_ids(purpose: str, index: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt; they depend on these arguments alone."""
    dice = Random(f"{SEED} {purpose} {index}")
    return [dice.randrange(vocab_size) for _ in range(num_tokens)]


def digest_of(prompts: Sequence[Sequence[int]]) -> str:
    """Return 16 digits that identify prompts in a record."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


class OpenedEngine:
    """An engine with dummy weights."""

    def __init__(self, task: dict[str, Any]) -> None:
        package = import_module(task["engine"])
        self.version: str = package.__version__
        self.llm: Any = package.LLM(model=task["folder"], load_format="dummy", **task["options"])
        self._params: Any = package.SamplingParams

    def seconds_of(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Time this many greedy tokens for every prompt."""
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), f"{num_tokens=}"
        return seconds


def run_task(task: dict[str, Any], result: Path | None = None) -> dict[str, Any]:
    """Return seconds of every run, and the used bytes of the GPU after the start and after all runs."""
    found: dict[str, Any] = {"before_bytes": task["before_bytes"], "decode": [], "prefill": []}
    start = time.perf_counter()
    engine = OpenedEngine(task)
    found["start_seconds"] = time.perf_counter() - start
    found["versions"] = {task["engine"]: engine.version, **package_versions()}
    vocab_size: int = task["vocab_size"]
    every = [prompt_ids("decode", index, task["prompt_tokens"], vocab_size) for index in range(task["max_batch"])]
    found |= memory_facts(task, engine.llm)
    ready = allocator_counts(task)
    keep(found, result)
    wait_for_turn(task)
    engine.seconds_of(every[:1], 4)  # the first request of an engine may be slower than later ones
    for batch in task["batches"]:
        engine.seconds_of(every[:batch], 1)  # fills the prefix cache
        seconds: dict[int, list[float]] = {length: [] for length in task["lengths"]}
        for _ in range(task["num_repeats"]):
            for length in task["lengths"]:
                seconds[length].append(engine.seconds_of(every[:batch], length))
        found["decode"].append({"batch": batch, "seconds": seconds, "prompts": digest_of(every[:batch])})
        keep(found, result)
    for num_tokens in task["prefills"]:
        # Each run has its own prompt, because the prefix cache would answer a repeated one.
        num_runs = task["num_repeats"] if num_tokens < LONG_TOKENS else 1
        new = [prompt_ids(f"prefill {num_tokens}", index, num_tokens, vocab_size) for index in range(num_runs)]
        runs = [engine.seconds_of([ids], 1) for ids in new]
        found["prefill"].append({"tokens": num_tokens, "seconds": runs, "prompts": digest_of(new)})
        keep(found, result)
    found["traffic_bytes"] = used_bytes() if is_on_gpu(task) else None
    done = allocator_counts(task)
    found["after_ready"] = {name: done[name] - ready[name] for name in done}
    keep(found, result)
    if task["engine"] == OURS:
        found["distinct_experts"] = distinct_experts(engine.llm, every, task["batches"])
    return found


def wait_for_turn(task: dict[str, Any]) -> None:
    """Wait for the gate of this engine, a file, if it shares the GPU with others."""
    if "gate" in task:
        gate = Path(task["gate"])
        while not gate.exists():
            time.sleep(0.05)


def is_on_gpu(task: dict[str, Any]) -> bool:
    return task["device"].startswith("cuda")


def memory_facts(task: dict[str, Any], llm: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the GPU's used bytes once the engine is ready, and the tokens that its KV cache holds.

    nvidia-smi counts the bytes, since vLLM's engine runs in another process: torch.cuda.mem_get_info would
    add a CUDA context of this one.
    """
    found: dict[str, Any] = {"ready_bytes": used_bytes() if is_on_gpu(task) else None}
    if task["engine"] == OURS:
        return {**found, "planned_bytes": llm.memory.planned_bytes, "kv_tokens": llm.memory.kv_tokens}
    with contextlib.suppress(AttributeError, TypeError):  # internals of vLLM, which move between versions
        config = llm.llm_engine.vllm_config
        found["max_num_batched_tokens"] = config.scheduler_config.max_num_batched_tokens
        found["kv_tokens"] = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    return found


def allocator_counts(task: dict[str, Any]) -> dict[str, int]:
    """Return torch's count of allocations and its reserved bytes; empty if the engine runs in another process."""
    if task["engine"] != OURS or not is_on_gpu(task):
        return {}
    import torch

    counts = torch.cuda.memory_stats()
    return {"allocations": counts["allocation.all.allocated"], "reserved_bytes": torch.cuda.memory_reserved()}


def distinct_experts(llm: Any, every: list[list[int]], batches: Sequence[int]) -> list[dict[str, float]]:  # noqa: ANN401
    """Count the distinct experts of decode steps, after all timing; empty for a model without experts."""
    from before_after_case import count_experts

    counted = [count_experts(llm, every[:batch]) for batch in batches]
    return [entry["distinct_experts"] for entry in counted if entry]


def package_versions() -> dict[str, str]:
    """Return the versions that this process sees."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def end_with_stdin() -> None:
    """Make this process the head of a group, and end the group when stdin ends; an engine may leave processes behind."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the task; an error ends the output with one line about it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    end_with_stdin()
    try:
        found = run_task(arguments.task, arguments.result)
    except BaseException as error:
        traceback.print_exc()
        words = str(error).strip().partition("\n")[0]
        print(f"{type(error).__name__}: {words}", flush=True)
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)
    else:
        leave(found, arguments.result)


if __name__ == "__main__":
    main()

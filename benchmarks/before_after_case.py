"""Decode speed of one engine through the public API; benchmarks/gpu_before_after.py runs it on the trees of two commits.

Internal names may differ between the trees, so this imports only public names, and nothing of benchmarks/ that imports
more. The count of experts is omitted if a tree has none. It takes a task as JSON and writes its findings to --result.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of the whole call for both lengths of output, by batch, with prompts in the prefix cache."""
    import holdfast
    from holdfast import LLM

    start = time.perf_counter()
    llm = LLM(task["folder"], load_format="dummy", on_progress=lambda done, total: None, **task["options"])
    found: dict[str, Any] = {
        "package": str(holdfast.__file__),
        "start_seconds": time.perf_counter() - start,
        "decode": [],
    }
    dice = random.Random(0)
    prompts = [
        [dice.randrange(task["vocab_size"]) for _ in range(task["prompt_tokens"])] for _ in range(max(task["batches"]))
    ]
    with llm:
        for batch in task["batches"]:
            seconds_of(llm, prompts[:batch], 2)
            seconds: dict[int, list[float]] = {length: [] for length in task["lengths"]}
            for _ in range(task["num_repeats"]):
                for length in task["lengths"]:
                    seconds[length].append(seconds_of(llm, prompts[:batch], length))
            found["decode"].append({"batch": batch, "seconds": seconds})
        if task["prefill_tokens"]:
            found["prefill_seconds"] = prefill_seconds(llm, task, dice)
        for entry in found["decode"]:
            entry |= count_experts(llm, prompts[: entry["batch"]])
    return found


def prefill_seconds(llm: Any, task: dict[str, Any], dice: random.Random) -> list[float]:  # noqa: ANN401
    """Return seconds to the first token of an uncached long prompt; the first run is not counted."""
    seconds = []
    for _ in range(task["num_repeats"] + 1):
        prompt = [dice.randrange(task["vocab_size"]) for _ in range(task["prefill_tokens"])]
        seconds.append(seconds_of(llm, [prompt], 1))
    return seconds[1:]


def count_experts(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:  # noqa: ANN401
    """Count distinct experts of a decode step after the timing; empty without experts, or if the tree cannot count."""
    try:
        from holdfast.runner.expert_counts import counting_experts
    except ImportError:
        return {}
    with counting_experts(llm.engine.core.runner) as counts:
        if counts.num_experts:
            seconds_of(llm, prompts, 4)
    found = counts.summary(len(prompts))
    return {} if found is None else {"distinct_experts": found}


def seconds_of(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:  # noqa: ANN401
    """Time this many greedy tokens for every prompt."""
    from holdfast import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    start = time.perf_counter()
    outputs = llm.generate(requests, params, progress=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), f"{num_tokens=}"
    return seconds


def main() -> None:
    """Run the task, and write its findings atomically."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    partial = arguments.result.with_suffix(".partial")
    partial.write_text(json.dumps(run_task(arguments.task)))
    partial.rename(arguments.result)


if __name__ == "__main__":
    main()

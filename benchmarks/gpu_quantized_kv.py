"""A whole engine over quantized pages against bfloat16 ones: python benchmarks/gpu_quantized_kv.py [--model NAME]

One process a format with dummy weights, at utilization 0.98 or that of --utilization: tokens a second of one stream; decode
steps of as many sequences of 8K and 32K as requested that fit at once; and, quantized, prompts that really fill 99 % of the
pool, served to the end. Decode steps run over pages with arbitrary contents, which do not change the time. The record is
written after every format. Formats without time have only the tokens that a plan for an H200 gives.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_decode import decode_rate
from gpu_records import Budget, device_name, keep, leave, make_record, options, print_table, run_child, write_record

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

MIN_SECONDS = 15.0
"""Least remaining seconds to start a process."""
FILLED = 0.99
MADE_UP_IDS = count(-(10**6), -1)
"""First id of sequences outside the scheduler."""


class Shape(NamedTuple):
    """What is run."""

    max_model_len: int = 32768 + 256
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    context_lengths: tuple[int, ...] = (8192, 32768)
    batches: tuple[int, ...] = (16, 64)
    num_steps: int = 12
    prompt_tokens: int = 512
    lengths: tuple[int, int] = (17, 81)
    utilization: float = 0.98


FULL = Shape()
TINY = Shape(512, 4, 128, (128, 256), (2, 4), 3, 40, (3, 8))


def engine_options(name: str, shape: Shape) -> dict[str, Any]:
    """Return the options of an engine."""
    return {
        "max_model_len": shape.max_model_len,
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "kv_cache_dtype": name,
        "memory_utilization": shape.utilization,
    }


def planned_tokens(name: str, model: str, shape: Shape) -> int:
    """Return the tokens that fit an H200 by the plan alone."""
    from holdfast.config import EngineConfig
    from holdfast.memory.devices import GPUS
    from holdfast.models.blueprints.read import declare_config
    from holdfast.models.catalogue import CATALOGUE
    from holdfast.planning.fit import fit_runner
    from holdfast.planning.resolve import PlanRequest
    from holdfast.planning.target import gpu_target

    config = EngineConfig.from_options(**engine_options(name, shape))
    return fit_runner(PlanRequest(config, declare_config(CATALOGUE[model], model), gpu_target(GPUS["h200"]))).kv_tokens


def run_format(
    name: str, model: str, shape: Shape, tiny: bool, device: str, fills: bool, result: Path | None
) -> dict[str, Any]:
    """Measure one format in this process."""
    from gpu_engines import open_engine

    start = time.perf_counter()
    settings = engine_options(name, shape)
    if device == "cpu":
        settings |= {"kv_cache_memory": "64MiB"}
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(model, Path(folder), tiny, device, **settings)
    memory = opened.llm.memory
    found: dict[str, Any] = {
        "start_seconds": time.perf_counter() - start,
        "kv_tokens": opened.built.plan.kv_tokens,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "choices": {choice.name: f"{choice.value}: {choice.reason}" for choice in opened.built.plan.resolved.choices},
    }
    found["one stream"] = one_stream(opened, shape)
    keep(found, result)
    found["steps"] = []
    for length in shape.context_lengths:
        for batch in shape.batches:
            fits = min(batch, opened.runner.num_pages * opened.runner.limits.page_tokens // length)
            seconds = step_seconds(opened, fits, length, shape.num_steps)
            found["steps"].append(
                {"length": length, "requested": batch, "at_once": fits, "tokens_per_second": fits / seconds}
            )
            keep(found, result)
    if fills:
        found["filled"] = fill_pool(opened, shape)
        keep(found, result)
    return found


def one_stream(opened: "OpenEngine", shape: Shape) -> dict[str, Any]:
    """Return tokens a second of a lone request, by the difference of two lengths."""
    from gpu_engines import prompts

    from holdfast.request.sampling_params import SamplingParams

    made = prompts(Random(0), [shape.prompt_tokens], opened.runner.vocab_size)
    seconds: dict[int, list[float]] = {length: [] for length in shape.lengths}
    for length in (1, *shape.lengths, *shape.lengths):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        start = time.perf_counter()
        opened.llm.generate([*made], params, progress=False)
        if length in seconds:
            seconds[length].append(time.perf_counter() - start)
    return {"seconds": seconds, "tokens_per_second": decode_rate(1, shape.lengths, seconds)}


def step_seconds(opened: "OpenEngine", batch: int, length: int, num_steps: int) -> float:
    """Return seconds of a decode step with this many stored tokens in each sequence, on separate shuffled pages."""
    from holdfast.request.sampling_params import SamplingParams
    from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence

    runner = opened.runner
    pages = list(range(runner.num_pages))
    Random(0).shuffle(pages)
    per_sequence = -(-length // runner.limits.page_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 8, ignore_eos=True)
    items = []
    for index in range(batch):
        sequence = Sequence(
            next(MADE_UP_IDS), [1] * length, length - num_steps - 8, params, seed=0, max_tokens=num_steps + 8
        )
        sequence.tables[0] = pages[index * per_sequence : (index + 1) * per_sequence]
        items.append(sequence)
    times = []
    for step in range(num_steps + 3):
        position = length - num_steps - 4 + step
        for sequence in items:
            del sequence.token_ids[position + 1 :]
            sequence.num_computed = position
        made = LiveStep(tuple(ScheduledSequence.of(sequence, position, 1) for sequence in items))
        start = time.perf_counter()
        runner.execute(made)
        times.append(time.perf_counter() - start)
        for sequence in items:
            sequence.token_ids.extend([1] * 1)
    return sorted(times[3:])[len(times[3:]) // 2]


def fill_pool(opened: "OpenEngine", shape: Shape) -> dict[str, Any]:
    """Run prompts of the longest context until 99 % of the pages are taken, all decoding at the end."""
    from gpu_engines import prompts

    from holdfast.request.sampling_params import SamplingParams

    runner = opened.runner
    page_tokens, length = runner.limits.page_tokens, max(shape.context_lengths)
    num_output = 16
    total = int(runner.num_pages * FILLED) * page_tokens
    lengths = [length - num_output] * (total // length)
    rest = total % length
    if rest > page_tokens:
        lengths.append(rest - num_output)
    made = prompts(Random(1), lengths, runner.vocab_size)
    start = time.perf_counter()
    outputs = opened.llm.generate(
        [*made], SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True), progress=False
    )
    seconds = time.perf_counter() - start
    stats = opened.engine.stats() if hasattr(opened.engine, "stats") else None
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths) + num_output * len(lengths),
        "share": (sum(lengths) + num_output * len(lengths)) / (runner.num_pages * page_tokens),
        "seconds": seconds,
        "prompt_tokens_per_second": sum(lengths) / seconds,
        "served": sum(len(output.outputs[0].token_ids) == num_output for output in outputs),
        "preemptions": getattr(stats, "num_preemptions", None),
    }


def results_of(found: Mapping[str, dict[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Return rows: one stream, every batch and length, tokens of the pool."""
    rows: list[dict[str, Any]] = [
        {"measure": "one stream", "unit": "tokens/s", "values": {}},
        *(
            {"measure": f"{batch} sequences of {length}", "unit": "tokens/s", "values": {}, "at_once": {}}
            for length in shape.context_lengths
            for batch in shape.batches
        ),
        {"measure": "tokens that fit", "unit": "tokens", "values": {}},
    ]
    for name, entry in found.items():
        if "one stream" in entry:
            rows[0]["values"][name] = round(entry["one stream"]["tokens_per_second"], 2)
        for row, step in zip(rows[1:-1], entry.get("steps", ()), strict=False):
            row["values"][name] = round(step["tokens_per_second"], 1)
            row["at_once"][name] = step["at_once"]
        if "kv_tokens" in entry:
            rows[-1]["values"][name] = entry["kv_tokens"]
    for row in rows:
        plain = row["values"].get("bfloat16")
        row["against_bfloat16"] = {name: round(value / plain, 3) for name, value in row["values"].items() if plain}
    return rows


def parse() -> tuple[argparse.Namespace, Shape]:
    parser = options("The whole engine over quantized pages against bfloat16 ones")
    parser.add_argument("--model", default="Qwen3-32B", help="a model of the catalogue")
    parser.add_argument(
        "--formats", default="bfloat16,turboquant_k8v4,turboquant_4bit_nc", help="bfloat16 is compared with"
    )
    parser.add_argument("--fill", default="turboquant_k8v4", help="the format whose pool is filled with real prompts")
    parser.add_argument("--utilization", type=float, default=FULL.utilization, help="share of the GPU")
    parser.add_argument("--batches", default="", help="sequences at once, such as 32; else 16,64")
    parser.add_argument("--lengths", default="", help="their stored tokens, such as 8192; else 8192,32768")
    arguments = parser.parse_args()
    shape = (TINY if arguments.tiny else FULL)._replace(utilization=arguments.utilization)
    batches, lengths = (
        tuple(int(number) for number in words.split(",") if number) for words in (arguments.batches, arguments.lengths)
    )
    return arguments, shape._replace(batches=batches or shape.batches, context_lengths=lengths or shape.context_lengths)


def write(found: Mapping[str, dict[str, Any]], shape: Shape, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the record so far, formats without an engine by their plan; return its rows."""
    formats = arguments.formats.split(",")
    every = found
    if "H200" in device_name(arguments.device):
        planned = {name: {"kv_tokens": planned_tokens(name, arguments.model, shape)} for name in formats}
        every = {name: {**planned[name], **found.get(name, {})} for name in formats}
    results = results_of(every, shape)
    facts = {
        "utilization": shape.utilization,
        "filled": {name: entry["filled"] for name, entry in found.items() if "filled" in entry},
        "start_seconds": {name: entry.get("start_seconds") for name, entry in found.items()},
        "choices": {name: entry.get("choices") for name, entry in found.items()},
        "errors": {name: entry["error"] for name, entry in found.items() if "error" in entry},
        "planned_only": [name for name in every if name not in found],
        "engine_settings": {name: {"model": arguments.model, "options": engine_options(name, shape)} for name in found},
    }
    words = f"bfloat16, dummy weights, utilization {shape.utilization:g}"
    record = make_record("gpu-quantized-kv", results, arguments.model, words, arguments, facts)
    write_record(record, "quantized-kv", arguments)
    return results


def main() -> None:
    """Measure each format in its own process."""
    arguments, shape = parse()
    if arguments.child is not None:
        fills = arguments.child == arguments.fill
        leave(
            run_format(
                arguments.child, arguments.model, shape, arguments.tiny, arguments.device, fills, arguments.result
            ),
            arguments.result,
        )
        return
    budget, found = Budget(arguments.budget_seconds), {}
    names = ("device", "model", "fill", "utilization", "batches", "lengths")
    shared = [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]
    shared += ["--tiny"] if arguments.tiny else []
    results: list[dict[str, Any]] = []
    for name in arguments.formats.split(","):
        if budget.left_seconds < MIN_SECONDS:
            print(f"{name} is left out: no time")
            continue
        found[name] = run_child([sys.argv[0], "--child", name, *shared], budget.left_seconds)
        print(json.dumps({name: {key: value for key, value in found[name].items() if key != "choices"}}), flush=True)
        results = write(found, shape, arguments)
    if not results:
        sys.exit("error: no engine ran; see above")
    names = list(dict.fromkeys(name for row in results for name in row["values"]))
    print_table(
        "Tokens/s by format of KV pages",
        ("", *names, "against bfloat16"),
        [
            (row["measure"], *(row["values"].get(name) for name in names), str(row["against_bfloat16"]))
            for row in results
        ],
    )


if __name__ == "__main__":
    main()

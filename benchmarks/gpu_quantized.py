"""Tokens a second with quantized weights beside bfloat16 ones: python benchmarks/gpu_quantized.py [--models A,B] [--quantizations fp8,none]

One process for each model and scheme, with dummy weights. A decode rate is the difference of two lengths, with prompts in
the prefix cache (benchmarks/gpu_decode.py). The roof is the time to read a step's required bytes at the device's rate: every
weight but the embedding, in the scheme's format, and the keys and values of the batch. Of experts it counts the distinct
ones that a step uses, counted in eager steps after the timing. The record has the count beside that of uniform
routing, E * (1 - (1 - top_k / E) ** batch) of E in each layer.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from distinct_experts import count_experts, distinct_of, shown_experts
from gpu_decode import READ_BYTES_PER_SECOND, decode_rate, graph_seconds, mean_context, roof_rate
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, write_record

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

    from holdfast.engine.admission import TokensPrompt

BATCHES = {"Qwen3-32B": (1, 8, 32, 64), "Qwen3-30B-A3B": (1, 8, 64), "Qwen1.5-MoE-A2.7B": (1, 8, 64)}
"""Models and their batches."""
QUANTIZATIONS = ("fp8", "none")
GOALS = {("Qwen3-32B", "fp8", 1): 105.0}
"""Goals in tokens a second, by model, scheme and batch."""
MIN_SECONDS = 20.0
"""Least remaining seconds to start a process."""


class Shape(NamedTuple):
    """Size of the run."""

    prompt_tokens: int = 512
    lengths: tuple[int, int] = (17, 81)
    max_num_batched_tokens: int = 8192
    num_repeats: int = 2
    num_replays: int = 20
    batches: tuple[int, ...] = ()
    """Shapes that replace the model's."""


FULL = Shape()
TINY = Shape(24, (3, 8), 128, 1, 2, (1, 3))


class StepBytes(NamedTuple):
    """Weights that a step reads."""

    dense: int
    """Bytes at any batch."""
    expert: int
    """Bytes of one expert in every layer with experts."""
    num_experts: int = 0
    top_k: int = 0

    def of(self, num_touched: float) -> int:
        """Return bytes with this many experts used in each layer."""
        return self.dense + round(self.expert * num_touched)


def step_weights(num_bytes: Mapping[str, int], is_tied: bool, num_experts: int, top_k: int) -> StepBytes:
    """Sum the bytes of every weight, without an embedding that is not also the head."""
    unread = {"positions.weight", *(() if is_tied else ("embed.weight",))}
    moe = sum(count for name, count in num_bytes.items() if ".experts." in name)
    dense = sum(count for name, count in num_bytes.items() if name not in unread) - moe
    return StepBytes(dense, moe // num_experts if num_experts else 0, num_experts, top_k)


# --- in the process of an engine


def run_engine(
    model: str, quantization: str, shape: Shape, tiny: bool, device: str, result: Path | None = None
) -> dict[str, Any]:
    """Run every batch, and list the engine's memory."""
    from gpu_engines import open_engine, prompts

    batches = shape.batches or BATCHES[model]
    settings: dict[str, Any] = {
        "quantization": quantization,
        "max_model_len": shape.prompt_tokens + shape.lengths[1] + 16,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": shape.max_num_batched_tokens,
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(model, Path(folder), tiny, device, **settings)
        start_seconds = time.perf_counter() - start
        step = read_weights(Path(folder) / model, opened)
    memory = opened.llm.memory
    found: dict[str, Any] = {
        "options": settings,
        "start_seconds": start_seconds,
        "load_seconds": opened.built.load_report.seconds,
        "weight_bytes": next(row for row in memory.rows if row.owner == "weights").planned_bytes,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "step_bytes": step._asdict(),
        "choices": {choice.name: f"{choice.value}: {choice.reason}" for choice in opened.built.plan.resolved.choices},
        "decode": [],
    }
    made = prompts(Random(0), [shape.prompt_tokens] * max(batches), opened.runner.vocab_size)
    for batch in batches:
        found["decode"].append({"batch": batch, **time_batch(opened, made[:batch], shape)})
        keep(found, result)
    for entry in found["decode"] if step.num_experts else ():
        entry["distinct_experts"] = count_experts(opened, made[: entry["batch"]])
        keep(found, result)
    return found


def read_weights(path: Path, opened: "OpenEngine") -> StepBytes:
    """Return the bytes that a step of this engine reads, from the plan of its weights."""
    from holdfast.loading.model_files import open_model
    from holdfast.loading.planning.plan import plan_load

    model, resolved = open_model(str(path), "dummy"), opened.built.plan.resolved
    plan = plan_load(model.parameters, model.source, resolved.dtype, resolved.recipe)
    spec = model.spec
    num_experts, top_k = (spec.experts.num_experts, spec.experts.top_k) if spec.experts is not None else (0, 0)
    return step_weights(
        {weight.name: weight.num_bytes for weight in plan.weights}, spec.tied_embeddings, num_experts, top_k
    )


def read_file_weights(path: Path, opened: "OpenEngine") -> tuple[StepBytes, int]:
    """Like `read_weights`, for a file; also return the bytes of its tensors."""
    from holdfast.loading.model_files import open_model
    from holdfast.loading.planning.plan import plan_load

    model, resolved = open_model(str(path), "auto"), opened.built.plan.resolved
    plan, spec = plan_load(model.parameters, model.source, resolved.dtype, resolved.recipe), model.spec
    num_experts, top_k = (spec.experts.num_experts, spec.experts.top_k) if spec.experts is not None else (0, 0)
    sizes = {weight.name: weight.num_bytes for weight in plan.weights}
    stored = model.gguf.tensors.values() if model.gguf is not None else model.source.entries.values()
    return step_weights(sizes, spec.tied_embeddings, num_experts, top_k), sum(one.num_bytes for one in stored)


def time_batch(opened: "OpenEngine", made: Sequence["TokensPrompt"], shape: Shape) -> dict[str, Any]:
    """Return seconds of both lengths, and of the graph alone."""
    generate(opened, made, 1)
    seconds: dict[int, list[float]] = {length: [] for length in shape.lengths}
    for _ in range(shape.num_repeats):
        for length in shape.lengths:
            seconds[length].append(generate(opened, made, length))
    # The last step was of the longest run; its rows are still in the graphs' buffers.
    return {"seconds": seconds, **graph_seconds(opened, len(made), shape.num_replays)}


def generate(opened: "OpenEngine", made: Sequence["TokensPrompt"], num_tokens: int) -> float:
    """Time this many tokens for every prompt."""
    from holdfast.request.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = opened.llm.generate([*made], params, progress=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), f"{num_tokens=}"
    return seconds


# --- in the parent process


def engine_name(quantization: str, device: str) -> str:
    """Return the column title: the scheme, or the type without one."""
    return quantization if quantization != "none" else "bfloat16" if device.startswith("cuda") else "float32"


def rate_of(entry: Mapping[str, Any], engine: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the figures of one batch of one engine."""
    batch, step = entry["batch"], StepBytes(**engine["step_bytes"])
    context, kv_bytes = mean_context(shape.prompt_tokens, shape.lengths), engine["kv_bytes_per_token"]
    rate = decode_rate(batch, shape.lengths, {int(length): runs for length, runs in entry["seconds"].items()})
    distinct = distinct_of(entry, step.num_experts, step.top_k)
    roof = roof_rate(batch, context, step.of(distinct["measured"]), kv_bytes)
    found = {"rate": rate, "milliseconds": 1000 * batch / rate, "roof": roof, "percent_of_roof": 100 * rate / roof}
    if "graph_seconds" in entry:
        found["graph_alone"] = batch / entry["graph_seconds"]
    figures: dict[str, Any] = {name: round(value, 3) for name, value in found.items()}
    return figures | ({"distinct_experts": distinct} if step.num_experts else {})


def rows_of(found: Mapping[tuple[str, str], Mapping[str, Any]], shape: Shape, device: str) -> list[dict[str, Any]]:
    """Return a row for each model and batch, with every scheme that ran."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for (model, quantization), engine in found.items():
        name = engine_name(quantization, device)
        for entry in engine.get("decode", ()):
            batch = entry["batch"]
            made = {"measure": f"{model}, batch {batch}", "unit": "tokens/s", "model": model, "batch": batch}
            row = rows.setdefault((model, batch), {**made, "values": {}, "verdicts": {}})
            figures = rate_of(entry, engine, shape)
            row["values"][name] = figures.pop("rate")
            for figure, value in figures.items():
                row.setdefault(figure, {})[name] = value
            goal = GOALS.get((model, quantization, batch))
            if goal is not None and device.startswith("cuda"):
                row["verdicts"][f"{quantization} >= {goal:g} tokens/s"] = row["values"][name] >= goal
    for row in rows.values():
        plain = row["values"].get(engine_name("none", device))
        others = {name: rate for name, rate in row["values"].items() if name != engine_name("none", device)}
        if plain is not None and others:
            row["against_unquantized"] = {name: round(rate / plain, 3) for name, rate in others.items()}
    return list(rows.values())


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    columns = ("", "weights", "tokens/s", "ms", "% of roof", "roof", "graph alone", "experts", "against unquantized")
    lines = [
        (
            row["measure"],
            name,
            rate,
            *(row.get(figure, {}).get(name) for figure in ("milliseconds", "percent_of_roof", "roof", "graph_alone")),
            shown_experts(row.get("distinct_experts", {}).get(name)),
            row.get("against_unquantized", {}).get(name),
        )
        for row in rows
        for name, rate in row["values"].items()
    ]
    print_table("Decode", columns, lines)
    for row in rows:
        for words, holds in row["verdicts"].items():
            print(f"{'yes' if holds else 'NO '}  {row['measure']}: {words}")


def write(
    found: Mapping[tuple[str, str], Mapping[str, Any]], shape: Shape, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Write the record so far; return its rows."""
    rows = rows_of(found, shape, arguments.device)
    facts = {
        "context": f"{shape.prompt_tokens} tokens of prompt, then {shape.lengths[0]} to {shape.lengths[1]} of output",
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
        "engines": {
            f"{model}, {engine_name(quantization, arguments.device)}": {
                name: value for name, value in engine.items() if name != "decode"
            }
            for (model, quantization), engine in found.items()
        },
        "engine_settings": {
            f"{model}, {engine_name(quantization, arguments.device)}": {
                "model": model,
                "options": engine["options"],
            }
            for (model, quantization), engine in found.items()
            if "options" in engine
        },
    }
    if rows:
        names = ", ".join(dict.fromkeys(row["model"] for row in rows))
        record = make_record("gpu-quantized", rows, names, "dummy weights", arguments, facts)
        write_record(record, "quantized", arguments)
    return rows


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Shape]:
    parser = options("Decode speed of the whole engine with quantized weights")
    parser.add_argument("--models", default=",".join(BATCHES), help="models of the catalogue")
    parser.add_argument(
        "--quantizations", default=",".join(QUANTIZATIONS), help="schemes; none leaves weights as they are"
    )
    parser.add_argument("--batches", default="", help="such as 1,8; else each model's own")
    arguments = parser.parse_args(argv)
    shape = TINY if arguments.tiny else FULL
    batches = tuple(int(batch) for batch in arguments.batches.split(",") if batch)
    if not arguments.tiny and not batches and (unknown := set(arguments.models.split(",")) - BATCHES.keys()):
        parser.error(f"{', '.join(sorted(unknown))}: no batches are known for it, so give --batches")
    return arguments, shape._replace(batches=batches) if batches else shape


def main() -> None:
    """Run the requested parts while time allows."""
    arguments, shape = parse()
    if arguments.child is not None:
        model, quantization = arguments.child.split(",")
        engine = run_engine(model, quantization, shape, arguments.tiny, arguments.device, arguments.result)
        leave(engine, arguments.result)
        return
    budget = Budget(arguments.budget_seconds)
    shared = ["--device", arguments.device, "--batches", arguments.batches, *(["--tiny"] if arguments.tiny else [])]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        for quantization in arguments.quantizations.split(","):
            if budget.left_seconds < MIN_SECONDS:
                print(f"{model}, {quantization} is left out: no time")
                continue
            command = [sys.argv[0], "--models", model, "--child", f"{model},{quantization}", *shared]
            engine = found[model, quantization] = run_child(command, budget.left_seconds)
            facts = {name: engine.get(name) for name in ("start_seconds", "weight_bytes", "error")}
            print(json.dumps({"engine": f"{model}, {quantization}", **facts}))
            sys.stdout.flush()
            rows = write(found, shape, arguments)
    if not rows:
        sys.exit("error: no engine ran; see above")
    show(rows)


if __name__ == "__main__":
    main()

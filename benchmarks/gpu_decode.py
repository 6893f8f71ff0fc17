"""Tokens a second of a whole engine, against the memory roof: python benchmarks/gpu_decode.py [--transformers] [--model NAME]

One process for each of: our engine with defaults, our engine with batch_invariant=True, and transformers (eager, dynamic cache)
with random weights of the same shapes. A decode rate is (tokens of the longer run - tokens of the shorter one) / (the
difference of their seconds). The prompts are in the prefix cache, so only decode steps remain. The roof is the time to read
all weights but the embedding, and the keys and values of the batch, at the device's read rate. Only the distinct experts
that a step uses count.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from distinct_experts import count_experts, shown_experts, unread_bytes
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, write_record

from holdfast.memory.device_rates import H200_READ_BYTES_PER_SECOND as READ_BYTES_PER_SECOND

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

MODES = {"default": "holdfast", "invariant": "holdfast, batch invariant", "transformers": "transformers"}
"""Processes, and the names of their engines in the record."""
MIN_SECONDS = 20.0
"""Least remaining seconds to start a process."""


class Shape(NamedTuple):
    """Size of the run."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    prompt_tokens: int = 512
    prefill_tokens: int = 8192
    lengths: tuple[int, int] = (17, 81)
    transformers_batches: tuple[int, ...] = (1, 8)
    transformers_lengths: tuple[int, int] = (3, 15)
    num_repeats: int = 2
    num_replays: int = 20


FULL = Shape()
TINY = Shape((1, 3), 40, 64, (3, 8), (1, 2), (2, 5))


def decode_rate(batch: int, lengths: tuple[int, int], seconds: Mapping[int, Sequence[float]]) -> float:
    """Return tokens a second from the best runs of both lengths."""
    short, long = lengths
    return batch * (long - short) / (min(seconds[long]) - min(seconds[short]))


def roof_rate(batch: int, context: float, weight_bytes: int, kv_bytes_per_token: int) -> float:
    """Return tokens a second if a step only reads the required bytes, at the device's rate."""
    step_bytes = weight_bytes + batch * context * kv_bytes_per_token
    return batch * READ_BYTES_PER_SECOND / step_bytes


def mean_context(prompt_tokens: int, lengths: tuple[int, int]) -> float:
    """Return the mean stored tokens that a step of the difference sees, its own included."""
    return prompt_tokens + (lengths[0] + lengths[1]) / 2


# --- our engine


def run_holdfast(
    mode: str, model: str, shape: Shape, tiny: bool, device: str, result: Path | None = None
) -> dict[str, Any]:
    """Run every batch size, and a long prompt."""
    from gpu_engines import open_engine, prompts
    from torch import Tensor

    from holdfast.request.sampling_params import SamplingParams

    settings: dict[str, Any] = {
        "max_model_len": shape.prefill_tokens + shape.prompt_tokens,
        "max_num_seqs": max(shape.batches),
        "max_num_batched_tokens": shape.prefill_tokens,
        "batch_invariant": mode == "invariant",
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(model, Path(folder), tiny, device, **settings)
    found: dict[str, Any] = {"options": settings, "start_seconds": time.perf_counter() - start, "decode": []}
    decoder = opened.decoder
    weights = next(row for row in opened.llm.memory.rows if row.owner == "weights").planned_bytes
    embedding, head = decoder._embed_VE, decoder._head_VE
    assert embedding is not None, "this script has one stage"
    assert head is not None, "this script has one stage"
    assert isinstance(embedding, Tensor), "this script quantizes nothing"
    assert isinstance(head, Tensor), "this script quantizes nothing"
    is_tied = head.data_ptr() == embedding.data_ptr()
    found["weight_bytes"] = weights - (0 if is_tied else embedding.numel() * embedding.element_size())
    found["kv_bytes_per_token"] = opened.llm.memory.kv_bytes_per_token
    dice, vocab_size = Random(0), opened.runner.vocab_size

    def seconds_of(made: list[Any], num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = opened.llm.generate(made, params, progress=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs), f"{num_tokens=}"
        return seconds

    every = prompts(dice, [shape.prompt_tokens] * max(shape.batches), vocab_size)
    for batch in shape.batches:
        made = [*every[:batch]]
        seconds_of(made, 1)
        seconds: dict[int, list[float]] = {length: [] for length in shape.lengths}
        for _ in range(shape.num_repeats):
            for length in shape.lengths:
                seconds[length].append(seconds_of(made, length))
        # The last step was of the longest run; its rows are still in the graphs' buffers.
        found["decode"].append({"batch": batch, "seconds": seconds, **graph_seconds(opened, batch, shape.num_replays)})
        keep(found, result)
    found["prefill_seconds"] = [
        seconds_of([*prompts(dice, [shape.prefill_tokens], vocab_size)], 1) for _ in range(shape.num_repeats + 1)
    ]
    for entry in found["decode"]:
        distinct = count_experts(opened, every[: entry["batch"]])
        if distinct is not None:
            entry |= {"distinct_experts": distinct, "unread_bytes": unread_bytes(opened, distinct["measured"])}
    return found


def graph_seconds(opened: "OpenEngine", batch: int, num_replays: int) -> dict[str, Any]:
    """Return seconds of one replay of the graph of this size, by device events; None without such a graph."""
    import torch

    runner = opened.runner
    size = runner.graphs.size_for(batch, batch, True) if runner.graphs is not None else None
    if runner.graphs is None or runner.stream is None or size is None:
        return {}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(runner.stream):
        for _ in range(3):
            runner.graphs.replay(size, True)
        start.record()
        for _ in range(num_replays):
            runner.graphs.replay(size, True)
        end.record()
    end.synchronize()
    return {"graph_size": size, "graph_seconds": start.elapsed_time(end) / num_replays / 1000}


# --- transformers


def run_transformers(model: str, shape: Shape, tiny: bool, device: str) -> dict[str, Any]:
    """Run eager generate with a dynamic cache, on random weights of equal shapes."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gpu_engines
    import torch
    import transformers

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = gpu_engines.write_dummy_model(Path(folder), model, **(gpu_engines.TINY if tiny else {}))
        config = transformers.AutoConfig.from_pretrained(path)
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.requires_grad_(False)
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    found: dict[str, Any] = {"decode": [], "attention": getattr(config, "_attn_implementation", None)}
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronize()
    found["start_seconds"] = time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)

    def ids(batch: int, length: int) -> torch.Tensor:
        return torch.randint(config.vocab_size, (batch, length), generator=generator).to(device)

    def seconds_of(ids_BL: torch.Tensor, num_tokens: int) -> float:
        synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            out = network.generate(
                ids_BL,
                attention_mask=torch.ones_like(ids_BL),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
            )
        synchronize()
        assert out.shape[1] == ids_BL.shape[1] + num_tokens, f"{tuple(out.shape)=} {num_tokens=}"
        return time.perf_counter() - start

    for batch in shape.transformers_batches:
        ids_BL = ids(batch, shape.prompt_tokens)
        seconds_of(ids_BL, 2)
        seconds = {
            length: [seconds_of(ids_BL, length)]
            for length in shape.transformers_lengths  # slow, so once each
        }
        found["decode"].append({"batch": batch, "seconds": seconds})
    found["prefill_seconds"] = [seconds_of(ids(1, shape.prefill_tokens), 1) for _ in range(2)]
    return found


# --- in the parent process


def decode_results(found: Mapping[str, dict[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Return a row for each batch size, with the engines that ran it."""
    ours = found.get("default", {})
    results = []
    for batch in shape.batches:
        row: dict[str, Any] = {"measure": f"decode, batch {batch}", "unit": "tokens/s", "batch": batch, "values": {}}
        for mode, engine in MODES.items():
            entry = next((entry for entry in found.get(mode, {}).get("decode", ()) if entry["batch"] == batch), None)
            if entry is None:
                continue
            seconds = {int(length): runs for length, runs in entry["seconds"].items()}
            lengths = shape.transformers_lengths if mode == "transformers" else shape.lengths
            row["values"][engine] = round(decode_rate(batch, lengths, seconds), 2)
            row.setdefault("seconds", {})[engine] = seconds
            if "graph_seconds" in entry:
                row.setdefault("graph_alone", {})[engine] = round(batch / entry["graph_seconds"], 2)
        if MODES["default"] in row["values"]:
            context = mean_context(shape.prompt_tokens, shape.lengths)
            entry = next(entry for entry in ours["decode"] if entry["batch"] == batch)
            read = ours["weight_bytes"] - entry.get("unread_bytes", 0)
            roof = roof_rate(batch, context, read, ours["kv_bytes_per_token"])
            if "distinct_experts" in entry:
                row["distinct_experts"] = entry["distinct_experts"]
            row["roof"] = round(roof, 2)
            row["percent_of_roof"] = round(100 * row["values"][MODES["default"]] / roof, 1)
        if row["values"]:
            results.append(row)
    return results


def prefill_result(found: Mapping[str, dict[str, Any]], shape: Shape) -> dict[str, Any] | None:
    """Return tokens a second of one long prompt, by the best run after the first."""
    runs = {MODES[mode]: entry["prefill_seconds"] for mode, entry in found.items() if "prefill_seconds" in entry}
    if not runs:
        return None
    rates = {engine: round(shape.prefill_tokens / min(seconds[1:]), 1) for engine, seconds in runs.items()}
    return {
        "measure": f"prefill, {shape.prefill_tokens} tokens",
        "unit": "tokens/s",
        "values": rates,
        "seconds": runs,
    }


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    ours, invariant, others = MODES.values()
    names = ("", ours, "graph alone", "% of roof", "roof", "experts", "invariant", "tax %", others, f"against {others}")
    lines = []
    for row in results:
        values = row["values"]
        rate, slow, other = values.get(ours), values.get(invariant), values.get(others)
        lines.append(
            (
                row["measure"],
                rate,
                row.get("graph_alone", {}).get(ours),
                row.get("percent_of_roof"),
                row.get("roof"),
                shown_experts(row.get("distinct_experts")),
                slow,
                100 * (1 - slow / rate) if rate and slow else None,
                other,
                rate / other if rate and other else None,
            )
        )
    print_table("Tokens/s", names, lines)


def measure_all(modes: Sequence[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure each engine in its own process."""
    budget = Budget(arguments.budget_seconds)
    found: dict[str, dict[str, Any]] = {}
    for mode in modes:
        if budget.left_seconds < MIN_SECONDS:
            print(f"{mode} is left out: no time")
            continue
        start = budget.spent_seconds
        shared = ["--device", arguments.device, "--model", arguments.model, *(["--tiny"] if arguments.tiny else [])]
        found[mode] = run_child([sys.argv[0], "--child", mode, *shared], budget.left_seconds)
        seconds = round(budget.spent_seconds - start, 1)
        words = found[mode].get("error", f"started in {found[mode].get('start_seconds', 0):.1f} s")
        print(json.dumps({"engine": MODES[mode], "seconds": seconds, "output": words}))
        sys.stdout.flush()
    return found


def main() -> None:
    """Run the requested parts while time allows."""
    parser = options("Decode and prefill speed of the whole engine")
    parser.add_argument("--model", default="Qwen3-32B", help="a model of the catalogue")
    parser.add_argument("--transformers", action="store_true", help="also transformers, with the same shapes")
    parser.add_argument("--only", default="", help="default, invariant or transformers alone; several with commas")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else FULL
    if arguments.child == "transformers":
        leave(run_transformers(arguments.model, shape, arguments.tiny, arguments.device), arguments.result)
        return
    if arguments.child is not None:
        found = run_holdfast(
            arguments.child, arguments.model, shape, arguments.tiny, arguments.device, arguments.result
        )
        leave(found, arguments.result)
        return
    modes = arguments.only.split(",") if arguments.only else ["default", "invariant"]
    modes += ["transformers"] if arguments.transformers and "transformers" not in modes else []
    found = measure_all(modes, arguments)
    prefill = prefill_result(found, shape)
    results = [*decode_results(found, shape), *([prefill] if prefill is not None else [])]
    errors = {mode: entry["error"] for mode, entry in found.items() if "error" in entry}
    if not results:
        sys.exit(f"error: no engine ran: {errors}; see above")
    facts = {
        "context": f"{shape.prompt_tokens} tokens of prompt, then {shape.lengths[0]} to {shape.lengths[1]} of output",
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
        "weight_bytes_read": found.get("default", {}).get("weight_bytes"),
        "kv_bytes_per_token": found.get("default", {}).get("kv_bytes_per_token"),
        "start_seconds": {mode: entry.get("start_seconds") for mode, entry in found.items()},
        "transformers_attention": found.get("transformers", {}).get("attention"),
        "errors": errors,
        "engine_settings": {
            MODES[mode]: {"model": arguments.model, "options": entry["options"]}
            for mode, entry in found.items()
            if "options" in entry
        },
    }
    dtype = "bfloat16" if arguments.device.startswith("cuda") else "float32"
    record = make_record("gpu-decode", results, arguments.model, f"{dtype}, dummy weights", arguments, facts)
    show(results)
    write_record(record, "decode", arguments)


if __name__ == "__main__":
    main()

"""Sliding-window models on a GPU: plan, speed and pages by cache group: python benchmarks/gpu_groups.py [--cases NAME,...]

One engine per model's shapes, with dummy weights, in its own process. Speed: tokens a second of decode steps (the difference
of two lengths of output after prompts in the prefix cache). The roof reads all weights but the embedding, the distinct
experts counted, and the visible keys and values. Memory: planned, and the driver's figure. After ready: allocations and
compilations inside Runner.launch and collect. Windows: pages that each group holds while many long prompts run, beside the
bound, and the sequences that run at once; then again with all layers keeping every token.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from distinct_experts import count_experts, distinct_of, shown_experts
from gpu_decode import READ_BYTES_PER_SECOND, decode_rate, graph_seconds, mean_context
from gpu_quantized import generate
from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, used_bytes, write_record

from holdfast.cache.places import place_bytes
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.sparse.spec import SparseAttentionSpec

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

    from holdfast.attention.declarations import AttentionSpec
    from holdfast.engine.admission import TokensPrompt

GIB = 2**30
MIN_SECONDS = 20.0
"""Least remaining seconds to start a process."""


class Case(NamedTuple):
    """One engine and its measurements."""

    model: str
    options: Mapping[str, Any]
    batches: tuple[int, ...] = ()
    """Batch sizes of timed decode."""
    num_requests: int = 0
    """Number of long prompts that run together while pages are counted."""
    prompt_tokens: int = 512
    lengths: tuple[int, int] = (17, 81)
    watch_seconds: float = 30.0
    shapes: Mapping[str, Any] = {}
    """Replacements of config.json settings, such as the number of layers."""
    steady_tokens: int = 0
    """Tokens of one more run of the smallest batch, so that many steps are counted after ready."""
    contexts: tuple[int, ...] = ()
    """Replaces `prompt_tokens`: decode after prompts of each length, without prefill (lent_contexts.py)."""

    @property
    def label(self) -> str:
        """Return its name in rows of a record."""
        facts = (self.options.get(key) for key in ("quantization", "kv_cache_dtype"))
        layers = self.shapes.get("num_hidden_layers")
        return ", ".join([self.model, *filter(None, facts), *([f"{layers} layers"] if layers else [])])

    @property
    def settings(self) -> dict[str, Any]:
        """Return what decides the plan."""
        return {"model": self.model, "options": self.options, "shapes": self.shapes}


CASES: Mapping[str, Case] = {
    "gpt-oss-20b": Case("gpt-oss-20b", {"max_model_len": 131072, "max_num_seqs": 64}, (1, 64)),
    "gemma-3-27b": Case("gemma-3-27b-it", {"max_model_len": 131072, "max_num_seqs": 64}, (1, 64)),
    "mistral-7b": Case(
        "Mistral-7B-v0.1",
        {"max_model_len": 32768, "max_num_seqs": 64, "quantization": "fp8", "memory_limit": "24GiB"},
        num_requests=64,
        prompt_tokens=31744,
    ),
}
TINY_CASES: Mapping[str, Case] = {
    "mistral-7b": Case(
        "Mistral-7B-v0.1", {"max_model_len": 256, "max_num_seqs": 4}, (1,), 3, 120, (3, 8), watch_seconds=5.0
    )
}


# --- in the process of an engine


def run_case(case: Case, tiny: bool, device: str, result: Path | None = None) -> dict[str, Any]:
    """Start an engine; count, time and watch it."""
    from gpu_engines import open_engine, prompts

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(case.model, Path(folder), tiny, device, case.shapes, **case.options)
    plan = opened.built.plan
    found: dict[str, Any] = {
        "start_seconds": time.perf_counter() - start,
        "report": opened.llm.memory.as_dict(),
        "planned_bytes": plan.memory.phase_bytes["serve"],
        "kv_tokens": plan.kv_tokens,
        "contexts_that_fit": plan.max_concurrency,
        # A model with entries cannot keep every token in any layer.
        "tokens_without_groups": None if plan.states else plan.tokens_without_groups,
        "beside_pages": beside_pages(opened),
        "groups": group_rows(opened),
        "read": read_bytes(opened),
        "decode": [],
    }
    counted = Counted(opened)
    made: list[TokensPrompt] = []
    for context in case.contexts or (case.prompt_tokens,):
        made = prompts(Random(0), [context] * max((*case.batches, case.num_requests)), opened.runner.vocab_size)
        if case.contexts:
            from lent_contexts import lend_contexts

            opened.engine.scheduler.reset_prefix_cache()
            lend_contexts(opened, made)
        for batch in case.batches:
            found["decode"].append({"batch": batch, "context": context, **time_decode(opened, made[:batch], case)})
            keep(found, result)
    if case.steady_tokens:
        generate(opened, made[: min(case.batches)], case.steady_tokens)
    if case.num_requests:
        found["watched"] = watch(opened, made[: case.num_requests], case)
    found["after_ready"] = counted.found()
    keep(found, result)
    for entry in found["decode"] if found["read"]["num_experts"] else ():
        if entry["context"] == found["decode"][-1]["context"]:  # the others have left the prefix cache
            entry["distinct_experts"] = count_experts(opened, made[: entry["batch"]])
            keep(found, result)
    return found


def time_decode(opened: "OpenEngine", made: Sequence[Any], case: Case) -> dict[str, Any]:
    """Return seconds of two runs of each length, and of a graph alone."""
    scheduler = opened.engine.scheduler
    generate(opened, made, 1)
    num_found, num_preemptions = scheduler.num_prefix_hit_tokens, scheduler.num_preemptions
    seconds: dict[int, list[float]] = {length: [] for length in case.lengths}
    for _ in range(2):
        for length in case.lengths:
            seconds[length].append(generate(opened, made, length))
    num_found = scheduler.num_prefix_hit_tokens - num_found
    return {
        "seconds": seconds,
        "tokens_found": num_found / (2 * len(case.lengths) * len(made)),
        "num_preemptions": scheduler.num_preemptions - num_preemptions,
        **graph_seconds(opened, len(made), 20),
    }


def group_rows(opened: "OpenEngine") -> list[dict[str, Any]]:
    """Return the figures of each group."""
    plan = opened.built.plan
    assert plan.cache is not None, f"{plan.declared.name} has no pages"
    limits, rows = plan.resolved.limits, []
    for index, (group, own) in enumerate(zip(plan.cache.cache_groups(), plan.cache.groups, strict=True)):
        rows.append(
            {
                "name": group.name,
                "num_layers": len(own.layers),
                "page_tokens": group.page_tokens,
                "padding_bytes": plan.cache.padding_bytes(index),
                "page_bytes": plan.cache.bytes_per_page,
                "bound_decode": group.most_pages(limits.max_model_len, 1),
                "bound_prompt": group.most_pages(limits.max_model_len, limits.max_num_batched_tokens),
            }
        )
    return rows


def beside_pages(opened: "OpenEngine") -> dict[str, int]:
    """Return bytes of scratch, and of each sequence's fixed state."""
    plan = opened.built.plan
    scratch = sum(term.num_bytes for term in plan.memory.terms if term.group == "workspace")
    return {"scratch": scratch, "state of a sequence": place_bytes(plan.states)}


def read_bytes(opened: "OpenEngine") -> dict[str, Any]:
    """Return the bytes that every step reads."""
    plan = opened.built.plan
    groups = {term.owner: term.num_bytes for term in plan.memory.terms if term.group == "weights"}
    # A step reads a few rows of an embedding that is not also the head.
    skipped = groups["weights/embed"] if "weights/lm_head" in groups else 0
    spec = plan.declared.spec
    assert spec is not None, f"{plan.declared.name} does not run"
    experts = spec.experts
    if experts is not None:
        # The same holds for a table by token id (int64).
        skipped += len(experts.table_layers) * experts.table_size * experts.top_k * 8
    return {
        "weight_bytes": sum(groups.values()) - skipped,
        "num_experts": 0 if experts is None else experts.num_experts,
        "top_k": 0 if experts is None else experts.top_k,
        "expert_bytes": groups.get("weights/experts", 0),
        "kv_layers": [part for own in plan.attention_specs for part in seen_bytes(own)],
        "sequence_bytes": place_bytes(plan.states),
    }


def seen_bytes(own: "AttentionSpec") -> list[tuple[float, int | None]]:
    """Return bytes per token of a layer, and the most tokens a row reads: chosen latents, and the whole index."""
    if isinstance(own, CompressedAttentionSpec):
        return [(own.cache.bytes_per_token, own.window), *entry_bytes(own)]
    if not isinstance(own, SparseAttentionSpec):
        return [(own.cache.bytes_per_token, own.window)]
    latent = replace(own.cache, index_dim=0).bytes_per_token
    index = own.cache.bytes_per_token - latent
    return [(latent, own.index_top_k), *([(index, None)] if index else [])]


def entry_bytes(own: CompressedAttentionSpec) -> list[tuple[float, int | None]]:
    """Like `seen_bytes`, for entries of several tokens: all of them, or the chosen ones and the whole index."""
    if own.entries is None:
        return []
    entry = replace(own.entries, index_dim=0).bytes_per_token
    index = own.entries.bytes_per_token - entry
    chosen = (entry / own.ratio, own.index_top_k * own.ratio if own.is_overlapped else None)
    return [chosen, *([(index / own.ratio, None)] if index else [])]


class Counted:
    """Allocations and compilations inside Runner.launch and Runner.collect, from now on."""

    def __init__(self, opened: "OpenEngine") -> None:
        from holdfast.kernels.triton_compat import counting_compiles

        self._is_cuda = opened.runner.device.type == "cuda"
        self._num_steps = self._num_allocations = 0
        self._compiles = counting_compiles(lambda: None)
        self._counts = self._compiles.__enter__()
        opened.runner.launch = self._counted(opened.runner.launch, 1)
        opened.runner.collect = self._counted(opened.runner.collect, 0)

    def _counted(self, call: Callable[..., Any], num_steps: int) -> Callable[..., Any]:
        import torch

        def counted(*arguments: Any) -> Any:  # noqa: ANN401
            before = torch.cuda.memory_stats()["allocation.all.allocated"] if self._is_cuda else 0
            result = call(*arguments)
            after = torch.cuda.memory_stats()["allocation.all.allocated"] if self._is_cuda else 0
            self._num_steps += num_steps
            self._num_allocations += after - before
            return result

        return counted

    def found(self) -> dict[str, int]:
        self._compiles.__exit__(None, None, None)
        return {
            "num_steps": self._num_steps,
            "num_allocations": self._num_allocations,
            "num_compilations": self._counts.num_compiled + self._counts.num_found,
        }


def watch(opened: "OpenEngine", made: Sequence[Any], case: Case) -> dict[str, Any]:
    """Run long prompts together; record each group's pages and the running sequences after every step."""
    from holdfast.request.sampling_params import SamplingParams

    scheduler, engine = opened.engine.scheduler, opened.engine
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for index, prompt in enumerate(made):
        engine.add_request(f"watched-{index}", prompt, params)
    most: dict[str, int] = {}
    most_each: dict[str, int] = {}
    running, num_steps, num_tokens, end = [], 0, 0, time.monotonic() + case.watch_seconds
    while engine.has_unfinished() and time.monotonic() < end:
        before = sum(sequence.num_computed for sequence in scheduler.running)
        engine.step()
        num_steps += 1
        num_tokens += max(0, sum(sequence.num_computed for sequence in scheduler.running) - before)
        running.append(scheduler.num_running)
        for name, count in scheduler.pages_by_group().items():
            most[name] = max(most.get(name, 0), count)
        for sequence in scheduler.running:
            for group, table in zip(scheduler.groups, sequence.tables, strict=True):
                held = sum(page >= 0 for page in table)
                most_each[group.name] = max(most_each.get(group.name, 0), held)
    return {
        "num_steps": num_steps,
        "num_pages": scheduler.pool.num_pages,
        "most_pages": most,
        "most_pages_of_a_sequence": most_each,
        "most_running": max(running),
        "num_preemptions": scheduler.num_preemptions,
        "num_tokens": num_tokens,
        "is_whole": not engine.has_unfinished(),
    }


# --- in the parent process


def roof_rate(batch: int, context: float, read: Mapping[str, Any], num_distinct: float = 0.0) -> float:
    """Return tokens a second if a step only reads the required bytes, at the device's rate, with `num_distinct` experts a layer."""
    weight_bytes = read["weight_bytes"]
    if read["num_experts"]:
        weight_bytes -= read["expert_bytes"] * (1 - num_distinct / read["num_experts"])
    kv_bytes = sum(num_bytes * min(context, window or context) for num_bytes, window in read["kv_layers"])
    return batch * READ_BYTES_PER_SECOND / (weight_bytes + batch * (kv_bytes + read.get("sequence_bytes", 0)))


def rows_of(case: Case, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one engine."""
    if "error" in found and "report" not in found:
        return [{"measure": case.label, "unit": "count", "values": {}, "error": found["error"]}]
    rows: list[dict[str, Any]] = []
    planned, measured = found["planned_bytes"], found.get("measured_bytes")
    if measured:
        percent = round(100 * (measured - planned) / planned, 3)
        values = {"planned": round(planned / GIB, 3), "measured": round(measured / GIB, 3)}
        rows.append({"measure": f"{case.label}, memory", "unit": "GiB", "values": values, "percent": percent})
    tokens = {"groups": found["kv_tokens"], "all layers whole": found["tokens_without_groups"]}
    rows.append(
        {
            "measure": f"{case.label}, tokens that fit",
            "unit": "tokens",
            "values": {name: count for name, count in tokens.items() if count is not None},
            "contexts_that_fit": round(found["contexts_that_fit"], 2),
        }
    )
    if found["beside_pages"]["state of a sequence"]:
        rows.append({"measure": f"{case.label}, beside the pages", "unit": "bytes", "values": found["beside_pages"]})
    counted = {entry["batch"]: entry["distinct_experts"] for entry in found["decode"] if "distinct_experts" in entry}
    rows += [
        decode_row(case, {"distinct_experts": counted.get(entry["batch"]), **entry}, found["read"])
        for entry in found["decode"]
    ]
    if "watched" in found:
        watched = found["watched"]
        values = {"most at once": watched["most_running"], "preemptions": watched["num_preemptions"]}
        rows.append(
            {
                "measure": f"{case.label}, sequences of {case.prompt_tokens}",
                "unit": "count",
                "values": values,
                **watched,
            }
        )
    rows.append({"measure": f"{case.label}, after ready", "unit": "count", "values": found.get("after_ready", {})})
    return rows


def decode_row(case: Case, entry: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one batch size after one context."""
    batch = entry["batch"]
    seconds = {int(length): runs for length, runs in entry["seconds"].items()}
    context = mean_context(entry["context"], case.lengths)
    distinct = distinct_of(entry, read["num_experts"], read["top_k"])
    rate, roof = decode_rate(batch, case.lengths, seconds), roof_rate(batch, context, read, distinct["measured"])
    row = {
        "measure": f"{case.label}, decode, batch {batch}" + (f", context {entry['context']}" if case.contexts else ""),
        "unit": "tokens/s",
        "values": {"holdfast": round(rate, 2)},
    }
    row |= {"roof": round(roof, 2), "percent_of_roof": round(100 * rate / roof, 1)}
    if read["num_experts"]:
        row["distinct_experts"] = distinct
    if "graph_seconds" in entry:
        row["graph_alone"] = round(batch / entry["graph_seconds"], 2)
    if case.contexts:
        row |= {key: entry[key] for key in ("tokens_found", "num_preemptions")}
    return row


def main() -> None:
    """Run the requested parts while time allows."""
    parser = options("Models with sliding windows: plan, speed, pages by cache group")
    run(parser, TINY_CASES, CASES, "gpu-groups", "groups")


def run(
    parser: argparse.ArgumentParser,
    tiny_cases: Mapping[str, Case],
    full_cases: Mapping[str, Case],
    section: str,
    name: str,
) -> None:
    """Run the cases of a command line and write their record; a child process runs one case."""
    parser.add_argument("--cases", default="", help=f"some of {', '.join(full_cases)}, with commas; else all")
    parser.add_argument("--contexts", default="", help="such as 8193: instead of the contexts of each case")
    arguments = parser.parse_args()
    cases = tiny_cases if arguments.tiny else full_cases
    contexts = tuple(int(context) for context in arguments.contexts.split(",") if context)
    if contexts:
        cases = {key: case._replace(contexts=contexts) for key, case in cases.items()}
    if arguments.child is not None:
        found = run_case(cases[arguments.child], arguments.tiny, arguments.device, arguments.result)
        leave(found, arguments.result)
        return
    found = measure_all(cases, [case for case in arguments.cases.split(",") if case] or [*cases], arguments)
    results = [row for case, entry in found.items() for row in rows_of(cases[case], entry)]
    facts = {
        "read_bytes_per_second": READ_BYTES_PER_SECOND,
        "groups": {case: entry.get("groups") for case, entry in found.items()},
        "start_seconds": {case: entry.get("start_seconds") for case, entry in found.items()},
    }
    facts["engine_settings"] = {case: cases[case].settings for case in found}
    words = ", ".join(cases[case].model for case in found)
    record = make_record(section, results, words, "dummy weights", arguments, facts)
    lines = [
        (
            row["measure"],
            json.dumps(row["values"]),
            row.get("percent_of_roof", row.get("percent", "")),
            shown_experts(row.get("distinct_experts")),
        )
        for row in results
    ]
    print_table(words, ("", "", "%", "experts"), lines)
    write_record(
        record, "-".join(filter(None, (name, arguments.cases, arguments.contexts))).replace(",", "-"), arguments
    )


def measure_all(
    cases: Mapping[str, Case], chosen: Sequence[str], arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure each engine in its own process."""
    budget, found = Budget(arguments.budget_seconds), {}
    for name in chosen:
        if budget.left_seconds < MIN_SECONDS:
            print(f"{name} is left out: no time")
            continue
        before = used_bytes()
        shared = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
        command = [sys.argv[0], "--child", name, "--contexts", arguments.contexts, *shared]
        entry = run_child(command, budget.left_seconds, lambda: {"used_bytes": used_bytes()})
        if entry.get("used_bytes") is not None and before is not None:
            entry["measured_bytes"] = entry["used_bytes"] - before
        found[name] = entry
        print(json.dumps({"case": name, "outcome": entry.get("error", "ok")}))
        sys.stdout.flush()
    return found


if __name__ == "__main__":
    main()

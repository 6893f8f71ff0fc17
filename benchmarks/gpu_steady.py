"""Check that no memory is taken after ready, and that graphs equal eager steps: python benchmarks/gpu_steady.py [--model NAME]

Requests start and end so that the number of sequences changes at every step. Prompts of the decode runs are in the prefix
cache up to their last token. So a new request adds one row, at any context, and every step is a decode step. Counted inside
Runner.launch and collect: allocations, segments, host waits, moved tensors; and compilations in all. Compared to the bit:
logits of a replayed graph and of the same step run eagerly in place, at every context from 1 to the longest and back; logits
with and without NaN in free pages, in the workspace and in unused places of the block table.

One process runs the default engine, one batch_invariant=True. There, steps that are not padded to a graph's size must give
equal bits too.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_records import Budget, keep, leave, make_record, options, print_table, run_child, write_record

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

MODES = {"default": "as it is", "invariant": "batch invariant"}
MIN_CHANGES = 0.8
"""Least share of steps with a new number of sequences. If the host runs ahead, an end can cancel a change."""
MIN_SECONDS = 20.0
"""Least remaining seconds to start a process."""


class Shape(NamedTuple):
    """Size of the run."""

    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_memory: str = "2GiB"
    cached_pages: tuple[int, ...] = (0, 0, 1, 2, 3, 7, 15, 16, 31, 60, 125, 250)
    """Whole pages of the prompts in decode runs, which have one token more."""
    fresh_tokens: tuple[int, ...] = (1, 2, 15, 16, 17, 40, 100, 250, 400, 700, 3000)
    """Lengths of prompts in mixed runs."""
    num_decode_steps: int = 1000
    num_mixed_steps: int = 150
    num_compared_steps: int = 60
    num_poisoned_steps: int = 40
    num_strict_steps: int = 30


FULL = Shape()
TINY = Shape(256, 4, 64, "1MiB", (0, 1, 2, 5), (1, 15, 17, 70), 40, 20, 15, 12, 5)


class Trace(NamedTuple):
    """Results of requests, step by step."""

    tokens: list[dict[str, tuple[int, ...]]]
    num_errors: int


class Traffic(NamedTuple):
    """Requests that start and end; they depend only on the seed, not on the answers."""

    prompts: Sequence[list[int]]
    seed: int
    most: int
    """Sequences at once."""
    most_change: int
    """Change from the last step."""

    def drive(self, opened: "OpenEngine", num_steps: int, before_step: Callable[[], object] = lambda: None) -> Trace:
        """Run steps, each with a new number of sequences; the first sequence stays until the end."""
        engine, dice = opened.engine, Random(self.seed)
        live, number, last_size, num_errors = ["first"], 0, 0, 0
        engine.add_request("first", {"prompt_token_ids": [1]}, sampling(0, num_steps + 1, self.seed))
        tokens: list[dict[str, tuple[int, ...]]] = []
        for _ in range(num_steps):
            sizes = range(max(1, last_size - self.most_change), min(self.most, last_size + self.most_change) + 1)
            size = dice.choice([size for size in sizes if size != last_size])
            while len(live) > size:
                engine.abort(live.pop(dice.randrange(1, len(live))))
            while len(live) < size:
                number += 1
                prompt = dice.choice(self.prompts)
                params = sampling(number, dice.randint(2, 60), self.seed)
                live.append(engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params))
            last_size = len(live)
            before_step()
            deltas = engine.step()
            engine.raise_if_dead()
            tokens.append({delta.request_id: delta.token_ids for delta in deltas})
            num_errors += sum(delta.error is not None for delta in deltas)
            gone = {delta.request_id for delta in deltas if delta.finish_reason is not None}
            live = [name for name in live if name not in gone]
            assert live[:1] == ["first"], f"the first sequence has ended: {deltas[0]}"
        engine.abort_all()
        return Trace(tokens, num_errors)


def sampling(number: int, max_tokens: int, seed: int) -> Any:  # noqa: ANN401 imported late, with torch
    """Return greedy, random, penalised and log-probability params in turn, determined by the numbers."""
    from holdfast.request.sampling_params import SamplingParams

    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 3},
    )
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed + number, **kinds[number % len(kinds)])


def different_tokens(one: Trace, other: Trace) -> tuple[int, int]:
    """Return the count of common tokens of both traces, and how many differ."""
    num_compared = num_different = 0
    for mine, yours in zip(one.tokens, other.tokens, strict=True):
        for name in mine.keys() | yours.keys():
            num_compared += 1
            num_different += mine.get(name) != yours.get(name)
    return num_compared, num_different


def different_rows(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Like `different_tokens`, for fingerprints of logits; a row in only one trace differs."""
    num_compared = num_different = 0
    for mine, yours in zip(one, other, strict=True):
        num_compared += max(len(mine), len(yours))
        num_different += sum(a != b for a, b in zip(mine, yours, strict=False)) + abs(len(mine) - len(yours))
    return num_compared, num_different


class Bench:
    """One engine and all runs on it."""

    def __init__(
        self, opened: "OpenEngine", shape: Shape, device: str, is_invariant: bool, result: Path | None = None
    ) -> None:
        import torch
        from gpu_insides import Ears, Poison, Watch

        self.opened, self.shape, self.is_invariant, self.result = opened, shape, is_invariant, result
        self.ears = Ears(opened)
        self.watch = Watch(opened, torch.device(device))
        self.poison = Poison(opened, torch.device(device))
        dice, vocab_size, page_tokens = Random(1), opened.runner.vocab_size, opened.runner.limits.page_tokens
        self.cached = [
            [dice.randrange(vocab_size) for _ in range(page_tokens * count + 1)] for count in shape.cached_pages
        ]
        self.fresh = [
            [dice.randrange(vocab_size) for _ in range(length)] for length in shape.fresh_tokens for _ in range(20)
        ]
        self.phases: list[dict[str, Any]] = []
        self.comparisons: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Run all parts; the last may end the engine."""
        self.steady()
        self.in_place()
        self.poisoned()
        self.strict()
        return {"phases": self.phases, "comparisons": self.comparisons}

    def traffic(self, kind: str) -> Traffic:
        """Return traffic with the prefix cache that this kind of run needs."""
        while self.opened.core.in_flight:
            self.opened.engine.step()
        self.opened.llm.reset_prefix_cache()
        if kind == "mixed":
            # Few at a time, so that most steps contain prompts and some only prompts.
            return Traffic(self.fresh, 3, self.shape.max_num_seqs, 2)
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in self.cached]
        self.opened.llm.generate(prompts, sampling(0, 1, 0), progress=False)
        return Traffic(self.cached, 2, self.shape.max_num_seqs, self.shape.max_num_seqs)

    def steady(self) -> None:
        """Count over long runs with graphs and without."""
        for kind, num_steps in (("decode", self.shape.num_decode_steps), ("mixed", self.shape.num_mixed_steps)):
            with_graphs = self.phase(f"{kind}, graphs", kind, num_steps)
            with self.ears.eager():
                eager = self.phase(f"{kind}, eager", kind, num_steps)
            name = f"tokens, {kind} steps: graphs against eager steps that are not padded"
            self.compared(name, different_tokens(with_graphs, eager), self.is_invariant)

    def phase(self, name: str, kind: str, num_steps: int, sync_mode: str = "warn") -> Trace:
        traffic, num_replays = self.traffic(kind), self.ears.num_replays
        with self.watch.watching(sync_mode) as found:
            trace = traffic.drive(self.opened, num_steps)
        num_replays = self.ears.num_replays - num_replays
        row = {"phase": name, "num_replays": num_replays, "num_errors": trace.num_errors, **asdict(found)}
        still = ("num_allocations", "num_segments", "reserved_growth_bytes", "num_syncs")
        still += ("num_compilations", "num_moved", "num_errors")
        has_changes = row["num_batch_changes"] >= MIN_CHANGES * num_steps
        varies = kind == "mixed" or (has_changes and row["num_decode_steps"] == row["num_steps"] >= num_steps)
        self.phases.append({**row, "holds": varies and not any(row[name] for name in still)})
        keep({"phases": self.phases, "comparisons": self.comparisons}, self.result)
        return trace

    def in_place(self) -> None:
        """Repeat every replayed step in place without its graph."""
        for kind in ("decode", "mixed"):
            traffic = self.traffic(kind)
            with self.ears.listening(compare=True) as heard:
                traffic.drive(self.opened, self.shape.num_compared_steps)
            result = (heard.num_compared, heard.num_mismatched)
            self.compared(f"logits, {kind} steps: graph against eager in place", result, True, heard.num_wild)
        with self.ears.listening(compare=True) as heard:
            longest = self.run_to_the_end()
        result = (heard.num_compared, heard.num_mismatched)
        name = f"logits, captured at 1, replayed up to {longest} tokens and back: graph against eager in place"
        self.compared(name, result, True, heard.num_wild)

    def run_to_the_end(self) -> int:
        """Run one sequence to the longest context, among short ones that outlive it."""
        engine, shape, num_long = self.opened.engine, self.shape, min(12, self.shape.max_model_len // 8)
        self.opened.llm.reset_prefix_cache()
        long = [number % 97 for number in range(shape.max_model_len - num_long)]
        engine.add_request("long", {"prompt_token_ids": long}, sampling(0, num_long, 0))
        num_steps = -(-len(long) // (shape.max_num_batched_tokens - 2)) + num_long + 20
        for name in ("short", "shorter"):
            num_tokens = min(num_steps, shape.max_model_len - 2)
            engine.add_request(name, {"prompt_token_ids": [5]}, sampling(0, num_tokens, 0))
        num_generated = 0
        while engine.has_unfinished():
            deltas = engine.step()
            engine.raise_if_dead()
            num_generated += sum(len(delta.token_ids) for delta in deltas if delta.request_id == "long")
        return len(long) + num_generated - 1  # the last one is never computed

    def poisoned(self) -> None:
        """Compare equal runs, clean and poisoned, and check that poison in owned pages is noticed.

        No step is in flight when poison is spread.
        """
        core = self.opened.core
        run_ahead, core.run_ahead = core.run_ahead, 0
        for kind in ("decode", "mixed"):
            rows = []
            for before_step in (lambda: None, self.poison.spread):
                traffic = self.traffic(kind)
                with self.ears.listening() as heard:
                    traffic.drive(self.opened, self.shape.num_poisoned_steps, before_step)
                rows.append(heard.rows)
            name = f"logits, {kind} steps: NaN in free pages, workspace and unused page table"
            self.compared(name, different_rows(*rows), True, heard.num_wild)
        self.compared("NaN in a page that is read: noticed", (1, 0 if self.poison_is_noticed() else 1), True)
        core.run_ahead = run_ahead

    def poison_is_noticed(self) -> bool:
        """Check that a sequence with poisoned pages ends with an error."""
        engine = self.opened.engine
        engine.add_request("victim", {"prompt_token_ids": self.cached[-1]}, sampling(0, 8, 0))
        engine.step()
        tables = [pages for sequence in engine.scheduler.running for pages in sequence.tables]
        self.poison.fill([page for pages in tables for page in pages if page >= 0])
        deltas = engine.step()
        engine.abort_all()
        self.opened.llm.reset_prefix_cache()
        return any(delta.error is not None for delta in deltas)

    def strict(self) -> None:
        """Run a few steps in which a wait for the device raises."""
        for kind in ("decode", "mixed"):
            try:
                self.phase(f"{kind}, graphs, a wait raises", kind, self.shape.num_strict_steps, "error")
            except Exception as error:
                self.phases.append({"phase": f"{kind}, graphs, a wait raises", "error": str(error), "holds": False})
                return

    def compared(self, name: str, result: tuple[int, int], must_hold: bool, num_wild: int = 0) -> None:
        num_compared, num_different = result
        holds = num_compared > 0 and num_different == 0 and num_wild == 0
        row = {"comparison": name, "num_compared": num_compared, "num_different": num_different, "num_wild": num_wild}
        self.comparisons.append({**row, "must_hold": must_hold, "holds": holds})
        keep({"phases": self.phases, "comparisons": self.comparisons}, self.result)


def engine_options(mode: str, shape: Shape) -> dict[str, Any]:
    """Return the options of an engine."""
    return {
        "max_model_len": shape.max_model_len,
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "kv_cache_memory": shape.kv_cache_memory,
        "batch_invariant": mode == "invariant",
    }


def run_mode(
    mode: str, model: str, shape: Shape, tiny: bool, device: str, result: Path | None = None
) -> dict[str, Any]:
    """Run one mode in its own process."""
    from gpu_engines import open_engine

    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(model, Path(folder), tiny, device, **engine_options(mode, shape))
    return Bench(opened, shape, device, mode == "invariant", result).run()


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return phases and comparisons of all engines as results of a record."""
    results = []
    for mode, entry in found.items():
        for row in (*entry.get("phases", ()), *entry.get("comparisons", ())):
            values = {name: value for name, value in row.items() if type(value) is int}
            measure = f"{MODES[mode]}: {row.get('phase') or row['comparison']}"
            results.append({"measure": measure, "unit": "count", "values": values or {"num_steps": 0}, **row})
    return results


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables at the end of a run."""
    columns = ("stretch", "steps", "decode", "batch changes", "replays", "longest")
    columns += ("allocations", "segments", "reserved", "compiled", "moved", "waits", "errors", "holds")
    keys = ("num_steps", "num_decode_steps", "num_batch_changes", "num_replays", "longest_context")
    keys += ("num_allocations", "num_segments", "reserved_growth_bytes", "num_compilations", "num_moved")
    keys += ("num_syncs", "num_errors")
    phases = [row for row in results if "phase" in row]
    lines = [
        (row["measure"], *(row.get(key) for key in keys), "yes" if row["holds"] else row.get("error", "no")[:80])
        for row in phases
    ]
    print_table("Steps after ready", columns, lines)
    words = {(True, True): "yes", (True, False): "yes", (False, True): "NO", (False, False): "not measured"}
    lines = [
        (
            *(row["measure"], row["num_compared"], row["num_different"], row["num_wild"]),
            words[row["holds"], row["must_hold"]],
        )
        for row in results
        if "comparison" in row
    ]
    print_table("To the bit", ("comparison", "compared", "different", "wild padding", "equal"), lines)


def main() -> None:
    """Run both engines while time allows."""
    parser = options("Steps after ready take nothing, and graphs compute what eager steps compute")
    parser.add_argument("--model", default="Qwen3-0.6B", help="a model of the catalogue")
    parser.add_argument("--only", default="", help="default or invariant alone")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else FULL
    if arguments.child is not None:
        found = run_mode(arguments.child, arguments.model, shape, arguments.tiny, arguments.device, arguments.result)
        leave(found, arguments.result)
        return
    budget, found = Budget(arguments.budget_seconds), {}
    for mode in arguments.only.split(",") if arguments.only else MODES:
        if budget.left_seconds < MIN_SECONDS:
            print(f"{mode} is left out: no time")
            continue
        start = budget.spent_seconds
        shared = ["--device", arguments.device, "--model", arguments.model, *(["--tiny"] if arguments.tiny else [])]
        found[mode] = run_child([sys.argv[0], "--child", mode, *shared], budget.left_seconds)
        seconds = round(budget.spent_seconds - start, 1)
        print(json.dumps({"engine": MODES[mode], "seconds": seconds, "error": found[mode].get("error")}), flush=True)
    results = rows_of(found)
    errors = {mode: entry["error"] for mode, entry in found.items() if "error" in entry}
    if not results:
        sys.exit(f"error: no engine ran: {errors}; see above")
    holds = not errors and all(row["holds"] or not row.get("must_hold", True) for row in results)
    settings = {mode: {"model": arguments.model, "options": engine_options(mode, shape)} for mode in found}
    facts = {"holds": holds, "errors": errors, "shape": shape._asdict(), "engine_settings": settings}
    dtype = "bfloat16" if arguments.device.startswith("cuda") else "float32"
    record = make_record("gpu-steady", results, arguments.model, f"{dtype}, dummy weights", arguments, facts)
    show(results)
    print(f"\nall holds: {holds}")
    write_record(record, "steady", arguments)


if __name__ == "__main__":
    main()

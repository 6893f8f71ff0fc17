"""Sums and gathers among 2 and 4 ranks over symmetric memory, on one GPU under MPS: python benchmarks/gpu_exchange.py

Each rank is a process. Correctness comes first (exchange_ranks.py): every kind of call to the bit, in eager steps and in a
graph replayed a hundred times. Then a graph of a hundred sums of 16 x 5120 in bfloat16, for every block size and signal of
the kernel, beside torch's own one-shot all-reduce; then other sizes and calls. Times are microseconds a call on the slowest
rank.

One GPU stands in for several: signals and buffers do not cross a link. Without MPS ranks take turns, and a call takes
milliseconds; then only correctness is checked.

On a CPU, to see that it runs: python benchmarks/gpu_exchange.py --tiny --device cpu
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exchange_ranks import (
    FULL,
    TINY,
    Checks,
    Sizes,
    capture,
    leave,
    open_rank,
    rank_options,
    run_ranks,
    wait_for_others,
)
from gpu_records import Budget, make_record, options, print_table, write_record
from mps import OVERLAP, mps

from holdfast.distributed.exchange import Exchange
from holdfast.distributed.symmetric import SymmetricExchange
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows_triton
from holdfast.kernels.exchange.gather_rows import rendezvous_triton
from holdfast.kernels.exchange.signals import ATOMIC, RELAXED
from holdfast.kernels.exchange.sum_rows import Tiles, sum_rows_triton

RANKS = (2, 4)
NUM_CALLS = 100
"""Calls in a graph."""
NUM_RUNS = 20
GOALS = {2: 6.0, 4: 10.0}
"""Goals in microseconds for a sum of 16 x 5120."""
ROWS = (1, 4, 16, 64, 256, 2048)
LIMIT_SECONDS = 44.0
"""Time limit for one number of ranks."""
VARIANTS: dict[str, tuple[Tiles | None, bool]] = {
    "as chosen": (None, False),
    "release, 1024": (Tiles(1024, 4), False),
    "release, 2048": (Tiles(2048, 8), False),
    "release, 2048, PDL": (Tiles(2048, 8, pdl=True), False),
    "release, 2048, 4 warps, PDL": (Tiles(2048, 4, pdl=True), False),
    "release, 4096, PDL": (Tiles(4096, 16, pdl=True), False),
    "release, 4096, 8 warps, PDL": (Tiles(4096, 8, pdl=True), False),
    "relaxed, 2048": (Tiles(2048, 8, RELAXED), False),
    "relaxed, 2048, PDL": (Tiles(2048, 8, RELAXED, pdl=True), False),
    "relaxed, 4096, PDL": (Tiles(4096, 16, RELAXED, pdl=True), False),
    "atomic, 2048": (Tiles(2048, 8, ATOMIC), False),
    "two passes, 2048": (Tiles(2048, 8), True),
}
"""Relaxed signals are measured, not used: see kernels/exchange/signals.py."""
STREAM_TILES = tuple(Tiles(*sizes, pdl=True) for sizes in ((1024, 4), (2048, 8), (4096, 16), (8192, 8), (8192, 16)))
"""Tiles of the sum onto a stream with the next norm deferred (kernels/exchange/add_rows.py)."""


# --- in a rank


def microseconds(call: Callable[[], None], device: str, num_calls: int = NUM_CALLS) -> float:
    """Return microseconds of a call in a graph of many, the median over replays."""

    def calls() -> None:
        for _ in range(num_calls):
            call()

    call()
    replay = capture(calls, device)
    if device == "cpu":
        begin = time.perf_counter()
        replay()
        return (time.perf_counter() - begin) / num_calls * 1e6
    for _ in range(3):
        replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(NUM_RUNS)]
    for begin_event, end_event in events:
        begin_event.record()
        replay()
        end_event.record()
    torch.cuda.synchronize()
    times = sorted(begin_event.elapsed_time(end_event) for begin_event, end_event in events)
    return times[len(times) // 2] / num_calls * 1e3


def timed_variants(exchange: SymmetricExchange, sizes: Sizes, facts: dict[str, Any], result: Path) -> None:
    """Time the kernel alone, over both buffers in turn, and torch's own."""
    shape = (16, sizes.hidden)
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for turn in range(2):
        exchange.peer_rooms(turn, torch.bfloat16)[exchange.rank].fill_(1.0)
    exchange.end_step()
    ranks = exchange.ranks
    turns = [0]

    def rooms() -> tuple[torch.Tensor, ...]:
        turns[0] = 1 - turns[0]
        return exchange.peer_rooms(turns[0], torch.bfloat16)

    def in_two_kernels() -> None:
        rendezvous_triton(ranks)
        sum_rows_triton(rooms(), out, ranks._replace(signals=None), Tiles(2048, 8), two_passes=False)

    calls: dict[str, Callable[[], object]] = {
        name: lambda tiles=tiles, two=two: sum_rows_triton(rooms(), out, ranks, tiles, two_passes=two)
        for name, (tiles, two) in VARIANTS.items()
    }
    stream, scaled, squares = (
        torch.zeros(shape, dtype=dtype, device="cuda") for dtype in (out.dtype, out.dtype, torch.float32)
    )
    for tiles in STREAM_TILES:
        for begins_next in (True, False):
            name = f"onto a stream, {tiles.block}, {tiles.num_warps} warps{', begins the next' if begins_next else ''}"
            calls[name] = lambda tiles=tiles, begins_next=begins_next: add_rows_triton(
                rooms(), DeferredStream(stream, stream[0], scaled, squares), ranks, tiles, begins_next
            )
    calls["signal kernel, then sum kernel"] = in_two_kernels
    calls["meeting alone"] = lambda: rendezvous_triton(ranks)
    calls["torch one-shot"] = torch_one_shot(exchange, shape)
    for name, call in calls.items():
        try:
            facts["variants"][name] = round(microseconds(lambda call=call: void(call()), "cuda"), 2)
        except Exception as error:  # a variant that this version cannot compile must not hide the others
            facts["variants"][name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.synchronize()
        leave(facts, result)


def void(_: object) -> None:
    """Drop a call's result."""


def torch_one_shot(exchange: SymmetricExchange, shape: tuple[int, int]) -> Callable[[], object]:
    """Return torch's own one-shot all-reduce over the same memory."""
    room = exchange.peer_rooms(0, torch.bfloat16)[exchange.rank][: shape[0] * shape[1]]
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(room, "sum", exchange.group_name)


def timed_calls(exchange: Exchange, sizes: Sizes, device: str, facts: dict[str, Any], result: Path) -> None:
    """Time calls through the exchange, like a model's."""
    bf16, size, num_calls = torch.bfloat16, exchange.size, 4 if device == "cpu" else NUM_CALLS

    def put(name: str, call: Callable[[], object]) -> None:
        facts["calls"][name] = round(microseconds(lambda: void(call()), device, num_calls), 2)
        exchange.end_step()
        leave(facts, result)

    for rows in (rows for rows in ROWS if rows <= sizes.max_rows):
        out = torch.empty(rows, sizes.hidden, dtype=bf16, device=device)
        put(
            f"sum {rows} x {sizes.hidden}",
            lambda rows=rows, out=out: exchange.sum_rows(exchange.room(rows, sizes.hidden, bf16), out),
        )
    norm_weight, squares = torch.ones(sizes.hidden, dtype=bf16, device=device), torch.empty(16 * 8, device=device)
    for rows in (1, 16):
        x, scaled = (torch.zeros(rows, sizes.hidden, dtype=bf16, device=device) for _ in range(2))
        put(
            f"sum {rows} x {sizes.hidden} onto a stream, norm deferred",
            lambda rows=rows, x=x, scaled=scaled: exchange.add_rows(
                exchange.room(rows, sizes.hidden, bf16), DeferredStream(x, norm_weight, scaled, squares)
            ),
        )
    for width in (sizes.hidden // size, 5 * sizes.hidden // size):
        out = torch.empty(16, width * size, dtype=bf16, device=device)
        put(
            f"gather 16 x {width}",
            lambda width=width, out=out: exchange.gather_columns(exchange.room(16, width, bf16), out),
        )
    rows, share = sizes.logit_rows, -(-sizes.vocab // size)
    width = min(share, sizes.vocab - exchange.rank * share)
    part = torch.zeros(rows, width, device=device)
    out = exchange.whole_logits(rows) if exchange.rank == 0 else None
    put(
        f"logits {rows} x {sizes.vocab}, and a meeting",
        lambda: (exchange.gather_logits(part, out), exchange.end_step()),
    )
    small, both = torch.zeros(16, 2, device=device), torch.zeros(size, 16, 2, device=device)
    put("argmax of 16 rows", lambda: exchange.gather_small(small, both))
    ids = torch.zeros(16, dtype=torch.int64, device=device)
    put("16 tokens", lambda: exchange.share_tokens(ids))


def run_rank(arguments: argparse.Namespace, sizes: Sizes) -> None:
    """Run checks, then timings; write the results so far after each."""
    begin = time.perf_counter()
    facts: dict[str, Any] = {"variants": {}, "calls": {}}
    mesh, exchange = open_rank(arguments, sizes)
    facts["open_seconds"] = round(time.perf_counter() - begin, 1)
    leave(facts, arguments.result)
    checks = Checks(mesh, exchange, arguments.device, sizes)
    for name in ("all_calls", "graph"):
        getattr(checks, name)()
        facts |= {"checked": name, "wrong": checks.wrong, "num_checked": checks.num_checked}
        facts[f"{name}_seconds"] = round(time.perf_counter() - begin, 1)
        leave(facts, arguments.result)
    if not checks.wrong and not arguments.checks_only:
        if isinstance(exchange, SymmetricExchange):
            timed_variants(exchange, sizes, facts, arguments.result)
        timed_calls(exchange, sizes, arguments.device, facts, arguments.result)
    wait_for_others(arguments)
    exchange.close()


# --- in the parent process


def slowest(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the slowest rank's value by name, or a rank's error text."""
    names = found[0].get(kind, {})
    gathered = {name: [entry.get(kind, {}).get(name) for entry in found] for name in names}
    return {
        name: max(values) if all(isinstance(value, float) for value in values) else str(values)
        for name, values in gathered.items()
    }


def rows_of(size: int, found: list[dict[str, Any]], hidden: int) -> list[dict[str, Any]]:
    """Return the rows of one number of ranks."""
    wrong = [line for entry in found for line in entry.get("wrong", ["nothing was checked"])]
    errors = [entry["error"] for entry in found if "error" in entry]
    rows: list[dict[str, Any]] = [
        {
            "measure": f"{size} ranks, checks",
            "unit": "count",
            "values": {"checked": sum(entry.get("num_checked", 0) for entry in found), "wrong": len(wrong)},
            "wrong": wrong[:20],
            "errors": errors,
        }
    ]
    for kind, name in (("variants", f"sum of 16 x {hidden}"), ("calls", "calls")):
        values = slowest(found, kind)
        if values:
            rows.append({"measure": f"{size} ranks, {name}", "unit": "us", "values": values, "goal": GOALS.get(size)})
    return rows


def main() -> None:
    """Run all ranks, or one of them."""
    parser = options("Sums and gathers among ranks over symmetric memory")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    rank_options(parser)
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else FULL
    if arguments.rank is not None:
        run_rank(arguments, sizes)
        return
    budget, results, facts = Budget(min(arguments.budget_seconds, 86.0)), [], {}
    with mps() if arguments.device == "cuda" else contextlib.nullcontext({}) as environment:
        for size in map(int, arguments.ranks.split(",")):
            command = [__file__, "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
            command += ["--checks-only"] if arguments.checks_only or environment is None else []
            limit = min(LIMIT_SECONDS, budget.left_seconds)
            found = run_ranks(command, size, limit, environment or OVERLAP)
            if environment and not any("checked" in entry for entry in found):
                print(f"{size} ranks under MPS: nothing was checked; once more without", file=sys.stderr)
                found += run_ranks([*command, "--checks-only"], size, budget.left_seconds, OVERLAP)
            results += rows_of(size, found, sizes.hidden)
            facts[f"{size} ranks"] = [{key: entry[key] for key in entry if key.endswith("seconds")} for entry in found]
            for entry in found:
                if "error" in entry:
                    print(entry["error"], file=sys.stderr)
    for row in results:
        print_table(row["measure"], ("", row["unit"]), [(name, value) for name, value in row["values"].items()])
        print(json.dumps({key: row[key] for key in row if key in ("wrong", "errors", "goal")}))
    settings = "all ranks on one GPU" + (", under MPS" if environment is not None else ", taking turns")
    write_record(make_record("gpu-exchange", results, "no model", settings, arguments, facts), "exchange", arguments)


if __name__ == "__main__":
    main()

"""Engines on 1, 2 and 4 ranks, all on one GPU under MPS: python benchmarks/gpu_ranks.py

Qwen3-32B's shapes, or with --model another model's, with fewer layers, dummy weights, bfloat16, sums in graphs. Each part
is a process with its own time limit:

    exact   batch_invariant: tokens of 2 and 4 ranks equal those of one, greedy and sampled
    reduce  every rank's own argmax equals rank 0's token; then 1,000 steps without an allocation on any rank,
            and planned against taken memory
    experts like reduce, with whole experts on each rank
    stages  batch_invariant: tokens of 2 stages equal those of one rank; then 1,000 steps as in reduce
    nodes   ranks started like a launcher's, each as a node, so that they exchange by NCCL: tokens as in exact, allocators
            as in reduce; then one is killed in the middle of an answer
    links   like nodes, with two stages, each on a node of its own; ranks within a stage exchange over symmetric memory
    trace   DeepSeek-V4 without graphs: what each part of a layer takes and gives has the bits of one rank (traced_layers.py)

Tokens of reduce are compared with one rank's too, for information: sums are rounded to bfloat16 in parts, so a choice among
near logits may differ, and then all that follow.

Ranks do not record their own counts while speed is measured.

Memory of a rank on the shared GPU: bytes reserved by torch's allocator, its symmetric memory, and an equal part of the
device's other use (contexts, code, graphs). So all ranks add up to the device's figure. All ranks are on one GPU: tokens a
second show the cost of exchanges and processes, not the speed of several GPUs. Nodes are simulated: NCCL treats each process
as a separate host, and uses this machine's sockets.

On a CPU, to see that it runs: python benchmarks/gpu_ranks.py --tiny --device cpu
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from counted_rank import COUNT_FILE, FOLDER, LATE_FILE, PLAIN_FILE, TELL_AT, device_counts, open_counted, tell_later
from dummy_models import tiny_settings, write_dummy_model
from gpu_records import Budget, keep, make_record, options, used_bytes, write_record
from mps import OVERLAP, mps, pretended_node
from traced_layers import first_difference

from holdfast.models.catalogue import find_model

MODEL = "Qwen3-32B"
PARTS = (("reduce", 2), ("reduce", 4), ("exact", 1), ("exact", 2), ("exact", 4), ("stages", 2), ("reduce", 1))
PARTS += (("nodes", 2), ("nodes", 4), ("links", 2), ("links", 4))
ENTRY_PARTS = (("exact", 1), ("exact", 2), ("exact", 4), ("trace", 1), ("trace", 2), ("reduce", 2), ("reduce", 1))
ENTRY_PARTS += (("experts", 2), ("reduce", 4))
"""Parts of DeepSeek-V4, whose exact ranks have whole experts and need no batch_invariant."""
ON_NODES = ("nodes", "links")
SUMMED = ("reduce", "experts")
GATHERED = ("exact", "trace")
TRACED_TOKENS = 8
PART_SECONDS = {1: 35.0, 2: 40.0, 4: 45.0}
BUDGET_SECONDS = 285.0
MIN_SECONDS = 10.0
TELL_SECONDS = 4.0
"""Seconds before the end of a part when its ranks dump their stacks."""
STEADY_SECONDS = 10.0
END_SECONDS = 3.0
"""Seconds for a launcher's ranks to end after the first."""
FREE_SECONDS = 8.0
"""Seconds for the device to free memory after a part was killed."""
MAX_PERCENT = 1.0
MAX_NOTICE_SECONDS = 2.5
FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')
PROGRAM = Path(__file__).parent / "counted_rank.py"
START_SECONDS = 120.0
"""Seconds until a part is ready, with kernels not compiled yet; its time limit starts after that."""


class Shape(NamedTuple):
    """Size of the run."""

    num_layers: int = 2
    num_prompts: int = 8
    num_tokens: int = 64
    num_steps: int = 1000
    max_model_len: int = 512
    max_num_batched_tokens: int = 256
    kv_cache_memory: str = "512MiB"


FULL, TINY = Shape(), Shape(2, 3, 6, 20, 64, 64, "4MiB")
ENTRIES = Shape(num_layers=4, max_num_batched_tokens=64, kv_cache_memory="1GiB")
"""Windows alone, chosen entries and entries of 128 tokens; experts by table and by score."""


def has_entries(model: str) -> bool:
    """Return True for a DeepSeek-V4."""
    return "compress_ratios" in find_model(model)[1]


def shape_of(model: str, tiny: bool) -> Shape:
    """Return the size of a model's run."""
    if tiny:
        return TINY._replace(max_model_len=128, kv_cache_memory="64MiB") if has_entries(model) else TINY
    return ENTRIES if has_entries(model) else FULL


def settings_of(model: str, tiny: bool) -> dict[str, Any]:
    """Return the settings that replace those of the model's config.json."""
    if tiny:
        return tiny_settings(model)
    num_layers = shape_of(model, tiny).num_layers
    ratios = find_model(model)[1].get("compress_ratios")
    return {"num_hidden_layers": num_layers} | (
        {"compress_ratios": ratios[:num_layers]} if isinstance(ratios, list) else {}
    )


# --- in the process of a part


def run_part(model: str, mode: str, num_ranks: int, tiny: bool, device: str, result: Path) -> dict[str, Any]:
    """Run one engine; return its tokens, its speed, and with several ranks the counts of each."""
    import holdfast.engine.build as engine_build
    from holdfast.api.llm import LLM
    from holdfast.engine import rank_build

    shape, before = shape_of(model, tiny), used_bytes()
    folder = Path(os.environ[FOLDER])
    if os.environ.get("RANK", "0") == "0":
        tell_later(0)
    path = write_dummy_model(folder, model, **settings_of(model, tiny))
    kept, build_ranks, command = [], engine_build.build_ranks, (sys.executable, "-P", str(PROGRAM))
    # For a rank that a launcher started: LLM does not return there.
    rank_build.build_rank = partial(open_counted, open_plain=rank_build.build_rank)  # type: ignore[assignment]
    (folder / f"pid-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))

    def build_counted(*given: Any, **named: Any) -> Any:  # noqa: ANN401 handed on as it is
        kept.append(build_ranks(*given, command=command, **named))
        return kept[0]

    engine_build.build_ranks = build_counted
    begin = time.perf_counter()
    llm = LLM(
        *(str(path),),
        load_format="dummy",
        device=device,
        tensor_parallel_size=tensor_size(mode, num_ranks),
        pipeline_parallel_size=num_ranks // tensor_size(mode, num_ranks),
        enable_expert_parallel=num_ranks > 1 and (mode == "experts" or (mode in GATHERED and has_entries(model))),
        enforce_eager=mode == "trace",
        tensor_parallel_sums=sums_of(model, mode, num_ranks),
        batch_invariant=mode not in SUMMED and not has_entries(model),
        max_model_len=shape.max_model_len,
        max_num_seqs=max(8, shape.num_prompts),
        max_num_batched_tokens=shape.max_num_batched_tokens,
        kv_cache_memory=shape.kv_cache_memory,
        on_progress=lambda done, total: None,
    )
    found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1)}
    keep(found, result)
    with llm:
        shared = symmetric_bytes(kept[0].built.plan) if kept and mode not in ON_NODES else 0
        found |= look_at(llm, folder, num_ranks, before, shared)
        keep(found, result)
        if mode == "trace":
            from traced_layers import trace

            core: Any = llm.engine.core
            prints = trace((kept[0].built.runner if kept else core.runner).model, num_ranks)
            answers(llm, shape, 0, min(shape.num_tokens, TRACED_TOKENS))
            return found | {"prints": [list(one) for one in prints]}
        found |= {"tokens": answers(llm, shape, 0, shape.num_tokens, has_sampled=mode not in SUMMED)}
        keep(found, result)
        (folder / PLAIN_FILE).touch()
        found |= speed(llm, shape)
        (folder / PLAIN_FILE).unlink()
        keep(found, result)
        if has_entries(model) or mode in (*SUMMED, "stages", *ON_NODES):
            found |= steady(llm, folder, shape, num_ranks)
            keep(found, result)
        if mode in ON_NODES:
            found["killed"] = lose_one(llm, folder, shape, num_ranks - 1)
            keep(found | {"is_done": True}, result)  # under MPS a killed process destroys the contexts of all others
        begin = time.perf_counter()
    return found | {"close_seconds": round(time.perf_counter() - begin, 2)}


def sums_of(model: str, mode: str, num_ranks: int) -> str:
    """Return how sums are made: batch_invariant chooses exact ones, and DeepSeek-V4 has none."""
    if mode in SUMMED:
        return "reduce"
    return "exact" if num_ranks > 1 and mode in GATHERED and has_entries(model) else "auto"


def tensor_size(mode: str, num_ranks: int) -> int:
    """Return the number of ranks that share layers."""
    return {"stages": 1, "links": num_ranks // 2}.get(mode, num_ranks)


def lose_one(llm: Any, folder: Path, shape: Shape, rank: int) -> dict[str, Any]:  # noqa: ANN401
    """Kill a rank in the middle of an answer; return the seconds until the caller gets an error, and its text."""
    killed: list[float] = []

    def kill() -> None:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Timer(0.2, kill).start()
    end = time.monotonic() + 8.0
    try:
        while time.monotonic() < end:
            answers(llm, shape, seed=5, num_tokens=shape.max_model_len // 2)
    except Exception as error:
        return {"seconds": round(time.monotonic() - killed[0], 3) if killed else None, "words": str(error)[:300]}
    return {"seconds": None, "words": "no error was seen"}


def answers(
    llm: Any,  # noqa: ANN401 imported late, with torch
    shape: Shape,
    seed: int,
    num_tokens: int,
    *,
    has_sampled: bool = False,
) -> list[list[int]]:
    """Answer prompts drawn from the seed; greedy, or every third of them sampled."""
    from holdfast.request.sampling_params import SamplingParams

    dice = Random(seed)
    most = max(2, shape.max_model_len // 4)
    prompts = [
        {"prompt_token_ids": [dice.randrange(250) for _ in range(dice.randint(1, most))]}
        for _ in range(shape.num_prompts)
    ]
    params = [
        SamplingParams(
            temperature=0.8 if has_sampled and nth % 3 == 2 else 0.0, seed=nth, max_tokens=num_tokens, ignore_eos=True
        )
        for nth in range(shape.num_prompts)
    ]
    outputs = llm.generate(prompts, params, progress=False)
    errors = [str(output.error) for output in outputs if output.error is not None]
    assert not errors, errors[0]
    return [list(output.outputs[0].token_ids) for output in outputs]


def speed(llm: Any, shape: Shape) -> dict[str, Any]:  # noqa: ANN401
    """Measure tokens a second of all prompts together, prefill included, and of one alone."""
    begin = time.perf_counter()
    answers(llm, shape, seed=1, num_tokens=shape.num_tokens)
    together = time.perf_counter() - begin
    begin = time.perf_counter()
    answers(llm, shape._replace(num_prompts=1), seed=2, num_tokens=shape.num_tokens)
    alone = time.perf_counter() - begin
    return {
        "tokens_per_second": round(shape.num_prompts * shape.num_tokens / together, 1),
        "tokens_per_second_of_one": round(shape.num_tokens / alone, 1),
    }


def steady(llm: Any, folder: Path, shape: Shape, num_ranks: int) -> dict[str, Any]:  # noqa: ANN401
    """Run many steps; return every rank's allocator counts."""
    (folder / COUNT_FILE).touch()
    answers(llm, shape, seed=3, num_tokens=2)  # one-time work of a rank is done by now
    before, at_first = device_counts(), rank_files(folder, num_ranks)
    most = shape.max_model_len // 2
    left, seed, end = shape.num_steps, 4, time.monotonic() + STEADY_SECONDS
    while left > 0 and time.monotonic() < end:
        answers(llm, shape, seed, num_tokens=min(most, left))
        left, seed = left - most, seed + 1
    after, at_last = device_counts(), rank_files(folder, num_ranks)
    grown = {0: {key: after[key] - before[key] for key in after}}
    for rank in range(1, num_ranks):
        grown[rank] = {key: at_last[rank][key] - at_first[rank][key] for key in after}
        grown[rank]["steps"] = at_last[rank]["counted_steps"] - at_first[rank]["counted_steps"]
    kept = ("compared", "different", "misses")
    return {"grown": grown, "own": {rank: {key: facts[key] for key in kept} for rank, facts in at_first.items()}}


def rank_files(folder: Path, num_ranks: int) -> dict[int, dict[str, Any]]:
    """Read the files of the other ranks, after they had time to write them."""
    time.sleep(0.3)
    return {rank: json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(1, num_ranks)}


def look_at(
    llm: Any,  # noqa: ANN401
    folder: Path,
    num_ranks: int,
    before: int | None,
    symmetric: int,
) -> dict[str, Any]:
    """Return planned and taken bytes of each rank."""
    memory = llm.memory
    planned = {0: memory.phase_bytes["serve"]} | {rank.rank: rank.planned_bytes for rank in memory.ranks}
    rows = {row.owner: row for row in memory.rows}
    found: dict[str, Any] = {"planned_bytes": planned, "owners": sorted(rows)}
    used = used_bytes()
    if used is None or before is None:
        return found
    reserved = {0: device_counts()["reserved_bytes"]}
    reserved |= {rank: facts["reserved_bytes"] for rank, facts in rank_files(folder, num_ranks).items()}
    others = (used - before - sum(reserved.values()) - num_ranks * symmetric) / num_ranks
    measured = {rank: int(reserved[rank] + symmetric + others) for rank in reserved}
    return found | {
        "measured_bytes": measured,
        "reserved_bytes": reserved,
        "symmetric_bytes": symmetric,
        "context_bytes": int(others),
    }


def symmetric_bytes(plan: Any) -> int:  # noqa: ANN401 a RunnerPlan, imported late
    """Return a rank's symmetric memory in bytes; all ranks have equal."""
    from holdfast.distributed.exchange_plan import rounding_bytes, shared_specs
    from holdfast.memory.workspace_plan import arena_bytes

    needs, mesh = plan.exchange_needs, plan.mesh
    return arena_bytes(shared_specs(needs, mesh).values()) + rounding_bytes(needs, mesh)


# --- in the parent process


def rows_of(found: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each result."""
    rows: list[dict[str, Any]] = []
    of_one = {
        is_summed: found.get((mode, 1), {}).get("tokens") for is_summed, mode in ((True, "reduce"), (False, "exact"))
    }
    for (mode, size), entry in found.items():
        label = f"{size} ranks, {mode}"
        if "error" in entry:
            rows.append({"measure": label, "unit": "count", "values": {}, "holds": False, "error": entry["error"]})
        if "prints" in entry and size > 1 and ("trace", 1) in found:
            values = first_difference(found["trace", 1].get("prints", ()), entry["prints"])
            where = {key: values.pop(key) for key in ("first", "place", "rows") if key in values}
            row = {"measure": f"{label}: parts of layers against one", "unit": "count", "values": values}
            rows.append(row | {"holds": not values["different"], "first_difference": where or None})
        is_summed, wanted = mode in SUMMED, of_one[mode in SUMMED]
        if size > 1 and "tokens" in entry and wanted is not None:
            both = [
                (a, b)
                for one, other in zip(wanted, entry["tokens"], strict=True)
                for a, b in zip(one, other, strict=True)
            ]
            values = {"compared": len(both), "different": sum(a != b for a, b in both)}
            holds = not values["different"]
            first = next((place for place, (a, b) in enumerate(both) if a != b), None)
            row = {"measure": f"{label}: tokens against one", "unit": "count", "values": values}
            row |= {"same_until": same_until(wanted, entry["tokens"])} if is_summed else {"holds": holds}
            rows.append(row | ({} if first is None else {"first_difference": [first, *both[first]]}))
        if "own" in entry and mode in SUMMED and size > 1:  # only the last stage has an argmax, for all rows of a graph
            values = {
                f"rank {rank} {key}": facts[key]
                for rank, facts in entry["own"].items()
                for key in ("compared", "different")
            }
            holds = all(facts["compared"] and not facts["different"] for facts in entry["own"].values())
            words = {rank: facts["misses"] for rank, facts in entry["own"].items()}
            rows.append(
                {
                    "measure": f"{label}: argmax of each rank",
                    "unit": "count",
                    "values": values,
                    "holds": holds,
                    "misses": words,
                }
            )
        if "grown" in entry:
            values = {
                f"rank {rank} {key}": count for rank, facts in entry["grown"].items() for key, count in facts.items()
            }
            still = ("allocations", "segments", "reserved_bytes")
            holds = not any(facts[key] for facts in entry["grown"].values() for key in still)
            rows.append({"measure": f"{label}: after ready", "unit": "count", "values": values, "holds": holds})
        if "killed" in entry:
            seconds = entry["killed"]["seconds"]
            holds = seconds is not None and seconds <= MAX_NOTICE_SECONDS
            row = {"measure": f"{label}: one killed, the others' error", "unit": "s", "holds": holds}
            rows.append(row | {"values": {"after": seconds}, "words": entry["killed"]["words"]})
        if "measured_bytes" in entry:
            rows.append(memory_row(label, entry))
        if "tokens_per_second" in entry:
            values = {"together": entry["tokens_per_second"], "one alone": entry["tokens_per_second_of_one"]}
            rows.append({"measure": f"{label}: speed on one GPU", "unit": "tokens/s", "values": values})
    return rows


def same_until(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[int]:
    """Return for each answer the tokens before the first that differs."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(wanted, found, strict=True)]
    return [next((place for place, (a, b) in enumerate(own) if a != b), len(own)) for own in pairs]


def memory_row(label: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return planned and taken bytes, rank by rank."""
    planned, measured = entry["planned_bytes"], entry["measured_bytes"]
    percents = {rank: round(100 * (measured[rank] - planned[rank]) / planned[rank], 3) for rank in planned}
    values = {
        f"rank {rank} {kind}": facts[rank]
        for rank in planned
        for kind, facts in (("planned", planned), ("taken", measured))
    }
    facts = {key: entry[key] for key in ("reserved_bytes", "symmetric_bytes", "context_bytes")}
    holds = all(abs(percent) <= MAX_PERCENT for percent in percents.values())
    return {
        "measure": f"{label}: memory",
        "unit": "bytes",
        "values": values,
        "percent": percents,
        "holds": holds,
        **facts,
    }


def chosen_parts(text: str, model: str) -> Sequence[tuple[str, int]]:
    """Return all parts of a model, or the named ones, such as exact-2,reduce-4."""
    if not text:
        return ENTRY_PARTS if has_entries(model) else PARTS
    return [(mode, int(size)) for mode, _, size in (part.partition("-") for part in text.split(","))]


def main() -> None:
    """Run the requested parts while time allows; write the record after every part."""
    parser = options("Engines on several ranks, all on one GPU")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--parts", default="", help="such as exact-1,exact-2; else all")
    arguments = parser.parse_args()
    if arguments.child is not None:
        mode, _, size = arguments.child.partition("-")
        found = run_part(arguments.model, mode, int(size), arguments.tiny, arguments.device, arguments.result)
        keep(found | {"is_done": True}, arguments.result)
        return
    budget, found = Budget(min(arguments.budget_seconds, BUDGET_SECONDS)), {}
    for mode, size in chosen_parts(arguments.parts, arguments.model):
        if budget.left_seconds < MIN_SECONDS:
            print(f"{mode}-{size} is left out: no time", flush=True)
            continue
        start, before = budget.spent_seconds, used_bytes()
        found[mode, size] = numbered(run_limited(mode, size, min(PART_SECONDS[size], budget.left_seconds), arguments))
        print(json.dumps({"part": f"{mode}-{size}", "seconds": round(budget.spent_seconds - start, 1)}), flush=True)
        show(found, (mode, size))
        write(found, arguments)
        wait_until_free(before)


def run_limited(mode: str, size: int, limit: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in its own process with its own MPS daemon; kill it with all its ranks at its time limit."""
    is_cuda = arguments.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as name, mps() if is_cuda else contextlib.nullcontext(OVERLAP) as environment:
        folder = Path(name)
        result, facts = folder / "result.json", folder / "output.txt"
        shared = ["--device", arguments.device, "--result", str(result), "--model", arguments.model]
        shared += ["--tiny"] if arguments.tiny else []
        own = {FOLDER: name, TELL_AT: str(time.time() + limit - TELL_SECONDS)}
        command = [sys.executable, __file__, "--child", f"{mode}-{size}", *shared]
        nodes = node_environments(size, 2 if mode == "links" else size) if mode in ON_NODES else [{}]
        children = []
        for place, node in enumerate(nodes):
            with facts.with_name(f"{place}-output.txt" if place else facts.name).open("w") as out:
                everybodys = {**os.environ, **(environment or OVERLAP), **own, **node}
                children.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=everybodys))
        child = children[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait_part(child, folder, limit)
        is_late = child.poll() is None
        end_all(children)
        kept = result.with_suffix(".kept")
        found = json.loads(kept.read_text()) if kept.exists() else {}
        if found.pop("is_done", False):
            return found
        words = [line for line in facts.read_text(errors="replace").splitlines() if not line.startswith("frame #")][
            -25:
        ]
        stands = [
            f"{path.stem}: {shortened(path.read_text(errors='replace'))}" for path in sorted(folder.glob("*-*.txt"))
        ]
        how = f"it took more than {limit:.0f} s" if is_late else f"it ended with {child.returncode}"
        return {**found, "error": "\n".join([how, *words, *(stands if is_late else [])])}


def node_environments(size: int, num_nodes: int) -> list[dict[str, str]]:
    """Return a launcher's environments. Each rank has its own NCCL host id, because two on one host may not share a GPU."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    num_local = size // num_nodes
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(num_local)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [(str(rank), *map(str, divmod(rank, num_local))) for rank in range(size)]
    facts = [{"RANK": rank, "GROUP_RANK": node, "LOCAL_RANK": local} for rank, node, local in places]
    return [shared | own | pretended_node(int(own["RANK"])) for own in facts]


def end_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the first process and those that exit with it; kill the others and the ranks that it started."""
    end = time.monotonic() + END_SECONDS * (children[0].poll() is not None)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, end - time.monotonic()))
        if child.poll() is None:
            child.kill()
        child.wait()


def shortened(stacks: str) -> str:
    """Return each thread's innermost frames on one line; a text without threads is unchanged."""
    frames = [
        [f"{Path(place).stem}:{line}:{name}" for place, line, name in FRAME.findall(thread)]
        for thread in stacks.split("most recent call first")[1:]
    ]
    return "\n  ".join(" < ".join(own[:10]) for own in frames) or stacks[-500:]


def wait_part(child: "subprocess.Popen[bytes]", folder: Path, limit: float) -> None:
    """Wait until it ends; raise TimeoutExpired if it was not ready in time, or not done at its limit after that."""
    kept, end = folder / "result.kept", time.monotonic() + START_SECONDS
    while child.poll() is None and not kept.exists() and time.monotonic() < end:
        time.sleep(0.05)
    if kept.exists():
        end = time.monotonic() + limit
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=max(0.0, end - TELL_SECONDS - time.monotonic()))
        return
    (folder / LATE_FILE).touch()
    child.wait(timeout=TELL_SECONDS)


def wait_until_free(before: int | None) -> None:
    """Wait until the device has freed a part's memory, at most some seconds."""
    end = time.monotonic() + FREE_SECONDS
    while before is not None and time.monotonic() < end and (used_bytes() or 0) > before + 2**28:
        time.sleep(0.3)


def show(found: Mapping[tuple[str, int], Mapping[str, Any]], part: tuple[str, int]) -> None:
    """Print the results of one part."""
    ones = ("exact", 1), ("reduce", 1), ("trace", 1)
    own = {part: found[part]} | {key: entry for key, entry in found.items() if key in ones}
    label = f"{part[1]} ranks, {part[0]}"
    for row in rows_of(own):
        if row["measure"].startswith(label):
            kept = {
                key: row[key]
                for key in ("values", "percent", "holds", "misses", "first_difference", "same_until", "words")
                if row.get(key) is not None
            }
            print(row["measure"], json.dumps(kept), flush=True)
            if "error" in row:
                print(row["error"], file=sys.stderr, flush=True)


def write(found: Mapping[tuple[str, int], Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Write the record of all parts so far."""
    facts = {
        "start_seconds": {f"{mode}-{size}": entry.get("start_seconds") for (mode, size), entry in found.items()},
        "measured": "per rank: torch reserved + symmetric memory + an equal part of what else the device lost",
    }
    num_layers = shape_of(arguments.model, arguments.tiny).num_layers
    settings = f"dummy weights, {num_layers} layers; all ranks on one GPU under MPS"
    section, name = ("gpu-ranks", "ranks") if arguments.model == MODEL else ("gpu-entry-ranks", "entry-ranks")
    write_record(make_record(section, rows_of(found), arguments.model, settings, arguments, facts), name, arguments)


def numbered(entry: dict[str, Any]) -> dict[str, Any]:
    """Turn JSON's string keys back into numbers of ranks."""
    kinds = ("planned_bytes", "measured_bytes", "reserved_bytes", "grown", "own")
    return entry | {kind: {int(rank): facts for rank, facts in entry[kind].items()} for kind in kinds if kind in entry}


if __name__ == "__main__":
    main()

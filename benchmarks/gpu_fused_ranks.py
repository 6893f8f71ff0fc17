"""Decode steps of tensor parallel ranks with and without the fused decode path, all on one GPU under MPS: python benchmarks/gpu_fused_ranks.py

Qwen3-32B's shapes with fewer layers, dummy weights, bfloat16; a rank is a process. For each number of rows a step is captured in several
variants and replayed in turn, so that compared variants run within the same minute:

    fused      products write parts that peers read; one kernel adds them up and onto the stream, with the next norm deferred
               (next in turn: the next kernel begins after this one has ended, not after the barrier with peers)
    two steps  like fused, but the sum and the norm are two kernels
    plain      the unfused path: norm, product, sum

Each row attends to one token. Beside the times: each variant's logits against the last, whether the stream has equal bits on
every rank, and the allocator's counts during replays. All ranks share one GPU: times compare kernels and exchanges, and say
nothing about several GPUs.

A CPU never uses the fused path; to see that the script runs: python benchmarks/gpu_fused_ranks.py --tiny --device cpu
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dummy_models import tiny_settings, write_dummy_model
from exchange_ranks import capture, leave, rank_options, run_ranks, wait_for_others
from gpu_records import Budget, make_record, options, write_record
from mps import OVERLAP, mps

from holdfast.config import EngineConfig
from holdfast.distributed import symmetric
from holdfast.distributed.collectives import open_collectives
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.mesh import ALONE, Mesh, meshes
from holdfast.distributed.rendezvous import LOOPBACK, listen_for_ranks
from holdfast.distributed.symmetric import open_symmetric
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, ResidualStream, defer_rms_norm
from holdfast.layers import moe
from holdfast.loading.model_files import open_model
from holdfast.memory.ledger import Ledger
from holdfast.models import fused_decode
from holdfast.models.layer_stack import LayerStack
from holdfast.planning.target import device_target
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.build import RunnerBuild, plan_model
from holdfast.runner.runner import Runner

MODEL = "Qwen3-32B"
RANKS = (1, 2, 4)
ROWS = (1, 4, 16)
NUM_REPLAYS = 40
NUM_ROUNDS = 5
LIMIT_SECONDS = 45.0
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
"""Settings of a tiny model: widths that the fused path supports on four ranks too, without keys the model lacks."""


# --- in a rank


def build(arguments: argparse.Namespace, mesh: Mesh, path: Path, facts: dict[str, Any]) -> tuple[RunnerBuild, Runner]:
    """Build a rank like an engine does, without warm-up or capture."""
    is_cuda = arguments.device == "cuda"
    config = EngineConfig.from_options(
        load_format="dummy",
        device=arguments.device,
        dtype="bfloat16" if is_cuda else "float32",
        quantization=arguments.quantization,
        tensor_parallel_size=mesh.tensor_size,
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory="64MiB",
        weight_cache="off",
    )
    model, target = open_model(str(path), "dummy"), device_target(arguments.device)
    load, plan = plan_model(config, model, target, mesh=mesh)
    own = RunnerBuild(config, model, plan, Ledger(), torch.device(arguments.device))
    begin = time.perf_counter()
    own.load(load, lambda done, total: None)
    facts["load_seconds"] = round(time.perf_counter() - begin, 1)
    if not mesh.is_alone:
        own.connect(connect(arguments, mesh, plan.exchange_needs))
    return own, own.assemble()


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that replace the model's."""
    if not arguments.tiny:
        return {"num_hidden_layers": arguments.layers}
    settings = tiny_settings(arguments.model)
    wide = {key: value for key, value in WIDE.items() if key in settings}
    return settings | wide | ({"num_key_value_heads": WIDE["num_attention_heads"]} if "kv_lora_rank" in wide else {})


def connect(arguments: argparse.Namespace, mesh: Mesh, needs: Any) -> Exchange:  # noqa: ANN401 None on one rank alone
    """Connect ranks: symmetric memory on a GPU, gloo on a CPU."""
    place = listen_for_ranks(port=arguments.port) if mesh.rank == 0 else (LOOPBACK, arguments.port)
    open_exchange = open_symmetric if arguments.device == "cuda" else open_collectives
    return open_exchange(mesh, needs, place, torch.device(arguments.device), Ledger())


def add_in_two_steps(exchange: Exchange, part_TH: torch.Tensor, stream: ResidualStream) -> NormedRows:
    """Replace `add_part`: the sum overwrites the scaled rows, which are read first."""
    exchange.sum_rows(part_TH, stream.scaled_MN)
    return defer_rms_norm(stream, stream.scaled_MN)


@contextlib.contextmanager
def two_steps() -> Any:  # noqa: ANN401 a generator of nothing
    """Run sums and norms as separate kernels inside the block."""
    kept = fused_decode.add_part
    try:
        fused_decode.add_part = moe.add_part = add_in_two_steps
        yield
    finally:
        fused_decode.add_part = moe.add_part = kept


@contextlib.contextmanager
def next_in_turn() -> Any:  # noqa: ANN401 a generator of nothing
    """Start no kernel before a sum onto the stream has ended."""
    kept = symmetric.add_rows_triton
    try:
        symmetric.add_rows_triton = partial(kept, begins_next=False)
        yield
    finally:
        symmetric.add_rows_triton = kept


def ways_of(model: LayerStack, is_alone: bool) -> dict[str, Any]:
    """Return each variant as a function from a batch and its plan to logits."""

    def apart(batch: Any, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own types
        with two_steps():
            return model.step_logits(batch, plan)

    ways: dict[str, Any] = {"plain": lambda batch, plan: model.logits(model.hidden(batch, plan))}

    def in_turn(batch: Any, plan: Any) -> torch.Tensor:  # noqa: ANN401
        with next_in_turn():
            return model.step_logits(batch, plan)

    if model.fused is not None:
        ways |= {"fused": model.step_logits}
        ways |= {} if is_alone else {"two steps": apart, "fused, next in turn": in_turn}
    return ways


def one_token_each(runner: Runner, num_rows: int) -> LiveStep:
    """Return a batch with the first token of this many sequences."""
    scheduled = []
    for index in range(num_rows):
        tables = [[place * num_rows + index] for place, _ in enumerate(runner.groups)]
        ids = [97 * (index + 1) % runner.vocab_size]
        sequence = Sequence(index, ids, 1, SamplingParams(), seed=0, max_tokens=4, tables=tables)
        sequence.slot = index
        scheduled.append(ScheduledSequence.of(sequence, 0, 1))
    return LiveStep(tuple(scheduled))


@torch.inference_mode()
def measure(
    runner: Runner, exchange: Exchange | None, num_rows: int, arguments: argparse.Namespace, facts: dict[str, Any]
) -> None:
    """Measure all variants of a step of this many rows, round by round."""
    model: Any = runner.model
    batch = runner.buffers.fill(one_token_each(runner, num_rows), list(range(num_rows)), num_rows, num_rows)
    plan = runner.backend.plan(batch, captured=arguments.device == "cuda")
    replays, logits, own = {}, {}, facts["rows"].setdefault(str(num_rows), {"us": {}, "digests": {}, "off": {}})
    for name, way in ways_of(model, exchange is None).items():

        def step(way: Callable[..., torch.Tensor] = way) -> None:
            logits[0] = way(batch, plan)
            if exchange is not None:
                exchange.end_step()

        step()
        logits[name] = logits[0].clone()
        stream = model.acquire(model.requests(num_rows).stream)["x"] if name != "plain" else logits[0]
        own["digests"][name] = hashlib.sha256(stream.float().cpu().numpy().tobytes()).hexdigest()[:12]
        replays[name] = capture(step, arguments.device)
        leave(facts, arguments.result)
    wanted = logits["plain"]
    for name in replays:
        own["off"][name] = float((logits[name] - wanted).square().mean().sqrt() / wanted.std())
    before = torch.cuda.memory_stats()["allocation.all.allocated"] if arguments.device == "cuda" else 0
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(1 if arguments.tiny else NUM_ROUNDS):
        for name, replay in replays.items():
            times[name].append(timed(replay, arguments.device, 2 if arguments.tiny else NUM_REPLAYS))
    own["us"] = {name: round(sorted(values)[len(values) // 2], 1) for name, values in times.items()}
    after = torch.cuda.memory_stats()["allocation.all.allocated"] if arguments.device == "cuda" else 0
    own["allocations"] = after - before
    leave(facts, arguments.result)


def timed(replay: Callable[[], None], device: str, num_replays: int) -> float:
    """Return microseconds of one replay."""
    if device != "cuda":
        begin = time.perf_counter()
        replay()
        return (time.perf_counter() - begin) * 1e6
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin_event.record()
    for _ in range(num_replays):
        replay()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / num_replays * 1e3


def run_rank(arguments: argparse.Namespace) -> None:
    """Run one rank; write the results so far after each part."""
    if arguments.tell_after is not None:
        faulthandler.dump_traceback_later(arguments.tell_after)
    mesh = ALONE if arguments.size == 1 else meshes(arguments.size)[arguments.rank]
    begin = time.perf_counter()
    facts: dict[str, Any] = {"rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = write_dummy_model(Path(folder), arguments.model, **settings_of(arguments))
        own, runner = build(arguments, mesh, path, facts)
    facts["start_seconds"] = round(time.perf_counter() - begin, 1)
    facts["takes_it"] = runner.model.fused is not None  # type: ignore[attr-defined]
    leave(facts, arguments.result)
    for num_rows in ROWS:
        measure(runner, own.exchange, num_rows, arguments, facts)
    facts["all_seconds"] = round(time.perf_counter() - begin, 1)
    leave(facts, arguments.result)
    wait_for_others(arguments)
    own.release()


# --- in the parent process


def rows_of(size: int, num_layers: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each number of rows: the slowest rank's times."""
    rows = []
    for num_rows in map(str, ROWS):
        entries = [entry["rows"][num_rows] for entry in found if entry.get("rows", {}).get(num_rows, {}).get("us")]
        if len(entries) < size:
            continue
        times = {name: max(entry["us"][name] for entry in entries) for name in entries[0]["us"]}
        ways = [name for name in times if name != "plain"]
        rows.append(
            {
                "measure": f"{size} ranks, {num_layers} layers, {num_rows} rows",
                "unit": "us",
                "values": times,
                "ratio": {name: round(times["plain"] / times[name], 3) for name in ways},
                "same_bits": all(len({entry["digests"][name] for entry in entries}) == 1 for name in ways),
                "off": {name: max(entry["off"][name] for entry in entries) for name in ways},
                "allocations": sum(entry["allocations"] for entry in entries),
            }
        )
    return rows


def main() -> None:
    """Run all ranks, or one of them."""
    parser = options("Decode steps of ranks with and without the fused decode path")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas")
    parser.add_argument("--model", default=MODEL, help="of the catalogue")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantization", default=None, help="of the weights: none, fp8 or int8")
    rank_options(parser)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    budget, results, facts = Budget(arguments.budget_seconds), [], {}
    with mps() if arguments.device == "cuda" else contextlib.nullcontext(OVERLAP) as environment:
        for size in map(int, arguments.ranks.split(",")):
            command = [
                __file__,
                "--device",
                arguments.device,
                "--layers",
                str(arguments.layers),
                "--model",
                arguments.model,
            ]
            command += ["--tiny"] if arguments.tiny else []
            command += ["--quantization", arguments.quantization] if arguments.quantization else []
            limit = min(LIMIT_SECONDS, budget.left_seconds)
            found = run_ranks(command, size, limit, environment or OVERLAP)
            own = rows_of(size, arguments.layers, found)
            results += own
            facts[f"{size} ranks"] = [{key: entry[key] for key in entry if key.endswith("seconds")} for entry in found]
            for row in own:
                print(json.dumps(row), flush=True)
            for entry in found:
                if "error" in entry:
                    print(entry["error"], file=sys.stderr, flush=True)
    settings = f"dummy weights, {arguments.layers} layers, {arguments.quantization or 'bfloat16'}; all ranks on one GPU under MPS"
    write_record(
        make_record("gpu-fused-ranks", results, arguments.model, settings, arguments, facts), "fused-ranks", arguments
    )


if __name__ == "__main__":
    main()

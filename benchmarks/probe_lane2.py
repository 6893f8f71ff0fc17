"""Probe of prefill over compressed pages by rows of a lane in warpgroups (lane_warpgroups.py), in one run on a Hopper GPU.

    python benchmarks/probe_lane2.py --out FOLDER [--cases WORD] [--no-times] [--seconds 150]

Each case of errors runs in a process of its own with a time limit, many at once. Other processes compile what is timed. Then one
process times captured graphs: plain pages in warpgroups, the present kernel, the lane in Triton, and the lane in warpgroups.
FOLDER/probe_lane2.json holds everything, and is written after each part.

Error: largest error of a head relative to its length, over the tolerance of the tests; above 1 fails. Heads and cut: elements
that differ if a launch has other heads, or a prompt other chunks; must be 0. Pages and lane hold NaN where no token is.

TFLOPS count two products of the pairs that a causal mask leaves. Ratio: time of plain pages, measured before and after each format.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402

from holdfast.kernels.attention import (  # noqa: E402
    lane_rows,
    lane_warpgroups,
    prefill_warpgroups,
    quantized_attention,
    tiled_attention,
)
from holdfast.kernels.attention.lane_rows import Lane, LaneSource  # noqa: E402
from holdfast.kernels.attention.near_tokens import NearPages  # noqa: E402
from holdfast.kernels.attention.paged_attention import Scoring  # noqa: E402
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes  # noqa: E402
from holdfast.kernels.attention.tile_work import TileCall, TileWork  # noqa: E402
from holdfast.kernels.geometry import LANE_BYTES, lane_geometry  # noqa: E402
from holdfast.quant.formats import KVFormat  # noqa: E402
from holdfast.quant.kv_quantize import quantize_keys, quantize_values, rotation_table  # noqa: E402
from kernels.exactness import random  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.lane_cases import near_reference  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.lane_row_cases import by_rows, with_lane, with_near  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.paged_cases import odd_sinks  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.quantized_kv_cases import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    TOLERANCE,
    Cut,
    QuantizedStep,
    cut_tiles,
    quantized_step,
    run_tiles,
)

CASE_SECONDS = 60
NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE = 64, 16, 16
PAGE_TOKENS = 64
FORMATS = {"fp8": (8, 8), "k8v4": (8, 4), "k5v4": (5, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
LARGE = Cut(large=True)
NUM_HEADS, NUM_KV_HEADS = 64, 8
PARTED = ("k8v4", "3bit_nc")
"""Formats whose kernels are timed alone too."""
WIDE_TILES = 16
"""Rows of a tile of 8 heads."""


class Case(NamedTuple):
    """One specialization of both kernels, with all kinds of steps."""

    bits: tuple[int, int] = (4, 4)
    head_dim: int = 128
    group: int = 8
    page_tokens: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None
    near: int | None = None
    """First tokens beside near blocks; None: no near pages."""
    num_sms: int = 132
    has_bias: bool = False


CASES = {
    "first": Case(),
    **{f"{name}, near": Case(bits, near=FIRST_TOKENS) for name, bits in FORMATS.items()},
    "fp8, near, window": Case((8, 8), window=200, near=0, group=4),
    "D 64, float16": Case((4, 4), 64, 7, dtype="float16"),
    "D 96, fp8": Case((8, 8), 96, 5),
    "D 192, near": Case((4, 4), 192, 4, near=FIRST_TOKENS),
    "D 256": Case((4, 4), 256, 4),
    "window 300, sinks": Case((8, 4), window=300, has_sinks=True, group=4, page_tokens=16),
    "near and options": Case((3, 3), group=5, has_sinks=True, softcap=20.0, near=FIRST_TOKENS),
}


class Timed(NamedTuple):
    """One timed step: rows of one sequence after a context, over scattered pages."""

    start: int
    num_rows: int
    head_dim: int = 128
    page_tokens: int = 16


class Step(NamedTuple):
    """One sequence's step on the device."""

    call: TileCall
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    timed: Timed

    @property
    def num_flops(self) -> float:
        pairs = self.timed.num_rows * self.timed.start + self.timed.num_rows * (self.timed.num_rows + 1) / 2
        return 4.0 * NUM_HEADS * self.timed.head_dim * pairs


def make_timed(timed: Timed, device: torch.device) -> Step:
    """Make planes, a shuffled page table and the tile list of a step, longest tiles first."""
    end, page = timed.start + timed.num_rows, timed.page_tokens
    num_pages = -(-end // page)
    shape = (num_pages * page, NUM_KV_HEADS, timed.head_dim)
    k_plane, v_plane = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(timed.num_rows, NUM_HEADS, timed.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.zeros(1, 8192, dtype=torch.int32)
    table[0, :num_pages] = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    height = tiled_attention.tile_rows(NUM_HEADS, NUM_KV_HEADS, large=True)
    work = work_of(timed, height, 0, device, reads_near=True)
    out = torch.empty(timed.num_rows, NUM_HEADS * timed.head_dim, device=device, dtype=torch.bfloat16)
    partial = torch.empty(1, NUM_HEADS * timed.head_dim, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scoring = Scoring(timed.head_dim**-0.5)
    call = TileCall(q, table.to(device), work, scoring, partial, partial, out, num_sms)
    return Step(call, k_plane, v_plane, timed)


def shown(found: dict[str, Any]) -> str:
    """Return a finding in one line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


# --- errors


def make_step(case: Case, rows: list[tuple[int, int]], dtype: torch.dtype) -> QuantizedStep:
    """Make a step over two key heads on scattered pages amid NaN."""
    step = quantized_step(case.bits, rows, case.head_dim, case.group, 2, case.page_tokens, case.window, dtype)
    step.softcap = case.softcap
    step.sinks = odd_sinks(2 * case.group) if case.has_sinks else None
    if case.window is not None:
        step.poison, step.hole = float("nan"), 2**30
    if case.has_bias:
        step.bias, step.rope = (
            random(2, case.head_dim, seed=3, scale=4.0),
            (0.6 ** torch.arange(case.head_dim // 2), 1.2),
        )
    return step


def steps_of(case: Case) -> dict[str, tuple[list[tuple[int, int]], list[Cut]]]:
    """Return steps by name: start and rows of sequences, and how each is cut; with near pages all in one range."""
    steps = {
        "odd lengths": ([(0, 200), (0, 1), (5, 70), (0, 129)], 4 * [LARGE]),
        "contexts": ([(127, 40), (500, 90), (383, 1)], 3 * [LARGE]),
        "beside small tiles": ([(300, 20), (0, 150), (64, 65), (90, 1)], [LARGE, LARGE, LARGE, Cut()]),
    }
    if case.near is not None:
        return {name: steps[name] for name in ("odd lengths", "contexts")}
    return steps


Attend = Callable[..., torch.Tensor]


def make_lane(head_dim: int, device: torch.device) -> Lane:
    """Allocate a lane."""
    geometry = lane_geometry(NUM_HEADS, NUM_KV_HEADS, head_dim)
    return lane_rows.lane_of(torch.empty(LANE_BYTES // 2, dtype=torch.float16, device=device), head_dim, geometry)


def run(case: Case, step: QuantizedStep, cuts: list[Cut], device: torch.device, **options: Any) -> torch.Tensor:
    """Run a step by the lane."""
    near, tiles = None, None
    if case.near is None:
        tiles = cut_tiles(step, cuts)
    else:
        near, _, tiles = with_near(step, case.near, device, max(1, 128 // case.group))
    attend = by_rows(near, **options)
    return run_tiles(step, tiles, device, attend, num_sms=case.num_sms)


def exact_of(case: Case, step: QuantizedStep, cuts: list[Cut]) -> torch.Tensor:
    """Return what plain torch computes."""
    host = torch.device("cpu")
    if case.near is None:
        return run_tiles(step, cut_tiles(step, cuts), host, quantized_attention.quantized_attention_reference).double()
    near, tiles, _ = with_near(step, case.near, host, max(1, 128 // case.group))
    return run_tiles(step, tiles, host, near_reference(near)).double()


def judge(case: Case, device: torch.device, say: Callable[[dict[str, Any]], None]) -> None:
    """Say the error of each step, and the elements that differ between lanes and between cuts."""
    dtype = getattr(torch, case.dtype)
    for name, (rows, cuts) in steps_of(case).items():
        step = make_step(case, rows, dtype)
        out, exact = run(case, step, cuts, device), exact_of(case, step, cuts)
        if bool(out.isfinite().all()):
            off, length = (x.view(-1, case.head_dim).norm(dim=-1) for x in (out.double() - exact, exact))
            say({name: float((off / length.clamp(min=1e-6)).max() / (3 * TOLERANCE[dtype]))})
        else:
            say({name: f"{int((~out.isfinite()).any(-1).sum())} of {len(out)} rows are not finite"})
        if name == "contexts":
            others = (run(case, step, cuts, device, heads=1), run(case, step, cuts, device, more_rows=128))
            say({"heads": sum(int((other.view(torch.int16) != out.view(torch.int16)).sum()) for other in others)})
    say({"cut": differing_cuts(case, device, dtype)})


def differing_cuts(case: Case, device: torch.device, dtype: torch.dtype) -> int:
    """Count elements of a prompt that change if its rows come in other steps."""
    whole = make_step(case, [(70, 330)], dtype)
    (k, v), outs = whole.tokens[0], []
    for counts in ((330,), (77, 253), (1, 200, 129)):
        parts, first = [], 70
        for count in counts:
            end, rows = first + count, slice(first - 70, first - 70 + count)
            part = replace(whole, rows=[(first, count)], q=whole.q[rows], tokens=[(k[:end], v[:end])])
            parts.append(run(case, part, [LARGE], device))
            first = end
        outs.append(torch.cat(parts))
    return sum(int((out.view(torch.int16) != outs[0].view(torch.int16)).sum()) for out in outs[1:])


# --- times


def normal_planes(bits: tuple[int, int], head_dim: int, num_pages: int, device: torch.device) -> QuantizedPlanes:
    """Make pages of normal keys and values. A rotation would leave their distribution as it is."""
    num_slots, storage = num_pages * PAGE_TOKENS, {}
    for plane in KVFormat("any", "uint8", "uint8", *bits).planes(NUM_KV_HEADS, head_dim):
        shape, dtype = (num_slots, *plane.token_shape), getattr(torch, plane.dtype)
        storage[plane.name] = torch.zeros(shape, dtype=dtype, device=device)
    table = rotation_table(head_dim, torch.bfloat16, device)
    planes = QuantizedPlanes.of(storage.__getitem__, *bits, head_dim, PAGE_TOKENS, table)
    for first in range(0, num_slots, 8192):
        slot_X = torch.arange(first, min(num_slots, first + 8192), device=device)
        k_XKD, v_XKD = torch.randn(2, len(slot_X), NUM_KV_HEADS, head_dim, device=device)
        heads = quantize_keys(k_XKD, bits[0]), quantize_values(v_XKD, bits[1])
        planes.store(slot_X // PAGE_TOKENS, slot_X % PAGE_TOKENS, *heads)
    return planes


def random_near(timed: Timed, device: torch.device) -> NearPages:
    """Make near pages of all tokens of a step."""
    num_pages = -(-(timed.start + timed.num_rows) // NEAR_PAGE)
    shape = (num_pages * NEAR_PAGE, NUM_KV_HEADS, timed.head_dim)
    k_plane, v_plane = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.zeros(1, 8192, dtype=torch.int32, device=device)
    table[0, :num_pages] = torch.randperm(num_pages, device=device)
    return NearPages(k_plane, v_plane, table, NEAR_PAGE, NEAR_BLOCK, FIRST_TOKENS)


def measure(run: Callable[[], object], num_flops: float, milliseconds: float = 12.0) -> dict[str, float]:
    """Return the median of five measurements of a graph of several runs."""
    run()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    num_runs = max(1, min(50, int(milliseconds / max(1e-3, begin.elapsed_time(end)))))
    with torch.cuda.graph(graph):
        for _ in range(num_runs):
            run()
    graph.replay()
    found = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / num_runs)
    middle = sorted(found)[2]
    return {"ms": middle, "TFLOPS": num_flops / middle / 1e9, "spread": max(found) / min(found) - 1}


def work_of(timed: Timed, rows: int, near_block: int, device: torch.device, reads_near: bool) -> TileWork:
    """List the tiles of a step, longest first; with near pages over codes alone, or over all tokens."""
    tiles, row = [], 0
    while row < timed.num_rows:
        position = timed.start + row
        count = min(rows, timed.num_rows - row)
        low, high = 0, position + count
        if near_block:
            own = position // near_block * near_block
            count = min(count, own + near_block - position)
            low, high = (0, position + count) if reads_near else (min(FIRST_TOKENS, own), own)
        tiles.append((0, row, count, position, low, high, -1, 1))
        row += count
    tiles.sort(key=lambda tile: tile[4] - tile[5])
    listed = torch.tensor([(0, len(tiles), 0, 0, 0, 0, 0, 0), *tiles], dtype=torch.int32, device=device)
    return TileWork(listed, listed, has_small=False, has_large=True, has_merge=False)


class Timing(NamedTuple):
    """A timed step over compressed pages."""

    step: Step
    call: TileCall
    planes: Any
    near: NearPages | None

    @classmethod
    def of(cls, bits: tuple[int, int], step: Step, has_near: bool) -> "Timing":
        device, timed = step.call.q_THD.device, step.timed
        num_pages = -(-(timed.start + timed.num_rows) // PAGE_TOKENS)
        planes = normal_planes(bits, timed.head_dim, num_pages, device)
        table_NP = torch.zeros_like(step.call.page_table_NP)
        table_NP[0, :num_pages] = torch.randperm(num_pages, device=device)
        call = step.call._replace(page_table_NP=table_NP)
        return cls(step, call, planes, random_near(timed, device) if has_near else None)

    def old(self) -> Callable[[], object]:
        """Return the present kernel."""
        rows = quantized_attention.large_shape(self.planes.key_bits).rows * NUM_KV_HEADS // NUM_HEADS
        block = NEAR_BLOCK if self.near else 0
        call = self.call._replace(work=work_of(self.step.timed, rows, block, self.step.call.q_THD.device, False))
        return lambda: quantized_attention.quantized_attention(call, self.planes, self.near)

    def rows(self, lane: Lane, heads: int | None = None) -> dict[str, Callable[[], object]]:
        """Return the lane in warpgroups, and each of its kernels alone, in all rounds."""
        timed, device = self.step.timed, self.step.call.q_THD.device
        block = NEAR_BLOCK if self.near else 0
        call = self.call._replace(work=work_of(timed, WIDE_TILES, block, device, True))
        call = with_lane(call, self.near, NUM_KV_HEADS)
        assert call.work.lane is not None, "with_lane adds it"
        (plan,) = call.work.lane.rounds
        fitting = lane_geometry(NUM_HEADS, NUM_KV_HEADS, timed.head_dim).heads(plan.num_blocks)
        if heads is not None and heads > max(1, fitting):
            return {}
        of_round, source = heads or fitting, LaneSource(self.planes, self.near)
        rounds = range(0, NUM_KV_HEADS, of_round)

        def fill() -> None:
            for first in rounds:
                lane_rows.fill_lane(call, source, lane, plan, first, min(of_round, NUM_KV_HEADS - first))

        def attend() -> None:
            for first in rounds:
                count = min(of_round, NUM_KV_HEADS - first)
                lane_warpgroups.attend_lane(call, source, lane, plan, first, count)

        def both() -> None:
            for first in rounds:
                count = min(of_round, NUM_KV_HEADS - first)
                lane_rows.fill_lane(call, source, lane, plan, first, count)
                lane_warpgroups.attend_lane(call, source, lane, plan, first, count)

        return {"lane": both, "fill": fill, "attend": attend}


def plain_of(step: Step) -> Callable[[], object]:
    """Return plain pages in warpgroups."""
    return lambda: prefill_warpgroups.attend_prefill(step.call, step.k_plane, step.v_plane, step.timed.page_tokens)


def parts_of() -> list[tuple[str, bool, int]]:
    """Return the ways in which a format is timed: name, near pages, heads of a round."""
    parts = [(f"{heads} heads a round", False, heads) for heads in (8, 4, 2)]
    return parts + [(f"near, {heads} heads a round", True, heads) for heads in (4, 2, 1)]


STEPS = {
    "8K": Timed(0, 8192),
    "2K after 30K": Timed(30720, 2048),
    "8K, D 256": Timed(0, 8192, 256),
}


def time_all(only: str, seconds: float, say: Callable[[dict[str, Any]], None]) -> None:
    """Time all steps and formats that `only` names in part, and say each figure at once."""
    device, begin = torch.device("cuda"), time.monotonic()
    for name, timed in STEPS.items():
        step, lane = make_timed(timed, device), make_lane(timed.head_dim, device)
        plain = plain_of(step)
        for format_name, bits in FORMATS.items():
            if only not in f"{name}, {format_name}" or (timed.head_dim != 128 and format_name != "4bit_nc"):
                continue
            if time.monotonic() - begin > seconds:
                say({"stopped": "out of time"})
                return
            bf16 = measure(plain, step.num_flops)
            say({"step": name, "form": f"bf16 pages, before {format_name}"} | bf16)
            for has_near in (False, True):
                timing = Timing.of(bits, step, has_near)
                timing.old()()
                expected = step.call.out_TX.float()
                for part, part_near, heads in parts_of():
                    runs = timing.rows(lane, heads) if part_near == has_near else {}
                    if not runs:
                        continue
                    found: dict[str, Any] = {"step": name, "format": format_name, "form": part}
                    step.call.out_TX.fill_(float("nan"))
                    runs["lane"]()
                    found["difference to old"] = float((step.call.out_TX.float() - expected).norm() / expected.norm())
                    both = measure(runs["lane"], step.num_flops)
                    found |= both | {"ratio": bf16["ms"] / both["ms"]}
                    if format_name in PARTED:
                        found["attend ms"] = measure(runs["attend"], step.num_flops)["ms"]
                        found["fill ms"] = measure(runs["fill"], step.num_flops, 4.0)["ms"]
                    say(found)
            say({"step": name, "form": f"bf16 pages, after {format_name}"} | measure(plain, step.num_flops))


# --- processes


def warm_names() -> list[str]:
    """List what is compiled before the times, by kind, format and head dim: what takes longest first."""
    names = [f"{kind}:{name}" for kind in ("rows", "near") for name in ("k8v4:128", "fp8:128", "4bit_nc:256")]
    names += [f"{kind}:{name}:128" for name in FORMATS for kind in ("old", "old near")]
    names += [f"{kind}:4bit_nc:256" for kind in ("old", "old near")]
    return [f"warm:{name}" for name in (*names, *(f"fill:{name}:128" for name in FORMATS))]


def warm(name: str, device: torch.device) -> dict[str, Any]:
    """Compile what is timed, by short steps of the same specializations."""
    kind, format_name, dim = name.split(":")
    step = make_timed(Timed(0, 512, int(dim)), device)
    timing = Timing.of(FORMATS[format_name], step, "near" in kind)
    if kind == "rows":
        plain_of(step)()
    if kind.startswith("old"):
        timing.old()()
    elif kind == "fill":
        for has_near in (False, True):
            timing = Timing.of(FORMATS[format_name], step, has_near)
            timing.rows(make_lane(int(dim), device), 2)["fill"]()
    else:
        timing.rows(make_lane(int(dim), device), 2)["lane"]()
    torch.cuda.synchronize()
    return {name: "compiled"}


def child(arguments: argparse.Namespace) -> None:
    """Run one part and print lines of JSON."""

    def say(found: dict[str, Any]) -> None:
        print("FOUND " + json.dumps(found), flush=True)

    torch.set_num_threads(1)  # many of these processes run at once
    kind, _, name = arguments.child.partition(":")
    device = torch.device(arguments.device)
    if kind == "case":
        judge(CASES[name], device, say)
    elif kind == "warm":
        say(warm(name, device))
    else:
        time_all(arguments.cases, arguments.seconds, say)


def run_child(
    name: str, arguments: argparse.Namespace, limit_seconds: float, on_found: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run a part in a process; hand over what it finds at once, and return how it ended."""
    command = [sys.executable, __file__, "--child", name, "--device", arguments.device, "--cases", arguments.cases]
    command += ["--seconds", str(arguments.seconds)]
    begin, variables = time.monotonic(), {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    timer = threading.Timer(limit_seconds, process.kill)
    timer.start()
    others: list[str] = []
    assert process.stdout is not None, "the pipe of the output"
    for line in process.stdout:
        if line.startswith("FOUND "):
            on_found(json.loads(line.removeprefix("FOUND ")))
        else:
            others.append(line)
    timer.cancel()
    code, seconds = process.wait(), time.monotonic() - begin
    end = {} if code == 0 else {"failed": code, "output": "".join(others)[-1500:]}
    return end | {"seconds": seconds}


def main() -> None:
    """Parse the command line; run one part, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of probe_lane2.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="", help="only cases, steps and formats whose names contain this")
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the times")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments)
        return
    begin, record = time.monotonic(), {}
    arguments.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        (arguments.out / "probe_lane2.json").write_text(json.dumps(record, indent=1))

    def run(name: str) -> None:
        found: dict[str, Any] = {}
        end = run_child(name, arguments, CASE_SECONDS, found.update)
        with lock:
            record[name] = [found, end]
            write()
            print(f"[{time.monotonic() - begin:.0f} s] {name}  {shown(found)}  {shown(end)}", flush=True)

    def time_one(found: dict[str, Any]) -> None:
        record["times"].append(found)
        write()
        print(f"[{time.monotonic() - begin:.0f} s] {shown(found)}", flush=True)

    lock = threading.Lock()
    names = [] if arguments.no_times else warm_names()
    names += [] if arguments.no_errors else [f"case:{name}" for name in CASES if arguments.cases in name]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for task in [pool.submit(run, name) for name in names]:
            task.result()
    if not arguments.no_times:
        record["times"] = []
        record["times"].append(run_child("times", arguments, arguments.seconds + 20, time_one))
        write()
    failed = [name for name, found in record.items() if not found or "failed" in found[-1] or is_wrong(found[0])]
    print(f"{len(record) - len(failed)} of {len(record)} parts are right. Others: {failed}", flush=True)


def is_wrong(found: dict[str, Any]) -> bool:
    """Return True if an error is beyond its tolerance, or bits differ."""
    values = [value for name, value in found.items() if name in ("odd lengths", "contexts", "beside small tiles")]
    is_far = any(isinstance(value, str) or value > 1 for value in values)
    return is_far or bool(found.get("heads")) or bool(found.get("cut"))


if __name__ == "__main__":
    main()

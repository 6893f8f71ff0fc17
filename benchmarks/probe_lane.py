"""Probe of prefill over compressed pages by a lane (lane_attention.py): errors, equal bits, speed and resources in one GPU run.

    python benchmarks/probe_lane.py --out FOLDER [--cases WORD] [--no-times]

Each case of errors runs in a process of its own with a time limit, many at once, so one that fails or hangs costs only itself.
Other processes compile the forms that are timed. Then one process times filling and attending, the present kernel over the same
pages, and plain attention over bfloat16 pages. FOLDER/probe_lane.json holds everything, and is written after each part.

Error: largest error of a head relative to its length, over the tolerance of the tests; above 1 fails. Heads and cut: elements
that differ if a launch has other heads, or a prompt other chunks; must be 0. Pages and lane hold NaN where no token is.
Steps of a case: two sequences or more, odd lengths, contexts, splits, small tiles beside. With --device cpu kernels are
interpreted, in float16 alone.

TFLOPS count two products of the pairs that a causal mask leaves. Ratio: speed against bfloat16 pages.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import lane_attention  # noqa: E402
import torch  # noqa: E402
from lane_attention import Lane, LaneForm  # noqa: E402

from holdfast.kernels.attention import quantized_attention, tiled_attention  # noqa: E402
from holdfast.kernels.attention.near_tokens import NearPages  # noqa: E402
from holdfast.kernels.attention.paged_attention import Scoring  # noqa: E402
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes  # noqa: E402
from holdfast.kernels.attention.tile_work import TileCall, TileWork  # noqa: E402
from holdfast.quant.formats import KVFormat  # noqa: E402
from holdfast.quant.kv_quantize import rotation_table  # noqa: E402
from kernels.exactness import random  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.lane_cases import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    by_lane,
    near_pages,
    near_reference,
    near_tiles,
)
from kernels.paged_cases import odd_sinks  # noqa: E402  # pyright: ignore[reportMissingImports]
from kernels.quantized_kv_cases import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    TOLERANCE,
    Cut,
    QuantizedStep,
    cut_tiles,
    quantized_step,
    run_tiles,
)
from kernels.tiled_cases import Tiles  # noqa: E402  # pyright: ignore[reportMissingImports]

CASE_SECONDS = 75
"""Limit of a process of errors: import, a few compilations, small launches, the reference."""
TIME_SECONDS = 60
NEAR_BLOCK, FIRST_TOKENS, NEAR_PAGE = 64, 16, 16
PAGE_TOKENS = 64
LARGE, SPLITS = Cut(large=True), Cut(large=True, splits=3)
FORMATS = {"fp8": (8, 8), "k8v4": (8, 4), "k5v4": (5, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
FORMS = {
    "64 tokens, 2 stages": LaneForm(64),
    "64 tokens, 3 stages": LaneForm(64, 3),
    "64 tokens, 4 stages": LaneForm(64, 4),
    "64 tokens, no TMA": LaneForm(64, 3, by_descriptor=False),
    "128 tokens, no TMA": LaneForm(128, by_descriptor=False),
    "half tiles": LaneForm(64, 2, by_descriptor=False, warps=4, rows=64),
    "one program": LaneForm(128, programs_per_sm=1),
    "scales by TMA": LaneForm(128, scales_by_descriptor=True),
}
NUM_HEADS, NUM_KV_HEADS = 64, 8


class Timed(NamedTuple):
    """One timed step: rows of one sequence behind a context, over scattered pages."""

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
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    table = torch.zeros(1, 8192, dtype=torch.int32)
    table[0, :num_pages] = order
    height = tiled_attention.tile_rows(NUM_HEADS, NUM_KV_HEADS, large=True)
    tiles = [
        (0, row, min(height, timed.num_rows - row), timed.start + row, 0, timed.start + min(row + height, timed.num_rows), -1, 1)
        for row in range(0, timed.num_rows, height)
    ]  # fmt: skip
    tiles.sort(key=lambda tile: -tile[5])
    listed = torch.tensor([(0, len(tiles), 0, 0, 0, 0, 0, 0), *tiles], dtype=torch.int32, device=device)
    work = TileWork(listed, listed, has_small=False, has_large=True, has_merge=False)
    out = torch.empty(timed.num_rows, NUM_HEADS * timed.head_dim, device=device, dtype=torch.bfloat16)
    partial = torch.empty(1, NUM_HEADS * timed.head_dim, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scoring = Scoring(timed.head_dim**-0.5)
    call = TileCall(q, table.to(device), work, scoring, partial, partial, out, num_sms)
    return Step(call, k_plane, v_plane, timed)


def measure(run: Callable[[], object], num_flops: float) -> dict[str, float]:
    """Return the median of five measurements, each of several launches."""
    run()
    torch.cuda.synchronize()
    num_launches = max(1, min(10, int(4e12 / num_flops)))
    seconds = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(num_launches):
            run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 / num_launches)
    middle = sorted(seconds)[2]
    return {"ms": middle * 1000, "TFLOPS": num_flops / middle / 1e12, "spread": max(seconds) / min(seconds) - 1}


def shown(found: dict[str, Any]) -> str:
    """Return a finding in one line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


TIMED = {"8K": Timed(0, 8192), "2K after 30K": Timed(30720, 2048), "2K": Timed(0, 2048)}
ALL_FORMS = ("k8v4", "4bit_nc")
"""Formats that are timed in all forms, with lanes of fewer heads, and beside near pages."""


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
    has_bias: bool = False
    near: int | None = None
    """First tokens beside near blocks; None: no near pages."""
    form: LaneForm | None = None
    num_sms: int = 132


CASES = {
    "first": Case(),
    **{name: Case(bits) for name, bits in FORMATS.items() if name != "4bit_nc"},
    **{f"{name}, near": Case(bits, near=FIRST_TOKENS) for name, bits in FORMATS.items()},
    "fp8, near, window": Case((8, 8), window=200, near=0, group=4),
    "D 64": Case((4, 4), 64, 7, dtype="float16"),
    "D 64, k8v4": Case((8, 4), 64, 16, 16),
    "D 80": Case((3, 3), 80, 1, 16),
    "D 80, near": Case((5, 4), 80, 4, 16, near=FIRST_TOKENS),
    "D 96": Case((5, 4), 96, 4, dtype="float16"),
    "D 96, fp8": Case((8, 8), 96, 5),
    "D 256": Case((4, 4), 256, 4),
    "D 256, near": Case((3, 3), 256, 8, near=FIRST_TOKENS),
    "D 256, k8v4": Case((8, 4), 256, 2, window=200, softcap=50.0),
    "D 16": Case((3, 4), 16, 3),
    "group 1": Case((8, 4), group=1),
    "group 5": Case(group=5),
    "group 16": Case((3, 4), group=16),
    "window 100": Case(window=100),
    "window 300, sinks": Case((8, 8), window=300, has_sinks=True, group=4),
    "sinks": Case((3, 3), has_sinks=True),
    "capped": Case((8, 4), softcap=30.0, group=2),
    "key bias": Case(has_bias=True),
    "key bias, k8v4": Case((8, 4), has_bias=True, group=7),
    "all options": Case((3, 3), 64, 5, 16, window=128, has_sinks=True, softcap=20.0, has_bias=True),
    "near and options": Case((3, 4), group=5, has_sinks=True, softcap=20.0, has_bias=True, near=FIRST_TOKENS),
    "pages of 16": Case((3, 3), page_tokens=16),
    "pages of 256": Case((8, 4), page_tokens=256),
    "few programs": Case(num_sms=3),
    **{f"form, {name}": Case(form=form) for name, form in FORMS.items()},
    "form, near": Case((8, 4), near=FIRST_TOKENS, form=LaneForm(64, 3, by_descriptor=False)),
}


# --- errors


def steps_of(case: Case) -> dict[str, tuple[list[tuple[int, int]], list[Cut]]]:
    """Return steps by name: start and rows of sequences, and how each is cut; with near pages all in one range."""
    steps = {
        "odd lengths": ([(0, 200), (0, 1), (5, 70), (0, 129)], 4 * [LARGE]),
        "contexts": ([(127, 40), (500, 90), (383, 1)], 3 * [LARGE]),
        "splits": ([(300, 20), (0, 150), (64, 65), (90, 1)], [SPLITS, SPLITS, Cut(large=True, bounds=(64,)), Cut()]),
    }
    if case.near is not None:
        return {name: steps[name] for name in ("odd lengths", "contexts")}
    return steps


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


class Runs(NamedTuple):
    """A step's tiles and near pages."""

    step: QuantizedStep
    tiles: Tiles
    near: NearPages | None


def runs_of(case: Case, step: QuantizedStep, cuts: list[Cut], device: torch.device) -> Runs:
    """Cut a step."""
    if case.near is None:
        return Runs(step, cut_tiles(step, cuts), None)
    near = near_pages(step, NEAR_BLOCK, case.near, device, NEAR_PAGE)
    return Runs(step, near_tiles(step, NEAR_BLOCK, case.near, max(1, 128 // case.group)), near)


def run(case: Case, runs: Runs, device: torch.device, heads: int | None = None, more_rows: int = 0) -> torch.Tensor:
    """Run a step by the lane."""
    attend = by_lane(runs.near, heads, case.form, more_rows)
    return run_tiles(runs.step, runs.tiles, device, attend, num_sms=case.num_sms)


def judge(case: Case, device: torch.device, say: Callable[[dict[str, Any]], None]) -> None:
    """Say the error of each step, and the elements that differ between lanes and between cuts."""
    dtype = torch.float16 if device.type == "cpu" else getattr(torch, case.dtype)
    for name, (rows, cuts) in steps_of(case).items():
        runs = runs_of(case, make_step(case, rows, dtype), cuts, device)
        out = run(case, runs, device)
        reference = quantized_attention.quantized_attention_reference
        attend = reference if runs.near is None else near_reference(runs.near)
        exact = run_tiles(runs.step, runs.tiles, torch.device("cpu"), attend).double()
        if bool(out.isfinite().all()):
            off, length = (x.view(-1, case.head_dim).norm(dim=-1) for x in (out.double() - exact, exact))
            say({name: float((off / length.clamp(min=1e-6)).max() / (3 * TOLERANCE[dtype]))})
        else:
            say({name: f"{int((~out.isfinite()).any(-1).sum())} of {len(out)} rows are not finite"})
        if name == "contexts":
            others = (run(case, runs, device, 1), run(case, runs, device, 2, 128))
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
            parts.append(run(case, runs_of(case, part, [LARGE], device), device))
            first = end
        outs.append(torch.cat(parts))
    return sum(int((out.view(torch.int16) != outs[0].view(torch.int16)).sum()) for out in outs[1:])


# --- times


def random_planes(bits: tuple[int, int], head_dim: int, num_pages: int, device: torch.device) -> QuantizedPlanes:
    """Make pages of any codes, finite e4m3 numbers and scales near one twentieth."""
    storage = {}
    for plane in KVFormat("any", "uint8", "uint8", *bits).planes(NUM_KV_HEADS, head_dim):
        shape, dtype = (num_pages * PAGE_TOKENS, *plane.token_shape), getattr(torch, plane.dtype)
        if dtype == torch.float16:
            storage[plane.name] = torch.rand(shape, device=device).mul(0.06).add(0.02).half()
        elif bits[plane.name[0] == "v"] == 8:
            numbers = torch.randint(0, 120, shape, device=device) | (torch.randint(0, 2, shape, device=device) << 7)
            storage[plane.name] = numbers.to(torch.uint8).view(dtype)
        else:
            storage[plane.name] = torch.randint(0, 256, shape, device=device).to(torch.uint8).view(dtype)
    table = rotation_table(head_dim, torch.bfloat16, device)
    return QuantizedPlanes.of(storage.__getitem__, *bits, head_dim, PAGE_TOKENS, table)


def work_of(timed: Timed, height: int, near: NearPages | None, device: torch.device) -> TileWork:
    """List the tiles of a step, longest first."""
    group, tiles, row = NUM_HEADS // NUM_KV_HEADS, [], 0
    while row < timed.num_rows:
        position = timed.start + row
        count = min(height // group, timed.num_rows - row)
        low, high = 0, position + count
        if near is not None:
            own = position // NEAR_BLOCK * NEAR_BLOCK
            count = min(count, own + NEAR_BLOCK - position)
            low, high = min(near.first_tokens, own), own
        tiles.append((0, row, count, position, low, high, -1, 1))
        row += count
    tiles.sort(key=lambda tile: -tile[5])
    listed = torch.tensor([(0, len(tiles), 0, 0, 0, 0, 0, 0), *tiles], dtype=torch.int32, device=device)
    return TileWork(listed, listed, has_small=False, has_large=True, has_merge=False)


def random_near(timed: Timed, device: torch.device) -> NearPages:
    """Make near pages of all tokens of a step."""
    num_pages = -(-(timed.start + timed.num_rows) // NEAR_PAGE)
    shape = (num_pages * NEAR_PAGE, NUM_KV_HEADS, timed.head_dim)
    k_plane, v_plane = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.zeros(1, 8192, dtype=torch.int32, device=device)
    table[0, :num_pages] = torch.randperm(num_pages, device=device)
    return NearPages(k_plane, v_plane, table, NEAR_PAGE, NEAR_BLOCK, FIRST_TOKENS)


class Launches(NamedTuple):
    """A timed step over compressed pages."""

    call: TileCall
    planes: QuantizedPlanes
    near: NearPages | None
    lane: Lane
    timed: Timed

    def old(self) -> Callable[[], object]:
        """Return the present kernel."""
        height = quantized_attention.large_shape(self.planes.key_bits).rows
        call = self.call._replace(work=work_of(self.timed, height, self.near, self.call.q_THD.device))
        return lambda: quantized_attention.quantized_attention(call, self.planes, self.near)

    def by_lane(self, form: LaneForm | None, heads: int | None = None) -> dict[str, Callable[[], object]]:
        """Return both kernels, and each alone, in all rounds."""
        form, device = form or lane_attention.lane_form(self.timed.head_dim), self.call.q_THD.device
        call = self.call._replace(work=work_of(self.timed, form.rows, self.near, device))
        plan = lane_attention.plan_lane(call.work.tiles_X8.cpu().numpy(), 1, None, device, form.tokens)
        num_tokens = 64 * plan.num_blocks
        fitting = lane_attention.lane_heads(num_tokens, self.timed.head_dim, NUM_KV_HEADS)
        of_round = min(fitting, heads or fitting)
        rounds = range(0, NUM_KV_HEADS, of_round)

        def fill() -> None:
            for first in rounds:
                lane_attention.fill_lane(call, self.planes, self.lane, plan, first, of_round)

        def attend() -> None:
            for first in rounds:
                lane_attention.lane_attention(call, self.planes, self.near, self.lane, plan, first, of_round, form)

        def both() -> None:
            lane_attention.attend_by_lane(call, self.planes, self.near, self.lane, plan, form, of_round)

        return {"lane": both, "fill": fill, "attend": attend}


def launches_of(bits: tuple[int, int], step: Step, has_near: bool) -> Launches:
    """Make pages for the queries and the page table of a plain step."""
    device, timed = step.call.q_THD.device, step.timed
    num_pages = -(-(timed.start + timed.num_rows) // PAGE_TOKENS)
    planes = random_planes(bits, timed.head_dim, num_pages, device)
    lane = lane_attention.make_lane(timed.head_dim, torch.bfloat16, device)
    return Launches(step.call, planes, random_near(timed, device) if has_near else None, lane, timed)


def parts_of(format_name: str) -> list[tuple[str, bool, LaneForm | None, int | None]]:
    """Return the ways in which a format is timed: name, near pages, form, heads of a round."""
    parts: list[tuple[str, bool, LaneForm | None, int | None]] = [("default", False, None, None)]
    if format_name in ALL_FORMS:
        parts += [(name, False, form, None) for name, form in FORMS.items()]
        parts += [(f"{heads} heads a round", False, None, heads) for heads in (4, 2)]
        parts += [("near", True, None, None)]
    return parts


def resources(before: set[int]) -> tuple[list[dict[str, Any]], set[int]]:
    """Return registers, spills and shared memory of kernels compiled since."""
    found, seen = [], set(before)
    kernels = (
        lane_attention._fill_kernel, lane_attention._attend_kernel, quantized_attention._prefill_kernel,
        tiled_attention._attend_kernel,
    )  # fmt: skip
    for kernel in kernels:
        for caches in getattr(kernel, "device_caches", {}).values():
            for compiled in caches[0].values():
                if id(compiled) not in seen:
                    seen.add(id(compiled))
                    names = {"registers": "n_regs", "spills": "n_spills"}
                    entry = {name: getattr(compiled, attribute, None) for name, attribute in names.items()}
                    shared = getattr(compiled.metadata, "shared", None)
                    found.append({"kernel": kernel.__name__} | entry | {"shared": shared})
    return found, seen


def time_all(only: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Time all steps and formats that `only` names in part, and say each figure at once."""
    device, seen = torch.device("cuda"), set[int]()
    for name, timed in TIMED.items():
        step = make_timed(timed._replace(page_tokens=PAGE_TOKENS), device)
        plain: Callable[[], object] = lambda step=step: tiled_attention.tiled_attention(  # noqa: E731
            step.call, step.k_plane, step.v_plane, PAGE_TOKENS
        )
        bf16 = measure(plain, step.num_flops)
        new, seen = resources(seen)
        say({"step": name, "form": "bf16 pages"} | bf16 | {"kernel": new})
        for format_name, bits in FORMATS.items():
            if only not in f"{name}, {format_name}":
                continue
            for part, has_near, form, heads in parts_of(format_name):
                found: dict[str, Any] = {"step": name, "format": format_name, "form": part}
                try:
                    new, seen = time_part(launches_of(bits, step, has_near), form, heads, step, bf16["ms"], found, seen)
                    found |= {"kernel": new} if new else {}
                except Exception as error:
                    found["error"] = f"{type(error).__name__}: {error}"[-300:]
                say(found)
        say({"step": name, "form": "bf16 pages again"} | measure(plain, step.num_flops))


def time_part(
    launches: Launches, form: LaneForm | None, heads: int | None, step: Step, bf16_ms: float, found: dict[str, Any],
    seen: set[int],
) -> tuple[list[dict[str, Any]], set[int]]:  # fmt: skip
    """Measure one way of one format, and the present kernel where its figure is not known."""
    out_TX = launches.call.out_TX
    old = launches.old()
    old()
    expected = out_TX.float()
    if form is None and heads is None:
        found["old ms"] = measure(old, step.num_flops)["ms"]
        found["old ratio"] = bf16_ms / found["old ms"]
    runs = launches.by_lane(form, heads)
    out_TX.fill_(float("nan"))
    runs["lane"]()
    found["difference to old"] = float((out_TX.float() - expected).abs().max() / expected.abs().max())
    both = measure(runs["lane"], step.num_flops)
    found |= both | {"ratio": bf16_ms / both["ms"]}
    for name in ("fill", "attend"):
        found[f"{name} ms"] = measure(runs[name], step.num_flops)["ms"]
    return resources(seen)


# --- processes


def warm(name: str, device: torch.device) -> dict[str, Any]:
    """Compile what is timed of a format, by short steps of the same specializations."""
    step = make_timed(Timed(0, 256, page_tokens=PAGE_TOKENS), device)
    if name == "bf16":
        tiled_attention.tiled_attention(step.call, step.k_plane, step.v_plane, PAGE_TOKENS)
    else:
        format_name, _, part_name = name.partition(":")
        for part, has_near, form, _ in parts_of(format_name):
            if part == part_name:
                launches = launches_of(FORMATS[format_name], step, has_near)
                launches.old()()
                launches.by_lane(form)["lane"]()
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
        time_all(arguments.cases, say)


def run_child(name: str, arguments: argparse.Namespace, limit_seconds: float) -> list[dict[str, Any]]:
    """Run a part in a process; return what it found, and why it ended if it failed."""
    command = [sys.executable, __file__, "--child", name, "--device", arguments.device, "--cases", arguments.cases]
    begin, variables = time.monotonic(), {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arguments.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    try:
        output, _ = process.communicate(timeout=limit_seconds)
        end = {} if process.returncode == 0 else {"failed": process.returncode, "output": output[-1500:]}
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = {"failed": f"killed after {limit_seconds:.0f} s", "output": output[-1500:]}
    found = [json.loads(line.removeprefix("FOUND ")) for line in output.splitlines() if line.startswith("FOUND ")]
    if name.startswith("case:"):
        found = [{step: error for one in found for step, error in one.items()}]
    return [*found, end | {"seconds": time.monotonic() - begin}]


def main() -> None:
    """Parse the command line; run one part, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of probe_lane.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="", help="only cases, steps and formats whose names contain this")
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments)
        return
    begin, record = time.monotonic(), {}
    arguments.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, found: list[dict[str, Any]]) -> None:
        record[name] = found
        (arguments.out / "probe_lane.json").write_text(json.dumps(record, indent=1))
        print(
            f"[{time.monotonic() - begin:.0f} s] {name}", *(f"    {shown(one)}" for one in found), sep="\n", flush=True
        )

    has_times = arguments.device == "cuda" and not arguments.no_times
    names = parts_to_run(arguments.cases, has_times)
    # An interpreted case takes minutes.
    limit_seconds = CASE_SECONDS if arguments.device == "cuda" else 20 * CASE_SECONDS
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = {pool.submit(run_child, name, arguments, limit_seconds): name for name in names}
        for task in concurrent.futures.as_completed(tasks):
            keep(tasks[task], task.result())
    if has_times:
        keep("times", run_child("times", arguments, TIME_SECONDS))
    failed = [name for name, found in record.items() if "failed" in found[-1] or is_wrong(found[0])]
    print(f"{len(record) - len(failed)} of {len(record)} parts are right. Others: {failed}", flush=True)


def parts_to_run(only: str, has_times: bool) -> Sequence[str]:
    """List the parts before the times, those that take longest first."""
    names = [f"case:{name}" for name in CASES if only in name]
    if has_times:
        names += ["warm:bf16", *(f"warm:{name}:{part[0]}" for name in FORMATS for part in parts_of(name))]
    return names


def is_wrong(found: dict[str, Any]) -> bool:
    """Return True if an error is beyond its tolerance, or bits differ."""
    values = [value for name, value in found.items() if name in ("odd lengths", "contexts", "splits")]
    is_far = any(isinstance(value, str) or value > 1 for value in values)
    return is_far or bool(found.get("heads")) or bool(found.get("cut"))


if __name__ == "__main__":
    main()

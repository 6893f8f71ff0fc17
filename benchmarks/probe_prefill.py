"""Probe of the warpgroup kernel of prompts (prefill_warpgroups.py): errors, speed and resources in one run on a Hopper GPU.

    python benchmarks/probe_prefill.py --out FOLDER [--peer FOLDER] [--cases WORD] [--no-times]

Each case of errors runs in a process of its own with a time limit, many at once, so one that fails or hangs costs only itself.
These processes also compile the forms that are timed. Then one process times the old kernel, all forms, torch's kernels and,
with --peer, FlashAttention-3 of an installed vLLM. FOLDER/probe_prefill.json holds everything, and is written after each part.

Error: largest difference to float64 over the tolerance of the tests; above 1 fails. Cut: bits that differ between two cuts of
the same prompt; must be 0. The poison in pages is NaN. With --device cpu the
reference stands in: it shows that steps are right, but reads poison of aligned starts, and its cuts differ.

TFLOPS count two products of the pairs that a causal mask leaves.
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
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import prefill_warpgroups  # noqa: E402
import torch  # noqa: E402
from prefill_warpgroups import PrefillForm  # noqa: E402

from holdfast.kernels.attention import tiled_attention  # noqa: E402
from holdfast.kernels.attention.paged_attention import Scoring  # noqa: E402
from holdfast.kernels.attention.tile_work import TileCall, TileWork  # noqa: E402
from kernels.paged_cases import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    PagedCase,
    odd_sinks,
    paged_case,
)
from kernels.tiled_cases import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    Cut,
    cut_tiles,
    rounded,
    run_tiles,
)

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
CASE_SECONDS = 75
"""Limit of a process of errors: import, one compilation, a few small launches."""
TIME_SECONDS = 110
NUM_HEADS, NUM_KV_HEADS = 64, 8
LARGE = Cut(large=True)
Attend = Callable[[TileCall, torch.Tensor, torch.Tensor, int], torch.Tensor]


class Case(NamedTuple):
    """One specialization of the kernel, with all kinds of steps."""

    head_dim: int = 128
    group: int = 8
    page_tokens: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None
    form: PrefillForm | None = None
    num_sms: int = 132


class Timed(NamedTuple):
    """One timed step: rows of one sequence behind a context, over scattered pages."""

    start: int
    num_rows: int
    head_dim: int = 128
    page_tokens: int = 16


PLAIN = PrefillForm(128, 2, 0, is_overlapped=False, takes_turns=False)
FORMS_128 = {
    "default": PrefillForm(128, 2, 0),
    "no turns": PrefillForm(128, 2, 0, takes_turns=False),
    "no overlap": PrefillForm(128, 2, 0, is_overlapped=False),
    "neither": PLAIN,
    "64 tokens, 4 stages": PrefillForm(64, 4, 0),
    "3 stages": PrefillForm(128, 3, 0),
    "registers 240": PrefillForm(128, 2, 0, 240, 24),
    "boxes of 16": PrefillForm(128, 2, 16),
}
FORMS_64 = {
    "default": PrefillForm(128, 2, 0),
    "no turns": PrefillForm(128, 2, 0, takes_turns=False),
    "no overlap": PrefillForm(128, 2, 0, is_overlapped=False),
    "4 stages": PrefillForm(128, 4, 0),
}
FORMS_256 = {
    "default": PrefillForm(64, 2, 0),
    "no turns": PrefillForm(64, 2, 0, takes_turns=False),
    "no overlap": PrefillForm(64, 2, 0, is_overlapped=False),
    "registers 240": PrefillForm(64, 2, 0, 240, 24),
}
FORMS = {64: FORMS_64, 128: FORMS_128, 256: FORMS_256}
TIMED = {
    "8K": Timed(0, 8192),
    "32K": Timed(0, 32768),
    "2K after 30K, pages of 16": Timed(30720, 2048),
    "2K after 30K, pages of 256": Timed(30720, 2048, 128, 256),
    "2K": Timed(0, 2048),
    "8K, D 64": Timed(0, 8192, 64),
    "8K, D 256": Timed(0, 8192, 256),
}
ALL_FORMS = ("8K", "2K after 30K, pages of 16", "2K after 30K, pages of 256", "8K, D 64", "8K, D 256")
"""Steps that are timed in all forms; others in the default form and without turns."""
CASES = {
    "first": Case(),
    "group 1": Case(group=1),
    "group 4": Case(group=4),
    "group 5": Case(group=5),
    "group 7, float16": Case(group=7, dtype="float16"),
    "group 16": Case(group=16),
    "window 100": Case(window=100),
    "window 300, sinks": Case(window=300, has_sinks=True, group=4),
    "sinks": Case(has_sinks=True),
    "capped": Case(softcap=30.0, group=2),
    "all options": Case(window=128, has_sinks=True, softcap=20.0, group=5, page_tokens=32),
    "pages of 32": Case(page_tokens=32),
    "pages of 48": Case(page_tokens=48),
    "pages of 256": Case(page_tokens=256),
    "few programs": Case(num_sms=3),
    "no turns": Case(form=FORMS_128["no turns"]),
    "no overlap": Case(form=FORMS_128["no overlap"]),
    "neither": Case(form=PLAIN),
    "64 tokens": Case(form=FORMS_128["64 tokens, 4 stages"]),
    "3 stages": Case(form=FORMS_128["3 stages"]),
    "D 64": Case(64),
    "D 64, group 7, float16": Case(64, 7, dtype="float16"),
    "D 64, window 128, sinks": Case(64, 8, window=128, has_sinks=True),
    "D 96": Case(96, 1),
    "D 96, float16, window": Case(96, 4, 64, "float16", window=70),
    "D 256": Case(256, 4),
    "D 256, capped, window": Case(256, 2, window=200, softcap=50.0),
    "D 256, float16, pages of 256": Case(256, 7, 256, "float16"),
    "D 256, no overlap": Case(256, form=FORMS_256["no overlap"]),
}


def new_attend(form: PrefillForm | None = None) -> Attend:
    """Return an attention whose large tiles run in the kernel of warpgroups, and all else in the old ones."""

    def attend(call: TileCall, k_plane: torch.Tensor, v_plane: torch.Tensor, page_tokens: int) -> torch.Tensor:
        if not k_plane.is_cuda:
            return tiled_attention.tiled_attention_reference(call, k_plane, v_plane, page_tokens)
        if call.work.has_large:
            assert prefill_warpgroups.takes_prefill_warpgroups(call, k_plane, page_tokens)
            prefill_warpgroups.attend_prefill_warpgroups(call, k_plane, v_plane, page_tokens, form)
        rest = call._replace(work=replace(call.work, has_large=False))
        return tiled_attention.tiled_attention(rest, k_plane, v_plane, page_tokens)

    return attend


def old_attend() -> Attend:
    """Return the attention as it was."""
    return tiled_attention.tiled_attention


# --- errors


def steps_of(case: Case) -> dict[str, tuple[list[tuple[int, int]], list[Cut]]]:
    """Return steps by name: start and rows of sequences, and how each is cut."""
    splits = Cut(large=True, splits=3)
    return {
        "one prompt": ([(0, 200)], [LARGE]),
        "odd lengths": ([(0, 1), (0, 63), (0, 129), (5, 70)], 4 * [LARGE]),
        "behind contexts": ([(127, 40), (128, 3), (500, 90), (383, 1)], 4 * [LARGE]),
        "splits": ([(300, 20), (0, 150), (64, 65)], [splits, splits, Cut(large=True, bounds=[7, 71])]),
        "empty splits": ([(90, 4), (60, 9)], [Cut(large=True, bounds=[0, 0, 30, 30]), Cut(large=True, bounds=[69])]),
        "aligned starts": ([(200, 60), (330, 9)], 2 * [Cut(large=True, is_aligned=True)]),
        "small tiles beside": ([(99, 1), (0, 70), (40, 1)], [Cut(), LARGE, Cut(splits=2)]),
    }


def with_options(case: Case, made: PagedCase) -> PagedCase:
    """Add sinks and soft cap, and round."""
    made.softcap = case.softcap
    made.sinks = odd_sinks(made.q.shape[1]) if case.has_sinks else None
    return rounded(made, getattr(torch, case.dtype))


def make_step(case: Case, rows: list[tuple[int, int]], seed: int = 0) -> PagedCase:
    """Make a step over two key heads on scattered pages amid NaN."""
    made = paged_case(rows, case.head_dim, case.group, 2, case.page_tokens, case.window, seed)
    return with_options(case, made)


def exact_rows(made: PagedCase, device: torch.device) -> torch.Tensor:
    """Return attention in float64 from the tokens themselves, [T, H * D]."""
    parts, num_heads = [], made.q.shape[1]
    for (start, count), row, tokens in zip(made.rows, made.row_starts, made.tokens, strict=True):
        group = num_heads // tokens[0].shape[1]
        k_HLD, v_HLD = (x.to(device).double().repeat_interleave(group, 1).transpose(0, 1) for x in tokens)
        q_HnD = made.q[row : row + count].to(device).double().transpose(0, 1)
        distance = torch.arange(start, start + count).unsqueeze(1) - torch.arange(k_HLD.shape[1])
        seen = (distance >= 0) & (distance < (made.window or 2**30))
        scores = q_HnD @ k_HLD.transpose(1, 2) * made.scale
        if made.softcap is not None:
            scores = made.softcap * torch.tanh(scores / made.softcap)
        scores = scores.masked_fill(~seen.to(device), float("-inf"))
        if made.sinks is not None:
            sinks = made.sinks.to(device).double().view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : k_HLD.shape[1]]
        parts.append((weights @ v_HLD).transpose(0, 1).reshape(count, -1).cpu())
    return torch.cat(parts)


def judge(case: Case, device: torch.device, say: Callable[[dict[str, Any]], None]) -> None:
    """Say the error of each step, and the bits that differ between cuts."""
    attend = new_attend(case.form)
    for name, (rows, cuts) in steps_of(case).items():
        made = make_step(case, rows)
        if case.window is not None:
            made.poison_behind_the_window(float("nan"))
        tiles = cut_tiles(made, cuts)
        out = run_tiles(made, tiles, device, attend, num_sms=case.num_sms).double()
        exact, tolerance = exact_rows(made, device), TOLERANCE[case.dtype]
        if bool(out.isfinite().all()):
            say({name: float(((out - exact).abs() / (tolerance + tolerance * exact.abs())).max())})
        else:
            say({name: f"{int((~out.isfinite()).any(-1).sum())} of {len(out)} rows are not finite"})
    say({"cut": differing_cuts(case, attend, device)})


def differing_cuts(case: Case, attend: Attend, device: torch.device) -> int:
    """Count elements of a prompt that change if its rows are cut into two or three sequences of rows."""
    whole = make_step(case, [(70, 330)])
    outs = []
    for counts in ((330,), (77, 253), (1, 200, 129)):
        starts = [70 + sum(counts[:i]) for i in range(len(counts))]
        rows = list(zip(starts, counts, strict=True))
        cut = replace(whole, rows=rows, pages=len(rows) * whole.pages, tokens=len(rows) * whole.tokens)
        tiles = cut_tiles(cut, len(rows) * [Cut(large=True, is_aligned=True)])
        outs.append(run_tiles(cut, tiles, device, attend, num_sms=case.num_sms))
    return sum(int((out.view(torch.int16) != outs[0].view(torch.int16)).sum()) for out in outs[1:])


# --- times


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


def run_of(attend: Attend, step: Step) -> Callable[[], torch.Tensor]:
    """Return a launch of a step."""
    return lambda: attend(step.call, step.k_plane, step.v_plane, step.timed.page_tokens)


def contiguous(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in the order of tokens, [L, K, D]."""
    end, page = step.timed.start + step.timed.num_rows, step.timed.page_tokens
    token_L = torch.arange(end, device=step.k_plane.device)
    slot_L = step.call.page_table_NP[0, token_L // page].long() * page + token_L % page
    return step.k_plane[slot_L], step.v_plane[slot_L]


def torch_runs(step: Step) -> dict[str, Callable[[], torch.Tensor]]:
    """Return torch's kernels over contiguous keys and values; flash has them repeated for each head."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    if step.timed.start:
        return {}
    k_LKD, v_LKD = contiguous(step)
    q_HTD, k_KLD, v_KLD = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (step.call.q_THD, k_LKD, v_LKD))
    group = NUM_HEADS // NUM_KV_HEADS

    def run(backend: SDPBackend, is_grouped: bool) -> torch.Tensor:
        keys, values = (k_KLD, v_KLD) if is_grouped else (k_HLD, v_HLD)
        with sdpa_kernel(backend):
            return attend(q_HTD, keys, values, is_causal=True, enable_gqa=is_grouped)

    k_HLD, v_HLD = (x.repeat_interleave(group, dim=1) for x in (k_KLD, v_KLD))
    return {
        "torch flash": lambda: run(SDPBackend.FLASH_ATTENTION, False),
        "cuDNN": lambda: run(SDPBackend.CUDNN_ATTENTION, False),
    }


def load_peer(folder: Path) -> ModuleType:
    """Import vLLM's flash attention from a folder of packages, without vLLM's own start."""
    sys.path.append(str(folder))
    package = ModuleType("vllm")
    package.__path__ = [str(folder / "vllm")]
    sys.modules["vllm"] = package
    import importlib

    return importlib.import_module("vllm.vllm_flash_attn")


def peer_runs(step: Step, peer: ModuleType) -> dict[str, Callable[[], torch.Tensor]]:
    """Return FlashAttention-3 over contiguous tokens and over the same pages."""
    end, start = step.timed.start + step.timed.num_rows, step.timed.start
    device, page = step.k_plane.device, step.timed.page_tokens
    k_LKD, v_LKD = contiguous(step)
    ends = torch.tensor([0, step.timed.num_rows], dtype=torch.int32, device=device)
    key_ends = torch.tensor([0, end], dtype=torch.int32, device=device)
    k_pages, v_pages = (x.view(-1, page, NUM_KV_HEADS, step.timed.head_dim) for x in (step.k_plane, step.v_plane))
    table = step.call.page_table_NP[:, : -(-end // page)].contiguous()
    common = {
        "max_seqlen_q": step.timed.num_rows, "cu_seqlens_q": ends, "max_seqlen_k": end, "causal": True,
        "softmax_scale": step.call.scoring.scale, "fa_version": 3,
    }  # fmt: skip
    q_THD = step.call.q_THD
    runs = {
        "FA3, pages": lambda: peer.flash_attn_varlen_func(
            q_THD, k_pages, v_pages, seqused_k=key_ends[1:], block_table=table, **common
        )
    }
    if not start:
        runs["FA3"] = lambda: peer.flash_attn_varlen_func(q_THD, k_LKD, v_LKD, cu_seqlens_k=key_ends, **common)
    return runs


def resources(before: set[int]) -> tuple[list[dict[str, Any]], set[int]]:
    """Return registers, spills and shared memory of kernels compiled since."""
    found, seen = [], set(before)
    for module in (prefill_warpgroups, tiled_attention):
        for caches in getattr(module._attend_kernel, "device_caches", {}).values():
            for compiled in caches[0].values():
                if id(compiled) not in seen:
                    seen.add(id(compiled))
                    names = {"registers": "n_regs", "spills": "n_spills"}
                    entry = {name: getattr(compiled, attribute, None) for name, attribute in names.items()}
                    found.append(entry | {"shared": getattr(compiled.metadata, "shared", None)})
    return found, seen


def time_all(only: str, peer_folder: Path | None, say: Callable[[dict[str, Any]], None]) -> None:
    """Time all steps that `only` names in part, and say each figure at once."""
    device = torch.device("cuda")
    peer = None
    if peer_folder is not None:
        try:
            peer = load_peer(peer_folder)
        except Exception as error:
            say({"peer": f"{type(error).__name__}: {error}"[-300:]})
    seen: set[int] = set()
    for name, timed in TIMED.items():
        if only not in name:
            continue
        step = make_timed(timed, device)
        forms = FORMS[timed.head_dim]
        if name not in ALL_FORMS:
            forms = {form: forms[form] for form in ("default", "no turns")}
        elif timed.page_tokens == 16:
            forms = {form: sizes for form, sizes in forms.items() if form != "boxes of 16"}
        expected = run_of(old_attend(), step)()
        expected = expected.clone()
        runs = {"old": run_of(old_attend(), step)}
        runs |= {form: run_of(new_attend(sizes), step) for form, sizes in forms.items()}
        runs["old again"] = runs["old"]
        for label, more in (("torch", torch_runs), ("peer", peer_runs)):
            try:
                runs |= more(step) if label == "torch" else (more(step, peer) if peer else {})  # type: ignore[call-arg]
            except Exception as error:
                say({"step": name, "form": label, "error": f"{type(error).__name__}: {error}"[-300:]})
        for form, run in runs.items():
            found: dict[str, Any] = {"step": name, "form": form}
            try:
                step.call.out_TX.fill_(float("nan"))
                run()
                if form in forms or form.startswith("old"):
                    difference = (step.call.out_TX.float() - expected.float()).abs().max()
                    found["difference to old"] = float(difference)
                new, seen = resources(seen)
                found |= measure(run, step.num_flops) | ({"kernel": new} if new else {})
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"[-300:]
            say(found)


# --- processes


def warm_forms(device: torch.device, head_dim: int, names: Sequence[str]) -> dict[str, Any]:
    """Compile forms that are timed, by short steps of the same specializations."""
    found = {}
    for name in names:
        for page_tokens in (16, 256) if head_dim == 128 else (16,):
            step = make_timed(Timed(0, 256, head_dim, page_tokens), device)
            run_of(old_attend() if name == "old" else new_attend(FORMS[head_dim][name]), step)()
            torch.cuda.synchronize()
        found[name] = "compiled"
    return found


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
        head_dim, form = name.split(":")
        say(warm_forms(device, int(head_dim), [form]))
    else:
        time_all(arguments.cases, arguments.peer, say)


def run_child(name: str, arguments: argparse.Namespace, limit_seconds: float) -> list[dict[str, Any]]:
    """Run a part in a process; return what it found, and why it ended if it failed."""
    command = [sys.executable, __file__, "--child", name, "--device", arguments.device, "--cases", arguments.cases]
    if arguments.peer is not None:
        command += ["--peer", str(arguments.peer)]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
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


def shown(found: dict[str, Any]) -> str:
    """Return a finding in one line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


def main() -> None:
    """Parse the command line; run one part, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of probe_prefill.json")
    parser.add_argument("--peer", type=Path, default=None, help="folder of packages with a vLLM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="", help="only cases and steps whose names contain this")
    parser.add_argument("--jobs", type=int, default=14)
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
        (arguments.out / "probe_prefill.json").write_text(json.dumps(record, indent=1))
        print(
            f"[{time.monotonic() - begin:.0f} s] {name}", *(f"    {shown(one)}" for one in found), sep="\n", flush=True
        )

    # The simplest case alone: if it hangs, others may too, and are given less time.
    keep("case:first", run_child("case:first", arguments, CASE_SECONDS))
    has_hung = str(record["case:first"][-1].get("failed", "")).startswith("killed")
    has_times = arguments.device == "cuda" and not arguments.no_times and not has_hung
    names = [f"case:{name}" for name in CASES if arguments.cases in name and name != "first"]
    if has_times:
        names += [f"warm:{head_dim}:{form}" for head_dim, forms in FORMS.items() for form in ("old", *forms)]
    limit_seconds = CASE_SECONDS / 2 if has_hung else CASE_SECONDS
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = {pool.submit(run_child, name, arguments, limit_seconds): name for name in names}
        for task in concurrent.futures.as_completed(tasks):
            keep(tasks[task], task.result())
    if has_times:
        keep("times", run_child("times", arguments, TIME_SECONDS))
    failed = [name for name, found in record.items() if "failed" in found[-1] or is_wrong(found[0])]
    print(f"{len(record) - len(failed)} of {len(record)} parts are right. Others: {failed}", flush=True)


def is_wrong(found: dict[str, Any]) -> bool:
    """Return True if an error is beyond its tolerance, or cuts differ."""
    errors = [value for name, value in found.items() if name not in ("cut", "seconds", "ms", "TFLOPS", "spread")]
    numbers = [value for value in errors if isinstance(value, float)]
    texts = [value for value in errors if isinstance(value, str) and "not finite" in value]
    return bool(found.get("cut")) or bool(texts) or ("cut" in found and max(numbers, default=0.0) > 1)


if __name__ == "__main__":
    main()

"""Ranks as processes on one machine, and the expected results of their exchanges: for gpu_exchange.py and GPU tests.

Every rank draws the numbers of all ranks from the same seeds, so it can compute each call's result to the bit.

    python benchmarks/exchange_ranks.py --size 2 --device cuda   # checks only; ranks on one GPU take turns: slow
"""

import argparse
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mps import OVERLAP, pretended_node

from holdfast.distributed.collectives import open_collectives
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.linked import open_linked
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.distributed.rendezvous import LOOPBACK, listen_for_ranks
from holdfast.distributed.symmetric import open_symmetric
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows_reference
from holdfast.kernels.exchange.sum_rows import sum_rows_reference
from holdfast.memory.ledger import Ledger

NUM_SHOWN_LINES = 25
NUM_REPLAYS = 100
TELL_SECONDS = 3.0
"""Seconds before a rank's time limit when it dumps its stacks."""


class Sizes(NamedTuple):
    """Sizes of the checks and measurements."""

    hidden: int = 5120
    max_rows: int = 2048
    logit_rows: int = 16
    vocab: int = 151936

    @property
    def needs(self) -> ExchangeNeeds:
        room_bytes = self.max_rows * self.hidden * 2
        return ExchangeNeeds(room_bytes, self.logit_rows, self.vocab, room_bytes)


FULL, TINY = Sizes(), Sizes(hidden=64, max_rows=40, logit_rows=3, vocab=101)


# --- processes


def run_ranks(
    command: Sequence[str],
    size: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    after_failure_s: float = 2.0,
) -> list[dict[str, Any]]:
    """Run `command` once per rank, with --rank, --size, --port and --result; return each rank's result, or an error with its last output.

    No process outlives this call. `after_failure_s`: seconds for the others after one has failed.
    """
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        try:
            for rank in range(size):
                place = ["--rank", str(rank), "--size", str(size), "--port", str(port)]
                place += ["--tell-after", str(max(1.0, timeout_s - TELL_SECONDS))]
                full = [sys.executable, *command, *place, "--result", str(folder / f"{rank}.json")]
                with (folder / f"{rank}.txt").open("w") as output:
                    own = {**os.environ, **(environment or {})}
                    children.append(subprocess.Popen(full, stdout=output, stderr=subprocess.STDOUT, env=own))
            _wait(children, timeout_s, after_failure_s)
            return [_found(folder, rank, child) for rank, child in enumerate(children)]
        finally:
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGKILL)
                child.wait()


def _wait(children: Sequence[subprocess.Popen[bytes]], timeout_s: float, after_failure_s: float) -> None:
    """Wait until all have ended, one has failed (the others would hang), or the time is over."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            end = min(end, time.monotonic() + after_failure_s)
            after_failure_s = timeout_s  # counted from the first one
        time.sleep(0.05)


def _found(folder: Path, rank: int, child: subprocess.Popen[bytes]) -> dict[str, Any]:
    result, output = folder / f"{rank}.json", folder / f"{rank}.txt"
    found = json.loads(result.read_text()) if result.exists() else {}
    if child.poll() == 0:
        return found
    words = output.read_text(errors="replace").splitlines()[-NUM_SHOWN_LINES:]
    how = "did not end" if child.poll() is None else f"ended with {child.poll()}"
    return {**found, "error": f"rank {rank} {how}: " + "\n".join(words)}


def rank_options(parser: argparse.ArgumentParser) -> None:
    """Return a parser for the options of `run_ranks`."""
    for name in ("--rank", "--size", "--port"):
        parser.add_argument(name, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--tell-after", type=float, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=1, help="of the ranks")
    parser.add_argument("--nccl", action="store_true", help="each rank on a GPU as on a node of its own")
    parser.add_argument("--plain", action="store_true", help="NCCL also among ranks of one node")
    parser.add_argument(
        "--kill", action="store_true", help="the last rank ends in the middle of a graph; checks nothing"
    )


def open_rank(arguments: argparse.Namespace, sizes: Sizes) -> tuple[Mesh, Exchange]:
    """Open this process's exchange: symmetric memory or NCCL on a GPU, gloo on a CPU."""
    if arguments.tell_after is not None:
        faulthandler.dump_traceback_later(arguments.tell_after)
    mesh = meshes(arguments.size // arguments.stages, [(i, i + 1) for i in range(arguments.stages)])[arguments.rank]
    place = listen_for_ranks(port=arguments.port) if mesh.rank == 0 else (LOOPBACK, arguments.port)
    if arguments.device == "cpu":
        return mesh, open_collectives(mesh, sizes.needs, place, torch.device("cpu"), Ledger())
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if arguments.nccl:
        os.environ.update(pretended_node(mesh.rank))
        if mesh.tensor_size > 1 and mesh.num_stages > 1 and not arguments.plain:
            return mesh, open_linked(mesh, sizes.needs, place, device, Ledger(), waiting_share=1)
        return mesh, open_collectives(mesh, sizes.needs, place, device, Ledger())
    # Only exchanges run here: no peer's product needs SMs beside them.
    return mesh, open_symmetric(mesh, sizes.needs, place, device, Ledger(), waiting_share=1)


def leave(findings: Mapping[str, Any], result: Path) -> None:
    """Write the result so far; a later call replaces it."""
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(findings))
    partial.rename(result)


def wait_for_others(arguments: argparse.Namespace) -> None:
    """Wait until every rank has written a result: data in flight is lost when its sender exits."""
    end = time.monotonic() + 30.0
    others = [arguments.result.with_name(f"{rank}.json") for rank in range(arguments.size)]
    while not all(other.exists() for other in others):
        if time.monotonic() > end:
            raise TimeoutError(
                f"of {len(others)} ranks only {sum(other.exists() for other in others)} came so far in 30 s"
            )
        time.sleep(0.02)


# --- checks


class Checks:
    """Calls of one rank, each compared with the result computed from all ranks' numbers."""

    def __init__(self, mesh: Mesh, exchange: Exchange, device: str, sizes: Sizes) -> None:
        self.mesh = mesh
        self.exchange = exchange
        self.device = device
        self.sizes = sizes
        self.wrong: list[str] = []
        self.num_checked = 0

    def parts(self, seed: int, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the parts of all ranks."""
        chance = torch.Generator().manual_seed(seed)
        shape = (self.mesh.tensor_size, rows, width)
        return list(torch.randn(shape, generator=chance).to(self.device).to(dtype).unbind())

    def compare(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare to the bit."""
        self.num_checked += 1
        if not torch.equal(found, wanted):
            num_other = int((found != wanted).sum())
            self.wrong.append(f"{what}: {num_other} of {found.numel()} differ")

    def sums(self, rows: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        parts = self.parts(rows * width, rows, width, dtype)
        room = self.exchange.room(rows, width, dtype).copy_(parts[self.mesh.rank])
        out = torch.full((rows, width), float("nan"), dtype=out_dtype, device=self.device)
        self.exchange.sum_rows(room, out)
        self.compare(f"sum {rows} x {width} {dtype}", out, sum_rows_reference(parts, torch.empty_like(out)))

    def adds(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Add onto a stream with the next norm deferred; compare all but the sum of squares to the bit."""
        parts = self.parts(rows * width + 1, rows, width, dtype)
        x, norm_weight = self.parts(5, rows, width, dtype)[0], self.parts(6, 1, width, dtype)[0][0]
        wanted, scaled = x.clone(), [torch.empty_like(x), torch.full_like(x, float("nan"))]
        squares, amax = (torch.full((2, rows * width), float("nan"), device=self.device) for _ in range(2))
        add_rows_reference(parts, DeferredStream(wanted, norm_weight, scaled[0], squares[0], amax[0]))
        room = self.exchange.room(rows, width, dtype).copy_(parts[self.mesh.rank])
        num_blocks = self.exchange.add_rows(room, DeferredStream(x, norm_weight, scaled[1], squares[1], amax[1]))
        what, own = f"add {rows} x {width} {dtype}", rows * num_blocks
        self.compare(f"{what}, x", x, wanted)
        self.compare(f"{what}, scaled", scaled[1], scaled[0])
        self.compare(f"{what}, amax", amax[1][:own].view(rows, -1).amax(-1), amax[0][:rows])
        found, right = squares[1][:own].view(rows, -1).sum(-1), squares[0][:rows]
        self.compare(f"{what}, squares", (found - right).abs() < 1e-5 * right, torch.ones_like(right, dtype=torch.bool))

    def gathers(self, rows: int, width: int, dtype: torch.dtype) -> None:
        parts = self.parts(rows + width, rows, width, dtype)
        room = self.exchange.room(rows, width, dtype).copy_(parts[self.mesh.rank])
        out = torch.full((rows, width * len(parts)), float("nan"), dtype=dtype, device=self.device)
        self.exchange.gather_columns(room, out)
        self.compare(f"gather {rows} x {width} {dtype}", out, torch.cat(parts, dim=1))

    def logits(self) -> None:
        rows, share = self.sizes.logit_rows, self.sizes.needs.vocab_share(self.mesh)
        whole = self.parts(7, rows, self.sizes.vocab, torch.float32)[0]
        part = whole[:, self.mesh.rank * share : (self.mesh.rank + 1) * share].contiguous()
        out = self.exchange.whole_logits(rows) if self.mesh.rank == 0 else None
        self.exchange.gather_logits(part, out)
        if out is not None:
            self.compare("logits", out, whole)

    def small(self) -> None:
        for dtype in (torch.float32, torch.int64):
            parts = [(100 * part).to(dtype) for part in self.parts(11, self.sizes.logit_rows, 2, torch.float32)]
            out = torch.empty(len(parts), *parts[0].shape, dtype=dtype, device=self.device)
            self.exchange.gather_small(parts[self.mesh.rank], out)
            self.compare(f"small {dtype}", out, torch.stack(parts))
        ids = torch.arange(self.sizes.max_rows, device=self.device) + 1000 * self.mesh.rank
        self.exchange.share_tokens(ids)
        self.compare("tokens", ids, torch.arange(self.sizes.max_rows, device=self.device))

    def all_calls(self) -> None:
        """Check each kind of call, in sizes that cover each path of the kernels."""
        hidden, most = self.sizes.hidden, self.sizes.max_rows
        for rows in (1, 16, 33, most):
            self.sums(rows, hidden, torch.bfloat16, torch.bfloat16)
        for rows in (1, 3, 16):
            self.adds(rows, hidden, torch.bfloat16)
        self.adds(2, 100, torch.float32)
        self.sums(3, 100, torch.float32, torch.float32)
        self.sums(5, 33, torch.float16, torch.float16)
        self.sums(most // 2, hidden, torch.float32, torch.bfloat16)
        self.sums(most // 2, hidden, torch.bfloat16, torch.float32)
        for rows, width in ((1, hidden // self.mesh.tensor_size), (16, hidden), (33, 7), (most, 24)):
            self.gathers(rows, width, torch.bfloat16)
        self.logits()
        self.small()
        self.exchange.end_step()

    def stages(self) -> None:
        """Send rows of several steps in flight from stage to stage, and their logits and small numbers back to rank 0."""
        mesh, hidden = self.mesh, self.sizes.hidden
        # A step of many rows after one whose logits are in flight: neither may wait for the other.
        rows = [self.sizes.max_rows if step % 4 == 1 else 16 for step in range(4 * mesh.num_stages)]
        steps = [self.parts(step, own, hidden, torch.bfloat16) for step, own in enumerate(rows)]
        under_way: list[int] = []
        for step, parts in enumerate(steps):
            x = parts[mesh.tensor_rank].clone() if mesh.is_first_stage else torch.empty_like(parts[0])
            if not mesh.is_first_stage:
                self.exchange.receive_rows(x)
                self.compare(f"step {step}: rows", x, parts[mesh.tensor_rank] + mesh.stage)
            if mesh.tensor_size > 1:
                room = self.exchange.room(rows[step], hidden, torch.bfloat16).copy_(parts[mesh.tensor_rank])
                total = self.exchange.sum_rows(room, torch.empty_like(x))
                self.compare(f"step {step}: sum", total, sum_rows_reference(parts, torch.empty_like(x)))
            if not mesh.is_last_stage:
                self.exchange.send_rows(parts[mesh.tensor_rank] + (mesh.stage + 1))
            under_way.append(step)
            if mesh.is_last_stage or len(under_way) == mesh.num_stages:
                self._answer(under_way.pop(0))
            self.exchange.end_step()
        while under_way:
            self._answer(under_way.pop(0))

    def _answer(self, step: int) -> None:
        mesh, rows = self.mesh, self.sizes.logit_rows
        if not mesh.is_last_stage and mesh.rank:
            return
        share = self.sizes.needs.vocab_share(mesh)
        whole = self.parts(100 + step, rows, self.sizes.vocab, torch.float32)[0]
        part = whole[:, mesh.tensor_rank * share : (mesh.tensor_rank + 1) * share] if mesh.is_last_stage else None
        out = self.exchange.whole_logits(rows) if mesh.rank == 0 else None
        self.exchange.gather_logits(part, out)
        if out is not None:
            self.compare(f"step {step}: logits", out, whole)
        numbers = [torch.full((rows, 2), 1.0 + step + rank, device=self.device) for rank in range(mesh.tensor_size)]
        small = torch.empty(mesh.tensor_size, rows, 2, device=self.device)
        self.exchange.gather_small(numbers[mesh.tensor_rank] if mesh.is_last_stage else None, small)
        self.compare(f"step {step}: small", small, torch.stack(numbers))

    def graph(self) -> None:
        """Capture an odd number of calls and replay them often, each time with new numbers, and NaN in this rank's first buffer."""
        rows, hidden, size = 16, self.sizes.hidden, self.mesh.tensor_size
        parts = self.parts(3, rows, hidden, torch.bfloat16)
        own, total = parts[self.mesh.rank].clone(), torch.empty_like(parts[0])
        columns = torch.empty(rows, hidden * size, dtype=torch.bfloat16, device=self.device)
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        numbers = torch.zeros(rows, dtype=torch.int64, device=self.device)

        def step() -> None:
            exchange = self.exchange
            ids.copy_(numbers)
            exchange.share_tokens(ids)
            exchange.sum_rows(exchange.room(rows, hidden, torch.bfloat16).copy_(own), total)
            exchange.gather_columns(exchange.room(rows, hidden, torch.bfloat16).copy_(total + self.mesh.rank), columns)
            exchange.end_step()

        step()
        replay = capture(step, self.device)
        for i in range(NUM_REPLAYS):
            own.copy_(parts[self.mesh.rank] * (i + 1))
            numbers.fill_(i * 10 + self.mesh.rank)
            if i % 3 == self.mesh.rank % 3:
                self.exchange.room(rows, hidden, torch.bfloat16).fill_(float("nan"))
            replay()
            if i % 7 == 0 or i == NUM_REPLAYS - 1:
                wanted = sum_rows_reference([part * (i + 1) for part in parts], torch.empty_like(total))
                self.compare(f"replay {i}: sum", total, wanted)
                self.compare(f"replay {i}: gather", columns, torch.cat([wanted + rank for rank in range(size)], dim=1))
                self.compare(f"replay {i}: tokens", ids, torch.full_like(ids, i * 10))


def lose_a_peer(mesh: Mesh, exchange: Exchange, arguments: argparse.Namespace) -> dict[str, float]:
    """Kill the last rank before a replay; return the seconds until the abandoned others finish their own replay."""
    device: str = arguments.device
    x = torch.zeros(16, 64, device=device)

    def step() -> None:
        exchange.sum_rows(exchange.room(16, 64, torch.float32).copy_(x), torch.empty_like(x))
        exchange.end_step()

    step()
    replay = capture(step, device)
    replay()
    torch.cuda.synchronize()
    leave({}, arguments.result)
    wait_for_others(arguments)  # a rank with its own rows may still owe rows to the next, which has not noticed yet
    if mesh.rank == mesh.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replay()
    timer = threading.Timer(0.5, exchange.abandon)
    timer.daemon = True
    timer.start()
    begin = time.monotonic()
    torch.cuda.synchronize()
    ended = time.monotonic()
    del replay
    exchange.close()
    return {"waited_seconds": ended - begin, "closed_seconds": time.monotonic() - ended}


def capture(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Capture a CUDA graph of a function; on a CPU return the function."""
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    """Run all ranks, or one of them."""
    parser = argparse.ArgumentParser(description="What an exchange among ranks must answer")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    rank_options(parser)
    arguments = parser.parse_args()
    if arguments.rank is None:
        command = [__file__, "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
        command += ["--stages", str(arguments.stages)]
        command += [f"--{name}" for name in ("nccl", "plain", "kill") if getattr(arguments, name)]
        patience = arguments.timeout if arguments.kill else 2.0
        found = run_ranks(command, arguments.size or 2, arguments.timeout, OVERLAP, patience)
        print(json.dumps(found, indent=1))
        sys.exit(any(entry.get("error") or entry.get("wrong") for entry in found))
    sizes = TINY if arguments.tiny else FULL
    mesh, exchange = open_rank(arguments, sizes)
    if arguments.kill:
        leave(lose_a_peer(mesh, exchange, arguments), arguments.result)
        return
    checks = Checks(mesh, exchange, arguments.device, sizes)
    if mesh.num_stages > 1:
        checks.stages()
    else:
        checks.all_calls()
        checks.graph()
    leave({"wrong": checks.wrong, "num_checked": checks.num_checked}, arguments.result)
    wait_for_others(arguments)
    exchange.close()


if __name__ == "__main__":
    main()

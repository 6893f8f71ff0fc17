"""Ranks of real engines killed and stopped on one GPU: callers get an error in time, no kernel hangs, the memory is released.

Ranks share the GPU under MPS, each test with a daemon of its own, and without, in turns. Fakes on a CPU show every station and
every victim (test_rank_deaths.py); here is what only a device can show: kernels that wait for a rank that will not come.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.rank_groups import with_tests
from engine.test_rank_deaths import GONE_SECONDS, NOTICED_SECONDS, lives

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
dummy_models, gpu_records, mps_module = (import_module(name) for name in ("dummy_models", "gpu_records", "mps"))

START_SECONDS = 90.0
END_SECONDS = 12.0
"""For the error, for closing, and for the process itself to end."""
FREE_SECONDS = 6.0
KV_BYTES = 2**30
RANK_BYTES = 2**29
"""A rank takes more than this, context and all: some 850 MiB."""
LEFT_BYTES = 2**27
"""What the driver may keep."""
BUSY = 2.0
"""The whole lane runs beside these. By themselves, eight at a time, all of them were noticed within 2.2 s."""
SHAPES = {"num_hidden_layers": 2, "vocab_size": 4096}
LIMITS = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 16}


class Case(NamedTuple):
    """Who dies, how, and when."""

    tensor: int = 2
    stages: int = 1
    station: str = "step"
    victim: str = "rank 1"
    how: str = "KILL"
    is_front: bool = False
    has_mps: bool = True

    @property
    def name(self) -> str:
        """As a test's name has it."""
        ways = [*(["front"] if self.is_front else []), *([] if self.has_mps else ["in turns"])]
        return "-".join([f"{self.tensor}x{self.stages}", self.station, self.victim, self.how, *ways])


class Seen(NamedTuple):
    """What became of it, in seconds after the signal; None: it never came."""

    noticed: float | None
    gone: float | None
    """When the last process but the program's own, had it to be killed or not, was gone."""
    ended: float | None
    """When the program was."""
    kind: str
    words: str
    device: str
    status: int | None
    reported: tuple[str, ...]
    """What it wrote to its standard error at last."""
    held: int | None
    """Bytes of the device that were in use before."""


class Dying:
    """The program in a process of its own, and what it says."""

    def __init__(self, model: Path, case: Case, device: str, environment: dict[str, str], log: Path) -> None:
        settings = LIMITS | {
            "device": device,
            "load_format": "dummy",
            "tensor_parallel_size": case.tensor,
            "pipeline_parallel_size": case.stages,
            "core_process": case.is_front,
            "kv_cache_memory": KV_BYTES if device == "cuda" else 2**22,
            "station": case.station,
            "victim": case.victim,
            "how": case.how,
        }
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.dying_engine", str(model), json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=out,
                env=with_tests(dict(os.environ)) | environment,
            )
        self._kept = b""
        self.lines: list[dict[str, Any]] = []
        self.pids: dict[str, int] = {}

    def line(self, what: str, until: float) -> dict[str, Any] | None:
        """The next that says so; None where it does not come in time."""
        assert self.process.stdout is not None
        while time.monotonic() < until:
            head, found, rest = self._kept.partition(b"\n")
            if found:
                self._kept = rest
                self.lines += [json.loads(head)] if head.startswith(b"{") else []
                if self.lines and self.lines[-1]["what"] == what:
                    return self.lines[-1]
                continue
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                return None
            self._kept += data
        return None

    def gone_at(self, names: list[str], until: float) -> float | None:
        """When none of them lives any more."""
        while any(lives(self.pids[name]) for name in names):
            if time.monotonic() > until:
                return None
            time.sleep(0.01)
        return time.monotonic()

    @property
    def reported(self) -> tuple[str, ...]:
        return tuple(self._log.read_text(errors="replace").splitlines()[-40:])

    def end(self) -> None:
        for pid in {self.process.pid, *self.pids.values()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in its driver is left to the system
            self.process.wait(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def watch(case: Case, dying: Dying) -> Seen:
    """Kill, and see what becomes of all."""
    here = dying.line("here", time.monotonic() + START_SECONDS)
    assert here is not None, f"{dying.process.poll()=} {dying.lines=} {dying.reported=}"
    dying.pids = here["pids"]
    began = here["at"]
    held = gpu_records.used_bytes() if case.station != "capture" else None
    if case.station != "capture":
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(dying.pids[case.victim], getattr(signal, f"SIG{case.how}"))
    until = began + END_SECONDS
    is_program = dying.pids[case.victim] == dying.process.pid
    error = None if is_program else dying.line("error", until)
    own = [name for name, pid in dying.pids.items() if pid != dying.process.pid]
    gone = dying.gone_at(own, until)
    device = None if is_program or case.is_front else dying.line("device", until)
    ended = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        dying.process.wait(max(0.1, until - time.monotonic()))
        ended = time.monotonic() - began
    return Seen(
        *(None if error is None else error["at"] - began, None if gone is None else gone - began, ended),
        *("", "") if error is None else (error["kind"], error["words"]),
        "" if device is None else device["words"],
        dying.process.poll(),
        dying.reported,
        held,
    )


def run_case(case: Case, folder: Path, device: str = "cuda") -> Seen:
    """One engine, one death; under MPS where that is wanted and there."""
    model = dummy_models.write_dummy_model(folder, "Qwen3-0.6B", **SHAPES)
    wanted = device == "cuda" and case.has_mps
    with mps_module.mps() if wanted else contextlib.nullcontext(None) as environment:
        dying = Dying(model, case, device, dict(environment or mps_module.OVERLAP), folder / "log")
        try:
            seen = watch(case, dying)
        finally:
            dying.end()
    shown = seen._asdict() | {"reported": seen.reported[:3] if seen.status else ()}
    print("\n" + json.dumps({"case": case.name, **shown}), flush=True)
    return seen


def check(case: Case, seen: Seen, patience: float = 1.0) -> None:
    """Deadline for callers; later while other tests use the device."""
    assert seen.gone is not None, seen
    assert seen.gone < patience * GONE_SECONDS, seen
    assert seen.ended is not None, seen
    assert seen.status == (0 if case.victim != "rank 0" or case.is_front else -signal.SIGKILL), seen
    if case.victim == "rank 0" and not case.is_front:
        return  # the program itself
    assert seen.noticed is not None, seen
    assert seen.noticed < patience * NOTICED_SECONDS, seen
    assert seen.kind == "EngineDeadError", seen
    assert case.victim in seen.words or "core process" in seen.words.lower(), seen
    assert seen.ended < 2 * patience * GONE_SECONDS, seen
    if not case.is_front:
        # Under MPS a client that is killed in the middle of a kernel may break the device for the others: nothing is promised of it.
        assert seen.device == "works" or (case.has_mps and "CUDA" in seen.device), seen


TWO = [Case(station=station, how=how) for station, how in product(("idle", "step", "capture"), ("KILL", "STOP"))]
FOUR = [
    case._replace(tensor=4, victim=victim) for case, victim in zip(TWO, ("rank 1", "rank 2", "rank 3") * 2, strict=True)
]
OTHERS = [
    Case(victim="rank 0"),
    Case(tensor=4, victim="rank 0", station="idle"),
    Case(victim="rank 0", is_front=True),
    Case(is_front=True),
    Case(tensor=1, stages=2),
    Case(tensor=1, stages=2, how="STOP"),
    Case(has_mps=False),
    Case(has_mps=False, how="STOP"),
    Case(has_mps=False, victim="rank 0"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*TWO, *FOUR, *OTHERS], ids=lambda case: case.name)
def test_rank_death_on_gpu_is_noticed_and_leaves_no_process(case: Case, tmp_path: Path) -> None:
    check(case, run_case(case, tmp_path), BUSY)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("case", [Case(tensor=4), Case(how="STOP", has_mps=False)], ids=lambda case: case.name)
def test_rank_death_on_gpu_releases_memory(case: Case, tmp_path: Path) -> None:
    before = gpu_records.used_bytes()
    assert before is not None, "nvidia-smi tells nothing"
    seen = run_case(case, tmp_path)
    check(case, seen)
    least = before + case.tensor * case.stages * RANK_BYTES
    assert seen.held is not None, seen
    assert seen.held > least, f"{seen.held=} is less than all ranks would take, {least}"
    until = time.monotonic() + FREE_SECONDS
    while (after := gpu_records.used_bytes() or 0) > before + LEFT_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    print(f"\nmemory: {before >> 20} MiB before, {seen.held >> 20} MiB with the engine, {after >> 20} MiB after")
    assert after <= before + LEFT_BYTES, f"{before=} {after=}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(), Case(how="STOP", station="idle"), Case(is_front=True)], ids=lambda case: case.name
)
def test_rank_death_on_cpu_is_noticed_and_leaves_no_process(case: Case, tmp_path: Path) -> None:
    check(case, run_case(case, tmp_path, "cpu"))

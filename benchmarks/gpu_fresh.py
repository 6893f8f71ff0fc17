"""Renew the records of one GPU in one call, the most important first: python benchmarks/gpu_fresh.py [--budget-seconds N]

Before the first engine, every engine opens once with few layers, all of them at once, so that Triton's cache on disk has
their kernels. Then the benchmarks run in turn; each writes its record as soon as it has figures. A part that no longer fits
the time is left out, and the end lists the command that runs it. Records name the commit of --commit or $HOLDFAST_COMMIT.
`make digests` adds the digests of the kernels and plans afterwards (docs/performance.md).
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_records import COMMIT_VARIABLE, REHEARSAL_VARIABLE, ROOT, Budget, options

FOLDER = Path(__file__).parent
REHEARSAL_SECONDS = 100.0
"""Limit on compiling kernels before the first part."""
MAX_OVERRUN = 1.8
"""Limit on the seconds of a part, as a multiple of those expected."""
FORMATS = "turboquant_k8v4,bfloat16,turboquant_k5v4,turboquant_4bit_nc,fp8,turboquant_k3v4_nc,turboquant_3bit_nc"


class Part(NamedTuple):
    """One benchmark, and its record."""

    name: str
    command: str
    seconds: float
    """Seconds that it takes when its kernels are compiled."""
    least_seconds: float
    """Seconds that give a useful record."""
    children: tuple[str, ...] = ()
    """Values of --child of the engines whose kernels are compiled before."""

    def words(self, arguments: argparse.Namespace, budget_seconds: float) -> list[str]:
        """Return the command of this part on this device."""
        script, *own = shlex.split(self.command)
        shared = ["--device", arguments.device, "--out", str(arguments.out), *(["--tiny"] if arguments.tiny else [])]
        return [str(FOLDER / script), *own, *shared, "--budget-seconds", f"{budget_seconds:.0f}"]


PARTS = (
    Part("V4", "gpu_latent.py --cases v4-flash --contexts 8193", 75, 60, ("v4-flash",)),
    Part("gpt-oss", "gpu_groups.py --cases gpt-oss-20b", 25, 20, ("gpt-oss-20b",)),
    Part("V4 ranks", "gpu_ranks.py --model DeepSeek-V4-Flash --parts exact-1,exact-2,exact-4,trace-1,trace-2", 100, 60),
    Part(
        "decode",
        "gpu_quantized.py --models Qwen3-32B --quantizations none,fp8 --batches 1,64",
        42,
        21,
        ("Qwen3-32B,none", "Qwen3-32B,fp8"),
    ),
    Part(
        "KV formats",
        f"gpu_quantized_kv.py --formats {FORMATS} --fill none --utilization 0.9 --batches 32 --lengths 8192",
        84,
        15,
        tuple(FORMATS.split(",")),
    ),
    Part("steady", "gpu_steady.py --only default", 75, 40, ("default",)),
    Part("memory", "gpu_memory.py --cases 14,15,16,17,0,2,4", 60, 12, ("15", "16", "17")),
    Part("load", "gpu_load.py --models Qwen1.5-MoE-A2.7B,Qwen3-8B --schemes fp8 --dummy ''", 70, 35),
    Part("V4 at 128K", "gpu_latent.py --cases v4-flash --contexts 131073", 110, 90),
    Part("decode of every batch", "gpu_decode.py --only default", 50, 40),
)
"""The most important first. Seconds are those of an H200."""
TINY_PARTS = (
    Part("decode", "gpu_quantized.py --models Qwen3-32B --quantizations none", 60, 20, ("Qwen3-32B,none",)),
    Part("late", "gpu_decode.py --only default", 9e9, 9e9),
)


def rehearse(parts: Sequence[Part], arguments: argparse.Namespace, limit_seconds: float) -> int:
    """Compile the kernels of every engine, all engines at once; return the number that finished."""
    environment = {**os.environ, REHEARSAL_VARIABLE: "1"}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for part in parts:
            for child in part.children:
                words = [sys.executable, *part.words(arguments, limit_seconds), "--child", child]
                output = Path(folder) / f"{len(running)}.txt"
                with output.open("w") as out:
                    process = subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
                running[f"{part.name}, {child}"] = process, output
        end, num_finished = time.monotonic() + limit_seconds, 0
        for name, (process, output) in running.items():
            try:
                status: int | str = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = "no time"
            num_finished += status == 0
            if status != 0:
                last = output.read_text(errors="replace").strip().rpartition("\n")[2]
                print(f"the kernels of {name} are not all compiled: {status}: {last[-300:]}")
    return num_finished


def run_parts(parts: Sequence[Part], arguments: argparse.Namespace, budget: Budget) -> list[Part]:
    """Run each part that fits the time; return those left out."""
    left_out = []
    for part in parts:
        if budget.left_seconds < part.least_seconds:
            left_out.append(part)
            continue
        start, limit = budget.spent_seconds, min(budget.left_seconds, MAX_OVERRUN * part.seconds)
        done = subprocess.run([sys.executable, *part.words(arguments, limit)], check=False)
        seconds = budget.spent_seconds - start
        print(f"{part.name}: exit {done.returncode}, {seconds:.1f} s of {part.seconds:g} expected", flush=True)
        if done.returncode != 0:
            left_out.append(part)
    return left_out


def main() -> None:
    """Run the requested parts while time allows."""
    parser = options("Fresh records of one GPU, the most important first")
    parser.add_argument("--only", default="", help="names of parts, with commas; else all")
    parser.add_argument("--no-rehearsal", action="store_true", help="compile kernels as engines need them")
    arguments = parser.parse_args()
    if arguments.commit is not None:
        os.environ[COMMIT_VARIABLE] = arguments.commit
    budget = Budget(arguments.budget_seconds)
    every = TINY_PARTS if arguments.tiny else PARTS
    parts = [part for part in every if not arguments.only or part.name in arguments.only.split(",")]
    if not parts:
        parser.error(f"--only has no part: {', '.join(part.name for part in every)}")
    if not arguments.no_rehearsal:
        num_finished = rehearse(parts, arguments, min(REHEARSAL_SECONDS, budget.left_seconds / 3))
        print(f"compiled the kernels of {num_finished} engines in {budget.spent_seconds:.1f} s", flush=True)
    left_out = run_parts(parts, arguments, budget)
    print(f"\n{len(parts) - len(left_out)} of {len(parts)} parts ran in {budget.spent_seconds:.0f} s")
    for part in left_out:
        print(f"left out: {part.name}: python {FOLDER.relative_to(ROOT)}/{part.command}")
    if len(left_out) == len(parts):
        sys.exit("error: no part ran; see above")


if __name__ == "__main__":
    main()

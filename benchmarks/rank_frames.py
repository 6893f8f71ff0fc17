"""Microseconds to send a step to all other ranks, by sequences: python benchmarks/rank_frames.py

Ranks are processes started like an engine's (engine/ranks.py), with fakes instead of a model (tests/engine/fake_rank.py's
channel, none of its work). They decode a frame and write its arrival time to shared memory. A frame carries the results of
the last step and the next step, in which one in 16 sequences gets a page.

`sent` is the time on rank 0's thread to encode the frame and write it to every socket; `processor` is that thread's CPU time
meanwhile. `there` is from that start until the last rank has decoded it. The record has the best tenth of many steps and the
median, because the machine may be shared. The record is benchmarks/records/<cpu>-<date>-rank-frames.json.
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpu_records

from holdfast.config import EngineConfig
from holdfast.engine.rank_messages import RankReady, RankStart, encode_frame
from holdfast.engine.rank_process import main
from holdfast.engine.rank_server import RankServer
from holdfast.engine.ranks import RankGroup
from holdfast.memory.report import RankMemory
from holdfast.request.sequence import SequenceResult, StepResult
from holdfast.request.step import Step, StepItem

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()), "--rank")
PLACE = "HOLDFAST_RANK_FRAMES"
MOST_RANKS = 8
PAGE_TOKENS = 16
LIMITS_US = {1: 60.0, 3: 150.0}
"""Goals for 64 sequences, by the number of other ranks."""
SECTION = "rank-frames"


class Times:
    """Arrival of each rank's last frame, in shared memory: [rank, (step number, time)]."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._room = memoryview(mmap.mmap(file.fileno(), 16 * MOST_RANKS)).cast("d")

    def set(self, rank: int, number: int) -> None:
        self._room[2 * rank + 1] = time.perf_counter()
        self._room[2 * rank] = number

    def of(self, rank: int) -> tuple[float, float]:
        return self._room[2 * rank], self._room[2 * rank + 1]


class TimedRank:
    """Records the arrival of each step."""

    def __init__(self, rank: int) -> None:
        self.memory = RankMemory(rank, "cpu", 0, 0)
        self._rank = rank
        self._times = Times(os.environ[PLACE])

    def book(self, tokens: tuple[tuple[int, ...], ...]) -> None: ...

    def run(self, step: Step) -> None:
        self._times.set(self._rank, step.number)

    def look(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def open_rank(start: RankStart, server: RankServer) -> TimedRank:
    """Open a rank with only the channel."""
    return TimedRank(start.rank)


def _decoding(slot: int, start: int) -> StepItem:
    """Return a sequence that adds a token, and a page if one begins: one in PAGE_TOKENS of them in every step."""
    return StepItem(slot, start, 1, True, ((start,),) if start % PAGE_TOKENS == 0 else ())


def measure(num_others: int, num_sequences: int, num_steps: int, path: str) -> dict[str, object]:
    """Measure steps in microseconds, one after the other."""
    Path(path).write_bytes(bytes(16 * MOST_RANKS))
    times = Times(path)
    group = RankGroup(EngineConfig(tensor_parallel_size=num_others + 1), num_others + 1, COMMAND)
    try:
        group.expect(RankReady)
        group.serve()
        sent, used, there, frame = [], [], [], b""
        for number in range(1, num_steps + 1):
            # Like a scheduler: results and the step are new objects.
            result = StepResult(tuple(SequenceResult((7 * slot,)) for slot in range(num_sequences)))
            step = Step(number, (), (), tuple(_decoding(slot, 100 + number + slot) for slot in range(num_sequences)))
            began_used, began = time.thread_time(), time.perf_counter()
            frame = encode_frame((result,), step, number)
            group.send_frame(frame)
            sent.append(time.perf_counter() - began)
            used.append(time.thread_time() - began_used)
            found = [times.of(rank) for rank in range(1, num_others + 1)]
            while any(one[0] < number for one in found):
                time.sleep(0)
                found = [times.of(rank) for rank in range(1, num_others + 1)]
            there.append(max(one[1] for one in found) - began)
            time.sleep(0.0005)
    finally:
        group.end()
    figures: dict[str, object] = {
        "other_ranks": num_others,
        "sequences": num_sequences,
        "frame_bytes": len(frame),
    }
    for name, seconds in (("sent", sent), ("used", used), ("there", there)):
        figures[f"{name}_us"] = round(statistics.quantiles(seconds, n=10)[0] * 1e6, 1)
        figures[f"{name}_median_us"] = round(statistics.median(seconds) * 1e6, 1)
    return figures


def as_result(row: dict[str, object]) -> dict[str, object]:
    """Return a row of a record."""
    measure = f"sequences {row['sequences']}, other ranks {row['other_ranks']}"
    values = {name: row[f"{name}_us"] for name in ("sent", "used", "there")}
    medians = {name: row[f"{name}_median_us"] for name in values}
    return {"measure": measure, "unit": "us", "values": values, "medians": medians, "frame_bytes": row["frame_bytes"]}


def benchmark() -> None:
    """Measure, print, and write the record."""
    parser: argparse.ArgumentParser = gpu_records.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.set_defaults(device="cpu")
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    num_steps = 50 if arguments.tiny else arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "times")
        os.environ[PLACE] = path
        rows = [measure(others, sequences, num_steps, path) for others in (1, 3) for sequences in (1, 64, 256)]
    gpu_records.print_table(
        "microseconds, best tenth",
        ("other ranks", "sequences", "bytes", "sent", "sent, median", "processor", "there", "there, median"),
        [
            tuple(
                row[name]
                for name in (
                    *("other_ranks", "sequences", "frame_bytes"),
                    *("sent_us", "sent_median_us", "used_us", "there_us", "there_median_us"),
                )
            )
            for row in rows
        ],
    )
    load = f"load of the machine {os.getloadavg()[0]:.1f}"
    settings = (
        f"{num_steps} decode steps, each with the results of the one before and a page for one in {PAGE_TOKENS}; {load}"
    )
    record = gpu_records.make_record(SECTION, [as_result(row) for row in rows], "no model", settings, arguments, {})
    gpu_records.write_record(record, "rank-frames", arguments)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.argv.remove("--rank")
        main(open_rank)
    else:
        benchmark()

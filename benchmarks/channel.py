"""Cost of a separate core process: tokens/s of a tiny model on this CPU, in one process and in two: python benchmarks/channel.py

Both engines drive the same dummy model (the least work between two messages) with the same prompts in turn, text included.
Greedy tokens must be equal. The best of many short runs counts, because other load only makes runs slower; medians are
recorded too. So is the CPU time per token in the process that runs steps, because it delays the next step. On a shared
machine it is more reliable than wall time. The record is benchmarks/records/<cpu>-<date>-channel.json.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpu_records
from dummy_models import TINY, write_dummy_model

from holdfast.api.opened import open_engine
from holdfast.cli.bench_cases import Case, HoldfastContestant, Result, Timing, check_agreement, latency_cases, race
from holdfast.config import EngineConfig
from holdfast.engine.core_process import CoreProcess
from holdfast.engine.engine import Engine

MODEL = "Qwen3-0.6B"
TINIEST = {"batches": (1, 4), "output_len": 16, "repeats": 2}
SECTION = "channel"


class Place(HoldfastContestant):
    """An engine, named after its core's process, with that process's total CPU time."""

    def __init__(self, name: str, engine: Engine) -> None:
        super().__init__(engine)
        self.name = name
        self.seconds: dict[str, list[float]] = {}
        """One value per run, by case."""
        core = engine.core
        self._pid = core.pid if isinstance(core, CoreProcess) else os.getpid()

    def run(self, case: Case) -> Timing:
        """Time a run, with the core process's CPU time before and after."""
        before = processor_seconds(self._pid)
        timing = super().run(case)
        self.seconds.setdefault(case.measure, []).append(processor_seconds(self._pid) - before)
        return timing


def processor_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; Linux counts it to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def measure(folder: Path, cases: Sequence[Case], num_repeats: int) -> list[dict[str, object]]:
    """Measure both engines in turn."""
    path = write_dummy_model(folder, MODEL, **TINY)
    longest = max(case.longest for case in cases)
    engines = []
    try:
        for in_process in (False, True):
            config = EngineConfig(
                model=str(path),
                load_format="dummy",
                device="cpu",
                max_model_len=longest + 16,
                enable_prefix_caching=False,
                core_process=not in_process,
            )
            engines.append(open_engine(config, lambda done, total: None))
        remote, local = engines
        contestants = [Place("core in a process of its own", remote), Place("core in process", local)]
        check_agreement(cases, contestants, print)
        results = race(cases, contestants, num_repeats, lambda line: None)
        return [figures(result, contestants) for result in results]
    finally:
        for engine in engines:
            engine.close()


def figures(result: Result, contestants: Sequence[Place]) -> dict[str, object]:
    """Return figures by the best run, the median run and CPU time."""
    remote, local = result.rates
    best = result.best(remote) / result.best(local)
    case = result.case
    least = {one.name: min(one.seconds[case.measure]) * 1e6 / sum(case.num_new) for one in contestants}
    return {
        "measure": result.case.measure,
        "unit": "tokens/s",
        "values": {name: round(result.best(name), 1) for name in result.rates},
        "medians": {name: round(result.median(name), 1) for name in result.rates},
        "cost_percent": round(100 * (1 - best), 2),
        "median_cost_percent": round(100 * (1 - result.median(remote) / result.median(local)), 2),
        "core_microseconds_per_token": {name: round(value, 1) for name, value in least.items()},
        "core_cost_percent": round(100 * (least[remote] / least[local] - 1), 2),
        "runs": {name: [round(rate, 1) for rate in rates] for name, rates in result.rates.items()},
    }


def main() -> None:
    """Measure, print, and write the record."""
    parser: argparse.ArgumentParser = gpu_records.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.set_defaults(device="cpu")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--output-len", type=int, default=128)
    arguments = parser.parse_args()
    shape = {"batches": (1, 32), "output_len": arguments.output_len, "repeats": arguments.repeats}
    if arguments.tiny:
        shape = TINIEST
    cases = latency_cases((), shape["batches"], 16, shape["output_len"], random.Random(0), range(256))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), cases, int(shape["repeats"]))  # type: ignore[call-overload]
    costs = ("cost_percent", "median_cost_percent", "core_cost_percent")
    gpu_records.print_table(
        "tokens/s, best of the runs",
        ("", "in a process of its own", "in process", "cost %", "by medians %", "by processor time of the core %"),
        [(row["measure"], *row["values"].values(), *(row[name] for name in costs)) for row in rows],  # type: ignore[attr-defined]
    )
    words = f"{MODEL} with {TINY['num_hidden_layers']} layers of {TINY['hidden_size']}, dummy weights, float32"
    settings = f"16 prompt tokens, {shape['output_len']} new ones, {shape['repeats']} runs in turn"
    record = gpu_records.make_record(SECTION, rows, words, settings, arguments, {})
    gpu_records.write_record(record, "channel", arguments)


if __name__ == "__main__":
    main()

"""Holdfast and vLLM in one run on one GPU: python benchmarks/gpu_peers.py [--cases NAME,...] [--peer FOLDER] [--only ENGINE]

Each engine runs in a fresh process, one after the other, with dummy weights, the same config.json and the same prompts
(benchmarks/peer_case.py). A decode rate is the difference of two lengths of greedy output, by the best of two runs, after
prompts in the prefix cache. A prefill is the time to one token of a long prompt, by one run from 30,000 tokens on. The GPU
must be free again before the next engine starts.

FOLDER is a folder of site-packages with vLLM, or has such a folder in parts: part-aa, part-ab, ... and first_bytes. The parts
are two tar.xz archives, one after the other, and first_bytes is the size of the first. Without vLLM, Holdfast is measured
alone. The record is written after each case, so a run that is cut off leaves what it finished.

--together starts vLLM for all cases at once, which saves most of the time of its starts. Each waits when it is ready, and
they are measured in turn. Their KV caches are small then, and their memory is not measured.
"""

import argparse
import json
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from child_report import used_bytes
from dummy_models import tiny_settings, write_dummy_model
from gpu_decode import decode_rate
from gpu_records import Budget, make_record, options, print_table, run_child, write_record
from peer_case import OURS

CASE_SCRIPT = Path(__file__).parent / "peer_case.py"
PEER = "vllm"
ENGINES = (OURS, PEER)
PEER_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
}
ROUTING = {
    OURS: "its router, whose dummy weights spread rows uniformly; distinct_experts has the counted experts",
    PEER: "random experts from VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random, in place of its router",
}
"""How each engine chooses experts."""
NOT_THERE = (
    "vLLM is not there, so it is not measured; make a folder with "
    "`pip install --target FOLDER vllm==0.26.0` (built for torch 2.11), and pass --peer FOLDER"
)
MAX_OVERRUN = 2.0
"""Limit on the seconds of an engine, as a multiple of those expected."""
FREE_SECONDS = 60.0
"""Limit on the wait until the GPU is free."""
FREE_BYTES = 256 * 2**20
"""Tolerance of a free GPU."""
NUM_ERROR_CHARACTERS = 300
NUM_SHOWN_LINES = 150
"""Limit on the printed output of a failed engine: vLLM's cause stands above the traceback of its first process."""


class PeerCase(NamedTuple):
    """A model, the settings of both engines, and what is measured."""

    model: str
    words: str
    seconds: Mapping[str, float]
    """Seconds that each engine takes on an H200."""
    shared: Mapping[str, Any]
    """Settings that both engines have under one name."""
    ours: Mapping[str, Any] = {}
    peer: Mapping[str, Any] = {}
    shapes: Mapping[str, Any] = {}
    """Settings that replace some of the model's config.json."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    prefill_tokens: int | None = 7992
    first_token_lengths: tuple[int, ...] = ()
    """Prompt lengths of the time to the first token (TTFT)."""

    def settings(self, engine: str) -> dict[str, Any]:
        """Return the settings of an engine."""
        return {**self.shared, **(self.ours if engine == OURS else self.peer)}

    @property
    def prefills(self) -> list[int]:
        """Lengths of all prompts that are timed to one token, if they fit the context."""
        lengths = [] if self.prefill_tokens is None else [self.prefill_tokens]
        return [length for length in (*lengths, *self.first_token_lengths) if self.does_fit(length)]

    def does_fit(self, num_prompt_tokens: int) -> bool:
        return num_prompt_tokens + 1 <= self.shared["max_model_len"]


class Shape(NamedTuple):
    """Size of the decode runs."""

    prompt_tokens: int = 512
    lengths: tuple[int, int] = (17, 81)
    num_repeats: int = 2


FULL = Shape()
TINY = Shape(24, (2, 6), 1)
LARGE = {"max_model_len": 40960, "max_num_seqs": 256}
SMALL = {"max_model_len": 8192, "max_num_seqs": 128}
LONG = {"max_model_len": 131072, "max_num_seqs": 8}
DENSE_OURS, DENSE_PEER = {"memory_utilization": 0.98}, {"gpu_memory_utilization": 0.95}
SPARSE_OURS, SPARSE_PEER = {"memory_utilization": 0.9}, {"gpu_memory_utilization": 0.9}
FP8, K8V4 = {"quantization": "fp8"}, {"kv_cache_dtype": "turboquant_k8v4"}
FRESH = {"weight_cache": "off"}
FEW_GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 64]}}
"""All of the batches alone: with k8v4 pages vLLM captures its default sizes for minutes."""
ONE_GRAPH = {"compilation_config": {"cudagraph_capture_sizes": [1]}}
SMALL_SHARE = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 11 * 2**30}
"""Settings of an engine of vLLM that shares the GPU: it takes what weights and steps need, and this KV cache."""
YARN: Mapping[str, Any] = {
    "max_position_embeddings": LONG["max_model_len"],
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
"""The makers' settings of Qwen3 for long contexts."""
FIRST_TOKEN_LENGTHS = (2_000, 15_000, 64_000, 128_000)


def _seconds(ours: float, peer: float) -> dict[str, float]:
    return {OURS: ours, PEER: peer}


def _first_tokens(words: str, seconds: Mapping[str, float], both: Mapping[str, Any]) -> PeerCase:
    """Return a case of Qwen3-32B that measures the time to the first token alone."""
    return PeerCase(
        "Qwen3-32B",
        words,
        seconds,
        {**LONG, **both},
        DENSE_OURS,
        DENSE_PEER | ONE_GRAPH,
        YARN,
        batches=(),
        prefill_tokens=None,
        first_token_lengths=FIRST_TOKEN_LENGTHS,
    )


CASES: Mapping[str, PeerCase] = {
    "32b-bf16": PeerCase("Qwen3-32B", "bfloat16", _seconds(60, 130), LARGE, DENSE_OURS, DENSE_PEER),
    "32b-fp8": PeerCase("Qwen3-32B", "fp8", _seconds(50, 150), LARGE | FP8, DENSE_OURS | FRESH, DENSE_PEER),
    "32b-k8v4": PeerCase(
        "Qwen3-32B",
        "k8v4 pages",
        _seconds(45, 150),
        LARGE | K8V4 | {"max_num_seqs": 64},
        DENSE_OURS,
        DENSE_PEER | FEW_GRAPHS,
    ),
    "a3b-bf16": PeerCase("Qwen3-30B-A3B", "bfloat16", _seconds(45, 120), SMALL, SPARSE_OURS, SPARSE_PEER),
    "a3b-fp8": PeerCase("Qwen3-30B-A3B", "fp8", _seconds(65, 130), SMALL | FP8, SPARSE_OURS | FRESH, SPARSE_PEER),
    "v2lite": PeerCase("DeepSeek-V2-Lite", "bfloat16", _seconds(55, 120), SMALL, SPARSE_OURS, SPARSE_PEER),
    "gptoss-20b": PeerCase("gpt-oss-20b", "mxfp4", _seconds(55, 130), SMALL, SPARSE_OURS, SPARSE_PEER),
    "32b-ttft": _first_tokens("bfloat16, YaRN", _seconds(80, 140), {}),
    "32b-k8v4-ttft": _first_tokens("k8v4 pages, YaRN", _seconds(80, 170), K8V4),
}


def tiny_case(case: PeerCase) -> PeerCase:
    """Return a case that only shows that the scripts run."""
    return case._replace(
        shared={**case.shared, "max_model_len": 128, "max_num_seqs": 4},
        ours={**{key: value for key, value in case.ours.items() if key in FRESH}, "kv_cache_memory": "16MiB"},
        shapes={**tiny_settings(case.model), **case.shapes},
        batches=tuple(sorted({min(batch, 3) for batch in case.batches})),
        prefill_tokens=case.prefill_tokens and 40,
        first_token_lengths=case.first_token_lengths and (16, 100, 200),
    )


# --- the folder of vLLM


def find_site(folder: Path | None) -> Path | None:
    """Return the folder of site-packages that has vLLM, unpacked first if it is in parts; None if vLLM is not there."""
    if folder is not None and (folder / "first_bytes").is_file():
        folder = unpack(folder)
    return folder if folder is not None and PathFinder.find_spec(PEER, [str(folder)]) is not None else None


def unpack(folder: Path) -> Path:
    """Unpack the parts into a folder beside them, once."""
    site = folder.resolve().with_name(f"{folder.resolve().name}-site")
    if site.exists():
        return site
    first_bytes = int((folder / "first_bytes").read_text())
    with tempfile.TemporaryDirectory(dir=site.parent, prefix=f"{site.name}-") as temporary:
        with tempfile.TemporaryFile(dir=temporary) as joined:
            for part in sorted(folder.glob("part-*")):
                with part.open("rb") as content:
                    shutil.copyfileobj(content, joined)
            for offset in (0, first_bytes):
                joined.seek(offset)
                with lzma.open(joined) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
                    archive.extractall(Path(temporary) / site.name, filter="data")
        (Path(temporary) / site.name).rename(site)  # an unpacking that was cut off leaves no folder of this name
    return site


# --- the processes


def task_of(case: PeerCase, engine: str, folder: Path, shape: Shape, device: str) -> dict[str, Any]:
    """Return the task of an engine's process; prompts depend on nothing that differs between the engines."""
    path = write_dummy_model(folder, case.model, **case.shapes)
    own = {"device": device} if engine == OURS else {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    return {
        "engine": engine,
        "folder": str(path),
        "device": device,
        "options": {**own, **case.settings(engine)},
        "vocab_size": json.loads((path / "config.json").read_text())["vocab_size"],
        "prompt_tokens": shape.prompt_tokens,
        "lengths": list(shape.lengths),
        "num_repeats": shape.num_repeats,
        "batches": list(case.batches),
        "max_batch": max(case.batches, default=1),
        "prefills": case.prefills,
        "before_bytes": used_bytes() if device.startswith("cuda") else None,
    }


def environment_of(engine: str, site: Path | None) -> dict[str, str]:
    """Return what an engine's process adds to the environment; vLLM's folder comes first on its path."""
    paths = [str(site or ""), os.environ.get("PYTHONPATH", ""), str(CASE_SCRIPT.parent)]
    if engine == OURS:
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths[1:]))}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **PEER_ENVIRONMENT}


def run_engine(
    task: Mapping[str, Any], site: Path | None, timeout_seconds: float, show: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Run a task in its own process; return its findings, with an error of one line if it failed."""
    # With -P the benchmarks' folder comes last, so that no script there hides a package.
    command = ["-P", str(CASE_SCRIPT), json.dumps(task)]
    environment = environment_of(task["engine"], site)
    found = run_child(command, timeout_seconds, environment=environment, on_keep=show, num_shown_lines=NUM_SHOWN_LINES)
    show(found)
    if "error" in found:
        found["error"] = " ".join(str(found["error"]).split())[:NUM_ERROR_CHARACTERS]
    return found


class Turns:
    """Lets engines that are ready measure one at a time, after all are ready or have failed.

    A process of an engine waits for its gate, which is a file.
    """

    def __init__(self, gates: Mapping[str, Path]) -> None:
        self._gates = gates
        self._lock = threading.Lock()
        self._starting = set(gates)
        self._waiting: list[str] = []
        self._active: str | None = None

    def ready(self, key: str) -> None:
        """Note that an engine waits for its turn; again has no effect."""
        with self._lock:
            if key in self._starting:
                self._starting.remove(key)
                self._waiting.append(key)
            self._open_next()

    def done(self, key: str) -> None:
        """Note that an engine has ended, measured or not."""
        with self._lock:
            self._starting.discard(key)
            self._active = None if self._active == key else self._active
            self._waiting = [other for other in self._waiting if other != key]
            self._open_next()

    def _open_next(self) -> None:
        if not self._starting and self._active is None and self._waiting:
            self._active = self._waiting.pop(0)
            self._gates[self._active].touch()


def wait_until_free(empty_bytes: int | None, seconds: float = FREE_SECONDS) -> str | None:
    """Wait until the GPU holds what it held at the start; return an error of one line if it does not."""
    end = time.monotonic() + seconds
    while empty_bytes is not None:
        over_bytes = (used_bytes() or 0) - empty_bytes
        if over_bytes <= FREE_BYTES:
            break
        if time.monotonic() >= end:
            return f"the GPU still holds {over_bytes / 2**30:.2f} GiB of an earlier process"
        time.sleep(0.5)
    return None


# --- the figures


class Figure(NamedTuple):
    """One measure of one engine."""

    value: float
    unit: str


def figures_of(case: PeerCase, found: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of an engine's findings, which may be incomplete, by measure."""
    figures: dict[str, Figure] = {}
    if "start_seconds" in found:
        figures["start"] = Figure(round(found["start_seconds"], 1), "s")
    for entry in found.get("decode", ()):
        seconds = {int(length): runs for length, runs in entry["seconds"].items()}
        lengths = min(seconds), max(seconds)
        if min(seconds[lengths[1]]) > min(seconds[lengths[0]]):  # else no step was slow enough to be timed
            rate = decode_rate(entry["batch"], lengths, seconds)
            figures[f"decode, batch {entry['batch']}"] = Figure(round(rate, 1), "tokens/s")
    for entry in found.get("prefill", ()):
        num_tokens, best = entry["tokens"], min(entry["seconds"])
        if num_tokens == case.prefill_tokens:
            figures[f"prefill of {num_tokens} tokens"] = Figure(round(num_tokens / best, 1), "tokens/s")
        else:
            figures[f"first token after {num_tokens} tokens"] = Figure(round(1000 * best, 1), "ms")
    for words, key in (("ready", "ready_bytes"), ("traffic", "traffic_bytes")):
        if found.get(key) is not None and found.get("before_bytes") is not None:
            gib = (found[key] - found["before_bytes"]) / 2**30
            figures[f"memory after {words}"] = Figure(round(gib, 3), "GiB")
    if "planned_bytes" in found:
        figures["planned memory"] = Figure(round(found["planned_bytes"] / 2**30, 3), "GiB")
    if "allocations" in found.get("after_ready", {}):
        figures["allocations after ready"] = Figure(found["after_ready"]["allocations"], "allocations")
    return figures


Printer = Callable[[Mapping[str, Any]], None]


def printer(key: str, engine: str, case: PeerCase) -> Printer:
    """Return a function that prints a line for each measure that it has not printed before."""
    printed: set[str] = set()

    def show(found: Mapping[str, Any]) -> None:
        for measure, figure in figures_of(case, found).items():
            if measure not in printed:
                printed.add(measure)
                print(f"{key}, {engine}: {measure}: {figure.value:g} {figure.unit}", flush=True)

    return show


def prompts_of(found: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """Return the digests of the prompts of an engine's findings."""
    decode = {("batch", entry["batch"]): entry["prompts"] for entry in found.get("decode", ())}
    return decode | {("tokens", entry["tokens"]): entry["prompts"] for entry in found.get("prefill", ())}


def rows_of(case: PeerCase, found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each measure of either engine, with the ratio of ours to the peer's if both have it."""
    ours, theirs = (prompts_of(found.get(engine, {})) for engine in ENGINES)
    different = [key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
    assert not different, f"the engines had different prompts: {different}"
    figures = {engine: figures_of(case, findings) for engine, findings in found.items()}
    rows: list[dict[str, Any]] = []
    for measure in dict.fromkeys(name for own in figures.values() for name in own):
        both = {engine: own[measure] for engine, own in figures.items() if measure in own}
        row: dict[str, Any] = {
            "measure": f"{case.model}, {case.words}, {measure}",
            "unit": next(iter(both.values())).unit,
            "values": {engine: figure.value for engine, figure in both.items()},
        }
        if len(both) == len(ENGINES) and both[PEER].value:
            row["ratio"] = round(both[OURS].value / both[PEER].value, 4)
        rows.append(row)
    return rows


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table at the end of a run."""
    lines = [(row["measure"], row["unit"], *map(row["values"].get, ENGINES), row.get("ratio")) for row in rows]
    print_table("Holdfast beside vLLM", ("", "unit", *ENGINES, f"{OURS}/{PEER}"), lines)


# --- the run


class Run(NamedTuple):
    """What was found until now, and the settings of the run."""

    arguments: argparse.Namespace
    site: Path | None
    engines: tuple[str, ...]
    shape: Shape
    findings: dict[str, dict[str, dict[str, Any]]]
    """Findings by case and engine."""
    cases: dict[str, PeerCase]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for key, found in self.findings.items() for row in rows_of(self.cases[key], found)]

    @property
    def shared_settings(self) -> Mapping[str, Any]:
        """Settings that each engine of the peer has because it shares the GPU."""
        return SMALL_SHARE if self.arguments.together else {}

    def record(self) -> dict[str, object]:
        """Build the record of all cases until now."""
        named = self.findings.items()
        versions = {
            engine: found["versions"] for _, both in named for engine, found in both.items() if "versions" in found
        }
        facts = {
            "context": f"{self.shape.prompt_tokens} tokens of prompt, {self.shape.lengths} of output",
            "routing": ROUTING,
            "engine_versions": versions,
            "errors": {
                f"{key}, {engine}": found["error"]
                for key, both in named
                for engine, found in both.items()
                if "error" in found
            },
            "findings": self.findings,
            "settings_of_peer": {
                key: {**self.cases[key].settings(PEER), **self.shared_settings} for key in self.findings
            },
            "environment_of_peer": PEER_ENVIRONMENT,
            "engine_settings": {
                key: {
                    "model": self.cases[key].model,
                    "options": self.cases[key].settings(OURS),
                    "shapes": self.cases[key].shapes,
                }
                for key in self.findings
            },
        }
        models = ", ".join(dict.fromkeys(self.cases[key].model for key in self.findings))
        return make_record("gpu-peers", self.rows, models, "dummy weights, public API", self.arguments, facts)


def measure(run: Run, key: str, engine: str, budget: Budget, empty_bytes: int | None) -> dict[str, Any]:
    """Run one engine of a case if the time and the GPU allow; an engine that does not run has an error of one line."""
    case = run.cases[key]
    expected = case.seconds[engine]
    error = no_time(run, expected, budget) or wait_until_free(empty_bytes)
    if error is not None:
        return {"error": error}
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(case, engine, Path(folder), run.shape, run.arguments.device)
        limit_seconds = min(budget.left_seconds, MAX_OVERRUN * expected)
        return run_engine(task, run.site, limit_seconds, printer(key, engine, case))


def measure_peers_together(run: Run, budget: Budget) -> dict[str, dict[str, Any]]:
    """Start the peer's engines of all cases at once, and measure them in turn; return the findings by case."""
    expected = sum(case.seconds[PEER] for case in run.cases.values())
    if (error := no_time(run, max(case.seconds[PEER] for case in run.cases.values()), budget)) is not None:
        return {key: {"error": error} for key in run.cases}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(run.cases)) as pool:
        folder = Path(name)
        turns = Turns({key: folder / f"{key}.gate" for key in run.cases})

        def run_one(key: str) -> dict[str, Any]:
            case = run.cases[key]._replace(peer={**run.cases[key].peer, **run.shared_settings})
            show = printer(key, PEER, case)

            def on_keep(found: Mapping[str, Any]) -> None:
                show(found)
                turns.ready(key)

            task = task_of(case, PEER, folder / key, run.shape, run.arguments.device)
            task |= {"gate": str(folder / f"{key}.gate"), "before_bytes": None}
            try:
                found = run_engine(task, run.site, min(budget.left_seconds, MAX_OVERRUN * expected), on_keep)
                found["start_beside_others_seconds"] = found.pop("start_seconds", None)
                return found
            finally:
                turns.done(key)

        return dict(zip(run.cases, pool.map(run_one, run.cases), strict=True))


def no_time(run: Run, expected_seconds: float, budget: Budget) -> str | None:
    """Return an error of one line if so many seconds are not left."""
    if run.arguments.tiny or budget.left_seconds >= expected_seconds:
        return None
    return f"left out: it takes {expected_seconds:.0f} s, and {budget.left_seconds:.0f} s are left"


def measure_all(run: Run, budget: Budget) -> None:
    """Measure the cases in turn, and write the record after each; a case begins only if all of its engines fit the time."""
    empty_bytes = used_bytes() if run.arguments.device.startswith("cuda") else None
    is_together = run.arguments.together and PEER in run.engines
    peers = measure_peers_together(run, budget) if is_together else {}
    engines = [engine for engine in run.engines if not (is_together and engine == PEER)]
    for key, case in run.cases.items():
        for length in case.first_token_lengths:
            if not case.does_fit(length):
                print(f"{key}: no first token after {length} tokens: the context has {case.shared['max_model_len']}")
        found = run.findings[key] = {PEER: peers[key]} if key in peers else {}
        error = no_time(run, sum(case.seconds[engine] for engine in engines), budget)
        for engine in engines:
            found[engine] = measure(run, key, engine, budget, empty_bytes) if error is None else {"error": error}
        for engine, findings in found.items():
            if "error" in findings:
                print(f"{key}, {engine}: {findings['error']}", flush=True)
        if run.rows:
            write_record(run.record(), record_label(run.cases), run.arguments)


def record_label(cases: Collection[str]) -> str:
    """Return the record's name; runs of different cases on one day have different names."""
    return "peers" if set(cases) == CASES.keys() else "-".join(("peers", *cases))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = options("Holdfast and vLLM in one run on one GPU")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--peer", type=Path, default=None, help="folder of site-packages with vLLM, or of its parts")
    parser.add_argument("--together", action="store_true", help="start vLLM for all cases at once; measure in turn")
    parser.add_argument("--only", choices=ENGINES, default=None, help="measure one of the engines")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases.split(",")) - CASES.keys():
        parser.error(f"unknown --cases {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return arguments


def engines_of(arguments: argparse.Namespace, site: Path | None) -> Iterator[str]:
    """Return the engines that are measured: those that are there, or the one of --only."""
    for engine in ENGINES:
        if arguments.only in (None, engine) and (engine == OURS or site is not None):
            yield engine


def main(argv: Sequence[str] | None = None) -> None:
    """Run the requested cases while time allows."""
    arguments = parse(argv)
    budget = Budget(arguments.budget_seconds)
    site = None if arguments.only == OURS else find_site(arguments.peer)
    if site is None and arguments.only != OURS:
        print(NOT_THERE, flush=True)
    wanted = {key: CASES[key] for key in arguments.cases.split(",")}
    cases = {key: tiny_case(case) if arguments.tiny else case for key, case in wanted.items()}
    run = Run(arguments, site, (*engines_of(arguments, site),), TINY if arguments.tiny else FULL, {}, cases)
    measure_all(run, budget)
    if not run.rows:
        sys.exit("error: no engine ran; see above")
    show_table(run.rows)


if __name__ == "__main__":
    main()

"""`holdfast serve` against transformers' server and against LLM in process, on this CPU: python benchmarks/serve.py

Both servers serve the default model, with weights written as safetensors, in one type, with equal threads. Both stay up and
alternate under the load of `holdfast bench serve`: 1, 8 and 32 clients, streamed chat, greedy, answers that end only at
their length. Both get equal tokens in a round; no round repeats a prompt. The server's cost is measured at 8 clients against
the same prompts through LLM in this process, which is idle while the server runs. It is seconds from the first request to
the end of the last answer, with and without this client's CPU time. The record also has CPU time of the server's processes
against that of LLM, which is more reliable on a shared machine. transformers' server needs accelerate. The record is benchmarks/records/cpu-<date>-serve.json.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import gpu_records
from channel import processor_seconds

from holdfast.cli.bench_client import Url, ask
from holdfast.cli.bench_load import CHAT, GREEDY, Figures, Fit, Sizes, Target, Work, measure, random_work, settle

SECTION = "serve"
OURS, THEIRS = "holdfast", "transformers"
READY_SECONDS = 180.0
MAIN = "import sys; from holdfast.cli.app import main; sys.argv[0] = 'holdfast'; main()"
COST_CLIENTS = 8
DTYPE = "float32"
TINY_CONFIG = {"num_hidden_layers": 2}


class Shape(NamedTuple):
    """Size of the load."""

    clients: tuple[int, ...] = (1, 8, 32)
    num_input: int = 64
    num_output: int = 32
    rounds: int = 2
    cost_output: int = 64
    cost_rounds: int = 5


TINIEST = Shape((1, 2), 16, 4, 1, 4, 1)


def write_model(folder: Path, tiny: bool) -> Path:
    """Write the default model as a folder for every engine, without end tokens."""
    import transformers

    from holdfast.api.opened import open_headers
    from holdfast.cli.bench_transformers import open_transformers
    from holdfast.config import EngineConfig
    from holdfast.text.gguf_tokenizer import tokenizer_from_gguf

    opened = open_headers(EngineConfig())
    assert opened.gguf is not None, "the default model is a GGUF file"
    model = open_transformers(opened, DTYPE, "cpu")
    path = folder / "SmolLM2-135M"
    if tiny:
        model.model.layers = model.model.layers[: TINY_CONFIG["num_hidden_layers"]]
        model.config.update(TINY_CONFIG)
        model.config.layer_types = None
    # No end token: answers have the requested length in every server.
    model.config.eos_token_id = None
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    metadata = opened.gguf.metadata
    backend: Any = vars(tokenizer_from_gguf(metadata, opened.path.name))["_backend"]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>")
    template = metadata["tokenizer.chat_template"]
    fast.chat_template = template.decode() if isinstance(template, bytes) else str(template)
    fast.save_pretrained(path)
    opened.source.close()
    return path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Running(NamedTuple):
    """A running server."""

    name: str
    target: Target
    fit: Fit
    pid: int


@contextmanager
def started(name: str, command: Sequence[str], model: str, port: int, log: Path) -> Iterator[Running]:
    """Run a server for the duration of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        url = Url.read(f"http://127.0.0.1:{port}")
        end = time.monotonic() + READY_SECONDS
        while asyncio.run(ask(url, "/health", None, 5.0))[0].error is not None:
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"error: {name} was to be started; it is not up; it said: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        target, fit = asyncio.run(settle(Target(url, model, CHAT, 600.0, GREEDY), wants_all=True))
        yield Running(name, target, fit, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def our_command(path: Path, port: int, shape: Shape) -> list[str]:
    options = (
        "--dtype",
        DTYPE,
        "--device",
        "cpu",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        str(max(shape.clients)),
    )
    return [sys.executable, "-c", MAIN, "serve", str(path), "--port", str(port), *options]


def their_command(path: Path, port: int) -> list[str]:
    options = ("--device", "cpu", "--dtype", DTYPE, "--host", "127.0.0.1", "--log-level", "error")
    program = Path(sys.executable).parent / "transformers"
    return [sys.executable, str(program), "serve", str(path), "--port", str(port), *options]


def load(shape: Shape, clients: int, fit: Fit, seed: int) -> list[Work]:
    """Return the requests of one round."""
    number = max(clients, 4)
    sizes = Sizes((shape.num_input, shape.num_input), (shape.num_output, shape.num_output))
    return random_work(CHAT, number, sizes, fit, random.Random(seed))


def compare(servers: Sequence[Running], shape: Shape) -> list[dict[str, Any]]:
    """Run rounds in turn, by clients."""
    rows: list[dict[str, Any]] = []
    for clients in shape.clients:
        rounds: dict[str, list[Figures]] = {server.name: [] for server in servers}
        for number in range(shape.rounds):
            work = load(shape, clients, servers[0].fit, seed=1000 * clients + number)
            for server in servers:
                figures = asyncio.run(measure(server.target, work, clients, None, lambda *counts: None))
                if figures.errors:
                    sys.exit(f"error: {server.name} failed: {figures.errors} {figures.examples}")
                rounds[server.name].append(figures)
                print(clients, server.name, json.dumps(figures.as_dict()), flush=True)
        rows += comparison_rows(clients, rounds)
    return rows


def comparison_rows(clients: int, rounds: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """Return throughput and TTFT, by medians of rounds."""
    rates = {name: [one.per_second(one.num_output_tokens) for one in found] for name, found in rounds.items()}
    firsts = {name: [1e3 * one.ttft.percentiles[0] for one in found] for name, found in rounds.items()}
    rows = []
    for measure_name, unit, runs in (("output", "tokens/s", rates), ("TTFT p50", "ms", firsts)):
        values = {name: round(statistics.median(found), 2) for name, found in runs.items()}
        others = {
            name: value / values[OURS] if unit == "ms" else values[OURS] / value for name, value in values.items()
        }
        rows.append(
            {
                "measure": f"{measure_name}, {clients} clients" if clients > 1 else f"{measure_name}, 1 client",
                "unit": unit,
                "values": values,
                "runs": {name: [round(one, 2) for one in found] for name, found in runs.items()},
                "ratios": {name: round(ratio, 3) for name, ratio in others.items() if name != OURS},
            }
        )
    details = {name: [one.as_dict() for one in found] for name, found in rounds.items()}
    rows[0]["figures"] = details
    return rows


def server_cost(server: Running, path: Path, shape: Shape) -> dict[str, Any]:
    """Run equal prompts over HTTP and through LLM in this process, in turn."""
    from holdfast.api.llm import LLM
    from holdfast.request.sampling_params import SamplingParams

    most = max(*shape.clients, COST_CLIENTS)
    llm = LLM(str(path), dtype=DTYPE, device="cpu", max_model_len=1024, max_num_seqs=most)
    params = SamplingParams(temperature=0.0, max_tokens=shape.cost_output, ignore_eos=True)
    longer = shape._replace(num_output=shape.cost_output)
    pids = [server.pid, *children(server.pid)]
    served: list[Figures] = []
    alone: list[float] = []
    busy: list[tuple[float, float]] = []
    for number in range(shape.cost_rounds + 1):
        work = load(longer, COST_CLIENTS, server.fit, seed=77_000 + number)
        before = sum(map(processor_seconds, pids))
        figures = asyncio.run(measure(server.target, work, COST_CLIENTS, None, lambda *counts: None))
        between = sum(map(processor_seconds, pids))
        mine, start = processor_seconds(os.getpid()), time.perf_counter()
        outputs = llm.chat([one.messages for one in work], params, progress=False)
        seconds, mine = time.perf_counter() - start, processor_seconds(os.getpid()) - mine
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if figures.errors or num_tokens != figures.num_output_tokens:
            sys.exit(f"error: token counts differ: {num_tokens} and {figures.num_output_tokens}")
        if number:  # the first warms both
            served.append(figures)
            alone.append(seconds)
            busy.append((between - before, mine))
        print(
            "cost",
            round(figures.seconds, 3),
            round(figures.cpu_seconds, 3),
            round(seconds, 3),
            round(between - before, 3),
            round(mine, 3),
            flush=True,
        )
    llm.shutdown()
    return cost_row(served, alone, busy)


def children(pid: int) -> list[int]:
    """Return the child processes: the core of a server."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]


def cost_row(served: Sequence[Figures], alone: Sequence[float], busy: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the cost by medians of pairs, and by each side's best run, because other load only slows runs."""
    whole = [100 * (one.seconds / seconds - 1) for one, seconds in zip(served, alone, strict=True)]
    off = [100 * ((one.seconds - one.cpu_seconds) / seconds - 1) for one, seconds in zip(served, alone, strict=True)]
    best, best_off = min(one.seconds for one in served), min(one.seconds - one.cpu_seconds for one in served)
    return {
        "measure": f"cost of the server, {COST_CLIENTS} clients",
        "unit": "%",
        "values": {
            "client's CPU time taken off": round(statistics.median(off), 2),
            "as it is": round(statistics.median(whole), 2),
            "by best runs, client's CPU time taken off": round(100 * (best_off / min(alone) - 1), 2),
            "by best runs, as it is": round(100 * (best / min(alone) - 1), 2),
            "processor time of both processes": round(statistics.median(100 * (a / b - 1) for a, b in busy), 2),
        },
        "processor_seconds": {
            "served": [round(ours, 3) for ours, _ in busy],
            "in process": [round(theirs, 3) for _, theirs in busy],
        },
        "seconds": {
            "served": [round(one.seconds, 3) for one in served],
            "in process": [round(one, 3) for one in alone],
        },
        "client_cpu_seconds": [round(one.cpu_seconds, 3) for one in served],
    }


def main() -> None:
    """Measure, print, and write the record."""
    parser = gpu_records.options((__doc__ or "").partition("\n")[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--threads", type=int, default=None, help="of every engine; else all cores")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--clients", default=None, help="numbers with commas between")
    parser.add_argument("--only-ours", action="store_true", help="the cost alone, without transformers")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
        import torch

        torch.set_num_threads(arguments.threads)
    shape = TINIEST if arguments.tiny else Shape()
    if arguments.rounds is not None:
        shape = shape._replace(rounds=arguments.rounds, cost_rounds=max(arguments.rounds, shape.cost_rounds))
    if arguments.clients is not None:
        shape = shape._replace(clients=tuple(int(word) for word in arguments.clients.split(",")))
    rows = run_all(arguments, shape)
    shown = [(row["measure"], row["unit"], *(row["values"].values() if row["unit"] != "%" else ())) for row in rows]
    for row in shown:
        print(*row)
    print(json.dumps(rows[-1]["values"]))
    settings = (
        f"{DTYPE}, {shape.num_input} prompt tokens, {shape.num_output} new ones, greedy, streamed chat, "
        f"{shape.rounds} rounds in turn; {arguments.threads or 'all'} threads"
    )
    facts = {"num_threads": arguments.threads, "load_average": os.getloadavg()}
    record = gpu_records.make_record(SECTION, rows, "SmolLM2-135M-Instruct", settings, arguments, facts)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"cpu-{gpu_records.today()}-serve.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {path.name}")


def run_all(arguments: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Start all servers, then run each part."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        path = write_model(folder, arguments.tiny)
        port = free_port()
        command = our_command(path, port, shape)
        ours = stack.enter_context(started(OURS, command, path.name, port, folder / "ours.log"))
        rows = []
        if not arguments.only_ours:
            with ExitStack() as theirs:
                port = free_port()
                command = their_command(path, port)
                peer = theirs.enter_context(started(THEIRS, command, str(path), port, folder / "theirs.log"))
                rows = compare([ours, peer], shape)
        return [*rows, server_cost(ours, path, shape)]


if __name__ == "__main__":
    main()

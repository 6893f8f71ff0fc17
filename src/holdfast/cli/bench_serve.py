"""`holdfast bench serve`: load on any OpenAI-compatible server: times to tokens, throughput, errors by kind; no torch."""

import asyncio
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.api.progress import GenerationBar
from holdfast.cli.bench_client import Url
from holdfast.cli.bench_load import (
    CHAT,
    GREEDY,
    PATHS,
    PERCENTILES,
    Figures,
    Sizes,
    Target,
    Work,
    measure,
    random_work,
    read_dataset,
    served_model,
    settle,
)
from holdfast.cli.bench_record import commit, cpu_name, machine, num_cores, today, versions
from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.options import read_count, read_number, read_range
from holdfast.cli.tables import show, show_beside
from holdfast.cli.terminal import FAILED, STDOUT, dumps, for_terminal, write_answer, write_line
from holdfast.errors import ConfigError, shown

KEY_VARIABLE = "HOLDFAST_API_KEY"
MAX_REQUESTS = 1_000_000
MAX_CLIENTS = 2**16
MAX_SECONDS = 86400.0
SPARE_FILES = 32
DEFAULT_CLIENTS = 8
DEFAULT_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    """What was typed, as text."""

    url: str
    model: str | None
    endpoint: str
    clients: str | None
    rate: str | None
    requests: str | None
    input_len: str
    output_len: str
    dataset: str | None
    api_key: str | None
    timeout: str
    seed: str
    json_file: str | None


@dataclass(frozen=True, slots=True)
class _Load:
    """The same, read."""

    num_clients: int | None
    rate: float | None
    num_requests: int | None
    sizes: Sizes
    seed: int

    @property
    def words(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s (Poisson)"
        return f"{self.num_clients} clients"


def bench_serve(options: ServeBenchOptions) -> int | None:
    """Measure, tell, and keep a record; an exit code where a request has failed."""
    url = Url.read(options.url, options.api_key or os.environ.get(KEY_VARIABLE) or None)
    if options.endpoint not in PATHS:
        raise ConfigError(
            f"--endpoint {shown(options.endpoint)} was asked", f"{', '.join(PATHS)} work", f"write --endpoint {CHAT}"
        )
    if options.json_file not in (None, STDOUT) and not Path(str(options.json_file)).absolute().parent.is_dir():
        raise ConfigError(f"--json {shown(options.json_file)} was asked", "its folder does not exist", "make it first")
    load = _read_load(options)
    timeout = read_number(options.timeout)
    if isinstance(timeout, str) or not 0 < timeout <= MAX_SECONDS:
        raise ConfigError(
            f"--timeout {shown(options.timeout)} was asked", "seconds above 0 work", "write --timeout 600"
        )
    _raise_file_limit(load)
    data = _read_dataset(options, load)
    model, target, figures = asyncio.run(_run(options, url, load, timeout, data))
    is_to_stderr = options.json_file == STDOUT
    lines = figure_lines(figures, f"{for_terminal(model)} at {url.address}{PATHS[options.endpoint]}, {load.words}")
    show_beside(lines) if is_to_stderr else show(lines)
    if options.json_file is not None:
        _write_record(options, model, load, target, figures)
    return FAILED if figures.errors else None


def _read_dataset(options: ServeBenchOptions, load: _Load) -> list[Work] | None:
    """Before a server is asked anything."""
    if options.dataset is None:
        return None
    return read_dataset(options.dataset, options.endpoint, load.num_requests, load.sizes.num_output)


async def _run(
    options: ServeBenchOptions, url: Url, load: _Load, timeout: float, data: list[Work] | None
) -> tuple[str, Target, Figures]:
    model = options.model or await served_model(url, timeout)
    plain = Target(url, model, options.endpoint, timeout, GREEDY)
    target, fit = await settle(plain, wants_all=data is None)
    if data is not None:
        work = data
    else:
        if target is plain:
            write_line("note: this server cannot be told to ignore the end of an answer; answers may be shorter")
        choose = random.Random(load.seed)
        work = random_work(options.endpoint, load.num_requests or DEFAULT_REQUESTS, load.sizes, fit, choose)
    with GenerationBar(len(work), True) as bar:
        figures = await measure(target, work, load.num_clients, load.rate, bar.update, load.seed)
    return model, target, figures


def _read_load(options: ServeBenchOptions) -> _Load:
    if options.clients is not None and options.rate is not None:
        raise ConfigError(
            "--clients and --rate were asked", "clients wait for their answers, arrivals do not", "choose one of them"
        )
    rate = None if options.rate is None else read_number(options.rate)
    if isinstance(rate, str) or (rate is not None and not (0 < rate < math.inf)):
        raise ConfigError(
            f"--rate {shown(options.rate)} was asked", "requests per second above 0 work", "write --rate 4"
        )
    clients = None if rate is not None else _whole(options.clients or str(DEFAULT_CLIENTS), "--clients", MAX_CLIENTS)
    requests = None if options.requests is None else _whole(options.requests, "--requests", MAX_REQUESTS)
    if requests is None and options.dataset is None:
        requests = max(DEFAULT_REQUESTS, 4 * (clients or 0))
    seed = read_count(options.seed)
    if not isinstance(seed, int):
        raise ConfigError(f"--seed {shown(options.seed)} was asked", "a whole number works", "write --seed 0")
    sizes = Sizes(read_range(options.input_len, "--input-len"), read_range(options.output_len, "--output-len"))
    return _Load(clients, rate, requests, sizes, seed)


def _whole(text: str, option: str, most: int) -> int:
    number = read_count(text)
    if not isinstance(number, int) or not 1 <= number <= most:
        raise ConfigError(
            f"{option} {shown(text)} was asked", f"whole numbers from 1 to {most} work", f"write {option} 8"
        )
    return number


def _raise_file_limit(load: _Load) -> None:
    """Every client has a connection, which is an open file."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = load.num_clients or load.num_requests or DEFAULT_REQUESTS
    wanted = most + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        if load.num_clients is None:  # arrivals are rarely all there at once
            wanted = hard
        else:
            raise ConfigError(
                f"--clients {most} was asked",
                f"this process may open {hard} files",
                f"ask for {hard - SPARE_FILES} at most, or raise ulimit -n",
            )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def figure_lines(figures: Figures, title: str) -> list[Line]:
    """Two tables, and what went wrong."""
    counted = "" if figures.is_counted_by_server else " (by events: the server tells no usage)"
    rates = (
        ("", "per second", "in all"),
        ("requests", f"{figures.per_second(figures.num_finished):.2f}", str(figures.num_finished)),
        ("input tokens", f"{figures.per_second(figures.num_input_tokens):.1f}", str(figures.num_input_tokens)),
        (
            f"output tokens{counted}",
            f"{figures.per_second(figures.num_output_tokens):.1f}",
            str(figures.num_output_tokens),
        ),
    )
    kinds = (
        ("time to first token (TTFT)", figures.ttft),
        ("time per output token (TPOT)", figures.tpot),
        ("between two texts (ITL)", figures.itl),
        ("whole answer", figures.whole),
    )
    times = (
        ("milliseconds", "mean", *(f"p{percent}" for percent in PERCENTILES)),
        *((name, *(_ms(value) for value in (spread.mean, *spread.percentiles))) for name, spread in kinds),
    )
    wrong = [
        Line(f"{count} x {kind}" + (f": {for_terminal(figures.examples[kind])}" if figures.examples.get(kind) else ""))
        for kind, count in figures.errors.items()
    ]
    failed = sum(figures.errors.values())
    return [
        Line(f"{title}: {figures.seconds:.2f} s, this client's own CPU {figures.cpu_seconds:.2f} s"),
        *table_lines(Table(rates, right=(1, 2))),
        *table_lines(Table(times, right=(1, 2, 3, 4))),
        *([Line(f"{failed} of {figures.num_requests} requests failed:"), *wrong] if wrong else []),
    ]


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.1f}"


def _write_record(options: ServeBenchOptions, model: str, load: _Load, target: Target, figures: Figures) -> None:
    record = {
        "date": today(),
        "machine": machine(),
        "model": model,
        "settings": f"{options.endpoint}, {load.words}",
        "results": [figures.as_dict()],
        "endpoint": options.endpoint,
        "clients": load.num_clients,
        "rate": load.rate,
        "extra_body": dict(target.extra),
        "command": _command(sys.argv[1:]),
        "commit": commit(),
        "versions": versions(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
    }
    text = f"{dumps(record, indent=1)}\n"
    if options.json_file == STDOUT:
        write_answer(text)
        return
    Path(str(options.json_file)).write_text(text, encoding="utf-8")
    write_line(f"record written to {options.json_file}")


def _command(words: Sequence[str]) -> str:
    """What was typed, without the key."""
    import shlex

    kept = [
        "***"
        if place and words[place - 1] == "--api-key"
        else word.partition("=")[0] + "=***"
        if word.startswith("--api-key=")
        else word
        for place, word in enumerate(words)
    ]
    return shlex.join(["holdfast", *kept])

"""`holdfast bench serve`: load on any OpenAI-compatible server: latency, throughput, errors by kind; no torch."""

import asyncio
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.api.progress import GenerationBar
from holdfast.cli.bench_client import Url
from holdfast.cli.bench_load import (
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
from holdfast.cli.bench_record import make_record, record_file, write_record
from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.options import Given, read_choice, read_count, read_number, read_range, read_whole
from holdfast.cli.tables import show, show_beside
from holdfast.cli.terminal import FAILED, STDOUT, for_terminal, write_line
from holdfast.errors import ConfigError

KEY_VARIABLE = "HOLDFAST_API_KEY"
MAX_REQUESTS = 1_000_000
MAX_CLIENTS = 2**16
MAX_SECONDS = 86400.0
SPARE_FILES = 32
DEFAULT_CLIENTS = 8
DEFAULT_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    """Options as text."""

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
    """Parsed options of the load."""

    num_clients: int | None
    rate: float | None
    num_requests: int | None
    sizes: Sizes
    seed: int

    @property
    def text(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s (Poisson)"
        return f"{self.num_clients} clients"


def bench_serve(options: ServeBenchOptions, engine: Given) -> int | None:
    """Measure, print and record; return an exit code if a request failed."""
    url = Url.read(options.url, options.api_key or os.environ.get(KEY_VARIABLE) or None)
    read_choice("--endpoint", options.endpoint, list(PATHS))
    record_file(options.json_file)
    load = _read_load(options)
    timeout = read_number(options.timeout)
    if isinstance(timeout, str) or not 0 < timeout <= MAX_SECONDS:
        raise ConfigError("value.out_of_range", name="--timeout", minimum=0, maximum=MAX_SECONDS, value=options.timeout)
    _raise_file_limit(load)
    data = None
    if options.dataset is not None:
        data = read_dataset(options.dataset, options.endpoint, load.num_requests, load.sizes.num_output)
    model, target, figures = asyncio.run(_run(options, url, load, timeout, data))
    lines = figure_lines(figures, f"{for_terminal(model)} at {url.address}{PATHS[options.endpoint]}, {load.text}")
    show_beside(lines) if options.json_file == STDOUT else show(lines)
    if options.json_file is not None:
        command, settings = ["holdfast", *without_key(sys.argv[1:])], f"{options.endpoint}, {load.text}"
        facts = {"endpoint": options.endpoint, "clients": load.num_clients, "rate": load.rate}
        facts["extra_body"] = dict(target.extra)
        write_record(make_record(model, settings, [figures.as_dict()], command, **facts), options.json_file)
    return FAILED if figures.errors else None


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
            write_line("note: this server has no ignore_eos, so answers may be shorter")
        choose = random.Random(load.seed)
        work = random_work(options.endpoint, load.num_requests or DEFAULT_REQUESTS, load.sizes, fit, choose)
    with GenerationBar(len(work), True) as bar:
        figures = await measure(target, work, load.num_clients, load.rate, bar.count, load.seed)
    return model, target, figures


def _read_load(options: ServeBenchOptions) -> _Load:
    if options.clients is not None and options.rate is not None:
        reason = "clients wait for their answers, arrivals do not"
        raise ConfigError("cli.exclusive", first="--clients", second="--rate", reason=reason)
    rate = None if options.rate is None else read_number(options.rate)
    if isinstance(rate, str) or (rate is not None and not (0 < rate < math.inf)):
        raise ConfigError("value.not_positive", name="--rate", value=options.rate)
    clients = None
    if rate is None:
        clients = read_whole(options.clients or str(DEFAULT_CLIENTS), "--clients", 1, MAX_CLIENTS)
    requests = None if options.requests is None else read_whole(options.requests, "--requests", 1, MAX_REQUESTS)
    if requests is None and options.dataset is None:
        requests = max(DEFAULT_REQUESTS, 4 * (clients or 0))
    seed = read_count(options.seed)
    if not isinstance(seed, int):
        raise ConfigError("value.not_integer", name="--seed", value=options.seed)
    sizes = Sizes(read_range(options.input_len, "--input-len"), read_range(options.output_len, "--output-len"))
    return _Load(clients, rate, requests, sizes, seed)


def _raise_file_limit(load: _Load) -> None:
    """Raise the limit of open files: every client has a connection."""
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
        if load.num_clients is not None:
            raise ConfigError("bench.too_many_clients", clients=most, files=hard, most=hard - SPARE_FILES)
        wanted = hard  # requests at a rate are rarely all open at once
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def figure_lines(figures: Figures, title: str) -> list[Line]:
    """Print rates, times and errors."""
    counted = "" if figures.is_counted_by_server else " (by events: the server sends no usage)"
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


def without_key(arguments: Sequence[str]) -> list[str]:
    """Hide the API key of a command line."""
    hidden = []
    for place, argument in enumerate(arguments):
        if place and arguments[place - 1] == "--api-key":
            hidden.append("***")
        else:
            hidden.append("--api-key=***" if argument.startswith("--api-key=") else argument)
    return hidden

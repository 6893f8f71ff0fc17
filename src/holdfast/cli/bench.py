"""`holdfast bench latency` and `throughput`: speed of this machine as a table and as a record; no torch."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from holdfast.api.opened import open_headers
from holdfast.api.progress import is_watched
from holdfast.cli.bench_cases import (
    UNIT,
    Case,
    Contestant,
    HoldfastContestant,
    Result,
    check_agreement,
    latency_cases,
    race,
    throughput_case,
)
from holdfast.cli.bench_record import make_record, record_file, write_record
from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.opened_model import import_torch, model_name, open_visibly, report_file, shown_download
from holdfast.cli.options import Given, read_choice, read_counts, read_range, read_whole
from holdfast.cli.tables import show, show_beside
from holdfast.cli.terminal import STDOUT, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.loading.planning.open_model import OpenModel
from holdfast.memory.device_rates import num_cores

PEERS = ("transformers",)
MAX_TOKENS = 1 << 20
Cases = Callable[[random.Random, range], list[Case]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of both benchmarks."""

    model: str | None
    input_len: str
    output_len: str
    against: str | None
    repeats: str
    threads: str | None
    json_file: str | None
    memory_report: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """Options of `bench latency`."""

    prefill: str
    batch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """Options of `bench throughput`."""

    num_prompts: str
    peer_batch: str


def bench_latency(options: LatencyOptions, engine: Given) -> None:
    """Time prefill of given lengths, and decode at given batch sizes."""
    lengths, batches = read_counts(options.prefill, "--prefill"), read_counts(options.batch, "--batch")
    num_in = read_whole(options.input_len, "--input-len", 1, MAX_TOKENS)
    # Decode time runs from the first token to the last.
    num_out = read_whole(options.output_len, "--output-len", 2, MAX_TOKENS)

    def cases(choose: random.Random, ids: range) -> list[Case]:
        return latency_cases(lengths, batches, num_in, num_out, choose, ids)

    _bench(options, engine, cases, peer_batch=max(batches))


def bench_throughput(options: ThroughputOptions, engine: Given) -> None:
    """Time requests of random lengths."""
    number = read_whole(options.num_prompts, "--num-prompts", 1, MAX_TOKENS)
    max_batch = read_whole(options.peer_batch, "--peer-batch", 1, MAX_TOKENS)
    num_in, num_out = read_range(options.input_len, "--input-len"), read_range(options.output_len, "--output-len")

    def cases(choose: random.Random, ids: range) -> list[Case]:
        return [throughput_case(number, num_in, num_out, choose, ids)]

    _bench(options, engine, cases, max_batch)


def _bench(options: BenchOptions, given: Given, make_cases: Cases, peer_batch: int) -> None:
    repeats = read_whole(options.repeats, "--repeats", 1, MAX_TOKENS)
    threads = None if options.threads is None else read_whole(options.threads, "--threads", 1, num_cores())
    _check(options, given)
    config = EngineConfig.from_options(model=options.model, **given)
    opened = open_headers(config, shown_download)
    try:
        import_torch()
        cases = make_cases(random.Random(config.seed), range(opened.spec.vocab_size))
        config = _for_cases(config, opened, cases)
        num_threads = _set_threads(threads)
        contestants = _contestants(options, config, opened, peer_batch)
    finally:
        opened.source.close()
    with _status() as report:
        check_agreement(cases, contestants, report)
        results = [
            _with_experts(result, contestants[0], report) for result in race(cases, contestants, repeats, report)
        ]
    settings = f"{config.dtype}, {num_threads} threads"
    _write_table(results, f"{model_name(config)}, {settings}, median of {repeats}", options.json_file == STDOUT)
    if options.json_file is not None:
        facts = {"num_threads": num_threads, "num_repeats": repeats, "device": config.device}
        if options.against is not None:
            facts["greedy_tokens_agree"] = True
        figures = [result.as_dict() for result in results]
        command = ["holdfast", *sys.argv[1:]]
        write_record(make_record(model_name(config), settings, figures, command, **facts), options.json_file)


def _with_experts(result: Result, ours: Contestant, report: Callable[[str], None]) -> Result:
    """Add the distinct experts of a step, if the model has experts."""
    if not isinstance(ours, HoldfastContestant):
        return result
    report(f"{result.case.measure}: counting experts")
    return replace(result, experts=ours.count_experts(result.case))


def _check(options: BenchOptions, given: Given) -> None:
    if given.get("enable_prefix_caching"):
        raise ConfigError("bench.prefix_caching")
    record_file(options.json_file)
    report_file(options.memory_report)
    if options.against is None:
        return
    read_choice("--against", options.against, PEERS)
    if given.get("load_format") == "dummy":
        raise ConfigError("bench.dummy_weights")
    from holdfast.cli.bench_transformers import check_installed

    check_installed()


def _for_cases(config: EngineConfig, opened: OpenModel, cases: Sequence[Case]) -> EngineConfig:
    """Resolve dtype and device for all engines; set context and sequences from the cases."""
    from holdfast.planning.resolve import choose_dtype
    from holdfast.planning.target import choose_device

    longest, most = max(case.longest for case in cases), max(len(case.prompts) for case in cases)
    config = replace(
        config,
        enable_prefix_caching=False,
        max_model_len=config.max_model_len or longest,
        max_num_seqs=config.max_num_seqs or min(most, 64),
        max_queue=max(config.max_queue, most),
    )
    device = choose_device(config)[0]
    dtype, _ = choose_dtype(config, opened.spec.checkpoint_dtype, device.partition(":")[0])
    return replace(config, dtype=dtype, device=device)


def _set_threads(threads: int | None) -> int:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _contestants(options: BenchOptions, config: EngineConfig, opened: OpenModel, peer_batch: int) -> list[Contestant]:
    own = open_visibly(config, report_file(options.memory_report)).engine
    contestants: list[Contestant] = [HoldfastContestant(own)]
    if options.against is not None:
        from holdfast.cli.bench_transformers import TransformersContestant, open_transformers

        write_line(f"Loading the same weights into {options.against}")
        model = open_transformers(opened, config.dtype, config.device)
        contestants.append(TransformersContestant(model, peer_batch))
    return contestants


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Report the current run: one updated line on a terminal, a new line elsewhere."""
    if not is_watched():
        yield write_line
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _write_table(results: Sequence[Result], title: str, to_stderr: bool) -> None:
    names = list(results[0].rates)
    has_experts = any(result.experts for result in results)
    headings = ("", *names, *(f"against {name}" for name in names[1:]), "best", *(["experts"] if has_experts else []))
    rows = [
        (
            result.case.measure,
            *(f"{result.median(name):.1f}" for name in names),
            *(f"{ratio:.2f}x" for ratio in result.ratios().values()),
            " / ".join(f"{result.best(name):.1f}" for name in names),
            *([_experts_text(result.experts)] if has_experts else []),
        )
        for result in results
    ]
    table = Table((headings, *rows), right=tuple(range(1, len(headings))))
    lines = [Line(f"{title}, {UNIT}"), *table_lines(table)]
    show_beside(lines) if to_stderr else show(lines)


def _experts_text(found: dict[str, float] | None) -> str:
    """Format the distinct experts of a layer in a step, and those of uniform routing."""
    return "" if found is None else f"{found['measured']:.1f}, uniform {found['uniform']:.1f}"

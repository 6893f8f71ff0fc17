"""`holdfast bench`: figures of this machine as a table, and as a record where one is asked for; no torch."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.api.llm import open_headers
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
from holdfast.cli.bench_record import num_cores, ratios, record
from holdfast.cli.layout import Line, Table, table_lines
from holdfast.cli.opened_model import import_torch, model_name, open_visibly, report_file, shown_download
from holdfast.cli.options import Given, read_counts, read_range
from holdfast.cli.tables import show, show_beside
from holdfast.cli.terminal import STDOUT, dumps, write_answer, write_line
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, shown
from holdfast.loading.planning.open_model import OpenModel

PEERS = ("transformers",)
MAX_TOKENS = 1 << 20
Cases = Callable[[random.Random, range], list[Case]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What both benchmarks are asked."""

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
    """What is asked where one thing is timed after the other."""

    prefill: str
    batch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """What is asked where requests run together."""

    num_prompts: str
    peer_batch: str


def bench_latency(options: LatencyOptions, engine: Given) -> None:
    """Prefill of given lengths, and decode at given batch sizes."""
    lengths, batches = read_counts(options.prefill, "--prefill"), read_counts(options.batch, "--batch")
    num_in, num_out = _count(options.input_len, "--input-len"), _count(options.output_len, "--output-len")
    if num_out < 2:
        raise ConfigError(
            f"--output-len {num_out} was asked",
            "decoding is timed from the first token to the last",
            "ask for 2 or more",
        )

    def cases(choose: random.Random, ids: range) -> list[Case]:
        return latency_cases(lengths, batches, num_in, num_out, choose, ids)

    _bench(options, engine, cases, peer_batch=max(batches))


def bench_throughput(options: ThroughputOptions, engine: Given) -> None:
    """Requests of random lengths."""
    number, max_batch = _count(options.num_prompts, "--num-prompts"), _count(options.peer_batch, "--peer-batch")
    num_in, num_out = read_range(options.input_len, "--input-len"), read_range(options.output_len, "--output-len")

    def cases(choose: random.Random, ids: range) -> list[Case]:
        return [throughput_case(number, num_in, num_out, choose, ids)]

    _bench(options, engine, cases, max_batch)


def _bench(options: BenchOptions, given: Given, make_cases: Cases, peer_batch: int) -> None:
    repeats = _count(options.repeats, "--repeats")
    threads = None if options.threads is None else _count(options.threads, "--threads")
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
    with _telling() as tell:
        check_agreement(cases, contestants, tell)
        results = [_with_experts(result, contestants[0], tell) for result in race(cases, contestants, repeats, tell)]
    settings = f"{config.dtype}, {num_threads} threads"
    _write_table(results, f"{model_name(config)}, {settings}, median of {repeats}", options.json_file == STDOUT)
    if options.json_file is not None:
        facts = {"num_threads": num_threads, "num_repeats": repeats, "device": config.device}
        if options.against is not None:
            facts["greedy_tokens_agree"] = True
        command = ["holdfast", *sys.argv[1:]]
        _write_json(dumps(record(results, model_name(config), settings, command, facts), indent=1), options.json_file)


def _with_experts(result: Result, ours: Contestant, tell: Callable[[str], None]) -> Result:
    """The same with the distinct experts of a step, if the model has experts."""
    if not isinstance(ours, HoldfastContestant):
        return result
    tell(f"{result.case.measure}: counting experts")
    return replace(result, experts=ours.count_experts(result.case))


def _check(options: BenchOptions, given: Given) -> None:
    if given.get("enable_prefix_caching"):
        raise ConfigError(
            "--enable-prefix-caching was asked", "cached prompts are not computed, so not measured", "leave it out"
        )
    if options.json_file not in (None, STDOUT) and not Path(str(options.json_file)).absolute().parent.is_dir():
        raise ConfigError(f"--json {shown(options.json_file)} was asked", "its folder does not exist", "make it first")
    report_file(options.memory_report)
    if options.against is None:
        return
    if options.against not in PEERS:
        raise ConfigError(f"--against {shown(options.against)} was asked", f"{', '.join(PEERS)} is known", "use that")
    if given.get("load_format") == "dummy":
        raise ConfigError("--against was asked", "dummy weights are ours alone", "name a model with weights")
    from holdfast.cli.bench_transformers import check_installed

    check_installed()


def _for_cases(config: EngineConfig, opened: OpenModel, cases: Sequence[Case]) -> EngineConfig:
    """Settle type and device for all engines; take as much context and as many sequences as the cases need."""
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
        if threads > num_cores():
            raise ConfigError(f"--threads {threads} was asked", f"{num_cores()} cores are here", "ask for fewer")
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _contestants(options: BenchOptions, config: EngineConfig, opened: OpenModel, peer_batch: int) -> list[Contestant]:
    contestants: list[Contestant] = [
        HoldfastContestant(open_visibly(config, report_file(options.memory_report)).engine)
    ]
    if options.against is not None:
        from holdfast.cli.bench_transformers import TransformersContestant, open_transformers

        write_line(f"Loading the same weights into {options.against}")
        model = open_transformers(opened, config.dtype, config.device)
        contestants.append(TransformersContestant(model, peer_batch))
    return contestants


def _count(text: str, option: str) -> int:
    counts = read_counts(text, option)
    if len(counts) != 1 or counts[0] > MAX_TOKENS:
        raise ConfigError(f"{option} {shown(text)} was asked", f"one number up to {MAX_TOKENS} works", "change it")
    return counts[0]


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """Somewhere to say what runs now: one line that changes on a terminal, a line each elsewhere."""
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
            *(f"{ratio:.2f}x" for ratio in ratios(result).values()),
            " / ".join(f"{result.best(name):.1f}" for name in names),
            *([_shown_experts(result)] if has_experts else []),
        )
        for result in results
    ]
    table = Table((headings, *rows), right=tuple(range(1, len(headings))))
    lines = [Line(f"{title}, {UNIT}"), *table_lines(table)]
    show_beside(lines) if to_stderr else show(lines)


def _shown_experts(result: Result) -> str:
    """Distinct experts of a layer in a step, and those of uniform routing."""
    found = result.experts
    return "" if found is None else f"{found['measured']:.1f}, uniform {found['uniform']:.1f}"


def _write_json(text: str, file: str) -> None:
    if file == STDOUT:
        write_answer(f"{text}\n")
        return
    Path(file).write_text(f"{text}\n", encoding="utf-8")
    write_line(f"record written to {file}")

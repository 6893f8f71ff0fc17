"""`holdfast bench fill`: fill a declared context to its last token, as a table and as a record; no torch.

A plan that starts can still fail later. This command uses every token that was declared, and counts what that took.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.cli.bench_record import make_record, record_file, save_record, write_record
from holdfast.cli.eval import EvalBar
from holdfast.cli.fill_ladder import (
    MOST_AT_ONCE,
    TWO_TRACES,
    Climb,
    Ladder,
    Rung,
    choose_turns,
    make_rungs,
    whole_contexts,
)
from holdfast.cli.layout import Line, Table, rate_text, table_lines
from holdfast.cli.opened_model import OpenedModel, import_torch, open_visibly, report_file
from holdfast.cli.options import Given, read_whole
from holdfast.cli.tables import show, show_beside
from holdfast.cli.terminal import FAILED, INTERRUPTED, STDOUT, write_line
from holdfast.config import EngineConfig
from holdfast.engine.core import EngineCore
from holdfast.errors import ConfigError
from holdfast.memory.device_rates import num_cores
from holdfast.memory.profiler import measure
from holdfast.memory.sizes import format_bytes

if TYPE_CHECKING:
    pass

MAX_TURNS, MAX_TOKENS = 4096, 1 << 20
DEFAULT_TURNS = 50
NUM_LINES = 4
"""Lines of progress of a rung without a terminal."""
UNFINISHED = "interrupted"


class FillBar(EvalBar):
    """Shows the tokens in the contexts of a rung."""

    done = "filled"


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """Options of `bench fill`."""

    model: str | None
    turns: str | None
    answer_tokens: str
    threads: str | None
    json_file: str | None
    memory_report: str | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """A climbed ladder: what was declared, what was filled, and what it took."""

    declared_tokens: int
    climbs: Sequence[Climb]
    num_rungs: int
    left_out: Mapping[str, str]
    """Rungs that the plan does not hold, and why."""

    @property
    def filled_tokens(self) -> int:
        """Tokens that every rung reached."""
        return min((climb.tokens for climb in self.climbs), default=0)

    @property
    def num_allocations(self) -> int:
        return sum(climb.allocations for climb in self.climbs)

    @property
    def is_ok(self) -> bool:
        is_whole = len(self.climbs) == self.num_rungs and all(climb.is_filled for climb in self.climbs)
        return is_whole and self.filled_tokens == self.declared_tokens and self.num_allocations == 0

    @property
    def verdict(self) -> str:
        """Say in one line what was filled."""
        counts = f"{self.filled_tokens:,} of {self.declared_tokens:,} declared tokens"
        end = f"{self.num_allocations:,} allocations after ready"
        failed = next((f"; {climb.rung.name}: {climb.error}" for climb in self.climbs if climb.error), "")
        return f"{'FILLED' if self.is_ok else 'NOT FILLED'}: {counts}, {end}{failed}"

    def facts(self) -> dict[str, object]:
        """Return the figures for a record."""
        return {
            "declared_tokens": self.declared_tokens,
            "filled_tokens": self.filled_tokens,
            "rungs": [climb.as_dict() for climb in self.climbs],
            "left_out": dict(self.left_out),
            "ok": self.is_ok,
        }


class DeviceMeter:
    """Free bytes, allocations and compilations of an engine's device.

    On a CPU, free are the bytes of the plan's budget that this process does not hold in memory.
    """

    def __init__(self, opened: OpenedModel) -> None:
        from holdfast.kernels.triton_compat import CompileCount
        from holdfast.memory.storages import AllocationCounter
        from holdfast.runner.runner import Runner

        core = opened.engine.core
        assert isinstance(core, EngineCore), f"an engine in another process: {core=}"
        assert isinstance(core.runner, Runner), f"a runner of several ranks: {core.runner=}"
        self._device, self._budget_bytes = core.runner.device, opened.memory.budget_bytes
        self._counter: AllocationCounter = AllocationCounter(core.runner, self._device)
        self._compiles, self._num_compiled = CompileCount(), 0

    def free_bytes(self) -> int | None:
        """Return the bytes that are free now; None if unknown."""
        try:
            found = measure(self._device)
        except RuntimeError:  # a device that has failed
            return None
        if found is None:
            return None
        return (self._budget_bytes if self._device.type == "cpu" else found.total) - found.used

    def take_allocations(self) -> int:
        """Return the allocations since the last call."""
        return self._counter.take()

    @contextmanager
    def counting_compiles(self) -> Iterator[None]:
        """Count the kernels that are compiled inside the context."""
        from holdfast.kernels.triton_compat import counting_compiles

        with counting_compiles(lambda: None) as self._compiles:
            yield

    def take_compilations(self) -> int:
        """Return the kernels that were compiled since the last call, or found on disk: none of them was warm."""
        num_now = self._compiles.num_compiled + self._compiles.num_found
        num_taken, self._num_compiled = num_now - self._num_compiled, num_now
        return num_taken


def bench_fill(options: FillOptions, given: Given) -> int | None:
    """Climb the ladder; 1 if the context is not filled, or memory was taken."""
    answer_tokens = read_whole(options.answer_tokens, "--answer-tokens", 1, MAX_TOKENS)
    wanted = None if options.turns is None else read_whole(options.turns, "--turns", 1, MAX_TURNS)
    threads = None if options.threads is None else read_whole(options.threads, "--threads", 1, num_cores())
    record_file(options.json_file)
    report = report_file(options.memory_report)
    config = _config(options.model, given)
    if config.max_model_len is not None:
        choose_turns(config.max_model_len, wanted, answer_tokens, DEFAULT_TURNS)
    if threads is not None:
        _set_threads(threads)
    opened = open_visibly(config, report)
    declared = opened.engine.limits.max_model_len
    turns = choose_turns(declared, wanted, answer_tokens, DEFAULT_TURNS)
    num_agents = _contexts_at_once(opened)
    rungs = make_rungs(declared, turns, answer_tokens, num_agents)
    left_out = {} if num_agents >= MOST_AT_ONCE else {TWO_TRACES: _why_not_two(opened, num_agents)}
    meter = DeviceMeter(opened)
    ladder = Ladder(opened.engine, meter, config.seed, range(opened.engine.core.facts.vocab_size))
    fill = Fill(declared, ladder.climbs, len(rungs), left_out)
    settings = f"{turns} turns, answers of {answer_tokens} tokens"

    def record() -> dict[str, object]:
        return _record(opened, fill, settings, given)

    with meter.counting_compiles():
        code = _climb_all(ladder, rungs, lambda: save_record(record(), options.json_file))
    _show(fill, f"{opened.name}, {settings}", options.json_file == STDOUT)
    if options.json_file is not None:
        write_record(record(), options.json_file)
    return code or (None if fill.is_ok else FAILED)


def _set_threads(threads: int) -> None:
    import_torch()
    import torch

    torch.set_num_threads(threads)


def _config(model: str | None, given: Given) -> EngineConfig:
    """Return the engine's options: two sequences unless a number is given, and all in this process."""
    config = EngineConfig.from_options(model=model, **given)
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.core_process or num_ranks > 1:
        option = "--core-process" if config.core_process else "several ranks"
        raise ConfigError("bench.fill_one_process", option=option)
    return replace(config, max_num_seqs=config.max_num_seqs or MOST_AT_ONCE)


def _contexts_at_once(opened: OpenedModel) -> int:
    scheduler = opened.engine.scheduler
    return whole_contexts(tuple(scheduler.groups), opened.engine.limits, scheduler.pool.num_pages)


def _why_not_two(opened: OpenedModel, num_contexts: int) -> str:
    if opened.engine.limits.max_num_seqs < MOST_AT_ONCE:
        return "max_num_seqs is 1"
    return f"the pages hold {num_contexts} whole context at once"


def _climb_all(ladder: Ladder, rungs: Sequence[Rung], save: Callable[[], None]) -> int:
    """Climb until a rung fails; save after each. Ctrl-C keeps what is done."""
    try:
        for rung in rungs:
            with FillBar(rung.name, NUM_LINES) as bar:
                climb = ladder.climb(rung, bar)
            save()
            if climb.error is not None:
                break
    except KeyboardInterrupt:
        if not ladder.climbs:
            raise
        if not ladder.climbs[-1].is_filled:
            ladder.climbs[-1].error = UNFINISHED
        write_line("stopping: the rungs so far are written")
        return INTERRUPTED
    return 0


def _show(fill: Fill, title: str, to_stderr: bool) -> None:
    lines = [Line(fill.verdict), Line(title), *table_lines(_table(fill.climbs))]
    lines += [Line(f"left out: {name} ({why})") for name, why in fill.left_out.items()]
    show_beside(lines) if to_stderr else show(lines)


def _record(opened: OpenedModel, fill: Fill, settings: str, given: Given) -> dict[str, object]:
    memory = opened.memory
    facts = {
        "section": "fill",
        **fill.facts(),
        "budget_bytes": memory.budget_bytes,
        "planned_bytes": memory.planned_bytes,
        "measured_bytes": memory.measured_bytes,
        "engine_options": dict(given),
    }
    figures = [
        {"measure": row["name"], "unit": "tokens/s", "values": {"holdfast": row["tokens_per_s"]}, **row}
        for row in (climb.as_dict() for climb in fill.climbs)
    ]
    given_text = "".join(f", {name}={value}" for name, value in given.items())
    settings = f"{fill.declared_tokens:,} declared tokens, {settings}{given_text}"
    return make_record(opened.name, settings, figures, ["holdfast", *sys.argv[1:]], **facts)


def _table(climbs: Sequence[Climb]) -> Table:
    headings = ("", "tokens", "hit", "tokens/s", "prefill", "decode", "free", "allocations", "preempted")
    rows = [
        (
            climb.rung.name,
            f"{climb.tokens:,}",
            f"{climb.hit_tokens:,}",
            *(rate_text(rate) for rate in (climb.tokens_per_s, climb.prefill_per_s, climb.decode_per_s)),
            "unknown" if climb.free_bytes is None else format_bytes(climb.free_bytes),
            f"{climb.allocations:,}",
            f"{climb.num_preemptions:,}",
        )
        for climb in climbs
    ]
    return Table((headings, *rows), right=tuple(range(1, len(headings))))

"""Like the one before answers, to the bit, however steps are run: ahead of those in flight, from bytes, with proposals, in a child process.

Every schedule (tests/api/schedules.py) runs on a plain engine with room for all, and in each of these ways on a small one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from api.schedules import Answers, Planned, compare, make_schedule, run_schedule
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.ngram import NgramProposer
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step
from loading.tiny_models import VOCAB, save_tiny
from request.frames import decode_step, encode_step

MAX_MODEL_LEN = 72
SAMPLED = 2
"""Schedules of each house in `make test` ..."""
ALL = 100
"""... and in `make test-slow`."""


@dataclass(frozen=True)
class House:
    """A model, and an engine that is too small for what comes."""

    family: str
    options: Mapping[str, Any]


HOUSES = {
    "few pages": House("llama", {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": "44KiB"}),
    "many sequences": House("qwen3", {"max_num_seqs": 12, "max_num_batched_tokens": 40, "kv_cache_memory": "180KiB"}),
    "windows": House("qwen2_window", {"max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_memory": "56KiB"}),
}


@dataclass(frozen=True)
class Way:
    """How steps are run."""

    run_ahead: int = 0
    from_bytes: bool = False
    speculative: str | None = None
    core_process: bool = False


WAYS = {
    "plain": Way(),
    "one ahead": Way(run_ahead=1),
    "two ahead": Way(run_ahead=2),
    "from bytes": Way(run_ahead=1, from_bytes=True),
    "proposals": Way(speculative="ngram:4"),
    "proposals, ahead, from bytes": Way(1, True, "ngram:2"),
    "in a child": Way(core_process=True),
    "proposals in a child": Way(speculative="ngram:3", core_process=True),
}


AT_ONCE = {
    "few pages": ("plain", "one ahead", "proposals, ahead, from bytes", "in a child"),
    "many sequences": ("two ahead", "proposals"),
    "windows": ("plain", "from bytes", "proposals in a child"),
}
"""Every way in some house in `make test`; in `make test-slow` every one in all."""


class FromBytes:
    """A runner that gets nothing but what was encoded."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: Step) -> None:
        frame = encode_step(step)
        self.num_bytes += len(frame)
        copied = decode_step(frame)
        assert copied == step, f"{copied} came of {step}"
        self._runner.launch(copied)

    def collect(self) -> StepResult:
        return self._runner.collect()


class Case:
    """The folder of a house, and the whole answers to its schedules."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, house = name, folder, HOUSES[name]
        self.house = house
        save_tiny(house.family, folder, max_position_embeddings=128)
        write_tokenizer(folder)

    def open(self, **options: Any) -> LLM:
        shape: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_tokens": 4, "max_model_len": MAX_MODEL_LEN}
        return LLM(str(self.folder), batch_invariant=True, seed=7, **shape, **options)

    def answer(self, schedules: list[list[Planned]]) -> list[Answers]:
        """By the plain engine with room for all, where nothing is aborted and nothing is shared."""
        llm = self.open(max_num_seqs=16, max_num_batched_tokens=128, enable_prefix_caching=False)
        answers = [run_schedule(llm.engine, requested, aborts=False) for requested in schedules]
        llm.shutdown()
        return answers


def engine_of(llm: LLM, way: Way) -> Engine:
    """The engine of an LLM, with its core made anew to run steps in this way."""
    engine = llm.engine
    if way.core_process:
        return engine
    core = engine.core
    assert isinstance(core, EngineCore), f"{core} is in this process"
    assert core.runner is not None, "the core is open"
    runner: Any = FromBytes(core.runner) if way.from_bytes else core.runner
    remade = EngineCore(runner, core.scheduler, run_ahead=way.run_ahead, proposer=core.proposer)
    return Engine(remade, engine.tokenizer, engine.chat_template, seed=7, generation=engine.generation)


def run_way(case: Case, way: Way, schedules: list[list[Planned]], answers: list[Answers]) -> Counter[str]:
    """All schedules of a house in one way; what was seen."""
    llm = case.open(speculative=way.speculative, core_process=way.core_process, **case.house.options)
    engine = engine_of(llm, way)
    seen: Counter[str] = Counter()
    for number, (requested, whole) in enumerate(zip(schedules, answers, strict=True)):
        seen += compare(requested, whole, run_schedule(engine, requested))
        engine.settle()
        if not way.core_process:
            engine.scheduler.check()
        if number % 4 == 3:
            engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0), f"{stats} with no caller there"
    seen["schedules"] += len(schedules)
    seen["steps"] += stats.num_steps
    seen["preemptions"] += stats.num_preemptions
    seen["tokens of prefix hits"] += stats.num_prefix_hit_tokens
    seen["proposed"] += stats.num_proposed_tokens
    seen["accepted"] += stats.num_accepted_tokens
    llm.shutdown()
    return seen


@pytest.fixture(scope="module", params=HOUSES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("model"))


def schedules_of(case: Case, number: int) -> list[list[Planned]]:
    first = 1000 * list(HOUSES).index(case.name) + 3
    return [make_schedule(first + place, VOCAB, MAX_MODEL_LEN) for place in range(number)]


def check_all(case: Case, number: int, ways: Mapping[str, Way]) -> Counter[str]:
    schedules = schedules_of(case, number)
    answers = case.answer(schedules)
    total: Counter[str] = Counter()
    for name, way in ways.items():
        seen = run_way(case, way, schedules, answers)
        print(name, dict(seen))
        assert (seen["proposed"] > 0) == (way.speculative is not None), f"{name}: {seen}"
        assert seen["accepted"] <= seen["proposed"], f"{name}: {seen}"
        total += seen
    return total


def test_schedules_sampled_match_in_every_way_of_running(case: Case) -> None:
    seen = check_all(case, SAMPLED, {name: WAYS[name] for name in AT_ONCE[case.name]})
    for kind in ("stop", "length", "abort", "accepted", "rows that wait", "n > 1", "tokens of prefix hits"):
        assert seen[kind], f"no {kind} was seen: {seen}"


@pytest.mark.slow
def test_schedules_all_match_in_every_way_of_running(case: Case) -> None:
    seen = check_all(case, ALL, WAYS)
    kinds = ("stop", "stop string", "length", "abort", "accepted", "rows that wait", "n > 1", "preemptions")
    for kind in (*kinds, "tokens of prefix hits"):
        # Windows give pages back, so that few of their sequences are preempted.
        assert seen[kind] >= (5 if kind == "preemptions" else 20), f"too few {kind}: {seen}"


def test_schedules_sampled_ways_cover_all_ways() -> None:
    assert {name for names in AT_ONCE.values() for name in names} == set(WAYS)


def test_ngram_proposer_drops_the_index_of_ended_sequences(case: Case) -> None:
    llm = case.open(speculative="ngram", **case.house.options)
    core = llm.engine.core
    assert isinstance(core, EngineCore), f"{core} is in this process"
    assert isinstance(core.proposer, NgramProposer), f"{core.proposer} proposes"
    for requested in schedules_of(case, 3):
        run_schedule(llm.engine, requested)
        assert core.proposer.num_sequences == 0, f"{core.proposer.num_sequences} sequences are still known"
    llm.shutdown()

"""Rank 0 of fakes over real processes of fakes (engine/fake_rank.py): the stations of a start, and an engine on all ranks."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.fake_rank import LIMITS, NUM_PAGES, SlotsRank
from engine.fakes import HashRunner, shared_template, shared_tokenizer
from holdfast.config import EngineConfig
from holdfast.engine.core import CoreResources, EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.rank_messages import RankConnect, RankLoaded, RankPlanned, RankReady, RankReported
from holdfast.engine.ranked_runner import RankedRunner
from holdfast.engine.ranks import RankGroup, StepThread
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sequence import StepResult
from holdfast.request.step import Step

TESTS = Path(__file__).parent.parent
FAKE = (sys.executable, "-P", "-m", "engine.fake_rank")
STATIONS = ("plan", "load", "warm", "idle", "step")


def with_tests(environment: dict[str, str]) -> dict[str, str]:
    """An environment in which children find the tests."""
    others = environment.get("PYTHONPATH", "")
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), others)))}


def open_group(name: str = "", num_ranks: int = 4, **options) -> RankGroup:
    """Processes that have started."""
    config = EngineConfig(model=name, tensor_parallel_size=num_ranks)
    return RankGroup(config, num_ranks, FAKE, **options)


def start(group: RankGroup, seconds: float = 30.0) -> list[RankReady]:
    """All stations, to the last."""
    group.expect(RankReported, seconds)
    group.send_all(RankPlanned({}))
    group.expect(RankLoaded, seconds)
    group.send_all(RankConnect("nowhere"))
    ready = group.expect(RankReady, seconds)
    group.serve()
    return ready


class FollowedRunner(HashRunner):
    """Rank 0's own share; keeps slots as the other ranks do, to be compared with theirs."""

    def __init__(self, can_cancel: bool = True) -> None:
        super().__init__(LIMITS, NUM_PAGES, can_cancel)
        self.slots = SlotsRank(0, "")
        self._unbooked: list[StepResult] = []

    def launch(self, step: Step) -> None:
        for result in self._unbooked:
            self.slots.book(tuple(one.token_ids for one in result.results))
        self._unbooked.clear()
        self.slots.run(step)
        super().launch(step)

    def collect(self) -> StepResult:
        result = super().collect()
        self._unbooked.append(result)
        return result


def ranked_engine(
    name: str = "", num_ranks: int = 4, is_eager: bool = True, run_ahead: int = 0, **options: Any
) -> Engine:
    """An engine of fakes on so many ranks; `engine.group` and `engine.runner` are for tests to look at."""
    group = open_group(name, num_ranks, **options)
    try:
        start(group, 120.0)
    except BaseException:
        group.end()
        raise
    runner = FollowedRunner()
    ranked = RankedRunner(runner, group, StepThread(), is_eager=is_eager)
    scheduler = Scheduler(LIMITS, NUM_PAGES, True, 64)
    core = EngineCore(
        *(ranked, scheduler, time.monotonic, run_ahead),
        resources=CoreResources(release=lambda: ranked.close(lambda: None), watch=group.raise_if_dead),
    )
    engine = Engine(core, shared_tokenizer(), shared_template(), 0)
    engine.group, engine.runner = group, runner  # type: ignore[attr-defined]
    return engine

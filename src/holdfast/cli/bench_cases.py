"""Benchmark cases, and the engines that run them in turn; no torch."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError
from holdfast.request.sampling_params import SamplingParams

UNIT = "tokens/s"
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that run together, each with its number of new tokens."""

    measure: str
    kind: Literal["prefill", "decode", "throughput"]
    prompts: tuple[TokenIds, ...]
    num_new: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt with its answer."""
        return max(len(prompt) + num_new for prompt, num_new in zip(self.prompts, self.num_new, strict=True))


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a case: greedy tokens, time until every prompt has a first token, and total time."""

    token_ids: tuple[TokenIds, ...]
    first_seconds: float
    total_seconds: float


class Contestant(Protocol):
    """An engine in a benchmark."""

    name: str

    def run(self, case: Case) -> Timing:
        """Run a case, independent of earlier runs."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second of a case, by engine and repeat; our engine is the first."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)
    experts: dict[str, float] | None = None
    """Rows per step, distinct experts, and the count under uniform routing; None without experts."""

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def best(self, name: str) -> float:
        return max(self.rates[name])

    def ratios(self) -> dict[str, float]:
        """Return the ratio of our median speed to each other engine's."""
        ours, *others = self.rates
        return {other: self.median(ours) / self.median(other) for other in others}

    def as_dict(self) -> dict[str, object]:
        """Return the figures for a record."""
        found: dict[str, object] = {
            "measure": self.case.measure,
            "unit": UNIT,
            "values": {name: round(self.median(name), 2) for name in self.rates},
            "best": {name: round(self.best(name), 2) for name in self.rates},
            "runs": {name: [round(rate, 2) for rate in rates] for name, rates in self.rates.items()},
            "ratios": {name: round(ratio, 3) for name, ratio in self.ratios().items()},
        }
        return found if self.experts is None else found | {"distinct_experts": self.experts}


def rate(case: Case, timing: Timing) -> float:
    """Return tokens per second.

    Prefill: prompt tokens until the first new one. Decode: new tokens after the first. Throughput: all new tokens.
    """
    if case.kind == "prefill":
        return case.num_prompt_tokens / timing.first_seconds
    num_new = sum(case.num_new)
    if case.kind == "decode":
        return (num_new - len(case.prompts)) / (timing.total_seconds - timing.first_seconds)
    return num_new / timing.total_seconds


def latency_cases(
    prefill: Sequence[int], batches: Sequence[int], input_len: int, output_len: int, choose: random.Random, ids: range
) -> list[Case]:
    """Make one prompt of each length, and batches of equal sequences."""
    cases = [Case(f"prefill, {length} tokens", "prefill", (_prompt(length, choose, ids),), (1,)) for length in prefill]
    for batch in batches:
        prompts = tuple(_prompt(input_len, choose, ids) for _ in range(batch))
        cases.append(Case(f"decode, batch {batch}", "decode", prompts, (output_len,) * batch))
    return cases


def throughput_case(
    num_prompts: int, input_len: tuple[int, int], output_len: tuple[int, int], choose: random.Random, ids: range
) -> Case:
    """Make requests of random lengths."""
    prompts = tuple(_prompt(choose.randint(*input_len), choose, ids) for _ in range(num_prompts))
    num_new = tuple(choose.randint(*output_len) for _ in range(num_prompts))
    return Case(f"throughput, {num_prompts} requests", "throughput", prompts, num_new)


def check_agreement(cases: Sequence[Case], contestants: Sequence[Contestant], report: Callable[[str], None]) -> None:
    """Warm up: run every case on every engine; refuse engines whose tokens differ."""
    for case in cases:
        timings = []
        for contestant in contestants:
            report(f"{case.measure}: warming up {contestant.name}")
            timings.append(contestant.run(case).token_ids)
        for contestant, found in zip(contestants[1:], timings[1:], strict=True):
            _compare(case, contestants[0].name, timings[0], contestant.name, found)


def race(
    cases: Sequence[Case], contestants: Sequence[Contestant], num_repeats: int, report: Callable[[str], None]
) -> list[Result]:
    """Run every case several times; engines alternate, so that a slow moment affects all."""
    results = []
    for case in cases:
        result = Result(case, {contestant.name: [] for contestant in contestants})
        for repeat in range(num_repeats):
            for contestant in contestants:
                report(f"{case.measure}: run {repeat + 1} of {num_repeats}, {contestant.name}")
                result.rates[contestant.name].append(rate(case, contestant.run(case)))
        results.append(result)
    return results


def _prompt(num_tokens: int, choose: random.Random, ids: range) -> TokenIds:
    return tuple(choose.choices(ids, k=num_tokens))


def _compare(
    case: Case, ours: str, our_ids: tuple[TokenIds, ...], theirs: str, their_ids: tuple[TokenIds, ...]
) -> None:
    for prompt, (mine, other) in enumerate(zip(our_ids, their_ids, strict=True)):
        if mine == other:
            continue
        pairs = zip(mine, other, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(other)))
        found = f"{ours} {list(mine[place : place + 3])}, {theirs} {list(other[place : place + 3])}"
        values = {"case": case.measure, "prompt": prompt, "place": place, "found": found}
        raise HoldfastError("bench.tokens_differ", peer=theirs, **values)


class HoldfastContestant:
    """Times an engine, driven like `LLM`. The engine must not cache prefixes."""

    name = "holdfast"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, case: Case) -> Timing:
        """Submit all prompts and step until the last token."""
        engine = self._engine
        start = time.perf_counter()
        token_ids: dict[str, list[int]] = {}
        for prompt, num_new in zip(case.prompts, case.num_new, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            token_ids[engine.add_request(None, {"prompt_token_ids": list(prompt)}, params)] = []
        first_seconds, waiting = 0.0, set(token_ids)
        while engine.has_unfinished():
            for delta in engine.step():
                if delta.error is not None:
                    raise HoldfastError("bench.request_failed", case=case.measure, reason=delta.error)
                token_ids[delta.request_id].extend(delta.token_ids)
                waiting.discard(delta.request_id)
            if not waiting and not first_seconds:
                first_seconds = time.perf_counter() - start
        total_seconds = time.perf_counter() - start
        return Timing(tuple(map(tuple, token_ids.values())), first_seconds, total_seconds)

    def count_experts(self, case: Case) -> dict[str, float] | None:
        """Rerun and return mean distinct experts over layers and steps; None without experts or with several ranks."""
        from holdfast.engine.core import EngineCore
        from holdfast.runner.expert_counts import counting_experts
        from holdfast.runner.runner import Runner

        core = self._engine.core
        if not isinstance(core, EngineCore) or not isinstance(core.runner, Runner):
            return None
        with counting_experts(core.runner) as counts:
            if counts.num_experts:
                self.run(case)
        return counts.summary(len(case.prompts) if case.kind == "decode" else None)

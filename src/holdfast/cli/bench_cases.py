"""What is measured and how: cases, their prompts, engines that run them in turn, and ours as one of them; no torch."""

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
    """Some prompts, and how many tokens each of them gets; all at once."""

    measure: str
    kind: Literal["prefill", "decode", "throughput"]
    prompts: tuple[TokenIds, ...]
    num_new: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(prompt) + num_new for prompt, num_new in zip(self.prompts, self.num_new, strict=True))


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a case: greedy tokens, when every prompt had its first one, and when all were there."""

    token_ids: tuple[TokenIds, ...]
    first_seconds: float
    total_seconds: float


class Contestant(Protocol):
    """An engine in a race."""

    name: str

    def run(self, case: Case) -> Timing:
        """Run a case from the beginning, nothing remembered from another run."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """A case's tokens per second, one for each repeat, by engine."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)
    experts: dict[str, float] | None = None
    """Rows of a step, distinct experts of a layer, and how many uniform routing would touch; None without experts."""

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def best(self, name: str) -> float:
        return max(self.rates[name])


def rate(case: Case, timing: Timing) -> float:
    """Tokens per second of what the case is about.

    Prefill: prompt tokens until the first new one. Decode: new tokens after the first, from the first to the last.
    Throughput: all new tokens, from the beginning to the end.
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
    """Prompts of several lengths, alone; and batches of equal sequences."""
    cases = [Case(f"prefill, {length} tokens", "prefill", (_prompt(length, choose, ids),), (1,)) for length in prefill]
    for batch in batches:
        prompts = tuple(_prompt(input_len, choose, ids) for _ in range(batch))
        cases.append(Case(f"decode, batch {batch}", "decode", prompts, (output_len,) * batch))
    return cases


def throughput_case(
    num_prompts: int, input_len: tuple[int, int], output_len: tuple[int, int], choose: random.Random, ids: range
) -> Case:
    """Requests of random lengths."""
    prompts = tuple(_prompt(choose.randint(*input_len), choose, ids) for _ in range(num_prompts))
    num_new = tuple(choose.randint(*output_len) for _ in range(num_prompts))
    return Case(f"throughput, {num_prompts} requests", "throughput", prompts, num_new)


def check_agreement(cases: Sequence[Case], contestants: Sequence[Contestant], tell: Callable[[str], None]) -> None:
    """Run every case once on every engine, to warm up; where tokens differ, no figure would mean anything."""
    for case in cases:
        timings = []
        for contestant in contestants:
            tell(f"{case.measure}: warming up {contestant.name}")
            timings.append(contestant.run(case).token_ids)
        for contestant, found in zip(contestants[1:], timings[1:], strict=True):
            _compare(case, contestants[0].name, timings[0], contestant.name, found)


def race(
    cases: Sequence[Case], contestants: Sequence[Contestant], num_repeats: int, tell: Callable[[str], None]
) -> list[Result]:
    """Every case several times, the engines taking turns, so that a slow moment of the machine meets all of them."""
    results = []
    for case in cases:
        result = Result(case, {contestant.name: [] for contestant in contestants})
        for repeat in range(num_repeats):
            for contestant in contestants:
                tell(f"{case.measure}: run {repeat + 1} of {num_repeats}, {contestant.name}")
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
        raise HoldfastError(
            f"a comparison with {theirs} was asked",
            f"greedy tokens differ in '{case.measure}', prompt {prompt}, from token {place} on "
            f"({ours} {list(mine[place : place + 3])}, {theirs} {list(other[place : place + 3])})",
            "no speed-up is printed for another answer; use --dtype float32, where rounding cannot decide",
        )


class HoldfastContestant:
    """Drives an engine as `LLM` does, with a clock. The engine must not cache prefixes."""

    name = "holdfast"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, case: Case) -> Timing:
        """Submit all, step until the last token is there."""
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
                    raise HoldfastError(f"{case.measure} was asked", delta.error, "report this")
                token_ids[delta.request_id].extend(delta.token_ids)
                waiting.discard(delta.request_id)
            if not waiting and not first_seconds:
                first_seconds = time.perf_counter() - start
        total_seconds = time.perf_counter() - start
        return Timing(tuple(map(tuple, token_ids.values())), first_seconds, total_seconds)

    def count_experts(self, case: Case) -> dict[str, float] | None:
        """Run a case once more, untimed; means over layers and steps. None without experts, and on ranks."""
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

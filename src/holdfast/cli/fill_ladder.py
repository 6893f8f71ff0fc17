"""The fill ladder: requests that use a declared context to its last token, and what each rung took; no torch.

A rung is a trace of one or two agents. An agent's prompt is its whole history: earlier prompts, answers, and the tokens
that a turn adds. The last turn of every rung ends with the last token of the context.
"""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.engine import Engine, EngineStats
from holdfast.errors import ConfigError, HoldfastError
from holdfast.request.sampling_params import SamplingParams

PROMPT, TRACE, TWO_TRACES = "one prompt", "agent trace", "two agent traces"
MOST_AT_ONCE = 2
Progress = Callable[[int, int], None]
"""Callback with the tokens of all contexts so far, and when they are full."""


class Meter(Protocol):
    """What the device says between two rungs."""

    def free_bytes(self) -> int | None:
        """Return the bytes that are free now; None if unknown."""
        ...

    def take_allocations(self) -> int:
        """Return the allocations since the last call."""
        ...

    def take_compilations(self) -> int:
        """Return the kernels that were compiled since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: each agent adds so many tokens in each turn, and gets an answer."""

    name: str
    added: tuple[int, ...]
    num_agents: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of each agent's context at the end."""
        return sum(self.added) + len(self.added) * self.answer_tokens


@dataclass(slots=True)
class Climb:
    """What one rung has done so far."""

    rung: Rung
    tokens: int = 0
    """Tokens in the shortest context of its agents."""
    num_turns: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were not cached."""
    answered_tokens: int = 0
    prefill_seconds: float = 0.0
    """Until each agent had the first token of its answer."""
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    free_bytes: int | None = None
    """Least free bytes after any turn."""
    allocations: int = 0
    compilations: int = 0
    error: str | None = None

    def count(self, start: EngineStats, now: EngineStats) -> None:
        """Take the engine's counters since the start of the rung."""
        self.hit_tokens = now.num_prefix_hit_tokens - start.num_prefix_hit_tokens
        self.computed_tokens = now.num_prompt_tokens - start.num_prompt_tokens
        self.num_preemptions = now.num_preemptions - start.num_preemptions

    @property
    def num_seen(self) -> int:
        """Tokens that were found, computed or answered."""
        return self.hit_tokens + self.computed_tokens + self.answered_tokens

    @property
    def tokens_per_s(self) -> float:
        """Computed prompt tokens and answered ones per second."""
        return _rate(self.computed_tokens + self.answered_tokens, self.prefill_seconds + self.decode_seconds)

    @property
    def prefill_per_s(self) -> float:
        return _rate(self.computed_tokens, self.prefill_seconds)

    @property
    def decode_per_s(self) -> float:
        """Answered tokens per second, without the first of each answer."""
        return _rate(max(self.answered_tokens - self.num_turns * self.rung.num_agents, 0), self.decode_seconds)

    @property
    def is_filled(self) -> bool:
        return self.error is None and self.tokens == self.rung.tokens

    def as_dict(self) -> dict[str, object]:
        """Return the figures for a record."""
        return {
            "name": self.rung.name,
            "tokens": self.tokens,
            "free_bytes": self.free_bytes,
            "allocations": self.allocations,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "prefill_tokens_per_s": round(self.prefill_per_s, 2),
            "decode_tokens_per_s": round(self.decode_per_s, 2),
            "hit_tokens": self.hit_tokens,
            "computed_tokens": self.computed_tokens,
            "answered_tokens": self.answered_tokens,
            "num_agents": self.rung.num_agents,
            "num_turns": self.num_turns,
            "num_preemptions": self.num_preemptions,
            "compilations": self.compilations,
            "seconds": round(self.prefill_seconds + self.decode_seconds, 3),
            "error": self.error,
        }


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0


def make_rungs(declared: int, num_turns: int, answer_tokens: int, num_agents: int) -> tuple[Rung, ...]:
    """Make the rungs of a context; the third only if `num_agents` fit at once."""
    whole, shares = (turn_shares(declared, number, answer_tokens) for number in (1, num_turns))
    rungs = (Rung(PROMPT, whole, 1, answer_tokens), Rung(TRACE, shares, 1, answer_tokens))
    return rungs if num_agents < MOST_AT_ONCE else (*rungs, Rung(TWO_TRACES, shares, MOST_AT_ONCE, answer_tokens))


def turn_shares(declared: int, num_turns: int, answer_tokens: int) -> tuple[int, ...]:
    """Return the tokens that each turn adds to the prompt, so that the last answer ends the context."""
    ends = [declared * turn // num_turns for turn in range(num_turns + 1)]
    return tuple(end - begin - answer_tokens for begin, end in itertools.pairwise(ends))


def choose_turns(declared: int, wanted: int | None, answer_tokens: int, default: int) -> int:
    """Return the number of turns: each adds at least one token. A number that was given must be possible."""
    most = declared // (answer_tokens + 1)
    if most < 1:
        raise ConfigError("bench.fill_no_prompt", declared=declared, answer_tokens=answer_tokens)
    if wanted is not None and wanted > most:
        values = {"declared": declared, "answer_tokens": answer_tokens, "most": most}
        raise ConfigError("bench.fill_turns", value=wanted, **values)
    return min(default, most) if wanted is None else wanted


def whole_contexts(groups: tuple[CacheGroup, ...], limits: Limits, num_pages: int) -> int:
    """Return how many sequences of the longest context the pages hold at once, counted in whole pages."""
    per_sequence = sum(group.most_pages(limits.max_model_len, 1) for group in groups)
    return limits.max_num_seqs if per_sequence == 0 else min(limits.max_num_seqs, num_pages // per_sequence)


class Ladder:
    """Climbs rungs on an engine that nothing else uses; `climbs` keeps what each did, the unfinished one too."""

    def __init__(self, engine: Engine, meter: Meter, seed: int, ids: range) -> None:
        self._engine, self._meter, self._ids = engine, meter, ids
        self._dice = random.Random(seed)
        self.climbs: list[Climb] = []

    def climb(self, rung: Rung, progress: Progress) -> Climb:
        """Run all turns of a rung. A request that fails ends the rung, which keeps the error."""
        climb, start = Climb(rung), self._engine.stats()
        self.climbs.append(climb)
        self._meter.take_allocations()
        self._meter.take_compilations()
        histories: list[list[int]] = [[] for _ in range(rung.num_agents)]
        try:
            for num_added in rung.added:
                for history in histories:
                    history += self._dice.choices(self._ids, k=num_added)
                self._turn(climb, histories, start, progress)
                self._read_free_bytes(climb)
        except HoldfastError as error:
            climb.error = str(error)
        finally:
            self._rest()
            climb.allocations = self._meter.take_allocations()
            climb.compilations = self._meter.take_compilations()
            self._read_free_bytes(climb)
        return climb

    def _rest(self) -> None:
        """Leave no request and no step in flight."""
        if not self._engine.is_dead:
            self._engine.abort_all()
            self._engine.settle()

    def _read_free_bytes(self, climb: Climb) -> None:
        known = [number for number in (climb.free_bytes, self._meter.free_bytes()) if number is not None]
        climb.free_bytes = min(known, default=None)

    def _turn(self, climb: Climb, histories: list[list[int]], start: EngineStats, progress: Progress) -> None:
        """Submit the history of every agent at once, and append the answers as they come."""
        engine, answer_tokens = self._engine, climb.rung.answer_tokens
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        began = first_at = time.perf_counter()
        num_full, num_before = climb.rung.tokens * len(histories), climb.num_seen
        most = sum(map(len, histories)) + answer_tokens * len(histories)
        try:
            agents = {engine.add_request(None, {"prompt_token_ids": [*ids]}, params): ids for ids in histories}
            waiting = set(agents)
            while engine.has_unfinished():
                is_prefill = bool(waiting)
                for delta in engine.step():
                    if delta.error is not None:
                        raise HoldfastError("bench.request_failed", case=climb.rung.name, reason=delta.error)
                    agents[delta.request_id].extend(delta.token_ids)
                    climb.answered_tokens += len(delta.token_ids)
                    if delta.token_ids:
                        waiting.discard(delta.request_id)
                if is_prefill:
                    first_at = time.perf_counter()
                climb.count(start, engine.stats())
                num_filled = min(climb.num_seen - num_before, most)
                climb.tokens = max(climb.tokens, num_filled // len(histories))
                progress(max(climb.tokens * len(histories), num_filled), num_full)
        finally:
            climb.prefill_seconds += first_at - began
            climb.decode_seconds += time.perf_counter() - first_at
        climb.num_turns += 1
        climb.tokens = min(map(len, histories))

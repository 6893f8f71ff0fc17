"""Virtual time: the same arrivals with and without sharing, where a step takes a constant and its rows; when first tokens come."""

from collections import deque
from dataclasses import dataclass, replace
from random import Random

from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, Sequence

PARAMS = SamplingParams()


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, and what it asks for."""

    time: int
    prompt: tuple[int, ...]
    max_tokens: int
    salt: bytes = b""


@dataclass(frozen=True)
class Traffic:
    """A machine and what arrives at it."""

    limits: Limits
    num_pages: int
    groups: tuple[CacheGroup, ...]
    run_ahead: int
    step_cost: int
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class Outcome:
    """When each request's first step began, when it had its first token, and what that took."""

    admitted: list[int]
    first_tokens: list[int]
    num_preemptions: int
    num_forks: int
    num_rows: int


def random_traffic(seed: int, *, is_tight: bool = False, has_windows: bool = False, run_ahead: int = 0) -> Traffic:
    """Bursts of equal prompts and equal beginnings, some alone; with pages for all of them, or for few."""
    rng = Random(f"traffic {seed}")
    page = rng.choice((2, 4))
    limits = Limits(
        max_num_seqs=rng.choice((2, 4, 16)),
        max_num_batched_tokens=rng.choice((4, 8, 24, 200)),
        max_model_len=96,
        page_tokens=page,
    )
    whole = CacheGroup("whole context", page)
    window = CacheGroup("window", page, window=rng.choice((3, 2 * page, 20)))
    groups = rng.choice(((whole, window), (window,))) if has_windows else (whole,)
    arrivals: list[Arrival] = []
    time = 0
    for _ in range(rng.randint(2, 5)):
        time += rng.choice((0, 5, 30, 100))
        prompt = [rng.randrange(50) for _ in range(rng.choice((1, page, page + 1, 3 * page, 20, 40)))]
        for _ in range(rng.choice((1, 2, 3, 5))):
            own = list(prompt)
            if rng.random() < 0.4:
                own[rng.randrange(len(own)) :] = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
            salt = b"other" if rng.random() < 0.1 else b""
            arrivals.append(Arrival(time, tuple(own), rng.choice((1, 2, 8, 30)), salt))
            time += rng.choice((0, 0, 0, 1, 9))
    most = sum(group.most_pages(96, limits.max_num_batched_tokens) for group in groups)
    num_pages = int(most * rng.choice((1, 1.3))) if is_tight else most * len(arrivals)
    return Traffic(limits, num_pages, groups, run_ahead, rng.choice((1, 10, 40)), tuple(arrivals))


def run_traffic(traffic: Traffic, is_shared: bool) -> Outcome:
    """Serve all arrivals. Steps run one after the other; the host books each when it ends."""
    scheduler = Scheduler(
        traffic.limits, traffic.num_pages, is_shared, 1000, groups=traffic.groups, prefix_root=b"root"
    )
    coming = deque(enumerate(traffic.arrivals))
    flights: deque[tuple[LiveStep, int]] = deque()
    admitted = [-1] * len(traffic.arrivals)
    first_tokens = [-1] * len(traffic.arrivals)
    now = device_free = num_forks = num_rows = 0
    while coming or flights or scheduler.num_running or scheduler.num_waiting:
        if not flights and not scheduler.num_running and not scheduler.num_waiting:
            now = max(now, coming[0][1].time)
        while coming and coming[0][1].time <= now:
            number, own = coming.popleft()
            scheduler.add(
                Sequence(number, list(own.prompt), len(own.prompt), PARAMS, 0, own.max_tokens, cache_salt=own.salt)
            )
        while len(flights) <= traffic.run_ahead:
            step = scheduler.schedule()
            if step is None or not step.scheduled:
                break
            begin = max(device_free, now)
            device_free = begin + traffic.step_cost + step.num_tokens
            num_rows += step.num_tokens
            for item in step.scheduled:
                num_forks += item.source is not None
                if admitted[item.sequence.sequence_id] < 0:
                    admitted[item.sequence.sequence_id] = begin
            flights.append((step, device_free))
        if not flights:
            continue
        step, now = flights.popleft()
        scheduler.complete(step, [(7,) if item.samples else () for item in step.scheduled])
        for item in step.scheduled:
            sequence = item.sequence
            if item.samples and first_tokens[sequence.sequence_id] < 0:
                first_tokens[sequence.sequence_id] = now
            if sequence.num_output_tokens >= sequence.max_tokens:
                scheduler.finish(sequence)
    return Outcome(admitted, first_tokens, scheduler.num_preemptions, num_forks, num_rows)


def later(traffic: Traffic) -> list[int]:
    """Requests whose first token comes later with sharing than without."""
    alone, shared = run_traffic(traffic, False), run_traffic(traffic, True)
    pairs = zip(alone.first_tokens, shared.first_tokens, strict=True)
    return [number for number, (before, after) in enumerate(pairs) if after > before]


def at_once(traffic: Traffic) -> Traffic:
    """Like the others, with all requests at the start."""
    return replace(traffic, arrivals=tuple(replace(own, time=0) for own in traffic.arrivals))

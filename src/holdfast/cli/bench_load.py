"""Load on a server and its results: prompts of given lengths, clients or arrivals, times and rates; no torch."""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cli.bench_client import Reply, Url, ask
from holdfast.errors import ConfigError, HoldfastError

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city name team minute idea body back face door health person art war history"
)
"""Words that are one token in most tokenizers."""
PERCENTILES = (50, 90, 99)
PROBE_WORDS = (8, 72)
MAX_LINES = 1_000_000
MAX_DATASET_BYTES = 2**30
GREEDY = {"temperature": 0}
TO_THE_END = {"ignore_eos": True}
"""Extra field, not in OpenAI's API; dropped if a server refuses it."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request."""

    messages: Any
    """Messages of a chat, or the text of a prompt."""
    max_tokens: int

    def body(self, endpoint: str, model: str, extra: Mapping[str, object]) -> dict[str, object]:
        """Make the body of the request."""
        content = {"messages": self.messages} if endpoint == CHAT else {"prompt": self.messages}
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": self.max_tokens}
        return {"model": model, **content, **options, **extra}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranges of lengths in tokens."""

    num_input: tuple[int, int]
    num_output: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fit:
    """Linear model from a prompt's words to its tokens."""

    num_fixed: float = 0.0
    num_per_word: float = 1.0

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.num_fixed) / self.num_per_word))


def make_prompt(choose: random.Random, num_words: int) -> str:
    """Make a prompt of random words, which causes no prefix hits."""
    return " ".join(choose.choices(_WORDS.split(), k=num_words))


def as_work(endpoint: str, text: str, max_tokens: int) -> Work:
    """Make a request of a plain text."""
    return Work([{"role": "user", "content": text}] if endpoint == CHAT else text, max_tokens)


def random_work(endpoint: str, number: int, sizes: Sizes, fit: Fit, choose: random.Random) -> list[Work]:
    """Make requests of random lengths."""
    return [
        as_work(
            endpoint,
            make_prompt(choose, fit.num_words(choose.randint(*sizes.num_input))),
            choose.randint(*sizes.num_output),
        )
        for _ in range(number)
    ]


def read_dataset(file: str, endpoint: str, number: int | None, num_output: tuple[int, int]) -> list[Work]:
    """Read JSON lines with `prompt` or `messages`, and optional `max_tokens`; repeat them if there are too few."""
    path = Path(file)
    try:
        if path.stat().st_size > MAX_DATASET_BYTES:
            raise ConfigError(
                "bench.dataset_unreadable", file=file, reason=f"it is larger than {MAX_DATASET_BYTES} bytes"
            )
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:MAX_LINES]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError("bench.dataset_unreadable", file=file, reason=reason) from error
    found = [_line_work(file, place, line, endpoint, num_output[1]) for place, line in enumerate(lines, 1)]
    if not found:
        raise ConfigError("bench.dataset_unreadable", file=file, reason="it has no lines")
    number = len(found) if number is None else number
    return [found[place % len(found)] for place in range(number)]


def _line_work(file: str, line_number: int, line: str, endpoint: str, max_tokens: int) -> Work:
    def refusal(reason: str) -> ConfigError:
        return ConfigError("bench.dataset_line", file=file, line=line_number, reason=reason)

    try:
        value = json.loads(line)
    except ValueError as error:
        raise refusal("it is not JSON") from error
    if not isinstance(value, dict) or not ({"prompt", "messages"} & value.keys()):
        raise refusal("it has neither prompt nor messages")
    limit = value.get("max_tokens", max_tokens)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise refusal("max_tokens must be an integer of at least 1")
    prompt, messages = value.get("prompt"), value.get("messages")
    if messages is not None:
        if endpoint != CHAT:
            raise refusal("messages need --endpoint chat")
        return Work(messages, limit)
    if not isinstance(prompt, str):
        raise refusal("prompt must be a string")
    return as_work(endpoint, prompt, limit)


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the options of its requests."""

    url: Url
    model: str
    endpoint: str
    timeout_seconds: float
    extra: Mapping[str, object]

    async def send(self, work: Work, start: float | None = None, abort_after: int | None = None) -> Reply:
        """Send one request and return its reply."""
        body = work.body(self.endpoint, self.model, self.extra)
        path = PATHS[self.endpoint]
        reply, _ = await ask(self.url, path, body, self.timeout_seconds, start=start, abort_after=abort_after)
        if reply.error is None and not reply.texts and reply.finish_reason is None:
            reply.fail("no stream")
        return reply


async def served_model(url: Url, timeout_seconds: float) -> str:
    """Return the first model that a server lists."""
    reply, body = await ask(url, "/v1/models", None, timeout_seconds)
    _refuse(url, reply)
    try:
        name = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise HoldfastError("bench.no_models", address=url.address)
    return name


async def settle(target: Target, wants_all: bool) -> tuple[Target, Fit]:
    """Send two short requests to check the server and to calibrate its token counts.

    Answers run to their full length if the server takes ignore_eos.
    """
    choose = random.Random(0)
    texts = [make_prompt(choose, number) for number in PROBE_WORDS]
    fuller = Target(target.url, target.model, target.endpoint, target.timeout_seconds, {**target.extra, **TO_THE_END})
    target_now = fuller if wants_all else target
    replies: list[Reply] = []
    for text in texts:
        reply = await target_now.send(as_work(target.endpoint, text, 2))
        if reply.error in ("HTTP 400", "HTTP 422") and target_now is fuller:
            target_now = target
            reply = await target_now.send(as_work(target.endpoint, text, 2))
        _refuse(target.url, reply)
        replies.append(reply)
    few, more = (reply.num_input_tokens for reply in replies)
    if few is None or more is None or more <= few:
        return target_now, Fit()
    slope = (more - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return target_now, Fit(few - slope * PROBE_WORDS[0], slope)


def _refuse(url: Url, reply: Reply) -> None:
    if reply.error is None:
        return
    if reply.error.startswith("no connection"):
        advice = "Start it with holdfast serve, or check --url."
    elif reply.error in ("HTTP 401", "HTTP 403"):
        advice = "Pass --api-key, or set HOLDFAST_API_KEY."
    elif reply.error == "HTTP 404":
        advice = "Check --url, --model and --endpoint."
    else:
        advice = "See the server's log."
    reason = f"{reply.error}: {reply.message}" if reply.message else reply.error
    raise HoldfastError("bench.server_failed", address=url.address, reason=reason, advice=advice)


Progress = Callable[[int, int, int], None]
"""Callback with counts of finished requests, input tokens and output tokens."""
Send = Callable[[Work, float | None], Awaitable[Reply]]


async def drive(
    send: Send, work: Sequence[Work], num_clients: int | None, rate: float | None, progress: Progress, seed: int = 0
) -> list[Reply]:
    """Send all requests in order: `num_clients` at once, or `rate` new ones per second (open loop)."""
    replies: list[Reply] = []
    num_in = num_out = 0

    async def one(item: Work, start: float | None = None) -> None:
        nonlocal num_in, num_out
        reply = await send(item, start)
        replies.append(reply)
        num_in += reply.num_input_tokens or 0
        num_out += output_tokens(reply)
        progress(len(replies), num_in, num_out)

    if rate is None:
        waiting = iter(work)

        async def client() -> None:
            for item in waiting:
                await one(item)

        await asyncio.gather(*(client() for _ in range(min(num_clients or 1, len(work)))))
        return replies
    choose = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for item in work:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            # Time from the due time: a late client must not make the server look fast.
            group.create_task(one(item, due))
            due += choose.expovariate(rate)
    return replies


def output_tokens(reply: Reply) -> int:
    """Return the server's token count, else the number of events with text."""
    return len(reply.texts) if reply.num_output_tokens is None else reply.num_output_tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate a percentile; NaN without values."""
    return float(np.percentile(values, percent)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a duration in seconds."""

    mean: float
    percentiles: tuple[float, ...]
    num_values: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        mean = sum(values) / len(values) if values else math.nan
        return cls(mean, tuple(percentile(values, percent) for percent in PERCENTILES), len(values))

    def as_dict(self) -> dict[str, object]:
        """Return milliseconds for a record."""
        places = {
            f"p{percent}": round(1e3 * value, 3) for percent, value in zip(PERCENTILES, self.percentiles, strict=True)
        }
        return {"mean": round(1e3 * self.mean, 3), **places, "num_values": self.num_values}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run. Times and tokens count only successful requests."""

    num_requests: int
    num_finished: int
    errors: dict[str, int]
    examples: dict[str, str]
    """The server's first message, by kind of error."""
    seconds: float
    """Time from the first request to the end of the last reply."""
    num_input_tokens: int
    num_output_tokens: int
    is_counted_by_server: bool
    ttft: Spread
    tpot: Spread
    itl: Spread
    whole: Spread
    cpu_seconds: float
    """CPU time of this client."""

    @classmethod
    def of(cls, replies: Sequence[Reply], cpu_seconds: float) -> "Figures":
        good = [reply for reply in replies if reply.error is None]
        bad = [reply for reply in replies if reply.error is not None]
        begin = min((reply.start for reply in replies), default=0.0)
        end = max((reply.end for reply in replies), default=0.0)
        with_text = [reply for reply in good if reply.texts]
        gaps = [later - sooner for reply in with_text for sooner, later in pairwise(reply.texts)]
        per_token = [
            (reply.texts[-1] - reply.texts[0]) / (output_tokens(reply) - 1)
            for reply in with_text
            if output_tokens(reply) > 1
        ]
        return cls(
            num_requests=len(replies),
            num_finished=len(good),
            errors=dict(Counter(str(reply.error) for reply in bad).most_common()),
            examples={str(reply.error): reply.message for reply in reversed(bad)},
            seconds=end - begin,
            num_input_tokens=sum(reply.num_input_tokens or 0 for reply in good),
            num_output_tokens=sum(map(output_tokens, good)),
            is_counted_by_server=all(reply.num_output_tokens is not None for reply in good),
            ttft=Spread.of([reply.texts[0] - reply.start for reply in with_text]),
            tpot=Spread.of(per_token),
            itl=Spread.of(gaps),
            whole=Spread.of([reply.end - reply.start for reply in good]),
            cpu_seconds=cpu_seconds,
        )

    def per_second(self, number: int) -> float:
        return number / self.seconds if self.seconds > 0 else math.nan

    def as_dict(self) -> dict[str, object]:
        """Return the figures for a record, times in milliseconds."""
        return {
            "requests": self.num_requests,
            "finished": self.num_finished,
            "errors": self.errors,
            "error_examples": self.examples,
            "seconds": round(self.seconds, 4),
            "requests_per_second": round(self.per_second(self.num_finished), 4),
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
            "tokens_counted_by": "server" if self.is_counted_by_server else "events",
            "input_tokens_per_second": round(self.per_second(self.num_input_tokens), 3),
            "output_tokens_per_second": round(self.per_second(self.num_output_tokens), 3),
            "total_tokens_per_second": round(self.per_second(self.num_input_tokens + self.num_output_tokens), 3),
            "ttft_ms": self.ttft.as_dict(),
            "tpot_ms": self.tpot.as_dict(),
            "itl_ms": self.itl.as_dict(),
            "e2e_ms": self.whole.as_dict(),
            "client_cpu_seconds": round(self.cpu_seconds, 3),
        }


async def measure(
    target: Target, work: Sequence[Work], num_clients: int | None, rate: float | None, progress: Progress, seed: int = 0
) -> Figures:
    """Send all requests and compute the figures."""
    before = time.process_time()
    replies = await drive(target.send, work, num_clients, rate, progress, seed)
    return Figures.of(replies, time.process_time() - before)

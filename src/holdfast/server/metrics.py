"""Metrics: counters, gauges and histograms of a served model in Prometheus' format; what one request adds to them; no torch.

Names that begin with `vllm:` mean what they mean there, so that dashboards made for it show this server; `holdfast:` are
our own. What the engine counts is read when somebody asks. What only an endpoint sees it tells a `RequestMetrics`:

    with service.metrics.request() as watch:
        watch.prompt(num_prompt_tokens)
        async for delta in deltas:
            watch.take(delta)

Values of labels come from closed sets: no client can make a series of its own.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from holdfast import __version__
from holdfast.api.async_llm import AsyncLLM
from holdfast.engine.engine import EngineStats
from holdfast.engine.memory_map import MemoryMap
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, FinishReason
from holdfast.server.response_memory import ResponseMemory

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)
SECONDS: Final = tuple(step * 10.0**power for power in range(-3, 4) for step in (1.0, 1.5, 2.5, 4.0, 6.5))
TOKENS: Final = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
HTTP_CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")


class Histogram:
    """Counts of values by bound: one search and two additions for each, since one comes with every token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One value, or the same one several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str, words: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """As Prometheus knows it."""
        return _histogram(name, words, labels, self.bounds, self.counts, self.total)


class RequestMetrics:
    """One request as its endpoint sees it. Where it is left unfinished it counts as aborted."""

    __slots__ = ("_began_at", "_first_at", "_last_at", "_metrics", "_num_tokens", "_open", "is_finished")

    def __init__(self, metrics: "Metrics", num_completions: int) -> None:
        self._metrics = metrics
        self._began_at = time.monotonic()
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        """When each completion got its last token."""
        self._num_tokens = dict.fromkeys(range(num_completions), 0)
        self._open = set(self._num_tokens)
        self.is_finished = False
        metrics.num_open += 1

    def __enter__(self) -> "RequestMetrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ours = isinstance(error, Exception)
        for index in tuple(self._open):
            self.finish("error" if is_ours else "abort", index)

    def prompt(self, num_tokens: int) -> None:
        """Its prompt has so many tokens; once for a request."""
        self._metrics.num_prompt_tokens += num_tokens
        self._metrics.prompt_tokens.observe(num_tokens)

    def take(self, delta: CompletionDelta) -> None:
        """Everything that a delta tells: tokens, times, the end."""
        if delta.token_ids:
            self.token(len(delta.token_ids), delta.index)
        if delta.finish_reason is None:
            return
        times = delta.metrics
        if times is not None:
            metrics = self._metrics
            metrics.queue_seconds.observe(times.queue_seconds)
            metrics.prefill_seconds.observe(max(times.first_token_seconds - times.queue_seconds, 0.0))
            metrics.decode_seconds.observe(max(times.total_seconds - times.first_token_seconds, 0.0))
        self.finish(delta.finish_reason, delta.index)

    def first_token(self, index: int = 0) -> None:
        """The first token of a completion is here."""
        now = time.monotonic()
        self._metrics.first_token_seconds.observe(now - self._began_at)
        self._first_at[index] = self._last_at[index] = now

    def token(self, num_tokens: int = 1, index: int = 0) -> None:
        """So many tokens more of a completion, which came together."""
        self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
        last_at = self._last_at.get(index)
        if last_at is None:
            self.first_token(index)
            return
        self._last_at[index] = now = time.monotonic()
        self._metrics.inter_token_seconds.observe((now - last_at) / num_tokens, num_tokens)

    def finish(self, reason: FinishReason, index: int = 0) -> None:
        """A completion is over; a second time does nothing."""
        if index not in self._open:
            return
        self._open.discard(index)
        metrics, now = self._metrics, time.monotonic()
        num_tokens = self._num_tokens[index]
        metrics.finished[reason] += 1
        metrics.generation_tokens.observe(num_tokens)
        metrics.total_seconds.observe(now - self._began_at)
        if num_tokens > 1:
            first_at, last_at = self._first_at[index], self._last_at[index]
            metrics.output_token_seconds.observe((last_at - first_at) / (num_tokens - 1))
        if not self._open:
            self.is_finished = True
            metrics.num_open -= 1


class Metrics(Collector):
    """All of a server's; made once, used from its event loop."""

    def __init__(self, model_name: str, llm: AsyncLLM, kept: ResponseMemory) -> None:
        self._llm = llm
        self._kept = kept
        self._labels = {"model_name": model_name}
        self.num_open = 0
        """Requests that endpoints have begun and not ended."""
        self.num_prompt_tokens = 0
        self.finished: dict[FinishReason, int] = dict.fromkeys(REASONS, 0)
        self.responses = dict.fromkeys(HTTP_CLASSES, 0)
        self.endpoints: dict[str, int] = {}
        """Requests by the path of their route; a path without one counts as `unknown`."""
        self.first_token_seconds = Histogram(SECONDS)
        self.inter_token_seconds = Histogram(SECONDS)
        self.output_token_seconds = Histogram(SECONDS)
        self.total_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        self.prefill_seconds = Histogram(SECONDS)
        self.decode_seconds = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self._map: MemoryMap | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request(self, num_completions: int = 1) -> RequestMetrics:
        """A request has come, and will bring so many completions."""
        return RequestMetrics(self, num_completions)

    def response(self, status: int, endpoint: str = "unknown") -> None:
        """An answer has gone out."""
        self.endpoints[endpoint] = self.endpoints.get(endpoint, 0) + 1
        name = f"{status // 100}xx"
        if name in self.responses:
            self.responses[name] += 1

    def text(self, seen: MemoryMap | None = None) -> bytes:
        """What Prometheus reads; `seen` is the last look at the pages."""
        self._map = seen
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before it is asked."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        stats = self._llm.stats()
        yield from self._engine_families(stats)
        yield from self._request_families()
        yield from self._own_families(stats)
        yield from self._memory_families(self._llm.memory)
        if self._map is not None:
            yield from self._page_families(self._map)

    def _engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 1 is all.", stats.kv_usage)
        yield self._counter("vllm:num_preemptions", "Sequences that gave way to others.", stats.num_preemptions)
        queries, hits = stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.num_output_tokens)
        counts, num_tokens = self._llm.step_sizes()
        yield _histogram(
            "vllm:iteration_tokens_total",
            "Tokens of a step: computed of prompts, and chosen.",
            self._labels,
            tuple(float(2**place) for place in range(len(counts) - 1)),
            counts,
            float(num_tokens),
        )
        limits = self._llm.limits
        facts = self._labels | {
            "block_size": str(limits.page_tokens),
            "num_gpu_blocks": str(self._llm.memory.kv_tokens // max(limits.page_tokens, 1)),
        }
        yield _gauge("vllm:cache_config_info", "How the KV cache is cut.", [(facts, 1.0)])

    def _request_families(self) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", self.num_prompt_tokens)
        family = CounterMetricFamily(
            "vllm:request_success", "Completions by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            family.add_metric([self._labels["model_name"], reason], count)
        yield family
        histograms = {
            "time_to_first_token_seconds": ("From a request to its first token.", self.first_token_seconds),
            "inter_token_latency_seconds": ("Between two tokens.", self.inter_token_seconds),
            "request_time_per_output_token_seconds": ("Of a completion, by token.", self.output_token_seconds),
            "e2e_request_latency_seconds": ("From a request to its last token.", self.total_seconds),
            "request_queue_time_seconds": ("Until a request runs.", self.queue_seconds),
            "request_prefill_time_seconds": ("From there to the first token.", self.prefill_seconds),
            "request_decode_time_seconds": ("From the first token to the last.", self.decode_seconds),
            "request_prompt_tokens": ("Tokens of a prompt.", self.prompt_tokens),
            "request_generation_tokens": ("Tokens of a completion.", self.generation_tokens),
        }
        for name, (words, histogram) in histograms.items():
            yield histogram.family(f"vllm:{name}", words, self._labels)

    def _own_families(self, stats: EngineStats) -> Iterator[Metric]:
        health = self._llm.health()
        yield self._gauge("holdfast:requests_open", "Requests that endpoints answer.", self.num_open)
        yield self._gauge("holdfast:core_silence_seconds", "Without a sign of life.", health.core_silence_seconds)
        yield self._gauge("holdfast:step_seconds", "That the step in progress has run.", health.seconds_in_step)
        yield self._counter("holdfast:steps", "Steps of the model.", stats.num_steps)
        yield self._counter("holdfast:proposed_tokens", "Tokens guessed ahead.", stats.num_proposed_tokens)
        yield self._counter("holdfast:accepted_tokens", "Guesses that held.", stats.num_accepted_tokens)
        responses = CounterMetricFamily("holdfast:http_responses", "Answers by class.", labels=["model_name", "status"])
        for name, count in self.responses.items():
            responses.add_metric([self._labels["model_name"], name], count)
        yield responses
        endpoints = CounterMetricFamily(
            "holdfast:http_requests", "Requests by endpoint.", labels=["model_name", "endpoint"]
        )
        for endpoint, count in self.endpoints.items():
            endpoints.add_metric([self._labels["model_name"], endpoint], count)
        yield endpoints
        yield _gauge(
            "holdfast:process_resident_bytes",
            "Memory of our processes, as the system says.",
            [(self._labels | {"process": name}, float(count)) for name, count in resident_bytes(self._llm).items()],
        )
        kept = self._kept
        yield self._gauge("holdfast:responses_kept", "Responses that a request may continue.", len(kept))
        yield self._gauge("holdfast:response_bytes", "Memory of kept responses.", kept.num_bytes)
        yield self._gauge("holdfast:response_limit_bytes", "Most memory of kept responses.", kept.limit_bytes)
        yield _gauge("holdfast:build_info", "Which release this is.", [({"version": __version__}, 1.0)])

    def _memory_families(self, report: MemoryReport) -> Iterator[Metric]:
        rows: list[tuple[dict[str, str], float]] = []
        errors: list[tuple[dict[str, str], float]] = []
        for row in report.rows:
            kinds = {"planned": row.planned_bytes, "held": row.held_bytes, "peak": row.peak_bytes}
            rows += [
                (self._labels | {"owner": row.owner, "kind": kind}, float(count))
                for kind, count in kinds.items()
                if count is not None
            ]
            if row.held_bytes is not None and "serve" in row.phases:
                errors.append((self._labels | {"owner": row.owner}, float(row.held_bytes - row.planned_bytes)))
        yield _gauge("holdfast:memory_bytes", "Device memory by owner.", rows)
        yield _gauge("holdfast:memory_plan_error_bytes", "Held beyond the plan.", errors)
        yield self._gauge("holdfast:memory_budget_bytes", "What the engine may take.", report.budget_bytes)
        yield self._gauge("holdfast:kv_bytes_per_token", "Of the KV cache.", report.kv_bytes_per_token)
        yield self._gauge("holdfast:kv_tokens", "That the KV cache holds.", report.kv_tokens)
        if report.measured_bytes is not None and report.unaccounted_bytes is not None:
            yield self._gauge("holdfast:memory_measured_bytes", "As the device says.", report.measured_bytes)
            yield self._gauge("holdfast:memory_unaccounted_bytes", "That no owner holds.", report.unaccounted_bytes)

    def _page_families(self, seen: MemoryMap) -> Iterator[Metric]:
        rows: list[tuple[dict[str, str], float]] = [
            (self._labels | {"state": "free", "group": ""}, float(seen.num_free))
        ]
        for group in seen.groups:
            own = self._labels | {"group": group.name}
            rows += [
                (own | {"state": "in_use"}, float(group.num_in_use)),
                (own | {"state": "cached"}, float(group.num_cached)),
            ]
        yield _gauge("holdfast:kv_pages", "KV pages by state and cache group.", rows)

    def _gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        return _gauge(name, words, [(self._labels, value)])

    def _counter(self, name: str, words: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, words, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def resident_bytes(llm: AsyncLLM) -> dict[str, int]:
    """Memory of the server and of the core, where it is a process of its own; nothing where the system does not tell."""
    found = {}
    for name, pid in (("server", os.getpid()), ("core", llm.core_pid)):
        try:
            num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
        found[name] = num_pages * os.sysconf("SC_PAGE_SIZE")
    return found


def _gauge(name: str, words: str, rows: list[tuple[dict[str, str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=list(rows[0][0]) if rows else [])
    for labels, value in rows:
        family.add_metric([labels[key] for key in rows[0][0]], value)
    return family


def _histogram(
    name: str,
    words: str,
    labels: dict[str, str],
    bounds: tuple[float, ...],
    counts: list[int],
    total: float,
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, words, labels=list(labels))
    buckets: list[tuple[str, float]] = []
    num_below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        num_below += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(num_below)))
    family.add_metric(list(labels.values()), buckets, total)
    return family

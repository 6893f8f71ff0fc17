"""Prometheus metrics of a served model, and the recorder of one request; no torch.

`vllm:` names mean what they mean in vLLM, so its dashboards work; `holdfast:` names are our own. Engine counters are read
on each scrape. Endpoints report the rest through `RequestMetrics`:

    with service.metrics.request() as watch:
        watch.prompt(num_prompt_tokens)
        async for delta in deltas:
            watch.take(delta)

Label values come from closed sets: no client can create a series.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast import __version__
from holdfast.api.async_llm import AsyncLLM
from holdfast.engine.memory_map import MemoryMap
from holdfast.memory.report import MemoryReport
from holdfast.request.outputs import CompletionDelta, FinishReason
from holdfast.server.response_memory import ResponseMemory
from holdfast.server.tables import data_table

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)
BOUNDS: Final = {
    "seconds": tuple(step * 10.0**power for power in range(-3, 4) for step in (1.0, 1.5, 2.5, 4.0, 6.5)),
    "tokens": tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5)),
}
HTTP_CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")
Rows = list[tuple[Mapping[str, str], float]]
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
TABLE: Final = data_table("metrics.toml")
HISTOGRAMS: Final[Mapping[str, tuple[str, str, str]]] = TABLE["histograms"]


class Histogram:
    """A histogram. Every token adds a value, so `observe` costs one search and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...], counts: list[int] | None = None, total: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else counts
        self.total = total

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times, once for each of its tokens."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        """Return the metric for Prometheus."""
        family = HistogramMetricFamily(name, text, labels=list(labels))
        buckets: list[tuple[str, float]] = []
        num_below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_below += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(num_below)))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class RequestMetrics:
    """Records the metrics of one request. An unfinished one counts as aborted."""

    __slots__ = ("_began_at", "_first_at", "_last_at", "_metrics", "_num_tokens", "_open", "is_finished")

    def __init__(self, metrics: "Metrics", num_completions: int) -> None:
        self._metrics = metrics
        self._began_at = time.monotonic()
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        """Time of each completion's last token."""
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
        """Count the prompt; call once per request."""
        self._metrics.num_prompt_tokens += num_tokens
        self._metrics.histograms["prompt_tokens"].observe(num_tokens)

    def take(self, delta: CompletionDelta) -> None:
        """Record a delta: tokens, times and finish reason."""
        if delta.token_ids:
            self.token(len(delta.token_ids), delta.index)
        if delta.finish_reason is None:
            return
        times = delta.metrics
        if times is not None:
            observed = self._metrics.histograms
            observed["queue_seconds"].observe(times.queue_seconds)
            observed["prefill_seconds"].observe(max(times.first_token_seconds - times.queue_seconds, 0.0))
            observed["decode_seconds"].observe(max(times.total_seconds - times.first_token_seconds, 0.0))
        self.finish(delta.finish_reason, delta.index)

    def token(self, num_tokens: int = 1, index: int = 0) -> None:
        """Count tokens that arrived together for a completion."""
        self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
        last_at, now = self._last_at.get(index), time.monotonic()
        self._last_at[index] = now
        if last_at is None:
            self._metrics.histograms["first_token_seconds"].observe(now - self._began_at)
            self._first_at[index] = now
        else:
            self._metrics.histograms["inter_token_seconds"].observe((now - last_at) / num_tokens, num_tokens)

    def finish(self, reason: FinishReason, index: int = 0) -> None:
        """End a completion. Idempotent."""
        if index not in self._open:
            return
        self._open.discard(index)
        metrics, now = self._metrics, time.monotonic()
        num_tokens = self._num_tokens[index]
        metrics.finished[reason] += 1
        metrics.histograms["generation_tokens"].observe(num_tokens)
        metrics.histograms["total_seconds"].observe(now - self._began_at)
        if num_tokens > 1:
            seconds = self._last_at[index] - self._first_at[index]
            metrics.histograms["output_token_seconds"].observe(seconds / (num_tokens - 1))
        if not self._open:
            self.is_finished = True
            metrics.num_open -= 1


class Metrics(Collector):
    """All metrics of a server; used from its event loop."""

    def __init__(self, model_name: str, llm: AsyncLLM, kept: ResponseMemory) -> None:
        self._llm = llm
        self._kept = kept
        self._labels = {"model_name": model_name}
        self.num_open = 0
        """Requests in progress."""
        self.num_prompt_tokens = 0
        self.finished: dict[FinishReason, int] = dict.fromkeys(REASONS, 0)
        self.responses = dict.fromkeys(HTTP_CLASSES, 0)
        self.endpoints: dict[str, int] = {}
        """Requests by the path of their route, or `unknown`."""
        self.histograms = {name: Histogram(BOUNDS[unit]) for name, (_, _, unit) in HISTOGRAMS.items()}
        self._map: MemoryMap | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request(self, num_completions: int = 1) -> RequestMetrics:
        """Start recording a request with `num_completions` completions."""
        return RequestMetrics(self, num_completions)

    def response(self, status: int, endpoint: str = "unknown") -> None:
        """Count an answer."""
        self.endpoints[endpoint] = self.endpoints.get(endpoint, 0) + 1
        name = f"{status // 100}xx"
        if name in self.responses:
            self.responses[name] += 1

    def text(self, seen: MemoryMap | None = None) -> bytes:
        """Return the text for a scrape; `seen` is the last memory map."""
        self._map = seen
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return all metrics, read now."""
        llm, kept, report = self._llm, self._kept, self._llm.memory
        sources = SimpleNamespace(
            stats=llm.stats(),
            health=llm.health(),
            server=self,
            kept=SimpleNamespace(count=len(kept), num_bytes=kept.num_bytes, limit_bytes=kept.limit_bytes),
            memory=report,
            resident_bytes=resident_bytes(llm),
        )
        yield from self._values("engine", sources)
        counts, num_tokens = llm.step_sizes()
        sizes = Histogram(tuple(float(2**place) for place in range(len(counts) - 1)), counts, float(num_tokens))
        yield sizes.family("vllm:iteration_tokens_total", "Tokens of a step, prompts included.", self._labels)
        page_tokens = llm.limits.page_tokens
        blocks = report.kv_tokens // max(page_tokens, 1)
        facts = {"block_size": str(page_tokens), "num_gpu_blocks": str(blocks)}
        yield self._family("gauge", "vllm:cache_config_info", "Shape of the KV cache.", [(facts, 1.0)])
        yield from self._values("requests", sources)
        for name, (metric, text, _) in HISTOGRAMS.items():
            yield self.histograms[name].family(metric, text, self._labels)
        yield from self._values("own", sources)
        yield _family("gauge", "holdfast:build_info", "Version of this server.", [({"version": __version__}, 1.0)])
        yield from self._memory_families(report)
        yield from self._values("memory", sources)
        if report.measured_bytes is not None and report.unaccounted_bytes is not None:
            yield from self._values("measured", sources)
        if self._map is not None:
            pages: Rows = [({"state": "free", "group": ""}, float(self._map.num_free))]
            for group in self._map.groups:
                pages.append(({"state": "in_use", "group": group.name}, float(group.num_in_use)))
                pages.append(({"state": "cached", "group": group.name}, float(group.num_cached)))
            yield self._family("gauge", "holdfast:kv_pages", "KV pages by state and cache group.", pages)
            held = float(self._map.num_snapshots_held)
            places: Rows = [({"state": "held"}, held), ({"state": "free"}, self._map.num_snapshots - held)]
            yield self._family("gauge", "holdfast:state_snapshots", "Places of states of prefixes.", places)

    def _values(self, section: str, sources: SimpleNamespace) -> Iterator[Metric]:
        for name, (kind, text, source, *label) in TABLE[section].items():
            value = attrgetter(source)(sources)
            rows: Rows = [({label[0]: key}, count) for key, count in value.items()] if label else [({}, value)]
            yield self._family(kind, name, text, rows)

    def _family(self, kind: str, name: str, text: str, rows: Rows) -> Metric:
        return _family(kind, name, text, [({**self._labels, **labels}, value) for labels, value in rows])

    def _memory_families(self, report: MemoryReport) -> Iterator[Metric]:
        rows: Rows = []
        errors: Rows = []
        for row in report.rows:
            kinds = {"planned": row.planned_bytes, "held": row.held_bytes, "peak": row.peak_bytes}
            known = {kind: count for kind, count in kinds.items() if count is not None}
            rows += [({"owner": row.owner, "kind": kind}, float(count)) for kind, count in known.items()]
            if row.held_bytes is not None and "serve" in row.phases:
                errors.append(({"owner": row.owner}, float(row.held_bytes - row.planned_bytes)))
        yield self._family("gauge", "holdfast:memory_bytes", "Device memory by owner.", rows)
        yield self._family("gauge", "holdfast:memory_plan_error_bytes", "Memory beyond the plan.", errors)


def resident_bytes(llm: AsyncLLM) -> dict[str, int]:
    """Return the resident memory of the server and of a separate core process; empty if the system does not say."""
    found = {}
    for name, pid in (("server", os.getpid()), ("core", llm.core_pid)):
        try:
            num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
        found[name] = num_pages * os.sysconf("SC_PAGE_SIZE")
    return found


def _family(kind: str, name: str, text: str, rows: Rows) -> Metric:
    names = list(rows[0][0]) if rows else []
    family = _FAMILIES[kind](name, text, labels=names)
    for labels, value in rows:
        family.add_metric([labels[key] for key in names], value)
    return family

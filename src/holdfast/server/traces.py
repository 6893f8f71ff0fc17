"""Traces: a span of OpenTelemetry for each request, where its SDK is installed and told where to send them; no torch.

Spans are made when a request is over, and sent by the SDK's own thread: no request waits for a collector.
"""

import os
import time
from importlib import import_module
from types import ModuleType
from typing import Any

from holdfast.errors import ConfigError
from holdfast.server.logs import RequestRecord

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SERVICE_NAME = "holdfast"
MODULES = (
    "opentelemetry.trace",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk.resources",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.trace.propagation.tracecontext",
)
ATTRIBUTES = {
    "request_id": "holdfast.request_id",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "first_token_seconds": "gen_ai.server.time_to_first_token",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
    "error": "error.type",
}
"""What is known of a request, under OpenTelemetry's names. Prompts and answers are in none."""


class Traces:
    """Makes a span of every record that it is given."""

    def __init__(self, model: str, modules: dict[str, ModuleType]) -> None:
        trace, sdk, export, resources, exporter, context = (modules[name] for name in MODULES)
        resource = resources.Resource.create({"service.name": SERVICE_NAME})
        self._provider: Any = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter()))
        self._tracer: Any = self._provider.get_tracer(SERVICE_NAME)
        self._extract: Any = context.TraceContextTextMapPropagator().extract
        self._kind: Any = trace.SpanKind.SERVER
        self._model = model

    def write(self, record: RequestRecord) -> None:
        """A span from the request's beginning to now, below the client's own where it named one."""
        seconds = time.monotonic() - record.started_at
        ended_ns = time.time_ns()
        values = record.values(seconds)
        attributes = {ATTRIBUTES[name]: value for name, value in values.items() if name in ATTRIBUTES}
        attributes["gen_ai.request.model"] = self._model
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._extract({"traceparent": record.trace_parent}) if record.trace_parent else None,
            kind=self._kind,
            start_time=ended_ns - round(seconds * 1e9),
            attributes=attributes,
        )
        span.end(end_time=ended_ns)

    def close(self) -> None:
        """Send what is left, in bounded time."""
        self._provider.shutdown()


def open_traces(model: str) -> Traces | None:
    """Where the environment names a collector; else nothing is imported."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    if not endpoint:
        return None
    try:
        return Traces(model, {name: import_module(name) for name in MODULES})
    except ImportError as error:
        raise ConfigError(
            f"{ENDPOINT_VARIABLE} asks for traces",
            f"{error.name or 'a module'} is not installed",
            "run pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or unset it",
        ) from error

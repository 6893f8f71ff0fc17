"""Traces: an OpenTelemetry span for each request, if the environment names a collector; no torch.

The SDK's own thread sends each span after its request, so no request waits for the collector.
"""

import os
import time
from importlib import import_module
from types import ModuleType
from typing import Any

from holdfast.errors import ConfigError
from holdfast.server.logs import RequestRecord
from holdfast.server.tables import data_table

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


class Traces:
    """Exports each request record as a span."""

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
        """Make a span from the request's start to now; its parent is the client's span, if sent."""
        seconds = time.monotonic() - record.started_at
        ended_ns = time.time_ns()
        values = record.values(seconds)
        names = data_table("span_attributes.toml")
        attributes = {names[name]: value for name, value in values.items() if name in names}
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
        """Send the remaining spans, in bounded time."""
        self._provider.shutdown()


def open_traces(model: str) -> Traces | None:
    """Start tracing if the environment names a collector; else import nothing."""
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    if not endpoint:
        return None
    try:
        return Traces(model, {name: import_module(name) for name in MODULES})
    except ImportError as error:
        module = error.name or "a module"
        raise ConfigError("http.traces_not_installed", variable=ENDPOINT_VARIABLE, module=module) from error

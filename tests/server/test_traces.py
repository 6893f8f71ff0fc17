"""Traces: nothing without a collector; a span for each request if OpenTelemetry's SDK is there."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from error_codes import raises_code
from holdfast.errors import ConfigError
from holdfast.server.traces import MODULES, open_traces
from server.test_server_app import make_client


class Span(SimpleNamespace):
    def end(self, end_time: int) -> None:
        self.ended = end_time


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """What a stand-in for the SDK was given."""
    made: list[Span] = []

    def start_span(name: str, **found: object) -> Span:
        made.append(Span(name=name, **found))
        return made[-1]

    tracer = SimpleNamespace(start_span=start_span)
    provider = SimpleNamespace(
        add_span_processor=lambda processor: None,
        get_tracer=lambda name: tracer,
        shutdown=lambda: made.append(Span(name="end")),
    )
    parts = {
        "SpanKind": SimpleNamespace(SERVER="server"),
        "TracerProvider": lambda resource: provider,
        "BatchSpanProcessor": lambda exporter: exporter,
        "Resource": SimpleNamespace(create=dict),
        "OTLPSpanExporter": lambda: "exporter",
        "TraceContextTextMapPropagator": lambda: SimpleNamespace(extract=lambda carrier: carrier["traceparent"]),
    }
    for name in MODULES:
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    return made


def test_open_traces_without_a_collector_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_traces("tiny") is None


def test_open_traces_without_sdk_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    with raises_code("http.traces_not_installed", ConfigError, module="opentelemetry.sdk.trace"):
        open_traces("tiny")


def test_traces_have_a_span_for_each_request(spans: list[Span]) -> None:
    traces = open_traces("tiny")
    assert traces is not None
    client = make_client(traces=traces)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client.post("/echo", json={"a": 1}, headers={"traceparent": parent, "X-Request-Id": "mine"})
    client.get("/nothing", headers={"traceparent": "nonsense"})
    traces.close()
    first, second, last = spans
    assert (first.name, first.context, first.kind) == ("POST /echo", parent, "server")
    assert first.attributes["holdfast.request_id"] == "mine"
    assert first.attributes["http.response.status_code"] == 200
    assert first.attributes["gen_ai.request.model"] == "tiny"
    assert 0 <= first.ended - first.start_time < 60e9
    assert (second.name, second.context, second.attributes["error.type"]) == ("GET unknown", None, "not_found")
    assert last.name == "end"

"""Service: the state that all endpoints share: the model, its names, request limits and the server's state."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from holdfast.api.async_llm import AsyncLLM
from holdfast.api.options import ADVISED
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.metrics import Metrics
from holdfast.server.response_memory import ResponseMemory

if TYPE_CHECKING:
    from starlette.requests import Request

DEFAULT_MODEL_ADVICE = {"temperature": 0.2, "top_p": 0.9}
"""Sampling defaults from the default model's page: its files have none, and temperature 1 makes it incoherent."""
State = Literal["ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that the server checks before a request costs memory or time."""

    max_body_bytes: int = 8 * 2**20
    max_held_body_bytes: int = 2**28
    """Total size of all bodies in flight; small ones are always accepted."""
    max_json_depth: int = 64
    header_seconds: float = 10.0
    """Time to receive headers, from the connection's start or a later request's first byte."""
    max_header_bytes: int = 2**16
    max_headers: int = 128
    max_url_bytes: int = 8192
    max_pipelined: int = 16
    """Maximum requests a connection sends before the first answer."""
    keep_alive_seconds: float = 60.0
    """Idle time between two requests of a connection."""
    body_seconds: float = 30.0
    """Longest pause between two pieces of a body."""
    write_seconds: float = 30.0
    """Time before a client that reads nothing is cut off."""
    max_connections: int = 4096
    drain_seconds: float = 30.0
    """Time for running requests to finish at shutdown."""
    silence_seconds: float = 2.0
    """Longest time between heartbeats of a healthy core."""
    step_seconds: float = 300.0
    """Time limit of one step; a long prompt on a CPU takes many seconds."""
    max_listeners: int = 64
    """Maximum clients of /memory/stream."""
    max_response_bytes: int = 64 * 2**20
    """Memory for stored answers of /v1/responses; 0 stores none."""
    max_responses: int = 4096
    max_prompts: int = 256
    """Maximum prompts in one request to /v1/completions."""


@dataclass(slots=True)
class Service:
    """A served model."""

    llm: AsyncLLM
    names: tuple[str, ...]
    """Accepted values of `model`; answers carry the first."""
    limits: ServerLimits = ServerLimits()
    state: State = "ready"
    started_at: float = field(default_factory=time.time)
    tool_parser: str = "auto"
    """Parser of tool calls: a name, none, or auto (chosen by the chat template)."""
    reasoning_parser: str = "auto"
    metrics: Metrics = field(init=False)
    responses: ResponseMemory = field(init=False)
    num_listeners: int = 0
    advice: Mapping[str, object] = field(default_factory=dict)
    """Sampling defaults if the files of the model have none."""
    _advised: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self.responses = ResponseMemory(self.limits.max_response_bytes, self.limits.max_responses)
        self.metrics = Metrics(self.name, self.llm, self.responses)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def advised(self) -> Mapping[str, object]:
        """Return the sampling defaults for fields that a request omits."""
        if self._advised is None:
            params = self.llm.default_sampling_params()
            found = {name: getattr(params, name) for name in ADVISED}
            is_silent = found == {name: getattr(SamplingParams(), name) for name in ADVISED}
            self._advised = {**found, **(self.advice if is_silent else {})}
        return self._advised


def service_of(request: "Request") -> Service:
    """Return the service of an endpoint."""
    return request.app.state.service

"""Service: what every endpoint uses: the model, its names, the limits of a request, and the state of the server."""

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
"""From the page of the default model. Its files have no advice, and at temperature 1 so small a model writes nonsense."""
State = Literal["ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that are checked before a request costs memory or time."""

    max_body_bytes: int = 8 * 2**20
    max_held_body_bytes: int = 2**28
    """For all bodies in flight together; small ones are always accepted."""
    max_json_depth: int = 64
    header_seconds: float = 10.0
    """From the start of a connection, or the first byte of a later request, to the end of its headers."""
    max_header_bytes: int = 2**16
    max_headers: int = 128
    max_url_bytes: int = 8192
    max_pipelined: int = 16
    """Requests that a connection may send before the first answer."""
    keep_alive_seconds: float = 60.0
    """Between two requests of a connection."""
    body_seconds: float = 30.0
    """Between two pieces of a body."""
    write_seconds: float = 30.0
    """For which a client may leave written bytes unread."""
    max_connections: int = 4096
    drain_seconds: float = 30.0
    """For running requests when the server shuts down."""
    silence_seconds: float = 2.0
    """Without a heartbeat of the core, before the server is unhealthy."""
    step_seconds: float = 300.0
    """For one step; a long prompt on a CPU takes many seconds."""
    max_listeners: int = 64
    """Clients of /memory/stream."""
    max_response_bytes: int = 64 * 2**20
    """Memory of stored answers of /v1/responses; 0 stores none."""
    max_responses: int = 4096
    max_prompts: int = 256
    """Prompts of one request to /v1/completions."""


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
    """Parser of tool calls: a name, none, or auto, which the chat template decides."""
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
        """Return the model's sampling defaults for what a request leaves out."""
        if self._advised is None:
            params = self.llm.default_sampling_params()
            found = {name: getattr(params, name) for name in ADVISED}
            is_silent = found == {name: getattr(SamplingParams(), name) for name in ADVISED}
            self._advised = {**found, **(self.advice if is_silent else {})}
        return self._advised


def service_of(request: "Request") -> Service:
    """Return the service of an endpoint."""
    return request.app.state.service

"""Service: what every endpoint is given: the model, the names it goes by, the bounds of a request, and whether it takes any.

One object for a server's life, made before the first connection is taken. Endpoints never reach around it.
"""

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
"""What the makers of the default model say on its page; its file says nothing, and at 1 so small a model talks nonsense."""
State = Literal["ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that are checked before a request costs anything."""

    max_body_bytes: int = 8 * 2**20
    max_held_body_bytes: int = 2**28
    """Of all bodies together that are being read; small ones always find room."""
    max_json_depth: int = 64
    header_seconds: float = 10.0
    """From a connection's beginning, or the first byte of a later request, to the end of its headers."""
    max_header_bytes: int = 2**16
    max_headers: int = 128
    max_url_bytes: int = 8192
    max_pipelined: int = 16
    """Requests that a connection may send before the first is answered."""
    keep_alive_seconds: float = 60.0
    """That a connection may say nothing between two requests."""
    body_seconds: float = 30.0
    """Between two pieces of a body."""
    write_seconds: float = 30.0
    """That a reader may leave what was written unread."""
    max_connections: int = 4096
    drain_seconds: float = 30.0
    """For requests that run when the server is told to end."""
    silence_seconds: float = 2.0
    """Without a sign of life of the core, after which the server is not healthy."""
    step_seconds: float = 300.0
    """That one step may take; one on a CPU with a long prompt takes many."""
    max_listeners: int = 64
    """Of /memory/stream."""
    max_response_bytes: int = 64 * 2**20
    """Of answers of /v1/responses that are kept for a later request; 0 keeps none."""
    max_responses: int = 4096
    max_messages: int = 4096
    max_tools: int = 128
    max_schema_bytes: int = 2**16
    max_regex_chars: int = 4096
    max_prompts: int = 256
    """Prompts of one request to /v1/completions."""


@dataclass(slots=True)
class Service:
    """A model being served."""

    llm: AsyncLLM
    names: tuple[str, ...]
    """That `model` of a request may have; the first is the one answers carry."""
    limits: ServerLimits = ServerLimits()
    state: State = "ready"
    started_at: float = field(default_factory=time.time)
    tool_parser: str = "auto"
    """How calls of tools are read from answers: a name, none, or by the chat template."""
    reasoning_parser: str = "auto"
    """The same for reasoning."""
    metrics: Metrics = field(init=False)
    responses: ResponseMemory = field(init=False)
    num_listeners: int = 0
    advice: Mapping[str, object] = field(default_factory=dict)
    """For sampling, where the files of the model have none."""
    _advised: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self.responses = ResponseMemory(self.limits.max_response_bytes, self.limits.max_responses)
        self.metrics = Metrics(self.name, self.llm, self.responses)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def advised(self) -> Mapping[str, object]:
        """What the makers of the model advise for sampling, for what a request leaves out."""
        if self._advised is None:
            params = self.llm.default_sampling_params()
            found = {name: getattr(params, name) for name in ADVISED}
            is_silent = found == {name: getattr(SamplingParams(), name) for name in ADVISED}
            self._advised = {**found, **(self.advice if is_silent else {})}
        return self._advised


def service_of(request: "Request") -> Service:
    """The service behind an endpoint."""
    return request.app.state.service

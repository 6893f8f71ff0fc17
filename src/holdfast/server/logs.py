"""RequestLog: one line for each request, as key=value or JSON; no torch.

A line has prompt and answer only with --log-requests, and never an API key.
"""

import json
import re
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from starlette.requests import Request

LogFormat = Literal["text", "json"]
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""A client's own request id. It is only a label."""
MAX_PATH_CHARS = 200
MAX_LOGGED_CHARS = 4096
"""Limit of a logged prompt or answer."""
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/memory"})
"""Paths that machines poll, logged only on failure."""
RECORD = "holdfast.record"
"""Key of the record in a request's scope."""
_PLAIN = re.compile(r"[\w.:/+@%-]+", re.ASCII)


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request, filled in by its endpoint."""

    request_id: str
    method: str
    path: str
    client: str | None
    route: str = "unknown"
    """Path of the route, with placeholders."""
    trace_parent: str | None = None
    """The client's span, in W3C format."""
    started_at: float = field(default_factory=time.monotonic)
    status: int = 0
    """Status of the answer; 0 before it starts."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    first_token_seconds: float | None = None
    finish_reason: str | None = None
    key_index: int | None = None
    cache_salt: str | None = None
    """Requests with the same salt share cached prefixes."""
    error: str | None = None
    """Code of the error in the answer."""
    is_cut: bool = False
    """True if the client disconnected or was cut off before the answer ended."""
    wants_text: bool = False
    """True if `prompt` and `answer` are logged."""
    prompt: str | None = None
    answer: str | None = None

    def values(self, seconds: float) -> dict[str, object]:
        """Return the known facts, in the order of the log."""
        facts: dict[str, object | None] = {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path[:MAX_PATH_CHARS],
            "status": self.status,
            "seconds": round(seconds, 4),
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "finish_reason": self.finish_reason,
            "key": self.key_index,
            "error": self.error,
            "cut": True if self.is_cut else None,
        }
        if self.wants_text:
            facts["prompt"] = None if self.prompt is None else self.prompt[:MAX_LOGGED_CHARS]
            facts["answer"] = None if self.answer is None else self.answer[:MAX_LOGGED_CHARS]
        return {name: value for name, value in facts.items() if value is not None}


class RequestLog:
    """Writes a line for each request."""

    def __init__(
        self, log_format: LogFormat = "text", *, wants_text: bool = False, stream: TextIO | None = None
    ) -> None:
        self._format: LogFormat = log_format
        self.wants_text = wants_text
        self._stream = stream
        self._is_broken = False

    def write(self, record: RequestRecord) -> None:
        """Write one line. A broken log never fails a request."""
        seconds = time.monotonic() - record.started_at
        if record.status == 200 and record.path in QUIET_PATHS:
            return
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": "request"}
        line = written({**stamp, **record.values(seconds)}, self._format)
        stream = self._stream if self._stream is not None else sys.stderr
        if stream is None or self._is_broken:
            return
        try:
            stream.write(f"{line}\n")
            stream.flush()
        except (OSError, ValueError):
            self._is_broken = True  # do not try again


def written(values: Mapping[str, object], log_format: LogFormat) -> str:
    """Format values on one line, quoted so that none can start another line or value."""
    if log_format == "json":
        return json.dumps(values, separators=(",", ":"))
    return " ".join(f"{name}={_word(value)}" for name, value in values.items())


def _word(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def new_request_id() -> str:
    """Make a unique id."""
    return f"req-{uuid.uuid4().hex}"


def cleaned_request_id(given: bytes | None) -> str:
    """Return the client's own id if it is short and plain; else a new one."""
    if given is not None:
        text = given.decode("latin-1")
        if REQUEST_ID.fullmatch(text):
            return text
    return new_request_id()


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request."""
    record = request.scope.get(RECORD)
    if not isinstance(record, RequestRecord):  # an app without its guards, as in a test
        record = RequestRecord(new_request_id(), request.method, request.scope["path"], None)
        request.scope[RECORD] = record
    return record

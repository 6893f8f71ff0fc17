"""The log of a server: one line a request, as key=value or JSON, with the request's id; no torch.

A line never has a prompt or an answer in it, unless --log-requests asked for them; keys are in none.
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
"""What a client may call its request. It is a label and never a key of anything."""
MAX_PATH_CHARS = 200
MAX_LOGGED_CHARS = 4096
"""Of a prompt or an answer."""
RECORD = "holdfast.record"
"""Where a request's scope keeps its record."""
_PLAIN = re.compile(r"[\w.:/+@%-]+", re.ASCII)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request when it is over; endpoints fill in what they know."""

    request_id: str
    method: str
    path: str
    client: str | None
    route: str = "unknown"
    """The endpoint's own path, of which there are few."""
    trace_parent: str | None = None
    """The client's span, as W3C writes it."""
    started_at: float = field(default_factory=time.monotonic)
    status: int = 0
    """Of the answer; 0 where none was begun."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    first_token_seconds: float | None = None
    finish_reason: str | None = None
    key_index: int | None = None
    cache_salt: str | None = None
    """For the engine: cached prefixes are shared by requests with the same one."""
    error: str | None = None
    """The code or type of the error that was answered."""
    is_cut: bool = False
    """The client was gone, or was cut off, before the answer ended."""
    wants_text: bool = False
    """Whether `prompt` and `answer` are logged."""
    prompt: str | None = None
    answer: str | None = None

    def values(self, seconds: float) -> dict[str, object]:
        """What is logged, in order, without what is not known."""
        told: dict[str, object | None] = {
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
            told["prompt"] = None if self.prompt is None else self.prompt[:MAX_LOGGED_CHARS]
            told["answer"] = None if self.answer is None else self.answer[:MAX_LOGGED_CHARS]
        return {name: value for name, value in told.items() if value is not None}


class RequestLog:
    """Writes a line for each request."""

    def __init__(
        self, log_format: LogFormat = "text", *, wants_text: bool = False, stream: TextIO | None = None
    ) -> None:
        self._format: LogFormat = log_format
        self.wants_text = wants_text
        self._stream = stream

    def write(self, record: RequestRecord) -> None:
        """One line; a log that cannot be written never harms a request."""
        seconds = time.monotonic() - record.started_at
        if record.status == 200 and record.path in QUIET_PATHS:
            return
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": "request"}
        line = written({**stamp, **record.values(seconds)}, self._format)
        stream = self._stream if self._stream is not None else sys.stderr
        if stream is None:
            return
        try:
            stream.write(f"{line}\n")
            stream.flush()
        except (OSError, ValueError):
            self._stream = _Nowhere()  # it will not get better


QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/memory"})
"""Asked again and again by machines: told only where they go wrong."""


class _Nowhere(TextIO):
    """What is left of a log that broke."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


def written(values: Mapping[str, object], log_format: LogFormat) -> str:
    """Values on one line. No value can begin another line or another value."""
    if log_format == "json":
        return json.dumps(values, separators=(",", ":"))
    return " ".join(f"{name}={_word(value)}" for name, value in values.items())


def _word(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def new_request_id() -> str:
    """One that nobody else has."""
    return f"req-{uuid.uuid4().hex}"


def cleaned_request_id(given: bytes | None) -> str:
    """The client's name of a request where it is short and plain; else a new one."""
    if given is not None:
        text = given.decode("latin-1")
        if REQUEST_ID.fullmatch(text):
            return text
    return new_request_id()


def record_of(request: Request) -> RequestRecord:
    """The record of a request, for its endpoint to fill in."""
    record = request.scope.get(RECORD)
    if not isinstance(record, RequestRecord):  # an app without its guards, as in a test
        record = RequestRecord(new_request_id(), request.method, request.scope["path"], None)
        request.scope[RECORD] = record
    return record

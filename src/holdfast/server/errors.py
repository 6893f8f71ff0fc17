"""ApiError, the table from error codes to HTTP statuses, and errors in the shape of each API family; no torch.

A client never receives a path, an address or a traceback of this machine.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

from holdfast.errors import EngineDeadError, HoldfastError, QueueFullError, RequestError
from holdfast.server.tables import data_table

Dialect = Literal["openai", "anthropic", "ollama"]
_TABLE: Final = data_table("http_errors.toml")
ANSWERS: Final[Mapping[str, Sequence[Any]]] = _TABLE["answers"]
"""Status and optional `code` of the body, by error code or class."""
ANTHROPIC_TYPES: Final = {int(status): kind for status, kind in _TABLE["anthropic_types"].items()}
MAX_MESSAGE_CHARS: Final = 2000
INTERNAL_TEXT: Final = re.compile(
    r"0x[0-9a-fA-F]{6,}"
    r"|(?<![\w:/.])/(?:app|bin|dev|etc|home|lib|mnt|opt|proc|root|run|srv|sys|tmp|usr|var|work)(?:/[^\s'\";,)]*)?"
    r"|File \"[^\"]*\", line \d+"
)
"""Addresses, paths and lines of a traceback."""
_ROOTS: Final[tuple[tuple[str, Dialect], ...]] = (("/v1/messages", "anthropic"), ("/api", "ollama"))


class ApiError(HoldfastError):
    """An answer that is an error. `param` is the field of the request, as messages[0].content."""

    def __init__(
        self, code: str, /, *, param: str | None = None, headers: Mapping[str, str] | None = None, **values: object
    ) -> None:
        super().__init__(code, **values)
        self._answer_by(ANSWERS.get(code, (400,)))
        self.param = param
        self.headers = dict(headers or {})

    def _answer_by(self, row: Sequence[Any]) -> None:
        self.status: int = row[0]
        self.public_code: str = row[1] if len(row) > 1 else self.code
        """`code` of the body."""

    def reword(self, text: str) -> Self:
        """Replace the whole message."""
        self._text, self.contexts, self.hints = text, (), ()
        return self

    @property
    def kind(self) -> str:
        """`type` of OpenAI's body."""
        return _TABLE["openai_types"].get(str(self.status), "invalid_request_error")

    def to_json(self, path: str = "", request_id: str = "") -> bytes:
        """Return the whole body, in the shape that clients of this path expect."""
        message, dialect = cleaned(str(self)), dialect_of(path)
        value: dict[str, Any] = {"error": message}
        if dialect == "openai":
            value["error"] = {"message": message, "type": self.kind, "param": self.param, "code": self.public_code}
        elif dialect == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            value = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        return json.dumps(value, separators=(",", ":")).encode()

    def to_event(self, path: str, request_id: str) -> bytes:
        """Return the last piece of a stream that has already started."""
        body = self.to_json(path, request_id)
        return {"openai": b"data: %s\n\n", "anthropic": b"event: error\ndata: %s\n\n", "ollama": b"%s\n"}[
            dialect_of(path)
        ] % body


class ForwardedError(ApiError):
    """An error of the engine or of a request, with its own code and message."""

    def __init__(self, error: HoldfastError, row: str, param: str | None, headers: Mapping[str, str] | None) -> None:
        super().__init__(error.code, param=param, headers=headers, **error.values)
        self._answer_by(ANSWERS.get(error.code) or ANSWERS[row])
        self.reword(str(error))


def dialect_of(path: str) -> Dialect:
    """Return the API family of a path; OpenAI's unless another one owns it."""
    for root, dialect in _ROOTS:
        if path == root or path.startswith(f"{root}/"):
            return dialect
    return "openai"


def from_exception(error: BaseException, param: str | None = None) -> ApiError:
    """Return what a client receives for an exception: a request's own fault in full, ours as one sentence."""
    if isinstance(error, ApiError):
        error.param = error.param or param
        return error
    if isinstance(error, QueueFullError):
        seconds = error.retry_after_seconds
        wait = max(1, math.ceil(seconds)) if isinstance(seconds, int | float) and math.isfinite(seconds) else 1
        return ForwardedError(error, "QueueFullError", None, {"Retry-After": str(wait)})
    if isinstance(error, RequestError):
        return ForwardedError(error, "RequestError", param, None)
    return ApiError("http.engine_dead" if isinstance(error, EngineDeadError) else "http.internal_error")


def is_our_fault(error: BaseException) -> bool:
    """True if the log shows the exception with its traceback."""
    return not isinstance(error, ApiError | RequestError | EngineDeadError)


def cleaned(text: str) -> str:
    """Remove this machine's paths and addresses from a message, and bound its length."""
    text = INTERNAL_TEXT.sub("...", text)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 3]}..."

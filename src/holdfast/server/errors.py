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
"""Matches addresses, paths and traceback lines."""
_ROOTS: Final[tuple[tuple[str, Dialect], ...]] = (("/v1/messages", "anthropic"), ("/api", "ollama"))


class ApiError(HoldfastError):
    """An error answer. `param` is the path of the request field, such as messages[0].content."""

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
        """The body's `code`."""

    def reword(self, text: str) -> Self:
        """Replace the whole message."""
        self._text, self.contexts, self.hints = text, (), ()
        return self

    @property
    def kind(self) -> str:
        """The `type` of OpenAI's error body."""
        return _TABLE["openai_types"].get(str(self.status), "invalid_request_error")

    def to_json(self, path: str = "", request_id: str = "") -> bytes:
        """Return the body in the API family of this path."""
        message, dialect = cleaned(str(self)), dialect_of(path)
        value: dict[str, Any] = {"error": message}
        if dialect == "openai":
            value["error"] = {"message": message, "type": self.kind, "param": self.param, "code": self.public_code}
        elif dialect == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            value = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        return json.dumps(value, separators=(",", ":")).encode()

    def to_event(self, path: str, request_id: str) -> bytes:
        """Return the error as the last event of a started stream."""
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
    """Return the API family of a path; the default is OpenAI's."""
    for root, dialect in _ROOTS:
        if path == root or path.startswith(f"{root}/"):
            return dialect
    return "openai"


def from_exception(error: BaseException, param: str | None = None) -> ApiError:
    """Convert an exception for a client: the full message of a request error, one sentence for a server error."""
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
    """Return True for a server error, which is logged with its traceback."""
    return not isinstance(error, ApiError | RequestError | EngineDeadError)


def cleaned(text: str) -> str:
    """Remove this machine's paths and addresses from a message, and bound its length."""
    text = INTERNAL_TEXT.sub("...", text)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 3]}..."

"""ApiError, the table from error codes to HTTP statuses, and errors in the shape of each API family; no torch.

A client never receives a path, an address or a traceback of this machine.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from holdfast.errors import LEGACY_CODE, EngineDeadError, HoldfastError, QueueFullError, RequestError

Dialect = Literal["openai", "anthropic", "ollama"]
ANSWERS: Final[Mapping[str, tuple[int, str | None]]] = {
    "QueueFullError": (429, "queue_full"),
    "RequestError": (400, None),
    "request.prompt_too_long": (400, "context_length_exceeded"),
    "http.answer_failed": (500, "answer_failed"),
    "http.answer_impossible": (400, "answer_failed"),
    "http.bad_host": (400, "bad_host"),
    "http.bodies_full": (503, "bodies_full"),
    "http.body_timeout": (408, None),
    "http.body_too_large": (413, "body_too_large"),
    "http.chain_too_large": (413, "body_too_large"),
    "http.chunk_overhead": (400, "bad_http"),
    "http.client_gone": (499, "client_gone"),
    "http.compressed_body": (415, None),
    "http.content_type": (415, None),
    "http.cut_while_draining": (503, "draining"),
    "http.draining": (503, "draining"),
    "http.engine_dead": (503, "engine_dead"),
    "http.headers_too_large": (431, "headers_too_large"),
    "http.host_not_allowed": (421, "host_not_allowed"),
    "http.internal_error": (500, "internal_error"),
    "http.invalid_api_key": (401, "invalid_api_key"),
    "http.invalid_json": (400, "invalid_json"),
    "http.invalid_tag": (400, "invalid_value"),
    "http.invalid_value": (400, "invalid_value"),
    "http.loading": (503, "loading"),
    "http.malformed": (400, "bad_http"),
    "http.method_not_allowed": (405, "method_not_allowed"),
    "http.misplaced_block": (400, "invalid_value"),
    "http.missing_field": (400, "missing_field"),
    "http.model_not_found": (404, "model_not_found"),
    "http.not_found": (404, "not_found"),
    "http.not_ready": (503, "not_ready"),
    "http.origin_not_allowed": (403, "origin_not_allowed"),
    "http.previous_response_not_found": (404, "previous_response_not_found"),
    "http.request_timeout": (408, "timeout"),
    "http.response_not_found": (404, "response_not_found"),
    "http.too_many_connections": (503, "too_many_connections"),
    "http.too_many_listeners": (429, "too_many_listeners"),
    "http.too_many_pipelined": (400, "bad_http"),
    "http.tools_not_supported": (400, "tools_not_supported"),
    "http.transfer_encoding": (400, "bad_http"),
    "http.unhealthy": (503, "unhealthy"),
    "http.unknown_field": (400, "unknown_field"),
    "http.url_too_long": (414, "bad_http"),
    "http.version_not_supported": (505, "bad_http"),
}
"""Status and `code` of the body by error code or class. None: the body has the error code itself. Codes not listed: 400, None."""
OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    421: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}
"""`type` of the body by status; `invalid_request_error` for the others."""
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; any other is `invalid_request_error` below 500 and `api_error` from there."""
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
        self.status, public = ANSWERS.get(code, (400, None))
        self.public_code: str | None = public or code
        """`code` of the body."""
        self.param = param
        self.headers = dict(headers or {})

    def reword(self, text: str) -> Self:
        """Replace the whole message."""
        self._text, self.contexts, self.hints = text, (), ()
        return self

    @property
    def kind(self) -> str:
        """`type` of OpenAI's body."""
        return OPENAI_TYPES.get(self.status, "invalid_request_error")

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
        self.status, public = ANSWERS.get(error.code) or ANSWERS[row]
        self.public_code = public or (None if error.code == LEGACY_CODE else error.code)
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

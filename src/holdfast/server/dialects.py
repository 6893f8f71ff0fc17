"""Dialects: which API family a path belongs to, and an error in the shape of that family; no torch."""

import json
from typing import Any, Final, Literal

from holdfast.server.errors import ApiError

Dialect = Literal["openai", "anthropic", "ollama"]
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
_ROOTS: Final[tuple[tuple[str, Dialect], ...]] = (("/v1/messages", "anthropic"), ("/api", "ollama"))


def dialect_of(path: str) -> Dialect:
    """The family of a path; OpenAI's unless another one owns it."""
    for root, dialect in _ROOTS:
        if path == root or path.startswith(f"{root}/"):
            return dialect
    return "openai"


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """An error as the whole body of an answer."""
    dialect = dialect_of(path)
    if dialect == "openai":
        return error.json_bytes()
    return _json(_anthropic(error, request_id) if dialect == "anthropic" else {"error": error.message})


def error_piece(error: ApiError, path: str, request_id: str) -> bytes:
    """An error as the last piece of a stream."""
    dialect = dialect_of(path)
    if dialect == "openai":
        return error.event()
    body = error_body(error, path, request_id)
    return b"event: error\ndata: %s\n\n" % body if dialect == "anthropic" else body + b"\n"


def _anthropic(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

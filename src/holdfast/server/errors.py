"""Errors in OpenAI's shape: ApiError, what an exception becomes for a client, and the bytes of an answer or an event; no torch.

What is told to a client was meant for one: no path, address or traceback of this machine.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Final

from holdfast.errors import EngineDeadError, HoldfastError, QueueFullError, RequestError

INVALID_REQUEST: Final = "invalid_request_error"
UNAUTHENTICATED: Final = "authentication_error"
FORBIDDEN: Final = "permission_error"
RATE_LIMITED: Final = "rate_limit_error"
UNAVAILABLE: Final = "service_unavailable_error"
INTERNAL: Final = "internal_error"
MAX_MESSAGE_CHARS: Final = 2000
INTERNAL_MESSAGE: Final = (
    "the request was not answered; the server met a fault of its own; try again, and report the request id if it stays"
)
DEAD_MESSAGE: Final = "an answer was asked; the engine has stopped; wait until the server was started again"
DRAINING_MESSAGE: Final = "an answer was asked; the server is ending and takes no new requests; ask another one"
INTERNAL_WORDS = re.compile(
    r"0x[0-9a-fA-F]{6,}"
    r"|(?<![\w:/.])/(?:app|bin|dev|etc|home|lib|mnt|opt|proc|root|run|srv|sys|tmp|usr|var|work)(?:/[^\s'\";,)]*)?"
    r"|File \"[^\"]*\", line \d+"
)
"""Addresses, paths and lines of a traceback, wherever they come from."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        """The field of the request that is wrong, as messages[0].content."""
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON value that clients know."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def json_bytes(self) -> bytes:
        """The same as an answer's body."""
        return json.dumps(self.body(), separators=(",", ":")).encode()

    def event(self) -> bytes:
        """The same as the last event of a stream, for errors that come when an answer has begun."""
        return b"data: " + self.json_bytes() + b"\n\n"


def from_exception(error: BaseException) -> ApiError:
    """What a client is told of an exception: all of it where the request is at fault, a bare sentence where we are."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        seconds = getattr(error, "retry_after_seconds", None)
        wait = max(1, math.ceil(seconds)) if isinstance(seconds, int | float) and math.isfinite(seconds) else 1
        return ApiError(429, cleaned(error), RATE_LIMITED, None, "queue_full", {"Retry-After": str(wait)})
    if isinstance(error, RequestError):
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        return ApiError(
            400,
            cleaned(error),
            INVALID_REQUEST,
            param if isinstance(param, str) else None,
            code if isinstance(code, str) else None,
        )
    if isinstance(error, EngineDeadError):
        return ApiError(503, DEAD_MESSAGE, UNAVAILABLE, None, "engine_dead")
    return ApiError(500, INTERNAL_MESSAGE, INTERNAL, None, "internal_error")


def is_our_fault(error: BaseException) -> bool:
    """Whether an exception is told in the log with its traceback."""
    return not isinstance(error, ApiError | RequestError | EngineDeadError)


def failed_answer(words: str, *, is_asked: bool = False) -> ApiError:
    """For an answer that the engine gave up, alone among its neighbours; 400 where the request asked for what cannot be, so
    that clients do not send it again."""
    status, kind = (400, INVALID_REQUEST) if is_asked else (500, INTERNAL)
    return ApiError(status, cleaned(words), kind, None, "answer_failed")


def cleaned(words: HoldfastError | str) -> str:
    """A message without anything of this machine in it, of bounded length."""
    text = INTERNAL_WORDS.sub("...", str(words))
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 3]}..."

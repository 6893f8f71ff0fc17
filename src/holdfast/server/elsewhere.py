"""Endpoints: the paths that a server answers, and the sentence for a path or a method that it does not; no torch."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute

from holdfast.errors import shown
from holdfast.server.dialects import Dialect, dialect_of
from holdfast.server.errors import ApiError

_TEXT_ALONE: Final = "this server reads and writes text alone; use POST /v1/chat/completions"
_NOTHING_STORED: Final = "this server stores no files and no jobs; send each request on its own, it batches them itself"
_ONE_MODEL: Final = (
    "this server serves the one model that it was started with; start another with: holdfast serve MODEL"
)
_NEAR: Final = (
    (r"/v1/audio/.*|/v1/images/.*|/v1/videos.*|/v1/realtime.*|/sdapi/.*", _TEXT_ALONE),
    (r"/v1/(files|uploads|batches)(/.*)?|/v1/messages/batches(/.*)?", _NOTHING_STORED),
    (
        r"/v1/(assistants|threads|vector_stores|conversations|containers|evals)(/.*)?",
        "this server runs no agents; send the conversation to POST /v1/responses",
    ),
    (r"/v1/fine_tuning/.*|/v1/fine-tunes.*", "this server does not train; use POST /v1/chat/completions"),
    (r"/v1/moderations", "no model here moderates; ask for a judgement with POST /v1/chat/completions"),
    (r"/api/(pull|push|create|copy|delete|blobs/.*)", _ONE_MODEL),
    (r"/v1/complete", "this is Anthropic's old endpoint; use POST /v1/messages"),
    (r"(/v1)?/chat(/completion|/stream)?", "a chat is answered by POST /v1/chat/completions; use it"),
    (
        r"(/v1)?/(completion|generate|generate_stream|infer|invocations)|/v1/engines/.*",
        "a prompt is continued by POST /v1/completions, a chat by POST /v1/chat/completions; use one of them",
    ),
    (r"/docs|/redoc|/swagger.*", "the document of every endpoint is GET /openapi.json; read that"),
)
"""Paths of other servers and other endpoints of the same makers, and what to do in place of each."""


class Endpoints:
    """Every path of an application with its methods."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._listed: dict[str, set[str]] = {}
        self._patterns: list[tuple[re.Pattern[str], set[str]]] = []
        for router in routers:
            for route in router.routes:
                if isinstance(route, APIRoute):
                    methods = set(route.methods or ())
                    self._patterns.append((route.path_regex, methods))
                    if route.include_in_schema:
                        self._listed.setdefault(route.path, set()).update(methods)

    def missing(self, path: str) -> ApiError:
        """404 for a path without an endpoint: the one that was meant, or those that exist."""
        words = next((words for pattern, words in _NEAR if re.fullmatch(pattern, path)), "")
        if not words:
            meant = next((near for near in _other_spellings(path) if self.methods(near)), None)
            words = self._all(path) if meant is None else f"{self._named(meant)} exists; use it"
        return ApiError(404, f"there is no endpoint {shown(path)}; {words}", code="not_found")

    def wrong_method(self, path: str, method: str) -> ApiError:
        """405 for a path that takes other methods."""
        allowed = sorted(self.methods(path))
        use = " or ".join(allowed)
        return ApiError(
            405,
            f"{shown(path)} does not take {shown(method, 16)}; it takes {use}; send {use}",
            code="method_not_allowed",
            headers={"Allow": ", ".join(allowed)},
        )

    def methods(self, path: str) -> set[str]:
        """What a path takes; nothing if there is no such endpoint."""
        return {method for pattern, methods in self._patterns if pattern.match(path) for method in methods}

    def _named(self, path: str) -> str:
        return f"{' or '.join(sorted(self.methods(path) - {'HEAD'}))} {path}"

    def _all(self, path: str) -> str:
        """Those of the path's own family; for OpenAI's, the doors of the others too."""
        own = dialect_of(path)
        return f"this server has {', '.join(self._of(own))}; use one of them; GET /openapi.json describes all"

    def _of(self, dialect: Dialect) -> Iterator[str]:
        for path, methods in self._listed.items():
            is_own = dialect_of(path) == dialect
            if is_own or (dialect == "openai" and path in ("/v1/messages", "/api/chat")):
                yield f"{' or '.join(sorted(methods))} {path.replace(':path', '')}"


def _other_spellings(path: str) -> Iterator[str]:
    """What a path may have been meant to be: a base URL with too much or too little, slashes, letters."""
    plain = re.sub(r"/+", "/", path[:256]).rstrip("/") or "/"
    for whole in dict.fromkeys((plain, plain.lower())):
        root = whole
        yield from (root, f"/v1{root}", f"/api{root}")
        while root.startswith(("/v1/", "/api/", "/openai/", "/anthropic/")):
            root = root[root.index("/", 1) :]
            yield from (f"/v1{root}", root, f"/api{root}")

"""Endpoints: the paths of an application, and the answer to a path or method that it does not have; no torch."""

import re
from collections.abc import Iterable, Iterator

from fastapi import APIRouter
from fastapi.routing import APIRoute

from holdfast.errors import shown
from holdfast.server.errors import ApiError, Dialect, dialect_of
from holdfast.server.tables import data_table


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
        """Return 404 for an unknown path, with the nearest endpoint or the list of all."""
        others = data_table("other_paths.toml").items()
        fix = next((fix for pattern, fix in others if re.fullmatch(pattern, path)), "")
        if not fix:
            near = next((near for near in _other_spellings(path) if self.methods(near)), None)
            if near is None:
                fix = f"This server has {', '.join(self._of(dialect_of(path)))}. GET /openapi.json describes all."
            else:
                fix = f"Did you mean {' or '.join(sorted(self.methods(near) - {'HEAD'}))} {near}?"
        return ApiError("http.not_found", path=path, fix=fix)

    def wrong_method(self, path: str, method: str) -> ApiError:
        """Return 405 for a path that has other methods."""
        allowed = sorted(self.methods(path))
        values = {"path": path, "method": shown(method, 16)[1:-1], "allowed": " or ".join(allowed)}
        return ApiError("http.method_not_allowed", headers={"Allow": ", ".join(allowed)}, **values)

    def methods(self, path: str) -> set[str]:
        """Return the methods of a path; empty if there is no such endpoint."""
        return {method for pattern, methods in self._patterns if pattern.match(path) for method in methods}

    def _of(self, dialect: Dialect) -> Iterator[str]:
        """List the endpoints of one API family; OpenAI's list also has the main endpoints of the others."""
        for path, methods in self._listed.items():
            is_own = dialect_of(path) == dialect
            if is_own or (dialect == "openai" and path in ("/v1/messages", "/api/chat")):
                yield f"{' or '.join(sorted(methods))} {path.replace(':path', '')}"


def _other_spellings(path: str) -> Iterator[str]:
    """Yield likely corrections: a base URL with too much or too little, slashes, upper case."""
    plain = re.sub(r"/+", "/", path[:256]).rstrip("/") or "/"
    for whole in dict.fromkeys((plain, plain.lower())):
        root = whole
        yield from (root, f"/v1{root}", f"/api{root}")
        while root.startswith(("/v1/", "/api/", "/openai/", "/anthropic/")):
            root = root[root.index("/", 1) :]
            yield from (f"/v1{root}", root, f"/api{root}")

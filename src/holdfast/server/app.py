"""make_app: the ASGI application: guards around every endpoint, errors in one shape, the endpoints; no torch."""

import re
from collections.abc import Iterable, Iterator
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request

from holdfast import __version__
from holdfast.errors import HoldfastError, RequestError, shown
from holdfast.server import (
    anthropic_messages,
    chat_completions,
    completions,
    embeddings,
    models,
    ollama_answers,
    page,
    responses,
    status,
    stored_responses,
    tokens,
)
from holdfast.server.bodies import BodyBudget
from holdfast.server.errors import ApiError, Dialect, dialect_of, from_exception
from holdfast.server.guards import Guard, HostRule, RecordGuard, key_fault, log_failure, state_fault
from holdfast.server.keys import Keys
from holdfast.server.logs import RequestLog, record_of
from holdfast.server.openapi import document
from holdfast.server.sampling import field_of
from holdfast.server.service import Service
from holdfast.server.tables import data_table
from holdfast.server.traces import Traces


class Endpoints:
    """All paths of an application with their methods."""

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
    """Yield likely corrections of a path: base URL, slashes, upper case."""
    plain = re.sub(r"/+", "/", path[:256]).rstrip("/") or "/"
    for whole in dict.fromkeys((plain, plain.lower())):
        root = whole
        yield from (root, f"/v1{root}", f"/api{root}")
        while root.startswith(("/v1/", "/api/", "/openai/", "/anthropic/")):
            root = root[root.index("/", 1) :]
            yield from (f"/v1{root}", root, f"/api{root}")


CORS_MAX_AGE_SECONDS = 600
ANTHROPIC_HEADERS = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")


def make_app(
    service: Service,
    keys: Keys | None = None,
    *,
    allowed_hosts: Iterable[str] = (),
    allowed_origins: Iterable[str] = (),
    log: RequestLog | None = None,
    traces: Traces | None = None,
    routers: Iterable[APIRouter] | None = None,
) -> FastAPI:
    """Make the application of a served model; without keys it is open to every client."""
    origins = tuple(allowed_origins)
    guards = [
        Middleware(RecordGuard, service=service, log=log, traces=traces),
        Middleware(Guard, fault=HostRule(allowed_hosts, origins).fault),
        *_cors(origins),
        Middleware(Guard, fault=partial(key_fault, Keys() if keys is None else keys)),
        Middleware(Guard, fault=partial(state_fault, service)),
    ]
    # FastAPI's own pages load scripts from another site, unlike the document.
    app = FastAPI(
        title="Holdfast",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        middleware=guards,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.body_budget = BodyBudget(service.limits)
    for kind in (ApiError, HoldfastError, ClientDisconnect, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    included = endpoint_routers() if routers is None else tuple(routers)
    for router in included:
        app.include_router(router)
    app.state.endpoints = Endpoints(included)
    app.openapi = partial(document, app)
    return app


def endpoint_routers() -> tuple[APIRouter, ...]:
    """List the routers of all endpoints."""
    return (
        models.router,
        chat_completions.router,
        completions.router,
        responses.router,
        stored_responses.router,
        anthropic_messages.router,
        ollama_answers.router,
        models.ollama,
        embeddings.router,
        tokens.router,
        status.router,
        page.router,
    )


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Allow pages of the given origins, never cookies."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("authorization", "content-type", "x-request-id", *ANTHROPIC_HEADERS),
            expose_headers=("x-request-id", "request-id"),
            max_age=CORS_MAX_AGE_SECONDS,
        )
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer with an error of an endpoint, in the shape of its path's API family."""
    found, record = _api_error(request, error), record_of(request)
    if found.status >= 500:
        log_failure(record, error)
    record.error = found.public_code
    return Response(found.to_json(record.path, record.request_id), found.status, found.headers, "application/json")


def _api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ClientDisconnect):
        return ApiError("http.client_gone")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0] if error.errors() else {}
        param = ".".join([str(part) for part in first.get("loc", ())][1:]) or None
        return ApiError("http.invalid_query", param=param, name=param, reason=first.get("msg", "it is wrong"))
    if isinstance(error, HTTPException):
        endpoints: Endpoints = request.app.state.endpoints
        path = request.scope["path"]
        if error.status_code == 404:
            return endpoints.missing(path)
        if error.status_code == 405 and endpoints.methods(path):
            return endpoints.wrong_method(path, request.method)
        refused = ApiError("http.refused", headers=error.headers, reason=shown(error.detail, 200)[1:-1])
        refused.status = error.status_code
        return refused
    return from_exception(error, field_of(error) if isinstance(error, RequestError) else None)

"""make_app: the ASGI application: guards around every endpoint, errors in one shape, the endpoints themselves; no torch."""

from collections.abc import Iterable
from functools import partial

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request

from holdfast import __version__
from holdfast.errors import HoldfastError, RequestError, shown
from holdfast.observability.log import get_logger
from holdfast.server import (
    anthropic_messages,
    chat_completions,
    completions,
    embeddings,
    models,
    ollama_answers,
    ollama_models,
    page,
    responses,
    status,
    stored_responses,
    tokens,
)
from holdfast.server.bodies import BodyRoom
from holdfast.server.dialects import error_body
from holdfast.server.elsewhere import Endpoints
from holdfast.server.errors import ApiError, from_exception, is_our_fault
from holdfast.server.guards import HostGuard, KeyGuard, RecordGuard, StateGuard
from holdfast.server.keys import Keys
from holdfast.server.logs import RequestLog, record_of
from holdfast.server.openapi import document
from holdfast.server.sampling import field_of
from holdfast.server.service import Service
from holdfast.server.traces import Traces

CLIENT_GONE = 499
"""Logged, and never seen by anybody."""
CORS_MAX_AGE_SECONDS = 600
ANTHROPIC_HEADERS = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")
"""That Anthropic's clients send."""
_log = get_logger("holdfast.server")


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
    """The application of a model that is served; without keys everybody may ask."""
    origins = tuple(allowed_origins)
    guards = [
        Middleware(RecordGuard, service=service, log=log, traces=traces),
        Middleware(HostGuard, allowed_hosts=tuple(allowed_hosts), allowed_origins=origins),
        *_cors(origins),
        Middleware(KeyGuard, keys=keys if keys is not None else Keys()),
        Middleware(StateGuard, service=service),
    ]
    # The pages that FastAPI has for a person load scripts from elsewhere; the document itself does not.
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
    app.state.body_room = BodyRoom(service.limits)
    for kind in (ApiError, HoldfastError, ClientDisconnect, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    included = endpoint_routers() if routers is None else tuple(routers)
    for router in included:
        app.include_router(router)
    app.state.endpoints = Endpoints(included)
    app.openapi = partial(document, app)
    return app


def endpoint_routers() -> tuple[APIRouter, ...]:
    """Those of every endpoint: a module for each kind adds its own here."""
    return (
        models.router,
        chat_completions.router,
        completions.router,
        responses.router,
        stored_responses.router,
        anthropic_messages.router,
        ollama_answers.router,
        ollama_models.router,
        embeddings.router,
        tokens.router,
        status.router,
        page.router,
    )


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Nothing unless pages of other origins were allowed; never cookies."""
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
    """Any error of an endpoint, in the shape of its path's API family."""
    told = _told(request, error)
    if is_our_fault(error) and told.status >= 500:
        _log.error("request %s failed: %s", record_of(request).request_id, type(error).__name__, exc_info=error)
    record = record_of(request)
    record.error = told.code or told.kind
    body = error_body(told, record.path, record.request_id)
    return Response(body, told.status, told.headers, "application/json")


def _told(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_GONE, "the client has gone", code="client_gone")
    if isinstance(error, RequestValidationError):
        first = error.errors()[0] if error.errors() else {}
        names = [str(part) for part in first.get("loc", ())][1:]
        param = ".".join(names) or None
        return ApiError(400, f"{param} was given; {first.get('msg', 'it is wrong')}; change it", param=param)
    if isinstance(error, HTTPException):
        endpoints: Endpoints = request.app.state.endpoints
        path = request.scope["path"]
        if error.status_code == 404:
            return endpoints.missing(path)
        if error.status_code == 405 and endpoints.methods(path):
            return endpoints.wrong_method(path, request.method)
        words = f"the request was refused; {shown(error.detail, 200)[1:-1]}; change it"
        return ApiError(error.status_code, words, headers=error.headers)
    told = from_exception(error)
    if told.param is None and isinstance(error, RequestError):
        told.param = field_of(error)
    return told

"""post and document: routes that read a request model, and the OpenAPI document of all endpoints."""

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from holdfast.server.bodies import read_model
from holdfast.server.errors import Dialect, dialect_of
from holdfast.server.service import service_of

ERRORS: Mapping[int, str] = {
    400: "The request is wrong; param names the field.",
    401: "The API key is missing or wrong.",
    403: "Pages of this origin may not use this server.",
    404: "There is no such model, response or endpoint.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    421: "The server does not serve this host name.",
    429: "The queue is full; Retry-After says when to retry.",
    500: "The server failed.",
    503: "The engine has stopped, or the server is shutting down.",
}
LINES = "application/x-ndjson"
EVENT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]."}},
    "required": ["data"],
}
"""One event of a stream."""
ERROR_SCHEMAS: Mapping[Dialect, str] = {
    "openai": "ErrorReply",
    "anthropic": "AnthropicErrorReply",
    "ollama": "OllamaErrorReply",
}
_ALWAYS = (400, 401, 403, 421, 500, 503)
"""Statuses of every endpoint."""
_OF_BODIES = (404, 408, 413, 415)
BodyModel = TypeVar("BodyModel", bound=BaseModel)
Endpoint = Callable[[Request, BodyModel], Coroutine[Any, Any, Response]]


def post(
    router: APIRouter, path: str, model: type[BodyModel], reply: str, *, queues: bool = True, streams: bool = False
) -> Callable[[Endpoint[BodyModel]], Callable[[Request], Coroutine[Any, Any, Response]]]:
    """Register an endpoint that reads a model. `reply` names its answer in data/reply_schemas.json; `queues`: may return 429."""

    def register(endpoint: Endpoint[BodyModel]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def run(request: Request) -> Response:
            return await endpoint(request, await read_model(request, model, service_of(request).limits))

        run.__doc__ = endpoint.__doc__
        described = responses(path, reply, *((429,) if queues else ()), *_OF_BODIES, streams=streams)
        body = {"required": True, "content": {"application/json": {"schema": inlined_schema(model)}}}
        router.post(
            path,
            responses=described,
            openapi_extra={"requestBody": body},
            operation_id=endpoint.__name__,
            name=endpoint.__name__,
        )(run)
        return run

    return register


def responses(path: str, reply: str, *statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Describe the answer, the stream and the errors of a route."""
    described: dict[int | str, dict[str, Any]] = {200: _described("The answer.", reply)}
    if streams:
        is_lines = dialect_of(path) == "ollama"
        described[200]["description"] = (
            "The answer; unless stream is false, lines with pieces of it."
            if is_lines
            else "The answer; with stream, events whose data is a chunk of it, and [DONE]."
        )
        schema = {LINES: {"type": "string"}} if is_lines else {"text/event-stream": EVENT}
        described[200]["content"] |= {media_type: {"schema": value} for media_type, value in schema.items()}
    for status in sorted({*_ALWAYS, *statuses}):
        described[status] = _described(ERRORS[status], ERROR_SCHEMAS[dialect_of(path)])
    if 429 in described:
        described[429]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return described


def _described(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


@cache
def reply_schemas() -> dict[str, Any]:
    """Read the JSON schemas of all answers."""
    return json.loads(resources.files("holdfast").joinpath("data", "reply_schemas.json").read_text("utf-8"))


def document(app: FastAPI) -> dict[str, Any]:
    """Make the document of a whole application; every operation has the errors of the guards."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = made.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **reply_schemas()}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            error = ERROR_SCHEMAS[dialect_of(path)]
            for operation in operations.values():
                operation["responses"].pop("422", None)  # such faults are answered with 400
                _name_models(operation, app.state.service.names)
                for status in _ALWAYS:
                    operation["responses"].setdefault(str(status), _described(ERRORS[status], error))
        app.openapi_schema = made
    return app.openapi_schema


def _name_models(operation: dict[str, Any], names: Sequence[str]) -> None:
    """List the served names as the values of `model`."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "model" in body.get("properties", {}):
        body["properties"]["model"] = {"enum": [*names, None], "title": "Model", "description": "Default: the first."}


def inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a request model without references, because it stands inside a larger document."""
    schema = model.model_json_schema(by_alias=True)
    return _inlined(schema, schema.pop("$defs", {}))


def _inlined(value: Any, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 (any JSON)
    if isinstance(value, list):
        return [_inlined(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("$ref")
    if isinstance(name, str) and name.startswith("#/$defs/"):
        return _inlined(parts[name.removeprefix("#/$defs/")], parts)
    # A discriminator refers to its parts; without it the alternatives are tried one by one.
    return {key: _inlined(item, parts) for key, item in value.items() if key != "discriminator"}

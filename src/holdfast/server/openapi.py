"""post and document: routes that read a request model, and the OpenAPI document of all endpoints."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from holdfast.server.bodies import read_model
from holdfast.server.errors import dialect_of
from holdfast.server.service import service_of
from holdfast.server.streams import while_connected
from holdfast.server.tables import data_table

TABLE: Final = data_table("openapi.toml")
LINES: Final = TABLE["streams"]["lines"]["media_type"]
_ALWAYS = (400, 401, 403, 421, 500, 503)
"""Statuses of every endpoint."""
_OF_BODIES = (404, 408, 413, 415)
BodyModel = TypeVar("BodyModel", bound=BaseModel)
Endpoint = Callable[[Request, BodyModel], Coroutine[Any, Any, Response]]


def post(
    router: APIRouter,
    path: str,
    model: type[BodyModel],
    reply: str,
    *,
    queues: bool = True,
    streams: bool = False,
    is_whole: bool = False,
) -> Callable[[Endpoint[BodyModel]], Callable[[Request], Coroutine[Any, Any, Response]]]:
    """Register an endpoint that reads a model. `reply` names its answer in data/reply_schemas.json.

    `queues`: it may return 429. `is_whole`: it never streams, and ends with the client's connection.
    """

    def register(endpoint: Endpoint[BodyModel]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def run(request: Request) -> Response:
            work = endpoint(request, await read_model(request, model, service_of(request).limits))
            return await (while_connected(request, work) if is_whole else work)

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
        stream = TABLE["streams"]["lines" if dialect_of(path) == "ollama" else "events"]
        described[200]["description"] = stream["description"]
        described[200]["content"][stream["media_type"]] = {"schema": stream["schema"]}
    for status in sorted({*_ALWAYS, *statuses}):
        described[status] = _error(path, status)
    if 429 in described:
        described[429]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return described


def _described(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _error(path: str, status: int) -> dict[str, Any]:
    return _described(TABLE["errors"][str(status)], TABLE["error_schemas"][dialect_of(path)])


def document(app: FastAPI) -> dict[str, Any]:
    """Make the document of a whole application; every operation has the errors of the guards."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = made.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **data_table("reply_schemas.json")}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # such faults return 400
                _name_models(operation, app.state.service.names)
                for status in _ALWAYS:
                    operation["responses"].setdefault(str(status), _error(path, status))
        app.openapi_schema = made
    return app.openapi_schema


def _name_models(operation: dict[str, Any], names: Sequence[str]) -> None:
    """List the served names as the values of `model`."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "model" in body.get("properties", {}):
        body["properties"]["model"] = {"enum": [*names, None], "title": "Model", "description": "Default: the first."}


def inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a request model's JSON schema without references, to embed it in the document."""
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
    # A discriminator contains references; without it, readers try each alternative.
    return {key: _inlined(item, parts) for key, item in value.items() if key != "discriminator"}

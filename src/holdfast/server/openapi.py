"""What the OpenAPI document says of an endpoint: its body, its answers, and its errors, from the models themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from holdfast.server.anthropic_schemas import AnthropicErrorReply
from holdfast.server.dialects import Dialect, dialect_of
from holdfast.server.ollama_schemas import OllamaErrorReply
from holdfast.server.schemas import ErrorReply

ERRORS: Mapping[int, str] = {
    400: "The request is wrong; param names the field.",
    401: "The API key is missing or wrong.",
    403: "Pages of this origin may not ask.",
    404: "There is no such model, response or endpoint.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    421: "The server does not go by this host name.",
    429: "More requests wait than the queue holds; Retry-After says when to come again.",
    500: "The server met a fault of its own.",
    503: "The engine has stopped, or the server is ending.",
}
LINES = "application/x-ndjson"
EVENT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]."}},
    "required": ["data"],
}
"""One event of a stream."""
ERROR_MODELS: Mapping[Dialect, type[BaseModel]] = {
    "openai": ErrorReply,
    "anthropic": AnthropicErrorReply,
    "ollama": OllamaErrorReply,
}
"""The shape of an error by the API family of its path."""
_OF_ANY = (400, 401, 403, 421, 500, 503)
"""Which of them every endpoint may answer with; those of a body, and of the queue, come on top."""
_OF_BODIES = (404, 408, 413, 415)


def responses(
    answer: type[BaseModel],
    *more: int,
    has_body: bool = True,
    streams: bool | str = False,
    error: type[BaseModel] = ErrorReply,
) -> dict[int | str, dict[str, Any]]:
    """For `responses` of a route: its answer, its stream, and every error that there can be. `streams`: LINES for a stream
    of lines, true for one of events."""
    statuses = sorted({*_OF_ANY, *more, *(_OF_BODIES if has_body else ())})
    told: dict[int | str, dict[str, Any]] = {200: {"model": answer, "description": "The answer."}}
    if streams == LINES:
        told[200]["content"] = {LINES: {"schema": {"type": "string"}}}
        told[200]["description"] = "The answer; unless stream is false, lines whose objects are pieces of it."
    elif streams:
        told[200]["content"] = {"text/event-stream": {"schema": EVENT}}
        told[200]["description"] = "The answer; with stream, events whose data is a chunk of it, and [DONE]."
    for status in statuses:
        told[status] = {"model": error, "description": ERRORS[status]}
    told[429] = (
        {**told.get(429, {}), "headers": {"Retry-After": {"schema": {"type": "integer"}}}} if 429 in told else {}
    )
    return {status: told[status] for status in told if told[status]}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of a whole application: every operation has the errors that guards answer with."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for model in ERROR_MODELS.values():
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # such faults are told as 400
                _name_models(operation, app.state.service.names)
                for status in _OF_ANY:
                    operation["responses"].setdefault(str(status), _error(status, path))
        app.openapi_schema = made
    return app.openapi_schema


def _name_models(operation: dict[str, Any], names: Sequence[str]) -> None:
    """A model is asked for by the names that it is served under, and no others."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "model" in body.get("properties", {}):
        body["properties"]["model"] = {"enum": [*names, None], "title": "Model", "description": "Left out: the first."}


def _error(status: int, path: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ERROR_MODELS[dialect_of(path)].__name__}"}
    return {"description": ERRORS[status], "content": {"application/json": {"schema": schema}}}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route whose body is read by server/bodies.py: the schema, with its parts written out."""
    schema = model.model_json_schema(by_alias=True)
    parts = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _written_out(schema, parts)}}}}


def _written_out(value: Any, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 (any JSON)
    """A schema without references: it stands in the midst of a document, whose root is elsewhere."""
    if isinstance(value, list):
        return [_written_out(item, parts) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("$ref")
    if isinstance(name, str) and name.startswith("#/$defs/"):
        return _written_out(parts[name.removeprefix("#/$defs/")], parts)
    # A discriminator names its parts by reference; without it the alternatives are tried one by one.
    return {key: _written_out(item, parts) for key, item in value.items() if key != "discriminator"}

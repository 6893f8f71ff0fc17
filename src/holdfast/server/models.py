"""/v1/models, /api/tags, /api/show, /api/ps and /api/version: the served model in OpenAI's, Anthropic's and Ollama's shapes."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from holdfast import __version__
from holdfast.server.ollama_schemas import OllamaShowRequest
from holdfast.server.openapi import post, responses
from holdfast.server.sampling import check_model
from holdfast.server.service import Service, service_of
from holdfast.text.reasoning import choose_reasoning_parser
from holdfast.text.tool_formats import choose_tool_parser

OLLAMA_VERSION: Final = "0.12.11"
"""Ollama release that these endpoints follow; clients refuse servers that are too old."""
LATEST: Final = ":latest"
"""The tag that Ollama adds to a name without one."""
STAYS_SECONDS: Final = 365 * 24 * 3600
ARCHITECTURE: Final = "holdfast"
"""Prefix of the names in `model_info`."""
OPTION_NAMES: Final = {"repetition_penalty": "repeat_penalty"}
_DETAILS: Final[dict[str, object]] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
"""Facts that Ollama reports about model files; unknown here."""
router = APIRouter(tags=["models"])
ollama = APIRouter(tags=["ollama"])


@router.get("/v1/models", responses=responses("/v1/models", "ModelList"), operation_id="list_models")
async def list_models(request: Request) -> JSONResponse:
    """List all names; answers carry the first."""
    service = service_of(request)
    cards = [_card(service, name) for name in service.names]
    return JSONResponse({"object": "list", "data": cards, "has_more": False})


# Names may have slashes, as on the Hub.
@router.get("/v1/models/{model:path}", responses=responses("/v1/models", "ModelCard", 404), operation_id="get_model")
async def get_model(request: Request, model: str) -> JSONResponse:
    """Describe one name."""
    service = service_of(request)
    check_model(service, model)
    return JSONResponse(_card(service, model))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(service.started_at), UTC).isoformat(),
        "created": int(service.started_at),
        "owned_by": "holdfast",
        "root": service.name,
        "parent": None,
        "max_model_len": service.llm.max_model_len,
    }


def check_tagged_model(service: Service, model: str | None) -> None:
    """Raise 404 for a name that is not served; `:latest` after a served name is accepted."""
    is_tagged = model is not None and model not in service.names and model.endswith(LATEST)
    check_model(service, model.removesuffix(LATEST) if model is not None and is_tagged else model)


def stamp(seconds: float | None = None) -> str:
    """Write a time as Ollama does; the default is now."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


def _entry(service: Service, name: str, first: Mapping[str, object], last: Mapping[str, object]) -> dict[str, object]:
    """Describe a name as Ollama's lists do. Clients show the digest, which Ollama computes from files."""
    tagged = name if ":" in name else f"{name}{LATEST}"
    digest = sha256(service.name.encode()).hexdigest()
    own = {"size": service.llm.memory.planned_bytes, "digest": digest, "details": _DETAILS}
    return {"name": tagged, "model": tagged, **first, **own, **last}


@ollama.head("/api/tags", include_in_schema=False)
@ollama.get("/api/tags", responses=responses("/api/tags", "OllamaModels"))
async def list_local_models(request: Request) -> JSONResponse:
    """List all names, each with a tag."""
    service = service_of(request)
    modified = {"modified_at": stamp(service.started_at)}
    return JSONResponse({"models": [_entry(service, name, modified, {}) for name in service.names]})


@ollama.get("/api/ps", responses=responses("/api/ps", "OllamaRunningModels"))
async def list_running_models(request: Request) -> JSONResponse:
    """List the model under its first name: it is loaded as long as the server runs."""
    service = service_of(request)
    more = {
        "expires_at": stamp(time.time() + STAYS_SECONDS),
        "size_vram": service.llm.memory.planned_bytes,
        "context_length": service.llm.max_model_len,
    }
    return JSONResponse({"models": [_entry(service, service.name, {}, more)]})


@post(ollama, "/api/show", OllamaShowRequest, "OllamaShown", queues=False)
async def show_model(request: Request, body: OllamaShowRequest) -> JSONResponse:
    """Describe the model: template, context and capabilities."""
    service = service_of(request)
    check_tagged_model(service, body.model or body.name)
    template = service.llm.chat_template
    source = None if template is None else template.source
    pooling = service.llm.pooling
    can = {
        "completion": pooling.settings.has_head,
        "embedding": pooling.is_embedding,
        "tools": source is not None and choose_tool_parser(source, service.tool_parser) is not None,
        "thinking": choose_reasoning_parser(source, service.reasoning_parser) is not None,
    }
    can = can if can["completion"] else {"embedding": True}
    shown = {
        "modelfile": f"FROM {service.name}\n",
        "parameters": "\n".join(f"{OPTION_NAMES.get(name, name)} {value}" for name, value in service.advised.items()),
        "template": source or "{{ .Prompt }}",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": ARCHITECTURE,
            f"{ARCHITECTURE}.context_length": service.llm.max_model_len,
        },
        "capabilities": [name for name, is_able in can.items() if is_able],
        "modified_at": stamp(service.started_at),
    }
    return JSONResponse(shown)


@ollama.head("/api/version", include_in_schema=False)
@ollama.get("/api/version", responses=responses("/api/version", "OllamaVersion"))
async def ollama_version() -> JSONResponse:
    """Return the version of the API, and of this server."""
    return JSONResponse({"version": OLLAMA_VERSION, "holdfast": __version__})

"""/api/tags, /api/show, /api/ps and /api/version: the served model as Ollama's clients ask for it."""

import time
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from fastapi import APIRouter, Request

from holdfast import __version__
from holdfast.server.bodies import read_model
from holdfast.server.ollama_schemas import (
    OllamaDetails,
    OllamaErrorReply,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShown,
    OllamaShowRequest,
    OllamaVersion,
)
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model
from holdfast.server.service import Service, service_of
from holdfast.text.reasoning import choose_reasoning_parser
from holdfast.text.tool_formats import choose_tool_parser

OLLAMA_VERSION: Final = "0.12.11"
"""The release whose API these endpoints follow: clients refuse servers that say an older one than they need."""
LATEST: Final = ":latest"
"""The tag that Ollama adds to a name without one."""
STAYS_SECONDS: Final = 365 * 24 * 3600
ARCHITECTURE: Final = "holdfast"
"""Under which `model_info` tells the context."""
OPTION_NAMES: Final = {"repetition_penalty": "repeat_penalty"}
"""What Ollama calls an option that is called otherwise here."""
router = APIRouter(tags=["ollama"])


def check_tagged_model(service: Service, model: str | None) -> None:
    """404 for a name that nothing is served under; `:latest` after a served name is understood."""
    is_tagged = model is not None and model not in service.names and model.endswith(LATEST)
    check_model(service, model.removesuffix(LATEST) if model is not None and is_tagged else model)


def stamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it; now unless told otherwise."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags", responses=responses(OllamaModels, has_body=False, error=OllamaErrorReply))
async def list_local_models(request: Request) -> OllamaModels:
    """All names, with a tag as Ollama has it."""
    service = service_of(request)
    modified_at, size = stamp(service.started_at), service.llm.memory.planned_bytes
    return OllamaModels(
        models=[
            OllamaModel(
                name=name,
                model=name,
                modified_at=modified_at,
                size=size,
                digest=_digest(service),
                details=OllamaDetails(),
            )
            for name in map(_tagged, service.names)
        ]
    )


@router.get("/api/ps", responses=responses(OllamaRunningModels, has_body=False, error=OllamaErrorReply))
async def list_running_models(request: Request) -> OllamaRunningModels:
    """The model under its first name: it is loaded as long as the server runs."""
    service = service_of(request)
    report, name = service.llm.memory, _tagged(service.name)
    running = OllamaRunningModel(
        name=name,
        model=name,
        size=report.planned_bytes,
        digest=_digest(service),
        details=OllamaDetails(),
        expires_at=stamp(time.time() + STAYS_SECONDS),
        size_vram=report.planned_bytes,
        context_length=service.llm.max_model_len,
    )
    return OllamaRunningModels(models=[running])


@router.post(
    "/api/show",
    responses=responses(OllamaShown, error=OllamaErrorReply),
    openapi_extra=body_of(OllamaShowRequest),
    operation_id="show_model",
)
async def show_model(request: Request) -> OllamaShown:
    """The template of the model, its context and what it can do."""
    service = service_of(request)
    asked = await read_model(request, OllamaShowRequest, service.limits)
    check_tagged_model(service, asked.model or asked.name)
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
    return OllamaShown(
        modelfile=f"FROM {service.name}\n",
        parameters="\n".join(f"{OPTION_NAMES.get(name, name)} {value}" for name, value in service.advised.items()),
        template=source or "{{ .Prompt }}",
        details=OllamaDetails(),
        model_info={
            "general.architecture": ARCHITECTURE,
            f"{ARCHITECTURE}.context_length": service.llm.max_model_len,
        },
        capabilities=[name for name, is_able in can.items() if is_able],  # type: ignore[arg-type]
        modified_at=stamp(service.started_at),
    )


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version", responses=responses(OllamaVersion, has_body=False, error=OllamaErrorReply))
async def ollama_version() -> OllamaVersion:
    """Which API this is, and which server."""
    return OllamaVersion(version=OLLAMA_VERSION, holdfast=__version__)


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}{LATEST}"


def _digest(service: Service) -> str:
    """Ollama's is one of files; clients show its beginning and compare it."""
    return sha256(service.name.encode()).hexdigest()

"""/v1/models: the names that the served model goes by."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request

from holdfast.server.openapi import responses
from holdfast.server.sampling import check_model
from holdfast.server.schemas import ModelCard, ModelList
from holdfast.server.service import Service, service_of

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses=responses(ModelList, has_body=False), operation_id="list_models")
async def list_models(request: Request) -> ModelList:
    """All names; the first is the one that answers carry."""
    service = service_of(request)
    return ModelList(data=[_card(service, name) for name in service.names])


# Names may have slashes, as on the Hub.
@router.get("/v1/models/{model:path}", responses=responses(ModelCard, 404, has_body=False), operation_id="get_model")
async def get_model(request: Request, model: str) -> ModelCard:
    """One name."""
    service = service_of(request)
    check_model(service, model)
    return _card(service, model)


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        display_name=name,
        created=int(service.started_at),
        created_at=datetime.fromtimestamp(int(service.started_at), UTC).isoformat(),
        root=service.name,
        max_model_len=service.llm.max_model_len,
    )

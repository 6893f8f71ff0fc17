"""/v1/responses/{id}: kept responses read, listed by their input, deleted and continued; only by the key that made them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse

from holdfast.errors import shown
from holdfast.server.bodies import SMALL_BODY_BYTES
from holdfast.server.errors import ApiError
from holdfast.server.logs import record_of
from holdfast.server.openapi import responses
from holdfast.server.response_memory import KeptResponse
from holdfast.server.responses_schemas import DeletedResponse, Item, ItemList, Response, ResponseRequest
from holdfast.server.service import Service, service_of

MAX_LISTED = 100
Read = TypeVar("Read")
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])

router = APIRouter(tags=["responses"])


@router.get(
    "/v1/responses/{response_id}", responses=responses(Response, 404, has_body=False), operation_id="get_response"
)
async def get_response(request: Request, response_id: str, stream: bool = False) -> JSONResponse:
    """A response as it was given."""
    if stream:
        words = "stream was asked; a kept response has ended; leave stream out, and read it whole"
        raise ApiError(400, words, param="stream")
    kept = _found(request, response_id)
    return JSONResponse(await _beside(kept, kept.response))


@router.delete(
    "/v1/responses/{response_id}",
    responses=responses(DeletedResponse, 404, has_body=False),
    operation_id="delete_response",
)
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forget a response."""
    if not service_of(request).responses.delete(response_id, record_of(request).key_index):
        raise _unknown(service_of(request), response_id)
    return DeletedResponse(id=response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=responses(ItemList, 404, has_body=False),
    operation_id="list_input_items",
)
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> ItemList:
    """All that the model read for a response, with the conversation before it; the newest first unless told otherwise."""
    kept = _found(request, response_id)
    items = await _beside(kept, kept.input_items)
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((place + 1 for place, item in enumerate(items) if item["id"] == after), -1)
        if begin < 0:
            words = f"items after {shown(after, 64)} were asked; this response has no such item; leave after out"
            raise ApiError(400, words, param="after")
    page = items[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(data=page, first_id=first, last_id=last, has_more=begin + limit < len(items))


def wants_keeping(service: Service, asked: ResponseRequest) -> bool:
    """Whether an answer is kept; refused if the request insists and the server keeps none."""
    if asked.store and not service.responses:
        words = f"store was asked; {service.responses.terms()}; leave it out, or start with --response-memory 64MiB"
        raise ApiError(400, words, param="store")
    return asked.store is not False and bool(service.responses)


async def continued(request: Request, asked: ResponseRequest) -> tuple[KeptResponse | None, list[Item]]:
    """The response that a request continues, and the items before its own."""
    service, previous_id = service_of(request), asked.previous_response_id
    if previous_id is None:
        return None, []
    previous = service.responses.find(previous_id, record_of(request).key_index)
    if previous is None:
        raise _unknown(service, previous_id, param="previous_response_id", code="previous_response_not_found")
    if previous.chain_bytes > service.limits.max_body_bytes:
        words = f"{shown(previous_id, 64)} was to be continued; its conversation is longer than a request may be"
        raise ApiError(413, f"{words}; send fewer items as input", param="previous_response_id", code="body_too_large")
    return previous, await _beside(previous, partial(_read, previous, previous_id))


async def _beside(kept: KeptResponse, read: Callable[[], Read]) -> Read:
    """Call `read`, which parses the JSON of a conversation; beside the event loop if that takes long."""
    if kept.chain_bytes <= SMALL_BODY_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(None, read)


def _read(previous: KeptResponse, previous_id: str) -> list[Item]:
    """A kept conversation as items again. A model may have called a function by a name that no request may have."""
    try:
        return _ITEMS.validate_python(previous.conversation())
    except ValidationError as error:
        place: Any = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise ApiError(
            400,
            f"{shown(previous_id, 64)} was to be continued; its item {place[0]} is not valid input; send the items as "
            "input, without it",
            param="previous_response_id",
        ) from None


def _found(request: Request, response_id: str) -> KeptResponse:
    kept = service_of(request).responses.find(response_id, record_of(request).key_index)
    if kept is None:
        raise _unknown(service_of(request), response_id)
    return kept


def _unknown(
    service: Service, response_id: str, *, param: str | None = None, code: str = "response_not_found"
) -> ApiError:
    words = f"no response {shown(response_id, 64)} is kept; {service.responses.terms()}; send the items again as input"
    return ApiError(404, words, param=param, code=code)

"""/v1/responses/{id}: read, list, delete and continue stored responses, only with the key that made them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse

from holdfast.server.bodies import SMALL_BODY_BYTES
from holdfast.server.errors import ApiError
from holdfast.server.logs import record_of
from holdfast.server.openapi import responses
from holdfast.server.response_memory import KeptResponse
from holdfast.server.schemas import Item, ResponseRequest
from holdfast.server.service import Service, service_of

MAX_LISTED = 100
PATH = "/v1/responses/{response_id}"
Read = TypeVar("Read")
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])

router = APIRouter(tags=["responses"])


@router.get(PATH, responses=responses(PATH, "Response", 404), operation_id="get_response")
async def get_response(request: Request, response_id: str, stream: bool = False) -> JSONResponse:
    """Return a stored response."""
    if stream:
        raise ApiError("http.stream_of_kept", param="stream")
    kept = _found(request, response_id)
    return JSONResponse(await _off_loop(kept, kept.response))


@router.delete(PATH, responses=responses(PATH, "DeletedResponse", 404), operation_id="delete_response")
async def delete_response(request: Request, response_id: str) -> JSONResponse:
    """Delete a response."""
    if not service_of(request).responses.delete(response_id, record_of(request).key_index):
        raise _unknown(request, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(f"{PATH}/input_items", responses=responses(PATH, "ItemList", 404), operation_id="list_input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> JSONResponse:
    """List the input of a response, with the conversation before it; newest first by default."""
    kept = _found(request, response_id)
    items = await _off_loop(kept, kept.input_items)
    if order == "desc":
        items.reverse()
    begin = 0
    if after is not None:
        begin = next((place + 1 for place, item in enumerate(items) if item["id"] == after), -1)
        if begin < 0:
            raise ApiError("http.no_such_item", param="after", value=after[:64])
    page = items[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = begin + limit < len(items)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more})


def wants_keeping(service: Service, body: ResponseRequest) -> bool:
    """Return True if the answer is stored; raise ApiError if `store` is true and the server stores none."""
    if body.store and not service.responses:
        raise ApiError("http.store_disabled", param="store", terms=service.responses.terms())
    return body.store is not False and bool(service.responses)


async def continued(request: Request, body: ResponseRequest) -> tuple[KeptResponse | None, list[Item]]:
    """Return the response that a request continues, and its items."""
    service, previous_id = service_of(request), body.previous_response_id
    if previous_id is None:
        return None, []
    previous = service.responses.find(previous_id, record_of(request).key_index)
    param = "previous_response_id"
    if previous is None:
        terms = service.responses.terms()
        raise ApiError("http.previous_response_not_found", param=param, response_id=previous_id[:64], terms=terms)
    if previous.chain_bytes > service.limits.max_body_bytes:
        raise ApiError("http.chain_too_large", param=param, response_id=previous_id[:64])
    return previous, await _off_loop(previous, partial(_read, previous, previous_id))


async def _off_loop(kept: KeptResponse, read: Callable[[], Read]) -> Read:
    """Call `read`, which parses a conversation; use a thread if it is long."""
    if kept.chain_bytes <= SMALL_BODY_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(None, read)


def _read(previous: KeptResponse, previous_id: str) -> list[Item]:
    """Parse a stored conversation. It may be invalid: a model can call a function by a name no request may use."""
    try:
        return _ITEMS.validate_python(previous.conversation())
    except ValidationError as error:
        place: Any = error.errors(include_url=False, include_input=False)[0]["loc"]
        index, own_id = place[0], previous_id[:64]
        raise ApiError("http.previous_invalid", param="previous_response_id", index=index, response_id=own_id) from None


def _found(request: Request, response_id: str) -> KeptResponse:
    kept = service_of(request).responses.find(response_id, record_of(request).key_index)
    if kept is None:
        raise _unknown(request, response_id)
    return kept


def _unknown(request: Request, response_id: str) -> ApiError:
    terms = service_of(request).responses.terms()
    return ApiError("http.response_not_found", response_id=response_id[:64], terms=terms)

"""/v1/responses: input items answered with output items, whole or as events; text, reasoning and calls of functions."""

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette import responses as http

from holdfast.request.outputs import CompletionDelta
from holdfast.server.bodies import read_model
from holdfast.server.chat_text import AnswerText
from holdfast.server.conversations import Chat, prepare_chat
from holdfast.server.errors import from_exception
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.logs import record_of
from holdfast.server.openapi import body_of, responses
from holdfast.server.response_items import input_of, kept_item, messages_of
from holdfast.server.response_memory import KeptResponse
from holdfast.server.response_output import ResponseOutput
from holdfast.server.responses_schemas import FunctionChoice, Response, ResponseRequest, SchemaFormat
from holdfast.server.sampling import check_model
from holdfast.server.schemas import (
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedSchema,
    NamedToolChoice,
    ResponseFormat,
    Tool,
)
from holdfast.server.service import service_of
from holdfast.server.stored_responses import continued, wants_keeping
from holdfast.server.streams import Answer, Counted, EventStream, first_of, new_id, while_connected
from holdfast.server.structured import asked_rule

router = APIRouter(tags=["responses"])


@router.post(
    "/v1/responses",
    responses=responses(Response, 429, streams=True),
    openapi_extra=body_of(ResponseRequest),
    operation_id="create_response",
)
async def create_response(request: Request) -> http.Response:
    """Answer input items."""
    asked = await read_model(request, ResponseRequest, service_of(request).limits)
    if asked.stream:
        return EventStream(request, await while_connected(request, _begun(request, asked)))
    return await while_connected(request, _answered(request, asked))


@dataclass(frozen=True, slots=True)
class _Opened:
    """Input that the engine can take."""

    chat: Chat
    answer: Answer
    output: ResponseOutput
    parser: AnswerText
    logprobs: ChatLogprobWriter | None
    keep: Callable[[], None] | None
    """Keeps the response for a later request; None if it is not stored."""


async def _opened(request: Request, asked: ResponseRequest) -> _Opened:
    service = service_of(request)
    check_model(service, asked.model)
    wants_logprobs = asked.top_logprobs is not None or "message.output_text.logprobs" in (asked.include or ())
    num_top = (asked.top_logprobs or 0) if wants_logprobs else None
    is_kept = wants_keeping(service, asked)
    previous, earlier = await continued(request, asked)
    chat = await prepare_chat(
        request,
        asked,
        messages_of(asked, earlier),
        tools=[_tool(tool.model_dump(exclude={"type"})) for tool in asked.tools or ()],
        tool_choice=_choice(asked.tool_choice),
        one_call=asked.parallel_tool_calls is False,
        many_calls=asked.parallel_tool_calls is True,
        effort=None if asked.reasoning is None else asked.reasoning.effort,
        template_options=asked.chat_template_kwargs or {},
        flags=(None, None),
        rule=asked_rule(asked, _format(asked)),
        max_tokens=asked.max_output_tokens,
        logprobs=num_top,
        param="input",
    )
    tokenizer = service.llm.tokenizer
    assert tokenizer is not None, "a chat was rendered without a tokenizer"
    answer_id = new_id("resp")
    answer = Answer(request, chat.prepared, answer_id, Counted(num_reasoning_tokens=0))
    frame = _frame(asked, chat, answer_id, asked.model or service.name) | {"store": is_kept}
    writer = None if num_top is None else ChatLogprobWriter(tokenizer, num_top)
    keep = partial(_keep, request, asked, previous, frame) if is_kept else None
    return _Opened(chat, answer, ResponseOutput(frame, chat.form.thoughts_end), chat.parser(), writer, keep)


def _keep(request: Request, asked: ResponseRequest, previous: KeptResponse | None, response: dict[str, Any]) -> None:
    """Keep a response that has ended, with its own input, for the key that made it."""
    inputs = [kept_item(item) for item in input_of(asked)]
    service_of(request).responses.keep(response, inputs, record_of(request).key_index, previous)


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(type="function", function=FunctionDefinition(**function))


def _choice(choice: str | FunctionChoice | None) -> str | NamedToolChoice | None:
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(asked: ResponseRequest) -> ResponseFormat | None:
    form = None if asked.text is None else asked.text.format
    if isinstance(form, SchemaFormat):
        return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(name=form.name, schema_=form.schema_))
    return form


def _frame(asked: ResponseRequest, chat: Chat, answer_id: str, model: str) -> dict[str, Any]:
    """All of a response but what the model makes of it: what was asked, with defaults filled in."""
    params = chat.prepared.params
    form = None if asked.text is None else asked.text.format
    choice = asked.tool_choice
    effort = None if asked.reasoning is None else asked.reasoning.effort
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def _advance(opened: _Opened, delta: CompletionDelta) -> str:
    """What one delta adds, as events."""
    output, parser, counted = opened.output, opened.parser, opened.answer.counted
    if opened.logprobs is not None and delta.logprobs:
        output.keep_logprobs(opened.logprobs.entries(delta.token_ids, delta.logprobs))
    if delta.text:
        output.add(parser.feed(delta.text))
    if delta.finish_reason is not None:
        output.add(parser.finish())
        counted.num_reasoning_tokens = opened.chat.num_tokens(output.reasoning)
        output.end(delta.finish_reason, _usage(counted))
        if opened.keep is not None:
            opened.keep()  # before its last event is read: the reader may continue it at once
    return output.take_events()


def _usage(counted: Counted) -> dict[str, Any]:
    return {
        "input_tokens": counted.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.num_cached_tokens},
        "output_tokens": counted.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.num_reasoning_tokens or 0},
        "total_tokens": counted.num_prompt_tokens + counted.num_output_tokens,
    }


async def _answered(request: Request, asked: ResponseRequest) -> http.Response:
    """The whole response."""
    opened = await _opened(request, asked)
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                _advance(opened, delta)
    opened.answer.log_text(opened.output.text)
    body = json.dumps(opened.output.response(), separators=(",", ":"))
    return http.Response(body, media_type="application/json")


async def _begun(request: Request, asked: ResponseRequest) -> AsyncGenerator[bytes, None]:
    """A stream whose request the engine has taken."""
    return await first_of(_events(await _opened(request, asked)))


async def _events(opened: _Opened) -> AsyncGenerator[bytes, None]:
    output = opened.output
    try:
        async with aclosing(opened.answer.deltas()) as batches:
            async for deltas in batches:
                if not deltas:
                    yield b""  # the engine has taken the request
                    output.begin()
                events = "".join([_advance(opened, delta) for delta in deltas]) or output.take_events()
                yield events.encode("ascii")
    except Exception as error:
        if output.has_begun:
            yield output.fail(from_exception(error)).encode("ascii")
        raise

"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, whole or as events, for clients and coding agents."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.request.outputs import CompletionDelta
from holdfast.server.anthropic_input import Conversation, conversation_of
from holdfast.server.anthropic_output import PING, MessageOutput, message_usage
from holdfast.server.anthropic_schemas import (
    AnthropicErrorReply,
    CountTokensRequest,
    MessageReply,
    MessageRequest,
    TokenCount,
)
from holdfast.server.bodies import read_model
from holdfast.server.chat_text import AnswerText
from holdfast.server.conversations import Chat, ToolSetting, effort_options, plain_message, prepare_chat
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model
from holdfast.server.service import Service, service_of
from holdfast.server.streams import Answer, Counted, EventStream, first_of, new_id, while_connected
from holdfast.server.structured import Rule
from holdfast.server.tokens import chat_tokens

router = APIRouter(tags=["messages"])


class MessageStream(EventStream):
    """Events of an answer, with a ping while the model is silent."""

    ping = PING


@router.post(
    "/v1/messages",
    responses=responses(MessageReply, 429, streams=True, error=AnthropicErrorReply),
    openapi_extra=body_of(MessageRequest),
    operation_id="create_message",
)
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's shapes."""
    asked = await read_model(request, MessageRequest, service_of(request).limits)
    if asked.stream:
        return MessageStream(request, await while_connected(request, _begun(request, asked)))
    return await while_connected(request, _answered(request, asked))


@router.post(
    "/v1/messages/count_tokens",
    responses=responses(TokenCount, error=AnthropicErrorReply),
    openapi_extra=body_of(CountTokensRequest),
    operation_id="count_message_tokens",
)
async def count_message_tokens(request: Request) -> TokenCount:
    """Tokens of a conversation, also of one that is too long to be answered."""
    service = service_of(request)
    asked = await read_model(request, CountTokensRequest, service.limits)
    _check_model(service, asked.model)
    count = asyncio.get_running_loop().run_in_executor(None, _num_tokens, service, conversation_of(asked))
    return TokenCount(input_tokens=await count)


def _num_tokens(service: Service, said: Conversation) -> int:
    template = service.llm.chat_template
    source = "" if template is None else template.source
    return len(
        chat_tokens(
            service,
            [plain_message(message, source) for message in said.messages],
            ToolSetting(service, source, said.tools, said.tool_choice).shown(),
            {**effort_options(said.effort), **said.template_options},
            continues=said.continues,
        )
    )


def _check_model(service: Service, model: str | None) -> None:
    try:
        check_model(service, model)
    except ApiError as error:
        error.message += f"; a coding agent takes the name from ANTHROPIC_MODEL={service.name}"
        raise


@dataclass(frozen=True, slots=True)
class _Opened:
    """A conversation that the engine can take."""

    chat: Chat
    answer: Answer
    output: MessageOutput
    parser: AnswerText


async def _opened(request: Request, asked: MessageRequest) -> _Opened:
    service = service_of(request)
    _check_model(service, asked.model)
    said = conversation_of(asked)
    fields = SamplingFields(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
        stream=asked.stream,
    )
    chat = await prepare_chat(
        request,
        fields,
        said.messages,
        tools=said.tools,
        tool_choice=said.tool_choice,
        one_call=said.one_call,
        effort=said.effort,
        template_options=said.template_options,
        flags=(None, said.continues),
        rule=_rule(asked),
        max_tokens=asked.max_tokens,
        logprobs=None,
    )
    answer_id = new_id("msg")
    answer = Answer(request, chat.prepared, answer_id, Counted(num_reasoning_tokens=0))
    message = {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": asked.model or service.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message_usage(answer.counted),
    }
    return _Opened(chat, answer, MessageOutput(message, shows_thinking=said.shows_thinking), chat.parser())


def _rule(asked: MessageRequest) -> Rule | None:
    """What the answer is held to, under either of its names."""
    config = asked.output_config
    if config is not None and config.format is not None:
        return Rule("output_config.format", {"json": config.format.schema_})
    return None if asked.output_format is None else Rule("output_format", {"json": asked.output_format.schema_})


def _advance(opened: _Opened, delta: CompletionDelta) -> None:
    """What one delta adds."""
    output, counted = opened.output, opened.answer.counted
    if delta.text:
        output.add(opened.parser.feed(delta.text))
    if delta.finish_reason is not None:
        output.add(opened.parser.finish())
        counted.num_reasoning_tokens = opened.chat.num_tokens(output.reasoning)
        output.end(delta, message_usage(counted))


async def _answered(request: Request, asked: MessageRequest) -> Response:
    """The whole answer."""
    opened = await _opened(request, asked)
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                _advance(opened, delta)
    opened.answer.log_text(opened.output.text)
    return Response(json.dumps(opened.output.message, separators=(",", ":")), media_type="application/json")


async def _begun(request: Request, asked: MessageRequest) -> AsyncGenerator[bytes, None]:
    """A stream whose request the engine has taken."""
    return await first_of(_events(await _opened(request, asked)))


async def _events(opened: _Opened) -> AsyncGenerator[bytes, None]:
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            if not deltas:
                yield b""  # the engine has taken the request
                opened.output.begin()
            for delta in deltas:
                _advance(opened, delta)
            yield opened.output.take_events()

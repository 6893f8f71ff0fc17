"""/api/chat and /api/generate: Ollama's API, as lines of JSON or whole."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.engine.admission import PreparedRequest
from holdfast.errors import PromptError, QueueFullError, RequestError
from holdfast.request.outputs import CompletionDelta
from holdfast.server.bodies import read_model
from holdfast.server.chat_text import AnswerText
from holdfast.server.conversations import cache_salt, prepare_chat, thinking_options
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.logs import record_of
from holdfast.server.ollama_models import check_tagged_model, stamp
from holdfast.server.ollama_output import OllamaOutput, times_of
from holdfast.server.ollama_schemas import (
    OllamaChatReply,
    OllamaChatRequest,
    OllamaErrorReply,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    OllamaTool,
    Options,
)
from holdfast.server.openapi import LINES, body_of, responses
from holdfast.server.sampling import prompt_error, sampling_params
from holdfast.server.schemas import (
    AssistantMessage,
    CalledFunction,
    FunctionDefinition,
    InstructionMessage,
    Message,
    MessageToolCall,
    Tool,
    ToolMessage,
    UserMessage,
)
from holdfast.server.service import service_of
from holdfast.server.streams import Answer, Counted, EventStream, first_of, new_id, while_connected
from holdfast.server.structured import Rule
from holdfast.text.answer_deltas import ContentDelta

router = APIRouter(tags=["ollama"])


class LineStream(EventStream):
    """An answer of lines, each one a JSON object."""

    media_type = LINES


@router.post(
    "/api/chat",
    responses=responses(OllamaChatReply, 429, streams=LINES, error=OllamaErrorReply),
    openapi_extra=body_of(OllamaChatRequest),
    operation_id="ollama_chat",
)
async def ollama_chat(request: Request) -> Response:
    """Answer a conversation in Ollama's shapes."""
    asked = await read_model(request, OllamaChatRequest, service_of(request).limits)
    return await _answer(request, asked, is_empty=not asked.messages)


@router.post(
    "/api/generate",
    responses=responses(OllamaGenerateReply, 429, streams=LINES, error=OllamaErrorReply),
    openapi_extra=body_of(OllamaGenerateRequest),
    operation_id="ollama_generate",
)
async def ollama_generate(request: Request) -> Response:
    """Answer a prompt in Ollama's shapes."""
    asked = await read_model(request, OllamaGenerateRequest, service_of(request).limits)
    return await _answer(request, asked, is_empty=not asked.prompt)


async def _answer(request: Request, asked: OllamaRequest, *, is_empty: bool) -> Response:
    service = service_of(request)
    check_tagged_model(service, asked.model)
    if is_empty:
        return _loaded(asked, asked.model or service.name)
    if asked.stream is not False:
        return LineStream(request, await while_connected(request, _begun(request, asked)))
    return await while_connected(request, _answered(request, asked))


def _loaded(asked: OllamaRequest, model: str) -> Response:
    """A request without a question asks for the model to be loaded, or to be let go."""
    said = (
        {"message": {"role": "assistant", "content": ""}} if isinstance(asked, OllamaChatRequest) else {"response": ""}
    )
    reason = "unload" if asked.keep_alive in (0, "0", "0s", "0m") else "load"
    value = {"model": model, "created_at": stamp(), **said, "done": True, "done_reason": reason}
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A request that the engine can take."""

    answer: Answer
    output: OllamaOutput
    parser: AnswerText | None
    """None for a prompt without a template: its answer is text alone."""
    logprobs: ChatLogprobWriter | None


async def _opened(request: Request, asked: OllamaRequest) -> _Opened:
    service = service_of(request)
    num_top = (asked.top_logprobs or 0) if asked.logprobs else None
    if isinstance(asked, OllamaGenerateRequest) and (asked.raw or service.llm.chat_template is None):
        prepared, parser = await _raw(request, asked, num_top), None
    else:
        is_chat = isinstance(asked, OllamaChatRequest)
        think = asked.think
        chat = await prepare_chat(
            request,
            read_options(asked.options),
            read_messages(asked),
            tools=[_tool(tool) for tool in asked.tools or ()] if is_chat else (),
            tool_choice=None,
            one_call=False,
            effort=think if isinstance(think, str) else None,
            template_options={} if think is None else thinking_options(think is not False),
            flags=(None, is_chat and bool(asked.messages) and asked.messages[-1].role == "assistant"),
            rule=_rule(asked),
            max_tokens=_max_tokens(asked.options),
            logprobs=num_top,
            param="messages" if is_chat else "prompt",
        )
        prepared, parser = chat.prepared, chat.parser()
    answer = Answer(request, prepared, new_id("ollama"), Counted())
    output = OllamaOutput(
        asked.model or service.name,
        is_chat=isinstance(asked, OllamaChatRequest),
        shows_thinking=asked.think is not False,
    )
    tokenizer = service.llm.tokenizer
    writer = None if num_top is None or tokenizer is None else ChatLogprobWriter(tokenizer, num_top)
    return _Opened(answer, output, parser, writer)


async def _raw(request: Request, asked: OllamaGenerateRequest, num_top: int | None) -> PreparedRequest:
    """A prompt that is continued as it is."""
    if asked.system:
        raise ApiError(400, "system was given; a prompt without a template has no place for it; put it into the prompt")
    service, fields, rule = service_of(request), read_options(asked.options), _rule(asked)
    made = {} if rule is None else {"structured_outputs": rule.made()}
    params = sampling_params(service, fields, max_tokens=_max_tokens(asked.options), logprobs=num_top, **made)
    try:
        prepared = await service.llm.prepare(asked.prompt or "", params, cache_salt=cache_salt(request, fields))
    except PromptError as error:
        raise prompt_error(error, "prompt") from error
    except RequestError as error:
        if rule is None or isinstance(error, QueueFullError):
            raise
        raise rule.refused(error) from error
    record = record_of(request)
    if record.wants_text:
        record.prompt = prepared.prompt
    return prepared


def read_options(options: Options | None) -> SamplingFields:
    """Options under the names of the other endpoints."""
    if options is None:
        return SamplingFields()
    return SamplingFields(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
    )


def _max_tokens(options: Options | None) -> int | None:
    """None, as far as the context goes, for the numbers below 1 that say so in Ollama's way."""
    asked = None if options is None else options.num_predict
    return None if asked is None or asked < 1 else asked


def _rule(asked: OllamaRequest) -> Rule | None:
    if not asked.format:
        return None
    return Rule("format", {"json_object": True} if asked.format == "json" else {"json": asked.format})


def _tool(tool: OllamaTool) -> Tool:
    return Tool(type="function", function=FunctionDefinition(**tool.function.model_dump()))


def read_messages(asked: OllamaRequest) -> list[Message]:
    """The conversation of a request, its calls with ids."""
    if isinstance(asked, OllamaGenerateRequest):
        system: list[Message] = [InstructionMessage(role="system", content=asked.system)] if asked.system else []
        return [*system, UserMessage(role="user", content=asked.prompt or "")]
    assert isinstance(asked, OllamaChatRequest), f"{type(asked)=} has no messages"
    messages: list[Message] = []
    waiting: list[MessageToolCall] = []
    num_calls = 0
    for message in asked.messages or ():
        if message.role == "assistant":
            waiting = _calls(message, num_calls)
            num_calls += len(waiting)
            reasoning, content = message.thinking or None, message.content or (None if waiting else "")
            messages.append(
                AssistantMessage(
                    role="assistant", content=content, reasoning_content=reasoning, tool_calls=[*waiting] or None
                )
            )
        elif message.role == "tool":
            call_id = message.tool_call_id or _answered_call(waiting, message.tool_name)
            content = message.content or ""
            messages.append(ToolMessage(role="tool", content=content, tool_call_id=call_id, name=message.tool_name))
        elif message.role == "system":
            messages.append(InstructionMessage(role="system", content=message.content or ""))
        else:
            messages.append(UserMessage(role="user", content=message.content or ""))
    return messages


def _calls(message: OllamaMessage, num_before: int) -> list[MessageToolCall]:
    """Calls with ids: Ollama's clients may leave them out, templates may need them."""
    return [
        MessageToolCall(
            id=call.id or f"call_{num_before + place}",
            function=CalledFunction(name=call.function.name, arguments=call.function.arguments),
        )
        for place, call in enumerate(message.tool_calls or ())
    ]


def _answered_call(waiting: list[MessageToolCall], name: str | None) -> str:
    """The id of the first open call of that tool; it is open no more."""
    place = next((place for place, call in enumerate(waiting) if name in (None, call.function.name)), None)
    return "call_0" if place is None else waiting.pop(place).id


def _advance(opened: _Opened, delta: CompletionDelta) -> None:
    """What one delta adds."""
    output, parser = opened.output, opened.parser
    if opened.logprobs is not None and delta.logprobs:
        output.keep_logprobs(opened.logprobs.entries(delta.token_ids, delta.logprobs))
    if delta.text:
        output.add([ContentDelta(delta.text)] if parser is None else parser.feed(delta.text))
    if delta.finish_reason is not None:
        if parser is not None:
            output.add(parser.finish())
        output.close_call()


async def _answered(request: Request, asked: OllamaRequest) -> Response:
    """The whole answer."""
    opened = await _opened(request, asked)
    last: CompletionDelta | None = None
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            for last in deltas:
                _advance(opened, last)
    assert last is not None, "an answer has a last delta"
    value, content = opened.output.whole(_times(request, opened, last))
    opened.answer.log_text(content)
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _times(request: Request, opened: _Opened, last: CompletionDelta) -> dict[str, object]:
    seconds = time.monotonic() - record_of(request).started_at
    return times_of(last, opened.answer.prepared, opened.answer.counted.num_output_tokens, seconds)


async def _begun(request: Request, asked: OllamaRequest) -> AsyncGenerator[bytes, None]:
    """A stream whose request the engine has taken."""
    return await first_of(_lines(request, await _opened(request, asked)))


async def _lines(request: Request, opened: _Opened) -> AsyncGenerator[bytes, None]:
    last: CompletionDelta | None = None
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            for last in deltas:
                _advance(opened, last)
            yield opened.output.lines()  # nothing at first, when the engine has taken the request
    assert last is not None, "an answer has a last delta"
    yield opened.output.last_line(_times(request, opened, last))

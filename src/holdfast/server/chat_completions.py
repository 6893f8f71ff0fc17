"""/v1/chat/completions: a conversation answered, whole or as it is written."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.engine.outputs import OutputAssembler
from holdfast.request.outputs import CompletionDelta, CompletionOutput
from holdfast.server.bodies import read_model
from holdfast.server.chat_text import AnswerText, whole_answer
from holdfast.server.conversations import Chat, prepare_chat
from holdfast.server.errors import ApiError
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.openapi import body_of, responses
from holdfast.server.sampling import check_model
from holdfast.server.schemas import ChatCompletion, ChatCompletionRequest
from holdfast.server.service import service_of
from holdfast.server.streams import DONE, Answer, Counted, EventStream, first_of, new_id, while_connected
from holdfast.server.structured import asked_rule
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta

router = APIRouter(tags=["chat"])


@router.post(
    "/v1/chat/completions",
    responses=responses(ChatCompletion, 429, streams=True),
    openapi_extra=body_of(ChatCompletionRequest),
    operation_id="create_chat_completion",
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    asked = await read_model(request, ChatCompletionRequest, service_of(request).limits)
    if asked.stream:
        return EventStream(request, await while_connected(request, _begun(request, asked)))
    return await while_connected(request, _answered(request, asked))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A conversation that the engine can take, and what its answer is to be like."""

    id: str
    created: int
    model: str
    chat: Chat
    answer: Answer
    num_top: int | None
    """Of log-probabilities; None where none were asked."""
    logprobs: ChatLogprobWriter | None


async def _opened(request: Request, asked: ChatCompletionRequest) -> _Opened:
    service = service_of(request)
    check_model(service, asked.model)
    num_top = _num_top(asked)
    max_tokens = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    chat = await prepare_chat(
        request,
        asked,
        asked.messages,
        tools=asked.tools or (),
        tool_choice=asked.tool_choice,
        one_call=asked.parallel_tool_calls is False,
        many_calls=asked.parallel_tool_calls is True,
        effort=asked.reasoning_effort,
        template_options=asked.chat_template_kwargs or {},
        flags=(asked.add_generation_prompt, asked.continue_final_message),
        rule=asked_rule(asked, asked.response_format),
        max_tokens=max_tokens,
        logprobs=num_top,
    )
    tokenizer = service.llm.tokenizer
    assert tokenizer is not None, "a chat was rendered without a tokenizer"
    writer = None if num_top is None else ChatLogprobWriter(tokenizer, num_top)
    answer_id = new_id("chatcmpl")
    counted = Counted(num_reasoning_tokens=0 if chat.splits_reasoning else None)
    answer = Answer(request, chat.prepared, answer_id, counted)
    model = asked.model or service.name
    return _Opened(answer_id, int(time.time()), model, chat, answer, num_top, writer)


def _num_top(asked: ChatCompletionRequest) -> int | None:
    if not asked.logprobs:
        if asked.top_logprobs:
            raise ApiError(
                400,
                "top_logprobs was asked; logprobs is not true; set it, or leave top_logprobs out",
                param="top_logprobs",
            )
        return None
    return asked.top_logprobs or 0


async def _answered(request: Request, asked: ChatCompletionRequest) -> Response:
    """The whole answer."""
    opened = await _opened(request, asked)
    prepared = opened.chat.prepared
    assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                assembler.add(delta)
    outputs = assembler.output().outputs
    choices = [_choice(opened, output, asked.include_reasoning is not False) for output in outputs]
    value: dict[str, Any] = {
        "id": opened.id,
        "object": "chat.completion",
        "created": opened.created,
        "model": opened.model,
        "choices": choices,
        "usage": opened.answer.counted.usage(),
        "system_fingerprint": None,
    }
    if asked.return_token_ids:
        value["prompt_token_ids"] = [*prepared.prompt_token_ids]
        for choice, output in zip(choices, outputs, strict=True):
            choice["token_ids"] = [*output.token_ids]
    opened.answer.log_text(choices[0]["message"]["content"])
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _choice(opened: _Opened, output: CompletionOutput, with_reasoning: bool) -> dict[str, Any]:
    whole = whole_answer(output.text, opened.chat.parser())
    counted = opened.answer.counted
    if counted.num_reasoning_tokens is not None and whole.reasoning:
        counted.num_reasoning_tokens += opened.chat.num_tokens(whole.reasoning)
    # vLLM's clients read message.reasoning whether or not there is any.
    message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None, "reasoning": None}
    if whole.reasoning and with_reasoning:
        message["reasoning_content"] = message["reasoning"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole.calls
        ]
    logprobs = None
    if opened.logprobs is not None:
        logprobs = {"content": opened.logprobs.entries(output.token_ids, output.logprobs or ()), "refusal": None}
    finish = "tool_calls" if whole.calls and output.finish_reason == "stop" else output.finish_reason
    choice = {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
    return choice if output.stop_reason is None else {**choice, "stop_reason": output.stop_reason}


async def _begun(request: Request, asked: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    """A stream whose request the engine has taken."""
    return await first_of(_events(await _opened(request, asked), asked))


async def _events(opened: _Opened, asked: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    options = asked.stream_options
    includes_usage = options is not None and bool(options.include_usage)
    is_continuous = includes_usage and options is not None and bool(options.continuous_usage_stats)
    counted = opened.answer.counted
    head, tail = chunk_frame(opened, includes_usage)
    prepared = opened.chat.prepared
    streams = [_ChoiceStream(index, opened, asked) for index in range(prepared.params.n)]
    ids_once = f'"prompt_token_ids":{[*prepared.prompt_token_ids]},' if asked.return_token_ids else ""
    async with aclosing(opened.answer.deltas()) as batches:
        async for deltas in batches:
            choices: list[str] = []
            for delta in deltas:
                choices += streams[delta.index].choices(delta)
            if choices and is_continuous:
                tail = f'],"usage":{json.dumps(counted.usage())}}}\n\n'
            # Empty only at the beginning, when the engine has taken the request.
            if choices or not deltas:
                chunks = [f"{head}{choice}{tail}" for choice in choices]
                if chunks and ids_once:  # the first chunk alone has them
                    chunks[0] = f"data: {{{ids_once}{chunks[0].removeprefix('data: {')}"
                    ids_once = ""
                yield "".join(chunks).encode("ascii")
    if includes_usage:
        if counted.num_reasoning_tokens is not None:
            counted.num_reasoning_tokens = sum(opened.chat.num_tokens(stream.reasoning) for stream in streams)
        yield f'{head}],"usage":{json.dumps(counted.usage())}}}\n\n'.encode("ascii")
    yield DONE


def chunk_frame(opened: _Opened, includes_usage: bool) -> tuple[str, str]:
    """What stands before and after the choice of every chunk."""
    head = json.dumps(
        {
            "id": opened.id,
            "object": "chat.completion.chunk",
            "created": opened.created,
            "model": opened.model,
            "system_fingerprint": None,
        },
        separators=(",", ":"),
    )
    return f'data: {head[:-1]},"choices":[', '],"usage":null}\n\n' if includes_usage else "]}\n\n"


class _ChoiceStream:
    """One completion as choices of chunks, in JSON. ASCII alone: some readers end a line at other characters too."""

    def __init__(self, index: int, opened: _Opened, asked: ChatCompletionRequest) -> None:
        self._index = index
        self._parser: AnswerText | None = opened.chat.parser() if opened.chat.splits else None
        self._with_reasoning = asked.include_reasoning is not False
        self._logprobs = opened.logprobs
        self._reasoning: list[str] = []
        self._waiting: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is held back."""
        self._token_ids: list[int] | None = [] if asked.return_token_ids else None
        """Of tokens that no chunk had yet; None if the request does not want them."""
        self._has_begun = False

    @property
    def reasoning(self) -> str:
        """All of it so far."""
        return "".join(self._reasoning)

    def choices(self, delta: CompletionDelta) -> list[str]:
        """What one delta adds."""
        written: list[str] = []
        if not self._has_begun:
            self._has_begun = True
            written.append(self._choice('{"role":"assistant","content":""}'))
        if self._logprobs is not None and delta.logprobs:
            self._waiting += self._logprobs.entries(delta.token_ids, delta.logprobs)
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        if self._parser is None:
            if delta.text:
                written.append(self._choice(f'{{"content":{quoted(delta.text)}}}'))
        else:
            written += self._split(delta, self._parser)
        if delta.finish_reason is not None:
            written.append(self._last(delta))
        return written

    def _split(self, delta: CompletionDelta, parser: AnswerText) -> list[str]:
        pieces: Sequence[AnswerDelta] = parser.feed(delta.text) if delta.text else ()
        if delta.finish_reason is not None:
            pieces = [*pieces, *parser.finish()]
        self._reasoning += [piece.text for piece in pieces if isinstance(piece, ReasoningDelta)]
        return [self._choice(text) for piece in pieces if (text := self._piece(piece))]

    def _piece(self, piece: AnswerDelta) -> str:
        if isinstance(piece, ContentDelta):
            return f'{{"content":{quoted(piece.text)}}}'
        if isinstance(piece, ReasoningDelta):
            text = quoted(piece.text)
            return f'{{"reasoning_content":{text},"reasoning":{text}}}' if self._with_reasoning else ""
        if piece.name is None:
            return f'{{"tool_calls":[{{"index":{piece.index},"function":{{"arguments":{quoted(piece.arguments)}}}}}]}}'
        function = f'{{"name":{quoted(piece.name)},"arguments":{quoted(piece.arguments)}}}'
        call = f'"id":{quoted(piece.id or new_id("call"))},"type":"function","function":{function}'
        return f'{{"tool_calls":[{{"index":{piece.index},{call}}}]}}'

    def _choice(self, delta: str, ending: str = '"finish_reason":null') -> str:
        logprobs = "null"
        if self._waiting:
            logprobs = json.dumps({"content": self._waiting, "refusal": None}, separators=(",", ":"))
            self._waiting = []
        if self._token_ids is not None:
            ending += f',"token_ids":{self._token_ids}'
            self._token_ids = []
        return f'{{"index":{self._index},"delta":{delta},"logprobs":{logprobs},{ending}}}'

    def _last(self, delta: CompletionDelta) -> str:
        has_calls = self._parser is not None and self._parser.num_calls > 0
        reason = "tool_calls" if has_calls and delta.finish_reason == "stop" else delta.finish_reason
        ending = f'"finish_reason":"{reason}"'
        if delta.stop_reason is not None:
            ending += f',"stop_reason":{json.dumps(delta.stop_reason)}'
        return self._choice("{}", ending)

"""/api/chat and /api/generate: Ollama's API, as lines of JSON or whole."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from holdfast.engine.admission import PreparedRequest
from holdfast.request.outputs import CompletionDelta
from holdfast.server import schemas
from holdfast.server.answers import AnswerText, SplitWriter, WholeCall, arguments_of, respond, to_json
from holdfast.server.completions import prepare_prompts
from holdfast.server.conversations import Conversation, function_tool, prepare_chat, thinking_options
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.logprobs import ChatLogprobWriter
from holdfast.server.models import check_tagged_model, stamp
from holdfast.server.ollama_schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
)
from holdfast.server.openapi import LINES, post
from holdfast.server.sampling import Rule, sampling_params
from holdfast.server.service import service_of
from holdfast.server.streams import Answer, Counted, EventStream, new_id
from holdfast.text.answer_deltas import ToolCallDelta

router = APIRouter(tags=["ollama"])


class LineStream(EventStream):
    """A stream of lines, each a JSON object."""

    media_type = LINES


@post(router, "/api/chat", OllamaChatRequest, "OllamaChatReply", streams=True)
async def ollama_chat(request: Request, body: OllamaChatRequest) -> Response:
    """Answer a conversation in Ollama's shapes."""
    return await _answer(request, body, is_empty=not body.messages)


@post(router, "/api/generate", OllamaGenerateRequest, "OllamaGenerateReply", streams=True)
async def ollama_generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answer a prompt in Ollama's shapes."""
    return await _answer(request, body, is_empty=not body.prompt)


async def _answer(request: Request, body: OllamaRequest, *, is_empty: bool) -> Response:
    service = service_of(request)
    check_tagged_model(service, body.model)
    if not is_empty:
        is_streamed = body.stream is not False
        return await respond(request, _opened(request, body), is_streamed=is_streamed, stream_class=LineStream)
    # A request without a prompt means: load or unload the model.
    is_chat = isinstance(body, OllamaChatRequest)
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    reason = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
    model = body.model or service.name
    return JSONResponse({"model": model, "created_at": stamp(), **said, "done": True, "done_reason": reason})


async def _opened(request: Request, body: OllamaRequest) -> "OllamaWriter":
    service = service_of(request)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    fields, rule, max_tokens = read_options(body.options), _rule(body), _max_tokens(body.options)
    is_chat, think = isinstance(body, OllamaChatRequest), body.think
    parser: AnswerText | None = None
    if isinstance(body, OllamaGenerateRequest) and (body.raw or service.llm.chat_template is None):
        if body.system:
            raise ApiError("http.raw_system")
        made = {} if rule is None else {"structured_outputs": rule.made()}
        params = sampling_params(service, fields, max_tokens=max_tokens, logprobs=num_top, **made)
        [prepared] = await prepare_prompts(request, None, [body.prompt or ""], params, rule)
    else:
        tools = (body.tools or ()) if isinstance(body, OllamaChatRequest) else ()
        messages = read_messages(body)
        said = Conversation(
            messages=messages,
            tools=[function_tool(tool.function.model_dump()) for tool in tools],
            effort=think if isinstance(think, str) else None,
            template_options={} if think is None else thinking_options(think is not False),
            continues=messages[-1].role == "assistant",
            rule=rule,
            max_tokens=max_tokens,
            logprobs=num_top,
            param="messages" if is_chat else "prompt",
        )
        chat = await prepare_chat(request, fields, said)
        prepared, parser = chat.prepared, chat.parser()
    answer = Answer(request, prepared, new_id("ollama"), Counted())
    tokenizer = service.llm.tokenizer
    writer = None if num_top is None or tokenizer is None else ChatLogprobWriter(tokenizer, num_top)
    model = body.model or service.name
    return OllamaWriter(answer, parser, writer, model, is_chat=is_chat, shows_thinking=think is not False)


def read_options(options: Options | None) -> SamplingFields:
    """Rename options to those of the other endpoints."""
    if options is None:
        return SamplingFields()
    given = options.model_dump(exclude={"num_predict", "num_ctx", "repeat_penalty", "seed"})
    seed = None if options.seed == -1 else options.seed
    return SamplingFields(**given, repetition_penalty=options.repeat_penalty, seed=seed)


def _max_tokens(options: Options | None) -> int | None:
    """Return num_predict, or None (up to the context's end) for values below 1, as in Ollama."""
    given = None if options is None else options.num_predict
    return None if given is None or given < 1 else given


def _rule(body: OllamaRequest) -> Rule | None:
    if not body.format:
        return None
    return Rule("format", {"json_object": True} if body.format == "json" else {"json": body.format})


def read_messages(body: OllamaRequest) -> list[schemas.Message]:
    """Convert the conversation of a request; every call gets an id."""
    if isinstance(body, OllamaGenerateRequest):
        system: list[schemas.Message] = (
            [schemas.InstructionMessage(role="system", content=body.system)] if body.system else []
        )
        return [*system, schemas.UserMessage(role="user", content=body.prompt or "")]
    assert isinstance(body, OllamaChatRequest), f"{type(body)=} has no messages"
    messages: list[schemas.Message] = []
    waiting: list[schemas.MessageToolCall] = []
    num_calls = 0
    for message in body.messages or ():
        content = message.content or ""
        if message.role == "assistant":
            waiting = _calls(message, num_calls)
            num_calls += len(waiting)
            reply = schemas.AssistantMessage(role="assistant", content=content or (None if waiting else ""))
            reply.reasoning_content, reply.tool_calls = message.thinking or None, [*waiting] or None
            messages.append(reply)
        elif message.role == "tool":
            call_id = message.tool_call_id or _answered_call(waiting, message.tool_name)
            messages.append(
                schemas.ToolMessage(role="tool", content=content, tool_call_id=call_id, name=message.tool_name)
            )
        elif message.role == "system":
            messages.append(schemas.InstructionMessage(role="system", content=content))
        else:
            messages.append(schemas.UserMessage(role="user", content=content))
    return messages


def _calls(message: OllamaMessage, num_before: int) -> list[schemas.MessageToolCall]:
    """Add missing call ids: Ollama's clients may omit them, and templates may need them."""
    return [
        schemas.MessageToolCall(
            id=call.id or f"call_{num_before + place}",
            function=schemas.CalledFunction(name=call.function.name, arguments=call.function.arguments),
        )
        for place, call in enumerate(message.tool_calls or ())
    ]


def _answered_call(waiting: list[schemas.MessageToolCall], name: str | None) -> str:
    """Remove the first open call of that tool and return its id."""
    place = next((place for place, call in enumerate(waiting) if name in (None, call.function.name)), None)
    return "call_0" if place is None else waiting.pop(place).id


class OllamaWriter(SplitWriter):
    """Writes an answer as Ollama's JSON objects: one per line, or one in all. Writes only complete calls."""

    def __init__(
        self,
        answer: Answer,
        parser: AnswerText | None,
        logprobs: ChatLogprobWriter | None,
        model: str,
        *,
        is_chat: bool,
        shows_thinking: bool,
    ) -> None:
        super().__init__(answer, parser, logprobs)
        self._model, self._is_chat, self._shows_thinking = model, is_chat, shows_thinking
        self._pieces: list[tuple[str, str, list[WholeCall]]] = []
        """Content, reasoning and complete calls not sent yet."""
        self._call: WholeCall | None = None
        """The call whose arguments are still arriving."""
        self._num_calls = 0
        self._last: CompletionDelta | None = None

    def add_text(self, text: str, *, is_reasoning: bool) -> None:
        self._close_call()
        if not is_reasoning:
            self._pieces.append((text, "", []))
        elif self._shows_thinking:
            self._pieces.append(("", text, []))

    def add_call(self, piece: ToolCallDelta) -> None:
        if piece.name is not None:
            self._close_call()
            self._call = WholeCall(piece.name, piece.id or new_id("call"))
        if self._call is not None:
            self._call.arguments += piece.arguments

    def finish(self, delta: CompletionDelta) -> None:
        self._last = delta
        self._close_call()

    def _close_call(self) -> None:
        """End the open call; drop it if it was cut off."""
        call, self._call = self._call, None
        if call is not None and arguments_of(call.arguments) is not None:
            self._pieces.append(("", "", [call]))

    def take(self) -> str:
        pieces, self._pieces = self._pieces, []
        self._written += [self._line(self._said(*piece)) for piece in pieces]
        return super().take()

    def end(self) -> None:
        self._written.append(self._line({**self._said("", "", []), **self._times()}))

    def whole(self) -> tuple[dict[str, Any], str | None]:
        content = "".join(text for text, _, _ in self._pieces)
        thinking = "".join(text for _, text, _ in self._pieces)
        calls = [call for _, _, some in self._pieces for call in some]
        return self._object({**self._said(content, thinking, calls), **self._times()}), content

    def _said(self, content: str, thinking: str, calls: list[WholeCall]) -> dict[str, Any]:
        said: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": index, "name": call.name, "arguments": arguments_of(call.arguments)},
                }
                for index, call in enumerate(calls, self._num_calls)
            ]
            self._num_calls += len(calls)
        if not self._is_chat:
            return {"response": content, **said, "done": False}
        return {"message": {"role": "assistant", "content": content, **said}, "done": False}

    def _object(self, said: dict[str, Any]) -> dict[str, Any]:
        value = {"model": self._model, "created_at": stamp(), **said}
        if self._logprobs:
            value["logprobs"], self._logprobs = self._logprobs, []
        return value

    def _line(self, said: dict[str, Any]) -> str:
        return to_json(self._object(said)) + "\n"

    def _times(self) -> dict[str, Any]:
        assert self._last is not None, "an answer has a last delta"
        seconds = time.monotonic() - self.answer.record.started_at
        return times_of(self._last, self.answer.prepared, self.answer.counted.num_output_tokens, seconds)


def times_of(delta: CompletionDelta, prepared: PreparedRequest, num_tokens: int, seconds: float) -> dict[str, Any]:
    """Return the last fields of an answer: finish reason, token counts, nanoseconds. `seconds`: since the request began."""
    times = delta.metrics
    prefill = decode = 0.0
    if times is not None:
        prefill = max(times.first_token_seconds - times.queue_seconds, 0.0)
        decode = max(times.total_seconds - times.first_token_seconds, 0.0)
    return {
        "done": True,
        "done_reason": "length" if delta.finish_reason == "length" else "stop",
        "total_duration": round(seconds * 1e9),
        "load_duration": 0,  # the model is loaded before the first request
        "prompt_eval_count": len(prepared.prompt_token_ids),
        "prompt_eval_duration": round(prefill * 1e9),
        "eval_count": num_tokens,
        "eval_duration": round(decode * 1e9),
    }

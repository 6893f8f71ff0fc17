"""/v1/responses: convert input items to output items, whole or as events: text, reasoning, function calls."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.request.outputs import CompletionDelta
from holdfast.server import schemas
from holdfast.server.answers import SplitWriter, respond, to_json
from holdfast.server.conversations import Chat, Conversation, function_tool, named_choice, prepare_chat
from holdfast.server.errors import ApiError, cleaned
from holdfast.server.logs import record_of
from holdfast.server.openapi import post
from holdfast.server.response_memory import KeptResponse
from holdfast.server.sampling import check_model, rule_of
from holdfast.server.schemas import (
    FunctionChoice,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    ResponseRequest,
    SchemaFormat,
)
from holdfast.server.service import service_of
from holdfast.server.stored_responses import continued, wants_keeping
from holdfast.server.streams import Answer, Counted, new_id
from holdfast.text.answer_deltas import ToolCallDelta


def messages_of(body: schemas.ResponseRequest, earlier: Sequence[schemas.Item] = ()) -> list[schemas.Message]:
    """Convert a request to messages; `earlier` are the items of the response it continues."""
    messages: list[schemas.Message] = []
    if body.instructions:
        messages.append(schemas.InstructionMessage(role="system", content=body.instructions))
    for item in (*earlier, *input_of(body)):
        _append(messages, item)
    return messages


def input_of(body: schemas.ResponseRequest) -> list[schemas.Item]:
    """Return the request's own items."""
    return [schemas.MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def kept_item(item: schemas.Item) -> dict[str, Any]:
    """Write an input item in the shape that OpenAI's clients read."""
    if isinstance(item, schemas.MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
        own = {"role": item.role, "content": [{"type": kind, "text": text, **more} for text in texts]}
    elif isinstance(item, schemas.FunctionCallItem):
        own = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    elif isinstance(item, schemas.FunctionOutputItem):
        texts = item.output if isinstance(item.output, str) else [part.text for part in item.output]
        output = texts if isinstance(texts, str) else [{"type": "input_text", "text": text} for text in texts]
        own = {"call_id": item.call_id, "output": output}
    else:
        own = {"summary": [], "content": [part.model_dump() for part in item.content or ()]}
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}[item.type]
    return {"type": item.type, "id": item.id or new_id(prefix), "status": item.status or "completed", **own}


def _append(messages: list[schemas.Message], item: schemas.Item) -> None:
    if isinstance(item, schemas.FunctionOutputItem):
        messages.append(schemas.ToolMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    elif isinstance(item, schemas.FunctionCallItem):
        answer = _answer(messages)
        function = schemas.CalledFunction(name=item.name, arguments=item.arguments)
        answer.tool_calls = [*(answer.tool_calls or ()), schemas.MessageToolCall(id=item.call_id, function=function)]
    elif isinstance(item, schemas.ReasoningItem):
        text = "\n".join(part.text for part in item.content or ())
        if text:
            messages.append(schemas.AssistantMessage(role="assistant", reasoning_content=text))
    elif item.role == "user":
        messages.append(schemas.UserMessage(role="user", content=item.content))
    elif item.role == "assistant":
        answer = _answer(messages)
        if answer.content is not None or answer.tool_calls:
            answer = schemas.AssistantMessage(role="assistant")
            messages.append(answer)
        answer.content = item.content
    else:
        messages.append(schemas.InstructionMessage(role=item.role, content=item.content))


def _answer(messages: list[schemas.Message]) -> schemas.AssistantMessage:
    """Return the last message if it is an answer, else append a new one."""
    if messages and isinstance(messages[-1], schemas.AssistantMessage):
        return messages[-1]
    messages.append(schemas.AssistantMessage(role="assistant"))
    return messages[-1]  # type: ignore[return-value]


MAX_MARKER_CHARS = 64
"""Longest text to search for the marker that ends the reasoning."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_RETURNED = {
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
}
"""Request settings that the response repeats."""
router = APIRouter(tags=["responses"])


@post(router, "/v1/responses", ResponseRequest, "Response", streams=True)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answer input items."""
    return await respond(request, _opened(request, body), is_streamed=bool(body.stream))


async def _opened(request: Request, body: ResponseRequest) -> "ResponseWriter":
    service = service_of(request)
    check_model(service, body.model)
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    is_kept = wants_keeping(service, body)
    previous, earlier = await continued(request, body)
    choice = body.tool_choice
    said = Conversation(
        messages=messages_of(body, earlier),
        tools=[function_tool(tool.model_dump(exclude={"type"})) for tool in body.tools or ()],
        tool_choice=named_choice(choice.name) if isinstance(choice, FunctionChoice) else choice,
        one_call=body.parallel_tool_calls is False,
        many_calls=body.parallel_tool_calls is True,
        effort=None if body.reasoning is None else body.reasoning.effort,
        template_options=body.chat_template_kwargs or {},
        rule=rule_of(body, _format(body)),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        param="input",
    )
    chat = await prepare_chat(request, body, said)
    answer = chat.answer(request, new_id("resp"))
    frame = _frame(body, chat, answer.id, body.model or service.name) | {"store": is_kept}
    keep = partial(_keep, request, body, previous, frame) if is_kept else None
    return ResponseWriter(chat, answer, frame, keep)


def _keep(request: Request, body: ResponseRequest, previous: KeptResponse | None, response: dict[str, Any]) -> None:
    """Store a complete response and its own input under its API key."""
    inputs = [kept_item(item) for item in input_of(body)]
    service_of(request).responses.keep(response, inputs, record_of(request).key_index, previous)


def _format(body: ResponseRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if isinstance(form, SchemaFormat):
        return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(name=form.name, schema_=form.schema_))
    return form


def _frame(body: ResponseRequest, chat: Chat, answer_id: str, model: str) -> dict[str, Any]:
    """Return a response without its output: the request's settings with defaults filled in."""
    params = chat.prepared.params
    form = None if body.text is None else body.text.format
    choice = body.tool_choice
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        **body.model_dump(include=_RETURNED),
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }


def _usage(counted: Counted) -> dict[str, Any]:
    return {
        "input_tokens": counted.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.num_cached_tokens},
        "output_tokens": counted.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens or 0},
        "total_tokens": counted.num_prompt_tokens + counted.num_output_tokens,
    }


class ResponseWriter(SplitWriter):
    """Writes output items in sequence; an item stays open until the next begins."""

    def __init__(
        self, chat: Chat, answer: Answer, frame: dict[str, Any], keep: Callable[[], None] | None = None
    ) -> None:
        """`keep` stores the complete response for a later request."""
        super().__init__(answer, chat.parser(), chat.logprobs())
        self._chat, self._frame, self._keep = chat, frame, keep
        self._items: list[dict[str, Any]] = frame["output"]
        self._texts: list[str] = []
        """Pieces of the open item."""
        self._open: dict[str, Any] | None = None
        self._message_logprobs: list[dict[str, Any]] = []
        """Entries of the open message."""
        self._reasoning_end = ""
        """Text of the last reasoning tokens."""
        self._number = 0

    def _said(self, kind: str) -> str:
        whole = [item["content"][0]["text"] for item in self._items if item["type"] == kind and item is not self._open]
        return "".join(whole + (self._texts if self._open is not None and self._open["type"] == kind else []))

    def whole(self) -> tuple[dict[str, Any], str | None]:
        return self._frame, self._said("message")

    def begin(self) -> None:
        self._write("response.created", response=self._frame)
        self._write("response.in_progress", response=self._frame)

    def finish(self, delta: CompletionDelta) -> None:
        counted = self.answer.counted
        counted.num_reasoning_tokens = self._chat.num_tokens(self._said("reasoning"))
        is_whole = delta.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        self._close(status)
        self._frame["status"] = status
        self._frame["incomplete_details"] = None if is_whole else {"reason": "max_output_tokens"}
        self._frame["completed_at"] = int(time.time()) if is_whole else None
        self._frame["usage"] = _usage(counted)
        self._write(f"response.{status}", response=self._frame)
        if self._keep is not None:
            self._keep()  # before the last event: a client may continue the response at once

    def fail(self, error: ApiError) -> None:
        self._frame["status"] = "failed"
        self._frame["error"] = {"code": "server_error", "message": cleaned(str(error))}
        self._write("response.failed", response=self._frame)

    def _write(self, kind: str, **fields: object) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._written.append(f"event: {kind}\ndata: {to_json(event)}\n\n")

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1}

    def add_text(self, text: str, *, is_reasoning: bool) -> None:
        kind = "reasoning" if is_reasoning else "message"
        if self._open is None or self._open["type"] != kind:
            # Only messages have log-probabilities; a slow reader may get reasoning and its end in one delta.
            if kind == "message" and self._open is not None and self._open["type"] == "reasoning":
                self._drop_reasoning_logprobs(is_reasoning=False)
            self._close("completed")
            fields = {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
            self._begin_item(kind, {**fields, "content": []})
            self._write("response.content_part.added", **self._place(), content_index=0, part=self._part("", []))
        self._texts.append(text)
        if kind == "reasoning":
            self._drop_reasoning_logprobs(is_reasoning=True)
            self._write("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
            return
        logprobs, self._logprobs = self._logprobs, []
        self._message_logprobs += logprobs
        self._write("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def _drop_reasoning_logprobs(self, *, is_reasoning: bool) -> None:
        """Drop pending entries up to the token that ends the reasoning; drop all while reasoning continues."""
        for place, entry in enumerate(self._logprobs):
            self._reasoning_end = (self._reasoning_end + entry["token"])[-MAX_MARKER_CHARS:]
            if self._chat.form.thoughts_end in self._reasoning_end:
                self._logprobs = self._logprobs[place + 1 :]
                self._reasoning_end = ""
                return
        if is_reasoning:
            self._logprobs = []

    def add_call(self, piece: ToolCallDelta) -> None:
        self._logprobs = []
        if piece.name is not None:
            self._close("completed")
            call_id = piece.id or new_id("call")
            self._begin_item("function_call", {"call_id": call_id, "name": piece.name, "arguments": ""})
        if piece.arguments:
            self._texts.append(piece.arguments)
            self._write("response.function_call_arguments.delta", **self._place(), delta=piece.arguments)

    def _begin_item(self, kind: str, fields: Mapping[str, object]) -> None:
        self._open = {"type": kind, "id": new_id(_PREFIXES[kind]), "status": "in_progress", **fields}
        self._items.append(self._open)
        self._texts, self._message_logprobs = [], []
        self._write("response.output_item.added", output_index=len(self._items) - 1, item=self._open)

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        part: dict[str, Any] = {"type": _PARTS[self._open["type"]], "text": text}
        if self._open["type"] == "message":
            part |= {"annotations": [], "logprobs": logprobs}
        return part

    def _close(self, status: str) -> None:
        """End the open item."""
        item = self._open
        if item is None:
            return
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            self._write("response.function_call_arguments.done", **self._place(), arguments=text, name=item["name"])
        else:
            is_message = item["type"] == "message"
            if is_message:
                self._message_logprobs += self._logprobs
                self._logprobs = []
            item["content"] = [self._part(text, self._message_logprobs)]
            place = {**self._place(), "content_index": 0}
            more = {"logprobs": self._message_logprobs} if is_message else {}
            self._write(f"response.{_PARTS[item['type']]}.done", **place, text=text, **more)
            self._write("response.content_part.done", **place, part=item["content"][0])
        item["status"] = status
        self._write("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API; blocks become messages, answers become blocks."""

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from holdfast.request.outputs import CompletionDelta
from holdfast.server import anthropic_schemas as blocks
from holdfast.server import schemas
from holdfast.server.answers import SplitWriter, arguments_of, respond, to_json
from holdfast.server.anthropic_schemas import CountTokensRequest, InputMessage, MessageRequest
from holdfast.server.conversations import (
    Chat,
    Conversation,
    ToolChoiceBody,
    ToolSetting,
    function_tool,
    named_choice,
    plain_message,
    prepare_chat,
    thinking_options,
)
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.openapi import post
from holdfast.server.sampling import Rule, check_model
from holdfast.server.service import Service, service_of
from holdfast.server.streams import Answer, Counted, EventStream, new_id
from holdfast.server.tokens import chat_tokens
from holdfast.text.answer_deltas import ToolCallDelta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STARTS: Mapping[str, Mapping[str, str]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
BILLING = "x-anthropic-billing-header:"
"""Prefix of a billing block in a coding agent's system prompt. The block changes with every request, so keeping it
would prevent prefix hits."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
router = APIRouter(tags=["messages"])


class MessageStream(EventStream):
    """Events of an answer, with a ping while the model is silent."""

    ping = PING


@post(router, "/v1/messages", MessageRequest, "MessageReply", streams=True)
async def create_message(request: Request, body: MessageRequest) -> Response:
    """Answer a conversation in Anthropic's shapes."""
    opening = _opened(request, body)
    return await respond(request, opening, is_streamed=bool(body.stream), stream_class=MessageStream)


@post(router, "/v1/messages/count_tokens", CountTokensRequest, "TokenCount", queues=False)
async def count_message_tokens(request: Request, body: CountTokensRequest) -> Response:
    """Count the tokens of a conversation, even of one that is too long to answer."""
    service = service_of(request)
    _check_model(service, body.model)
    count = asyncio.get_running_loop().run_in_executor(None, _num_tokens, service, conversation_of(body))
    return JSONResponse({"input_tokens": await count})


def _num_tokens(service: Service, said: Conversation) -> int:
    template = service.llm.chat_template
    source = "" if template is None else template.source
    messages = [plain_message(message, source) for message in said.messages]
    tools = ToolSetting(service, source, said.tools, said.tool_choice).shown()
    return len(chat_tokens(service, messages, tools, said.options(), continues=said.continues))


def _check_model(service: Service, model: str | None) -> None:
    try:
        check_model(service, model)
    except ApiError as error:
        raise error.hinting(f"A coding agent reads the name from ANTHROPIC_MODEL={service.name}.") from None


async def _opened(request: Request, body: MessageRequest) -> "MessageWriter":
    service = service_of(request)
    _check_model(service, body.model)
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
    )
    chat = await prepare_chat(request, fields, conversation_of(body))
    answer = chat.answer(request, new_id("msg"))
    return MessageWriter(chat, answer, body.model or service.name, shows_thinking=shows_thinking(body))


def conversation_of(body: CountTokensRequest) -> Conversation:
    """Convert a request; ApiError for blocks that their message may not have."""
    messages: list[schemas.Message] = []
    system = _joined(body.system)
    if system:
        messages.append(schemas.InstructionMessage(role="system", content=system))
    for index, message in enumerate(body.messages):
        _append(messages, message, f"messages[{index}]")
    if isinstance(messages[-1], schemas.AssistantMessage) and messages[-1].tool_calls:
        place = f"messages[{len(body.messages) - 1}]"
        raise _misplaced(place, "a tool call without its tool_result", "Add a user message.")
    choice = body.tool_choice
    return Conversation(
        messages=messages,
        tools=[
            function_tool({"name": tool.name, "description": tool.description, "parameters": tool.input_schema})
            for tool in body.tools or ()
        ],
        tool_choice=_choice(body),
        one_call=choice is not None and choice.disable_parallel_tool_use is True,
        effort=None if body.output_config is None else body.output_config.effort,
        template_options=_thinking_options(body.thinking),
        continues=body.messages[-1].role == "assistant",
        rule=_rule(body),
        max_tokens=body.max_tokens if isinstance(body, MessageRequest) else None,
    )


def shows_thinking(body: CountTokensRequest) -> bool:
    """Return True if the request enables thinking; otherwise the answer omits it, even if the model thinks."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _rule(body: CountTokensRequest) -> Rule | None:
    """Return the grammar of the answer, under either field name."""
    config = body.output_config
    if config is not None and config.format is not None:
        return Rule("output_config.format", {"json": config.format.schema_})
    return None if body.output_format is None else Rule("output_format", {"json": body.output_format.schema_})


def _thinking_options(thinking: blocks.ThinkingSetting | None) -> dict[str, object]:
    """Return the template's options. The default is off, as in Anthropic's API; `adaptive` leaves it to the model."""
    if thinking is None or thinking.type == "disabled":
        return thinking_options(False)
    options = thinking_options(True) if thinking.type == "enabled" else {}
    return options if thinking.budget_tokens is None else {**options, "thinking_budget": thinking.budget_tokens}


def _choice(body: CountTokensRequest) -> ToolChoiceBody:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError("http.tool_name_missing", param="tool_choice.name")
    return named_choice(choice.name)


def _joined(content: str | list[blocks.TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if not block.text.startswith(BILLING))


def _append(messages: list[schemas.Message], message: InputMessage, place: str) -> None:
    if message.role == "assistant":
        messages.append(_assistant(message, place))
    elif message.role == "user":
        _append_user(messages, message, place)
    else:
        content = message.content
        texts = [content] if isinstance(content, str) else []
        for index, block in enumerate(() if isinstance(content, str) else content):
            if not isinstance(block, blocks.TextBlock):
                raise _misplaced(f"{place}.content[{index}]", f"a {block.type} block of the system", "Send text.")
            texts.append(block.text)
        messages.append(schemas.InstructionMessage(role="system", content="\n".join(texts)))


def _append_user(messages: list[schemas.Message], message: InputMessage, place: str) -> None:
    """Append each tool result as its own message, in block order; join the texts between them."""
    content = message.content or ""
    texts: list[str] = [content] if isinstance(content, str) else []
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, blocks.TextBlock):
            texts.append(block.text)
        elif isinstance(block, blocks.ToolResultBlock):
            _append_text(messages, texts)
            texts = []
            result = _joined(block.content)
            result = f"Error: {result}" if block.is_error else result
            messages.append(schemas.ToolMessage(role="tool", content=result, tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(
                f"{place}.content[{index}]", f"a {block.type} block of the user", "Send text or tool_result."
            )
    _append_text(messages, texts)


def _append_text(messages: list[schemas.Message], texts: list[str]) -> None:
    """Extend the last message if it is the user's, because many templates need alternating roles."""
    if not texts:
        return
    last = messages[-1] if messages else None
    if isinstance(last, schemas.UserMessage):
        assert isinstance(last.content, str), "a user message is one text"
        last.content = "\n".join([last.content, *texts])
    else:
        messages.append(schemas.UserMessage(role="user", content="\n".join(texts)))


def _assistant(message: InputMessage, place: str) -> schemas.AssistantMessage:
    answer = schemas.AssistantMessage(role="assistant")
    if isinstance(message.content, str):
        answer.content = message.content
        return answer
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[schemas.MessageToolCall] = []
    for index, block in enumerate(message.content):
        if isinstance(block, blocks.TextBlock):
            texts.append(block.text)
        elif isinstance(block, blocks.ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, blocks.ToolUseBlock):
            function = schemas.CalledFunction(name=block.name, arguments=block.input)
            calls.append(schemas.MessageToolCall(id=block.id, function=function))
        elif not isinstance(block, blocks.RedactedThinkingBlock):
            raise _misplaced(
                f"{place}.content[{index}]", f"a {block.type} block of the assistant", "Send it as the user."
            )
    answer.content = "\n".join(texts) if texts or not calls else None
    answer.reasoning_content = "\n".join(thoughts) or None
    answer.tool_calls = calls or None
    return answer


def _misplaced(place: str, what: str, fix: str) -> ApiError:
    return ApiError("http.misplaced_block", param=place, name=place, what=what, fix=fix)


class MessageWriter(SplitWriter):
    """Writes content blocks in sequence; a block stays open until the next begins."""

    def __init__(self, chat: Chat, answer: Answer, model: str, *, shows_thinking: bool) -> None:
        super().__init__(answer, chat.parser())
        self._chat = chat
        self._message: dict[str, Any] = {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(answer.counted),
        }
        self._shows_thinking = shows_thinking
        self._open: dict[str, Any] | None = None
        self._num_blocks = 0
        self._pieces: list[str] = []
        """Pieces of the open block: text, or JSON of its input."""
        self._reasoning: list[str] = []
        self._num_calls = 0

    def whole(self) -> tuple[dict[str, Any], str | None]:
        texts = [block["text"] for block in self._message["content"] if block["type"] == "text"]
        return self._message, "".join(texts)

    def begin(self) -> None:
        self._write("message_start", f'"message":{to_json(self._message)}')
        self._written.append(PING.decode())

    def finish(self, delta: CompletionDelta) -> None:
        counted = self.answer.counted
        counted.num_reasoning_tokens = self._chat.num_tokens("".join(self._reasoning))
        self._close()
        reason, sequence = self._reason(delta)
        usage, ending = message_usage(counted), {"stop_reason": reason, "stop_sequence": sequence}
        self._message |= {**ending, "usage": usage}
        self._write("message_delta", f'"delta":{to_json(ending)},"usage":{to_json(usage)}')
        self._write("message_stop")

    def _reason(self, delta: CompletionDelta) -> tuple[str, str | None]:
        if delta.finish_reason == "length":
            return "max_tokens", None
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        return "tool_use" if self._num_calls else "end_turn", None

    def add_text(self, text: str, *, is_reasoning: bool) -> None:
        if is_reasoning:
            self._reasoning.append(text)
            if not self._shows_thinking:
                return
        kind = "thinking" if is_reasoning else "text"
        if self._open is None or self._open["type"] != kind:
            self._begin_block(dict(_STARTS[kind]))
        self._pieces.append(text)
        self._write_delta(f'{{"type":"{kind}_delta","{kind}":{quoted(text)}}}')

    def add_call(self, piece: ToolCallDelta) -> None:
        if piece.name is not None:
            self._num_calls += 1
            call_id = piece.id or new_id("toolu")
            self._begin_block({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
        if piece.arguments:
            self._pieces.append(piece.arguments)
            self._write_delta(f'{{"type":"input_json_delta","partial_json":{quoted(piece.arguments)}}}')

    def _begin_block(self, block: dict[str, Any]) -> None:
        self._close()
        self._open, self._pieces = block, []
        self._write("content_block_start", f'"index":{self._num_blocks},"content_block":{to_json(block)}')

    def _close(self) -> None:
        """End the open block."""
        block = self._open
        if block is None:
            return
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        elif block["type"] == "thinking":
            # Clients keep thinking for the next turn only if it is signed. The signature is not verified.
            block |= {"thinking": text, "signature": sha256(text.encode()).hexdigest()}
            self._write_delta(f'{{"type":"signature_delta","signature":"{block["signature"]}"}}')
        else:
            block["text"] = text
        self._write("content_block_stop", f'"index":{self._num_blocks}')
        if block["type"] != "tool_use" or block["input"] is not None:  # drop a call that was cut off
            self._message["content"].append(block)
        self._open = None
        self._num_blocks += 1

    def _write_delta(self, delta: str) -> None:
        self._write("content_block_delta", f'"index":{self._num_blocks},"delta":{delta}')

    def _write(self, kind: str, fields: str = "") -> None:
        self._written.append(f'event: {kind}\ndata: {{"type":"{kind}"{"," if fields else ""}{fields}}}\n\n')


def message_usage(counted: Counted) -> dict[str, Any]:
    """Count tokens as Anthropic does: input_tokens excludes cached ones."""
    return {
        "input_tokens": counted.num_prompt_tokens - counted.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.num_cached_tokens,
        "output_tokens": counted.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": counted.reasoning_tokens or 0},
    }

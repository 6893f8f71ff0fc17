"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, whole or as events."""

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from holdfast.request.outputs import CompletionDelta
from holdfast.server.answers import SplitWriter, arguments_of, respond, to_json
from holdfast.server.anthropic_input import conversation_of, shows_thinking
from holdfast.server.anthropic_schemas import CountTokensRequest, MessageRequest
from holdfast.server.conversations import Chat, Conversation, ToolSetting, plain_message, prepare_chat
from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.openapi import post
from holdfast.server.sampling import check_model
from holdfast.server.service import Service, service_of
from holdfast.server.streams import Answer, Counted, EventStream, new_id
from holdfast.server.tokens import chat_tokens
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STARTS: Mapping[str, Mapping[str, str]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
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


class MessageWriter(SplitWriter):
    """Writes content blocks one after the other; the last is open until the next begins."""

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

    @property
    def text(self) -> str:
        """Return the text blocks that are closed."""
        return "".join(block["text"] for block in self._message["content"] if block["type"] == "text")

    def whole(self) -> dict[str, Any]:
        return self._message

    def begin(self) -> None:
        self._write("message_start", f'"message":{to_json(self._message)}')
        self._written.append(PING.decode())

    def add_piece(self, piece: AnswerDelta) -> None:
        if isinstance(piece, ContentDelta):
            self._add_text("text", piece.text)
        elif isinstance(piece, ReasoningDelta):
            self._reasoning.append(piece.text)
            if self._shows_thinking:
                self._add_text("thinking", piece.text)
        else:
            self._add_call(piece)

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

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._begin_block(dict(_STARTS[kind]))
        self._pieces.append(text)
        self._write_delta(f'{{"type":"{kind}_delta","{kind}":{quoted(text)}}}')

    def _add_call(self, piece: ToolCallDelta) -> None:
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
        "output_tokens_details": {"thinking_tokens": counted.num_reasoning_tokens or 0},
    }

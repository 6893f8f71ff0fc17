"""/v1/chat/completions: answer a conversation whole or as a stream of chunks."""

import json
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from holdfast.engine.outputs import OutputAssembler
from holdfast.request.outputs import CompletionDelta, CompletionOutput
from holdfast.server.answers import AnswerText, ChunkWriter, respond, to_json, whole_answer
from holdfast.server.conversations import Chat, Conversation, prepare_chat
from holdfast.server.errors import ApiError
from holdfast.server.openapi import post
from holdfast.server.sampling import check_model, rule_of
from holdfast.server.schemas import ChatCompletionRequest
from holdfast.server.service import service_of
from holdfast.server.streams import Answer, new_id
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta

router = APIRouter(tags=["chat"])


@post(router, "/v1/chat/completions", ChatCompletionRequest, "ChatCompletion", streams=True)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    return await respond(request, _opened(request, body), is_streamed=bool(body.stream))


async def _opened(request: Request, body: ChatCompletionRequest) -> "ChatWriter":
    service = service_of(request)
    check_model(service, body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError("http.top_logprobs", param="top_logprobs")
    said = Conversation(
        messages=body.messages,
        tools=body.tools or (),
        tool_choice=body.tool_choice,
        one_call=body.parallel_tool_calls is False,
        many_calls=body.parallel_tool_calls is True,
        effort=body.reasoning_effort,
        template_options=body.chat_template_kwargs or {},
        adds_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        rule=rule_of(body, body.response_format),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    chat = await prepare_chat(request, body, said)
    answer = chat.answer(request, new_id("chatcmpl"), counts_reasoning=chat.form.reasoning is not None)
    return ChatWriter(chat, answer, body, body.model or service.name)


class ChatWriter(ChunkWriter):
    """Writes the answers to a conversation, one for each choice."""

    def __init__(self, chat: Chat, answer: Answer, body: ChatCompletionRequest, model: str) -> None:
        self._names = {"id": answer.id, "object": "", "created": int(time.time()), "model": model}
        chunk = {**self._names, "object": "chat.completion.chunk", "system_fingerprint": None}
        super().__init__([answer], chunk, body)
        self._chat, self._counted, self._body = chat, answer.counted, body
        self._logprobs = chat.logprobs()
        prepared = chat.prepared
        self._streams: list[_ChoiceStream] = []
        self._first = f'"prompt_token_ids":{[*prepared.prompt_token_ids]},' if body.return_token_ids else ""
        self._assembler = OutputAssembler(prepared.prompt, prepared.prompt_token_ids, prepared.params.n)

    def begin(self) -> None:
        self._streams = [_ChoiceStream(at, self._chat, self._body) for at in range(self._chat.prepared.params.n)]

    def add(self, place: int, delta: CompletionDelta) -> None:
        self._choices += self._streams[delta.index].choices(delta)

    def end(self) -> None:
        if self._counted.num_reasoning_tokens is not None and self.includes_usage:
            num_tokens = sum(self._chat.num_tokens(stream.reasoning) for stream in self._streams)
            self._counted.num_reasoning_tokens = num_tokens
        super().end()

    def collect(self, place: int, delta: CompletionDelta) -> None:
        self._assembler.add(delta)

    def whole(self) -> tuple[dict[str, Any], str | None]:
        outputs = self._assembler.output().outputs
        choices = [self._choice(output) for output in outputs]
        value = {
            **self._names,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage(),
            "system_fingerprint": None,
        }
        if self._body.return_token_ids:
            value["prompt_token_ids"] = [*self._chat.prepared.prompt_token_ids]
            for choice, output in zip(choices, outputs, strict=True):
                choice["token_ids"] = [*output.token_ids]
        return value, choices[0]["message"]["content"]

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        whole = whole_answer(self._chat.parser().feed(output.text, is_last=True))
        if self._counted.num_reasoning_tokens is not None:
            self._counted.num_reasoning_tokens += self._chat.num_tokens(whole.reasoning)
        # vLLM's clients always read message.reasoning.
        message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None, "reasoning": None}
        if whole.reasoning and self._body.include_reasoning is not False:
            message["reasoning_content"] = message["reasoning"] = whole.reasoning
        if whole.calls:
            message["content"] = whole.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole.calls
            ]
        logprobs = None
        if self._logprobs is not None:
            logprobs = {"content": self._logprobs.entries(output.token_ids, output.logprobs or ()), "refusal": None}
        finish = "tool_calls" if whole.calls and output.finish_reason == "stop" else output.finish_reason
        choice = {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        return choice if output.stop_reason is None else {**choice, "stop_reason": output.stop_reason}


class _ChoiceStream:
    """Writes one completion as choices of chunks, in ASCII JSON."""

    def __init__(self, index: int, chat: Chat, body: ChatCompletionRequest) -> None:
        self._index = index
        self._parser: AnswerText | None = chat.parser() if chat.form.splits else None
        self._with_reasoning = body.include_reasoning is not False
        self._logprobs = chat.logprobs()
        self._reasoning: list[str] = []
        self._waiting: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is not sent yet."""
        self._token_ids: list[int] | None = [] if body.return_token_ids else None
        """Token ids not sent yet; None if the request does not want them."""
        self._has_begun = False

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def choices(self, delta: CompletionDelta) -> list[str]:
        """Return the choices that one delta adds."""
        written: list[str] = []
        if not self._has_begun:
            self._has_begun = True
            written.append(self._choice('{"role":"assistant","content":""}'))
        if self._logprobs is not None and delta.logprobs:
            self._waiting += self._logprobs.entries(delta.token_ids, delta.logprobs)
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        pieces: Sequence[AnswerDelta] = [ContentDelta(delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text, is_last=delta.finish_reason is not None)
            self._reasoning += [piece.text for piece in pieces if isinstance(piece, ReasoningDelta)]
        written += [self._choice(text) for piece in pieces if (text := self._piece(piece))]
        if delta.finish_reason is not None:
            written.append(self._last(delta))
        return written

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
            logprobs = to_json({"content": self._waiting, "refusal": None})
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

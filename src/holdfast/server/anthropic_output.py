"""MessageOutput: content blocks of one answer as they grow, and the events of Anthropic's stream that tell of them."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from holdfast.request.outputs import CompletionDelta
from holdfast.server.chat_text import arguments_of
from holdfast.server.streams import Counted, new_id
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STARTS: Mapping[str, Mapping[str, str]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageOutput:
    """What the model has said so far. Blocks come one after the other; the last one is open until another begins."""

    def __init__(self, message: dict[str, Any], *, shows_thinking: bool) -> None:
        """`message`: the answer as it begins, with `content` empty."""
        self.message = message
        self._shows_thinking = shows_thinking
        self._open: dict[str, Any] | None = None
        self._num_blocks = 0
        self._pieces: list[str] = []
        """Of the open block: text, or JSON of its input."""
        self._reasoning: list[str] = []
        self._num_calls = 0
        self._events: list[str] = []

    @property
    def text(self) -> str:
        """All of its text blocks that are closed."""
        return "".join(block["text"] for block in self.message["content"] if block["type"] == "text")

    @property
    def reasoning(self) -> str:
        """All of its reasoning, shown or not."""
        return "".join(self._reasoning)

    def take_events(self) -> bytes:
        """Events since the last time, as a stream has them. ASCII alone: some readers end a line at other characters too."""
        events, self._events = self._events, []
        return "".join(events).encode("ascii")

    def begin(self) -> None:
        """The engine has taken the request."""
        self._tell("message_start", f'"message":{_json(self.message)}')
        self._events.append(PING.decode())

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """More of the answer."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._add_text("text", delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
                if self._shows_thinking:
                    self._add_text("thinking", delta.text)
            else:
                self._add_call(delta)

    def end(self, delta: CompletionDelta, usage: Mapping[str, Any]) -> None:
        """The answer is over."""
        self._close()
        reason, sequence = self._reason(delta)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": dict(usage)}
        told = {"stop_reason": reason, "stop_sequence": sequence}
        self._tell("message_delta", f'"delta":{_json(told)},"usage":{_json(usage)}')
        self._tell("message_stop")

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
        name, field = _DELTAS[kind]
        self._tell_delta(f'{{"type":"{name}","{field}":{quoted(text)}}}')

    def _add_call(self, delta: ToolCallDelta) -> None:
        if delta.name is not None:
            self._num_calls += 1
            call_id = delta.id or new_id("toolu")
            self._begin_block({"type": "tool_use", "id": call_id, "name": delta.name, "input": {}})
        if delta.arguments:
            self._pieces.append(delta.arguments)
            self._tell_delta(f'{{"type":"input_json_delta","partial_json":{quoted(delta.arguments)}}}')

    def _begin_block(self, block: dict[str, Any]) -> None:
        self._close()
        self._open, self._pieces = block, []
        self._tell("content_block_start", f'"index":{self._num_blocks},"content_block":{_json(block)}')

    def _close(self) -> None:
        """End the open block."""
        block = self._open
        if block is None:
            return
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        elif block["type"] == "thinking":
            # Clients keep thoughts for the next turn only if they are signed; the signature is not checked.
            block |= {"thinking": text, "signature": sha256(text.encode()).hexdigest()}
            self._tell_delta(f'{{"type":"signature_delta","signature":"{block["signature"]}"}}')
        else:
            block["text"] = text
        self._tell("content_block_stop", f'"index":{self._num_blocks}')
        if block["type"] != "tool_use" or block["input"] is not None:  # a call that was cut off is no call
            self.message["content"].append(block)
        self._open = None
        self._num_blocks += 1

    def _tell_delta(self, delta: str) -> None:
        self._tell("content_block_delta", f'"index":{self._num_blocks},"delta":{delta}')

    def _tell(self, kind: str, fields: str = "") -> None:
        self._events.append(f'event: {kind}\ndata: {{"type":"{kind}"{"," if fields else ""}{fields}}}\n\n')


def message_usage(counted: Counted) -> dict[str, Any]:
    """Tokens as Anthropic counts them: those of the cache apart from the others."""
    return {
        "input_tokens": counted.num_prompt_tokens - counted.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.num_cached_tokens,
        "output_tokens": counted.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": counted.num_reasoning_tokens or 0},
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))

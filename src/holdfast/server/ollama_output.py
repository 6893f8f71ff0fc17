"""OllamaOutput: an answer as Ollama's objects, one a line while it grows, or one for all of it."""

import json
from collections.abc import Sequence
from typing import Any

from holdfast.engine.admission import PreparedRequest
from holdfast.request.outputs import CompletionDelta
from holdfast.server.chat_text import WholeCall, arguments_of
from holdfast.server.ollama_models import stamp
from holdfast.server.streams import new_id
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta

Piece = tuple[str, str, list[WholeCall]]
"""Content, reasoning and whole calls."""


class OllamaOutput:
    """What the model has said so far. A call is told when its arguments are whole."""

    def __init__(self, model: str, *, is_chat: bool, shows_thinking: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._shows_thinking = shows_thinking
        self._pieces: list[Piece] = []
        """Those that no line has told."""
        self._call: WholeCall | None = None
        """Whose arguments are coming."""
        self._num_calls = 0
        self._logprobs: list[dict[str, Any]] = []

    def keep_logprobs(self, entries: Sequence[dict[str, Any]]) -> None:
        """They go with the next line."""
        self._logprobs += entries

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """More of the answer."""
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._add_call(delta)
                continue
            self.close_call()
            if isinstance(delta, ContentDelta):
                self._pieces.append((delta.text, "", []))
            elif isinstance(delta, ReasoningDelta) and self._shows_thinking:
                self._pieces.append(("", delta.text, []))

    def close_call(self) -> None:
        """The open call is over; one that was cut off is no call."""
        call, self._call = self._call, None
        if call is not None and arguments_of(call.arguments) is not None:
            self._pieces.append(("", "", [call]))

    def lines(self) -> bytes:
        """What was added since the last time, a line for each piece. ASCII alone: some readers end a line elsewhere too."""
        pieces, self._pieces = self._pieces, []
        return b"".join(self._line(self._said(piece)) for piece in pieces)

    def last_line(self, times: dict[str, Any]) -> bytes:
        """The end of a stream."""
        return self._line({**self._said(("", "", [])), **times})

    def whole(self, times: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """All of the answer as one object; and its content."""
        content = "".join(text for text, _, _ in self._pieces)
        thinking = "".join(text for _, text, _ in self._pieces)
        calls = [call for _, _, some in self._pieces for call in some]
        return self._object({**self._said((content, thinking, calls)), **times}), content

    def _add_call(self, delta: ToolCallDelta) -> None:
        if delta.name is not None:
            self.close_call()
            self._call = WholeCall(delta.name, delta.id or new_id("call"))
        if self._call is not None:
            self._call.arguments += delta.arguments

    def _said(self, piece: Piece) -> dict[str, Any]:
        content, thinking, calls = piece
        said: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = [self._told_call(call) for call in calls]
        if not self._is_chat:
            return {"response": content, **said, "done": False}
        return {"message": {"role": "assistant", "content": content, **said}, "done": False}

    def _told_call(self, call: WholeCall) -> dict[str, Any]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return {
            "id": call.id,
            "function": {"index": index, "name": call.name, "arguments": arguments_of(call.arguments)},
        }

    def _object(self, said: dict[str, Any]) -> dict[str, Any]:
        value = {"model": self._model, "created_at": stamp(), **said}
        if self._logprobs:
            value["logprobs"], self._logprobs = self._logprobs, []
        return value

    def _line(self, said: dict[str, Any]) -> bytes:
        return json.dumps(self._object(said), separators=(",", ":")).encode() + b"\n"


def times_of(delta: CompletionDelta, prepared: PreparedRequest, num_tokens: int, seconds: float) -> dict[str, Any]:
    """The end of an answer: why, how many tokens, and how long in nanoseconds; `seconds`: since the request came."""
    times = delta.metrics
    reading = writing = 0.0
    if times is not None:
        reading = max(times.first_token_seconds - times.queue_seconds, 0.0)
        writing = max(times.total_seconds - times.first_token_seconds, 0.0)
    return {
        "done": True,
        "done_reason": "length" if delta.finish_reason == "length" else "stop",
        "total_duration": round(seconds * 1e9),
        "load_duration": 0,  # the model is loaded before the first request
        "prompt_eval_count": len(prepared.prompt_token_ids),
        "prompt_eval_duration": round(reading * 1e9),
        "eval_count": num_tokens,
        "eval_duration": round(writing * 1e9),
    }

"""ResponseOutput: output items of one response as they grow, and the events that tell of it."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.request.outputs import FinishReason
from holdfast.server.errors import ApiError
from holdfast.server.streams import new_id
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta
from holdfast.text.reasoning import CLOSING

MAX_MARKER_CHARS = 64
"""Of the token that ends the reasoning and those before it."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseOutput:
    """What the model has said so far. Items come one after the other; the last one is open until another begins."""

    def __init__(self, frame: dict[str, Any], thoughts_end: str = CLOSING) -> None:
        """`thoughts_end`: the marker that the content follows."""
        self._frame = frame
        self._end_marker = thoughts_end
        self._items: list[dict[str, Any]] = frame["output"]
        self._texts: list[str] = []
        """Of the open item."""
        self._open: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] = []
        """Of the open message."""
        self._waiting: list[dict[str, Any]] = []
        """Of tokens whose text is held back."""
        self._thoughts_end = ""
        """The last of their tokens, as text."""
        self._events: list[str] = []
        self._number = 0
        self.has_begun = False

    @property
    def text(self) -> str:
        """All of its messages."""
        return self._said("message")

    @property
    def reasoning(self) -> str:
        """All of its reasoning."""
        return self._said("reasoning")

    def _said(self, kind: str) -> str:
        whole = [item["content"][0]["text"] for item in self._items if item["type"] == kind and item is not self._open]
        return "".join(whole + (self._texts if self._open is not None and self._open["type"] == kind else []))

    def response(self) -> dict[str, Any]:
        """The whole of it."""
        return self._frame

    def take_events(self) -> str:
        """Events since the last time, as a stream has them."""
        events, self._events = self._events, []
        return "".join(events)

    def begin(self) -> None:
        """The engine has taken the request."""
        self.has_begun = True
        self._tell("response.created", response=self._frame)
        self._tell("response.in_progress", response=self._frame)

    def keep_logprobs(self, entries: Sequence[dict[str, Any]]) -> None:
        """They go with the next text."""
        self._waiting += entries

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """More of the answer."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._add_text("message", delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._add_text("reasoning", delta.text)
            else:
                self._add_call(delta)

    def end(self, reason: FinishReason, usage: Mapping[str, Any]) -> None:
        """The answer is over."""
        is_whole = reason == "stop"
        self._close("completed" if is_whole else "incomplete")
        self._frame["status"] = "completed" if is_whole else "incomplete"
        self._frame["incomplete_details"] = None if is_whole else {"reason": "max_output_tokens"}
        self._frame["completed_at"] = int(time.time()) if is_whole else None
        self._frame["usage"] = dict(usage)
        self._tell(f"response.{self._frame['status']}", response=self._frame)

    def fail(self, error: ApiError) -> str:
        """The last events of an answer that failed, before the error itself."""
        self._frame["status"] = "failed"
        self._frame["error"] = {"code": "server_error", "message": error.message}
        self._tell("response.failed", response=self._frame)
        return self.take_events()

    def _tell(self, kind: str, **fields: object) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        # ASCII alone: some readers end a line at other characters too.
        self._events.append(f"event: {kind}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n")

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1}

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            # Log-probabilities are told of messages alone; a slow reader gets thoughts and their end in one piece.
            if kind == "message" and self._open is not None and self._open["type"] == "reasoning":
                self._drop_thoughts(is_thinking=False)
            self._close("completed")
            fields = {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
            self._begin_item(kind, {**fields, "content": []})
            self._tell("response.content_part.added", **self._place(), content_index=0, part=self._part("", []))
        self._texts.append(text)
        if kind == "reasoning":
            self._drop_thoughts(is_thinking=True)
            self._tell("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
            return
        logprobs, self._waiting = self._waiting, []
        self._logprobs += logprobs
        self._tell("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def _drop_thoughts(self, *, is_thinking: bool) -> None:
        """Keep what waits behind the token that ends the reasoning; nothing of it while it goes on."""
        for place, entry in enumerate(self._waiting):
            self._thoughts_end = (self._thoughts_end + entry["token"])[-MAX_MARKER_CHARS:]
            if self._end_marker in self._thoughts_end:
                self._waiting = self._waiting[place + 1 :]
                self._thoughts_end = ""
                return
        if is_thinking:
            self._waiting = []

    def _add_call(self, delta: ToolCallDelta) -> None:
        self._waiting = []
        if delta.name is not None:
            self._close("completed")
            self._begin_item(
                "function_call", {"call_id": delta.id or new_id("call"), "name": delta.name, "arguments": ""}
            )
        if delta.arguments:
            self._texts.append(delta.arguments)
            self._tell("response.function_call_arguments.delta", **self._place(), delta=delta.arguments)

    def _begin_item(self, kind: str, fields: Mapping[str, object]) -> None:
        self._open = {"type": kind, "id": new_id(_PREFIXES[kind]), "status": "in_progress", **fields}
        self._items.append(self._open)
        self._texts, self._logprobs = [], []
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=self._open)

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
            self._tell("response.function_call_arguments.done", **self._place(), arguments=text, name=item["name"])
        else:
            if item["type"] == "message":
                self._logprobs += self._waiting
                self._waiting = []
            item["content"] = [self._part(text, self._logprobs)]
            told = {**self._place(), "content_index": 0}
            if item["type"] == "message":
                self._tell("response.output_text.done", **told, text=text, logprobs=self._logprobs)
            else:
                self._tell("response.reasoning_text.done", **told, text=text)
            self._tell("response.content_part.done", **told, part=item["content"][0])
        item["status"] = status
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

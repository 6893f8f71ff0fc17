"""HarmonyParser reads answers of gpt-oss: messages in channels for reasoning, content and tool calls; no torch.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends in <|start|>assistant, so an answer begins inside a header. The recipient stands before the channel or
after it. A second message of the same kind begins on a new line.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import shown
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, partial_end
from holdfast.text.call_readers import ArgumentsReader, report_unknown
from holdfast.text.tool_calls import MAX_CALLS, AnswerReader, ToolFormat
from holdfast.text.tools import NAME, Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
TURN = f"{START}assistant"
MAX_HEADER_CHARS = 512
FUNCTIONS = "functions."

_ENDS = (END, CALL, RETURN, START, CHANNEL)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, END, CALL, RETURN, START))))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_WORD = re.compile(r"\s*([\w.]*)")
_SPACE = re.compile(r"\s*")
_FIRST_SPACE = re.compile(r"\s{0,64}")


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ToolFormat):
    """The format of gpt-oss; one parser reads both reasoning and calls."""

    def parser(self, tools: Sequence[Tool] | None = None) -> AnswerReader:
        """Make the parser of one answer that begins right after the prompt's <|start|>assistant."""
        return HarmonyParser(tools or (), is_any_tool=tools is None)


HARMONY = HarmonyFormat("harmony", "", "", None, tokens=TOKENS, stops=(CALL, RETURN))


_FIRST_HEADERS, _HEADERS = (CHANNEL, MESSAGE, START, CONSTRAIN, "to="), (START, CHANNEL, MESSAGE)
"""Beginnings of the first header, which the prompt opened, and of later ones; any other text is content."""


class HarmonyParser(AnswerReader):
    """Reads one answer in channels."""

    def __init__(
        self,
        tools: Sequence[Tool] | None,
        *,
        reads_reasoning: bool = True,
        prompt: str | None = None,
        is_any_tool: bool = False,
    ) -> None:
        """`tools` None leaves calls in the content; `is_any_tool` accepts any name."""
        super().__init__()
        self._reads_calls = tools is not None
        self._tools = None if is_any_tool else {tool.name: tool for tool in tools or ()}
        self._reasoning = ReasoningDelta if reads_reasoning else ContentDelta
        self._kind: type[ContentDelta] | type[ReasoningDelta] | None = ContentDelta
        """Kind of the current body; None drops it."""
        self._name = ""
        self._arguments = ArgumentsReader()
        self._shown: set[type[ContentDelta] | type[ReasoningDelta]] = set()
        self._is_new_message = False
        self._is_after_call = False
        self._state = self._first
        self._follow(prompt)

    def _follow(self, prompt: str | None) -> None:
        """Continue in the header or the message body that the prompt opened."""
        _, turn, tail = (prompt or "").rpartition(TURN)
        header, message, _ = tail.rpartition(MESSAGE)
        if turn and message:
            self._begin_message(header)
        elif turn:
            self.feed(tail)

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas that were held back, at the end of the answer."""
        kept, self._kept = self._kept, ""
        if self._state == self._header:
            self._report("dropped a header that was cut off before its message")
        elif self._state == self._call:
            self._report(f"dropped a call of {shown(self._name)} that was cut off before its arguments")
        elif self._state == self._read_arguments:
            self._report(f"call {self.num_calls - 1} was cut off")
        else:
            self._text(kept)
        self._state, self._kind = self._body, ContentDelta
        return self._out.take()

    def _first(self, text: str, place: int) -> int:
        return self._before_header(text, place, is_first=True)

    def _next(self, text: str, place: int) -> int:
        return self._before_header(text, place, is_first=False)

    def _before_header(self, text: str, place: int, is_first: bool) -> int:
        # At the beginning, white space may be content; between messages it is not.
        match = (_FIRST_SPACE if is_first else _SPACE).match(text, place)
        begin = place if match is None else match.end()
        rest = text[begin : begin + len(CONSTRAIN)]
        starts = _FIRST_HEADERS if is_first else _HEADERS
        if any(rest.startswith(start) for start in starts):
            self._state = self._header
            return begin
        if any(start.startswith(rest) for start in starts):
            return self._keep(text, place if is_first else begin)
        self._state, self._kind, self._is_new_message = self._body, ContentDelta, not is_first
        return place if is_first else begin

    def _header(self, text: str, place: int) -> int:
        limit = place + MAX_HEADER_CHARS
        # The first character begins this header, so it cannot end it.
        found = _HEADER_END.search(text, place if text.startswith(MESSAGE, place) else place + 1, limit)
        if found is None and len(text) < limit:
            return self._keep(text, place)
        if found is not None and found[0] == MESSAGE:
            self._begin_message(text[place : found.start()])
            return found.end()
        self._report("a text that begins like a header has no message, and is content")
        self._state, self._kind, self._is_new_message = self._body, ContentDelta, True
        end = limit if found is None else found.start()
        self._text(text[place:end])
        return end

    def _begin_message(self, header: str) -> None:
        role_part, _, channel_part = header.partition(CHANNEL)
        begins_turn = role_part.lstrip().startswith(START)
        role = _word(role_part.lstrip().removeprefix(START)) if begins_turn else "assistant"
        channel = _word(channel_part)
        found = _RECIPIENT.search(role_part) or _RECIPIENT.search(channel_part)
        recipient = None if found is None else found[1]
        self._is_new_message, self._state = True, self._body
        self._kind = self._reasoning if channel == "analysis" else ContentDelta
        if role != "assistant":
            self._report(f"dropped a message of {shown(role)}")
            self._kind = None
        elif recipient is not None and self._is_call(recipient):
            self._state, self._name = self._call, recipient.removeprefix(FUNCTIONS)

    def _is_call(self, recipient: str) -> bool:
        name = recipient.removeprefix(FUNCTIONS)
        if not self._reads_calls:
            return False
        is_function = name != recipient or (self._tools is not None and name in self._tools)
        if not is_function or NAME.fullmatch(name) is None:
            self._report(f"{shown(recipient)} is called, which is no function; its message is no call")
            return False
        if self.num_calls >= MAX_CALLS:
            self._report(f"more than {MAX_CALLS} calls; the rest is content")
            return False
        return True

    def _call(self, text: str, place: int) -> int:
        """Read up to the first character of the arguments; then the call is certain."""
        match = _SPACE.match(text, place)
        place = place if match is None else match.end()
        rest = text[place : place + len(CHANNEL)]
        if not rest or (rest not in _ENDS and any(end.startswith(rest) for end in _ENDS)):
            return self._keep(text, place)
        is_empty = any(rest.startswith(end) for end in _ENDS)
        report_unknown(self._name, self._tools, self._report)
        self._out.begin_call(self.num_calls, self._name)
        self.num_calls += 1
        self._arguments = ArgumentsReader()
        self._state = self._read_arguments
        if is_empty:
            self._out.add(self.num_calls - 1, "{}")
            self._end_arguments()
        return place

    def _read_arguments(self, text: str, place: int) -> int:
        place = self._arguments.read(text, place, len(text), self.num_calls - 1, self._out)
        if self._arguments.is_done:
            self._end_arguments()
        elif self._arguments.is_broken:
            self._report(f"the arguments of call {self.num_calls - 1} are no JSON")
            self._state = self._broken_arguments
        return place

    def _end_arguments(self) -> None:
        """Read the rest of the message as content."""
        self._state, self._kind, self._is_new_message, self._is_after_call = self._body, ContentDelta, True, True

    def _body(self, text: str, place: int) -> int:
        found = _END.search(text, place)
        if found is not None:
            self._text(text[place : found.start()])
            goes_on = found[0] in (START, CHANNEL)
            self._state, self._is_after_call = self._header if goes_on else self._next, False
            return found.start() if goes_on else found.end()
        end = len(text) - partial_end(text[place:], *_ENDS)
        self._text(text[place:end])
        return self._keep(text, end)

    def _broken_arguments(self, text: str, place: int) -> int:
        """Read arguments that are not JSON, unchanged, up to the end of the message."""
        return self._body(text, place)

    def _text(self, text: str) -> None:
        if self._state == self._broken_arguments:
            self._out.add(self.num_calls - 1, text)
            return
        text = text.lstrip() if self._is_after_call else text
        if not text or self._kind is None:
            return
        self._is_after_call = False
        if self._is_new_message and self._kind in self._shown:
            self._out.add(self._kind, "\n")
        self._is_new_message = False
        self._shown.add(self._kind)
        self._out.add(self._kind, text)


def _word(text: str) -> str:
    match = _WORD.match(text)
    return "" if match is None else match[1]

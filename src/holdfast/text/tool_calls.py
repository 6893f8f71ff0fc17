"""ToolParser: calls of tools in an answer, told from its text as it streams: Hermes and Qwen, Llama, Qwen3-Coder; no torch.

    hermes        <tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>
    llama3_json   {"name": "look", "parameters": {"city": "Rome"}}, alone or several with ; between
    qwen3_coder   <tool_call><function=look><parameter=city>Rome</parameter></function></tool_call>

A call is told when it is certain: its name is there and its arguments have begun. What is none after all is content,
to the letter. Each character is looked at once, and what is held back is bounded, so that the same text gives the same
deltas, joined, however it is cut, at a cost in proportion to its length.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from holdfast.errors import RequestError, shown
from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, DeltaList, HeldSpace, ToolCallDelta, partial_end
from holdfast.text.call_readers import CallReader, JsonCall, XmlCall
from holdfast.text.tools import Tool

MAX_HELD_CHARS = 2**16
"""Of a call that is not certain yet; a longer one is content."""
MAX_CALLS = 128
MAX_PROBLEMS = 8
AUTO, NONE = "auto", "none"

_HERMES_CLOSE = re.compile(r"[\s}]{0,64}")
_LLAMA_BETWEEN = re.compile(r"\s{0,64}[;,]?\s{0,64}")

__all__ = ["ContentDelta", "ToolCallDelta", "ToolFormat", "ToolParser", "choose_tool_parser"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls; `parser` makes what reads them in one answer."""

    name: str
    opening: str
    """Stands before a call."""
    closing: str
    """Stands behind it; empty where nothing does."""
    is_bare: bool
    """An answer may begin with a call that has no opening."""
    arguments_key: str

    def parser(self, tools: Sequence[Tool] | None = None) -> "ToolParser":
        """For one answer; names of calls are held against these tools where they are given."""
        return ToolParser(self, tools)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", is_bare=False, arguments_key="arguments")
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", "", is_bare=True, arguments_key="parameters")
QWEN3_CODER = ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", is_bare=False, arguments_key="")
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA3_JSON, QWEN3_CODER)}
_OTHER_NAMES = {"qwen": HERMES, "qwen3": HERMES, "qwen25": HERMES, "llama": LLAMA3_JSON, "llama4_json": LLAMA3_JSON}


def choose_tool_parser(template: str | None, name: str = AUTO) -> ToolFormat | None:
    """The format with this name, or the one that a chat template teaches; None where it is none of these.

    A template that knows no tools is given them in words, which teach the format of Hermes.
    """
    if name == NONE:
        return None
    if name != AUTO:
        form = FORMATS.get(name) or _OTHER_NAMES.get(name)
        if form is None:
            raise RequestError(
                f"the tool parser {shown(name)} was asked",
                f"{', '.join(FORMATS)} are there",
                f"use one, {AUTO} or {NONE}",
            )
        return form
    if template is None:
        return None
    if re.search(r"\btools\b", template) is None:
        return HERMES
    if "<function=" in template:
        return QWEN3_CODER
    if HERMES.opening in template:
        return HERMES
    if LLAMA3_JSON.opening in template or re.search(r'"parameters"\s*:', template.replace("\\", "")) is not None:
        return LLAMA3_JSON
    return None


class _State(Enum):
    START = auto()
    TEXT = auto()
    CALL = auto()
    BROKEN_ARGUMENTS = auto()
    AFTER = auto()


class ToolParser:
    """Reads one answer: `feed` gives what is certain, `finish` what was still held back.

    `problems` says in words what looked like a call and was none, or was one and broke.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool] | None = None) -> None:
        self.form = form
        self.problems: list[str] = []
        self.num_calls = 0
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._out = DeltaList()
        self._space = HeldSpace()
        self._kept = ""
        """The end of the last piece, which may begin a marker."""
        self._held: list[str] = []
        self._num_held = 0
        """Of the call that is read: its text, until it is certain."""
        self._reader: CallReader | None = None
        self._is_after_call = False
        self._state = _State.START if form.is_bare else _State.TEXT
        self._steps: dict[_State, Callable[[str, int], int]] = {
            _State.START: self._start,
            _State.TEXT: self._text,
            _State.CALL: self._call,
            _State.BROKEN_ARGUMENTS: self._broken_arguments,
            _State.AFTER: self._after,
        }

    def feed(self, text: str) -> list[AnswerDelta]:
        """What a further piece of the answer makes certain."""
        text, self._kept, place = self._kept + text, "", 0
        while place < len(text):
            place = self._steps[self._state](text, place)
        return self._out.take()

    def finish(self) -> list[AnswerDelta]:
        """What was held back; the answer has ended."""
        kept, self._kept = self._kept, ""
        if self._state in (_State.TEXT, _State.START):
            self._end_text(kept)
        elif self._state is _State.CALL:
            assert self._reader is not None, "a call is read by nobody"
            if self._reader.is_certain:
                self._tell(f"call {self.num_calls - 1} was cut off")
            else:
                self._end_text("".join(self._held) + kept)
        elif self._state is _State.BROKEN_ARGUMENTS:
            self._out.add(self.num_calls - 1, kept)
        self._out.add(ContentDelta, self._space.release())
        self._state = _State.TEXT
        return self._out.take()

    def _end_text(self, rest: str) -> None:
        """The rest of an answer, which may be the beginning of a marker or of a call."""
        if rest and self._is_after_call:
            self._tell(f"what follows call {self.num_calls - 1} was cut off, and is left out")
            return
        if self._state is _State.CALL:
            self._tell("a call was cut off before its name and arguments, and is content")
        self._content(rest)

    def _start(self, text: str, place: int) -> int:
        """An answer may be a call from its first sign on."""
        rest = text[place:].lstrip()
        begin = len(text) - len(rest)
        self._space_only(text[place:begin])
        if rest:
            self._state = _State.TEXT
            if rest[0] == "{":
                self._begin_call("", is_marked=False)
        return begin

    def _space_only(self, space: str) -> None:
        self._out.add(ContentDelta, self._space.show(space))

    def _text(self, text: str, place: int) -> int:
        opening = self.form.opening
        found = text.find(opening, place)
        if found >= 0 and self.num_calls < MAX_CALLS:
            self._content(text[place:found])
            self._begin_call(opening, is_marked=True)
            return found + len(opening)
        if found >= 0:
            self._tell(f"more than {MAX_CALLS} calls; the rest is content")
        end = len(text) - partial_end(text[place:], opening)
        self._content(text[place:end])
        self._kept = text[end:]
        return len(text)

    def _begin_call(self, lead: str, is_marked: bool) -> None:
        if self.form is QWEN3_CODER:
            self._reader = XmlCall(self.num_calls, self._tools, self._tell)
        else:
            self._reader = JsonCall(self.num_calls, self._tools, self._tell, is_marked)
        self._held, self._num_held = [lead], len(lead)
        self._state = _State.CALL

    def _call(self, text: str, place: int) -> int:
        reader = self._reader
        assert reader is not None, "a call is read by nobody"
        was_certain, limit = reader.is_certain, len(text)
        if not was_certain:
            # Bounded by where it stands in the text, not by how the text is cut.
            limit = min(limit, place + MAX_HELD_CHARS - self._num_held)
        end = reader.read(text, place, limit, self._out)
        if reader.is_certain and not was_certain:
            self._held, self._num_held = [], 0
            self._space.drop()
            self.num_calls += 1
        elif not reader.is_certain:
            self._held.append(text[place:end])
            self._num_held += end - place
        if not reader.is_certain and (reader.is_broken or self._num_held + limit - end >= MAX_HELD_CHARS):
            self._tell("what begins like a call is none, and is content")
            self._fall_back()
        elif reader.is_done:
            self._state, self._is_after_call = _State.AFTER, True
        elif reader.is_broken:
            self._tell(f"the arguments of call {self.num_calls - 1} are no JSON")
            self._state = _State.BROKEN_ARGUMENTS
        elif limit == len(text):
            self._kept = text[end:]
            return limit
        return end

    def _fall_back(self) -> None:
        held = "".join(self._held)
        self._held, self._num_held, self._reader = [], 0, None
        self._state = _State.TEXT
        self._content(held)

    def _broken_arguments(self, text: str, place: int) -> int:
        """As the model wrote them, up to the marker; whoever called can tell the model."""
        closing = self.form.closing
        found = text.find(closing, place) if closing else -1
        if found >= 0:
            self._out.add(self.num_calls - 1, text[place:found])
            self._state, self._is_after_call = _State.TEXT, True
            return found + len(closing)
        end = len(text) - partial_end(text[place:], closing) if closing else len(text)
        self._out.add(self.num_calls - 1, text[place:end])
        self._kept = text[end:]
        return len(text)

    def _after(self, text: str, place: int) -> int:
        """The marker behind a call, or the next call; anything else is content."""
        pattern = _HERMES_CLOSE if self.form.closing else _LLAMA_BETWEEN
        match = pattern.match(text, place)
        begin = place if match is None else match.end()
        rest = text[begin:]
        marker = self.form.closing or self.form.opening
        if marker.startswith(rest) and rest != marker:
            self._kept = text[place:]
            return len(text)
        if self.form.closing:
            self._state = _State.TEXT
            return begin + len(marker) if rest.startswith(marker) else place
        is_marked = rest.startswith(marker)
        if not (is_marked or rest[0] == "{") or self.num_calls >= MAX_CALLS:
            self._state = _State.TEXT
            return place
        end = begin + len(marker) if is_marked else begin
        self._begin_call(text[place:end], is_marked)
        return end

    def _content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
        self._out.add(ContentDelta, self._space.show(text))

    def _tell(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

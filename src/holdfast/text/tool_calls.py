"""ToolParser separates tool calls from the text of a streaming answer, in the model's format; no torch.

    hermes        <tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>
    llama3_json   {"name": "look", "parameters": {"city": "Rome"}}, alone or several with ; between
    qwen3_coder   <tool_call><function=look><parameter=city>Rome</parameter></function></tool_call>
    glm           <tool_call>look<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>
    deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, kimi_k2    a section of calls between two markers
    harmony       messages in channels, read by HarmonyParser

A call is reported once it is certain: its name is complete and its arguments have begun. Text that proves not to be a
call becomes content, unchanged. Each character is read once, and the held text is bounded. So a text gives the same
joined deltas however it is split, in linear time.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, DeltaList, HeldSpace, ToolCallDelta, partial_end
from holdfast.text.call_readers import CallContext, CallReader, HeadedCall, HeadSyntax, JsonCall, JsonSyntax
from holdfast.text.tag_calls import TagCall, TagSyntax
from holdfast.text.tools import Tool

MAX_HELD_CHARS = 2**16
"""Most characters to hold for a call that is not certain yet; a longer one is content."""
MAX_CALLS = 128
MAX_PROBLEMS = 8

_LLAMA_BETWEEN = re.compile(r"\s{0,64}[;,]?\s{0,64}")
_SPACE = re.compile(r"\s{0,64}")

_NO_SLACK = re.compile("")
_READERS: dict[type, type[CallReader]] = {JsonSyntax: JsonCall, HeadSyntax: HeadedCall, TagSyntax: TagCall}

__all__ = ["AnswerReader", "ContentDelta", "ToolCallDelta", "ToolFormat", "ToolParser"]


class AnswerReader:
    """Reads one answer as it streams: `feed` returns certain deltas, `finish` the rest.

    `problems` describes texts that looked like calls, and broken calls.
    """

    _state: Callable[[str, int], int]
    """Method that reads the text from a position and returns the next position."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.num_calls = 0
        self._out = DeltaList()
        self._kept = ""
        """End of the last piece that may begin a marker."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Read a further piece of the answer; return the deltas that are certain."""
        text, self._kept, place = self._kept + text, "", 0
        while place < len(text):
            place = self._state(text, place)
        return self._out.take()

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas that were held back, at the end of the answer."""
        raise NotImplementedError

    def _keep(self, text: str, place: int) -> int:
        """Hold back the text from `place` for the next piece."""
        self._kept = text[place:]
        return len(text)

    def _report(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a model family's calls."""

    name: str
    opening: str
    closing: str
    """Marker after a call; empty if there is none, or if the syntax has its own end."""
    syntax: JsonSyntax | HeadSyntax | TagSyntax | None
    """Syntax of a call between `opening` and `closing`; None for channels."""
    section: tuple[str, str] = ("", "")
    """Markers around a run of calls; empty if each call stands alone."""
    is_bare: bool = False
    """True if an answer may begin with a call without `opening`."""
    slack: re.Pattern[str] = _NO_SLACK
    """Pattern of the text between a call and its closing marker."""
    between: str = "\n"
    breaks_lines: bool = False
    """True if a forced call has a line break inside each marker."""
    tokens: tuple[str, ...] = ()
    """Markers that are tokens of the vocabulary. A text without special tokens may lack them."""
    stops: tuple[str, ...] = ()
    heads_in_thoughts: tuple[str, ...] = ()
    """Beginnings of a call, with {name}, that also end thoughts: some models leave </think> out before a call."""

    def ends_thoughts(self, tools: Sequence[Tool]) -> list[str]:
        """List markers that end thoughts: the beginning of a section, and that of a call of one of these tools.

        A call of another name may be an example that the model thinks about.
        """
        section = [self.section[0]] if self.section[0] else []
        return section + [head.format(name=tool.name) for tool in tools for head in self.heads_in_thoughts]

    @property
    def lists_calls(self) -> bool:
        """True if a marker ends the list of calls. Otherwise only the model's end token does."""
        return bool(self.section[1])

    def parser(self, tools: Sequence[Tool] | None = None) -> AnswerReader:
        """Make the parser of one answer; checks names of calls against these tools, if given."""
        return ToolParser(self, tools)


class ToolParser(AnswerReader):
    """Reads one answer in a format of markers."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool] | None = None) -> None:
        super().__init__()
        self.form = form
        self._tools = None if tools is None else {tool.name: tool for tool in tools}
        self._space = HeldSpace()
        self._held: list[str] = []
        """Text of the current call, until it is certain."""
        self._num_held = 0
        self._reader: CallReader | None = None
        self._is_after_call = False
        self._begin = _any_of(form.section[0], form.opening)
        self._ends = [end for end in (form.closing, *form.section, form.section[0] and form.opening) if end]
        """Markers that end arguments that are not JSON."""
        self._end = _any_of(*self._ends)
        self._state = self._start if form.is_bare else self._text

    def finish(self) -> list[AnswerDelta]:
        """Return the deltas that were held back, at the end of the answer."""
        kept, self._kept = self._kept, ""
        if self._state in (self._text, self._start):
            self._end_text(kept)
        elif self._state == self._section:
            self._end_text(self.form.section[0] + kept)
        elif self._state == self._call:
            assert self._reader is not None, "a call has no reader"
            if self._reader.is_certain:
                self._report(f"call {self.num_calls - 1} was cut off")
            else:
                self._end_text("".join(self._held) + kept)
        elif self._state == self._broken_arguments:
            self._out.add(self.num_calls - 1, kept)
        self._out.add(ContentDelta, self._space.release())
        self._state = self._text
        return self._out.take()

    def _end_text(self, rest: str) -> None:
        """Finish an answer that ends in a partial marker or call."""
        if rest and self._is_after_call:
            self._report(f"dropped the text after call {self.num_calls - 1}, which was cut off")
            return
        if self._state == self._call:
            self._report("a call was cut off before its name and arguments, and is content")
        self._content(rest)

    def _start(self, text: str, place: int) -> int:
        """Read the beginning of an answer, which may be a call without a marker."""
        rest = text[place:].lstrip()
        begin = len(text) - len(rest)
        self._out.add(ContentDelta, self._space.show(text[place:begin]))
        if rest:
            self._state = self._text
            if rest[0] == "{":
                self._begin_call("", is_marked=False)
        return begin

    def _text(self, text: str, place: int) -> int:
        found = self._begin.search(text, place)
        if found is not None and self.num_calls < MAX_CALLS:
            self._content(text[place : found.start()])
            if found[0] == self.form.opening:
                self._begin_call(found[0], is_marked=True)
            else:
                self._state = self._section
            return found.end()
        if found is not None:
            self._report(f"more than {MAX_CALLS} calls; the rest is content")
        end = len(text) - partial_end(text[place:], self.form.opening, self.form.section[0])
        self._content(text[place:end])
        return self._keep(text, end)

    def _look(self, text: str, place: int, space: re.Pattern[str], marker: str) -> tuple[int, bool | None]:
        """Look for a marker after this space; return the end of both and True if found, None if it may still come."""
        match = space.match(text, place)
        begin = place if match is None else match.end()
        end = begin + len(marker)
        return end, text.startswith(marker, begin) or (None if marker.startswith(text[begin:end]) else False)

    def _section(self, text: str, place: int) -> int:
        """Read the text after a section's marker: the first call; if there is none, the marker is content."""
        end, is_call = self._look(text, place, _SPACE, self.form.opening)
        if is_call is None:
            return self._keep(text, place)
        if is_call:
            self._begin_call(self.form.section[0] + text[place:end], is_marked=True)
            return end
        self._state = self._text
        self._content(self.form.section[0])
        return place

    def _begin_call(self, lead: str, is_marked: bool) -> None:
        assert self.form.syntax is not None, f"{self.form.name} is read by another parser"
        call = CallContext(self.num_calls, self._tools, self._report, is_marked)
        self._reader = _READERS[type(self.form.syntax)](self.form.syntax, call)
        self._held, self._num_held = [lead], len(lead)
        self._state = self._call

    def _call(self, text: str, place: int) -> int:
        reader = self._reader
        assert reader is not None, "a call has no reader"
        was_certain, limit = reader.is_certain, len(text)
        if not was_certain:
            # Bounded by its place in the text, not by how the text is cut.
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
            self._report("a text that begins like a call is none, and is content")
            self._state = self._text
            self._content("".join(self._held))
        elif reader.is_done:
            self._state, self._is_after_call = self._after, True
        elif reader.is_broken:
            self._report(f"the arguments of call {self.num_calls - 1} are no JSON")
            self._state = self._broken_arguments
        elif limit == len(text):
            self._kept = text[end:]
            return limit
        return end

    def _broken_arguments(self, text: str, place: int) -> int:
        """Stream broken arguments unchanged up to the marker, so the caller can report them to the model."""
        found = self._end.search(text, place) if self._ends else None
        if found is not None:
            self._out.add(self.num_calls - 1, text[place : found.start()])
            self._is_after_call = True
            self._state = self._between if self.form.section[0] else self._text
            return found.end() if found[0] == self.form.closing else found.start()
        end = len(text) - partial_end(text[place:], *self._ends)
        self._out.add(self.num_calls - 1, text[place:end])
        return self._keep(text, end)

    def _after(self, text: str, place: int) -> int:
        """Read the marker after a call, or the next call; anything else is content."""
        if self.form.is_bare:
            return self._after_bare(text, place)
        end, is_closed = self._look(text, place, self.form.slack, self.form.closing)
        if is_closed is None:
            return self._keep(text, place)
        self._state = self._between if self.form.section[0] else self._text
        return end if is_closed else place

    def _after_bare(self, text: str, place: int) -> int:
        end, is_marked = self._look(text, place, _LLAMA_BETWEEN, self.form.opening)
        if is_marked is None:
            return self._keep(text, place)
        end = end if is_marked else end - len(self.form.opening)
        if not (is_marked or text[end] == "{") or self.num_calls >= MAX_CALLS:
            self._state = self._text
            return place
        self._begin_call(text[place:end], is_marked)
        return end

    def _between(self, text: str, place: int) -> int:
        """Read the text after a call in a section: the section's end, or any text."""
        end, is_ended = self._look(text, place, _SPACE, self.form.section[1])
        if is_ended is None:
            return self._keep(text, place)
        self._state = self._text
        return end if is_ended else place

    def _content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
        self._out.add(ContentDelta, self._space.show(text))


def _any_of(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in markers if marker))

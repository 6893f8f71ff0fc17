"""CallReader: reads one call of a tool: a JSON object, or a name with JSON arguments; no torch.

Nothing is reported before the call is certain. From then on its arguments stream.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from holdfast.errors import shown
from holdfast.text.answer_deltas import DeltaList
from holdfast.text.json_scanner import Found, JsonScanner, is_object
from holdfast.text.tools import NAME, Tool

Report = Callable[[str], None]
"""Records a problem of the answer."""


Syntax = TypeVar("Syntax")


class CallContext(NamedTuple):
    """One call of an answer."""

    number: int
    tools: Mapping[str, Tool] | None
    """Accepted names of calls; None accepts any."""
    report: Report
    is_marked: bool
    """True if a marker identifies the call; else only its keys do, and a JSON answer may have the same."""


class CallReader(Generic[Syntax]):
    """Reads one call."""

    def __init__(self, syntax: Syntax, call: CallContext) -> None:
        self.is_certain = False
        """True once the text is known to be a call, and reported."""
        self.is_done = False
        self.is_broken = False
        """True if the text is not a call, or its arguments are broken."""
        self._syntax = syntax
        self._index, self._tools, self._report, self._is_marked = call

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read from `place`; stop when the call is done or broken, at the limit, or before a partial tag there."""
        raise NotImplementedError

    def is_unknown(self, name: str) -> bool:
        """Report a name that is not a tool of the request, and return True."""
        return report_unknown(name, self._tools, self._report)


class ArgumentsReader:
    """Copies one JSON object to the arguments of a call. Bare control characters in strings become escapes."""

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self._scanner = JsonScanner()

    def read(self, text: str, place: int, limit: int, index: int, out: DeltaList) -> int:
        """Read to the end of the object, to the first character that is not JSON, or to the limit."""
        while not (self.is_done or self.is_broken):
            end, found = self._scanner.scan(text, place, limit)
            out.add(index, escaped(text[place:end], found))
            place = end
            self.is_done, self.is_broken = found is Found.END, found is Found.BROKEN
            if found is Found.MORE:
                break
        return place


def escaped(piece: str, found: Found) -> str:
    """Escape the control character at the end of a piece, which is invalid JSON unescaped."""
    return piece[:-1] + json.dumps(piece[-1])[1:-1] if found is Found.CONTROL else piece


def report_unknown(name: str, tools: Mapping[str, Tool] | None, report: Report) -> bool:
    """Report a name that is not a tool of the request, and return True."""
    if tools is None or name in tools:
        return False
    report(f"{shown(name)} is called, which is no tool of the request")
    return True


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """Calls that are one JSON object with the name and the arguments as members."""

    arguments_key: str


@dataclass(frozen=True, slots=True)
class HeadSyntax:
    """Calls that are a name, a separator and a JSON object."""

    head: re.Pattern[str]
    """Pattern of the text before the separator: group "name", and group "id" if the model numbers its calls."""
    separator: str
    closing: str
    written_head: str
    written_end: str = ""
    """Forced calls: `written_head`, with {name}, comes before the arguments; this comes after, before `closing`."""


MAX_HEAD_CHARS = 512
_SPACE = re.compile(r"\s*")


class HeadedCall(CallReader[HeadSyntax]):
    """Reads NAME <separator> {...}. Markers identify the call, so invalid JSON breaks only the arguments."""

    def __init__(self, syntax: HeadSyntax, call: CallContext) -> None:
        super().__init__(syntax, call)
        self._named: re.Match[str] | None = None
        self._arguments = ArgumentsReader()

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read from `place`; a partial separator at the end waits for the next piece."""
        if self._named is None:
            place = self._head(text, place, limit)
        if self._named is not None and not self.is_certain:
            place = self._first(text, place, limit, out)
        if self.is_certain and not (self.is_done or self.is_broken):
            place = self._arguments.read(text, place, limit, self._index, out)
            self.is_done, self.is_broken = self._arguments.is_done, self._arguments.is_broken
        return place

    def _head(self, text: str, place: int, limit: int) -> int:
        separator = self._syntax.separator
        end = min(limit, place + MAX_HEAD_CHARS)
        found = text.find(separator, place, end)
        if found < 0:
            self.is_broken = end == place + MAX_HEAD_CHARS
            return place
        named = self._syntax.head.fullmatch(text, place, found)
        if named is None or NAME.fullmatch(named["name"]) is None:
            self.is_broken = True
            return place
        self._named = named
        return found + len(separator)

    def _first(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read the first character of the arguments; then the call is certain."""
        match = _SPACE.match(text, place, limit)
        place = place if match is None else match.end()
        rest = text[place : min(limit, place + len(self._syntax.closing))]
        is_empty = rest == self._syntax.closing
        if not rest or (not is_empty and self._syntax.closing.startswith(rest)):
            return place
        assert self._named is not None, "the head of a call has no name"
        name = self._named["name"]
        self.is_unknown(name)
        self.is_certain = True
        out.begin_call(self._index, name, self._named.groupdict().get("id"))
        if is_empty:
            out.add(self._index, "{}")
            self.is_done = True
        return place


class JsonCall(CallReader[JsonSyntax]):
    """Reads {"name": ..., "arguments": {...}}, in any order; `parameters` is a synonym of `arguments`."""

    def __init__(self, syntax: JsonSyntax, call: CallContext) -> None:
        super().__init__(syntax, call)
        self._scanner = JsonScanner()
        self._key = ""
        self._name: str | None = None
        self._captured: list[str] = []
        """A key with the text before it, or a value."""
        self._arguments: list[str] = []
        self._has_arguments = False
        self._in_arguments = False
        """True inside an arguments object."""

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read from `place`."""
        while True:
            end, found = self._scanner.scan(text, place, limit)
            self._keep(escaped(text[place:end], found), out)
            place = end
            if found is Found.END:
                self._end(out)
            elif found is Found.BROKEN:
                self._break()
            elif found is Found.KEY:
                self._take_key()
            elif found is Found.VALUE:
                self._begin_value(text[place], out)
            elif found is Found.VALUE_END:
                self._end_value(out)
            if found is Found.MORE or self.is_done or self.is_broken:
                return place

    def _keep(self, piece: str, out: DeltaList) -> None:
        if self._in_arguments and self.is_certain:
            out.add(self._index, piece)
        elif self._in_arguments:
            self._arguments.append(piece)
        elif not self.is_certain:
            self._captured.append(piece)

    def _captured_text(self) -> str:
        text = "".join(self._captured)
        self._captured.clear()
        return text

    def _take_key(self) -> None:
        text = self._captured_text()
        if not self.is_certain:
            self._key = _decoded(text[text.index('"') :])
            if not self._is_marked and self._key not in ("name", "arguments", "parameters", "type", "id"):
                self.is_broken = True

    def _begin_value(self, first: str, out: DeltaList) -> None:
        self._captured.clear()
        if self.is_certain or self._key not in ("arguments", "parameters"):
            return
        if self._has_arguments or first not in '{"n':
            self.is_broken = True
        elif first == "{":
            self._in_arguments = True
            self._begin_call(out)

    def _end_value(self, out: DeltaList) -> None:
        if self._in_arguments:
            self._in_arguments = False
            self._has_arguments = True
            self._key = ""
            return
        if self.is_certain:
            return
        text = self._captured_text()
        if self._key == "name":
            name = _decoded(text) if text.startswith('"') else ""
            if (
                self._name is not None
                or NAME.fullmatch(name) is None
                or (self.is_unknown(name) and not self._is_marked)
            ):
                self.is_broken = True
                return
            self._name = name
        elif self._key in ("arguments", "parameters"):
            written = "{}" if text == "null" else _decoded(text) or "{}"
            if not is_object(written) or not _is_unicode(written):
                self.is_broken = True
                return
            self._arguments, self._has_arguments = [written], True
        if self._has_arguments:
            self._begin_call(out)

    def _begin_call(self, out: DeltaList) -> None:
        if self._name is None:
            return
        self.is_certain = True
        out.begin_call(self._index, self._name)
        out.add(self._index, "".join(self._arguments))
        self._arguments.clear()

    def _end(self, out: DeltaList) -> None:
        if not self.is_certain and self._is_marked and self._name is not None:
            self._arguments = ["{}"]
            self._begin_call(out)
        self.is_done = self.is_certain
        self.is_broken = not self.is_certain

    def _break(self) -> None:
        # A missing brace at the end is harmless.
        self.is_done = self.is_certain and not self._in_arguments
        self.is_broken = not self.is_done


def _decoded(text: str) -> str:
    return str(json.loads(text, strict=False))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""CallReader: one call of a tool, from its first sign to its last: as a JSON object, or as Qwen3-Coder's tags; no torch.

Nothing is told of a call before it is certain. From then on its arguments are, as far as they have come.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from holdfast.errors import shown
from holdfast.text.answer_deltas import DeltaList, partial_end
from holdfast.text.json_scanner import Found, JsonScanner, is_object
from holdfast.text.tools import NAME, Tool

Tell = Callable[[str], None]


class CallReader(Protocol):
    """One call. `read` takes text from a place on, up to a limit, and says how far."""

    is_certain: bool
    """It is a call, and was told."""
    is_done: bool
    """Its arguments are whole, and nothing of it is still to come."""
    is_broken: bool
    """It is none, or its arguments are not what they began as."""

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read on; stops where the call is done or broken, else at the limit or before half a tag there."""
        ...


class JsonCall:
    """{"name": ..., "arguments": {...}}, in any order; `parameters` means the same."""

    def __init__(self, index: int, tools: Mapping[str, Tool] | None, tell: Tell, is_marked: bool) -> None:
        self.is_certain = self.is_done = self.is_broken = False
        self._index = index
        self._tools = tools
        self._tell = tell
        self._is_marked = is_marked
        """A marker says that this is a call; else only its form does, which an answer in JSON may share."""
        self._scanner = JsonScanner()
        self._key = ""
        self._name: str | None = None
        self._captured: list[str] = []
        """A key with what stands before it, or a value."""
        self._arguments: list[str] = []
        self._has_arguments = False
        self._in_arguments = False
        """Between the braces of an arguments object."""

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read on."""
        while True:
            end, found = self._scanner.scan(text, place, limit)
            piece = text[place:end]
            if found is Found.CONTROL:
                # The value is what the model meant; bare, it would be no JSON.
                piece = piece[:-1] + json.dumps(piece[-1])[1:-1]
            self._keep(piece, out)
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
            if self._name is not None or NAME.fullmatch(name) is None or not self._is_known(name):
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

    def _is_known(self, name: str) -> bool:
        if self._tools is None or name in self._tools:
            return True
        self._tell(f"{shown(name)} is called, which is no tool of the request")
        return self._is_marked

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
        # A brace that is missing at the end costs nothing.
        self.is_done = self.is_certain and not self._in_arguments
        self.is_broken = not self.is_done


KEY = re.compile(r"[^<>\s](?:[^<>\n]{0,254}[^<>\s])?")
"""Names of parameters that a tag can hold."""
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?")
_FUNCTION_START, _PARAMETER_START = "<function=", "<parameter="
_VALUE_END, _FUNCTION_END = "</parameter>", "</function>"
MAX_TAG_CHARS = 512
"""White space before it included."""
MAX_VALUE_CHARS = 2**16
"""Of a value that is no text, which is held until it is whole."""
_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlCall:
    """<function=name><parameter=key>value</parameter></function>; arguments come out as a JSON object."""

    def __init__(self, index: int, tools: Mapping[str, Tool] | None, tell: Tell) -> None:
        self.is_certain = self.is_done = self.is_broken = False
        self._index = index
        self._tools = tools
        self._tell = tell
        self._properties: Mapping[str, object] = {}
        self._seen: set[str] = set()
        self._in_value = False
        self._is_text = False
        self._value: list[str] = []
        self._num_value = 0

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read on; half a tag at the end is left for the next time."""
        while place < limit and not (self.is_done or self.is_broken):
            start, was_value = place, self._in_value
            place = self._value_text(text, place, limit, out) if was_value else self._tag(text, place, limit, out)
            if place == start and self._in_value == was_value:
                break
        return place

    def _tag(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        rest = text[place : min(limit, place + MAX_TAG_CHARS)]
        bare = rest.lstrip()
        match = (_PARAMETER if self.is_certain else _FUNCTION).match(rest)
        if match is not None and not self.is_certain:
            self._begin_call(match[1].strip(), out)
            return place if self.is_broken else place + match.end()
        # A line break behind the tag is the tag's, and may be still to come.
        if match is not None and (match.end() < len(rest) or rest.endswith("\n")):
            self._begin_value(match[1].strip(), out)
            return place + match.end()
        if self.is_certain and bare.startswith(_FUNCTION_END):
            self._close(out)
            return place + len(rest) - len(bare) + len(_FUNCTION_END)
        start = _PARAMETER_START if self.is_certain else _FUNCTION_START
        may_go_on = _may_become(bare, start) or (self.is_certain and _FUNCTION_END.startswith(bare))
        if may_go_on and len(rest) < MAX_TAG_CHARS:
            return place
        if self.is_certain:
            self._tell(f"call {self._index} has something else where a parameter or its end is due")
            self._close(out)
        self.is_broken = not self.is_certain
        return place

    def _begin_call(self, name: str, out: DeltaList) -> None:
        if NAME.fullmatch(name) is None:
            self.is_broken = True
            return
        tool = None if self._tools is None else self._tools.get(name)
        if self._tools is not None and tool is None:
            self._tell(f"{shown(name)} is called, which is no tool of the request")
        properties = (tool.parameters or {}).get("properties") if tool is not None else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self.is_certain = True
        out.begin_call(self._index, name)
        out.add(self._index, "{")

    def _begin_value(self, key: str, out: DeltaList) -> None:
        if key in self._seen:
            self._tell(f"call {self._index} has the parameter {shown(key)} twice")
        out.add(self._index, f"{', ' if self._seen else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._seen.add(key)
        self._in_value, self._is_text = True, self._is_text_parameter(key)
        self._value, self._num_value = [], 0
        if self._is_text:
            out.add(self._index, '"')

    def _is_text_parameter(self, key: str) -> bool:
        schema = self._properties.get(key)
        if not isinstance(schema, Mapping):
            return True
        return schema.get("type") == "string"

    def _value_text(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        found = text.find(_VALUE_END, place, limit)
        if found < 0:
            # A line break before the closing tag is the tag's.
            rest = text[place:limit]
            num_kept = max(partial_end(rest, f"\n{_VALUE_END}"), partial_end(rest, _VALUE_END))
            self._add_value(rest[: len(rest) - num_kept], out)
            return limit - num_kept
        self._add_value(text[place:found].removesuffix("\n"), out)
        self._in_value = False
        out.add(self._index, '"' if self._is_text else _as_json("".join(self._value)))
        self._value = []
        return found + len(_VALUE_END)

    def _add_value(self, piece: str, out: DeltaList) -> None:
        if self._is_text:
            out.add(self._index, json.dumps(piece, ensure_ascii=False)[1:-1])
            return
        room = MAX_VALUE_CHARS - self._num_value
        self._value.append(piece[:room])
        self._num_value += len(piece[:room])
        if len(piece) > room:
            # Too long to be held until it is whole: a text after all.
            self._is_text = True
            out.add(self._index, '"' + json.dumps("".join(self._value) + piece[room:], ensure_ascii=False)[1:-1])
            self._value = []

    def _close(self, out: DeltaList) -> None:
        out.add(self._index, "}")
        self.is_done = True


def _may_become(text: str, start: str) -> bool:
    """Whether a text that is no tag yet may become one that starts so."""
    if len(text) <= len(start):
        return start.startswith(text)
    return text.startswith(start) and "<" not in text[1:] and ">" not in text[:-1]


def _as_json(value: str) -> str:
    """A value as JSON where it is written as JSON, or as Python writes it; else as a text."""
    bare = value.strip()
    bare = _WORDS.get(bare, bare)
    try:
        if is_object(f'{{"":{bare}}}'):
            json.loads(bare)
            return bare
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _decoded(text: str) -> str:
    """The string that a JSON string means; the scanner has found it sound."""
    return str(json.loads(text, strict=False))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

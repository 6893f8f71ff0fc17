"""TagCall reads one tool call with name and parameters in tags: Qwen3-Coder, GLM, DeepSeek's DSML; no torch.

Arguments become one JSON object. Its tag or the tool's schema says if a parameter is text or JSON.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import shown
from holdfast.text.answer_deltas import DeltaList, partial_end
from holdfast.text.call_readers import CallContext, CallReader
from holdfast.text.json_scanner import is_object
from holdfast.text.tools import NAME

KEY = re.compile(r"[^<>\s](?:[^<>\n]{0,254}[^<>\s])?")
"""Names of parameters that a tag can hold."""
MAX_TAG_CHARS = 512
"""Longest tag, with the white space before it."""
MAX_VALUE_CHARS = 2**16
"""Longest non-text value, which is held back until complete."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class TagPattern:
    """A tag as alternating literals and regular expressions; also matches its prefixes."""

    def __init__(self, *parts: str) -> None:
        units: list[str] = []
        for number, part in enumerate(parts):
            units += [part] if number % 2 else map(re.escape, part)
        self._whole = re.compile("".join(units))
        begun = ""
        for unit in reversed(units):
            begun = f"(?:{unit}{begun})?"
        self._begun = re.compile(begun)

    def match(self, text: str) -> re.Match[str] | None:
        """Match a whole tag at the start of a text."""
        return self._whole.match(text)

    def may_become(self, text: str) -> bool:
        """Return True if more characters can complete this text into a tag."""
        return self._begun.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """The tags of a family of models. The first group of a pattern is a name."""

    heads: tuple[TagPattern, ...]
    """Alternatives of the text before the parameters."""
    parameter: TagPattern
    """A second group is "true" for a text value; without one, the tool's schema decides."""
    value_end: str
    call_end: str
    written_head: str
    written_parameter: str
    """For a forced call: the text before the parameters, with {name}; before a value, with {key} and {is_text}."""
    written_line: str = ""
    """For a forced call: the text after the head, after each parameter and before the end of the call."""
    are_lines_optional: bool = False
    """True if forced calls may omit their line breaks."""
    trims_lines: bool = False
    """True if a line break beside a value belongs to its tags."""
    is_name_bare: bool = False
    """True if a head is the bare name, up to another tag. Without parameters, it must name a known tool."""


class TagCall(CallReader[TagSyntax]):
    """Reads a name and parameters in tags; arguments become a JSON object."""

    def __init__(self, syntax: TagSyntax, call: CallContext) -> None:
        super().__init__(syntax, call)
        self._properties: Mapping[str, object] = {}
        self._seen: set[str] = set()
        self._in_value = False
        self._is_text = False
        self._value: list[str] = []
        self._num_value = 0

    def read(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        """Read from `place`; a partial tag at the end waits for the next piece."""
        while place < limit and not (self.is_done or self.is_broken):
            start, was = place, (self.is_certain, self._in_value)
            step = self._value_text if self._in_value else self._tag if self.is_certain else self._head
            place = step(text, place, limit, out)
            if place == start and was == (self.is_certain, self._in_value):
                break
        return place

    def _head(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        rest = text[place : min(limit, place + MAX_TAG_CHARS)]
        bare = rest.lstrip()
        for pattern in self._syntax.heads:
            match = pattern.match(bare)
            if match is not None:
                is_bare = self._syntax.is_name_bare
                self._begin_call(match[1].strip(), is_bare and match[0].endswith(self._syntax.call_end), out)
                used = match.end(1) if is_bare else match.end()
                return place if self.is_broken else place + len(rest) - len(bare) + used
        may_go_on = any(pattern.may_become(bare) for pattern in self._syntax.heads)
        self.is_broken = not may_go_on or len(rest) >= MAX_TAG_CHARS
        return place

    def _begin_call(self, name: str, must_be_known: bool, out: DeltaList) -> None:
        is_unknown = NAME.fullmatch(name) is None or self.is_unknown(name)
        if NAME.fullmatch(name) is None or (is_unknown and must_be_known):
            self.is_broken = True
            return
        tool = None if self._tools is None else self._tools.get(name)
        properties = (tool.parameters or {}).get("properties") if tool is not None else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self.is_certain = True
        out.begin_call(self._index, name)
        out.add(self._index, "{")

    def _tag(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        rest = text[place : min(limit, place + MAX_TAG_CHARS)]
        bare = rest.lstrip()
        begin = place + len(rest) - len(bare)
        match = self._syntax.parameter.match(bare)
        # A line break after the tag may belong to it, and may still come.
        if match is not None and (not self._syntax.trims_lines or match.end() < len(bare)):
            self._begin_value(match, out)
            end = begin + match.end()
            return end + (self._syntax.trims_lines and text[end] == "\n")
        if bare.startswith(self._syntax.call_end):
            self._close(out)
            return begin + len(self._syntax.call_end)
        may_go_on = match is not None or self._syntax.parameter.may_become(bare)
        if (may_go_on or self._syntax.call_end.startswith(bare)) and len(rest) < MAX_TAG_CHARS:
            return place
        self._report(f"call {self._index} has another text in the place of a parameter or its end")
        self._close(out)
        return place

    def _begin_value(self, match: re.Match[str], out: DeltaList) -> None:
        key = match[1].strip()
        if key in self._seen:
            self._report(f"call {self._index} has the parameter {shown(key)} twice")
        out.add(self._index, f"{', ' if self._seen else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._seen.add(key)
        by_tag = match.re.groups > 1
        self._in_value, self._is_text = True, match[2] == "true" if by_tag else self._is_text_parameter(key)
        self._value, self._num_value = [], 0
        if self._is_text:
            out.add(self._index, '"')

    def _is_text_parameter(self, key: str) -> bool:
        schema = self._properties.get(key)
        if not isinstance(schema, Mapping):
            return True
        return schema.get("type") == "string"

    def _value_text(self, text: str, place: int, limit: int, out: DeltaList) -> int:
        ending, trims = self._syntax.value_end, self._syntax.trims_lines
        found = text.find(ending, place, limit)
        if found < 0:
            rest = text[place:limit]
            num_kept = max(partial_end(rest, f"\n{ending}") if trims else 0, partial_end(rest, ending))
            self._add_value(rest[: len(rest) - num_kept], out)
            return limit - num_kept
        value = text[place:found]
        self._add_value(value.removesuffix("\n") if trims else value, out)
        self._in_value = False
        out.add(self._index, '"' if self._is_text else as_json("".join(self._value)))
        self._value = []
        return found + len(ending)

    def _add_value(self, piece: str, out: DeltaList) -> None:
        if self._is_text:
            out.add(self._index, json.dumps(piece, ensure_ascii=False)[1:-1])
            return
        left = MAX_VALUE_CHARS - self._num_value
        self._value.append(piece[:left])
        self._num_value += len(piece[:left])
        if len(piece) > left:
            # Too long to hold back until complete: it becomes text.
            self._is_text = True
            out.add(self._index, '"' + json.dumps("".join(self._value) + piece[left:], ensure_ascii=False)[1:-1])
            self._value = []

    def _close(self, out: DeltaList) -> None:
        out.add(self._index, "}")
        self.is_done = True


def as_json(value: str) -> str:
    """Convert a value to JSON: keep JSON, map Python's constants, quote anything else as a string."""
    bare = value.strip()
    bare = _CONSTANTS.get(bare, bare)
    try:
        if is_object(f'{{"":{bare}}}'):
            json.loads(bare)
            return bare
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)

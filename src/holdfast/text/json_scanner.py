"""JsonScanner reads one JSON object in pieces and reports where members begin and end; no torch.

Each character is read once, and the result does not depend on how the text is split. Invalid JSON is found at its first
wrong character. Only control characters in strings, which models write, are reported and accepted.
"""

import re
from collections.abc import Collection, Generator
from enum import Enum, auto

MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_FIRST = frozenset('{["tfn-0123456789')
"""First characters of values."""

_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "zero", "1": "whole"},
    "zero": {".": ".", "e": "e"},
    "whole": {"0": "whole", "1": "whole", ".": ".", "e": "e"},
    ".": {"0": "part", "1": "part"},
    "part": {"0": "part", "1": "part", "e": "e"},
    "e": {"0": "power", "1": "power", "-": "sign", "+": "sign"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
"""Transitions inside a number; 1 stands for 1 to 9, e for E."""
_WHOLE_NUMBERS = frozenset({"zero", "whole", "part", "power"})
_DIGIT_KINDS = {**dict.fromkeys("123456789", "1"), "0": "0", "E": "e", "e": "e", ".": ".", "-": "-", "+": "+"}


class Found(Enum):
    """Event at which a scan stopped; members give the position."""

    MORE = auto()
    """At the end of the piece."""
    KEY = auto()
    """After a key of the outermost object."""
    VALUE = auto()
    """Before the first character of a member's value."""
    VALUE_END = auto()
    """After the value."""
    CONTROL = auto()
    """After an unescaped control character in a string."""
    END = auto()
    """After the object."""
    BROKEN = auto()
    """Before the wrong character."""


Steps = Generator[Found, None, None]
"""Reads and yields events; resumes when there is more text."""


class _BrokenError(Exception):
    """The next character is wrong."""


class JsonScanner:
    """Scans one object. `scan` continues to the next event; the caller keeps the position."""

    def __init__(self) -> None:
        self._text, self._place, self._limit = "", 0, 0
        self._events = self._whole()

    def scan(self, text: str, place: int, limit: int) -> tuple[int, Found]:
        """Read from `place` up to `limit`; return the new place and the event there."""
        self._text, self._place, self._limit = text, place, limit
        found = next(self._events)
        return self._place, found

    def _whole(self) -> Steps:
        last = Found.END
        try:
            yield from self._take("{")
            yield from self._object(1)
        except _BrokenError:
            last = Found.BROKEN
        while True:
            yield last

    def _peek(self, skips_space: bool = True) -> Generator[Found, None, str]:
        """Return the next character without reading it."""
        while True:
            if skips_space:
                self._skip(_SPACE)
            if self._place < self._limit:
                return self._text[self._place]
            yield Found.MORE

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._place, self._limit)
        self._place = self._place if match is None else match.end()

    def _take(self, accepted: Collection[str], skips_space: bool = True) -> Generator[Found, None, str]:
        """Read one character, which must be one of these."""
        character = yield from self._peek(skips_space)
        if character not in accepted:
            raise _BrokenError
        self._place += 1
        return character

    def _object(self, depth: int) -> Steps:
        character = yield from self._take('"}')
        while character != "}":
            yield from self._string()
            if depth == 1:
                yield Found.KEY
            yield from self._take(":")
            yield from self._value(depth)
            character = yield from self._take(",}")
            if character == ",":
                yield from self._take('"')

    def _array(self, depth: int) -> Steps:
        if (yield from self._peek()) == "]":
            self._place += 1
            return
        character = ","
        while character == ",":
            yield from self._value(depth)
            character = yield from self._take(",]")

    def _value(self, depth: int) -> Steps:
        character = yield from self._peek()
        if depth == 1:
            yield Found.VALUE
        is_open = character in "{["
        if character not in _FIRST or (is_open and depth == MAX_DEPTH):
            raise _BrokenError
        self._place += 1
        if is_open:
            yield from self._object(depth + 1) if character == "{" else self._array(depth + 1)
        elif character == '"':
            yield from self._string()
        elif character in _LITERALS:
            for wanted in _LITERALS[character]:
                yield from self._take(wanted, skips_space=False)
        else:
            yield from self._number({"-": "-", "0": "zero"}.get(character, "whole"))
        if depth == 1:
            yield Found.VALUE_END

    def _number(self, state: str) -> Steps:
        """Read the rest of a number; the character after it ends it."""
        while following := _NUMBER[state].get(_DIGIT_KINDS.get((yield from self._peek(skips_space=False)), "")):
            self._place += 1
            state = following
        if state not in _WHOLE_NUMBERS:
            raise _BrokenError

    def _string(self) -> Steps:
        """Read the rest of a string."""
        while True:
            self._skip(_PLAIN)
            if self._place == self._limit:
                yield Found.MORE
                continue
            character = self._text[self._place]
            self._place += 1
            if character == '"':
                return
            if character != "\\":
                yield Found.CONTROL
            elif (yield from self._take('"\\/bfnrtu', skips_space=False)) == "u":
                for _ in range(4):
                    yield from self._take(_HEX_DIGITS, skips_space=False)


def is_object(text: str) -> bool:
    """Return True if the text is exactly one JSON object."""
    scanner, place, found = JsonScanner(), 0, Found.VALUE
    while found not in (Found.MORE, Found.CONTROL, Found.END, Found.BROKEN):
        place, found = scanner.scan(text, place, len(text))
    return found is Found.END and not text[place:].strip(" \t\n\r")

"""JsonScanner: reads one JSON object in pieces, and reports where its members begin and end; no torch.

Each character is read once, in a state that does not depend on how the text is cut. Invalid JSON is found at its first wrong
character; only control characters in strings, which models write, are reported and accepted.
"""

import re
from enum import Enum, auto

MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

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
    """Where a scan stopped."""

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


class _State(Enum):
    START = auto()
    VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    FIRST_ITEM = auto()
    COLON = auto()
    NEXT = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()
    END = auto()
    BROKEN = auto()


_TIGHT = frozenset({_State.STRING, _State.ESCAPE, _State.HEX, _State.LITERAL, _State.NUMBER})
"""States in which white space counts."""


class JsonScanner:
    """Scans one object. `scan` continues to the next event; its caller keeps the place."""

    def __init__(self) -> None:
        self._state = _State.START
        self._brackets: list[str] = []
        self._is_key = False
        self._rest = ""
        self._number = ""
        self._num_hex = 0
        self._has_reported_value = False

    def scan(self, text: str, place: int, limit: int) -> tuple[int, Found]:
        """Read from `place` up to `limit`; return the new place and the event there."""
        while True:
            if self._state not in _TIGHT and self._state is not _State.END:
                match = _SPACE.match(text, place, limit)
                place = place if match is None else match.end()
            if self._state is _State.END:
                return place, Found.END
            if self._state is _State.BROKEN:
                return place, Found.BROKEN
            if place == limit:
                return place, Found.MORE
            place, found = self._read(text, place, limit)
            if found is not None:
                return place, found

    def _read(self, text: str, place: int, limit: int) -> tuple[int, Found | None]:
        match self._state:
            case _State.STRING:
                return self._string(text, place, limit)
            case _State.VALUE | _State.FIRST_ITEM:
                return self._value(text, place)
            case _State.NUMBER:
                return self._in_number(text, place)
            case _:
                return self._sign(text[place], place)

    def _string(self, text: str, place: int, limit: int) -> tuple[int, Found | None]:
        match = _PLAIN.match(text, place, limit)
        place = place if match is None else match.end()
        if place == limit:
            return place, None
        character = text[place]
        if character == "\\":
            self._state = _State.ESCAPE
        elif character != '"':
            return place + 1, Found.CONTROL
        elif self._is_key:
            self._is_key, self._state = False, _State.COLON
            return place + 1, Found.KEY if len(self._brackets) == 1 else None
        else:
            return place + 1, self._end_value()
        return place + 1, None

    def _value(self, text: str, place: int) -> tuple[int, Found | None]:
        character = text[place]
        if len(self._brackets) == 1 and not self._has_reported_value:
            self._has_reported_value = True
            return place, Found.VALUE
        if character == "]" and self._state is _State.FIRST_ITEM:
            return self._close(character, place)
        if character in "{[":
            return self._open(character, place)
        if character == '"':
            self._state = _State.STRING
        elif character in _LITERALS:
            self._rest, self._state = _LITERALS[character], _State.LITERAL
        elif character == "-" or character in "0123456789":
            self._number = {"-": "-", "0": "zero"}.get(character, "whole")
            self._state = _State.NUMBER
        else:
            return self._break(place)
        return place + 1, None

    def _in_number(self, text: str, place: int) -> tuple[int, Found | None]:
        kind = _DIGIT_KINDS.get(text[place], "")
        following = _NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return place + 1, None
        return (place, self._end_value()) if self._number in _WHOLE_NUMBERS else self._break(place)

    def _sign(self, character: str, place: int) -> tuple[int, Found | None]:
        """Handle states in which one character decides."""
        state = self._state
        if state is _State.ESCAPE and (character in '"\\/bfnrt' or character == "u"):
            self._state, self._num_hex = (_State.HEX, 4) if character == "u" else (_State.STRING, 0)
        elif state is _State.HEX and character in _HEX_DIGITS:
            self._num_hex -= 1
            self._state = _State.HEX if self._num_hex else _State.STRING
        elif state is _State.LITERAL and self._rest.startswith(character):
            self._rest = self._rest[1:]
            return place + 1, None if self._rest else self._end_value()
        elif state in (_State.FIRST_KEY, _State.KEY) and character == '"':
            self._is_key, self._state = True, _State.STRING
        elif state is _State.COLON and character == ":":
            self._state = _State.VALUE
        elif state is _State.NEXT and character == ",":
            self._state = _State.KEY if self._brackets[-1] == "{" else _State.VALUE
        elif state in (_State.NEXT, _State.FIRST_KEY) and character in "}]":
            return self._close(character, place)
        elif state is _State.START and character == "{":
            return self._open(character, place)
        else:
            return self._break(place)
        return place + 1, None

    def _open(self, bracket: str, place: int) -> tuple[int, Found | None]:
        if len(self._brackets) == MAX_DEPTH:
            return self._break(place)
        self._brackets.append(bracket)
        self._state = _State.FIRST_KEY if bracket == "{" else _State.FIRST_ITEM
        return place + 1, None

    def _close(self, bracket: str, place: int) -> tuple[int, Found | None]:
        if self._brackets[-1] != {"}": "{", "]": "["}[bracket]:
            return self._break(place)
        self._brackets.pop()
        if not self._brackets:
            self._state = _State.END
            return place + 1, Found.END
        return place + 1, self._end_value()

    def _end_value(self) -> Found | None:
        self._state = _State.NEXT
        if len(self._brackets) > 1:
            return None
        self._has_reported_value = False
        return Found.VALUE_END

    def _break(self, place: int) -> tuple[int, Found]:
        self._state = _State.BROKEN
        return place, Found.BROKEN


def is_object(text: str) -> bool:
    """Return True if the text is exactly one JSON object."""
    scanner, place, found = JsonScanner(), 0, Found.VALUE
    while found not in (Found.MORE, Found.CONTROL, Found.END, Found.BROKEN):
        place, found = scanner.scan(text, place, len(text))
    return found is Found.END and not text[place:].strip(" \t\n\r")

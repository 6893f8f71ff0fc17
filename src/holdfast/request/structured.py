"""StructuredOutputs: the grammar of an answer: a JSON schema, a regex, a Lark grammar or one of some texts; no torch.

The constructor checks sizes in time proportional to them: bytes, depth, properties, values. Compilation
(text/grammar.py) shows whether an answer exists, before the request costs anything else.
"""

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import ClassVar

from holdfast.errors import RequestError
from holdfast.request.vllm_names import STRUCTURED_NAMES, with_vllm_names

MAX_SCHEMA_BYTES = 2**16
MAX_SCHEMA_DEPTH = 64
MAX_OBJECT_ENTRIES = 512
"""Most entries of one object, such as properties: every step checks what may follow each."""
MAX_SCHEMA_ENTRIES = 4096
"""Most entries of all objects together."""
MAX_SCHEMA_VALUES = 4096
"""Most entries of all lists together."""
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_BYTES = 2**16
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
"""Most characters of all choices, which become one expression."""
_NAME = "structured_outputs"
_OPTIONS = ("json", "regex", "choice", "grammar", "json_object")


@with_vllm_names(STRUCTURED_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Grammar of an answer, by exactly one field. vLLM calls it StructuredOutputsParams."""

    FIELDS: ClassVar[tuple[str, ...]] = _OPTIONS

    json: str | Mapping[str, object] | None = None
    """A JSON schema; a dict is kept as text. Answers have its properties in this order."""
    regex: str | None = None
    """A regular expression for the whole answer, in Rust syntax: no look-around, no back-references."""
    choice: SequenceABC[str] | None = None
    """The answer is one of these; kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in Lark syntax with the rule `start`, or in llama.cpp's GBNF with `root`."""
    json_object: bool = False
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is None:  # vLLM's default
            object.__setattr__(self, "json_object", False)
        if not isinstance(self.json_object, bool):
            raise RequestError("value.not_bool", name=f"{_NAME}.json_object", value=self.json_object)
        given = self._given()
        if len(given) != 1:
            given_text = " and ".join(given) or "none of them"
            raise RequestError("request.no_grammar", name=_NAME, accepted=_OPTIONS, given=given_text)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    def _given(self) -> list[str]:
        return [name for name in _OPTIONS if getattr(self, name) not in (None, False)]

    @property
    def kind(self) -> str:
        """The field that is set."""
        return self._given()[0]

    @classmethod
    def of(cls, value: object) -> "StructuredOutputs":
        """Accept an instance or a dict of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError("request.not_grammar", name=_NAME, value=value)
        unknown = [name for name in value if name not in _OPTIONS]
        if unknown:
            raise RequestError("request.grammar_field", name=_NAME, field=unknown[0], accepted=_OPTIONS)
        return cls(**value)


def _check_text(field: str, text: object, most_bytes: int) -> None:
    name = f"{_NAME}.{field}"
    if not isinstance(text, str) or not text:
        raise RequestError("request.grammar_text", name=name, value=text)
    if len(text) > most_bytes or not _is_utf8(text, most_bytes):
        raise RequestError("request.grammar_too_long", name=name, count=len(text), maximum=most_bytes)
    if "\x00" in text:
        raise RequestError("request.grammar_nul", name=name)


def _is_utf8(text: str, most_bytes: int) -> bool:
    try:
        return len(text.encode()) <= most_bytes
    except UnicodeEncodeError:
        return False


def _choices(choices: object) -> tuple[str, ...]:
    name = f"{_NAME}.choice"
    wrong = RequestError("request.choices", name=name, value=choices, maximum=MAX_CHOICES)
    if not isinstance(choices, SequenceABC) or isinstance(choices, str | bytes) or not 1 <= len(choices) <= MAX_CHOICES:
        raise wrong
    if not all(isinstance(text, str) and text for text in choices):
        raise wrong
    num_chars = sum(map(len, choices))
    if num_chars > MAX_CHOICE_CHARS:
        raise RequestError("request.too_long", name=name, count=num_chars, maximum=MAX_CHOICE_CHARS)
    for text in choices:
        _check_text("choice", text, 4 * MAX_CHOICE_CHARS)
    return tuple(dict.fromkeys(choices))


def _schema_text(schema: object) -> str:
    """Return a schema as JSON. Its size is checked before anything of that size is allocated."""
    value = schema
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise _too_large(f"{len(schema)} characters", f"{MAX_SCHEMA_BYTES} bytes")
        try:
            value = json.loads(schema, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
            raise RequestError("request.schema_not_json", name=f"{_NAME}.json", value=schema, reason=reason) from error
    if value is True and not isinstance(schema, bool):
        return "{}"  # equivalent: any JSON
    if not isinstance(value, dict):
        raise RequestError("request.schema_not_object", name=f"{_NAME}.json", value=schema)
    _check_schema(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not _is_utf8(text, MAX_SCHEMA_BYTES):
        raise _too_large(f"{len(text)} characters", f"{MAX_SCHEMA_BYTES} bytes of valid Unicode")
    return text


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _too_large(has: str, maximum: str) -> RequestError:
    return RequestError("request.schema_too_large", name=f"{_NAME}.json", has=has, maximum=maximum)


def _check_schema(schema: object) -> None:
    """Check depth and counts without recursion; the depth bounds a dict that contains itself."""
    num_entries = num_values = num_chars = 0
    open_values: list[tuple[object, int]] = [(schema, 1)]
    while open_values:
        value, depth = open_values.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_large(f"more than {MAX_SCHEMA_DEPTH} levels", f"{MAX_SCHEMA_DEPTH} levels")
        inner = ()
        if isinstance(value, dict):
            if len(value) > MAX_OBJECT_ENTRIES:
                raise _too_large(f"{len(value)} entries of one object", str(MAX_OBJECT_ENTRIES))
            num_entries += len(value)
            if not all(isinstance(name, str) for name in value):
                raise _wrong_value(value, "Names in JSON are strings")
            num_chars += sum(map(len, value))
            inner = value.values()
        elif isinstance(value, list | tuple):
            num_values += len(value)
            inner = value
        else:
            num_chars += _scalar_chars(value)
        for count, most, what in (
            (num_entries, MAX_SCHEMA_ENTRIES, "entries of objects"),
            (num_values, MAX_SCHEMA_VALUES, "entries of lists"),
            (num_chars, MAX_SCHEMA_BYTES, "characters"),
        ):
            if count > most:
                raise _too_large(f"{count} {what}", str(most))
        open_values += ((one, depth + 1) for one in inner)


def _wrong_value(value: object, reason: str) -> RequestError:
    return RequestError("request.schema_value", name=f"{_NAME}.json", value=value, reason=reason)


def _scalar_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if value is not None and not isinstance(value, int | float):
        raise _wrong_value(value, "JSON has objects, lists, strings, numbers, true, false and null")
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong_value(value, "Numbers in JSON are finite")
    if isinstance(value, int) and value.bit_length() > 64 * 8:
        raise _wrong_value("a number", "It has more than 150 digits")
    return 8

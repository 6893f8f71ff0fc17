"""StructuredOutputs: the form that an answer must have: a JSON schema, a regex, a grammar or one of some texts; no torch.

Checked at once and in a time that follows from its size alone: bytes, depth, properties, values. Whether the form can be
met at all only shows when it is compiled (text/grammar.py), before the request costs anything else.
"""

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, fields
from typing import ClassVar, NoReturn

from holdfast.errors import RequestError, shown
from holdfast.request.vllm_names import STRUCTURED_NAMES, with_vllm_names

MAX_SCHEMA_BYTES = 2**16
MAX_SCHEMA_DEPTH = 64
MAX_OBJECT_ENTRIES = 512
"""Of one object, such as its properties: what may follow each of them is looked at in every step."""
MAX_SCHEMA_ENTRIES = 4096
"""Of all objects together: properties, and the keywords that describe them."""
MAX_SCHEMA_VALUES = 4096
"""Entries of all lists together: values of an enum, names that are required."""
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_BYTES = 2**16
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
"""Of all choices together: they become one expression."""
_OPTIONS = ("json", "regex", "choice", "grammar", "json_object")


@with_vllm_names(STRUCTURED_NAMES)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer, by exactly one of the fields. vLLM's name for it is StructuredOutputsParams."""

    FIELDS: ClassVar[tuple[str, ...]] = _OPTIONS

    json: str | Mapping[str, object] | None = None
    """A JSON schema; a dict is kept as text. Properties come out in the order in which it lists them."""
    regex: str | None = None
    """A regular expression that the whole answer matches, in the syntax of Rust: no look-around, no back-references."""
    choice: SequenceABC[str] | None = None
    """The answer is one of these; kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, whose first rule is `start`; or in llama.cpp's (GBNF), where it is `root`."""
    json_object: bool = False
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is None:  # vLLM's default
            object.__setattr__(self, "json_object", False)
        if not isinstance(self.json_object, bool):
            _refuse("json_object", self.json_object, "it is a switch", "pass True or False")
        given = [name for name in _OPTIONS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            words = " and ".join(given) if given else "none of them"
            raise RequestError(
                f"structured_outputs with {words} was asked",
                f"an answer has one form: {', '.join(_OPTIONS)}",
                "name one of them",
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The one field that is given."""
        return next(name for name in _OPTIONS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, value: object) -> "StructuredOutputs":
        """The same from a dict of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs={shown(value)} was asked",
                "StructuredOutputs works, or a dict of its fields",
                'write StructuredOutputs(json={"type": "object"})',
            )
        unknown = [name for name in value if name not in _OPTIONS]
        if unknown:
            raise RequestError(
                f"structured_outputs with {shown(unknown[0])} was asked",
                f"its fields are {', '.join(_OPTIONS)}",
                "name one of them",
            )
        return cls(**value)

    def as_dict(self) -> dict[str, object]:
        """What is given, for the wire."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value not in (None, False)}


def _refuse(name: str, value: object, has: str, do: str) -> NoReturn:
    raise RequestError(f"structured_outputs.{name}={shown(value)} was asked", has, do)


def _check_text(name: str, text: object, most_bytes: int) -> None:
    if not isinstance(text, str) or not text:
        _refuse(name, text, "a text that is not empty works", "pass a string")
    if len(text) > most_bytes or not _is_utf8(text, most_bytes):
        _refuse(
            name,
            text,
            f"valid Unicode of at most {most_bytes} bytes works, it has {len(text)} characters",
            "shorten it",
        )
    if "\x00" in text:
        _refuse(name, text, "it holds a NUL character", "remove it")


def _is_utf8(text: str, most_bytes: int) -> bool:
    try:
        return len(text.encode()) <= most_bytes
    except UnicodeEncodeError:
        return False


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, SequenceABC) or isinstance(choices, str | bytes) or not 1 <= len(choices) <= MAX_CHOICES:
        _refuse("choice", choices, f"a list of 1 to {MAX_CHOICES} texts works", 'pass ["yes", "no"]')
    if not all(isinstance(text, str) and text for text in choices):
        _refuse("choice", choices, "texts that are not empty work", 'pass ["yes", "no"]')
    num_chars = sum(map(len, choices))
    if num_chars > MAX_CHOICE_CHARS:
        _refuse(
            "choice", choices, f"they have {num_chars} characters, and at most {MAX_CHOICE_CHARS} work", "shorten them"
        )
    for text in choices:
        _check_text("choice", text, 4 * MAX_CHOICE_CHARS)
    return tuple(dict.fromkeys(choices))


def _schema_text(schema: object) -> str:
    """A schema as JSON, found small enough; it is walked before anything of its size is made of it."""
    value = schema
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            _refuse_size("json", f"{len(schema)} characters", f"{MAX_SCHEMA_BYTES} bytes")
        try:
            value = json.loads(schema, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            words = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is no JSON ({error})"
            raise RequestError(f"structured_outputs.json={shown(schema)} was asked", words, "pass a schema") from error
    if value is True and not isinstance(schema, bool):
        return "{}"  # the same: any JSON
    if not isinstance(value, dict):
        _refuse("json", schema, "a schema is an object", 'pass {"type": "object", "properties": {...}}')
    _check_schema(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not _is_utf8(text, MAX_SCHEMA_BYTES):
        _refuse_size("json", f"{len(text)} characters", f"{MAX_SCHEMA_BYTES} bytes of valid Unicode")
    return text


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _refuse_size(name: str, has: str, most: str) -> NoReturn:
    raise RequestError(
        f"structured_outputs.{name} with {has} was asked", f"at most {most} work", "ask for a simpler form"
    )


def _check_schema(schema: object) -> None:
    """Depth and counts, without recursion; a dict that holds itself ends at the depth."""
    num_entries = num_values = num_chars = 0
    open_values: list[tuple[object, int]] = [(schema, 1)]
    while open_values:
        value, depth = open_values.pop()
        if depth > MAX_SCHEMA_DEPTH:
            _refuse_size("json", f"more than {MAX_SCHEMA_DEPTH} levels", f"{MAX_SCHEMA_DEPTH}")
        if isinstance(value, dict):
            if len(value) > MAX_OBJECT_ENTRIES:
                _refuse_size("json", f"{len(value)} entries of one object", f"{MAX_OBJECT_ENTRIES}")
            num_entries += len(value)
            if not all(isinstance(name, str) for name in value):
                _refuse("json", value, "names in JSON are texts", "change them")
            num_chars += sum(map(len, value))
            inner = value.values()
        elif isinstance(value, list | tuple):
            num_values += len(value)
            inner = value
        else:
            num_chars += _scalar_chars(value)
            inner = ()
        for count, most, words in (
            (num_entries, MAX_SCHEMA_ENTRIES, "entries of objects"),
            (num_values, MAX_SCHEMA_VALUES, "entries of lists"),
            (num_chars, MAX_SCHEMA_BYTES, "characters"),
        ):
            if count > most:
                _refuse_size("json", f"{count} {words}", f"{most}")
        open_values += ((one, depth + 1) for one in inner)


def _scalar_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if value is not None and not isinstance(value, int | float):
        _refuse("json", value, "JSON has objects, lists, texts, numbers, true, false and null", "change it")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse("json", value, "numbers in JSON are finite", "change it")
    if isinstance(value, int) and value.bit_length() > 64 * 8:
        _refuse("json", "a number", "it has more than 150 digits", "change it")
    return 8

"""GrammarGuard: grammars that compile and that do not, and a child that dies if one takes too long."""

import gc
import json
import os
import subprocess
import time

import pytest

from for_each import for_each
from holdfast.text.grammar_guard import GrammarGuard, ascii_classes, plain_error, try_out

pytest.importorskip("llguidance")
BOMB = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{length}}}b"} for length in range(1, 40)]})
"""Whether these can hold at once takes a time that doubles with every one of them."""


@pytest.fixture(scope="module")
def guard():
    guard = GrammarGuard(cpu_seconds=1)
    yield guard
    guard.close()


@for_each(
    "kind, text",
    [
        ("json", '{"type":"object"}'),
        ("json", '{"type":"string","pattern":"^[a-z]+$","maxLength":20}'),
        ("regex", r"\d{3}-\w+"),
        ("regex", "^abc$"),
        ("choice", '["a\\"b","é","x\\ny"]'),
        ("grammar", 'start: "a" start | "b"'),
        ("grammar", 'root ::= "a" | "b" root'),
    ],
)
def test_grammar_guard_accepts_compilable_grammars(guard, kind, text):
    assert guard.error(kind, text) is None
    assert try_out(kind, text) is None


@for_each("kind, text, words", [
        ("json", '{"type":"integer","minimum":5,"maximum":2}', "minimum (5) is greater than maximum (2)"),
        ("json", '{"type":"foo"}', "Invalid type: foo"),
        ("json", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json", '{"$ref":"http://example.com/x"}', "example.com"),
        ("json", '{"oneOf":[{"type":"object"},{"type":"object"}]}', "oneOf constraints are not supported. use anyOf"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a\\", "it ends in a backslash"),
        ("regex", "(" * 2000 + "a" + ")" * 2000, "invalid regex"),
        ("grammar", "start: (", "Expected token"),
        ("grammar", "root ::= (", "Expected ')'"),
        ("grammar", '{"grammars":[{"json_schema":{}}]}', "expecting rule"),
    ])  # fmt: skip
def test_grammar_guard_error_gives_the_reason_in_one_line(guard, kind, text, words):
    error = guard.error(kind, text)
    assert error is not None
    assert words in error
    assert len(error) <= 240
    assert "\n" not in error


def test_grammar_guard_recovers_after_an_endless_grammar(guard):
    began = time.monotonic()
    error = guard.error("json", BOMB)
    assert error == "it takes more than 1 seconds to compile, or too much memory"
    assert time.monotonic() - began < 12.0
    assert guard.error("json", '{"type":"object"}') is None


def test_grammar_guard_wall_time_bounds_the_wait():
    guard = GrammarGuard(cpu_seconds=60, wall_seconds=0.5)
    began = time.monotonic()
    assert guard.error("json", BOMB) is not None
    assert time.monotonic() - began < 5.0
    guard.close()


def test_grammar_guard_close_ends_its_child(monkeypatch):
    children = []

    class Watched(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    guard = GrammarGuard()
    assert guard.error("choice", '["a"]') is None
    guard.close()
    assert children[0].poll() is not None
    assert guard.error("choice", '["a"]') is None
    _, child = children
    del guard
    gc.collect()
    assert child.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@for_each(
    "regex, expected",
    [
        (r"\d+\w", "[0-9]+[0-9A-Za-z_]"),
        (r"\D\W", "[^0-9][^0-9A-Za-z_]"),
        (r"[\d_]\d", "[0-9_][0-9]"),
        (r"[^\w-]", "[^0-9A-Za-z_-]"),
        (r"\\d", r"\\d"),
        (r"[]\d]", "[]0-9]"),
        (r"[^]\d]\d", "[^]0-9][0-9]"),
        (r"[\]\d]", r"[\]0-9]"),
        (r"[\D]", r"[\D]"),
        (r"\s\.[a\\]", r"\s\.[a\\]"),
        ("", ""),
    ],
)
def test_ascii_classes_limit_digits_and_letters(regex, expected):
    assert ascii_classes(regex) == expected


def test_plain_error_is_one_short_line():
    assert plain_error("a\n  b\x00c<non-verbose/>\n   1 | the grammar") == "a b c"
    assert len(plain_error("x" * 999)) == 240


def test_plain_error_explains_a_self_reference():
    """The compiler's own word for {"$ref": "#"} and `start: start` means nothing to its author."""
    assert plain_error("NoExtensionBias") == "it refers to itself and to nothing else"

"""Answers with calls of tools in the formats that are read, the pieces they are cut into, and what comes of them."""

from itertools import pairwise
from typing import Protocol

from hypothesis import strategies as st

from holdfast.text.answer_deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta, joined
from holdfast.text.tools import parse_tools

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "tags": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["city"],
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)


class Parser(Protocol):
    """What reads an answer."""

    def feed(self, text: str) -> list[AnswerDelta]: ...

    def finish(self) -> list[AnswerDelta]: ...


def read(parser: Parser, pieces: list[str]) -> list[AnswerDelta]:
    """What a parser makes of an answer that comes in pieces."""
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


def in_short(deltas: list[AnswerDelta]) -> list[str | tuple[str, str]]:
    """Content as text, reasoning as a text after "?", calls as (name, arguments)."""
    found: list[str | tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            found.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            found.append(f"?{delta.text}")
        elif delta.name is not None:
            found.append((delta.name, delta.arguments))
        else:
            name, arguments = found.pop()
            found.append((name, arguments + delta.arguments))
    return found


def content_of(deltas: list[AnswerDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def calls_of(deltas: list[AnswerDelta]) -> list[tuple[str, str]]:
    return [call for call in in_short([d for d in deltas if isinstance(d, ToolCallDelta)]) if isinstance(call, tuple)]


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ordered = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ordered)]


CUTS = st.lists(st.integers(0, 10_000), max_size=40)

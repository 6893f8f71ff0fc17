"""Grammars of answers that begin with thoughts: any form of an answer, held to behind </think> alone; no torch."""

import json
import re

from holdfast.request.structured import StructuredOutputs
from holdfast.text.reasoning import CLOSING, OPENING, Thoughts


def with_thoughts(answer: str, thoughts: Thoughts) -> str:
    """The first rules of a grammar: an answer behind its thoughts."""
    if thoughts == "none":
        return f"start: {answer}"
    # Thoughts end at the first closing marker.
    rules = f"thoughts[suffix={lark_text(CLOSING)}]: /(?s:.*)/\nspace: /[ \\n]{{0,2}}/"
    if thoughts == "open":
        return f"start: thoughts space {answer}\n{rules}"
    return f"start: (opened thoughts space)? {answer}\nopened: {lark_text(OPENING)}\n{rules}"


def behind_thoughts(form: StructuredOutputs, thoughts: Thoughts) -> StructuredOutputs | None:
    """The same form for an answer that may begin with thoughts; None for a grammar, whose first rule is the caller's."""
    if thoughts == "none":
        return form
    if form.grammar is not None:
        return None
    return StructuredOutputs(grammar=f"{with_thoughts('answer', thoughts)}\nanswer: {_answer(form)}\n")


def _answer(form: StructuredOutputs) -> str:
    if form.choice is not None:
        return " | ".join(map(lark_text, form.choice))
    if form.regex is not None:
        # As one literal of Lark: its own slashes and line breaks are written as escapes.
        return f"/{re.sub(_ESCAPED, lambda match: _ESCAPES.get(match[0], match[0]), form.regex)}/"
    schema = str(form.json or _ANY_OBJECT)
    return f"%json {_SCHEMAS_OF_ONE_WORD.get(schema, schema)}"


_ANY_OBJECT = '{"type":"object"}'
_SCHEMAS_OF_ONE_WORD = {"true": "{}", "false": '{"not": {}}'}
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


def lark_text(text: str) -> str:
    """A literal; empty for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""

"""Grammars of answers that begin with thoughts: a structured output that starts after </think>; no torch.

Lark, as llguidance reads it. A marker that is a special token is named by its id.
"""

import json
import re
from collections.abc import Mapping

from holdfast.request.structured import StructuredOutputs
from holdfast.text.harmony import CHANNEL, END, MESSAGE, TURN
from holdfast.text.reasoning import CLOSING, OPENING, Thoughts

SpecialTokens = Mapping[str, int]
_NO_TOKENS: SpecialTokens = {}


def with_thoughts(answer: str, thoughts: Thoughts, special: SpecialTokens = _NO_TOKENS) -> str:
    """Return the first rules of a grammar: an answer after its thoughts."""
    if thoughts == "none":
        return f"start: {answer}"
    if thoughts == "channels":
        opened = lark_marked(f"{CHANNEL}analysis{MESSAGE}", special)
        rules = f"{lark_until('thoughts', END, special)}\nthought: {opened} thoughts {lark_marked(TURN, special)}"
        return f"start: thought? {answer}\n{rules}"
    # Thoughts end at the first closing marker.
    rules = f"{lark_until('thoughts', CLOSING, special)}\nspace: /[ \\n]{{0,2}}/"
    if thoughts == "open":
        return f"start: thoughts space {answer}\n{rules}"
    return f"start: (opened thoughts space)? {answer}\nopened: {lark_marked(OPENING, special)}\n{rules}"


def grammar_after_thoughts(
    form: StructuredOutputs, thoughts: Thoughts, special: SpecialTokens = _NO_TOKENS
) -> StructuredOutputs | None:
    """Return the structured output for an answer that may begin with thoughts; None for a grammar with its own first rule."""
    if thoughts == "none":
        return form
    if form.grammar is not None:
        return None
    head = f"{lark_marked(f'{CHANNEL}final{MESSAGE}', special)} " if thoughts == "channels" else ""
    return StructuredOutputs(grammar=f"{with_thoughts(f'{head}answer', thoughts, special)}\nanswer: {_answer(form)}\n")


def _answer(form: StructuredOutputs) -> str:
    if form.choice is not None:
        return " | ".join(map(lark_text, form.choice))
    if form.regex is not None:
        # One literal of Lark: slashes and line breaks become escapes.
        return f"/{re.sub(_ESCAPED, lambda match: _ESCAPES.get(match[0], match[0]), form.regex)}/"
    schema = str(form.json or _ANY_OBJECT)
    return f"%json {_SCHEMAS_OF_ONE_WORD.get(schema, schema)}"


_ANY_OBJECT = '{"type":"object"}'
_SCHEMAS_OF_ONE_WORD = {"true": "{}", "false": '{"not": {}}'}
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


def lark_text(text: str) -> str:
    """Return a literal; empty for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def lark_marked(text: str, special: SpecialTokens) -> str:
    """Write a text as literals, with special tokens by their ids; empty for an empty text."""
    if not special:
        return lark_text(text)
    parts = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else lark_text(part) for part in parts if part)


def lark_until(name: str, marker: str, special: SpecialTokens) -> str:
    """Write a rule of any text that ends at the first marker."""
    first = min((token for token in special if token in marker), key=marker.index, default=None)
    if first is None:
        return f"{name}[suffix={lark_text(marker)}]: /(?s:.*)/"
    # No text holds a special token, so the longest text before one is the right text.
    head, _, rest = marker.partition(first)
    before = re.escape(head).replace("/", "\\/").replace("\\\n", "\\n")
    return f"{name}: /(?s:.*){before}/ {lark_marked(first + rest, special)}"

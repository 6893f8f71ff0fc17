"""Grammars of answers: structured outputs after thoughts, and forced calls in the format of the model's parser; no torch.

Grammars are in llguidance's Lark. A marker that is a special token appears by its id. Each tool has its own schema, so
references to "#/$defs/..." resolve.
"""

import json
import re
from collections.abc import Mapping, Sequence

from holdfast.errors import RequestError
from holdfast.request.structured import StructuredOutputs
from holdfast.text.call_readers import HeadSyntax, JsonSyntax
from holdfast.text.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, TURN
from holdfast.text.reasoning import CLOSING, OPENING, Thoughts
from holdfast.text.tag_calls import KEY, TagSyntax
from holdfast.text.tool_calls import ToolFormat
from holdfast.text.tools import Tool, ToolChoice

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
    """Allow thoughts before a structured output; None for a grammar with its own first rule."""
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
    """Return a Lark literal; empty for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def lark_marked(text: str, special: SpecialTokens) -> str:
    """Write a text as literals, with special tokens by their ids; empty for an empty text."""
    if not special:
        return lark_text(text)
    parts = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else lark_text(part) for part in parts if part)


def lark_until(name: str, marker: str, special: SpecialTokens) -> str:
    """Write a rule for any text up to the first marker."""
    first = min((token for token in special if token in marker), key=marker.index, default=None)
    if first is None:
        return f"{name}[suffix={lark_text(marker)}]: /(?s:.*)/"
    # Text never contains a special token, so the longest match before one is right.
    head, _, rest = marker.partition(first)
    before = re.escape(head).replace("/", "\\/").replace("\\\n", "\\n")
    return f"{name}: /(?s:.*){before}/ {lark_marked(first + rest, special)}"


MAX_FORCED_CALLS = 16
_WRITING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as models learned it. With free white space, small models emit only white space."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")


def tool_call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    is_parallel: bool = True,
    thoughts: Thoughts = "none",
    special: SpecialTokens | None = None,
) -> str:
    """Write the grammar of one or several calls of the allowed tools, after thoughts if the model has them.

    `special` maps markers that are special tokens of the vocabulary to their ids.
    """
    allowed = choice.allowed(tools)
    assert allowed, f"{choice=} leaves none of {len(tools)} tools"
    special = special or {}
    rules: list[str] = []
    for index, tool in enumerate(allowed):
        rules += _rules(index, tool, form, special)
    line = "\n" if form.breaks_lines else ""
    begin, end = form.section
    opening = "" if form.is_bare else form.opening + ("" if begin else line)
    closing = (line if form.closing and not begin else "") + form.closing
    call = " ".join(part for part in (lark_marked(opening, special), "one", lark_marked(closing, special)) if part)
    # An answer in channels ends at its first call.
    num_more = MAX_FORCED_CALLS - 1 if is_parallel and choice.name is None and form.syntax is not None else 0
    more = f"({lark_text(form.between)} call){{0,{num_more}}}" if num_more else ""
    # The lexer matches the longest literal, so keep the line break before the end separate: calls begin with one too.
    last = (lark_text(line), lark_marked(end, special)) if end else ()
    parts = (begin and lark_marked(begin + line, special), "call", more, *last)
    names = " | ".join(f"call{index}" for index in range(len(allowed)))
    calls = " ".join(part for part in parts if part)
    return "\n".join((with_thoughts(calls, thoughts, special), f"call: {call}", f"one: {names}", *rules, ""))


def _rules(index: int, tool: Tool, form: ToolFormat, special: SpecialTokens) -> list[str]:
    match form.syntax:
        case TagSyntax() as syntax:
            return _tag_rules(index, tool, syntax, special)
        case JsonSyntax() as syntax:
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{syntax.arguments_key}": '
            parts = (lark_text(head), lark_text("}"))
        case HeadSyntax() as syntax:
            before, number, after = syntax.written_head.replace("{name}", tool.name).partition("{number}")
            middle = "/[0-9]{1,3}/" if number else ""
            head = " ".join(filter(None, (lark_marked(before, special), middle, lark_marked(after, special))))
            parts = (head, lark_marked(syntax.written_end, special))
        case None:
            head = f"{CHANNEL}commentary to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"
            parts = (lark_marked(head, special), "")
    return [
        f"call{index}: {parts[0]} arguments{index} {parts[1]}".rstrip(),
        f"arguments{index}: %json {_schema(_closed(tool.parameters))}",
    ]


def _closed(schema: Mapping[str, object] | None) -> Mapping[str, object]:
    """Forbid additional properties, unless the schema mentions them."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "additionalProperties" in schema or any(word in schema for word in _COMBINING):
        return {"type": "object", **schema}
    return {"type": "object", **schema, "additionalProperties": False}


def _tag_rules(index: int, tool: Tool, syntax: TagSyntax, special: SpecialTokens) -> list[str]:
    """Write parameters in the order of the schema, each on its own lines."""
    schema = tool.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    needed = frozenset(map(str, required)) if isinstance(required, list) else frozenset()
    head = syntax.written_head.replace("{name}", tool.name) + syntax.written_line
    parts, rules = [_lined(head, syntax, special)], []
    for number, (key, own) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        if KEY.fullmatch(key) is None or ('"' in key and '"{key}"' in syntax.written_parameter):
            raise RequestError("tools.bad_parameter_name", name="tools", tool=tool.name, parameter=key)
        name = f"parameter{index}_{number}"
        parts.append(name if key in needed else f"{name}?")
        rules += _tag_value(name, key, own if isinstance(own, dict) else {}, syntax, special, schema)
    return [f"call{index}: {' '.join(parts)} {lark_marked(syntax.call_end, special)}", *rules]


def _tag_value(
    name: str,
    key: str,
    own: Mapping[str, object],
    syntax: TagSyntax,
    special: SpecialTokens,
    schema: Mapping[str, object],
) -> list[str]:
    choices = own.get("enum", [own["const"]] if "const" in own else None)
    is_choice = isinstance(choices, list) and bool(choices) and all(isinstance(one, str) for one in choices)
    is_text = is_choice or own.get("type") == "string"
    tag = syntax.written_parameter.replace("{is_text}", "true" if is_text else "false").replace("{key}", key)
    rules = [f"{name}: {_lined(tag, syntax, special)} {name}_value {_lined(syntax.written_line, syntax, special)}"]
    end = ("\n" if syntax.trims_lines else "") + syntax.value_end
    if is_choice and isinstance(choices, list):
        return [*rules, f"{name}_value: ({' | '.join(map(lark_text, choices))}) {lark_marked(end, special)}"]
    if is_text:
        return [*rules, lark_until(f"{name}_value", end, special)]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        *rules,
        f"{name}_value: {name}_json {lark_marked(end, special)}",
        f"{name}_json: %json {_schema({**shared, **own})}",
    ]


def _lined(text: str, syntax: TagSyntax, special: SpecialTokens) -> str:
    """Write a text whose line breaks are optional if some versions of a family omit them."""
    if not syntax.are_lines_optional:
        return lark_marked(text, special)
    lines = [lark_marked(line, special) for line in text.split("\n")]
    return f" {lark_text(chr(10))}? ".join(lines)


def _schema(schema: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": _WRITING}, ensure_ascii=False)

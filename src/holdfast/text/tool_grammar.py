"""tool_call_grammar: a grammar of the calls that must be made, in the form that the model's parser reads; no torch.

Lark, as llguidance reads it. Each tool's schema stands alone, so that what it refers to by "#/$defs/..." is found.
"""

import json
from collections.abc import Mapping, Sequence

from holdfast.errors import RequestError, shown
from holdfast.text.call_readers import KEY
from holdfast.text.reasoning import Thoughts
from holdfast.text.thought_grammar import lark_text, with_thoughts
from holdfast.text.tool_calls import QWEN3_CODER, ToolFormat
from holdfast.text.tools import Tool, ToolChoice

MAX_FORCED_CALLS = 16
_WRITING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models have learned JSON; free white space is a place where small ones stay for ever."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")


def tool_call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    is_parallel: bool = True,
    thoughts: Thoughts = "none",
) -> str:
    """One call or several of the tools that may be chosen, behind thoughts where the model has them."""
    allowed = choice.allowed(tools)
    assert allowed, f"{choice=} leaves none of {len(tools)} tools"
    rules: list[str] = []
    for index, tool in enumerate(allowed):
        rules += _xml_rules(index, tool) if form is QWEN3_CODER else _json_rules(index, tool, form.arguments_key)
    opening, closing, between = ("<tool_call>\n", "\n</tool_call>", "\n") if form.closing else ("", "", "; ")
    call = " ".join(part for part in (lark_text(opening), "one", lark_text(closing)) if part)
    num_more = MAX_FORCED_CALLS - 1 if is_parallel and choice.name is None else 0
    more = f" ({lark_text(between)} call){{0,{num_more}}}" if num_more else ""
    names = " | ".join(f"call{index}" for index in range(len(allowed)))
    return "\n".join((with_thoughts(f"call{more}", thoughts), f"call: {call}", f"one: {names}", *rules, ""))


def _json_rules(index: int, tool: Tool, arguments_key: str) -> list[str]:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
    return [
        f"call{index}: {lark_text(head)} arguments{index} {lark_text('}')}",
        f"arguments{index}: %json {_schema(_closed(tool.parameters))}",
    ]


def _closed(schema: Mapping[str, object] | None) -> Mapping[str, object]:
    """The schema without properties that it does not name, unless it speaks of them; what is left is still valid."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "additionalProperties" in schema or any(word in schema for word in _COMBINING):
        return {"type": "object", **schema}
    return {"type": "object", **schema, "additionalProperties": False}


def _xml_rules(index: int, tool: Tool) -> list[str]:
    """Parameters in the order of the schema, each on lines of its own."""
    schema = tool.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    needed = frozenset(map(str, required)) if isinstance(required, list) else frozenset()
    parts, rules = [lark_text(f"<function={tool.name}>\n")], []
    for number, (key, own) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        if KEY.fullmatch(key) is None:
            raise RequestError(
                f"the tool {shown(tool.name)} has the parameter {shown(key)}",
                "this model writes names of parameters in tags, without < > and line breaks",
                "rename it",
            )
        name = f"parameter{index}_{number}"
        parts.append(name if key in needed else f"{name}?")
        rules.append(f"{name}: {lark_text(f'<parameter={key}>' + chr(10))} {name}_value")
        rules.append(_xml_value(f"{name}_value", own, schema))
    return [f"call{index}: {' '.join(parts)} {lark_text('</function>')}", *rules]


def _xml_value(name: str, own: object, schema: Mapping[str, object]) -> str:
    end = "\n</parameter>\n"
    own = own if isinstance(own, dict) else {}
    words = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return f"{name}: ({' | '.join(lark_text(word) for word in words)}) {lark_text(end)}"
    if own.get("type") == "string":
        return f"{name}[suffix={lark_text(end)}]: /(?s:.*)/"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return f"{name}: {name}_json {lark_text(end)}\n{name}_json: %json {_schema({**shared, **own})}"


def _schema(schema: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": _WRITING}, ensure_ascii=False)

"""What an answer is held to: response_format, structured_outputs, guided_* and forced calls of tools, as one rule."""

import json
from dataclasses import dataclass
from typing import Any

from holdfast.errors import RequestError
from holdfast.request.structured import StructuredOutputs
from holdfast.server.errors import ApiError, from_exception
from holdfast.server.fields import SamplingFields
from holdfast.server.schemas import JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from holdfast.text.reasoning import Thoughts
from holdfast.text.tool_grammar import with_thoughts

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and what they are called now."""
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON behind thoughts is written: free white space is a place where small models stay for ever."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, and the field of the request that it came from."""

    param: str
    value: dict[str, Any]
    """One field of StructuredOutputs."""

    def made(self, thoughts: Thoughts = "none") -> StructuredOutputs:
        """As the engine takes it; an answer that thinks first is held to it behind its thoughts."""
        try:
            made = StructuredOutputs(**self.value)
            return made if thoughts == "none" else behind_thoughts(made, thoughts)
        except RequestError as error:
            raise self.refused(error) from error

    def refused(self, error: RequestError) -> ApiError:
        """An error with the name of its field."""
        told = from_exception(error)
        told.param = self.param
        return told


def asked_rule(fields: SamplingFields, response_format: ResponseFormat | None) -> Rule | None:
    """The rule that a request has; at most one."""
    rules: dict[str, dict[str, Any]] = {}
    rule = _format_rule(response_format)
    if rule:
        rules["response_format"] = rule
    if fields.structured_outputs is not None:
        asked = fields.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        asked = {name: value for name, value in asked.items() if value is not False}
        if asked:
            rules["structured_outputs"] = asked
    for name, own in _GUIDED.items():
        value = getattr(fields, name)
        if value is not None:
            rules[name] = {own: value}
    if not rules:
        return None
    name, rule = next(iter(rules.items()))
    if len(rules) > 1 or len(rule) > 1:
        both = " and ".join(rules if len(rules) > 1 else rule)
        raise ApiError(400, f"{both} were asked; an answer is held to one rule; leave one out", param=name)
    return Rule(name, rule)


def _format_rule(response_format: ResponseFormat | None) -> dict[str, Any]:
    """The rule of a response_format; empty for text."""
    if isinstance(response_format, JsonObjectFormat):
        return {"json_object": True}
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        return {"json_object": True} if schema is None else {"json": schema}
    return {}


def behind_thoughts(made: StructuredOutputs, thoughts: Thoughts) -> StructuredOutputs:
    """The same for what follows thoughts. Expressions and grammars are taken as they are: they may speak of thoughts."""
    if made.choice is not None:
        answer = f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in made.choice)})"
        return StructuredOutputs(grammar=with_thoughts(answer, thoughts))
    if made.json is None and not made.json_object:
        return made
    schema: Any = {"type": "object"} if made.json is None else json.loads(made.json)
    if isinstance(schema, bool):
        return made
    schema = {**schema, "x-guidance": _WRITING}
    rules = f"answer: %json {json.dumps(schema, ensure_ascii=False)}\n"
    return StructuredOutputs(grammar=f"{with_thoughts('answer', thoughts)}\n{rules}")

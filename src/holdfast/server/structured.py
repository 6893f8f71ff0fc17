"""What an answer is held to: response_format, structured_outputs, guided_* and forced calls of tools, as one rule."""

from dataclasses import dataclass
from typing import Any

from holdfast.errors import RequestError
from holdfast.request.structured import StructuredOutputs
from holdfast.server.errors import ApiError, from_exception
from holdfast.server.fields import SamplingFields
from holdfast.server.schemas import JsonObjectFormat, JsonSchemaFormat, ResponseFormat

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and what they are called now."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, and the field of the request that it came from."""

    param: str
    value: dict[str, Any]
    """One field of StructuredOutputs."""

    def made(self) -> StructuredOutputs:
        """As the engine takes it."""
        try:
            return StructuredOutputs(**self.value)
        except RequestError as error:
            raise self.refused(error) from error

    def refused(self, error: RequestError) -> ApiError:
        """An error with the name of its field."""
        told = from_exception(error)
        told.param = self.param
        told.message = told.message.replace(f"structured_outputs.{next(iter(self.value))}", self.param, 1)
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

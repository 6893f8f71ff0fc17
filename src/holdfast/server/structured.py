"""What an answer is held to: response_format, structured_outputs, guided_* and forced tool calls, as one StructuredOutputs."""

from typing import Any

from holdfast.server.errors import ApiError
from holdfast.server.fields import SamplingFields
from holdfast.server.schemas import JsonObjectFormat, JsonSchemaFormat, ResponseFormat

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and what they are called now."""


def asked_structure(
    fields: SamplingFields, response_format: ResponseFormat | None, forced: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`structured_outputs` for SamplingParams, or nothing; at most one rule may be asked. `forced`: by tool_choice."""
    rules: dict[str, dict[str, Any]] = {}
    rule = format_rule(response_format)
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
    if forced is not None:
        rules["tool_choice"] = forced
    if not rules:
        return {}
    name, rule = next(iter(rules.items()))
    if len(rules) > 1 or len(rule) > 1:
        both = " and ".join(rules if len(rules) > 1 else rule)
        raise ApiError(400, f"{both} were asked; an answer is held to one rule; leave one out", param=name)
    return {"structured_outputs": made(rule, name)}


def format_rule(response_format: ResponseFormat | None) -> dict[str, Any]:
    """The rule of a response_format; empty for text."""
    if isinstance(response_format, JsonObjectFormat):
        return {"json_object": True}
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        return {"json_object": True} if schema is None else {"json": schema}
    return {}


def made(rule: dict[str, Any], param: str) -> Any:  # noqa: ANN401
    """The StructuredOutputs of one rule."""
    try:
        from holdfast.request.structured import StructuredOutputs
    except ModuleNotFoundError:
        raise ApiError(400, f"{param} was asked; it is not in this version; leave it out", param=param) from None
    return StructuredOutputs(**rule)

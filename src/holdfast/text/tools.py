"""Checks a request's tools in OpenAI's format: names, parameters and tool choice; no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from holdfast.errors import RequestError
from holdfast.text.chat_messages import PlainData

MAX_TOOLS = 128
MAX_NAME_CHARS = 128
MAX_TOOLS_CHARS = 2**20
NAME = re.compile(rf"[\w.:/$@-]{{1,{MAX_NAME_CHARS}}}")
_KNOWN = ("name", "description", "parameters", "strict")
_EXAMPLE = 'like {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}'
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, object] | None
    """A JSON schema of type object; None for a tool without parameters."""
    is_strict: bool = False

    def listed(self) -> dict[str, object]:
        """Return the tool as templates expect it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool choice of a request: tools are only shown to the model, or one must be called."""

    mode: Mode = "auto"
    name: str | None = None
    """The tool that the model must call if the mode is required; None for any."""

    def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that a forced call may call."""
        return tuple(tool for tool in tools if self.name is None or tool.name == self.name)


def parse_tools(value: object, max_tools: int = MAX_TOOLS) -> tuple[Tool, ...]:
    """Parse the tools of a request; errors name the field."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _invalid("tools", f"a list of tools {_EXAMPLE}", value)
    if len(value) > max_tools:
        raise RequestError("tools.too_many", name="tools", count=len(value), maximum=max_tools)
    plain = PlainData().copy(value, "tools")
    assert isinstance(plain, list), f"{type(plain)=} is no copy of a list"
    num_chars = len(json.dumps(plain, ensure_ascii=False))
    if num_chars > MAX_TOOLS_CHARS:
        raise RequestError("tools.too_large", name="tools", num_chars=num_chars, maximum=MAX_TOOLS_CHARS)
    tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(plain))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError("tools.duplicate", name=f"tools[{index}]", tool=name)
    return tools


def _invalid(name: str, expected: str, value: object) -> RequestError:
    return RequestError("tools.invalid", name=name, expected=expected, value=value)


def _tool(entry: object, place: str) -> Tool:
    if not isinstance(entry, dict):
        raise _invalid(place, f"an object {_EXAMPLE}", entry)
    if entry.get("type", "function") != "function":
        raise _invalid(f"{place}.type", "function", entry["type"])
    function = entry.get("function")
    if not isinstance(function, dict):
        raise _invalid(f"{place}.function", f"an object {_EXAMPLE}", function)
    unknown = next((key for key in function if key not in _KNOWN), None)
    if unknown is not None:
        raise RequestError("tools.unknown_field", name=f"{place}.function", field=unknown, accepted=_KNOWN)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        expected = f"1 to {MAX_NAME_CHARS} letters, digits and characters of _-.:/$@"
        raise _invalid(f"{place}.function.name", expected, name)
    if description is not None and not isinstance(description, str):
        raise RequestError("value.not_string", name=f"{place}.function.description", value=description)
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError("value.not_bool", name=f"{place}.function.strict", value=strict)
    return Tool(name, description, _parameters(function.get("parameters"), place), bool(strict))


def _parameters(schema: object, place: str) -> dict[str, object] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _invalid(f"{place}.function.parameters", "a JSON schema of type object", schema)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _invalid(f"{place}.function.parameters.properties", "an object", properties)
    return cast(dict[str, object], schema)


def parse_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Parse tool_choice; the default is auto if there are tools, else none."""
    if value in (None, "none", "auto"):
        return ToolChoice("auto" if tools and value != "none" else "none")
    name = _chosen_name(value)
    if value != "required" and name is None:
        raise _invalid("tool_choice", _CHOICES, value)
    if not tools:
        raise RequestError("tools.none_given", name="tool_choice", value=value)
    if name is not None and name not in (tool.name for tool in tools):
        accepted = [tool.name for tool in tools]
        raise RequestError("tools.unknown_choice", name="tool_choice", tool=name, accepted=accepted)
    return ToolChoice("required", name)


def _chosen_name(value: object) -> str | None:
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        return None
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else value.get("name")
    return name if isinstance(name, str) else None

"""Tools of a request in OpenAI's form, checked: what each is called and takes, and which of them are to be called; no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from holdfast.errors import RequestError, shown
from holdfast.text.chat_messages import PlainData

MAX_TOOLS = 128
MAX_NAME_CHARS = 128
MAX_TOOLS_CHARS = 2**20
"""Of all tools together, written as JSON."""
NAME = re.compile(rf"[\w.:/$@-]{{1,{MAX_NAME_CHARS}}}")
_KNOWN = ("name", "description", "parameters", "strict")
_EXAMPLE = (
    'write {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}'
)
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, object] | None
    """A JSON schema of type object; None where it takes nothing."""
    is_strict: bool = False

    def listed(self) -> dict[str, object]:
        """As templates know it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are shown to the model, and whether it must call one."""

    mode: Mode = "auto"
    name: str | None = None
    """The one that it must call, where mode is required."""

    def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Those that a forced call may call."""
        return tuple(tool for tool in tools if self.name is None or tool.name == self.name)


def parse_tools(value: object, max_tools: int = MAX_TOOLS) -> tuple[Tool, ...]:
    """The tools of a request, or RequestError that names the field; None is none."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(f"tools={shown(value)} was given", "tools are a list", _EXAMPLE)
    if len(value) > max_tools:
        raise RequestError(f"{len(value)} tools were given", f"at most {max_tools} work", "give fewer")
    plain = PlainData().copy(value, "tools")
    assert isinstance(plain, list), f"{type(plain)=} is no copy of a list"
    num_chars = len(json.dumps(plain, ensure_ascii=False))
    if num_chars > MAX_TOOLS_CHARS:
        raise RequestError(
            f"tools of {num_chars} characters were given", f"at most {MAX_TOOLS_CHARS} work", "shorten their schemas"
        )
    tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(plain))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}] is called {shown(name)}", "another is called that too", "rename one")
    return tools


def _tool(entry: object, place: str) -> Tool:
    if not isinstance(entry, dict):
        raise RequestError(f"{place} is {shown(entry)}", "a tool is an object", _EXAMPLE)
    if entry.get("type", "function") != "function":
        raise RequestError(f"{place} has the type {shown(entry['type'])}", "only functions are called here", _EXAMPLE)
    function = entry.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function is {shown(function)}", "an object is needed there", _EXAMPLE)
    unknown = next((key for key in function if key not in _KNOWN), None)
    if unknown is not None:
        raise RequestError(
            f"{place}.function has the field {shown(unknown)}", f"{', '.join(_KNOWN)} are known", "leave it out"
        )
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise RequestError(
            f"{place}.function.name is {shown(name)}",
            f"1 to {MAX_NAME_CHARS} letters, digits and signs of _-.:/$@ work",
            "rename the tool",
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{place}.function.description is {shown(description)}", "it is a text", "write one")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{place}.function.strict is {shown(strict)}", "it is true or false", "leave it out")
    return Tool(name, description, _parameters(function.get("parameters"), place), bool(strict))


def _parameters(schema: object, place: str) -> dict[str, object] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(
            f"{place}.function.parameters is {shown(schema)}",
            "a JSON schema of type object works",
            'write {"type": "object", "properties": {...}}',
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(
            f"{place}.function.parameters.properties is {shown(properties)}", "it is an object", "name each property"
        )
    return cast(dict[str, object], schema)


def parse_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """What is to be called; without a choice auto where there are tools, none where there are none."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value == "none":
        return ToolChoice("none")
    if value == "auto":
        return ToolChoice("auto" if tools else "none")
    name = _chosen_name(value)
    if value != "required" and name is None:
        raise RequestError(f"tool_choice={shown(value)} was given", f"{_CHOICES} work", "write one of them")
    if not tools:
        raise RequestError(f"tool_choice={shown(value)} was given", "the request has no tools", "give tools")
    if name is not None and name not in (tool.name for tool in tools):
        raise RequestError(
            f"tool_choice names {shown(name)}",
            f"the tools are {shown([tool.name for tool in tools])}",
            "name one of them",
        )
    return ToolChoice("required", name)


def _chosen_name(value: object) -> str | None:
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        return None
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else value.get("name")
    return name if isinstance(name, str) else None

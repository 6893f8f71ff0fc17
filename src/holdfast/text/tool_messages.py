"""Converts tool messages to what a chat template accepts, or to text if it has no tool support; no torch."""

import json
from collections.abc import Sequence
from typing import NoReturn

from holdfast.text.chat_messages import PlainData, bad_message

Message = dict[str, object]

_LISTING = """# Tools

You can call functions. These are there, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": "the name", "arguments": {{"the parameter": "its value"}}}}
</tool_call>
What a function answers comes within <tool_response></tool_response> tags."""


def has_tools(messages: Sequence[Message]) -> bool:
    """Return True if the messages hold tool calls or tool results."""
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def with_names_of_tools(messages: Sequence[Message]) -> list[Message]:
    """Add the called tool's name to tool results, because some templates write it."""
    names: dict[object, object] = {}
    named = []
    for message in messages:
        for call in calls_of(message):
            if isinstance(call.get("id"), str):
                names[call["id"]] = function_of(call)["name"]
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and "name" not in message and isinstance(call_id, str) and call_id in names:
            message = {**message, "name": names[call_id]}
        named.append(message)
    return named


def with_argument_objects(messages: Sequence[Message], data: PlainData) -> list[Message]:
    """Parse arguments of calls that are JSON text into objects, as most templates expect."""
    return [
        {**message, "tool_calls": [_with_object(call, data) for call in calls_of(message)]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_plain_chat(messages: Sequence[Message], tools: object, data: PlainData, in_system: bool) -> list[Message]:
    """Write the tool list, calls and results as text, for a template without tool support."""
    chat: list[Message] = []
    was_answer = False
    for message in messages:
        content, is_answer = message.get("content"), message["role"] == "tool"
        if not is_answer:
            calls = [_call_text(_with_object(call, data)) for call in calls_of(message)]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            chat.append({**kept, "content": "\n".join([str(content), *calls] if content else calls)})
        elif was_answer:
            # Some templates need alternating turns.
            chat[-1]["content"] = f"{chat[-1]['content']}\n{_answer_text(content)}"
        else:
            chat.append({"role": "user", "content": _answer_text(content)})
        was_answer = is_answer
    if tools:
        _insert_listing(chat, str(data.copy(_listing(tools), "tools")), in_system)
    return chat


def _insert_listing(chat: list[Message], listing: str, in_system: bool) -> None:
    """Put the list of tools into the system message, or into the first question."""
    role = "system" if in_system else "user"
    first = next((message for message in chat if message["role"] == role), None)
    if first is None:
        chat.insert(0, {"role": role, "content": listing})
    elif in_system:
        first["content"] = f"{first['content']}\n\n{listing}"
    else:
        first["content"] = f"{listing}\n\n{first['content']}"


def _listing(tools: object) -> str:
    if not isinstance(tools, list):
        raise bad_message("tools", "a list of tools", tools)
    return _LISTING.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def calls_of(message: Message) -> list[dict[str, object]]:
    """Return the calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def function_of(call: dict[str, object]) -> dict[str, object]:
    """Return name and arguments of a call, which may be under `function`."""
    function = call.get("function", call)
    assert isinstance(function, dict), f"{call=} was not checked"
    return function


def _answer_text(content: object) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _call_text(call: dict[str, object]) -> str:
    function = function_of(call)
    written = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


def _with_object(call: dict[str, object], data: PlainData) -> dict[str, object]:
    function = function_of(call)
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text, parse_constant=_no_number) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": data.copy(arguments, "arguments")}
    return {**call, "function": function} if "function" in call else function


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")

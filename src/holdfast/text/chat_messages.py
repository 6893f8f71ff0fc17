"""Checks and copies chat messages: exact built-in types, bounded, content as one string each; no torch."""

import math
from collections.abc import Mapping, Sequence

from holdfast.errors import PromptError, shown

MAX_MESSAGES = 10_000
MAX_CHAT_CHARS = 16 * 2**20
MAX_CHAT_VALUES = 200_000
"""Most strings, numbers, lists and dicts in all messages together."""
MAX_DEPTH = 24
MAX_CALLS = 1024
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Clients' keys for an answer's reasoning; templates read the first, some the second."""
_MESSAGE = 'a dict like {"role": "user", "content": "Hello"}'
_CALL = 'a call like {"type": "function", "function": {"name": "look", "arguments": "{}"}}'


class PlainData:
    """Copies values that templates accept, and counts them; everything else raises PromptError."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_values = 0

    def copy(self, value: object, name: str, depth: int = 0) -> object:
        """Copy a value to exact built-in types: subclasses could override methods."""
        self._count(name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value, name)
        if isinstance(value, int) and value.bit_length() <= 128:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if depth >= MAX_DEPTH:
            raise PromptError("template.too_large", name=name, maximum=MAX_DEPTH, unit="levels of nesting")
        if isinstance(value, Mapping):
            return {
                self._key(key, name): self.copy(item, f"{name}[{key!r:.40}]", depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.copy(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
        raise PromptError("template.bad_value", name=name, value=value)

    def _key(self, key: object, name: str) -> str:
        if not isinstance(key, str):
            raise PromptError("value.not_string", name=f"a key of {name}", value=key)
        return self._text(key, name)

    def _text(self, text: str, name: str) -> str:
        self.num_chars += len(text)
        if self.num_chars > MAX_CHAT_CHARS:
            raise PromptError("template.too_large", name=name, maximum=MAX_CHAT_CHARS, unit="characters of a chat")
        return str.__str__(text)

    def _count(self, name: str) -> None:
        self.num_values += 1
        if self.num_values > MAX_CHAT_VALUES:
            raise PromptError("template.too_large", name=name, maximum=MAX_CHAT_VALUES, unit="values of a chat")


def plain_messages(messages: Sequence[Mapping[str, object]], data: PlainData) -> list[dict[str, object]]:
    """Return the messages with their content as one string each; text parts are joined by line breaks."""
    if not isinstance(messages, list | tuple):
        raise bad_message("messages", f"a list whose items are {_MESSAGE}", messages)
    if not messages:
        raise PromptError("value.empty", name="messages")
    if len(messages) > MAX_MESSAGES:
        raise PromptError("template.too_large", name="messages", maximum=MAX_MESSAGES, unit="messages")
    return [_plain_message(message, index, data) for index, message in enumerate(messages)]


def bad_message(name: str, expected: str, value: object) -> PromptError:
    """Return the error for an invalid part of a chat."""
    return PromptError("template.bad_message", name=name, expected=expected, value=value)


def _plain_message(message: object, index: int, data: PlainData) -> dict[str, object]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise bad_message(name, _MESSAGE, message)
    plain = data.copy(message, name)
    assert isinstance(plain, dict), f"{plain=} is no copy of a message"
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise bad_message(f"{name}['role']", "a role such as user", plain.get("role"))
    if "tool_calls" in plain:
        _check_calls(plain, f"{name}['tool_calls']")
    if "content" in plain or "tool_calls" not in plain:
        plain["content"] = _content(plain, name)
    reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _check_calls(message: dict[str, object], name: str) -> None:
    calls = message["tool_calls"]
    if not calls and (calls is None or isinstance(calls, list)):
        del message["tool_calls"]
        return
    if not isinstance(calls, list):
        raise bad_message(name, f"a list of {_CALL}", calls)
    if len(calls) > MAX_CALLS:
        raise PromptError("template.too_large", name=name, maximum=MAX_CALLS, unit="calls")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_message(f"{name}[{index}]", _CALL, call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str | dict):
            raise bad_message(f"{name}[{index}]['function']['arguments']", "an object or its JSON text", arguments)


def _content(message: Mapping[str, object], name: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in message:
        return None
    if isinstance(content, list) and content:
        texts = [_part_text(part, f"{name}['content'][{index}]") for index, part in enumerate(content)]
        return "\n".join(texts)
    raise bad_message(f"{name}['content']", "a string or a list of text parts", content)


def _part_text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        part = f"a part of type {shown(part.get('type'))}" if isinstance(part, dict) else part
        raise bad_message(name, 'a text part like {"type": "text", "text": "..."}', part)
    return text

"""Messages of a chat, checked and copied: exact built-in types, bounded, with their content as one string each; no torch."""

import math
from collections.abc import Mapping, Sequence

from holdfast.errors import PromptError, shown

MAX_MESSAGES = 10_000
MAX_CHAT_CHARS = 16 * 2**20
MAX_CHAT_VALUES = 200_000
"""Strings, numbers, lists and dicts in all messages together."""
MAX_DEPTH = 24
MAX_CALLS = 1024
"""Calls of tools in one message."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that clients give the reasoning of an answer; templates read the first, some the second."""
_EXAMPLE = 'write {"role": "user", "content": "Hello"}'
_EXAMPLE_CALL = 'write {"type": "function", "function": {"name": "look", "arguments": "{}"}}'


class PlainData:
    """Copies values that templates may hold, and counts them; everything else raises PromptError."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_values = 0

    def copy(self, value: object, name: str, depth: int = 0) -> object:
        """The value in exact built-in types: subclasses could bring methods of their own."""
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
            raise PromptError(f"{name} is nested more than {MAX_DEPTH} deep", "no template reads that", "flatten it")
        if isinstance(value, Mapping):
            return {
                self._key(key, name): self.copy(item, f"{name}[{key!r:.40}]", depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.copy(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
        raise PromptError(
            f"{name} is {shown(value)}",
            "strings, finite numbers, lists and dicts can be given to a template",
            "convert it to one of them",
        )

    def _key(self, key: object, name: str) -> str:
        if not isinstance(key, str):
            raise PromptError(f"{name} has the key {shown(key)}", "keys are strings", "convert it with str()")
        return self._text(key, name)

    def _text(self, text: str, name: str) -> str:
        self.num_chars += len(text)
        if self.num_chars > MAX_CHAT_CHARS:
            raise PromptError(
                f"{name} ends a chat of more than {MAX_CHAT_CHARS} characters", "no model reads that much", "shorten it"
            )
        return str.__str__(text)

    def _count(self, name: str) -> None:
        self.num_values += 1
        if self.num_values > MAX_CHAT_VALUES:
            raise PromptError(
                f"{name} ends a chat of more than {MAX_CHAT_VALUES} values", "no model reads that much", "shorten it"
            )


def plain_messages(messages: Sequence[Mapping[str, object]], data: PlainData) -> list[dict[str, object]]:
    """The messages with their content as one string each; text parts are joined by line breaks."""
    if not isinstance(messages, list | tuple):
        raise PromptError(f"messages are {shown(messages)}", "a list of dicts works", f"in a list, {_EXAMPLE}")
    if not messages:
        raise PromptError("a chat without messages was given", "there is nothing to answer", _EXAMPLE)
    if len(messages) > MAX_MESSAGES:
        raise PromptError(f"{len(messages)} messages were given", f"at most {MAX_MESSAGES} work", "drop the oldest")
    return [_plain_message(message, index, data) for index, message in enumerate(messages)]


def _plain_message(message: object, index: int, data: PlainData) -> dict[str, object]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise PromptError(f"{name} is {shown(message)}", "a message is a dict with role and content", _EXAMPLE)
    plain = data.copy(message, name)
    assert isinstance(plain, dict), f"{plain=} is no copy of a message"
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise PromptError(f"{name} has the role {shown(plain.get('role'))}", "a role is a word such as user", _EXAMPLE)
    if "tool_calls" in plain:
        _check_calls(plain, f"{name}['tool_calls']")
    if "content" in plain or "tool_calls" not in plain:
        plain["content"] = _content(plain, name)
    reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _check_calls(message: dict[str, object], name: str) -> None:
    """Calls that an assistant has made; none at all is as good as no field."""
    calls = message["tool_calls"]
    if not calls and (calls is None or isinstance(calls, list)):
        del message["tool_calls"]
        return
    if not isinstance(calls, list):
        raise PromptError(f"{name} is {shown(calls)}", "a list of calls works", _EXAMPLE_CALL)
    if len(calls) > MAX_CALLS:
        raise PromptError(f"{name} has {len(calls)} calls", f"at most {MAX_CALLS} work", "give fewer")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise PromptError(f"{name}[{index}] is {shown(call)}", "a call has a function with a name", _EXAMPLE_CALL)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str | dict):
            raise PromptError(
                f"{name}[{index}]['function']['arguments'] is {shown(arguments)}",
                "an object or its JSON text works",
                _EXAMPLE_CALL,
            )


def _content(message: Mapping[str, object], name: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in message:
        return None
    if isinstance(content, list) and content:
        texts = [_part_text(part, f"{name}['content'][{index}]") for index, part in enumerate(content)]
        return "\n".join(texts)
    raise PromptError(f"{name} has the content {shown(content)}", "a string or a list of text parts works", _EXAMPLE)


def _part_text(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise PromptError(
            f"{name} is a part of type {shown(kind)}", "only text is read here", 'write {"type": "text", "text": "..."}'
        )
    return text

"""Conversations of Anthropic's API as messages and tools of ours: blocks become turns, results of tools and reasoning."""

from dataclasses import dataclass

from holdfast.server.anthropic_schemas import (
    CountTokensRequest,
    InputMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingSetting,
    ToolResultBlock,
    ToolUseBlock,
)
from holdfast.server.conversations import ToolChoiceBody, thinking_options
from holdfast.server.errors import ApiError
from holdfast.server.schemas import (
    AssistantMessage,
    CalledFunction,
    FunctionDefinition,
    InstructionMessage,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolMessage,
    UserMessage,
)

BILLING = "x-anthropic-billing-header:"
"""How a system block of a coding agent begins that is for the maker's accounts. It changes with every request, so that a
cached prefix would end there."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request says, in the terms of the other endpoints."""

    messages: list[Message]
    tools: list[Tool]
    tool_choice: ToolChoiceBody
    one_call: bool
    effort: str | None
    template_options: dict[str, object]
    shows_thinking: bool
    """An answer without thinking asked shows none, also if the model thinks."""
    continues: bool
    """The last message is the beginning of the answer."""


def conversation_of(asked: CountTokensRequest) -> Conversation:
    """The conversation of a request; ApiError for blocks that have no place in their message."""
    messages: list[Message] = []
    system = _joined(asked.system)
    if system:
        messages.append(InstructionMessage(role="system", content=system))
    for index, message in enumerate(asked.messages):
        _append(messages, message, f"messages[{index}]")
    last = asked.messages[-1]
    if isinstance(messages[-1], AssistantMessage) and messages[-1].tool_calls:
        raise _misplaced(f"messages[{len(asked.messages) - 1}]", "a call without its tool_result", "add a user message")
    choice = asked.tool_choice
    return Conversation(
        messages,
        [_tool(tool.name, tool.description, tool.input_schema) for tool in asked.tools or ()],
        _choice(asked),
        choice is not None and choice.disable_parallel_tool_use is True,
        None if asked.output_config is None else asked.output_config.effort,
        _thinking_options(asked.thinking),
        asked.thinking is not None and asked.thinking.type != "disabled" and asked.thinking.display != "omitted",
        last.role == "assistant",
    )


def _thinking_options(thinking: ThinkingSetting | None) -> dict[str, object]:
    """For the template. Without a setting the model does not think, as in Anthropic's API; `adaptive` leaves it to the model."""
    if thinking is None or thinking.type == "disabled":
        return thinking_options(False)
    options = thinking_options(True) if thinking.type == "enabled" else {}
    return options if thinking.budget_tokens is None else {**options, "thinking_budget": thinking.budget_tokens}


def _tool(name: str, description: str | None, schema: dict[str, object]) -> Tool:
    function = FunctionDefinition(name=name, description=description, parameters=schema)
    return Tool(type="function", function=function)


def _choice(asked: CountTokensRequest) -> ToolChoiceBody:
    choice = asked.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name is needed; it was not given; name a tool", param="tool_choice.name")
    return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))


def _joined(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if not block.text.startswith(BILLING))


def _append(messages: list[Message], message: InputMessage, place: str) -> None:
    if message.role == "assistant":
        messages.append(_assistant(message, place))
    elif message.role == "system":
        messages.append(InstructionMessage(role="system", content="\n".join(_texts(message, place))))
    else:
        _append_user(messages, message, place)


def _texts(message: InputMessage, place: str) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    for index, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            raise _misplaced(f"{place}.content[{index}]", f"a {block.type} block of the {message.role}", "send text")
    return [block.text for block in message.content if isinstance(block, TextBlock)]


def _append_user(messages: list[Message], message: InputMessage, place: str) -> None:
    """Results of tools as messages of their own, in the order of the blocks; texts between them as one."""
    content = message.content or ""
    texts: list[str] = [content] if isinstance(content, str) else []
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            _append_text(messages, texts)
            texts = []
            result = _joined(block.content)
            told = f"Error: {result}" if block.is_error else result
            messages.append(ToolMessage(role="tool", content=told, tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(
                f"{place}.content[{index}]", f"a {block.type} block of the user", "send text or tool_result"
            )
    _append_text(messages, texts)


def _append_text(messages: list[Message], texts: list[str]) -> None:
    """Neighbours of the user are one turn: many templates take turns alone."""
    if not texts:
        return
    last = messages[-1] if messages else None
    if isinstance(last, UserMessage):
        assert isinstance(last.content, str), "a turn of the user is one text"
        last.content = "\n".join([last.content, *texts])
    else:
        messages.append(UserMessage(role="user", content="\n".join(texts)))


def _assistant(message: InputMessage, place: str) -> AssistantMessage:
    answer = AssistantMessage(role="assistant")
    if isinstance(message.content, str):
        answer.content = message.content
        return answer
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = CalledFunction(name=block.name, arguments=block.input)
            calls.append(MessageToolCall(id=block.id, function=function))
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(
                f"{place}.content[{index}]", f"a {block.type} block of the assistant", "send it as the user"
            )
    answer.content = "\n".join(texts) if texts or not calls else None
    answer.reasoning_content = "\n".join(thoughts) or None
    answer.tool_calls = calls or None
    return answer


def _misplaced(place: str, what: str, do: str) -> ApiError:
    return ApiError(400, f"{place} is {what}; it has no place there; {do}", param=place, code="invalid_value")

"""Converts a conversation of Anthropic's API: content blocks become messages, tool results and reasoning."""

from holdfast.server.anthropic_schemas import (
    CountTokensRequest,
    InputMessage,
    MessageRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingSetting,
    ToolResultBlock,
    ToolUseBlock,
)
from holdfast.server.conversations import Conversation, ToolChoiceBody, function_tool, named_choice, thinking_options
from holdfast.server.errors import ApiError
from holdfast.server.sampling import Rule
from holdfast.server.schemas import (
    AssistantMessage,
    CalledFunction,
    InstructionMessage,
    Message,
    MessageToolCall,
    ToolMessage,
    UserMessage,
)

BILLING = "x-anthropic-billing-header:"
"""First words of a coding agent's system block for its vendor's accounts. It changes with every request, so it would
end every cached prefix."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation_of(body: CountTokensRequest) -> Conversation:
    """Convert a request; ApiError for blocks that their message may not have."""
    messages: list[Message] = []
    system = _joined(body.system)
    if system:
        messages.append(InstructionMessage(role="system", content=system))
    for index, message in enumerate(body.messages):
        _append(messages, message, f"messages[{index}]")
    if isinstance(messages[-1], AssistantMessage) and messages[-1].tool_calls:
        place = f"messages[{len(body.messages) - 1}]"
        raise _misplaced(place, "a tool call without its tool_result", "Add a user message.")
    choice = body.tool_choice
    return Conversation(
        messages=messages,
        tools=[
            function_tool({"name": tool.name, "description": tool.description, "parameters": tool.input_schema})
            for tool in body.tools or ()
        ],
        tool_choice=_choice(body),
        one_call=choice is not None and choice.disable_parallel_tool_use is True,
        effort=None if body.output_config is None else body.output_config.effort,
        template_options=_thinking_options(body.thinking),
        continues=body.messages[-1].role == "assistant",
        rule=_rule(body),
        max_tokens=body.max_tokens if isinstance(body, MessageRequest) else None,
    )


def shows_thinking(body: CountTokensRequest) -> bool:
    """True if the answer contains its thinking: only if the request enables it, even if the model thinks anyway."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _rule(body: CountTokensRequest) -> Rule | None:
    """Return the constraint on the answer, under either of its names."""
    config = body.output_config
    if config is not None and config.format is not None:
        return Rule("output_config.format", {"json": config.format.schema_})
    return None if body.output_format is None else Rule("output_format", {"json": body.output_format.schema_})


def _thinking_options(thinking: ThinkingSetting | None) -> dict[str, object]:
    """Return the template's options. The default is off, as in Anthropic's API; `adaptive` leaves it to the model."""
    if thinking is None or thinking.type == "disabled":
        return thinking_options(False)
    options = thinking_options(True) if thinking.type == "enabled" else {}
    return options if thinking.budget_tokens is None else {**options, "thinking_budget": thinking.budget_tokens}


def _choice(body: CountTokensRequest) -> ToolChoiceBody:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError("http.tool_name_missing", param="tool_choice.name")
    return named_choice(choice.name)


def _joined(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if not block.text.startswith(BILLING))


def _append(messages: list[Message], message: InputMessage, place: str) -> None:
    if message.role == "assistant":
        messages.append(_assistant(message, place))
    elif message.role == "user":
        _append_user(messages, message, place)
    else:
        content = message.content
        texts = [content] if isinstance(content, str) else []
        for index, block in enumerate(() if isinstance(content, str) else content):
            if not isinstance(block, TextBlock):
                raise _misplaced(f"{place}.content[{index}]", f"a {block.type} block of the system", "Send text.")
            texts.append(block.text)
        messages.append(InstructionMessage(role="system", content="\n".join(texts)))


def _append_user(messages: list[Message], message: InputMessage, place: str) -> None:
    """Append tool results as messages of their own, in the order of the blocks, and join the texts between them."""
    content = message.content or ""
    texts: list[str] = [content] if isinstance(content, str) else []
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            _append_text(messages, texts)
            texts = []
            result = _joined(block.content)
            result = f"Error: {result}" if block.is_error else result
            messages.append(ToolMessage(role="tool", content=result, tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(
                f"{place}.content[{index}]", f"a {block.type} block of the user", "Send text or tool_result."
            )
    _append_text(messages, texts)


def _append_text(messages: list[Message], texts: list[str]) -> None:
    """Append to the last user message if there is one: many templates need alternating roles."""
    if not texts:
        return
    last = messages[-1] if messages else None
    if isinstance(last, UserMessage):
        assert isinstance(last.content, str), "a user message is one text"
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
                f"{place}.content[{index}]", f"a {block.type} block of the assistant", "Send it as the user."
            )
    answer.content = "\n".join(texts) if texts or not calls else None
    answer.reasoning_content = "\n".join(thoughts) or None
    answer.tool_calls = calls or None
    return answer


def _misplaced(place: str, what: str, fix: str) -> ApiError:
    return ApiError("http.misplaced_block", param=place, name=place, what=what, fix=fix)

"""Input items of /v1/responses as messages: what an answer was made of becomes one message of the assistant again."""

from holdfast.server.responses_schemas import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
)
from holdfast.server.schemas import (
    AssistantMessage,
    CalledFunction,
    InstructionMessage,
    Message,
    MessageToolCall,
    ToolMessage,
    UserMessage,
)


def messages_of(asked: ResponseRequest) -> list[Message]:
    """The conversation that a request has."""
    messages: list[Message] = []
    if asked.instructions:
        messages.append(InstructionMessage(role="system", content=asked.instructions))
    if isinstance(asked.input, str):
        return [*messages, UserMessage(role="user", content=asked.input)]
    for item in asked.input:
        _append(messages, item)
    return messages


def _append(messages: list[Message], item: Item) -> None:
    if isinstance(item, FunctionOutputItem):
        messages.append(ToolMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    elif isinstance(item, FunctionCallItem):
        answer = _answer(messages)
        function = CalledFunction(name=item.name, arguments=item.arguments)
        answer.tool_calls = [*(answer.tool_calls or ()), MessageToolCall(id=item.call_id, function=function)]
    elif isinstance(item, ReasoningItem):
        text = "\n".join(part.text for part in item.content or ())
        if text:
            messages.append(AssistantMessage(role="assistant", reasoning_content=text))
    else:
        _append_message(messages, item)


def _append_message(messages: list[Message], item: MessageItem) -> None:
    if item.role == "user":
        messages.append(UserMessage(role="user", content=item.content))
    elif item.role == "assistant":
        answer = _answer(messages)
        if answer.content is not None or answer.tool_calls:
            answer = AssistantMessage(role="assistant")
            messages.append(answer)
        answer.content = item.content
    else:
        messages.append(InstructionMessage(role=item.role, content=item.content))


def _answer(messages: list[Message]) -> AssistantMessage:
    """The answer that the last items belong to, or a new one."""
    if messages and isinstance(messages[-1], AssistantMessage):
        return messages[-1]
    messages.append(AssistantMessage(role="assistant"))
    return messages[-1]  # type: ignore[return-value]

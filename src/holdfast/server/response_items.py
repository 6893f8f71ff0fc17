"""Input items of /v1/responses: as messages, and in the form in which they are stored."""

from collections.abc import Sequence
from typing import Any

from holdfast.server import schemas
from holdfast.server.streams import new_id


def messages_of(body: schemas.ResponseRequest, earlier: Sequence[schemas.Item] = ()) -> list[schemas.Message]:
    """Convert a request to messages, after the items of the response that it continues."""
    messages: list[schemas.Message] = []
    if body.instructions:
        messages.append(schemas.InstructionMessage(role="system", content=body.instructions))
    for item in (*earlier, *input_of(body)):
        _append(messages, item)
    return messages


def input_of(body: schemas.ResponseRequest) -> list[schemas.Item]:
    """Return the items of a request itself."""
    return [schemas.MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def kept_item(item: schemas.Item) -> dict[str, Any]:
    """Write an input item in the shape that OpenAI's clients read."""
    if isinstance(item, schemas.MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
        own = {"role": item.role, "content": [{"type": kind, "text": text, **more} for text in texts]}
    elif isinstance(item, schemas.FunctionCallItem):
        own = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    elif isinstance(item, schemas.FunctionOutputItem):
        texts = item.output if isinstance(item.output, str) else [part.text for part in item.output]
        output = texts if isinstance(texts, str) else [{"type": "input_text", "text": text} for text in texts]
        own = {"call_id": item.call_id, "output": output}
    else:
        own = {"summary": [], "content": [part.model_dump() for part in item.content or ()]}
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}[item.type]
    return {"type": item.type, "id": item.id or new_id(prefix), "status": item.status or "completed", **own}


def _append(messages: list[schemas.Message], item: schemas.Item) -> None:
    if isinstance(item, schemas.FunctionOutputItem):
        messages.append(schemas.ToolMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    elif isinstance(item, schemas.FunctionCallItem):
        answer = _answer(messages)
        function = schemas.CalledFunction(name=item.name, arguments=item.arguments)
        answer.tool_calls = [*(answer.tool_calls or ()), schemas.MessageToolCall(id=item.call_id, function=function)]
    elif isinstance(item, schemas.ReasoningItem):
        text = "\n".join(part.text for part in item.content or ())
        if text:
            messages.append(schemas.AssistantMessage(role="assistant", reasoning_content=text))
    elif item.role == "user":
        messages.append(schemas.UserMessage(role="user", content=item.content))
    elif item.role == "assistant":
        answer = _answer(messages)
        if answer.content is not None or answer.tool_calls:
            answer = schemas.AssistantMessage(role="assistant")
            messages.append(answer)
        answer.content = item.content
    else:
        messages.append(schemas.InstructionMessage(role=item.role, content=item.content))


def _answer(messages: list[schemas.Message]) -> schemas.AssistantMessage:
    """Return the answer that the last items belong to, or a new one."""
    if messages and isinstance(messages[-1], schemas.AssistantMessage):
        return messages[-1]
    messages.append(schemas.AssistantMessage(role="assistant"))
    return messages[-1]  # type: ignore[return-value]

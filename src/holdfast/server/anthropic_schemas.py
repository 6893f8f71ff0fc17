"""Request models of Anthropic's Messages API; every field is bounded, unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.request.sampling_params import MAX_STOP_STRINGS
from holdfast.server.bodies import OpenBody
from holdfast.server.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Description,
    FunctionName,
    JsonSchema,
    Name,
    Natural,
    Positive,
    ServedModel,
    Share,
    StopString,
    Temperature,
    Text,
    Unused,
    UnusedText,
    refuse,
    with_refused,
)

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _known_block(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise refuse(f"only {', '.join(BLOCKS)} blocks are supported: send the content as text")
    return kind


def _own_tool(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        raise refuse("server tools are not supported: describe the tool with name and input_schema")
    return kind


class TextBlock(OpenBody):
    """Text of a message."""

    type: Annotated[Literal["text"], BeforeValidator(_known_block)]
    text: Text
    cache_control: Unused = None


Texts = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ThinkingBlock(OpenBody):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: UnusedText = None


class RedactedThinkingBlock(OpenBody):
    """Reasoning that another server encrypted; ignored."""

    type: Literal["redacted_thinking"]
    data: UnusedText = None


class ToolUseBlock(OpenBody):
    """A tool that an earlier answer called."""

    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]
    cache_control: Unused = None


class ToolResultBlock(OpenBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Texts | None = None
    is_error: bool | None = None
    cache_control: Unused = None


def _block_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in BLOCKS else "text"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_block_kind),
]


class InputMessage(OpenBody):
    """One message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class CustomTool(OpenBody):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_tool)] = None
    name: FunctionName
    description: Description | None = None
    input_schema: JsonSchema
    cache_control: Unused = None


class ToolChoice(OpenBody):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSetting(OpenBody):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Positive | None, Field(description="Passed to the template; not enforced.")] = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(OpenBody):
    """JSON that matches a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(OpenBody):
    """How much the model thinks, and the format of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(OpenBody):
    """A conversation whose tokens are counted."""

    model: ServedModel = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Texts | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSetting | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: Unused = None
    context_management: Unused = None


@with_refused
class MessageRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Natural | None = None
    metadata: Unused = None
    service_tier: Unused = None

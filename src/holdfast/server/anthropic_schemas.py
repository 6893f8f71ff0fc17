"""Request models of Anthropic's Messages API; every field is bounded, unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.request.sampling_params import MAX_STOP_STRINGS
from holdfast.server import fields
from holdfast.server.bodies import OpenBody

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _known_block(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise fields.refuse(f"only {', '.join(BLOCKS)} blocks are supported: send the content as text")
    return kind


def _own_tool(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        raise fields.refuse("server tools are not supported: describe the tool with name and input_schema")
    return kind


class TextBlock(OpenBody):
    type: Annotated[Literal["text"], BeforeValidator(_known_block)]
    text: fields.Text
    cache_control: fields.Unused = None


Texts = Annotated[list[TextBlock], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)]


class ThinkingBlock(OpenBody):
    type: Literal["thinking"]
    thinking: fields.Text
    signature: fields.UnusedText = None


class RedactedThinkingBlock(OpenBody):
    """Reasoning that another server encrypted; ignored."""

    type: Literal["redacted_thinking"]
    data: fields.UnusedText = None


class ToolUseBlock(OpenBody):
    type: Literal["tool_use"]
    id: fields.Name
    name: fields.FunctionName
    input: dict[str, Any]
    cache_control: fields.Unused = None


class ToolResultBlock(OpenBody):
    type: Literal["tool_result"]
    tool_use_id: fields.Name
    content: fields.Text | Texts | None = None
    is_error: bool | None = None
    cache_control: fields.Unused = None


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
    role: Literal["user", "assistant", "system"]
    content: fields.Text | Annotated[list[Block], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)]


class CustomTool(OpenBody):
    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_tool)] = None
    name: fields.FunctionName
    description: fields.Description | None = None
    input_schema: fields.JsonSchema
    cache_control: fields.Unused = None


class ToolChoice(OpenBody):
    type: Literal["auto", "any", "tool", "none"]
    name: fields.FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSetting(OpenBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[fields.Positive | None, Field(description="Passed to the template; not enforced.")] = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(OpenBody):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: Annotated[fields.JsonSchema, Field(alias="schema")]


class OutputConfig(OpenBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(OpenBody):
    """A conversation whose tokens are counted."""

    model: fields.ServedModel = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    system: fields.Text | Texts | None = None
    tools: Annotated[list[CustomTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSetting | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: fields.Unused = None
    context_management: fields.Unused = None


@fields.with_refused
class MessageRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: fields.Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[fields.StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.Natural | None = None
    metadata: fields.Unused = None
    service_tier: fields.Unused = None

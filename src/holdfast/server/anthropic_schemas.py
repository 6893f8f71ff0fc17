"""Requests and answers of Anthropic's Messages API: every field bounded, as pydantic models; unknown fields change nothing."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.request.sampling_params import MAX_STOP_STRINGS
from holdfast.server.bodies import OpenBody
from holdfast.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_TOOLS,
    UNUSED,
    WHOLE,
    JsonSchema,
    Name,
    Number,
    Positive,
    Reply,
    StopString,
    TakenOnly,
    Text,
    refuse,
)
from holdfast.server.schemas import FunctionName

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Anything = Annotated[Any, UNUSED]


def _known_block(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise refuse(f"this server reads {', '.join(BLOCKS)} blocks, and not this type: send its content as text")
    return kind


def _own_tool(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        raise refuse("this server runs no tools of its own: describe the tool with name and input_schema")
    return kind


class TextBlock(OpenBody):
    """Text of a message."""

    type: Annotated[Literal["text"], BeforeValidator(_known_block)]
    text: Text
    cache_control: Anything = None


class ThinkingBlock(OpenBody):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Annotated[Text | None, UNUSED] = None


class RedactedThinkingBlock(OpenBody):
    """Reasoning that another server has encrypted; it is passed over."""

    type: Literal["redacted_thinking"]
    data: Annotated[Text | None, UNUSED] = None


class ToolUseBlock(OpenBody):
    """A tool that an earlier answer called."""

    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: dict[str, Any]
    cache_control: Anything = None


class ToolResultBlock(OpenBody):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: Anything = None


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
    """One turn of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class CustomTool(OpenBody):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_tool)] = None
    name: FunctionName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    input_schema: JsonSchema
    cache_control: Anything = None


class ToolChoice(OpenBody):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSetting(OpenBody):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[
        Positive | None, Field(description="Told to templates that read it; nothing else holds the model to it.")
    ] = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(OpenBody):
    """JSON that a schema holds for."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(OpenBody):
    """How much the model thinks, and what its answer is held to."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(OpenBody):
    """A conversation whose tokens are counted."""

    model: Annotated[Name | None, Field(description="One of /v1/models; left out, the served one.")] = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSetting | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: Anything = None
    context_management: Anything = None


class MessageRequest(CountTokensRequest):
    """A conversation to be answered."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT), WHOLE] | None = None
    metadata: Anything = None
    service_tier: Anything = None
    mcp_servers: Annotated[object, TakenOnly("this server connects to no MCP servers: leave them out", [])] = None
    container: Annotated[object, TakenOnly("this server has no containers: leave it out")] = None


class OutputText(Reply):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class OutputThinking(Reply):
    """Reasoning before an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class OutputToolUse(Reply):
    """A tool that an answer calls."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Reply):
    """Of an answer: tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(Reply):
    """Tokens read and written; input_tokens leaves out those of the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageReply(Reply):
    """A conversation answered."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[OutputText | OutputThinking | OutputToolUse, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Reply):
    """Tokens of a conversation."""

    input_tokens: int


class AnthropicErrorBody(Reply):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorReply(Reply):
    """An answer that is an error."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str

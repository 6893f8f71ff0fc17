"""Request models of chat, completions, tokens and responses in OpenAI's shapes; every field is bounded."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.server.bodies import Body
from holdfast.server.fields import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    UNUSED,
    WHOLE,
    CacheRetention,
    Description,
    Effort,
    FunctionName,
    JsonSchema,
    Metadata,
    Name,
    Natural,
    NumTop,
    Positive,
    SamplingFields,
    SchemaName,
    TemplateOptions,
    Text,
    TokenIds,
    TokenPrompt,
    UnusedName,
    UnusedObject,
    UnusedText,
    refuse,
    with_refused,
)

_OTHER_PARTS = ("image_url", "input_image", "input_audio", "input_file", "file", "video_url", "audio_url")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _text_only(kind: object) -> object:
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise refuse(f'only text parts are supported, not {kind}: send {{"type": "text", "text": "..."}}')
    return kind


class TextPart(Body):
    """A piece of a message's text."""

    type: Annotated[Literal["text", "input_text", "output_text"], BeforeValidator(_text_only)]
    text: Text
    cache_control: UnusedObject = None
    annotations: Annotated[list[Any] | None, UNUSED] = None
    logprobs: Annotated[list[Any] | None, UNUSED] = None


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Content = Text | Parts


class CalledFunction(Body):
    """A function that an answer called, with arguments as JSON text or as the object itself."""

    name: FunctionName
    arguments: Text | dict[str, Any]


class MessageToolCall(Body):
    """A tool call of an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[Annotated[int, Field(ge=0, le=MAX_TOOLS), WHOLE] | None, UNUSED] = None


class InstructionMessage(Body):
    """Instructions for the model."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Body):
    """A message of the user."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


@with_refused
class AssistantMessage(Body):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    provider_specific_fields: object = None
    """LiteLLM sends back what an answer had beyond OpenAI's fields. Ignored."""


class ToolMessage(Body):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionDefinition(Body):
    """A function that an answer may call."""

    name: FunctionName
    description: Description | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(Body):
    """Force this function."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema and its name."""

    model_config = ConfigDict(populate_by_name=True)

    name: SchemaName
    description: Description | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ReturnTokenIds = Annotated[bool | None, Field(description="Adds prompt_token_ids and token_ids to the answer.")]


@with_refused
class ChatCompletionRequest(SamplingFields):
    """A conversation to answer."""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: ReturnTokenIds = None
    metadata: Annotated[Metadata | None, UNUSED] = None
    prompt_cache_key: UnusedText = None
    prompt_cache_options: UnusedObject = None
    prompt_cache_retention: CacheRetention = None
    safety_identifier: UnusedText = None


PromptText = Annotated[Text, Field(min_length=1)]


def prompt_kind(value: object) -> str:
    """Return which of the four kinds a prompt is, by its first part; faults are reported for that kind."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


@with_refused
class CompletionRequest(SamplingFields):
    """Prompts to continue."""

    prompt: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[TokenPrompt, Tag("ids")]
        | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists")],
        Discriminator(prompt_kind),
    ]
    max_tokens: Natural | None = None
    logprobs: NumTop | None = None
    echo: bool | None = None
    return_token_ids: ReturnTokenIds = None
    response_format: ResponseFormat | None = None
    metadata: Annotated[Metadata | None, UNUSED] = None


@with_refused
class TokenizeRequest(Body):
    """A text or a conversation to tokenize."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Tokens to convert to text."""

    model: Name | None = None
    tokens: TokenIds


# /v1/responses

Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, UNUSED]


def _known_item(kind: object) -> object:
    if kind == "item_reference":
        raise refuse("item references are not supported: send the item itself, or previous_response_id")
    if isinstance(kind, str) and kind not in _ITEMS:
        raise refuse(f"this type of item is not supported: use {', '.join(_ITEMS)}")
    return kind


class MessageItem(Body):
    """A message of the conversation so far."""

    type: Annotated[Literal["message"], BeforeValidator(_known_item)] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: UnusedName = None
    status: Status = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, UNUSED] = None


class FunctionCallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text
    id: UnusedName = None
    status: Status = None


class FunctionOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: UnusedName = None
    status: Status = None


class ReasoningPart(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


@with_refused
class ReasoningItem(Body):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: UnusedName = None
    content: ReasoningParts | None = None
    summary: Annotated[ReasoningParts | None, UNUSED] = None
    status: Status = None


def _item_kind(value: object) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return kind if isinstance(kind, str) and kind in _ITEMS else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FunctionTool(Body):
    """A function that an answer may call."""

    type: Literal["function"]
    name: FunctionName
    description: Description | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """Force this function."""

    type: Literal["function"]
    name: FunctionName


class SchemaFormat(Body):
    """JSON that matches a schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    name: SchemaName
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: Description | None = None
    strict: bool | None = None


@with_refused
class TextSetting(Body):
    """The format of an answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


@with_refused
class ReasoningSetting(Body):
    """How much the model reasons."""

    effort: Effort | None = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


@with_refused
class ResponseRequest(SamplingFields):
    """Input items to answer."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    text: TextSetting | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSetting | None = None
    top_logprobs: NumTop | None = None
    include: Annotated[list[Included], Field(max_length=8)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: Metadata | None = None
    n: Annotated[int, Field(ge=1, le=1, description="An input has one answer."), WHOLE] | None = None
    store: Annotated[bool | None, Field(description="Keep the answer in memory for a later request; true.")] = None
    previous_response_id: Name | None = None
    max_tool_calls: Annotated[Positive | None, UNUSED] = None
    prompt_cache_key: UnusedText = None
    prompt_cache_options: UnusedObject = None
    prompt_cache_retention: CacheRetention = None
    safety_identifier: UnusedText = None

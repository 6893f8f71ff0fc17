"""Request models of chat, completions, tokens and responses in OpenAI's shapes; every field is bounded."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.server import fields
from holdfast.server.bodies import Body

_OTHER_PARTS = ("image_url", "input_image", "input_audio", "input_file", "file", "video_url", "audio_url")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _text_only(kind: object) -> object:
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise fields.refuse(f'only text parts are supported, not {kind}: send {{"type": "text", "text": "..."}}')
    return kind


class TextPart(Body):
    type: Annotated[Literal["text", "input_text", "output_text"], BeforeValidator(_text_only)]
    text: fields.Text
    cache_control: fields.UnusedObject = None
    annotations: Annotated[list[Any] | None, fields.UNUSED] = None
    logprobs: Annotated[list[Any] | None, fields.UNUSED] = None


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
Content = fields.Text | Parts


class CalledFunction(Body):
    name: fields.FunctionName
    arguments: fields.Text | dict[str, Any]


class MessageToolCall(Body):
    id: fields.Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[Annotated[int, Field(ge=0, le=fields.MAX_TOOLS), fields.WHOLE] | None, fields.UNUSED] = None


class InstructionMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: fields.Name | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: fields.Name | None = None


@fields.with_refused
class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    name: fields.Name | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_content: fields.Text | None = None
    reasoning: fields.Text | None = None
    refusal: fields.Text | None = None
    provider_specific_fields: object = None
    """LiteLLM sends back what an answer had beyond OpenAI's fields. Ignored."""


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: fields.Name
    name: fields.Name | None = None


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]


class FunctionDefinition(Body):
    name: fields.FunctionName
    description: fields.Description | None = None
    parameters: fields.JsonSchema | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: fields.FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    model_config = ConfigDict(populate_by_name=True)

    name: fields.SchemaName
    description: fields.Description | None = None
    schema_: Annotated[fields.JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ReturnTokenIds = Annotated[bool | None, Field(description="Adds prompt_token_ids and token_ids to the answer.")]


@fields.with_refused
class ChatCompletionRequest(fields.SamplingFields):
    """A conversation to answer."""

    messages: Messages
    max_tokens: fields.Positive | None = None
    max_completion_tokens: fields.Positive | None = None
    logprobs: bool | None = None
    top_logprobs: fields.NumTop | None = None
    tools: Annotated[list[Tool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: fields.Effort | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: ReturnTokenIds = None
    metadata: Annotated[fields.Metadata | None, fields.UNUSED] = None
    prompt_cache_key: fields.UnusedText = None
    prompt_cache_options: fields.UnusedObject = None
    prompt_cache_retention: fields.CacheRetention = None
    safety_identifier: fields.UnusedText = None


PromptText = Annotated[fields.Text, Field(min_length=1)]


def prompt_kind(value: object) -> str:
    """Return which of the four kinds a prompt is, by its first part; faults are reported for that kind."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


@fields.with_refused
class CompletionRequest(fields.SamplingFields):
    """Prompts to continue."""

    prompt: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[fields.TokenPrompt, Tag("ids")]
        | Annotated[list[PromptText], Field(min_length=1, max_length=fields.MAX_PROMPTS, fail_fast=True), Tag("texts")]
        | Annotated[
            list[fields.TokenPrompt], Field(min_length=1, max_length=fields.MAX_PROMPTS, fail_fast=True), Tag("lists")
        ],
        Discriminator(prompt_kind),
    ]
    max_tokens: fields.Natural | None = None
    logprobs: fields.NumTop | None = None
    echo: bool | None = None
    return_token_ids: ReturnTokenIds = None
    response_format: ResponseFormat | None = None
    metadata: Annotated[fields.Metadata | None, fields.UNUSED] = None


@fields.with_refused
class TokenizeRequest(Body):
    """A text or a conversation to tokenize."""

    model: fields.Name | None = None
    prompt: fields.Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Tokens to convert to text."""

    model: fields.Name | None = None
    tokens: fields.TokenIds


# /v1/responses

Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, fields.UNUSED]


def _known_item(kind: object) -> object:
    if kind == "item_reference":
        raise fields.refuse("item references are not supported: send the item itself, or previous_response_id")
    if isinstance(kind, str) and kind not in _ITEMS:
        raise fields.refuse(f"this type of item is not supported: use {', '.join(_ITEMS)}")
    return kind


class MessageItem(Body):
    type: Annotated[Literal["message"], BeforeValidator(_known_item)] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: fields.UnusedName = None
    status: Status = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, fields.UNUSED] = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: fields.Name
    name: fields.FunctionName
    arguments: fields.Text
    id: fields.UnusedName = None
    status: Status = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: fields.Name
    output: Content
    id: fields.UnusedName = None
    status: Status = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: fields.Text


ReasoningParts = Annotated[list[ReasoningPart], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)]


@fields.with_refused
class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: fields.UnusedName = None
    content: ReasoningParts | None = None
    summary: Annotated[ReasoningParts | None, fields.UNUSED] = None
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
    type: Literal["function"]
    name: fields.FunctionName
    description: fields.Description | None = None
    parameters: fields.JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: fields.FunctionName


class SchemaFormat(Body):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    name: fields.SchemaName
    schema_: Annotated[fields.JsonSchema, Field(alias="schema")]
    description: fields.Description | None = None
    strict: bool | None = None


@fields.with_refused
class TextSetting(Body):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


@fields.with_refused
class ReasoningSetting(Body):
    effort: fields.Effort | None = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


@fields.with_refused
class ResponseRequest(fields.SamplingFields):
    """Input items to answer."""

    input: fields.Text | Annotated[list[Item], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    instructions: fields.Text | None = None
    max_output_tokens: fields.Positive | None = None
    text: TextSetting | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSetting | None = None
    top_logprobs: fields.NumTop | None = None
    include: Annotated[list[Included], Field(max_length=8)] | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    metadata: fields.Metadata | None = None
    n: Annotated[int, Field(ge=1, le=1, description="An input has one answer."), fields.WHOLE] | None = None
    store: Annotated[bool | None, Field(description="Keep the answer in memory for a later request; true.")] = None
    previous_response_id: fields.Name | None = None
    max_tool_calls: Annotated[fields.Positive | None, fields.UNUSED] = None
    prompt_cache_key: fields.UnusedText = None
    prompt_cache_options: fields.UnusedObject = None
    prompt_cache_retention: fields.CacheRetention = None
    safety_identifier: fields.UnusedText = None

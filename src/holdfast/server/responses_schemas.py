"""Requests and answers of /v1/responses: OpenAI's shapes for text, every field bounded, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.request.sampling_params import MAX_LOGPROBS
from holdfast.server.bodies import Body
from holdfast.server.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    UNUSED,
    WHOLE,
    JsonSchema,
    Metadata,
    Name,
    Positive,
    Reply,
    SamplingFields,
    TakenOnly,
    Text,
    refuse,
)
from holdfast.server.schemas import (
    CachedTokens,
    Content,
    FunctionName,
    JsonObjectFormat,
    ReasoningTokens,
    TemplateOptions,
    TextFormat,
    TokenLogprob,
)

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Status = Literal["in_progress", "completed", "incomplete"]


def _known_item(kind: object) -> object:
    if kind == "item_reference":
        raise refuse("items are not referred to here: send the item itself, or previous_response_id")
    if isinstance(kind, str) and kind not in _ITEMS:
        raise refuse(f"items of this type are not read here: {', '.join(_ITEMS)} are")
    return kind


class MessageItem(Body):
    """A message of the conversation so far."""

    type: Annotated[Literal["message"], BeforeValidator(_known_item)] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Annotated[Name | None, UNUSED] = None
    status: Annotated[Status | None, UNUSED] = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, UNUSED] = None


class FunctionCallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text
    id: Annotated[Name | None, UNUSED] = None
    status: Annotated[Status | None, UNUSED] = None


class FunctionOutputItem(Body):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: Annotated[Name | None, UNUSED] = None
    status: Annotated[Status | None, UNUSED] = None


class ReasoningPart(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Body):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: Annotated[Name | None, UNUSED] = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    summary: Annotated[
        Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None, UNUSED
    ] = None
    status: Annotated[Status | None, UNUSED] = None
    encrypted_content: Annotated[object, TakenOnly("reasoning is not encrypted here: leave it out")] = None


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
    description: Annotated[str, Field(max_length=2**16)] | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """This function, and no other."""

    type: Literal["function"]
    name: FunctionName


class SchemaFormat(Body):
    """JSON that a schema holds for."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    description: Annotated[str, Field(max_length=2**16)] | None = None
    strict: bool | None = None


class TextSetting(Body):
    """What the text of an answer is held to."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[object, TakenOnly("no model here has this: ask for it in the input", "medium")] = None


class ReasoningSetting(Body):
    """How much is thought."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[object, TakenOnly("reasoning is given as it is, not summed up", "auto")] = None
    generate_summary: Annotated[object, TakenOnly("reasoning is given as it is, not summed up", "auto")] = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponseRequest(SamplingFields):
    """Input to be answered."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    text: TextSetting | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSetting | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    include: Annotated[list[Included], Field(max_length=8)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: Metadata | None = None
    n: Annotated[int, Field(ge=1, le=1, description="An input has one answer here."), WHOLE] | None = None
    store: Annotated[bool | None, Field(description="Keep the answer in memory for a later request; true.")] = None
    previous_response_id: Name | None = None
    conversation: Annotated[object, TakenOnly("conversations are not kept here: use previous_response_id")] = None
    background: Annotated[object, TakenOnly("answers are given while you wait: use stream", False)] = None
    truncation: Annotated[object, TakenOnly("input is never cut here: send less", "disabled")] = None
    prompt: Annotated[object, TakenOnly("no prompts are stored here: use instructions")] = None
    service_tier: Annotated[object, TakenOnly("there is one tier: use priority", "auto", "default")] = None
    moderation: Annotated[object, TakenOnly("nothing here moderates: leave it out")] = None
    context_management: Annotated[object, TakenOnly("input is never changed here: leave it out", [])] = None
    max_tool_calls: Annotated[Positive | None, UNUSED] = None
    prompt_cache_key: Annotated[Text | None, UNUSED] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, UNUSED] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, UNUSED] = None
    safety_identifier: Annotated[Text | None, UNUSED] = None


class OutputText(Reply):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """What the model said."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(Reply):
    """A function that an answer calls."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputReasoningText(Reply):
    """A piece of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Reply):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any]
    content: list[OutputReasoningText]
    encrypted_content: None = None
    status: Status


class ResponseUsage(Reply):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFault(Reply):
    """Why an answer failed."""

    code: str
    message: str


class Response(Reply):
    """Input answered."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    background: Literal[False] = False
    error: ResponseFault | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Reply):
    """A response that is kept no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Reply):
    """Input of a response, a page at a time."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

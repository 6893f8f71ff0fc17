"""Requests and answers of chat, completions, models and tokens: OpenAI's shapes, every field bounded, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from holdfast.request.sampling_params import MAX_LOGPROBS
from holdfast.server.bodies import Body
from holdfast.server.fields import (
    CLOSED,
    MAX_INT,
    MAX_MESSAGES,
    MAX_PROMPTS,
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
    TemplateName,
    TemplateValue,
    Text,
    TokenIds,
    TokenPrompt,
    refuse,
)

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/$@-]{1,128}$")]
_OTHER_PARTS = ("image_url", "input_image", "input_audio", "input_file", "file", "video_url", "audio_url")


def _text_alone(kind: object) -> object:
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise refuse(
            f'only text is read here, and this is a part of type {kind}: send {{"type": "text", "text": "..."}}'
        )
    return kind


class TextPart(Body):
    """A piece of a message's text."""

    type: Annotated[Literal["text", "input_text", "output_text"], BeforeValidator(_text_alone)]
    text: Text
    cache_control: Annotated[dict[str, Any] | None, UNUSED] = None
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
    """What the model is to be and do."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Body):
    """What somebody asks."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Body):
    """An earlier answer, as it was given."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    annotations: Annotated[object, TakenOnly("annotations are not read: leave them out", [])] = None
    audio: Annotated[object, TakenOnly("only text is read here: leave audio out")] = None
    function_call: Annotated[object, TakenOnly("function_call is the old name: use tool_calls")] = None
    provider_specific_fields: object = None
    """LiteLLM keeps here what an answer had beyond OpenAI's fields, and sends it back. Nothing of it is read."""


class ToolMessage(Body):
    """What a tool call brought."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionDefinition(Body):
    """A function that an answer may call."""

    name: FunctionName
    description: Annotated[str, Field(max_length=2**16)] | None = None
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
    """This function, and no other."""

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

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=2**16)] | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that a schema holds for."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ReturnTokenIds = Annotated[bool | None, Field(description="Adds prompt_token_ids and token_ids to the answer.")]
TemplateOptions = Annotated[dict[TemplateName, TemplateValue], Field(max_length=16, json_schema_extra=CLOSED)]


class ChatCompletionRequest(SamplingFields):
    """A conversation to be answered."""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    return_token_ids: ReturnTokenIds = None
    # vllm-router writes these two as well.
    separate_reasoning: Annotated[
        object, TakenOnly("thoughts come apart from answers: use include_reasoning", True)
    ] = None
    stream_reasoning: Annotated[object, TakenOnly("thoughts stream as they come: use include_reasoning", True)] = None
    echo: Annotated[object, TakenOnly("/v1/completions has echo: leave it out here", False)] = None
    chat_template: Annotated[
        object, TakenOnly("templates do not come with requests: --chat-template sets one where the server starts")
    ] = None
    documents: Annotated[object, TakenOnly("documents are not read: put them into a message", [])] = None
    add_special_tokens: Annotated[object, TakenOnly("the chat template writes special tokens: leave it out", False)] = (
        None
    )
    best_of: Annotated[object, TakenOnly("use n", 1)] = None
    functions: Annotated[object, TakenOnly("functions is the old name: use tools")] = None
    function_call: Annotated[object, TakenOnly("function_call is the old name: use tool_choice")] = None
    modalities: Annotated[object, TakenOnly("answers are text: leave it out", ["text"])] = None
    audio: Annotated[object, TakenOnly("answers are text: leave it out")] = None
    prediction: Annotated[object, TakenOnly("predicted outputs are not here: leave it out")] = None
    web_search_options: Annotated[object, TakenOnly("nothing here searches the web: leave it out")] = None
    moderation: Annotated[object, TakenOnly("nothing here moderates: leave it out")] = None
    verbosity: Annotated[object, TakenOnly("no model here has this: ask for it in a message", "medium")] = None
    store: Annotated[object, TakenOnly("nothing is stored here: leave it out", False)] = None
    service_tier: Annotated[object, TakenOnly("there is one tier: use priority", "auto", "default")] = None
    metadata: Annotated[Metadata | None, UNUSED] = None
    prompt_cache_key: Annotated[Text | None, UNUSED] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, UNUSED] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, UNUSED] = None
    safety_identifier: Annotated[Text | None, UNUSED] = None


PromptText = Annotated[Text, Field(min_length=1)]


def prompt_kind(value: object) -> str:
    """Which of the four a prompt is, by its first part: faults are told of that one alone."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


class CompletionRequest(SamplingFields):
    """Prompts to be continued."""

    prompt: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[TokenPrompt, Tag("ids")]
        | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists")],
        Discriminator(prompt_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    echo: bool | None = None
    return_token_ids: ReturnTokenIds = None
    response_format: ResponseFormat | None = None
    suffix: Annotated[object, TakenOnly("text is continued, not filled in: leave suffix out", "")] = None
    best_of: Annotated[object, TakenOnly("every completion is given: use n", 1)] = None
    add_special_tokens: Annotated[
        object, TakenOnly("special tokens are added to a prompt: pass token ids for a bare one", True)
    ] = None
    metadata: Annotated[Metadata | None, UNUSED] = None
    store: Annotated[object, TakenOnly("nothing is stored here: leave it out", False)] = None


class TokenizeRequest(Body):
    """A text or a conversation to be made tokens of."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None
    chat_template: Annotated[
        object, TakenOnly("templates do not come with requests: --chat-template sets one where the server starts")
    ] = None


class DetokenizeRequest(Body):
    """Tokens to be made text of."""

    model: Name | None = None
    tokens: TokenIds


class ModelCard(Reply):
    """A name that the model goes by."""

    id: str
    object: Literal["model"] = "model"
    type: Annotated[Literal["model"], Field(description="This and the next two are for Anthropic's clients.")] = "model"
    display_name: str
    created_at: str
    created: int
    owned_by: str = "holdfast"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Reply):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Annotated[Literal[False], Field(description="For Anthropic's clients.")] = False


class CachedTokens(Reply):
    """Of a prompt: tokens that another one had computed already."""

    cached_tokens: int


class ReasoningTokens(Reply):
    """Of an answer: tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Reply):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class TopLogprob(Reply):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was chosen, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(Reply):
    """A function that an answer calls, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Reply):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(Reply):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    """A conversation answered."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Reply):
    """Log-probabilities of a text, token by token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Reply):
    """Prompts continued."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None


class Tokenized(Reply):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Reply):
    """Text of tokens."""

    prompt: str


class ErrorBody(Reply):
    """What was asked, what there is, what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """An answer that is an error."""

    error: ErrorBody

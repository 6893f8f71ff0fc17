"""Requests and answers of Ollama's API: every field bounded, as pydantic models; unknown fields change nothing."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.request.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS
from holdfast.server.bodies import OpenBody, misspelt
from holdfast.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_TOOLS,
    UNUSED,
    WHOLE,
    JsonSchema,
    Name,
    Number,
    Reply,
    StopString,
    TakenOnly,
    Text,
    refuse,
)
from holdfast.server.schemas import FunctionName

Anything = Annotated[Any, UNUSED]
Images = Annotated[object, TakenOnly("this server reads text alone: leave images out", [])]


class Options(OpenBody):
    """How tokens are chosen, in Ollama's names; options of its loader change nothing here."""

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), WHOLE] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    num_ctx: Annotated[Any, Field(description="Taken; --max-model-len sets the context when the server starts.")] = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        name = misspelt(cls, value) if isinstance(value, dict) else None
        if name is not None:
            raise refuse(f"there is no option {name!r:.40}: {', '.join(cls.model_fields)} are read")
        return value


class OllamaFunction(OpenBody):
    """A function that an earlier answer called."""

    name: FunctionName
    arguments: dict[str, Any]


class OllamaCall(OpenBody):
    """A tool call of an earlier answer."""

    id: Name | None = None
    function: OllamaFunction


class OllamaMessage(OpenBody):
    """One turn of the conversation so far."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Images = None


class OllamaDefinition(OpenBody):
    """A function that an answer may call."""

    name: FunctionName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    parameters: JsonSchema | None = None


class OllamaTool(OpenBody):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: OllamaDefinition


class OllamaRequest(OpenBody):
    """What /api/chat and /api/generate share."""

    model: Annotated[Name | None, Field(description="One of /api/tags; left out, the served one.")] = None
    stream: bool | None = None
    format: Literal["", "json"] | JsonSchema | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    keep_alive: Annotated[
        Number | Annotated[str, Field(max_length=64)] | None,
        Field(description="Taken; the model stays loaded until the server ends."),
    ] = None


class OllamaChatRequest(OllamaRequest):
    """A conversation to be answered; without messages the model is loaded, which it is."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to be answered; without one the model is loaded, which it is."""

    prompt: Text | None = None
    system: Text | None = None
    raw: Annotated[
        bool | None, Field(description="Whether the prompt is continued as it is, without the template.")
    ] = None
    images: Images = None
    suffix: Annotated[object, TakenOnly("text is continued, not filled in: leave suffix out", "")] = None
    template: Annotated[
        object, TakenOnly("templates do not come with requests: start the server with --chat-template", "")
    ] = None
    context: Annotated[object, TakenOnly("send the conversation to /api/chat in place of context", [])] = None


class OllamaShowRequest(OpenBody):
    """The model that is to be shown, under the newer or the older name of the field."""

    model: Name | None = None
    name: Name | None = None
    verbose: Anything = None


class OllamaTopLogprob(Reply):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    """The same of a token of the answer, with the most likely ones of its place."""

    top_logprobs: list[OllamaTopLogprob]


class OllamaTimes(Reply):
    """Counts and times in nanoseconds of an answer that is over."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaOutputCall(Reply):
    """A tool that an answer calls."""

    id: str
    function: dict[str, Any]


class OllamaOutputMessage(Reply):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaOutputCall] | None = None


class OllamaChatReply(OllamaTimes):
    """A conversation answered."""

    message: OllamaOutputMessage


class OllamaGenerateReply(OllamaTimes):
    """A prompt answered."""

    response: str
    thinking: str | None = None


class OllamaDetails(Reply):
    """What Ollama tells of the files of a model; empty if it is not known here."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = Field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Reply):
    """A name that the model goes by."""

    name: str
    model: str
    modified_at: str
    size: Annotated[int, Field(description="Bytes of memory while serving.")]
    digest: str
    details: OllamaDetails


class OllamaModels(Reply):
    """All names."""

    models: list[OllamaModel]


class OllamaRunningModel(Reply):
    """A name of the model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Reply):
    """All names."""

    models: list[OllamaRunningModel]


class OllamaShown(Reply):
    """A model as its server knows it."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]]
    modified_at: str


class OllamaVersion(Reply):
    """The release of Ollama whose API this is, and of this server."""

    version: str
    holdfast: str


class OllamaErrorReply(Reply):
    """An answer that is an error."""

    error: str

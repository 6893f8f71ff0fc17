"""Request models of Ollama's API; every field is bounded, unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.server.bodies import OpenBody, misspelt
from holdfast.server.fields import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_TOOLS,
    WHOLE,
    Description,
    Factor,
    FunctionName,
    JsonSchema,
    Name,
    NaturalOrMinusOne,
    Number,
    NumTop,
    Penalty,
    Seed,
    Share,
    Stops,
    Temperature,
    Text,
    Unused,
    refuse,
    with_refused,
)


class Options(OpenBody):
    """Sampling options in Ollama's names; options of its loader have no effect."""

    temperature: Temperature | None = None
    top_k: NaturalOrMinusOne | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: Factor | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), WHOLE] | None = None
    stop: Stops | None = None
    num_ctx: Annotated[Any, Field(description="Accepted; --max-model-len of the server sets the context.")] = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        name = misspelt(cls, value) if isinstance(value, dict) else None
        if name is not None:
            raise refuse(f"there is no option {name!r:.40}: use {', '.join(cls.model_fields)}")
        return value


class OllamaFunction(OpenBody):
    """A function that an earlier answer called."""

    name: FunctionName
    arguments: dict[str, Any]


class OllamaCall(OpenBody):
    """A tool call of an earlier answer."""

    id: Name | None = None
    function: OllamaFunction


@with_refused
class OllamaMessage(OpenBody):
    """One message of the conversation so far."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


class OllamaDefinition(OpenBody):
    """A function that an answer may call."""

    name: FunctionName
    description: Description | None = None
    parameters: JsonSchema | None = None


class OllamaTool(OpenBody):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: OllamaDefinition


class OllamaRequest(OpenBody):
    """Fields of both /api/chat and /api/generate."""

    model: Annotated[Name | None, Field(description="One of /api/tags; the first if left out.")] = None
    stream: bool | None = None
    format: Literal["", "json"] | JsonSchema | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    keep_alive: Annotated[
        Number | Annotated[str, Field(max_length=64)] | None,
        Field(description="Accepted; the model stays loaded until the server ends."),
    ] = None


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer; without messages, a request to load the model."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


@with_refused
class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer; without one, a request to load the model."""

    prompt: Text | None = None
    system: Text | None = None
    raw: Annotated[bool | None, Field(description="Continue the prompt without the chat template.")] = None


class OllamaShowRequest(OpenBody):
    """The model to describe, under the newer or the older name of the field."""

    model: Name | None = None
    name: Name | None = None
    verbose: Unused = None

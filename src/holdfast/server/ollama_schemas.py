"""Request models of Ollama's API; every field is bounded, unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.server import fields
from holdfast.server.bodies import OpenBody, misspelt


class Options(OpenBody):
    """Sampling options in Ollama's names; options of its loader have no effect."""

    temperature: fields.Temperature | None = None
    top_k: fields.NaturalOrMinusOne | None = None
    top_p: fields.Share | None = None
    min_p: fields.Share | None = None
    repeat_penalty: fields.Factor | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    seed: fields.Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, le=fields.MAX_INT), fields.WHOLE] | None = None
    stop: fields.Stops | None = None
    num_ctx: Annotated[Any, Field(description="Accepted; --max-model-len of the server sets the context.")] = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        name = misspelt(cls, value) if isinstance(value, dict) else None
        if name is not None:
            raise fields.refuse(f"there is no option {name!r:.40}: use {', '.join(cls.model_fields)}")
        return value


class OllamaFunction(OpenBody):
    name: fields.FunctionName
    arguments: dict[str, Any]


class OllamaCall(OpenBody):
    id: fields.Name | None = None
    function: OllamaFunction


@fields.with_refused
class OllamaMessage(OpenBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: fields.Text | None = None
    thinking: fields.Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: fields.Name | None = None
    tool_call_id: fields.Name | None = None


class OllamaDefinition(OpenBody):
    name: fields.FunctionName
    description: fields.Description | None = None
    parameters: fields.JsonSchema | None = None


class OllamaTool(OpenBody):
    type: Literal["function"] = "function"
    function: OllamaDefinition


class OllamaRequest(OpenBody):
    model: Annotated[fields.Name | None, Field(description="One of /api/tags; the first if left out.")] = None
    stream: bool | None = None
    format: Literal["", "json"] | fields.JsonSchema | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: fields.NumTop | None = None
    keep_alive: Annotated[
        fields.Number | Annotated[str, Field(max_length=64)] | None,
        Field(description="Accepted; the model stays loaded until the server ends."),
    ] = None


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer; without messages, a request to load the model."""

    messages: Annotated[list[OllamaMessage], Field(max_length=fields.MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None


@fields.with_refused
class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer; without one, a request to load the model."""

    prompt: fields.Text | None = None
    system: fields.Text | None = None
    raw: Annotated[bool | None, Field(description="Continue the prompt without the chat template.")] = None


class OllamaShowRequest(OpenBody):
    """The model to describe, under the newer or the older name of the field."""

    model: fields.Name | None = None
    name: fields.Name | None = None
    verbose: fields.Unused = None

"""Request models of embeddings, reranking and scores in OpenAI's, Jina's, Cohere's, vLLM's and Ollama's shapes."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from holdfast.server.bodies import Body
from holdfast.server.fields import (
    UNUSED,
    Name,
    Natural,
    Positive,
    Priority,
    ServedModel,
    Text,
    TokenPrompt,
    UnusedObject,
    UnusedText,
    with_refused,
)
from holdfast.server.schemas import PromptText, prompt_kind

MAX_INPUTS = 2048
"""Per request, as in OpenAI's API."""
Texts = Annotated[list[PromptText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PooledFields(Body):
    """Fields of every request for vectors or scores."""

    model: ServedModel = None
    truncate_prompt_tokens: Annotated[
        Literal[-1] | None, Field(description="-1 truncates a text that is longer than the context.")
    ] = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    user: UnusedText = None


@with_refused
class EmbeddingRequest(PooledFields):
    """Texts or token ids to embed."""

    input: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[TokenPrompt, Tag("ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("lists")],
        Discriminator(prompt_kind),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Positive | None, Field(description="Length of the returned vectors.")] = None
    normalize: Annotated[bool | None, Field(description="The default is set by the model's files.")] = None


class TextDocument(Body):
    """A document with its text; its other fields are returned with it."""

    model_config = ConfigDict(extra="allow")

    text: PromptText


@with_refused
class RerankRequest(PooledFields):
    """Documents to sort by how well they answer a query."""

    query: PromptText
    documents: Annotated[list[PromptText | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    top_n: Annotated[Positive | None, Field(description="Number of results, best first; all if left out.")] = None
    return_documents: bool | None = None
    instruction: Annotated[PromptText | None, Field(description="The task for a reranker.")] = None


class ScoreRequest(PooledFields):
    """Pairs of texts to score: one with each of several, or two lists of equal length."""

    text_1: PromptText | Texts
    text_2: PromptText | Texts
    instruction: PromptText | None = None


class OllamaFields(Body):
    """Fields of both embedding endpoints of Ollama."""

    model: Annotated[Name | None, Field(description="The served model, with or without :latest.")] = None
    options: UnusedObject = None
    keep_alive: Annotated[float | str | None, UNUSED] = None


class OllamaEmbedRequest(OllamaFields):
    """Texts to embed; an empty list has an empty answer."""

    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: Annotated[bool | None, Field(description="False refuses a text that is longer than the context.")] = None
    dimensions: Natural | None = None


class OllamaEmbeddingsRequest(OllamaFields):
    """One text to embed; the older endpoint."""

    prompt: Text | None = None

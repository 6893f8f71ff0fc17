"""Request models of embeddings, reranking and scores in OpenAI's, Jina's, Cohere's, vLLM's and Ollama's shapes."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from holdfast.server import fields
from holdfast.server.bodies import Body
from holdfast.server.schemas import PromptText, prompt_kind

MAX_INPUTS = 2048
"""Maximum inputs per request, as in OpenAI's API."""
Texts = Annotated[list[PromptText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PooledFields(Body):
    model: fields.ServedModel = None
    truncate_prompt_tokens: Annotated[
        Literal[-1] | None, Field(description="-1 truncates a text that is longer than the context.")
    ] = None
    cache_salt: fields.Name | None = None
    priority: fields.Priority | None = None
    user: fields.UnusedText = None


@fields.with_refused
class EmbeddingRequest(PooledFields):
    """Texts or token ids to embed."""

    input: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[fields.TokenPrompt, Tag("ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[list[fields.TokenPrompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("lists")],
        Discriminator(prompt_kind),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[fields.Positive | None, Field(description="Length of the returned vectors.")] = None
    normalize: Annotated[bool | None, Field(description="The default is set by the model's files.")] = None


class TextDocument(Body):
    """A document with its text; its other fields are returned with it."""

    model_config = ConfigDict(extra="allow")

    text: PromptText


@fields.with_refused
class RerankRequest(PooledFields):
    """Documents to sort by how well they answer a query."""

    query: PromptText
    documents: Annotated[list[PromptText | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    top_n: Annotated[fields.Positive | None, Field(description="Number of results, best first; all if left out.")] = (
        None
    )
    return_documents: bool | None = None
    instruction: Annotated[PromptText | None, Field(description="The task for a reranker.")] = None


class ScoreRequest(PooledFields):
    """Pairs of texts to score: one with each of several, or two lists of equal length."""

    text_1: PromptText | Texts
    text_2: PromptText | Texts
    instruction: PromptText | None = None


class OllamaFields(Body):
    model: Annotated[fields.Name | None, Field(description="The served model, with or without :latest.")] = None
    options: fields.UnusedObject = None
    keep_alive: Annotated[float | str | None, fields.UNUSED] = None


class OllamaEmbedRequest(OllamaFields):
    """Texts to embed; an empty list has an empty answer."""

    input: fields.Text | Annotated[list[fields.Text], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: Annotated[bool | None, Field(description="False refuses a text that is longer than the context.")] = None
    dimensions: fields.Natural | None = None


class OllamaEmbeddingsRequest(OllamaFields):
    """One text to embed; the older endpoint."""

    prompt: fields.Text | None = None

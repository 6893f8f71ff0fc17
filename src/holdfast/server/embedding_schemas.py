"""Requests and answers of embeddings, reranking and scores: OpenAI's, Jina's, Cohere's, vLLM's and Ollama's shapes, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from holdfast.server.bodies import Body
from holdfast.server.fields import MAX_INT, UNUSED, WHOLE, Name, Positive, Reply, TakenOnly, Text, TokenPrompt
from holdfast.server.schemas import PromptText, prompt_kind

MAX_INPUTS = 2048
"""Of one request, as OpenAI has it."""
Texts = Annotated[list[PromptText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PooledFields(Body):
    """What every request for vectors or scores may say beside its texts."""

    model: Annotated[Name | None, Field(description="One of /v1/models; left out, the served one.")] = None
    truncate_prompt_tokens: Annotated[
        Literal[-1] | None, Field(description="-1 cuts a text that is longer than the context at its end.")
    ] = None
    cache_salt: Name | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT, description="Lower is earlier."), WHOLE] | None = None
    user: Annotated[Text | None, UNUSED] = None


class EmbeddingRequest(PooledFields):
    """Texts or token ids to be embedded."""

    input: Annotated[
        Annotated[PromptText, Tag("text")]
        | Annotated[TokenPrompt, Tag("ids")]
        | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("texts")]
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("lists")],
        Discriminator(prompt_kind),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Positive | None, Field(description="Numbers that are kept of a vector.")] = None
    normalize: Annotated[bool | None, Field(description="Left out: as the model's files say.")] = None
    add_special_tokens: Annotated[
        object, TakenOnly("special tokens are added to a text: pass token ids for a bare one", True)
    ] = None


class TextDocument(Body):
    """A document with its text; what else it has is given back with it."""

    model_config = ConfigDict(extra="allow")

    text: PromptText


class RerankRequest(PooledFields):
    """Documents to be sorted by how well they answer a query."""

    query: PromptText
    documents: Annotated[list[PromptText | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    top_n: Annotated[Positive | None, Field(description="Results that are given, the best first; left out, all.")] = (
        None
    )
    return_documents: bool | None = None
    instruction: Annotated[PromptText | None, Field(description="The task that a reranker is given.")] = None
    max_tokens_per_doc: Annotated[object, TakenOnly("documents are judged whole: leave it out")] = None
    max_chunks_per_doc: Annotated[object, TakenOnly("documents are judged whole: leave it out", 1)] = None
    rank_fields: Annotated[object, TakenOnly("the text is judged: leave it out", ["text"])] = None


class ScoreRequest(PooledFields):
    """Pairs of texts to be scored: one with each of several, or as many of both."""

    text_1: PromptText | Texts
    text_2: PromptText | Texts
    instruction: PromptText | None = None


class OllamaFields(Body):
    """What Ollama's clients send beside texts."""

    model: Annotated[Name | None, Field(description="The served one, with or without :latest.")] = None
    options: Annotated[dict[str, Any] | None, UNUSED] = None
    keep_alive: Annotated[float | str | None, UNUSED] = None


class OllamaEmbedRequest(OllamaFields):
    """Texts to be embedded; none are answered with no vectors."""

    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: Annotated[bool | None, Field(description="False refuses a text that is longer than the context.")] = None
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT), WHOLE] | None = None


class OllamaEmbeddingsRequest(OllamaFields):
    """One text to be embedded, in the older form."""

    prompt: Text | None = None


class EmbeddingUsage(Reply):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Reply):
    """The vector of one input: numbers, or float32 little-endian in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Reply):
    """The vectors of all inputs, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankResult(Reply):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankReply(Reply):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class Score(Reply):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Reply):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class OllamaEmbedReply(Reply):
    """Vectors in the order of the texts; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(Reply):
    """One vector."""

    embedding: list[float]

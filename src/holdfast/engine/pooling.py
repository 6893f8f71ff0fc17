"""Pooling: what a model can give beside answers: embeddings, and scores of pairs of texts; prompts of rerankers; no torch.

    embeddings    any decoder: the final hidden state of the last token
    scores        an embedding model: cosine of two embeddings
                  a reranker that answers yes or no: p(yes) / (p(yes) + p(no)) of the token after its prompt

A reranker's two probabilities come from one request, whose choice is between the two tokens: the log-probability of the chosen one is
always told, and that of the other if it is among the most likely. If it is not, a second request allows the other alone. Equal
prompts share their pages, so the second costs one row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import RequestError
from holdfast.loading.planning.open_model import PoolingSettings
from holdfast.observability.log import get_logger
from holdfast.request.outputs import PositionLogprobs
from holdfast.request.pooling import PoolingParams, Vector, vector_of
from holdfast.request.sampling_params import MAX_LOGPROBS, SamplingParams
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.tokenizer import Tokenizer

RERANK_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
"""What Qwen3-Reranker was trained with, as its model card says; so are the parts below."""
RERANK_PREFIX = f"<|im_start|>system\n{RERANK_SYSTEM}<|im_end|>\n<|im_start|>user\n"
RERANK_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES_OR_NO = 'can only be "yes" or "no"'
SCORING_MODELS = "serve an embedding model such as Qwen/Qwen3-Embedding-0.6B, or Qwen/Qwen3-Reranker-0.6B"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A model that judges a pair by its next token."""

    tokenizer: Tokenizer
    yes_id: int
    no_id: int

    def prompt(self, query: str, document: str, instruction: str | None = None, most: int | None = None) -> list[int]:
        """Token ids of a pair, cut at the end of the document to at most `most`. Control tokens written out in texts stay text."""
        pair = f"<Instruct>: {instruction or RERANK_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        encode = self.tokenizer.encode
        inner = self.tokenizer.encode_chat(pair, self.tokenizer.control_tokens.spans(pair))
        ends = encode(RERANK_PREFIX, add_special_tokens=False), encode(RERANK_SUFFIX, add_special_tokens=False)
        num_kept = len(inner) if most is None else max(most - len(ends[0]) - len(ends[1]), 1)
        return [*ends[0], *inner[:num_kept], *ends[1]]

    def params(self, allowed: Sequence[int] = (), priority: int = 0) -> SamplingParams:
        """One token of the two, or of those that are allowed, with log-probabilities of raw logits."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=min(MAX_LOGPROBS, 20),
            allowed_token_ids=tuple(allowed) or (self.yes_id, self.no_id),
            detokenize=False,
            priority=priority,
        )

    def missing(self, told: PositionLogprobs) -> int | None:
        """The one of the two tokens that a request told nothing of."""
        return next((token_id for token_id in (self.yes_id, self.no_id) if token_id not in told), None)

    def score(self, told: PositionLogprobs) -> float:
        """p(yes) / (p(yes) + p(no))."""
        distance = told[self.no_id].logprob - told[self.yes_id].logprob
        return 1.0 / (1.0 + math.exp(min(distance, 700.0)))


class Pooling:
    """What one model can."""

    def __init__(
        self,
        settings: PoolingSettings | None = None,
        name: str = "the model",
        hidden_size: int | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.settings = settings or PoolingSettings()
        self.name = name
        self.hidden_size = hidden_size
        """None if it is not known before the first vector."""
        self.reranker = reranker
        self._has_told = False

    @property
    def is_embedding(self) -> bool:
        """Whether the model was made for embeddings."""
        return self.reranker is None and (self.settings.is_embedding or "embed" in self.name.lower())

    def check_answers(self) -> None:
        """RequestError if the model cannot choose tokens."""
        if not self.settings.has_head:
            raise RequestError(
                f"{self.name} cannot answer a prompt",
                "its checkpoint has no language-model head, so it gives embeddings alone",
                "use /v1/embeddings or LLM.embed, or take another model",
            )

    def check(self, params: PoolingParams) -> None:
        """RequestError if an embedding cannot be had; a model that was made for something else is told once in the log."""
        if self.settings.refusal:
            raise RequestError(
                f"{self.name} gives no embeddings here", self.settings.refusal, "take a model with last-token pooling"
            )
        if self.hidden_size is not None and (params.dimensions or 0) > self.hidden_size:
            raise RequestError(
                f"dimensions={params.dimensions} is too large",
                f"a vector of {self.name} has {self.hidden_size}",
                "ask for fewer, or leave it out",
            )
        if not self.is_embedding and not self._has_told:
            self._has_told = True
            _log.warning(
                "%s was not made for embeddings, so similar texts may lie far apart; Qwen3-Embedding models do better "
                "(told once)",
                self.name,
            )

    def vector(self, pooled: bytes, params: PoolingParams) -> Vector:
        """An embedding from a hidden state."""
        normalizes = self.settings.normalizes if params.normalize is None else params.normalize
        # What is cut is normalised again, or its length would tell nothing.
        return vector_of(pooled, params.dimensions, normalizes)

    def check_scores(self) -> None:
        """RequestError if pairs of texts cannot be scored."""
        if self.reranker is None and not self.is_embedding:
            raise RequestError(
                f"{self.name} gives no scores", "it is neither an embedding model nor a reranker", SCORING_MODELS
            )
        if self.reranker is None:
            self.check(PoolingParams())


def find_reranker(name: str, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> Reranker | None:
    """A reranker that answers yes or no, known by its name or by what its chat template says; None if it is none."""
    if tokenizer is None or not ("reranker" in name.lower() or (template and YES_OR_NO in template.source)):
        return None
    yes_id, no_id = tokenizer.vocabulary_id("yes"), tokenizer.vocabulary_id("no")
    if yes_id is None or no_id is None:
        _log.warning("%s is called a reranker, and its vocabulary has no tokens yes and no: it gives no scores", name)
        return None
    return Reranker(tokenizer, yes_id, no_id)

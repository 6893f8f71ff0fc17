"""Pooling: embeddings of texts and scores of pairs; prompts of rerankers; no torch.

    embeddings    any decoder: the final hidden state of the last token
    scores        an embedding model: cosine of two embeddings
                  a reranker that answers yes or no: p(yes) / (p(yes) + p(no)) of the token after its prompt

A reranker's two probabilities come from one request that allows the two tokens. It returns the log-probability of the
chosen one, and of the other if that is among the most likely. Otherwise a second request allows the other alone. Equal
prompts share their pages, so it costs one row.
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
"""The prompt that Qwen3-Reranker was trained with (its model card), like the parts below."""
RERANK_PREFIX = f"<|im_start|>system\n{RERANK_SYSTEM}<|im_end|>\n<|im_start|>user\n"
RERANK_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES_OR_NO = 'can only be "yes" or "no"'
SCORING_MODELS = "an embedding model such as Qwen/Qwen3-Embedding-0.6B, or Qwen/Qwen3-Reranker-0.6B"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A model that judges a pair by its next token."""

    tokenizer: Tokenizer
    yes_id: int
    no_id: int

    def prompt(self, query: str, document: str, instruction: str | None = None, most: int | None = None) -> list[int]:
        """Encode a pair, cut at the end of the document to `most` tokens. Control tokens in texts stay text."""
        pair = f"<Instruct>: {instruction or RERANK_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        encode = self.tokenizer.encode
        inner = self.tokenizer.encode_chat(pair, self.tokenizer.control_tokens.spans(pair))
        ends = encode(RERANK_PREFIX, add_special_tokens=False), encode(RERANK_SUFFIX, add_special_tokens=False)
        num_kept = len(inner) if most is None else max(most - len(ends[0]) - len(ends[1]), 1)
        return [*ends[0], *inner[:num_kept], *ends[1]]

    def params(self, allowed: Sequence[int] = (), priority: int = 0) -> SamplingParams:
        """Return params for one token of the two, or of `allowed`, with logprobs."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=min(MAX_LOGPROBS, 20),
            allowed_token_ids=tuple(allowed) or (self.yes_id, self.no_id),
            detokenize=False,
            priority=priority,
        )

    def missing(self, logprobs: PositionLogprobs) -> int | None:
        """Return the one of the two tokens without a log-probability."""
        return next((token_id for token_id in (self.yes_id, self.no_id) if token_id not in logprobs), None)

    def score(self, logprobs: PositionLogprobs) -> float:
        """p(yes) / (p(yes) + p(no))."""
        distance = logprobs[self.no_id].logprob - logprobs[self.yes_id].logprob
        return 1.0 / (1.0 + math.exp(min(distance, 700.0)))


class Pooling:
    """Pooling of one model."""

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
        self.reranker = reranker
        self._has_warned = False

    @property
    def is_embedding(self) -> bool:
        """True if the model was trained for embeddings."""
        return self.reranker is None and (self.settings.is_embedding or "embed" in self.name.lower())

    def check_answers(self) -> None:
        """Raise RequestError if the model cannot sample tokens."""
        if not self.settings.has_head:
            raise RequestError("request.no_head", model=self.name)

    def check(self, params: PoolingParams) -> None:
        """Raise RequestError if the model has no embeddings; warn once if it was not trained for them."""
        if self.settings.refusal:
            raise RequestError("request.no_embeddings", model=self.name, reason=self.settings.refusal)
        if self.hidden_size is not None and (params.dimensions or 0) > self.hidden_size:
            raise RequestError(
                "request.dimensions_too_large", value=params.dimensions, maximum=self.hidden_size, model=self.name
            )
        if not self.is_embedding and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s was not trained for embeddings, so similar texts may lie far apart; Qwen3-Embedding models do better "
                "(logged once)",
                self.name,
            )

    def vector(self, pooled: bytes, params: PoolingParams) -> Vector:
        """Make an embedding of a hidden state."""
        normalizes = self.settings.normalizes if params.normalize is None else params.normalize
        return vector_of(pooled, params.dimensions, normalizes)

    def check_scores(self) -> None:
        """Raise RequestError if the model cannot score pairs."""
        if self.reranker is None and not self.is_embedding:
            raise RequestError("request.no_scores", model=self.name, examples=SCORING_MODELS)
        if self.reranker is None:
            self.check(PoolingParams())


def find_reranker(name: str, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> Reranker | None:
    """Return a yes-or-no reranker, known by its name or its chat template; None for another model."""
    if tokenizer is None or not ("reranker" in name.lower() or (template and YES_OR_NO in template.source)):
        return None
    yes_id, no_id = tokenizer.vocabulary_id("yes"), tokenizer.vocabulary_id("no")
    if yes_id is None or no_id is None:
        _log.warning("%s is called a reranker, but its vocabulary has no tokens yes and no: no scores", name)
        return None
    return Reranker(tokenizer, yes_id, no_id)

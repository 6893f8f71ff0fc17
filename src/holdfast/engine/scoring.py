"""Scoring: requests for pairs of texts, and their scores: a cosine, or a reranker's p(yes); no torch.

prepare   makes the request of each input: a distinct text for its embedding, or a pair for a reranker
again     a second request if the first returned the log-probability of one token only
scores    one for each pair
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.engine.admission import PreparedRequest
from holdfast.engine.engine import Engine
from holdfast.engine.pooling import Reranker
from holdfast.errors import HoldfastError, PromptError, RequestError
from holdfast.request.outputs import PositionLogprobs, RequestOutput
from holdfast.request.pooling import PoolingParams, Vector, cosine


@dataclass(frozen=True)
class Scoring:
    """The pairs of one call; `queries` and `documents` are equally long."""

    engine: Engine
    queries: Sequence[str]
    documents: Sequence[str]
    instruction: str | None = field(default=None, kw_only=True)
    cache_salt: str | None = field(default=None, kw_only=True)
    truncate: bool = field(default=False, kw_only=True)
    priority: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.engine.pooling.check_scores()
        assert len(self.queries) == len(self.documents), f"{len(self.queries)} queries, {len(self.documents)} documents"

    @cached_property
    def texts(self) -> list[str]:
        """Each text once, for an embedding model."""
        return list(dict.fromkeys((*self.queries, *self.documents)))

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        return list(zip(self.queries, self.documents, strict=True))

    @property
    def _reranker(self) -> Reranker | None:
        return self.engine.pooling.reranker

    def __len__(self) -> int:
        """Requests to make."""
        return len(self.texts) if self._reranker is None else len(self._pairs)

    def text_of(self, place: int) -> str:
        """Return the text of a request, or the document of a pair, for errors."""
        return self.texts[place] if self._reranker is None else self._pairs[place][1]

    def prepare(self, place: int) -> PreparedRequest:
        """Make the request of one text or pair."""
        if self._reranker is None:
            text = self.texts[place]
            return self.engine.prepare_pooled(
                text, cache_salt=self.cache_salt, truncate=self.truncate, priority=self.priority
            )
        query, document = self._pairs[place]
        if not query or not document:
            raise PromptError("request.prompt_empty")
        most = self.engine.core.facts.longest - 1 if self.truncate else None
        token_ids = self._reranker.prompt(query, document, self.instruction, most)
        params = self._reranker.params(priority=self.priority)
        return self.engine.prepare({"prompt_token_ids": token_ids}, params, cache_salt=self.cache_salt)

    def again(self, place: int, output: RequestOutput) -> PreparedRequest | None:
        """Return a second request if the first lacks one of the two tokens."""
        if self._reranker is None:
            return None
        missing = self._reranker.missing(_logprobs(output))
        if missing is None:
            return None
        params = self._reranker.params((missing,), self.priority)
        return self.engine.prepare({"prompt_token_ids": output.prompt_token_ids}, params, cache_salt=self.cache_salt)

    def scores(self, outputs: Sequence[RequestOutput], later: Mapping[int, RequestOutput]) -> list[float]:
        """Score every pair from the outputs of all requests; `later` has second requests by place."""
        reranker = self._reranker
        if reranker is not None:
            found = [_logprobs(output) for output in outputs]
            return [
                reranker.score({**own, **(_logprobs(later[place]) if place in later else {})})
                for place, own in enumerate(found)
            ]
        pooling, params = self.engine.pooling, PoolingParams()
        pairs = zip(self.texts, outputs, strict=True)
        vectors: dict[str, Vector] = {text: pooling.vector(pooled_of(output), params) for text, output in pairs}
        return [cosine(vectors[query], vectors[document]) for query, document in self._pairs]

    def used(self, outputs: Sequence[RequestOutput], pair: int) -> list[RequestOutput]:
        """Return the outputs that gave the score of a pair."""
        if self._reranker is not None:
            return [outputs[pair]]
        return [outputs[self.texts.index(text)] for text in self._pairs[pair]]


def _logprobs(output: RequestOutput) -> PositionLogprobs:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise failed(output)
    return dict(logprobs[0])


def pooled_of(output: RequestOutput) -> bytes:
    """Return the hidden state of a pooled request, or raise its error."""
    pooled = output.outputs[0].pooled
    if not pooled:
        raise failed(output)
    return pooled


def failed(output: RequestOutput) -> HoldfastError:
    """Return the error of a request without a result."""
    return RequestError("request.failed", reason=output.error or "it was aborted")


def paired(text_1: object, text_2: object) -> tuple[list[str], list[str]]:
    """Pair texts: one with each of several, or two lists of equal length."""
    first, second = _texts(text_1), _texts(text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError("request.pairs_differ", first=len(first), second=len(second))
    return first, second


def _texts(given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("request.texts_type", kind=type(given).__name__)
    return [text for text in texts if isinstance(text, str)]

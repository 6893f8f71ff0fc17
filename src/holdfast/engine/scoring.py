"""Scoring: pairs of texts as requests of an engine, and scores from what they bring: by cosine, or by a reranker's yes; no torch.

prepare   the request of each input: a distinct text for its embedding, or a pair for its judgement
again     a second request if the first told of one token only
scores    one for each pair
"""

from collections.abc import Mapping, Sequence

from holdfast.engine.admission import PreparedRequest
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError, PromptError, RequestError
from holdfast.request.outputs import PositionLogprobs, RequestOutput
from holdfast.request.pooling import PoolingParams, Vector, cosine


class Scoring:
    """The pairs of one call; `queries` and `documents` are equally long."""

    def __init__(
        self,
        engine: Engine,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        cache_salt: str | None = None,
        truncate: bool = False,
        priority: int = 0,
    ) -> None:
        engine.pooling.check_scores()
        assert len(queries) == len(documents), f"{len(queries)} queries for {len(documents)} documents"
        self._engine = engine
        self._pairs = list(zip(queries, documents, strict=True))
        self._reranker = engine.pooling.reranker
        self._instruction = instruction
        self._salt = cache_salt
        self._truncate = truncate
        self._priority = priority
        self.texts = list(dict.fromkeys((*queries, *documents)))
        """Of an embedding model: each text once."""

    def __len__(self) -> int:
        """Requests to make."""
        return len(self.texts) if self._reranker is None else len(self._pairs)

    def text_of(self, place: int) -> str:
        """The text of a request, or the document of a pair: what an error is about."""
        return self.texts[place] if self._reranker is None else self._pairs[place][1]

    def prepare(self, place: int) -> PreparedRequest:
        """The request of one text, or of one pair."""
        if self._reranker is None:
            text = self.texts[place]
            return self._engine.prepare_pooled(
                text, cache_salt=self._salt, truncate=self._truncate, priority=self._priority
            )
        query, document = self._pairs[place]
        if not query or not document:
            raise PromptError("an empty text was given", "there is nothing to judge", "pass at least one character")
        most = self._engine.core.facts.longest - 1 if self._truncate else None
        token_ids = self._reranker.prompt(query, document, self._instruction, most)
        params = self._reranker.params(priority=self._priority)
        return self._engine.prepare({"prompt_token_ids": token_ids}, params, cache_salt=self._salt)

    def again(self, place: int, output: RequestOutput) -> PreparedRequest | None:
        """One more request, if the first did not tell of both tokens."""
        if self._reranker is None:
            return None
        missing = self._reranker.missing(_told(output))
        if missing is None:
            return None
        params = self._reranker.params((missing,), self._priority)
        return self._engine.prepare({"prompt_token_ids": output.prompt_token_ids}, params, cache_salt=self._salt)

    def scores(self, outputs: Sequence[RequestOutput], later: Mapping[int, RequestOutput]) -> list[float]:
        """Of every pair, from the outputs of all requests; `later` has those of second ones by place."""
        reranker = self._reranker
        if reranker is not None:
            told = [_told(output) for output in outputs]
            return [
                reranker.score({**own, **(_told(later[place]) if place in later else {})})
                for place, own in enumerate(told)
            ]
        pooling, params = self._engine.pooling, PoolingParams()
        pairs = zip(self.texts, outputs, strict=True)
        vectors: dict[str, Vector] = {text: pooling.vector(pooled_of(output), params) for text, output in pairs}
        return [cosine(vectors[query], vectors[document]) for query, document in self._pairs]

    def used(self, outputs: Sequence[RequestOutput], pair: int) -> list[RequestOutput]:
        """The outputs that the score of a pair comes from."""
        if self._reranker is not None:
            return [outputs[pair]]
        return [outputs[self.texts.index(text)] for text in self._pairs[pair]]


def _told(output: RequestOutput) -> PositionLogprobs:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise failed(output)
    return dict(logprobs[0])


def pooled_of(output: RequestOutput) -> bytes:
    """The hidden state that a pooled request brought, or its error."""
    pooled = output.outputs[0].pooled
    if not pooled:
        raise failed(output)
    return pooled


def failed(output: RequestOutput) -> HoldfastError:
    """Why a request brought nothing."""
    return RequestError("a text was given", output.error or "its request was aborted", "change it, or try again")


def paired(text_1: object, text_2: object) -> tuple[list[str], list[str]]:
    """Texts in pairs: one with each of several, or as many of both."""
    first, second = _texts(text_1), _texts(text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"{len(first)} and {len(second)} texts were given",
            "one text goes with each of several, or both lists are equally long",
            "change the lists",
        )
    return first, second


def _texts(given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"texts of type {type(given).__name__} were given",
            "a string or a list of strings works",
            "pass one of these",
        )
    return [text for text in texts if isinstance(text, str)]

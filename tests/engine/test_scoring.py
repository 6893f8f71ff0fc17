"""Scoring over a fake engine: each pair has its own request and its own score, also the second and the last."""

import math

import numpy as np
import pytest

from engine.fakes import hidden_of, make_engine, run_all, shared_tokenizer
from error_codes import raises_code
from holdfast.engine.outputs import OutputAssembler
from holdfast.engine.pooling import Pooling, Reranker
from holdfast.engine.scoring import Scoring, paired
from holdfast.errors import PromptError, RequestError
from holdfast.request.outputs import CompletionDelta, Logprob, RequestOutput
from holdfast.request.pooling import cosine

YES, NO = ord("y"), ord("n")


def embedding_engine():
    return make_engine(pooling=Pooling(name="an embedding model"))


def reranking_engine():
    return make_engine(
        max_model_len=1024, num_pages=600, pooling=Pooling(reranker=Reranker(shared_tokenizer(), YES, NO))
    )


def reported(*logprobs: tuple[int, float]) -> RequestOutput:
    """The output of a request that chose the first of these tokens."""
    assembler = OutputAssembler(None, [1, 2, 3], 1)
    measured = {token: Logprob(value, 1, "") for token, value in logprobs}
    assembler.add(CompletionDelta("r", 0, "", (logprobs[0][0],), (measured,), "length", None))
    return assembler.output()


def test_embedding_scores_are_cosines_of_each_pair() -> None:
    engine = embedding_engine()
    queries, documents = ["aab", "zz", "aab"], ["ab", "aab", "qqq"]
    scoring = Scoring(engine, queries, documents)
    assert scoring.texts == ["aab", "zz", "ab", "qqq"]
    assert len(scoring) == 4
    outputs = []
    for place in range(len(scoring)):
        name = engine.submit(scoring.prepare(place))
        assembler = OutputAssembler(None, [], 1)
        for delta in run_all(engine)[name, 0]:
            assembler.add(delta)
        outputs.append(assembler.output())
        assert scoring.text_of(place) == scoring.texts[place]
        assert scoring.again(place, outputs[-1]) is None
    vectors = {text: np.frombuffer(hidden_of(list(text.encode())), "<f4") for text in scoring.texts}
    expected = [cosine(vectors[query], vectors[document]) for query, document in zip(queries, documents, strict=True)]
    assert scoring.scores(outputs, {}) == pytest.approx(expected, abs=1e-6)
    assert [scoring.used(outputs, pair) for pair in range(3)] == [
        [outputs[0], outputs[2]],
        [outputs[1], outputs[0]],
        [outputs[0], outputs[3]],
    ]


def test_reranker_has_a_request_for_each_pair() -> None:
    engine = reranking_engine()
    reranker = engine.pooling.reranker
    assert reranker is not None
    pairs = [("one", "first"), ("two", "second"), ("one", "third")]
    scoring = Scoring(engine, *zip(*pairs, strict=True), instruction="do", cache_salt="salt", priority=4)
    assert len(scoring) == 3
    for place, (query, document) in enumerate(pairs):
        prepared = scoring.prepare(place)
        assert prepared.prompt_token_ids == reranker.prompt(query, document, "do")
        assert (prepared.cache_salt, prepared.params.priority, prepared.max_tokens) == (b"salt", 4, 1)
        assert prepared.params.allowed_token_ids == (YES, NO)
        assert scoring.text_of(place) == document


def test_second_request_of_a_pair_asks_for_the_missing_token() -> None:
    scoring = Scoring(reranking_engine(), ["q"] * 3, ["a", "b", "c"], cache_salt="salt", priority=4)
    outputs = [reported((YES, -0.5), (NO, -1.5)), reported((YES, -0.25)), reported((NO, -0.125))]
    assert scoring.again(0, outputs[0]) is None
    for place, missing in ((1, NO), (2, YES)):
        again = scoring.again(place, outputs[place])
        assert again is not None
        assert again.params.allowed_token_ids == (missing,)
        assert (again.prompt_token_ids, again.cache_salt, again.params.priority) == ([1, 2, 3], b"salt", 4)
    scores = scoring.scores(outputs, {1: reported((NO, -3.0)), 2: reported((YES, -2.0))})
    expected = [1 / (1 + math.exp(no - yes)) for yes, no in ((-0.5, -1.5), (-0.25, -3.0), (-2.0, -0.125))]
    assert scores == pytest.approx(expected)
    assert scoring.used(outputs, 2) == [outputs[2]]


def test_long_pair_is_cut_in_its_document_with_truncate() -> None:
    engine = reranking_engine()
    longest = engine.core.facts.longest
    with pytest.raises(PromptError):
        Scoring(engine, ["q"], ["d" * 5000]).prepare(0)
    prepared = Scoring(engine, ["q"], ["d" * 5000], truncate=True).prepare(0)
    assert len(prepared.prompt_token_ids) == longest - 1


def test_wrong_texts_are_refused() -> None:
    assert paired("q", ["a", "b"]) == (["q", "q"], ["a", "b"])
    assert paired(["q"], "a") == (["q"], ["a"])
    assert paired(["q", "r"], ("a", "b")) == (["q", "r"], ["a", "b"])
    for wrong in ((["q", "r"], ["a"]), (["q", "r"], ["a", "b", "c"]), ([], "a"), ("q", []), ("q", ["a", 5]), (5, "a")):
        with pytest.raises(RequestError):
            paired(*wrong)
    engine = reranking_engine()
    for query, document in (("", "a"), ("a", "")):
        with raises_code("request.prompt_empty", PromptError):
            Scoring(engine, ["q", query], ["d", document]).prepare(1)
    with pytest.raises(RequestError):
        Scoring(make_engine(), ["q"], ["d"])
    failed = OutputAssembler(None, [], 1)
    failed.add(CompletionDelta("r", 0, "", (), None, "error", None, error="why not"))
    with pytest.raises(RequestError, match="why not"):
        Scoring(engine, ["q"], ["d"]).scores([failed.output()], {})

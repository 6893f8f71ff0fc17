"""Embeddings, reranking and scores over HTTP: OpenAI's and Ollama's own clients, Jina's and Cohere's shapes, wrong bodies."""

import base64
import math
import struct

import httpx
import ollama
import openai
import pytest

from engine.fakes import HIDDEN_SIZE, hidden_of
from for_each import for_each
from holdfast.engine.pooling import Pooling
from holdfast.loading.planning.open_model import PoolingSettings
from server.served import MODEL, Served, until

TEXTS = ["hello", "a much longer text, of several words", "olleh"]


def unit(text: str | list[int], dimensions: int | None = None) -> list[float]:
    token_ids = list(text.encode()) if isinstance(text, str) else text
    vector = struct.unpack(f"<{HIDDEN_SIZE}f", hidden_of(token_ids))[:dimensions]
    length = math.sqrt(sum(number * number for number in vector))
    return [number / length for number in vector]


def cosine(one: str, other: str) -> float:
    return sum(left * right for left, right in zip(unit(one), unit(other), strict=True))


@pytest.fixture(scope="module")
def api(server: Served):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def ollama_api(server: Served):
    client = ollama.Client(server.url)
    yield client
    client._client.close()


@pytest.fixture
def pooling(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    """pooling(value): the model of the app is another for one test."""
    engine = client.app.state.service.llm.engine  # type: ignore[attr-defined]

    def replace(value: Pooling) -> None:
        for holder in (engine, engine.front.admission):
            monkeypatch.setattr(holder, "pooling", value)

    return replace


def reported(answer: httpx.Response, status: int, param: str | None, words: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words == error["code"] or words in error["message"]


@for_each("encoding", ["float", "base64", openai.NOT_GIVEN])
def test_openai_client_embeds_in_order(api, encoding):
    found = api.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding)
    assert (found.object, found.model, [one.index for one in found.data]) == ("list", MODEL, [0, 1, 2])
    for text, one in zip(TEXTS, found.data, strict=True):
        numbers = one.embedding
        if isinstance(numbers, str):
            numbers = struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(numbers))
        assert list(numbers) == pytest.approx(unit(text), abs=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS))


def test_openai_client_embeds_every_kind_of_input(api):
    for given, ids in (("hello", [b"hello"]), ([104, 105], [b"hi"]), ([[104], [105, 106]], [b"h", b"ij"])):
        found = api.embeddings.create(model=MODEL, input=given, dimensions=10)
        assert [one.embedding for one in found.data] == [pytest.approx(unit(list(own), 10), abs=1e-6) for own in ids]


def test_embedding_numbers_are_exact_float32(client):
    body = client.post("/v1/embeddings", json={"input": "hello", "encoding_format": "float"}).json()
    coded = client.post("/v1/embeddings", json={"input": "hello", "encoding_format": "base64"}).json()
    exact = base64.b64decode(coded["data"][0]["embedding"])
    assert struct.pack(f"<{HIDDEN_SIZE}f", *body["data"][0]["embedding"]) == exact


def test_embeddings_unnormalized_is_the_hidden_state(client):
    body = client.post("/v1/embeddings", json={"input": "aab", "normalize": False}).json()
    assert struct.pack(f"<{HIDDEN_SIZE}f", *body["data"][0]["embedding"]) == hidden_of(list(b"aab"))


def test_embeddings_with_more_inputs_than_the_queue_answer(client):
    inputs = [f"text {place}" for place in range(200)]
    data = client.post("/v1/embeddings", json={"input": inputs}).json()["data"]
    assert [one["index"] for one in data] == list(range(200))
    assert data[150]["embedding"] == pytest.approx(unit("text 150"), abs=1e-6)


@for_each(
    "body, param, words",
    [
        ({"input": ["fine", "x" * 2000]}, "input[1]", "maximum context length is 1024"),
        ({"input": ["fine", ""]}, "input[1]", "at least 1 character"),
        ({"input": [[1], [99999]]}, "input[1]", "request.token_outside_vocabulary"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": "x", "dimensions": HIDDEN_SIZE + 1}, "dimensions", "request.dimensions_too_large"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "-1"),
        ({"prompt": "x"}, "prompt", "Did you mean input?"),
    ],
)
def test_embeddings_wrong_request_names_its_field(client, body, param, words):
    before = client.app.state.service.llm.stats().num_requests
    reported(client.post("/v1/embeddings", json=body), 400, param, words)
    assert client.app.state.service.llm.stats().num_requests == before, "none runs if one is wrong"


def test_embedding_of_another_model_name_is_not_found(client):
    reported(client.post("/v1/embeddings", json={"input": "x", "model": "ada"}), 404, "model", "'ada' does not exist")


def test_embeddings_truncate_prompt_tokens_cuts_long_input(client):
    body = client.post("/v1/embeddings", json={"input": "x" * 2000, "truncate_prompt_tokens": -1}).json()
    assert body["usage"]["prompt_tokens"] == 1024


def test_embeddings_of_another_pooling_mode_are_refused(client, pooling):
    pooling(Pooling(PoolingSettings(is_embedding=True, refusal="modules.json asks for mean pooling"), MODEL))
    reported(client.post("/v1/embeddings", json={"input": "x"}), 400, "model", "mean pooling")


def test_chat_of_a_model_without_a_head_is_refused(client, pooling):
    pooling(Pooling(PoolingSettings(has_head=False), MODEL, HIDDEN_SIZE))
    query = {"messages": [{"role": "user", "content": "hi"}]}
    reported(client.post("/v1/chat/completions", json=query), 400, None, "no language-model head")
    assert client.post("/v1/embeddings", json={"input": "hi"}).status_code == 200
    shown = client.post("/api/show", json={"model": MODEL}).json()
    assert not {"completion", "tools", "thinking"} & set(shown["capabilities"])


def test_ollama_show_of_an_embedding_model_lists_embedding(client, pooling):
    pooling(Pooling(PoolingSettings(is_embedding=True), MODEL, HIDDEN_SIZE))
    assert "embedding" in client.post("/api/show", json={"model": MODEL}).json()["capabilities"]


def test_rerank_sorts_by_cosine(client):
    documents = ["zzzz", "olleh", {"text": "hello you", "url": "a"}]
    body = client.post("/v1/rerank", json={"query": "hello", "documents": documents}).json()
    scores = [cosine("hello", text) for text in ("zzzz", "olleh", "hello you")]
    order = sorted(range(3), key=lambda place: -scores[place])
    assert order == [1, 2, 0]
    assert [result["index"] for result in body["results"]] == order
    found = [result["relevance_score"] for result in body["results"]]
    assert found == pytest.approx([scores[place] for place in order], abs=1e-6)
    assert [result["document"] for result in body["results"]] == [
        {"text": "olleh"},
        {"text": "hello you", "url": "a"},
        {"text": "zzzz"},
    ]
    assert body["usage"]["total_tokens"] == sum(map(len, ("hello", "zzzz", "olleh", "hello you")))


def test_rerank_keeps_the_order_of_equal_documents(client):
    documents = ["olleh", "hello", "zz", "ehllo"]
    results = client.post("/v1/rerank", json={"query": "hello", "documents": documents}).json()["results"]
    assert [result["index"] for result in results] == [0, 1, 3, 2]
    assert [result["document"]["text"] for result in results] == ["olleh", "hello", "ehllo", "zz"]


def test_rerank_paths_follow_jina_and_cohere(client):
    query = {"model": MODEL, "query": "hello", "documents": ["a", "hello"], "top_n": 1}
    for path, has_documents in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
        [result] = client.post(path, json=query).json()["results"]
        assert (result["index"], "document" in result) == (1, has_documents)
    [result] = client.post("/v1/rerank", json={**query, "return_documents": False}).json()["results"]
    assert "document" not in result


@for_each(
    "body, param, words",
    [
        ({"query": "a", "documents": []}, "documents", "at least 1 item"),
        ({"query": "a", "documents": ["b", "x" * 2000]}, "documents[1]", "maximum context length"),
        ({"query": "x" * 2000, "documents": ["b"]}, "query", "maximum context length"),
        ({"query": "a", "documents": [{"txt": "b"}]}, "documents[0].text", "is required"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "scored whole"),
        ({"documents": ["b"]}, "query", "is required"),
    ],
)
def test_rerank_wrong_request_names_its_field(client, body, param, words):
    reported(client.post("/v1/rerank", json=body), 400, param, words)


def test_rerank_of_a_chat_model_names_models_that_can(client, pooling):
    pooling(Pooling(PoolingSettings(), MODEL, HIDDEN_SIZE))
    query = {"query": "a", "documents": ["b"]}
    reported(client.post("/v1/rerank", json=query), 400, "model", "Qwen/Qwen3-Reranker-0.6B")
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_score_pairs_texts(client):
    body = client.post("/v1/score", json={"text_1": "hello", "text_2": ["olleh", "zz"]}).json()
    assert [one["score"] for one in body["data"]] == pytest.approx([1.0, cosine("hello", "zz")], abs=1e-6)
    body = client.post("/score", json={"text_1": ["a", "b"], "text_2": ["a", "b"]}).json()
    assert [one["score"] for one in body["data"]] == pytest.approx([1.0, 1.0], abs=1e-6)
    reported(client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": "c"}), 400, "text_2", "2 and 1 texts")


def test_ollama_client_embeds(ollama_api):
    client = ollama_api
    found = client.embed(model=f"{MODEL}:latest", input=TEXTS)
    assert [list(vector) for vector in found.embeddings] == [pytest.approx(unit(text), abs=1e-6) for text in TEXTS]
    assert (found.model, found.prompt_eval_count) == (f"{MODEL}:latest", sum(map(len, TEXTS)))
    cut = client.embed(model=MODEL, input="hello", dimensions=10, keep_alive="5m", options={"num_ctx": 64})
    assert list(cut.embeddings[0]) == pytest.approx(unit("hello", 10), abs=1e-6)
    assert list(client.embeddings(model=MODEL, prompt="hello").embedding) == pytest.approx(unit("hello"), abs=1e-6)
    assert list(client.embed(model=MODEL, input=[]).embeddings) == []


def test_ollama_client_truncates_by_default(ollama_api):
    client = ollama_api
    assert client.embed(model=MODEL, input="x" * 2000).prompt_eval_count == 1024
    with pytest.raises(ollama.ResponseError):
        client.embed(model=MODEL, input="x" * 2000, truncate=False)
    with pytest.raises(ollama.ResponseError):
        client.embed(model="other", input="x")


def test_metrics_count_embedded_prompts_and_no_answers(server, api):
    before = server.engine.stats()
    api.embeddings.create(model=MODEL, input=["some text", "more"])
    until(lambda: not server.engine.has_unfinished(), "the engine goes on")
    after = server.engine.stats()
    assert after.num_output_tokens == before.num_output_tokens
    assert after.num_requests == before.num_requests + 2

"""What stands around answers: headers of streams, defaults, lists, loads, tokens of texts and conversations, times."""

import asyncio
import io
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.request.outputs import CompletionDelta
from holdfast.server.app import make_app
from holdfast.server.logs import RequestLog
from holdfast.server.service import Service
from server.families import ALL, Chat, Family, Ollama, ask, events
from server.served import NAMES, make_served_engine, said, user

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "now")]


@for_each("family", ALL)
def test_stream_has_headers_that_keep_it_flowing(client, family: Family):
    answer = client.post(family.path, json={**family.body([("user", said("x"))]), "stream": True})
    media_type = "application/x-ndjson" if isinstance(family, Ollama) else "text/event-stream"
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "x-request-id" in answer.headers


def test_completion_without_a_limit_has_sixteen_tokens(client):
    for limit, num_tokens in ((None, 16), (1, 1), (20, 20)):
        body = {"prompt": "Hello"} | ({} if limit is None else {"max_tokens": limit})
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == num_tokens


@for_each("stream", [False, True])
def test_reasoning_is_left_out_if_the_request_says_so(client, stream):
    """It is counted all the same."""
    body = {"messages": user(said("<think>why</think>x")), "include_reasoning": False}
    reported = ask(client, Chat(), body, stream=stream)
    assert (reported.only.reasoning, reported.only.content) == ("", "x")
    text = client.post(Chat.path, json={**body, "stream": stream}).text
    assert "why" not in text
    counted = client.post(Chat.path, json=body).json()["usage"]["completion_tokens_details"]
    assert counted == {"reasoning_tokens": 3}


def test_logprobs_without_a_number_have_no_others(client):
    body = {"messages": user(said("ab")), "logprobs": True}
    entries = client.post(Chat.path, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in entries] == [("a", []), ("b", []), ("<eos>", [])]
    refused = client.post(Chat.path, json={"messages": user("x"), "top_logprobs": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
    body = {"input": said("ab"), "include": ["message.output_text.logprobs"]}
    part = client.post("/v1/responses", json=body).json()["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "<eos>"]
    plain = client.post("/v1/responses", json={"input": said("ab")}).json()["output"][0]["content"][0]
    assert plain["logprobs"] == []


def test_chat_speaker_names_reach_the_template(client, rendered):
    messages = [{"role": "user", "content": text, "name": name} for text, name in (("a", "ann"), (said("x"), "bob"))]
    assert client.post(Chat.path, json={"messages": messages}).status_code == 200
    assert [message["name"] for message in rendered[-1]["messages"]] == ["ann", "bob"]


@for_each(
    "path, body, reason",
    [
        ("/api/generate", {}, "load"),
        ("/api/generate", {"prompt": ""}, "load"),
        ("/api/generate", {"keep_alive": "5m"}, "load"),
        *(("/api/generate", {"keep_alive": off}, "unload") for off in (0, "0", "0s", "0m")),
        ("/api/chat", {"messages": []}, "load"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "unload"),
    ],
)
def test_ollama_request_without_a_prompt_loads(client, path, body, reason):
    value = client.post(path, json={"model": "fake:latest", **body}).json()
    assert (value["done"], value["done_reason"], value["model"]) == (True, reason, "fake:latest")
    said_by = value["message"] if path == "/api/chat" else {"content": value["response"]}
    assert said_by["content"] == ""


def test_ollama_ps_and_version_describe_the_server(client):
    [running] = client.get("/api/ps").json()["models"]
    assert (running["name"], running["model"], running["context_length"]) == ("fake:latest", "fake:latest", 1024)
    assert (len(running["digest"]), running["expires_at"] > running.get("modified_at", "2")) == (64, True)
    assert client.get("/api/version").json()["version"].count(".") == 2
    assert [client.head(path).status_code for path in ("/", "/api/tags", "/api/version")] == [200] * 3


@for_each("more", [{}, {"tools": TOOLS}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_tokenize_messages_equal_the_prompt_of_the_answer(client, more):
    messages = [*user(said("x")), {"role": "assistant", "content": said("é")}]
    counted = client.post("/tokenize", json={"messages": messages, **more}).json()
    answer = client.post(Chat.path, json={"messages": messages, **more, "return_token_ids": True}).json()
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert (counted["count"], counted["max_model_len"]) == (answer["usage"]["prompt_tokens"], 1024)


def test_tokenize_and_detokenize_round_trip(client):
    reported = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert (reported["tokens"], reported["count"], len(reported["token_strs"])) == ([97, 0xC3, 0xA9], 3, 3)
    assert client.post("/detokenize", json={"tokens": reported["tokens"]}).json() == {"prompt": "aé"}
    assert "token_strs" not in client.post("/tokenize", json={"prompt": "a"}).json()
    for body in ({}, {"prompt": "a", "messages": user("a")}):
        assert client.post("/tokenize", json=body).status_code == 400


def test_response_kept_cannot_be_streamed_again(client):
    made = client.post("/v1/responses", json={"input": said("x")}).json()
    assert client.get(f"/v1/responses/{made['id']}?stream=true").json()["error"]["param"] == "stream"
    assert client.get(f"/v1/responses/{made['id']}?stream=false").json() == made
    missing = client.get(f"/v1/responses/{made['id']}/input_items?after=none")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "after")


def test_response_input_items_are_paged(client):
    items = [{"role": "user", "content": said(str(place))} for place in range(5)]
    path = f"/v1/responses/{client.post('/v1/responses', json={'input': items}).json()['id']}/input_items"
    for order in ("asc", "desc"):
        found: list[Any] = []
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            page = client.get(f"{path}?limit=2&order={order}{after}").json()
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            found += page["data"]
            assert page["has_more"] == (len(found) < 5)
            if not page["has_more"]:
                break
        texts = [item["content"][0]["text"] for item in found]
        assert texts == [said(str(place)) for place in (range(5) if order == "asc" else reversed(range(5)))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_time_to_first_token_ends_with_the_first_token(monkeypatch, stream):
    async def answer(llm: Any, prepared: Any, request_id: Any = None) -> Any:
        yield []
        for reason in (None, None, "stop"):
            yield [CompletionDelta("r", 0, "x", (120,), None, reason, None)]
            await asyncio.sleep(0.03)

    monkeypatch.setattr(AsyncLLM, "answer", answer)
    log = io.StringIO()
    service = Service(AsyncLLM.from_engine(make_served_engine()), NAMES)
    try:
        with TestClient(make_app(service, log=RequestLog("json", stream=log)), base_url="http://localhost") as client:
            answered = client.post(Chat.path, json={"messages": user("x"), "stream": stream})
    finally:
        service.llm.shutdown()
    assert not stream or len(events(answered.text)) >= 3
    line = json.loads(log.getvalue())
    assert line["seconds"] - line["first_token_seconds"] > 0.08

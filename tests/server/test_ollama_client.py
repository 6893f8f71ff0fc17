"""Ollama's own client against a server: chats, prompts, streams, tools, formats, lists and errors as ResponseError."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from for_each import for_each
from holdfast.server.ollama_schemas import Options
from server.served import MODEL, Served, app_client, make_served_engine, said, user

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'
pytestmark = pytest.mark.slow
"""test_ollama_answers.py has the quick ones."""
THOUGHT = "<think>Hm.</think>Hello"


def look(city: str) -> str:
    """The weather.

    Args:
      city: Where.
    """
    return f"rain in {city}"


@pytest.fixture(scope="module")
def api(server: Served) -> Iterator[Any]:
    import ollama

    client = ollama.Client(server.url, timeout=30)
    yield client
    client.close()


def test_chat_whole_has_counts_and_times(api):
    done = api.chat(MODEL, user(said("Grüß Gott")), options={"temperature": 0, "seed": 3, "num_ctx": 99999})
    assert done.message.content == "Grüß Gott"
    assert (done.model, done.done, done.done_reason, done.message.role) == (MODEL, True, "stop", "assistant")
    assert done.eval_count == len("Grüß Gott".encode()) + 1
    assert done.prompt_eval_count > done.eval_count
    assert done.total_duration > 0
    assert done.load_duration == 0
    assert done.prompt_eval_duration > 0
    assert done.eval_duration > 0


def test_chat_stream_pieces_make_the_whole_answer(api):
    pieces = list(api.chat(f"{MODEL}:latest", user(said(THOUGHT)), stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Hello"
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Hm."
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("stop", len(THOUGHT) + 1)
    assert {piece.model for piece in pieces} == {f"{MODEL}:latest"}


@for_each("stream", [False, True])
def test_tool_round_trip_gives_an_answer(api, rendered, stream):
    rendered.clear()
    given = user(said(f"Let me see. {CALL}{CALL}"))
    done = api.chat(MODEL, given, tools=[look], stream=stream)
    calls = [call for piece in (done if stream else [done]) for call in piece.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("look", {"city": "Rome"})] * 2
    answered = {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "Hm"}
    results = [{"role": "tool", "tool_name": "look", "content": look(**call.function.arguments)} for call in calls]
    after = api.chat(MODEL, [*given, answered, *results, *user(said("It rains."))], tools=[look])
    assert after.message.content == "It rains."
    messages = rendered[-1]["messages"]
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:4]] == ids
    assert messages[1]["reasoning_content"] == "Hm"
    assert rendered[-1]["tools"][0]["function"]["parameters"]["required"] == ["city"]


def test_ollama_client_call_cut_off_is_left_out(api):
    done = api.chat(MODEL, user(said(CALL)), tools=[look], options={"num_predict": len(CALL) - 20})
    assert (done.message.tool_calls, done.message.content, done.done_reason) == (None, "", "length")


@for_each(
    "think, found, thinking",
    [
        (None, {}, "Hm."),
        (True, {"enable_thinking": True, "thinking": True}, "Hm."),
        (False, {"enable_thinking": False, "thinking": False}, None),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, "Hm."),
    ],
)
def test_ollama_client_think_sets_template_and_output(api, rendered, think, found, thinking):
    rendered.clear()
    done = api.chat(MODEL, user(said(THOUGHT)), think=think)
    assert (done.message.content, done.message.thinking) == ("Hello", thinking)
    assert api.generate(MODEL, said(THOUGHT), think=think).thinking == thinking
    assert [one["chat_template_kwargs"] for one in rendered] == [found, found]


def test_ollama_client_options_become_sampling_params(api, rendered):
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 7}
    more = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "num_predict": 8, "stop": [" th"], "num_thread": 4}
    done = api.chat(MODEL, user(said("one three")), options=options | more)
    assert (done.message.content, done.done_reason) == ("one", "stop")
    params = rendered[-1]["params"]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.repetition_penalty, params.seed, params.max_tokens) == (1.2, 7, 8)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    api.chat(MODEL, user(said("x")), options={"seed": -1, "num_predict": -1})
    assert (rendered[-1]["params"].seed, rendered[-1]["params"].max_tokens) == (None, None)


def test_ollama_client_options_are_all_accepted(api):
    import ollama

    every = {name: 1 for name in ollama.Options.model_fields if name not in ("stop", "numa")}
    assert api.chat(MODEL, user(said("a")), options=every).done
    assert "num_thread" not in Options.model_fields


@for_each("stream", [False, True])
def test_generate_uses_the_template_unless_raw(api, rendered, stream):
    rendered.clear()
    done = api.generate(MODEL, said("abc"), system="Be kind", stream=stream)
    assert "".join(piece.response for piece in (done if stream else [done])) == "abc"
    assert [message["role"] for message in rendered[0]["messages"]] == ["system", "user"]
    raw = api.generate(MODEL, said("<think>x"), raw=True, stream=stream)
    last = list(raw)[-1] if stream else raw
    assert last.prompt_eval_count == len(said("<think>x"))
    assert len(rendered) == 1


@for_each("form, rule", [("json", {"json_object": True}), ({"type": "object"}, {"json": '{"type":"object"}'})])
def test_ollama_client_format_constrains_the_answer(api, held, form, rule):
    held.clear()
    assert api.generate(MODEL, said("{}"), format=form, raw=True).response == "{}"
    held_to = held[-1].structured_outputs
    assert {name: getattr(held_to, name) for name in rule} == rule
    assert api.chat(MODEL, user(said("{}")), format=form).message.content == "{}"
    assert held[-1].structured_outputs.grammar


def test_logprobs_come_with_their_tokens(api):
    done = api.chat(MODEL, user(said("ab")), logprobs=True, top_logprobs=2)
    assert [entry.token for entry in done.logprobs] == ["a", "b", "<eos>"]
    assert all(len(entry.top_logprobs) == 2 for entry in done.logprobs)
    pieces = list(api.generate(MODEL, said("ab"), logprobs=True, stream=True))
    assert [entry.token for piece in pieces for entry in piece.logprobs or ()] == ["a", "b", "<eos>"]


def test_ollama_client_request_without_a_prompt_loads(api):
    assert (api.generate(MODEL).done_reason, api.generate(MODEL, keep_alive=0).done_reason) == ("load", "unload")
    assert api.chat(MODEL, []).message.content == ""


def test_ollama_client_lists_describe_the_model(api, server):
    assert [model.model for model in api.list().models] == ["fake:latest", "alias/model:latest"]
    running = api.ps().models[0]
    assert (running.name, running.context_length) == ("fake:latest", 1024)
    assert len(running.digest) == 64
    shown = api.show("fake:latest")
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1024
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert "message.role" in shown.template
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2
    assert [httpx.head(f"{server.url}{path}").status_code for path in ("/", "/api/tags", "/api/version")] == [200] * 3


def test_async_client_streams_texts_side_by_side(server):
    import ollama

    async def main() -> list[str]:
        client = ollama.AsyncClient(server.url)

        async def said_by(text: str) -> str:
            pieces = await client.chat(MODEL, user(said(text)), stream=True)
            return "".join([piece.message.content or "" async for piece in pieces])

        try:
            return await asyncio.gather(said_by("one"), said_by("two"))
        finally:
            await client.close()

    assert asyncio.run(main()) == ["one", "two"]


@for_each(
    "call, status, words",
    [
        (lambda api: api.chat("other", user("x")), 404, "fake, alias/model is served here"),
        (lambda api: list(api.chat("other:latest", user("x"), stream=True)), 404, "'other' does not exist"),
        (lambda api: api.show("other"), 404, "served here"),
        (lambda api: api.chat(MODEL, user("x" * 4000)), 400, "maximum context length"),
        (lambda api: api.chat(MODEL, [{**user("x")[0], "images": [b"abc"]}]), 400, "text alone"),
        (lambda api: api.chat(MODEL, user("x"), options={"temprature": 1}), 400, "there is no option 'temprature'"),
        (lambda api: api.generate(MODEL, "x", suffix="y"), 400, "leave suffix out"),
        (lambda api: api.generate(MODEL, "x", template="{{ .Prompt }}"), 400, "--chat-template"),
        (lambda api: api.generate(MODEL, "x", context=[1, 2]), 400, "/api/chat"),
        (lambda api: api.generate(MODEL, "x", system="y", raw=True), 400, "put it into the prompt"),
        (lambda api: api.pull("other"), 404, "holdfast serve MODEL"),
        (lambda api: api.delete("other"), 404, "holdfast serve MODEL"),
        (lambda api: api.copy("a", "b"), 404, "holdfast serve MODEL"),
    ],
)
def test_ollama_client_bad_request_raises_response_error(api, call, status, words):
    import ollama

    with pytest.raises(ollama.ResponseError) as caught:
        call(api)
    assert caught.value.status_code == status
    assert words in caught.value.error


def test_stream_that_fails_ends_with_an_error_line():
    engine = make_served_engine()
    steps = iter(range(100))

    def fail(step) -> None:
        time.sleep(0.05)  # so that the answer has begun
        if next(steps) == 5:
            raise RuntimeError("secret")

    engine.runner.on_step = fail
    with app_client(engine) as client:
        lines = client.post("/api/generate", json={"prompt": "Hello"}).text.splitlines()
        assert "the engine has stopped" in json.loads(lines[-1])["error"]
        assert client.post("/api/generate", json={"prompt": "Hello"}).json().keys() == {"error"}


def test_generate_without_a_template_continues_the_prompt():
    engine = make_served_engine()
    engine.chat_template = None
    with app_client(engine) as client:
        body = {"prompt": said("abc"), "stream": False}
        assert client.post("/api/generate", json=body).json()["response"] == "abc"
        refused = client.post("/api/generate", json={**body, "system": "Be kind"})
        assert refused.status_code == 400

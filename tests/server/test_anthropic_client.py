"""Anthropic's own client against a server: messages, streams, tools, thinking, counts and errors as its exceptions."""

import asyncio
import json
import time
from typing import Any

import pytest

from for_each import for_each
from holdfast.server import streams
from server.served import MODEL, NAMES, Served, app_client, make_served_engine, said, user

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS = [
    {
        "name": "look",
        "description": "The weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "cache_control": {"type": "ephemeral"},
    }
]

pytestmark = pytest.mark.slow
"""Its import alone takes seconds: test_anthropic_messages.py has the quick ones."""


@pytest.fixture(scope="module")
def api(server: Served):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(api: Any, text: str, **more: Any) -> Any:
    return api.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": user(said(text)), **more})


def test_message_with_all_settings_is_answered(api):
    done = ask(
        api,
        "Grüß Gott",
        system="Be kind",
        metadata={"user_id": "me"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    assert [block.text for block in done.content] == ["Grüß Gott"]
    assert (done.role, done.type, done.model) == ("assistant", "message", MODEL)
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert done.usage.output_tokens == len("Grüß Gott".encode()) + 1
    assert done._request_id.startswith("req-")


def test_anthropic_models_are_listed_with_their_names(api):
    models = list(api.models.list())
    assert [(model.id, model.display_name, model.type) for model in models] == [(name, name, "model") for name in NAMES]
    assert api.models.retrieve(MODEL).created_at.year >= 2026


def test_message_again_counts_tokens_of_the_cache(api):
    given = {"system": "A system prompt of more than one page " * 4, "messages": user(said("ab"))}
    ask(api, "", **given)
    usage = ask(api, "", **given).usage
    assert usage.cache_read_input_tokens > 0
    count = api.messages.count_tokens(model=MODEL, **given).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usage.cache_creation_input_tokens == 0


def test_message_ends_by_length_or_stop_sequence(api):
    cut = ask(api, "A long answer", max_tokens=3)
    assert (cut.content[0].text, cut.stop_reason) == ("A l", "max_tokens")
    ended = ask(api, "one two three", stop_sequences=[" th", "zz"])
    assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("one two", "stop_sequence", " th")


def test_stream_helper_gives_the_same_message(api):
    text = f"<think>Let me see.</think>Well. {CALL}"
    given = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": TOOLS}
    whole = ask(api, text, **given)
    with api.messages.stream(model=MODEL, max_tokens=200, messages=user(said(text)), **given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].thinking, final.content[1].text) == ("Let me see.", "Well.")
    assert final.content[0].signature == whole.content[0].signature != ""
    assert final.content[2].input == whole.content[2].input == {"city": "Rome"}
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details.thinking_tokens == len("Let me see.")
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_tool_results_come_back_in_the_next_turn(api, rendered):
    first = ask(api, f"<think>Hm</think>Let me see. {CALL}", tools=TOOLS, thinking={"type": "adaptive"})
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "no net", "is_error": True}
    after = [
        *user("What is it like?"),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, failed, {"type": "text", "text": said("It rains.")}]},
    ]
    done = ask(api, "", messages=after, tools=TOOLS)
    assert done.content[0].text == "It rains."
    messages = rendered[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in messages[2:4]] == ["rain", "Error: no net"]
    assert messages[1]["reasoning_content"] == "Hm"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call.id


@for_each(
    "choice, num_calls, is_forced",
    [
        ({"type": "auto"}, 2, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1, False),
        ({"type": "any"}, 2, True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, 1, True),
        ({"type": "none"}, 0, False),
    ],
)
def test_tool_choice_decides_the_calls(api, held, choice, num_calls, is_forced):
    held.clear()
    done = ask(api, f"{CALL}\n{CALL}", tools=TOOLS, tool_choice=choice)
    calls = [block for block in done.content if block.type == "tool_use"]
    assert len(calls) == len({call.id for call in calls}) == num_calls
    assert [bool(params.structured_outputs.grammar) for params in held] == [True] * is_forced


def test_anthropic_call_cut_off_is_left_out(api):
    done = ask(api, CALL, tools=TOOLS, max_tokens=len(CALL) - 20)
    assert (done.content, done.stop_reason) == ([], "max_tokens")


def test_anthropic_final_assistant_message_is_continued(api, rendered):
    begun = [*user(said("x")), {"role": "assistant", "content": "The best is ("}]
    ask(api, "", messages=begun)
    assert rendered[-1]["continue_final_message"]


def test_anthropic_output_format_constrains_the_answer(api, held):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert ask(api, "{}", output_config={"format": form}).content[0].text == "{}"
    ask(api, "{}", extra_body={"output_format": form})
    assert len(held) == 2
    assert all(params.structured_outputs.grammar for params in held)


def test_async_client_streams_texts_side_by_side(server):
    import anthropic

    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="none", max_retries=0) as client:

            async def said_by(text: str) -> str:
                given = {"model": "alias/model", "max_tokens": 50, "messages": user(said(text))}
                async with client.messages.stream(**given) as stream:
                    return "".join([piece async for piece in stream.text_stream])

            return await asyncio.gather(said_by("one"), said_by("two"))

    assert asyncio.run(main()) == ["one", "two"]


@for_each(
    "fields, kind, error_type, words",
    [
        ({"model": "claude-x"}, "NotFoundError", "not_found_error", "ANTHROPIC_MODEL=fake"),
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error", "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "BadRequestError", "invalid_request_error", "temperature"),
        ({"messages": user("x" * 4000)}, "BadRequestError", "invalid_request_error", "maximum context length"),
        ({"extra_body": {"stop_sequence": "x"}}, "BadRequestError", "invalid_request_error", "stop_sequences?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            *("BadRequestError", "invalid_request_error", "not this type"),
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            *("BadRequestError", "invalid_request_error", "no tools of its own"),
        ),
        ({"tool_choice": {"type": "tool"}}, "BadRequestError", "invalid_request_error", "tool_choice.name"),
    ],
)
def test_anthropic_bad_request_raises_the_client_error(api, fields, kind, error_type, words):
    import anthropic

    with pytest.raises(getattr(anthropic, kind)) as caught:
        ask(api, "x", **fields)
    assert caught.value.type == error_type
    assert words in caught.value.api_message
    assert caught.value.body["request_id"] == caught.value.request_id


def test_stream_that_fails_ends_with_an_error_event():
    engine = make_served_engine()
    steps = iter(range(100))

    def fail(step) -> None:
        time.sleep(0.05)  # so that the answer has begun
        if next(steps) == 5:
            raise RuntimeError("secret")

    engine.runner.on_step = fail
    body = {"max_tokens": 60, "messages": user("Hello")}
    with app_client(engine) as client:
        last = client.post("/v1/messages", json={**body, "stream": True}).text.strip().split("\n\n")[-1]
        name, _, data = last.partition("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        again = client.post("/v1/messages", json=body)
        assert (again.status_code, again.json()["error"]["type"]) == (503, "overloaded_error")


def test_anthropic_stream_pings_while_the_model_is_silent(monkeypatch):
    engine = make_served_engine()
    engine.runner.on_step = lambda step: time.sleep(0.05)
    monkeypatch.setattr(streams, "PING_SECONDS", 0.01)
    body = {"max_tokens": 3, "messages": user("Hello"), "stream": True}
    with app_client(engine) as client:
        events = client.post("/v1/messages", json=body).text
    assert events.count("event: ping") > 2
    assert events.strip().endswith('{"type":"message_stop"}')

"""Anthropic's Messages API without its client: what a conversation becomes, events of a stream, errors of blocks."""

import json
from typing import Any

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.server.anthropic_messages import conversation_of, message_usage, shows_thinking
from holdfast.server.anthropic_schemas import MessageRequest
from holdfast.server.bodies import parse
from holdfast.server.conversations import Conversation, plain_message
from holdfast.server.errors import ApiError
from holdfast.server.streams import Counted
from server.families import Messages, ask
from server.served import MODEL, said, user

ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {"city": "Rome"}}


def read(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return conversation_of(parse(MessageRequest, {"max_tokens": 9, "messages": [*messages], **fields}))


def plain(conversation: Conversation) -> list[dict[str, Any]]:
    return [plain_message(message, "") for message in conversation.messages]


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_message_whole_has_the_shape_of_the_api(client):
    body = {"model": MODEL, "max_tokens": 64000, "messages": user(said("<think>Hm</think>Yes")), "top_k": 5}
    value = client.post(
        "/v1/messages?beta=true", json={**body, "temperature": 0.5, "top_p": 0.9, "unheard_of": 1}
    ).json()
    assert value["content"] == [{"type": "text", "text": "Yes"}]
    assert (value["stop_reason"], value["stop_sequence"], value["model"]) == ("end_turn", None, MODEL)
    assert value["usage"]["output_tokens"] == 21
    assert value["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


def test_stream_events_have_names_and_a_ping(client):
    body = {"model": MODEL, "max_tokens": 50, "stream": True, "messages": user(said("<think>Hm</think>Yes"))}
    answer = client.post("/v1/messages", json={**body, "thinking": {"type": "adaptive"}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = [event.partition("\n") for event in answer.text.strip().split("\n\n")]
    values = [json.loads(data.removeprefix("data: ")) for _, _, data in events]
    assert [name.removeprefix("event: ") for name, _, _ in events] == [value["type"] for value in values]
    kinds = [value["delta"]["type"] if "index" in value and "delta" in value else value["type"] for value in values]
    assert list(dict.fromkeys(kinds)) == [
        *("message_start", "ping", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("text_delta", "message_delta", "message_stop"),
    ]
    assert [value["index"] for value in values if value["type"] == "content_block_start"] == [0, 1]
    assert values[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_anthropic_thinking_sets_template_options_and_output():
    cases = [
        (None, OFF, False),
        ({"type": "disabled"}, OFF, False),
        ({"type": "enabled", "budget_tokens": 2048}, {**ON, "thinking_budget": 2048}, True),
        ({"type": "adaptive"}, {}, True),
        ({"type": "adaptive", "display": "omitted"}, {}, False),
    ]
    for thinking, options, shown in cases:
        body = {"messages": user("x"), "max_tokens": 9, "thinking": thinking, "output_config": {"effort": "low"}}
        request = parse(MessageRequest, body)
        conversation = conversation_of(request)
        assert (conversation.template_options, shows_thinking(request)) == (options, shown)
        assert conversation.effort == "low"


def test_anthropic_system_blocks_are_joined_without_billing():
    system = [text("x-anthropic-billing-header: cc_version=2; cch=1f"), text("a"), text("b")]
    history = [*user("1"), turn("user", text("2")), turn("assistant", text("3")), {"role": "system", "content": "4"}]
    turns = [(message["role"], message["content"]) for message in plain(read(*history, *user("5"), system=system))]
    assert turns == [("system", "a\nb"), ("user", "1\n2"), ("assistant", "3"), ("system", "4"), ("user", "5")]


def test_tool_results_become_messages_of_their_own():
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [text("rain")]},
        {"type": "tool_result", "tool_use_id": "a", "content": "no net", "is_error": True},
    ]
    hidden = {"type": "redacted_thinking", "data": "s"}
    conversation = read(*user("1"), turn("assistant", thought, hidden, CALL), turn("user", *results, text("So?")))
    messages = plain(conversation)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert messages[1]["reasoning_content"] == "Hm"
    function = {"name": "look", "arguments": {"city": "Rome"}}
    assert messages[1]["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert [message["content"] for message in messages[2:]] == ["rain", "Error: no net", "So?"]


@for_each("last, continues", [(turn("assistant", text("The best is (")), True), (turn("user", text("x")), False)])
def test_anthropic_final_assistant_turn_sets_continues(last, continues):
    assert read(*user("x"), last).continues is continues


@for_each(
    "role, block",
    [
        ("user", CALL),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}),
        ("system", {"type": "thinking", "thinking": "a"}),
        ("assistant", CALL),
    ],
)
def test_anthropic_block_in_the_wrong_role_is_refused(role, block):
    with raises_code("http.misplaced_block", ApiError):
        read(*user("x"), turn(role, block))


@for_each(
    "fields, words",
    [
        (
            {"messages": [turn("user", {"type": "image", "source": {}})]},
            "blocks are supported: send the content as text",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server tools are not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "MCP servers are not supported"),
        ({"stop_sequence": "x"}, "Did you mean stop_sequences?"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_anthropic_wrong_request_names_its_fault(fields, words):
    with pytest.raises(ApiError) as caught:
        parse(MessageRequest, {"messages": user("x"), "max_tokens": 9, **fields})
    assert words in str(caught.value)


def test_usage_counts_cached_tokens_apart():
    usage = message_usage(Counted(num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=3))
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 4, 3)


def test_usage_thoughts_are_at_most_the_answer() -> None:
    """Text of broken characters encodes to more tokens than it was decoded from."""
    counted = Counted(num_output_tokens=40, num_reasoning_tokens=47)
    assert message_usage(counted)["output_tokens_details"] == {"thinking_tokens": 40}
    assert counted.usage()["completion_tokens_details"] == {"reasoning_tokens": 40}


def test_message_settings_reach_the_engine(client, rendered):
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 5, "stop_sequences": ["a", "b"], "max_tokens": 7}
    assert client.post("/v1/messages", json={"messages": user(said("x")), **sampling}).status_code == 200
    params = rendered[-1]["params"]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.75, 5, 7)
    assert tuple(params.stop) == ("a", "b")


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "now")]
CALLS = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("look", "now"))


@for_each(
    "choice, called",
    [
        ({"type": "auto"}, ["look", "now"]),
        ({"type": "auto", "disable_parallel_tool_use": False}, ["look", "now"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["look"]),
        ({"type": "none"}, []),
    ],
)
@for_each("stream", [False, True])
def test_tool_choice_decides_the_calls(client, choice, called, stream):
    family = Messages()
    found = ask(
        client,
        family,
        {**family.body([("user", said(CALLS))], ()), "tools": TOOLS, "tool_choice": choice},
        stream=stream,
    )
    assert [call.name for call in found.only.calls] == called


def test_anthropic_count_tokens_equals_usage_of_the_answer(client):
    """With tools, system blocks and the thinking options of the template."""
    body = {"messages": user(said("x")), "tools": TOOLS, "system": [text("one"), text("two")]}
    for more in ({}, {"tools": []}, {"system": ""}, {"thinking": {"type": "adaptive"}}):
        counted = client.post("/v1/messages/count_tokens", json={**body, **more}).json()["input_tokens"]
        usage = client.post("/v1/messages", json={**body, **more, "max_tokens": 9}).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


@for_each("name", ["output_config", "output_format"])
def test_anthropic_output_format_constrains_each_spelling(client, held, name):
    held.clear()
    form = {"type": "json_schema", "schema": {"type": "object", "title": "mine"}}
    given = {name: {"format": form} if name == "output_config" else form}
    body = {"messages": user(said("{}")), "max_tokens": 9, **given}
    assert client.post("/v1/messages", json=body).json()["content"] == [{"type": "text", "text": "{}"}]
    assert "mine" in held[-1].structured_outputs.grammar


def test_anthropic_answer_keeps_both_blocks_of_a_kind():
    thoughts = [{"type": "thinking", "thinking": words, "signature": "s"} for words in ("t1", "t2")]
    answer = turn("assistant", *thoughts, text("a1"), text("a2"))
    results = [{"type": "tool_result", "tool_use_id": "a", "content": [text("r1"), text("r2")]}]
    given = turn("user", text("before"), *results, text("after1"), text("after2"))
    messages = plain(read(*user("1"), answer, given))
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("a1\na2", "t1\nt2")
    assert [message["content"] for message in messages[2:]] == ["before", "r1\nr2", "after1\nafter2"]

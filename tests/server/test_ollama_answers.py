"""Ollama's API without its client: lines of a stream, messages and options as the engine takes them, lists."""

import json

import pytest

from for_each import for_each
from holdfast.server.bodies import parse
from holdfast.server.errors import ApiError
from holdfast.server.ollama_answers import OllamaWriter, read_messages, read_options
from holdfast.server.ollama_schemas import OllamaChatRequest, Options
from holdfast.text.answer_deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from server.families import Ollama, ask
from server.served import MODEL, said, user


def test_stream_is_lines_of_json_by_default(client):
    answer = client.post("/api/chat", json={"model": f"{MODEL}:latest", "messages": user(said("a\u2028b"))})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "a\u2028b"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"], lines[-1]["load_duration"]) == ("stop", 6, 0)


def test_generate_whole_has_counts_and_times(client):
    body = {"prompt": said("<think>Hm</think>Yes"), "stream": False, "options": {"num_predict": 19}}
    value = client.post("/api/generate", json=body).json()
    assert (value["response"], value["thinking"], value["done_reason"]) == ("Ye", "Hm", "length")
    assert (value["eval_count"], value["model"]) == (19, MODEL)
    assert min(value[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")) > 0


def test_ollama_tags_and_show_describe_the_model(client):
    assert [one["model"] for one in client.get("/api/tags").json()["models"]] == ["fake:latest", "alias/model:latest"]
    shown = client.post("/api/show", json={"name": "fake:latest"}).json()
    assert shown["model_info"]["holdfast.context_length"] == 1024
    assert shown["capabilities"] == ["completion", "embedding", "tools", "thinking"]


def test_tool_messages_name_the_calls_they_answer():
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("look", "now", "look")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("now", "look", "look", "other")]
    turns = [{"role": "assistant", "tool_calls": calls, "thinking": "Hm"}, *results, {"role": "system", "content": "s"}]
    given = parse(OllamaChatRequest, {"messages": [*user("1"), *turns, *user("2")]})
    messages = read_messages(given)
    assert [message.role for message in messages] == [one["role"] for one in [*user("1"), *turns, *user("2")]]
    assert [call.id for call in messages[1].tool_calls] == ["call_0", "call_1", "call_2"]
    assert [message.tool_call_id for message in messages[2:6]] == ["call_1", "call_0", "call_2", "call_0"]
    assert messages[1].reasoning_content == "Hm"


def test_ollama_read_options_gives_sampling_fields():
    fields = read_options(
        Options(temperature=0.5, top_k=3, min_p=0.1, repeat_penalty=1.2, seed=7, stop=["x"], presence_penalty=1)
    )
    assert (fields.temperature, fields.top_k, fields.min_p, fields.repetition_penalty) == (0.5, 3, 0.1, 1.2)
    assert (fields.seed, fields.stop, fields.presence_penalty) == (7, ["x"], 1)
    assert read_options(Options(seed=-1)).seed is None


@for_each(
    "fields, words",
    [
        ({"options": {"temprature": 1}}, "there is no option 'temprature'"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"messages": [{"role": "user", "images": ["x"]}]}, "only text"),
        ({"fromat": "json"}, "Did you mean format?"),
    ],
)
def test_ollama_wrong_request_names_its_fault(fields, words):
    with pytest.raises(ApiError) as caught:
        parse(OllamaChatRequest, fields)
    assert words in str(caught.value)


def output_of(*, shows_thinking):
    return OllamaWriter(None, None, None, MODEL, is_chat=True, shows_thinking=shows_thinking)


def add(output, *pieces):
    for piece in pieces:
        output.add_piece(piece)


def messages_of(output):
    return [json.loads(line)["message"] for line in output.take().splitlines()]


def test_ollama_output_has_only_complete_calls():
    output = output_of(shows_thinking=False)
    add(output, ReasoningDelta("Hm"), ContentDelta("See."), ToolCallDelta(0, "look"), ToolCallDelta(0, None, '{"a":'))
    assert "look" not in output.take()
    add(output, ToolCallDelta(0, None, "1}"), ToolCallDelta(1, "now", "", "mine"), ToolCallDelta(2, "cut", '{"b'))
    output.finish(None)
    lines = messages_of(output)
    calls = [call for line in lines for call in line["tool_calls"]]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "look", "arguments": {"a": 1}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert calls[1]["id"] == "mine"
    assert not any("thinking" in line for line in lines)


def test_ollama_output_puts_a_call_before_later_text():
    output = output_of(shows_thinking=True)
    add(output, ToolCallDelta(0, "look", '{"a":1}'), ContentDelta("x"), ToolCallDelta(1, "now"), ReasoningDelta("y"))
    written = [
        line["tool_calls"][0]["function"]["name"] if "tool_calls" in line else line["content"] or line["thinking"]
        for line in messages_of(output)
    ]
    assert written == ["look", "x", "now", "y"]


def test_ollama_options_reach_the_engine(client, rendered):
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.125, "repeat_penalty": 1.5, "seed": 7}
    options |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["a", "b"], "num_predict": 8}
    ask(client, Ollama(), {"messages": user(said("x")), "options": options}, stream=False)
    params = rendered[-1]["params"]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.75, 0.125)
    assert (params.repetition_penalty, params.seed, params.max_tokens) == (1.5, 7, 8)
    assert (params.presence_penalty, params.frequency_penalty, tuple(params.stop)) == (0.5, -0.5, ("a", "b"))


@for_each("given, limit", [(None, None), (-2, None), (-1, None), (0, None), (1, 1)])
def test_ollama_num_predict_below_one_is_no_limit(client, rendered, given, limit):
    rendered.clear()
    options = {} if given is None else {"num_predict": given}
    ask(client, Ollama(), {"messages": user(said("x")), "options": options}, stream=False)
    assert rendered[-1]["params"].max_tokens == limit


@for_each("form, rule", [("json", {"json_object": True}), ({"type": "object"}, {"json": '{"type":"object"}'})])
def test_ollama_format_constrains_the_answer(client, held, form, rule):
    held.clear()
    raw = {"prompt": said("{}"), "format": form, "raw": True, "stream": False}
    assert client.post("/api/generate", json=raw).json()["response"] == "{}"
    assert {name: getattr(held[-1].structured_outputs, name) for name in rule} == rule
    ask(client, Ollama(), {"messages": user(said("{}")), "format": form}, stream=False)
    assert held[-1].structured_outputs.grammar


@for_each("stream", [False, True])
def test_generate_uses_the_template_unless_raw(client, rendered, stream):
    rendered.clear()
    given = {"prompt": said("abc"), "system": "Be kind", "stream": stream}
    lines = [json.loads(line) for line in client.post("/api/generate", json=given).text.splitlines()]
    assert "".join(line["response"] for line in lines) == "abc"
    [seen] = rendered
    assert [(one["role"], one["content"]) for one in seen["messages"]] == [("system", "Be kind"), ("user", said("abc"))]
    raw = client.post("/api/generate", json={"prompt": said("x"), "raw": True, "stream": stream}).text.splitlines()
    assert (json.loads(raw[-1])["prompt_eval_count"], len(rendered)) == (3, 1)
    refused = client.post("/api/generate", json={**given, "raw": True})
    assert (refused.status_code, "Put it into the prompt" in refused.json()["error"]) == (400, True)


@for_each(
    "roles, continues",
    [(("user", "assistant"), True), (("assistant", "user"), False), (("user", "assistant", "user"), False)],
)
def test_chat_that_ends_with_an_answer_continues_it(client, rendered, roles, continues):
    rendered.clear()
    messages = [{"role": role, "content": said("x")} for role in roles]
    assert client.post("/api/chat", json={"messages": messages, "stream": False}).status_code == 200
    assert rendered[-1]["continue_final_message"] is continues


@for_each(
    "think, reported, thinking",
    [
        (None, {}, "Hm"),
        (True, {"enable_thinking": True, "thinking": True}, "Hm"),
        (False, {"enable_thinking": False, "thinking": False}, ""),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, "Hm"),
    ],
)
def test_ollama_think_sets_template_and_output(client, rendered, think, reported, thinking):
    rendered.clear()
    body = {"messages": user(said("<think>Hm</think>Yes")), "think": think}
    choice = ask(client, Ollama(), body, stream=False).only
    assert (choice.content, choice.reasoning, rendered[-1]["chat_template_kwargs"]) == ("Yes", thinking, reported)


def test_ollama_tool_call_ids_continue_in_the_next_turn():
    call = {"function": {"name": "look", "arguments": {}}}
    answer = {"role": "assistant", "tool_calls": [call, call]}
    result = {"role": "tool", "tool_name": "look", "content": "x"}
    given = parse(OllamaChatRequest, {"messages": [answer, result, result, answer, result, result]})
    messages = read_messages(given)
    ids = [[call.id for call in messages[place].tool_calls] for place in (0, 3)]
    assert ids == [["call_0", "call_1"], ["call_2", "call_3"]]
    answered = [message.tool_call_id for message in messages if message.role == "tool"]
    assert answered == ["call_0", "call_1", "call_2", "call_3"]


def test_ollama_model_name_tag_is_optional(client):
    service = client.app.state.service
    names, service.names = service.names, ("own:latest", "other")
    try:
        found = [
            client.post("/api/show", json={"model": name}).status_code
            for name in ("own:latest", "other:latest", "other", "own", "x:latest")
        ]
    finally:
        service.names = names
    assert found == [200, 200, 200, 404, 404]

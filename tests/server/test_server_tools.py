"""Tools over HTTP: forced calls of a real model, what answers are held to behind thoughts, templates that know no tools."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from for_each import for_each
from holdfast.server.bodies import parse
from holdfast.server.sampling import rule_of
from holdfast.server.schemas import CompletionRequest
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.harmony import TOKENS
from server.served import TEMPLATE, app_client, open_tiny_engine, said, user
from text.test_tool_grammar import takes

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A tiny random model, which says nothing of sense unless it must."""
    with app_client(open_tiny_engine(tmp_path_factory.mktemp("tiny"))) as client:
        yield client


def given(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": user("Hi"), "seed": 3, "max_tokens": 400, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@for_each("choice", ["required", NAMED])
def test_chat_with_required_tool_choice_calls_a_tool(real, choice):
    # Nothing ends a random model's thoughts, and without an h it cannot begin them.
    done = given(real, tools=TOOLS, tool_choice=choice, logit_bias={str(ord("h")): -100})
    assert done["finish_reason"] == "tool_calls"
    assert done["message"]["content"] is None
    (call,) = done["message"]["tool_calls"]
    name, values = call["function"]["name"], json.loads(call["function"]["arguments"])
    assert name == "look" or choice == "required"
    assert values == {} if name == "now" else values["unit"] in ("c", "f")


@for_each(
    "fields",
    [
        {"guided_grammar": 'start: "a" start'},
        {"response_format": {"type": "json_object"}, "allowed_token_ids": [65]},
        {"allowed_token_ids": [258], "min_tokens": 4},
    ],
)
def test_chat_unsatisfiable_request_gets_400(real, fields):
    """500 would make clients retry, and page an operator."""
    body = {"messages": user("Hi"), "max_tokens": 400, "temperature": 0.0, **fields}
    answer = real.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "answer_failed")
    with real.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as streamed:
        last = [line for line in streamed.iter_lines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "invalid_request_error"


def test_chat_forced_call_streams(real):
    body = {"messages": user("Hi"), "seed": 4, "max_tokens": 400, "tools": TOOLS, "tool_choice": NAMED, "stream": True}
    with real.stream("POST", "/v1/chat/completions", json={**body, "logit_bias": {str(ord("h")): -100}}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["look"]
    assert "unit" in json.loads("".join(call["function"].get("arguments") or "" for call in calls))
    assert choices[-1]["finish_reason"] == "tool_calls"


OPENED = TEMPLATE + "{% if think %}<think>\n{% endif %}{% if quiet %}<think></think>{% endif %}"


@pytest.fixture(scope="module")
def fake() -> Iterator[httpx.Client]:
    with app_client(chat_template=ChatTemplate(OPENED, "fake", {})) as client:
        yield client


ANSWER, CALL = '{"a": 1}', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}
FORCED = {"tools": TOOLS, "tool_choice": "required"}


@for_each("options, head", [({}, "<think>hm</think>\n"), ({"think": True}, "hm</think>\n")])
@for_each("text, fields", [(ANSWER, FORMAT), (CALL, FORCED)])
def test_chat_constraints_apply_after_the_thoughts(fake, held, options, head, text, fields):
    held.clear()
    done = given(fake, messages=user(said(head + text)), chat_template_kwargs=options, **fields)
    assert done["message"]["reasoning_content"] == "hm"
    calls = done["message"].get("tool_calls")
    assert calls[0]["function"]["name"] == "now" if text is CALL else done["message"]["content"] == ANSWER
    assert takes(held[0].structured_outputs.grammar, head + text)
    assert takes(held[0].structured_outputs.grammar, text) == (not options)


@for_each("parallel, takes_two", [(None, False), (True, True), (False, False)])
def test_chat_forced_call_is_single_without_parallel_calls(fake, held, parallel, takes_two):
    held.clear()
    done = given(fake, messages=user(said(CALL)), **FORCED, parallel_tool_calls=parallel)
    assert (done["finish_reason"], len(done["message"]["tool_calls"])) == ("tool_calls", 1)
    grammar = held[0].structured_outputs.grammar
    assert takes(grammar, CALL)
    assert takes(grammar, f"{CALL}\n{CALL}") == takes_two


def test_chat_forced_call_list_ends_at_its_marker(held):
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    with app_client(chat_template=ChatTemplate(KIMI_TEMPLATE, "fake", {}), max_model_len=2048) as client:
        done = given(client, messages=user(said(section.format(call))), **FORCED)
    assert (done["finish_reason"], len(done["message"]["tool_calls"])) == ("tool_calls", 1)
    grammar = held[0].structured_outputs.grammar
    assert takes(grammar, section.format(2 * call))
    assert not takes(grammar, 2 * section.format(call))


def test_chat_without_thoughts_is_constrained_from_the_start(fake, held):
    done = given(fake, messages=user(said(ANSWER)), chat_template_kwargs={"quiet": True}, **FORMAT)
    assert done["message"]["content"] == ANSWER
    assert held[0].structured_outputs.json == '{"type":"object"}'


def test_chat_own_grammar_covers_the_whole_answer(fake, held):
    rule = {"structured_outputs": {"grammar": 'start: "a"'}}
    done = given(fake, messages=user(said("a")), chat_template_kwargs={"think": True}, **rule)
    assert done["message"]["content"] == "a"
    assert not done["message"].get("reasoning_content")
    assert held[0].structured_outputs.grammar == 'start: "a"'


@for_each(
    "fields, param",
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({**FORCED, **FORMAT}, "response_format"),
    ],
)
def test_chat_bad_tool_choice_names_its_field(fake, fields, param):
    answer = fake.post("/v1/chat/completions", json={"messages": user("Hi"), **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_template_without_tools_gets_them_as_text():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    calls = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"unit":"c"}'}}]
    with app_client(chat_template=ChatTemplate(source, "fake", {}), max_model_len=2048) as client:
        done = given(client, messages=user(said(CALL)), tools=TOOLS)
        assert done["message"]["tool_calls"][0]["function"]["name"] == "now"
        messages = [
            *user("Hi"),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": said("It rains.")},
        ]
        assert given(client, messages=messages, tools=TOOLS)["message"]["content"] == "It rains."
        tokens = client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
        text = bytes(tokens).decode()
        assert "# Tools" in text
        assert '<tool_call>\n{"name": "look", "arguments": {"unit": "c"}}\n</tool_call>' in text
        assert "<tool_response>" in text
        calls[0]["function"]["arguments"] = {"unit": "c"}  # as an object: the same
        assert client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"] == tokens


HARMONY_TEMPLATE = """\
{{ tools | tojson }}{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor %}<|start|>assistant{# <|channel|>analysis #}"""


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A tiny random model whose markers are special tokens, as those of gpt-oss are."""
    folder = tmp_path_factory.mktemp("channels")
    with app_client(open_tiny_engine(folder, HARMONY_TEMPLATE, TOKENS)) as client:
        yield client


NO_ANALYSIS = {str(ord("a")): -100}
SHORT_ANALYSIS = {str(ord("a")): 90, str(259 + TOKENS.index("<|end|>")): 90}
BOOLEAN = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@for_each("bias", [NO_ANALYSIS, SHORT_ANALYSIS])
def test_harmony_forced_call_with_special_tokens_is_read(channels, bias):
    done = given(channels, tools=TOOLS, tool_choice=NAMED, logit_bias=bias)
    (call,) = done["message"]["tool_calls"]
    assert (done["finish_reason"], call["function"]["name"]) == ("tool_calls", "look")
    assert json.loads(call["function"]["arguments"])["unit"] in ("c", "f")
    assert done["message"]["content"] is None
    assert set(done["message"].get("reasoning_content", "")) == (set() if bias is NO_ANALYSIS else {"a"})


@for_each("bias", [NO_ANALYSIS, SHORT_ANALYSIS])
def test_harmony_schema_holds_the_final_channel(channels, bias):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOOLEAN}}
    done = given(channels, response_format=form, logit_bias=bias)
    assert isinstance(json.loads(done["message"]["content"])["x"], bool)
    assert set(done["message"].get("reasoning_content", "")) == (set() if bias is NO_ANALYSIS else {"a"})


@for_each("skips", [True, False])
def test_harmony_markers_are_shown_only_when_special_tokens_are(channels, skips):
    word = {"structured_outputs": {"grammar": f'start: <[{259 + TOKENS.index("<|message|>")}]> "a"'}}
    done = given(channels, **word, skip_special_tokens=skips)
    assert done["message"]["content"] == ("a" if skips else "<|message|>a")
    rule = {"structured_outputs": {"choice": ["b"]}, "logit_bias": NO_ANALYSIS}
    done = given(channels, **rule, skip_special_tokens=skips)
    assert done["message"]["content"] == "b"


KIMI_TEMPLATE = TEMPLATE.replace("<tool_call>", "<|tool_calls_section_begin|>")


def test_kimi_k2_calls_keep_the_ids_of_the_model():
    section = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    with app_client(chat_template=ChatTemplate(KIMI_TEMPLATE, "fake", {}), max_model_len=2048) as client:
        done = given(client, messages=user(said(f"Hm {section}")), tools=TOOLS)
        assert done["message"]["content"] == "Hm"
        assert [call["id"] for call in done["message"]["tool_calls"]] == ["functions.now:3"]
        # Some models leave </think> out before a section.
        done = given(client, messages=user(said(f"<think>hm\n{section}")), tools=TOOLS)
        assert done["message"]["reasoning_content"] == "hm"
        assert [call["id"] for call in done["message"]["tool_calls"]] == ["functions.now:3"]
        body = {"messages": user(said(section)), "tools": TOOLS, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert not any(delta.get("content") for delta in deltas)
        assert [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call] == [
            "functions.now:3"
        ]
        body = {"input": said(section), "tools": [{"type": "function", "name": "now", "parameters": None}]}
        response = client.post("/v1/responses", json=body).json()
        assert [item["call_id"] for item in response["output"]] == ["functions.now:3"]


SCHEMAS = {"type": "object", "title": "mine"}


@for_each(
    "fields, form, rule",
    [
        ({}, None, None),
        ({"structured_outputs": {}}, None, None),
        ({"structured_outputs": {"json_object": False}}, None, None),
        ({"structured_outputs": {"json_object": True}}, None, ("structured_outputs", {"json_object": True})),
        ({"structured_outputs": {"json": SCHEMAS}}, None, ("structured_outputs", {"json": SCHEMAS})),
        ({"structured_outputs": {"regex": "a"}}, None, ("structured_outputs", {"regex": "a"})),
        ({"structured_outputs": {"choice": ["a", "b"]}}, None, ("structured_outputs", {"choice": ["a", "b"]})),
        ({"structured_outputs": {"grammar": "start: x"}}, None, ("structured_outputs", {"grammar": "start: x"})),
        ({"guided_json": SCHEMAS}, None, ("guided_json", {"json": SCHEMAS})),
        ({"guided_regex": "a"}, None, ("guided_regex", {"regex": "a"})),
        ({"guided_choice": ["a", "b"]}, None, ("guided_choice", {"choice": ["a", "b"]})),
        ({"guided_grammar": "start: x"}, None, ("guided_grammar", {"grammar": "start: x"})),
        ({}, {"type": "text"}, None),
        ({}, {"type": "json_object"}, ("response_format", {"json_object": True})),
        ({}, {"type": "json_schema", "json_schema": {"name": "x"}}, ("response_format", {"json_object": True})),
        (
            {},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS}},
            ("response_format", {"json": SCHEMAS}),
        ),
    ],
)
def test_rule_of_each_field_is_the_same_form(fields, form, rule):
    body = {"prompt": "x", **fields, **({} if form is None else {"response_format": form})}
    given = parse(CompletionRequest, body)
    found = rule_of(given, given.response_format)
    assert (None if found is None else (found.param, found.value)) == rule
    assert found is None or found.made().kind in found.value


@for_each(
    "fields, reported",
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": True, "budget": 3}}, {"enable_thinking": True, "budget": 3}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_template_gets_thinking_and_other_options(client, rendered, fields, reported):
    rendered.clear()
    assert client.post("/v1/chat/completions", json={"messages": user(said("x")), **fields}).status_code == 200
    assert rendered[-1]["chat_template_kwargs"] == reported


@for_each(
    "fields, flags",
    [
        ({}, (True, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"add_generation_prompt": True, "continue_final_message": False}, (True, False)),
    ],
)
def test_chat_prompt_end_follows_the_request(client, rendered, fields, flags):
    rendered.clear()
    messages = [*user("x"), {"role": "assistant", "content": said("y")}]
    assert client.post("/v1/chat/completions", json={"messages": messages, **fields}).status_code == 200
    assert (rendered[-1]["add_generation_prompt"], rendered[-1]["continue_final_message"]) == flags


@for_each("choice, num_shown", [(None, 2), ("auto", 2), ("none", None)])
def test_chat_tool_choice_none_hides_the_tools(client, rendered, choice, num_shown):
    rendered.clear()
    body = {"messages": user(said("x")), "tools": TOOLS, "tool_choice": choice}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    tools = rendered[-1]["tools"]
    assert (None if tools is None else len(tools)) == num_shown

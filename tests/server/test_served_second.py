"""The second of everything: call, message, tool, stop string, choice, prompt, position, part, request on a connection."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.fakes import BOS, EOS, byte_tokenizer
from for_each import for_each
from holdfast.api.async_llm import AsyncLLM
from holdfast.request.outputs import CompletionDelta, Logprob
from holdfast.request.sampling_params import SamplingParams
from holdfast.server.bodies import parse
from holdfast.server.conversations import plain_message
from holdfast.server.fields import SamplingFields
from holdfast.server.logprobs import ChatLogprobWriter, CompletionLogprobWriter
from holdfast.server.responses import input_of, kept_item, messages_of
from holdfast.server.sampling import sampling_params
from holdfast.server.schemas import ResponseRequest
from holdfast.server.service import Service
from server.families import ALL, CHATS, Chat, Completions, Family, Messages, ask, events
from server.raw_server import SHORT, Running, connect, get, post, read_to_end, running, status_of, talk
from server.served import NAMES, app_client, make_served_engine, said, user

FIRST = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
SECOND = '<tool_call>{"name": "now", "arguments": {"b": [2]}}</tool_call>'
TOOLS = ("look", "now")
family_cases = for_each("family", CHATS)
ways = for_each("stream", [False, True])


def turns(text: str) -> list[tuple[str, str]]:
    return [("user", said(text))]


# Answers.


@family_cases
@ways
def test_answer_with_two_calls_has_both_and_its_text(client, family: Family, stream):
    """With the texts around them; the last call may end the answer."""
    tail = "" if stream else "3"
    text = f"<think>Why</think>One.{FIRST}Two.\n{SECOND}{tail}"
    choice = ask(client, family, family.body(turns(text), TOOLS), stream=stream).only
    assert [(call.name, call.arguments) for call in choice.calls] == [("look", {"a": 1}), ("now", {"b": [2]})]
    assert len({call.id for call in choice.calls}) == 2
    assert (choice.content, choice.reasoning, choice.reason) == (f"One.Two.{tail}", "Why", family.called)


@family_cases
@ways
@for_each("num_calls", [0, 1])
def test_answer_finish_reason_says_whether_it_calls(client, family: Family, stream, num_calls):
    choice = ask(client, family, family.body(turns(FIRST * num_calls or "x"), TOOLS), stream=stream).only
    assert (len(choice.calls), choice.reason) == (num_calls, family.called if num_calls else family.stopped)


@family_cases
@ways
def test_answer_cut_in_its_thoughts_keeps_them(client, family: Family, stream):
    body = family.body(turns("<think>abcdef</think>x"), max_tokens=len("<think>abc"))
    choice = ask(client, family, body, stream=stream).only
    assert (choice.content, choice.reasoning, choice.reason) == ("", "abc", family.cut)


@family_cases
@ways
def test_answer_cut_in_its_second_call_keeps_the_first(client, family: Family, stream):
    body = family.body(turns(FIRST + SECOND), TOOLS, max_tokens=len(FIRST) + len(SECOND) - 20)
    choice = ask(client, family, body, stream=stream).only
    assert choice.reason == family.cut
    assert (choice.calls[0].name, choice.calls[0].arguments) == ("look", {"a": 1})


@for_each("family", ALL)
@ways
def test_second_request_is_independent_of_the_first(client, family: Family, stream):
    """Two requests have their own text, calls, counts and id."""
    query = [turns("One. é"), turns("Another one.")]
    first, second, again = (ask(client, family, family.body(one), stream=stream) for one in (*query, query[0]))
    assert [one.only.content for one in (first, second, again)] == ["One. é", "Another one.", "One. é"]
    assert [one.usage[2] for one in (first, second, again)] == [8, 13, 8]
    assert first.usage[0] == again.usage[0] != second.usage[0]
    assert first.id != again.id or not first.id


@for_each("family", ALL)
@ways
@for_each("stops", [["zz", " th"], [" th", "zz"], [" thr", " th"]])
def test_second_stop_string_ends_the_answer(client, family: Family, stream, stops):
    reported = ask(client, family, family.body(turns("one two three"), stop=stops), stream=stream).only
    assert reported.content == "one two"
    if isinstance(family, Chat | Messages):
        assert (reported.reason, reported.stop) == ("stop" if isinstance(family, Chat) else "stop_sequence", " th")


@for_each("family", ALL)
@ways
def test_answer_carries_the_requested_name(client, family: Family, stream):
    for model in (None, *NAMES):
        body = {**family.body(turns("x")), "stream": stream, **({} if model is None else {"model": model})}
        text = client.post(family.path, json=body).text
        assert set(re.findall(r'"model": ?"([^"]+)"', text)) == {model or NAMES[0]}


def test_response_repeats_the_request(client):
    query: dict[str, Any] = {
        "instructions": "Be brief",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "safety_identifier": "safe",
        "temperature": 0.25,
        "top_p": 0.75,
        "user": "me",
        "top_logprobs": 2,
        "metadata": {"a": "b", "c": "d"},
        "tool_choice": "auto",
        "store": False,
    }
    tools = [{"type": "function", "name": name, "parameters": None} for name in TOOLS]
    body = {"input": said("x"), "tools": tools, "reasoning": {"effort": "low"}, **query}
    response = client.post("/v1/responses", json=body).json()
    assert {name: response[name] for name in query} == query
    assert [tool["name"] for tool in response["tools"]] == [*TOOLS]
    assert (response["reasoning"]["effort"], response["text"]) == ("low", {"format": {"type": "text"}})
    plain = client.post("/v1/responses", json={"input": said("x")}).json()
    assert (plain["parallel_tool_calls"], plain["tool_choice"], plain["store"]) == (True, "auto", True)
    assert (plain["temperature"], plain["top_p"], plain["top_logprobs"], plain["metadata"]) == (1.0, 1.0, 0, {})


# Requests.


@family_cases
def test_second_message_of_each_role_reaches_the_template(client, family: Family, rendered):
    rendered.clear()
    said_by = [("system", "s1"), ("user", "u1"), ("assistant", "a1"), ("system", "s2"), ("user", "u2")]
    said_by += [("assistant", "a2"), ("user", said("x"))]
    ask(client, family, family.body(said_by, TOOLS), stream=False)
    [seen] = rendered
    assert [(message["role"], message["content"]) for message in seen["messages"]] == said_by
    assert [tool["function"]["name"] for tool in seen["tools"]] == [*TOOLS]


@for_each(
    "path, messages, kind",
    [
        ("/v1/chat/completions", "messages", "text"),
        ("/v1/responses", "input", "input_text"),
        ("/v1/messages", "messages", "text"),
    ],
)
def test_second_part_of_a_message_reaches_the_template(client, rendered, path, messages, kind):
    rendered.clear()
    parts = [{"type": kind, "text": text} for text in ("one", "two", said("x"))]
    more = {"max_tokens": 9} if path != "/v1/responses" else {}
    assert client.post(path, json={messages: [{"role": "user", "content": parts}], **more}).status_code == 200
    [content] = [message["content"] for message in rendered[0]["messages"]]
    texts = content.split("\n") if isinstance(content, str) else [part["text"] for part in content]
    assert texts == ["one", "two", said("x")]


def calls_in(messages: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    found = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            found.append((call["id"], call["function"]["name"], json.loads(given) if isinstance(given, str) else given))
        if message["role"] == "tool":
            found.append((message["tool_call_id"], "", message["content"]))
    return found


CALLED = (("a", "look", {"city": "Rome"}), ("b", "now", {}))
ANSWERED = (("a", "rain"), ("b", "noon"))
CALL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": own, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                    for own, name, given in CALLED
                ],
            },
            *({"role": "tool", "tool_call_id": own, "content": text} for own, text in ANSWERED),
            *user(said("x")),
        ]
    },
    "/v1/responses": {
        "input": [
            *(
                {"type": "function_call", "call_id": own, "name": name, "arguments": json.dumps(given)}
                for own, name, given in CALLED
            ),
            *({"type": "function_call_output", "call_id": own, "output": text} for own, text in ANSWERED),
            *user(said("x")),
        ]
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": own, "name": name, "input": given} for own, name, given in CALLED
                ],
            },
            {
                "role": "user",
                "content": [
                    *({"type": "tool_result", "tool_use_id": own, "content": text} for own, text in ANSWERED),
                    {"type": "text", "text": said("x")},
                ],
            },
        ],
    },
    "/api/chat": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": own, "function": {"name": name, "arguments": given}} for own, name, given in CALLED
                ],
            },
            *({"role": "tool", "tool_call_id": own, "content": text} for own, text in ANSWERED),
            *user(said("x")),
        ]
    },
}


@for_each("path", CALL_BODIES)
def test_second_call_and_result_reach_the_template(client, rendered, path):
    rendered.clear()
    assert client.post(path, json=CALL_BODIES[path]).status_code == 200
    [seen] = rendered
    assert calls_in(seen["messages"]) == [*CALLED, *((own, "", text) for own, text in ANSWERED)]
    assert [message["role"] for message in seen["messages"]] == ["assistant", "tool", "tool", "user"]


@for_each(
    "path, choice",
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "now"}}),
        ("/v1/responses", {"type": "function", "name": "now"}),
        ("/v1/messages", {"type": "tool", "name": "now"}),
    ],
)
def test_second_tool_is_the_one_that_is_forced(client, held, path, choice):
    held.clear()
    family = next(one for one in CHATS if one.path == path)
    ask(client, family, {**family.body(turns(SECOND), TOOLS), "tool_choice": choice}, stream=False)
    assert "now" in held[-1].structured_outputs.grammar
    assert "look" not in held[-1].structured_outputs.grammar


def test_max_completion_tokens_wins_over_the_older_name(client, rendered):
    for limits, expected in (({"max_tokens": 3}, 3), ({"max_tokens": 3, "max_completion_tokens": 2}, 2), ({}, None)):
        assert client.post(Chat.path, json={"messages": user(said("abc")), **limits}).status_code == 200
        assert rendered[-1]["params"].max_tokens == expected


def test_items_of_a_response_become_the_same_turns():
    """Two answers stay two; what belongs to one answer is one message."""
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in ("r1", "r2")]},
        {"role": "assistant", "content": "a1"},
        {"role": "assistant", "content": [{"type": "output_text", "text": text} for text in ("a2", "a3")]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"role": "assistant", "content": "a4"},
        {"role": "developer", "content": "d"},
        {"type": "function_call", "call_id": "c3", "name": "now", "arguments": "{}"},
        {"role": "user", "content": "u"},
    ]
    query = parse(ResponseRequest, {"input": items, "instructions": "s"})
    messages = [plain_message(message, "") for message in messages_of(query)]

    def texts(content: Any) -> Any:
        return [part["text"] for part in content] if isinstance(content, list) else content

    assert [(one["role"], texts(one.get("content"))) for one in messages] == [
        *(("system", "s"), ("assistant", "a1"), ("assistant", ["a2", "a3"]), ("assistant", "a4")),
        *(("system", "d"), ("assistant", None), ("user", "u")),
    ]
    assert messages[1]["reasoning_content"] == "r1\nr2"
    calls = [[call["id"] for call in one.get("tool_calls", ())] for one in messages]
    assert calls == [[], [], ["c1", "c2"], [], [], ["c3"], []]
    kept = [kept_item(item) for item in input_of(query)]
    assert len({item["id"] for item in kept}) == len(items)
    assert [part["text"] for part in kept[2]["content"]] == ["a2", "a3"]
    assert [part["text"] for part in kept[0]["content"]] == ["r1", "r2"]


@for_each("names_of_it", [("reasoning_content",), ("reasoning",)])
def test_thoughts_and_refusals_of_answers_reach_the_template(client, rendered, names_of_it):
    rendered.clear()
    answers = [
        {"role": "assistant", "content": "a", **dict.fromkeys(names_of_it, "why")},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    assert client.post(Chat.path, json={"messages": [*answers, *user(said("x"))]}).status_code == 200
    first, second, _ = rendered[-1]["messages"]
    assert (first["reasoning_content"], second["content"]) == ("why", "no")


GIVEN: dict[str, Any] = {
    "n": 3,
    "temperature": 0.25,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": -2,
    "stop": ["one", "two"],
    "stop_token_ids": [5, 6],
    "bad_words": ["bad", "worse"],
    "allowed_token_ids": [4, 5, 6, 7],
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 11,
    "priority": 4,
    "logit_bias": {"5": 1.5, "6": -2.5},
}


@pytest.fixture(scope="module")
def service(client) -> Service:
    return client.app.state.service


def test_sampling_params_take_every_field(service):
    made = sampling_params(service, SamplingFields(**GIVEN), max_tokens=9, logprobs=3)
    expected = GIVEN | {"seed": 2**64 - 2, "logit_bias": {5: 1.5, 6: -2.5}, "max_tokens": 9, "logprobs": 3}
    assert made == SamplingParams(**expected)


@for_each("name", GIVEN)
def test_sampling_params_take_each_field_alone(service, name):
    """A field that is left out keeps the model's advice, or its default."""
    made = sampling_params(service, SamplingFields(**{name: GIVEN[name]}), max_tokens=9, logprobs=None)
    others = SamplingParams(**{**service.advised, "max_tokens": 9})
    differing = {one for one in SamplingParams.__dataclass_fields__ if getattr(made, one) != getattr(others, one)}
    assert differing == {name}


@for_each(
    "fields, param",
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_second_rule_or_limit_that_cannot_be_is_named(client, fields, param):
    answer = client.post("/v1/completions", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_sampling_params_with_top_p_zero_keep_one_token(service):
    assert 0 < sampling_params(service, SamplingFields(top_p=0), max_tokens=1, logprobs=None).top_p <= 1e-6


# Several completions and prompts.


def sampled(family: Chat, **more: Any) -> dict[str, Any]:
    """Completions that differ."""
    return {**family.body([("user", "Hello")], max_tokens=6), "seed": 7, "n": 3, **more}


@for_each("family", [Chat(), Completions()])
def test_stream_choices_equal_those_of_a_whole_answer(client, family: Chat):
    whole = ask(client, family, sampled(family), stream=False)
    streamed = ask(client, family, sampled(family), stream=True)
    assert streamed.choices == whole.choices
    assert len({choice.content for choice in whole.choices}) == 3
    assert [choice.reason for choice in whole.choices] == ["length"] * 3


@ways
def test_second_prompt_has_its_own_choices(client, stream):
    body = {"prompt": [said("abc"), said("de"), said("fgh")], "n": 2, "max_tokens": 8, "temperature": 0}
    reported = ask(client, Completions(), body, stream=stream)
    assert [choice.content for choice in reported.choices] == ["abc", "abc", "de", "de", "fgh", "fgh"]
    assert reported.usage == (5 + 4 + 5, 0, 2 * (4 + 3 + 4))


@ways
def test_second_prompt_of_token_ids_is_echoed(client, stream):
    prompts = [list(said("ab").encode()), list(said("é").encode())]
    reported = ask(client, Completions(), {"prompt": prompts, "echo": True}, stream=stream)
    assert [choice.content for choice in reported.choices] == [said("ab") + "ab", said("é") + "é"]


@ways
def test_second_prompt_that_is_wrong_is_named(client, stream):
    before = client.app.state.service.llm.stats().num_requests
    answer = client.post("/v1/completions", json={"prompt": ["a", "x" * 2000, "b"], "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt[1]")
    assert client.app.state.service.llm.stats().num_requests == before


# Log-probabilities: a function of token and position (engine.fakes.logprobs_at).


def expected_logprobs(
    text: str, num_prompt_tokens: int, num_top: int
) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Token, its number, and the most likely ones, for each position of an answer."""
    return [
        (
            token,
            -0.75 - position,
            [(token + 2 - place, -0.25 * (place + 1) - position) for place in range(num_top)],
        )
        for position, token in enumerate([*text.encode(), EOS], num_prompt_tokens)
    ]


SPECIAL = ("<bos>", "<eos>", "<end>", "<pad>")


def written_logprobs(entries: list[dict[str, Any]]) -> list[tuple[int, float, list[tuple[int, float]]]]:
    def token(entry: dict[str, Any]) -> int:
        return entry["bytes"][0] if len(entry["bytes"]) == 1 else BOS + SPECIAL.index(entry["token"])

    return [
        (token(entry), entry["logprob"], [(token(one), one["logprob"]) for one in entry["top_logprobs"]])
        for entry in entries
    ]


LOGPROB_ASKS = {
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
    "/v1/responses": {"top_logprobs": 2},
    "/api/chat": {"logprobs": True, "top_logprobs": 2},
}


@for_each("path", LOGPROB_ASKS)
@ways
def test_logprobs_belong_to_their_own_position(client, path, stream):
    family = next(one for one in CHATS if one.path == path)
    body = {**family.body(turns("aé bc")), **LOGPROB_ASKS[path], "stream": stream}
    answer = client.post(path, json=body)
    if path == "/api/chat":
        lines = [json.loads(line) for line in answer.text.split("\n") if line]
        entries = [entry for line in lines for entry in line.get("logprobs", ())]
        count = lines[-1]["prompt_eval_count"]
    elif path == "/v1/responses":
        response = events(answer.text)[-1]["response"] if stream else answer.json()
        entries, count = response["output"][0]["content"][0]["logprobs"], response["usage"]["input_tokens"]
        if stream:
            reported = [event for event in events(answer.text) if event["type"] == "response.output_text.delta"]
            streamed = [entry for event in reported for entry in event["logprobs"]]
            assert streamed == entries[: max(len(streamed), len("aé bc".encode()))]  # the end token may come later
    elif stream:
        found = [one["logprobs"] for chunk in events(answer.text) for one in chunk["choices"]]
        entries = [entry for one in found if one for entry in one["content"]]
        count = client.post(path, json={**body, "stream": False}).json()["usage"]["prompt_tokens"]
    else:
        entries, count = answer.json()["choices"][0]["logprobs"]["content"], answer.json()["usage"]["prompt_tokens"]
    assert written_logprobs(entries) == expected_logprobs("aé bc", count, 2)


@ways
@for_each("n", [1, 2])
def test_completion_logprobs_belong_to_their_own_position(client, stream, n):
    """Log-probabilities of each choice of each prompt; with echo those of the prompt come first."""
    texts = ["ab", "xyz"]
    body = {"prompt": [said(text) for text in texts], "echo": True, "logprobs": 1, "n": n, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    found: dict[int, dict[str, list[Any]]] = {}
    for chunk in events(answer.text) if stream else [answer.json()]:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    assert sorted(found) == list(range(2 * n))
    for index, own in found.items():
        text = texts[index // n]
        tokens = [*said(text), *text, "<eos>"]
        assert own["tokens"] == tokens
        assert own["token_logprobs"] == [None, *(-0.75 - place for place in range(1, len(tokens)))]
        assert own["text_offset"] == list(range(len(tokens)))
        second = chr(ord(tokens[1]) + 2)
        assert own["top_logprobs"][1] == {tokens[1]: -1.75, second: -1.25}


@ways
def test_response_logprobs_are_those_of_its_messages(client, stream):
    """Neither of thoughts nor of calls; the second message has its own."""
    text = "<think>ab</think>cd" + FIRST + "ef"
    body = {"input": said(text), "tools": [{"type": "function", "name": "look", "parameters": None}], "top_logprobs": 0}
    answer = client.post("/v1/responses", json={**body, "stream": stream})
    response = events(answer.text)[-1]["response"] if stream else answer.json()
    reported = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    assert [part["text"] for part in reported] == ["cd", "ef"]
    tokens = ["".join(entry["token"] for entry in part["logprobs"]) for part in reported]
    assert tokens[0] == "cd" or (tokens[0].startswith("cd") and "ab" not in tokens[0])
    # Whose the tokens beside a call are depends on how many come at once.
    tail = tokens[1].replace("<eos>", "")
    assert tail.endswith("ef") or "ef".endswith(tail)
    assert "cd" not in tail


@for_each("num_tokens", [3, 100])
@ways
def test_response_that_is_cut_says_so_everywhere(client, num_tokens, stream):
    answer = client.post(
        "/v1/responses", json={"input": said("abcde"), "max_output_tokens": num_tokens, "stream": stream}
    )
    response = events(answer.text)[-1]["response"] if stream else answer.json()
    status = "incomplete" if num_tokens == 3 else "completed"
    assert (response["status"], response["output"][-1]["status"]) == (status, status)
    assert (response["completed_at"] is None) == (response["incomplete_details"] is not None) == (num_tokens == 3)


def scripted(monkeypatch: pytest.MonkeyPatch, *batches: list[CompletionDelta]) -> None:
    """Answers in this order, whatever the request."""

    async def answer(llm: Any, prepared: Any, request_id: Any = None) -> Any:
        for batch in ([], *batches):
            yield batch

    monkeypatch.setattr(AsyncLLM, "answer", answer)


@for_each("family", ALL)
@ways
@for_each("reason, status", [("abort", 503), ("error", 500)])
def test_broken_answer_is_never_sent_as_complete(client, monkeypatch, family: Family, stream, reason, status):
    """After its first token; the stream ends with the error, and none of the usual last events comes."""
    scripted(
        monkeypatch,
        [CompletionDelta("r", 0, "x", (120,), None, None, None)],
        [CompletionDelta("r", 0, "", (), None, reason, None, error="a number was none")],
    )
    answer = client.post(family.path, json={**family.body([("user", "Hello")]), "stream": stream})
    assert answer.status_code == (200 if stream else status)
    if not stream:
        return
    last = [line for line in answer.text.split("\n") if line][-1]
    assert "error" in json.loads(last.removeprefix("data: "))
    ends = ("[DONE]", "message_stop", "response.completed", '"done":true', '"finish_reason":"')
    assert not any(end in answer.text for end in ends)


def test_later_choice_waits_for_the_logprobs_of_the_prompt(client, monkeypatch):
    """The first completion computes them, and another may be faster."""
    prompt = (None, {98: Logprob(-1.0, 1, "b")})
    own = ({99: Logprob(-2.0, 1, "c")},)
    scripted(
        monkeypatch,
        [CompletionDelta("r", 1, "c", (99,), own, None, None)],
        [CompletionDelta("r", 1, "", (), (), "length", None)],
        [CompletionDelta("r", 0, "c", (99,), own, "length", None, prompt_logprobs=prompt)],
    )
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "n": 2, "stream": True}
    chunks = events(client.post("/v1/completions", json=body).text)
    found: dict[int, list[Any]] = {0: [], 1: []}
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        found[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert found == {0: ["a", "b", "c"], 1: ["a", "b", "c"]}


def test_logprob_writers_bound_and_merge_their_numbers():
    """JSON has no infinity; of two tokens with the same text the more likely one counts."""
    tokenizer = byte_tokenizer()
    position = {
        97: Logprob(float("-inf"), 9, "a"),
        0xE9: Logprob(-1.0, 1, "\ufffd"),
        0xEA: Logprob(-2.0, 2, "\ufffd"),
    }
    [entry] = ChatLogprobWriter(tokenizer, 2).entries([97], [position])
    assert (entry["logprob"], [one["logprob"] for one in entry["top_logprobs"]]) == (-9999.0, [-1.0, -2.0])
    reported = CompletionLogprobWriter(tokenizer, 2).entries([97], [position])
    assert (reported["token_logprobs"], reported["top_logprobs"]) == ([-9999.0], [{"a": -9999.0, "\ufffd": -1.0}])


OFFSET_TEXTS = {
    "ascii": "abc",
    "two bytes": "aéb",
    "three bytes": "世界!",
    "beyond the first plane": "a😀b😀",
    "combining": "e\u0301x",
}


@for_each("text", OFFSET_TEXTS.values())
@for_each("echo", [False, True])
@ways
def test_text_offsets_count_characters_of_the_text(client, text, echo, stream):
    """As code points: what follows an offset in the text is what the token and those after it say."""
    body = {"prompt": said(text), "logprobs": 0, "echo": echo, "stream": stream, "max_tokens": 100}
    answer = client.post("/v1/completions", json=body)
    choices = [one["choices"][0] for one in (events(answer.text) if stream else [answer.json()])]
    whole = "".join(choice["text"] for choice in choices)
    offsets = [offset for choice in choices for offset in (choice["logprobs"] or {"text_offset": ()})["text_offset"]]
    assert whole == (said(text) if echo else "") + text
    data = whole.encode()
    # The place of a byte's character; the end token stands after the last.
    assert offsets == [
        len(data[: place + 1].decode(errors="ignore")) - _ends(data, place) for place in range(len(data))
    ] + [len(whole)]


def _ends(data: bytes, place: int) -> int:
    """1 if this byte ends a character."""
    try:
        data[: place + 1].decode()
    except UnicodeDecodeError:
        return 0
    return 1


# Connections.


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


BODY = b'{"a":1}'
NEXT = get("/health")
LONG = "X-Long: " + "a" * (SHORT.max_header_bytes // 2)
CHUNKED = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"a":"' + b"x" * 9000 + b'"}') + b"0\r\n\r\n"
PAIRS = {
    "sound": post("/echo", BODY, "Content-Length: 7", close=False),
    "no JSON": post("/echo", b"nothing", "Content-Length: 7", close=False),
    "no endpoint": post("/nothing", BODY, "Content-Length: 7", close=False),
    "no method": post("/health", BODY, "Content-Length: 7", close=False),
    "no media type": b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\n" + BODY,
    "long headers": get("/health", LONG, close=False) + get("/health", LONG, close=False),
    "many headers": get("/health", *["X: a"] * 100, close=False) + get("/health", *["X: a"] * 100, close=False),
    "long bodies": post("/echo", b" " * 60_000 + b"{}", "Content-Length: 60002", close=False) * 2,
    "small chunks": post("/echo", CHUNKED, "Transfer-Encoding: chunked", close=False) * 2,
    "a stream": get("/stream?count=2&seconds=0", close=False) * 2,
    "a fault of ours": get("/boom", close=False),
    "trailers": post("/echo", b"7\r\n" + BODY + b"\r\n0\r\nX: a\r\n\r\n", "Transfer-Encoding: chunked", close=False)
    * 2,
}


@for_each("name", PAIRS)
@for_each("pause", [False, True])
def test_request_after_another_is_answered(server: Running, name, pause):
    """What the first needed is not taken from the second: bytes, headers, time, state."""
    first = PAIRS[name]
    answer = _in_turn(server, first) if pause else talk(server.port, first + NEXT)
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses[-1] == 200
    assert answer.endswith(b"ok")
    assert len(statuses) == first.count(b" HTTP/1.1\r\n") + 1
    assert statuses[:-1] == [statuses[0]] * (len(statuses) - 1)


def _in_turn(server: Running, first: bytes) -> bytes:
    with connect(server.port) as connection:
        connection.sendall(first)
        answer = b""
        while answer.count(b"HTTP/1.1 ") < first.count(b" HTTP/1.1\r\n"):
            answer += connection.recv(2**20)
        connection.sendall(NEXT)
        return answer + read_to_end(connection)


def test_request_after_a_refused_one_is_not_answered(server: Running):
    """A refusal of the connection itself ends it."""
    answer = talk(server.port, b"GET /health HTTP/1.1\r\nX: a\x00\r\n\r\n" + NEXT)
    assert status_of(answer) == 400
    assert b"200 OK" not in answer


def test_second_list_of_prompts_fills_the_whole_queue_again():
    """Each request may use the whole queue of three."""
    with app_client(make_served_engine(max_queue=3, max_num_seqs=3)) as client:
        for _ in range(3):
            reported = ask(client, Completions(), {"prompt": [said("a"), said("b"), said("c")]}, stream=False)
            assert [choice.content for choice in reported.choices] == ["a", "b", "c"]

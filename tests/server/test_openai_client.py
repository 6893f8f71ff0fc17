"""OpenAI's own client against a server: chats, streams, tools, reasoning, log-probabilities, completions, responses."""

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from server.served import MODEL, NAMES, Served, open_tiny_engine, said, served, user

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def api(server: Served):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models_are_listed_and_retrieved(api):
    assert tuple(model.id for model in api.models.list()) == NAMES
    card = api.models.retrieve("alias/model")
    assert (card.id, card.model_extra["max_model_len"]) == ("alias/model", 1024)
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert "fake, alias/model" in caught.value.message


def test_chat_completion_has_text_reason_and_usage(api):
    done = api.chat.completions.create(model=MODEL, messages=user(said("Grüß Gott, 世界")), temperature=0)
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Grüß Gott, 世界", "stop")
    assert done.model == MODEL
    assert done.usage.completion_tokens == len("Grüß Gott, 世界".encode()) + 1
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens >= 0


def test_chat_completions_with_a_seed_repeat(api):
    given = {"model": MODEL, "messages": user("Hello"), "max_tokens": 6, "n": 3, "seed": 7}
    first = api.chat.completions.create(**given)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in first.choices] == ["length"] * 3
    assert len(set(texts)) == 3
    again = api.chat.completions.create(**{**given, "stream": True})
    streamed = ["", "", ""]
    for chunk in again:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert first.usage.completion_tokens == 18


def test_chat_stream_chunks_add_up_to_the_answer(api):
    chunks = list(
        api.chat.completions.create(
            model="alias/model", messages=user(said("abc")), stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "abc"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 4
    assert {chunk.model for chunk in chunks} == {"alias/model"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stop_and_logit_bias_apply(api):
    done = api.chat.completions.create(model=MODEL, messages=user(said("one two three")), stop=[" th", "zz"])
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("one two", "stop")
    assert done.choices[0].model_extra["stop_reason"] == " th"
    done = api.chat.completions.create(
        model=MODEL,
        messages=user(said("abc")),
        logit_bias={"65": 1},
        presence_penalty=0.5,
        frequency_penalty=-1,
        top_p=0,
        max_completion_tokens=2,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 1},
    )
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("ab", "length")


def test_log_probabilities(api):
    given = {"model": MODEL, "messages": user(said("aé")), "logprobs": True, "top_logprobs": 2}
    whole = api.chat.completions.create(**given).choices[0].logprobs.content
    assert [entry.token for entry in whole] == ["a", "�", "�", "<eos>"]
    assert [bytes(entry.bytes) for entry in whole[:3]] == [b"a", b"\xc3", b"\xa9"]
    assert all(len(entry.top_logprobs) == 2 for entry in whole)
    streamed = []
    for chunk in api.chat.completions.create(**given, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == whole


def test_chat_tool_call_and_result_round_trip(api):
    given = {"model": MODEL, "messages": user(said(f"Let me see. {CALL}")), "tools": TOOLS}
    choice = api.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    call = choice.message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    after = [
        *given["messages"],
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        *user(said("It rains.")),
    ]
    done = api.chat.completions.create(model=MODEL, messages=after, tools=TOOLS)
    assert done.choices[0].message.content == "It rains."


def test_chat_stream_tool_call_comes_in_pieces(api):
    content, name, arguments, ids, reason = "", "", "", set(), None
    stream = api.chat.completions.create(
        model=MODEL, messages=user(said(f"Hm. {CALL}\n{CALL}")), tools=TOOLS, stream=True, parallel_tool_calls=False
    )
    num_pieces = 0
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            num_pieces += 1
            ids |= {call.id} if call.id else set()
    assert (content, name, reason) == ("Hm.", "look", "tool_calls")
    assert json.loads(arguments) == {"city": "Rome"}
    assert len(ids) == 1
    assert num_pieces >= 2


def test_chat_tool_choice_none_returns_the_call_as_text(api):
    done = api.chat.completions.create(
        model=MODEL, messages=user(said(CALL)), tools=TOOLS, tool_choice="none", parallel_tool_calls=True
    )
    assert done.choices[0].message.content == CALL
    assert done.choices[0].message.tool_calls is None


def test_reasoning_is_split_off(api):
    given = {"model": MODEL, "messages": user(said("<think>2 and 2</think>\n\n4"))}
    done = api.chat.completions.create(**given)
    message = done.choices[0].message
    assert message.content == "4"
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "2 and 2"
    assert done.usage.completion_tokens_details.reasoning_tokens > 3
    reasoning = content = ""
    for chunk in api.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
    assert (reasoning, content) == ("2 and 2", "4")


def test_completions(api):
    done = api.completions.create(model=MODEL, prompt=[said("abc"), said("de")], n=2, max_tokens=8, temperature=0)
    assert [choice.text for choice in done.choices] == ["abc", "abc", "de", "de"]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    done = api.completions.create(model=MODEL, prompt=list(said("xy").encode()), echo=True, logprobs=1)
    choice = done.choices[0]
    assert choice.text == f"{said('xy')}xy"
    assert choice.logprobs.tokens == [*said("xyxy")[:1], "x", "y", "\x02", "x", "y", "<eos>"]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6]
    texts = {}
    for chunk in api.completions.create(model=MODEL, prompt=[said("abc"), said("de")], stream=True):
        for part in chunk.choices:
            texts[part.index] = texts.get(part.index, "") + part.text
    assert texts == {0: "abc", 1: "de"}


def test_openai_client_raises_the_error_class_of_the_status(api):
    for fields, kind, param in (
        ({"messages": user("x" * 4000)}, openai.BadRequestError, "messages"),
        ({"messages": user("x"), "model": "other"}, openai.NotFoundError, "model"),
        ({"messages": user("x"), "temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": user("x"), "extra_body": {"max_tokns": 1}}, openai.BadRequestError, "max_tokns"),
        ({"messages": user("x"), "extra_body": {"chat_template": "{{ 1 }}"}}, openai.BadRequestError, "chat_template"),
    ):
        with pytest.raises(kind) as caught:
            api.chat.completions.create(**{"model": MODEL, **fields})
        assert caught.value.param == param
    assert "Did you mean max_tokens" in str(_refused(api, max_tokns=1))
    assert _refused(api, messages=user("x" * 4000)).code == "context_length_exceeded"


def _refused(api, **fields):
    body = {"model": MODEL, "messages": user("x"), **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        api.post("/chat/completions", body=body, cast_to=object)
    return caught.value


def test_response_has_reasoning_message_and_usage(api):
    done = api.responses.create(
        model=MODEL, input=said("<think>Well.</think>Yes."), instructions="Be brief.", max_output_tokens=50
    )
    assert (done.status, done.output_text) == ("completed", "Yes.")
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text == "Well."
    assert done.usage.input_tokens > 10
    assert done.usage.output_tokens_details.reasoning_tokens > 0
    cut = api.responses.create(model=MODEL, input=said("A long answer"), max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "A lo")


def test_response_stream_events_come_in_order(api):
    with api.responses.stream(model=MODEL, input=said("<think>Well.</think>Yes."), top_logprobs=1) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "Yes."
    assert "".join(entry.token for entry in final.output[1].content[0].logprobs).startswith("Yes.")


def test_response_function_calls_and_outputs_round_trip(api):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    given = said(f"{CALL}{CALL}")
    first = api.responses.create(model=MODEL, input=given, tools=tools)
    assert [item.type for item in first.output] == ["function_call", "function_call"]
    call = first.output[0]
    assert (call.name, json.loads(call.arguments)) == ("look", {"city": "Rome"})
    items = [
        {"role": "user", "content": given},
        *first.output,
        *({"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": said("It rains.")}]},
    ]
    assert api.responses.create(model=MODEL, input=items, tools=tools).output_text == "It rains."
    with api.responses.stream(model=MODEL, input=given, tools=tools) as stream:
        events = list(stream)
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == 2 * '{"city": "Rome"}'


def test_response_with_unsupported_storage_is_refused(api):
    for fields in ({"conversation": "conv-1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(model=MODEL, input="x", **fields)
        assert caught.value.param == next(iter(fields))


def test_response_continues_the_previous_one(api):
    first = api.responses.create(model=MODEL, input=said("<think>Hm.</think>One."), instructions="Count.")
    assert (first.store, first.previous_response_id) == (True, None)
    second = api.responses.create(model=MODEL, input=said("Two."), previous_response_id=first.id)
    whole = [
        {"role": "user", "content": said("<think>Hm.</think>One.")},
        *first.output,
        {"role": "user", "content": said("Two.")},
    ]
    alone = api.responses.create(model=MODEL, input=whole, store=False)
    assert second.output_text == alone.output_text == "Two."
    assert second.usage.input_tokens == alone.usage.input_tokens
    assert second.previous_response_id == first.id
    with api.responses.stream(model=MODEL, input=said("Three."), previous_response_id=second.id) as stream:
        for event in stream:
            if event.type == "response.completed":
                assert api.responses.retrieve(event.response.id).output_text == "Three."
        third = stream.get_final_response()
    assert third.usage.input_tokens > second.usage.input_tokens


def test_response_continues_after_function_calls(api):
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    first = api.responses.create(model=MODEL, input=said(CALL), tools=tools)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": said("It rains.")}
    second = api.responses.create(model=MODEL, input=[output], tools=tools, previous_response_id=first.id)
    assert second.output_text == "It rains."
    items = api.responses.input_items.list(second.id, order="asc", limit=2)
    assert items.has_more
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert not api.responses.input_items.list(second.id, limit=3).has_more
    newest = next(iter(api.responses.input_items.list(second.id)))
    assert (newest.type, newest.call_id) == ("function_call_output", first.output[0].call_id)


def test_response_stored_is_read_until_deleted(api, server):
    made = api.responses.create(model=MODEL, input=said("Yes."), metadata={"a": "b"})
    read = api.responses.retrieve(made.id)
    assert read == made
    kept = server.service.responses
    kept.check()
    memory = api.get("http://" + server.url.partition("://")[2] + "/memory", cast_to=object)["responses"]
    assert memory == {"kept": len(kept), "bytes": kept.num_bytes, "limit_bytes": kept.limit_bytes}
    api.responses.delete(made.id)
    for gone in (
        lambda: api.responses.retrieve(made.id),
        lambda: api.responses.delete(made.id),
        lambda: api.responses.create(model=MODEL, input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            gone()
        assert "until newer ones need the space (64.00 MiB and 4096 responses)" in caught.value.message
    assert caught.value.param == "previous_response_id"


def test_response_with_store_false_is_not_kept(api, server):
    num_before = len(server.service.responses)
    made = api.responses.create(model=MODEL, input=said("Yes."), store=False)
    assert (made.store, len(server.service.responses)) == (False, num_before)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(made.id)


def test_chat_token_ids_equal_those_of_the_stream(api):
    given = {"model": MODEL, "messages": user(said(f"Hm. é {CALL}")), "tools": TOOLS, "temperature": 0}
    whole = api.chat.completions.create(**given, extra_body={"return_token_ids": True})
    ids = whole.choices[0].model_extra["token_ids"]
    assert bytes(ids[:-1]).decode() == f"Hm. é {CALL}"
    assert len(ids) == whole.usage.completion_tokens
    assert len(whole.model_extra["prompt_token_ids"]) == whole.usage.prompt_tokens
    chunks = list(api.chat.completions.create(**given, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]] == ids
    plain = api.chat.completions.create(**given)
    assert "prompt_token_ids" not in plain.model_extra
    assert "token_ids" not in plain.choices[0].model_extra


def test_completion_token_ids_equal_those_of_the_stream(api):
    given = {"model": MODEL, "prompt": [said("ab"), said("é")], "n": 2, "extra_body": {"return_token_ids": True}}
    whole = [choice.model_extra for choice in api.completions.create(**given).choices]
    assert [bytes(own["token_ids"][:-1]).decode() for own in whole] == ["ab", "ab", "é", "é"]
    assert [bytes(own["prompt_token_ids"]).decode() for own in whole] == [said("ab")] * 2 + [said("é")] * 2
    streamed = [{"prompt_token_ids": [], "token_ids": []} for _ in whole]
    for chunk in api.completions.create(**given, stream=True):
        for choice in chunk.choices:
            for name in streamed[choice.index]:
                streamed[choice.index][name] += choice.model_extra.get(name, [])
    assert streamed == whole


class City(BaseModel):
    """What answers of the tiny model are held to."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    hot: bool


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """The client of a real model, whose answers would make no sense."""
    with served(open_tiny_engine(tmp_path_factory.mktemp("tiny"))) as running:
        running.service.reasoning_parser = "none"
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client


def test_chat_response_format_holds_the_answer_to_its_schema(tiny):
    given = {"model": MODEL, "messages": user("A city"), "max_tokens": 100, "seed": 5}
    parsed = tiny.chat.completions.parse(**given, response_format=City).choices[0].message.parsed
    assert parsed.name in ("Rome", "Oslo")
    done = tiny.chat.completions.create(
        **given,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}},
        stream=True,
    )
    City.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in done))
    response = tiny.responses.parse(model=MODEL, input="A city", text_format=City, max_output_tokens=100)
    assert response.output_parsed.name in ("Rome", "Oslo")
    chosen = tiny.chat.completions.create(**given, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].message.content in ("yes", "no")
    matched = tiny.completions.create(model=MODEL, prompt="A", max_tokens=50, extra_body={"guided_regex": "[ab]{3}c"})
    assert re.fullmatch("[ab]{3}c", matched.choices[0].text)


def test_chat_invalid_constraint_names_its_field(tiny):
    for rule, param in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            tiny.chat.completions.create(model=MODEL, messages=user("x"), extra_body=rule)
        assert caught.value.param == param
